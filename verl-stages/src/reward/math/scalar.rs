//! Equality of expressions with numbers and variables.
//!
//! Numbers that are rational by their form are compared exactly. Others are evaluated with enough bits to separate two
//! different values of numbers of that length, and variables get fixed values, drawn from a hash of the two answers, so
//! that no answer can be fitted to them.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, Zero};
use sha2::{Digest, Sha256};

use super::complex::Complex;
use super::evaluate::{exact, value, weight};
use super::expr::{Expr, Function};
use super::real::{Real, Work};

/// Bits in which values must agree, beyond those that the numbers themselves need.
const AGREE: u64 = 192;
/// Bits that rounding may take.
const ROUNDING: u64 = 96;
/// Maximum number of bits of a value; an expression that needs more is undecided.
const MOST_BITS: u64 = 1 << 14;
/// Maximum cost of one comparison (products of two limbs).
const FUEL: u64 = 300_000_000;
/// Ranges of the values of variables: `start + width · u` for u in (0, 1).
const RANGES: [(i64, i64); 4] = [(0, 1), (1, 3), (-1, 1), (-4, 3)];
/// Decimals in which a decimal number must agree with what it rounds.
const DECIMALS: u32 = 6;

/// A comparison of two answers: its remaining fuel, and the seed of the values of variables.
pub(super) struct Comparison {
    seed: [u8; 32],
    fuel: std::cell::Cell<u64>,
}

impl Comparison {
    pub(super) fn new(reference: &str, response: &str) -> Comparison {
        let mut hash = Sha256::new();
        for text in [reference, response] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        Comparison {
            seed: hash.finalize().into(),
            fuel: FUEL.into(),
        }
    }

    /// Runs `inner` with a precision of `bits`, and charges its cost to this comparison.
    fn with<T>(
        &self,
        bits: u64,
        inner: impl FnOnce(&Work) -> Option<T>,
    ) -> Option<(T, (i64, i64))> {
        let work = Work::new(bits, self.fuel.get());
        let result = inner(&work);
        self.fuel.set(work.fuel());
        result.map(|result| (result, work.reach.get()))
    }

    /// The value of variable `name`, the `index`th of a comparison, at point `point`.
    ///
    /// Within `RANGES[(point + index) % 4]`; if factorials require integers, an integer from 5 on, such that later variables
    /// are larger at one point and smaller at the next.
    fn sample(
        &self,
        name: &str,
        index: usize,
        point: usize,
        integers: bool,
        work: &Work,
    ) -> Option<Real> {
        let mut hash = Sha256::new();
        hash.update(self.seed);
        hash.update([point as u8]);
        hash.update(name);
        let hash = hash.finalize();
        if integers {
            let hundreds = if point.is_multiple_of(2) {
                index
            } else {
                3usize.saturating_sub(index)
            };
            let within = i64::from(u16::from_le_bytes([hash[0], hash[1]]) % 100);
            return Some(work.integer(5 + 100 * i64::try_from(hundreds).ok()? + within));
        }
        let unit = BigRational::new(
            BigInt::from_bytes_le(num_bigint::Sign::Plus, &hash[..12]) | BigInt::from(1),
            BigInt::from(1) << 96,
        );
        let (start, width) = RANGES[(point + index) % RANGES.len()];
        work.rational(&(unit * BigInt::from(width) + BigInt::from(start)))
    }

    /// The values of all variables at a point.
    fn samples<'n>(
        &self,
        names: &[&'n str],
        point: usize,
        integers: bool,
        work: &Work,
    ) -> Option<Vec<(&'n str, Real)>> {
        let value = |(index, name): (usize, &&'n str)| {
            Some((*name, self.sample(name, index, point, integers, work)?))
        };
        names.iter().enumerate().map(value).collect()
    }

    /// Whether two scalars are equal: the same number, or the same function of their variables.
    pub(super) fn equal(&self, a: &Expr, b: &Expr) -> bool {
        if a == b {
            return true;
        }
        if let (Expr::Based { base: left, .. }, Expr::Based { base: right, .. }) = (a, b)
            && left != right
        {
            return false;
        }
        if let (Some(a), Some(b)) = (infinity(a), infinity(b)) {
            return a == b;
        }
        match (exact(a), exact(b)) {
            (Some(left), Some(right)) => left == right || percent(a, b) || self.rounded(a, b),
            _ => self.same_value(a, b) || self.rounded(a, b),
        }
    }

    /// Whether the values are equal at all points where both are defined, and there is such a point.
    fn same_value(&self, a: &Expr, b: &Expr) -> bool {
        let mut names = Vec::new();
        a.symbols(&mut names);
        b.symbols(&mut names);
        names.sort_unstable();
        let points = if names.is_empty() { 1 } else { RANGES.len() };
        let mut agreed = false;
        for point in 0..points {
            match self.at_point(a, b, &names, point) {
                Some(true) => agreed = true,
                Some(false) => return false,
                None => {}
            }
        }
        agreed
    }

    fn at_point(&self, a: &Expr, b: &Expr, names: &[&str], point: usize) -> Option<bool> {
        let integers = needs_integers(a) || needs_integers(b);
        let mut bits = AGREE + ROUNDING + 2 * weight(a).checked_add(weight(b))?.min(MOST_BITS);
        // The second pass has more bits, by how far intermediate values are from 1 in magnitude.
        for last in [false, true] {
            if bits > MOST_BITS {
                return None;
            }
            let ((left, right), reach) = self.with(bits, |work| {
                let samples = self.samples(names, point, integers, work)?;
                Some((value(a, &samples, work)?, value(b, &samples, work)?))
            })?;
            let (high, low) = reach;
            let further = high.unsigned_abs().max(low.unsigned_abs());
            if last || further <= 32 {
                return Some(near(&left, &right, high - (bits - ROUNDING) as i64, bits));
            }
            bits = bits.checked_add(2 * further)?;
        }
        None
    }

    /// Whether one side is a decimal number that rounds the other: they agree in six decimals, and as far as both have
    /// significant digits.
    fn rounded(&self, a: &Expr, b: &Expr) -> bool {
        if !is_decimal(a) && !is_decimal(b) {
            return false;
        }
        let number = |expr: &Expr| -> Option<BigRational> {
            exact(expr).or_else(|| {
                let (value, _) = self.with(AGREE, |work| {
                    value(expr, &[], work).filter(Complex::is_real)
                })?;
                value.re.to_rational()
            })
        };
        let (Some(left), Some(right)) = (number(a), number(b)) else {
            return false;
        };
        if left.is_integer() || right.is_integer() {
            // Nothing rounds an integer.
            return left == right;
        }
        let places = BigInt::from(10).pow(DECIMALS);
        let round = |value: &BigRational| (value * &places).round();
        let significant =
            (&left - &right).abs() * BigInt::from(100_000) <= left.abs().max(right.abs());
        significant && round(&left) == round(&right)
    }

    /// Whether `a` is a constant multiple of `b`, and the sign of the constant.
    pub(super) fn ratio(&self, a: &Expr, b: &Expr) -> Option<bool> {
        let mut names = Vec::new();
        a.symbols(&mut names);
        b.symbols(&mut names);
        names.sort_unstable();
        let quotient = a.clone().quotient(b.clone());
        let bits = AGREE + ROUNDING + 2 * weight(&quotient).min(MOST_BITS / 4);
        let mut found: Option<Complex> = None;
        for point in 0..RANGES.len() {
            let Some((here, _)) = self.with(bits, |work| {
                let samples = self.samples(&names, point, false, work)?;
                value(&quotient, &samples, work)
            }) else {
                continue;
            };
            match &found {
                Some(before) if !near(before, &here, 32 - (bits - ROUNDING) as i64, bits) => {
                    return None;
                }
                Some(_) => {}
                None => found = Some(here),
            }
        }
        let constant = found.filter(|constant| constant.is_real() && constant.magnitude() > -64)?;
        Some(!constant.re.is_negative())
    }

    /// The real value of an expression without variables, approximated by a rational number.
    pub(super) fn number(&self, expr: &Expr) -> Option<BigRational> {
        exact(expr).or_else(|| {
            let (value, _) = self.with(2 * AGREE, |work| {
                value(expr, &[], work).filter(Complex::is_real)
            })?;
            value.re.to_rational()
        })
    }

    /// Whether two numbers are equal up to the rounding of [`number`](Self::number).
    pub(super) fn same_number(a: &BigRational, b: &BigRational) -> bool {
        let rounding = BigRational::new(BigInt::from(1), BigInt::from(1) << AGREE);
        a == b || (a - b).abs() <= rounding * (a.abs().max(b.abs()))
    }
}

/// Whether both parts differ by less than `2^noise`.
fn near(a: &Complex, b: &Complex, noise: i64, bits: u64) -> bool {
    let work = Work::new(bits, u64::MAX);
    let close = |a: &Real, b: &Real| work.sub(a, b).magnitude() < noise;
    close(&a.re, &b.re) && close(&a.im, &b.im)
}

/// Whether an infinity is the positive one; `None` for other expressions.
pub(super) fn infinity(expr: &Expr) -> Option<bool> {
    match expr {
        Expr::Infinity => Some(true),
        Expr::Negative(inner) => infinity(inner).map(|positive| !positive),
        _ => None,
    }
}

/// Whether a factorial or a binomial coefficient contains a variable.
fn needs_integers(expr: &Expr) -> bool {
    let own = matches!(
        expr,
        Expr::Call(Function::Factorial | Function::Binomial, _)
    );
    let mut names = Vec::new();
    if own {
        expr.symbols(&mut names);
    }
    !names.is_empty() || expr.parts().into_iter().any(needs_integers)
}

fn is_decimal(expr: &Expr) -> bool {
    match expr {
        Expr::Number { decimal, .. } => *decimal,
        Expr::Negative(inner) | Expr::Percent(inner) => is_decimal(inner),
        _ => false,
    }
}

/// `9%` also equals 9, as in Math-Verify, if both are integers.
fn percent(a: &Expr, b: &Expr) -> bool {
    let bare = |expr: &Expr| match expr {
        Expr::Percent(inner) => exact(inner),
        Expr::Negative(inner) => match &**inner {
            Expr::Percent(inner) => Some(-exact(inner)?),
            _ => None,
        },
        _ => None,
    };
    let whole = |value: &BigRational| value.is_integer() && !value.is_zero();
    match (bare(a), bare(b)) {
        (Some(bare), None) => whole(&bare) && exact(b) == Some(bare),
        (None, Some(bare)) => whole(&bare) && exact(a) == Some(bare),
        _ => false,
    }
}
