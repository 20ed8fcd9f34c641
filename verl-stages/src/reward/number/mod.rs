//! Numbers in answers: read as people write them, compared exactly.
//!
//! [`Number::read`] takes a short text that states one number (`**$1,234.50** per day.`) and nothing else; a text with
//! two numbers, a number that is negated or compared, or one that words multiply (`18 hundred`) is not a number. Numbers
//! are fractions of integers times powers of ten, so that no digit is lost and `1e999999999` costs nothing.

mod plain;
mod scan;
mod tail;
#[cfg(test)]
mod tests;

use num_bigint::BigInt;
use num_rational::BigRational;

/// Longest text that is searched for a number (bytes).
const LONGEST: usize = 4096;

/// A rational number.
#[derive(Debug, Clone)]
pub struct Number {
    top: Scaled,
    bottom: Scaled,
}

/// An integer times a power of ten. The integer does not end in 0, so that equal values have equal fields.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Scaled {
    integer: BigInt,
    exponent: i64,
}

impl Scaled {
    /// Decimal `digits` times ten to the `exponent`; `None` if the exponent overflows.
    fn new(digits: &str, exponent: i64) -> Option<Scaled> {
        let kept = digits.trim_end_matches('0');
        let zeros = i64::try_from(digits.len() - kept.len()).ok()?;
        match kept.trim_start_matches('0') {
            "" => Some(Scaled::zero()),
            kept => Some(Scaled {
                integer: kept.parse().ok()?,
                exponent: exponent.checked_add(zeros)?,
            }),
        }
    }

    fn zero() -> Scaled {
        Scaled {
            integer: BigInt::ZERO,
            exponent: 0,
        }
    }

    fn is_zero(&self) -> bool {
        self.integer == BigInt::ZERO
    }

    fn times(&self, other: &Scaled) -> Option<Scaled> {
        let product = &self.integer * &other.integer;
        let (sign, digits) = match product.to_string() {
            text if text.starts_with('-') => (-1, text[1..].to_owned()),
            text => (1, text),
        };
        let exponent = self.exponent.checked_add(other.exponent)?;
        let mut scaled = Scaled::new(&digits, exponent)?;
        scaled.integer *= sign;
        Some(scaled)
    }
}

impl Number {
    /// The only number that `text` states; `None` if it states none, several, or more than the number itself.
    ///
    /// Marks of emphasis, quotes, a full stop, currencies, units, `=`, `x =`, a label (`Answer:`), `\boxed{}`, `$…$` and
    /// `\text{}` around it do not matter, and a percent sign is a unit.
    ///
    /// ```
    /// use verl_stages::reward::number::Number;
    ///
    /// let eighteen = Number::read("18").unwrap();
    /// for text in ["18 eggs", "**$18.00** per day.", r"\boxed{18}", "= 18", "1.8e1", "36/2", "18%"] {
    ///     assert_eq!(Number::read(text).as_ref(), Some(&eighteen), "{text}");
    /// }
    /// for text in ["18 or 19", "not 18", "1 8", "18x", "18 hundred", "> 18", "1,8"] {
    ///     assert_ne!(Number::read(text).as_ref(), Some(&eighteen), "{text}");
    /// }
    /// ```
    pub fn read(text: &str) -> Option<Number> {
        if text.len() > LONGEST {
            return None;
        }
        let plain = plain::plain(text)?;
        let (negative, rest) = scan::before_number(&plain)?;
        let (mut number, rest) = scan::unsigned(rest)?;
        if !tail::is_unit(rest) {
            return None;
        }
        if negative {
            number.top.integer *= -1;
        }
        Some(number)
    }
}

impl Number {
    /// The number as a fraction; `None` if that takes powers of ten beyond `most`.
    pub(super) fn to_rational(&self, most: u32) -> Option<BigRational> {
        let ten = |exponent: i64| {
            let power = u32::try_from(exponent.unsigned_abs())
                .ok()
                .filter(|power| *power <= most)?;
            let power = BigRational::from_integer(BigInt::from(10).pow(power));
            Some(if exponent < 0 { power.recip() } else { power })
        };
        let value = |scaled: &Scaled| Some(ten(scaled.exponent)? * scaled.integer.clone());
        let bottom = value(&self.bottom)?;
        (bottom != BigRational::from_integer(BigInt::ZERO)).then_some(value(&self.top)? / bottom)
    }
}

impl PartialEq for Number {
    fn eq(&self, other: &Number) -> bool {
        let (left, right) = (self.top.times(&other.bottom), other.top.times(&self.bottom));
        left.is_some() && left == right
    }
}
