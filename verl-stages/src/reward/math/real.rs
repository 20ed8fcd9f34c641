//! Real numbers of many bits: `mantissa · 2^exponent`, truncated to the precision of a [`Work`].
//!
//! The series are plain Taylor series on a reduced argument. Every operation costs fuel, so that no answer takes long.

use std::cell::{Cell, OnceCell};
use std::cmp::Ordering;

use num_bigint::{BigInt, Sign};
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

/// Bits beyond the precision in which series are summed.
const GUARD: u64 = 32;
/// Largest binary exponent of an argument of `exp` and of the trigonometric functions.
const LARGEST_ARGUMENT: i64 = 20;

/// A real number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Real {
    mantissa: BigInt,
    exponent: i64,
}

impl Real {
    pub(super) fn zero() -> Real {
        Real {
            mantissa: BigInt::zero(),
            exponent: 0,
        }
    }

    pub(super) fn is_zero(&self) -> bool {
        self.mantissa.is_zero()
    }

    pub(super) fn is_negative(&self) -> bool {
        self.mantissa.is_negative()
    }

    pub(super) fn negated(&self) -> Real {
        Real {
            mantissa: -&self.mantissa,
            exponent: self.exponent,
        }
    }

    pub(super) fn abs(&self) -> Real {
        Real {
            mantissa: self.mantissa.abs(),
            exponent: self.exponent,
        }
    }

    /// The value times a power of two.
    pub(super) fn scaled(&self, power: i64) -> Real {
        Real {
            mantissa: self.mantissa.clone(),
            exponent: self.exponent + power,
        }
    }

    /// `e` where the value is in `[2^(e-1), 2^e)`; the smallest number for 0.
    pub(super) fn magnitude(&self) -> i64 {
        if self.is_zero() {
            return i64::MIN / 4;
        }
        self.exponent + self.mantissa.bits() as i64
    }

    /// The value as a fraction; `None` if it is too large or too small.
    pub(super) fn to_rational(&self) -> Option<BigRational> {
        if !self.is_zero() && self.magnitude().abs() > 1 << 12 {
            return None;
        }
        let power = BigInt::one() << self.exponent.unsigned_abs();
        Some(match self.exponent < 0 {
            true => BigRational::new(self.mantissa.clone(), power),
            false => BigRational::from_integer(&self.mantissa * power),
        })
    }

    /// `floor(self · 2^bits)`.
    fn fixed(&self, bits: u64) -> BigInt {
        let shift = self.exponent + bits as i64;
        if shift >= 0 {
            &self.mantissa << shift as u64
        } else {
            &self.mantissa >> (-shift) as u64
        }
    }
}

/// A precision, the remaining fuel, and the magnitudes seen so far.
pub(super) struct Work {
    /// Bits of every mantissa.
    pub(super) bits: u64,
    fuel: Cell<u64>,
    /// Largest and smallest magnitude of the results and of 1.
    pub(super) reach: Cell<(i64, i64)>,
    pi: OnceCell<Real>,
    ln2: OnceCell<Real>,
}

impl Work {
    pub(super) fn new(bits: u64, fuel: u64) -> Work {
        Work {
            bits,
            fuel: Cell::new(fuel),
            reach: Cell::new((0, 0)),
            pi: OnceCell::new(),
            ln2: OnceCell::new(),
        }
    }

    pub(super) fn fuel(&self) -> u64 {
        self.fuel.get()
    }

    /// Pays for `count` multiplications.
    pub(super) fn pay(&self, count: u64) -> Option<()> {
        let limbs = self.bits / 64 + 1;
        let cost = count.saturating_mul(limbs * limbs + 8);
        self.fuel.set(self.fuel.get().checked_sub(cost)?);
        Some(())
    }

    fn cut(&self, mantissa: BigInt, exponent: i64) -> Real {
        let excess = mantissa.bits().saturating_sub(self.bits);
        let real = Real {
            mantissa: mantissa >> excess,
            exponent: exponent + excess as i64,
        };
        if !real.is_zero() {
            let (high, low) = self.reach.get();
            self.reach
                .set((high.max(real.magnitude()), low.min(real.magnitude())));
        }
        real
    }

    pub(super) fn integer(&self, value: i64) -> Real {
        self.cut(value.into(), 0)
    }

    pub(super) fn rational(&self, value: &BigRational) -> Option<Real> {
        self.pay(4)?;
        let shift = self.bits + value.denom().bits();
        let mantissa = (value.numer() << shift) / value.denom();
        Some(self.cut(mantissa, -(shift as i64)))
    }

    pub(super) fn add(&self, a: &Real, b: &Real) -> Real {
        let (high, low) = if a.exponent >= b.exponent {
            (a, b)
        } else {
            (b, a)
        };
        if high.is_zero() {
            return low.clone();
        }
        if high.magnitude() - low.magnitude() > self.bits as i64 + 2 {
            return high.clone();
        }
        let shift = (high.exponent - low.exponent) as u64;
        if low.magnitude() - high.magnitude() > self.bits as i64 + 2 {
            return low.clone();
        }
        self.cut((&high.mantissa << shift) + &low.mantissa, low.exponent)
    }

    pub(super) fn sub(&self, a: &Real, b: &Real) -> Real {
        self.add(a, &b.negated())
    }

    pub(super) fn mul(&self, a: &Real, b: &Real) -> Real {
        self.cut(&a.mantissa * &b.mantissa, a.exponent + b.exponent)
    }

    /// `a / b`; `None` if `b` is 0.
    pub(super) fn div(&self, a: &Real, b: &Real) -> Option<Real> {
        if b.is_zero() {
            return None;
        }
        let shift = self.bits + b.mantissa.bits();
        let mantissa = (&a.mantissa << shift) / &b.mantissa;
        Some(self.cut(mantissa, a.exponent - b.exponent - shift as i64))
    }

    pub(super) fn compare(&self, a: &Real, b: &Real) -> Ordering {
        match self.sub(a, b).mantissa.sign() {
            Sign::Minus => Ordering::Less,
            Sign::NoSign => Ordering::Equal,
            Sign::Plus => Ordering::Greater,
        }
    }

    /// √a; `a` must not be negative.
    pub(super) fn sqrt(&self, a: &Real) -> Option<Real> {
        self.pay(4)?;
        let mut shift = 2 * self.bits;
        if (a.exponent - shift as i64) % 2 != 0 {
            shift += 1;
        }
        let root = (&a.mantissa << shift).sqrt();
        Some(self.cut(root, (a.exponent - shift as i64) / 2))
    }

    /// The nearest integer; `None` if it exceeds 63 bits.
    pub(super) fn nearest(&self, a: &Real) -> Option<i64> {
        let half = Real {
            mantissa: BigInt::one(),
            exponent: -1,
        };
        if a.magnitude() > 62 {
            return None;
        }
        self.add(a, &half).fixed(0).to_i64()
    }

    /// Sum of the series whose term `n` is term `n - 1` times `step(n)`, in fixed point.
    fn series(&self, first: BigInt, mut step: impl FnMut(BigInt, u64) -> BigInt) -> Option<BigInt> {
        let (mut sum, mut term) = (first.clone(), first);
        for n in 1.. {
            self.pay(1)?;
            term = step(term, n);
            if term.is_zero() || term == BigInt::from(-1) {
                return Some(sum);
            }
            sum += &term;
        }
        None
    }

    /// `Σ sign^k x^(2k+1) / (2k+1)`: the inverse tangent for −1, the inverse hyperbolic tangent for 1.
    fn inverse_series(&self, x: &Real, sign: i64) -> Option<Real> {
        let bits = self.bits + GUARD;
        let x = x.fixed(bits);
        let square = ((&x * &x) >> bits) * sign;
        let (mut power, mut sum) = (x.clone(), x);
        for n in 1u64.. {
            self.pay(1)?;
            power = (power * &square) >> bits;
            let term = &power / (2 * n + 1);
            if term.is_zero() {
                break;
            }
            sum += term;
        }
        Some(self.cut(sum, -(bits as i64)))
    }

    pub(super) fn pi(&self) -> Option<Real> {
        if let Some(pi) = self.pi.get() {
            return Some(pi.clone());
        }
        // Machin: π = 16 atan(1/5) − 4 atan(1/239).
        let part = |times: i64, below: i64| {
            let x = self.div(&self.integer(1), &self.integer(below))?;
            Some(self.mul(&self.inverse_series(&x, -1)?, &self.integer(times)))
        };
        let pi = self.sub(&part(16, 5)?, &part(4, 239)?);
        Some(self.pi.get_or_init(|| pi).clone())
    }

    fn ln2(&self) -> Option<Real> {
        if let Some(ln2) = self.ln2.get() {
            return Some(ln2.clone());
        }
        let third = self.div(&self.integer(1), &self.integer(3))?;
        let ln2 = self.inverse_series(&third, 1)?.scaled(1);
        Some(self.ln2.get_or_init(|| ln2).clone())
    }

    pub(super) fn exp(&self, a: &Real) -> Option<Real> {
        if a.magnitude() > LARGEST_ARGUMENT {
            return None;
        }
        let ln2 = self.ln2()?;
        let twos = self.nearest(&self.div(a, &ln2)?)?;
        let rest = self.sub(a, &self.mul(&ln2, &self.integer(twos)));
        let bits = self.bits + GUARD;
        let x = rest.fixed(bits);
        let sum = self.series(BigInt::one() << bits, |term, n| ((term * &x) >> bits) / n)?;
        Some(self.cut(sum, twos - bits as i64))
    }

    /// ln a; `a` must be positive.
    pub(super) fn ln(&self, a: &Real) -> Option<Real> {
        let twos = a.magnitude();
        let mut y = a.scaled(-twos);
        const ROOTS: i64 = 3;
        for _ in 0..ROOTS {
            y = self.sqrt(&y)?;
        }
        let one = self.integer(1);
        let z = self.div(&self.sub(&y, &one), &self.add(&y, &one))?;
        let ln = self.inverse_series(&z, 1)?.scaled(1 + ROOTS);
        Some(self.add(&ln, &self.mul(&self.ln2()?, &self.integer(twos))))
    }

    /// Sine and cosine.
    pub(super) fn sin_cos(&self, a: &Real) -> Option<(Real, Real)> {
        if a.magnitude() > LARGEST_ARGUMENT {
            return None;
        }
        let quarter = self.pi()?.scaled(-1);
        let turns = self.nearest(&self.div(a, &quarter)?)?;
        let rest = self.sub(a, &self.mul(&quarter, &self.integer(turns)));
        let bits = self.bits + GUARD;
        let x = rest.fixed(bits);
        let square: BigInt = (&x * &x) >> bits;
        let next = |term: BigInt, below: u64| -((term * &square) >> bits) / below;
        let sin = self.series(x.clone(), |term, n| next(term, 2 * n * (2 * n + 1)))?;
        let cos = self.series(BigInt::one() << bits, |term, n| {
            next(term, 2 * n * (2 * n - 1))
        })?;
        let real = |value: BigInt| self.cut(value, -(bits as i64));
        let (sin, cos) = (real(sin), real(cos));
        Some(match turns.rem_euclid(4) {
            0 => (sin, cos),
            1 => (cos, sin.negated()),
            2 => (sin.negated(), cos.negated()),
            _ => (cos.negated(), sin),
        })
    }

    pub(super) fn atan(&self, a: &Real) -> Option<Real> {
        let one = self.integer(1);
        if a.is_negative() {
            return Some(self.atan(&a.negated())?.negated());
        }
        if self.compare(a, &one) == Ordering::Greater {
            let rest = self.atan(&self.div(&one, a)?)?;
            return Some(self.sub(&self.pi()?.scaled(-1), &rest));
        }
        let mut y = a.clone();
        const HALVINGS: i64 = 3;
        for _ in 0..HALVINGS {
            let root = self.sqrt(&self.add(&one, &self.mul(&y, &y)))?;
            y = self.div(&y, &self.add(&one, &root))?;
        }
        Some(self.inverse_series(&y, -1)?.scaled(HALVINGS))
    }

    /// The angle of the point (x, y); 0 for the origin.
    pub(super) fn angle(&self, x: &Real, y: &Real) -> Option<Real> {
        if x.is_zero() && y.is_zero() {
            return Some(Real::zero());
        }
        let half = self.pi()?.scaled(-1);
        if x.abs().magnitude() < y.abs().magnitude() {
            let rest = self.atan(&self.div(x, y)?)?;
            let half = if y.is_negative() {
                half.negated()
            } else {
                half
            };
            return Some(self.sub(&half, &rest));
        }
        let angle = self.atan(&self.div(y, x)?)?;
        Some(match (x.is_negative(), y.is_negative()) {
            (false, _) => angle,
            (true, false) => self.add(&angle, &self.pi()?),
            (true, true) => self.sub(&angle, &self.pi()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first decimals, without rounding.
    fn decimals(work: &Work, value: &Real) -> String {
        let scaled = work.mul(value, &work.integer(1_000_000_000_000_000_000));
        let scaled = work.mul(&scaled, &work.integer(1_000_000_000_000));
        scaled.fixed(0).to_string()
    }

    #[test]
    fn functions_have_the_right_digits() {
        let work = Work::new(256, u64::MAX);
        let check = |value: Option<Real>, digits: &str| {
            assert_eq!(decimals(&work, &value.unwrap()), digits)
        };
        check(work.pi(), "3141592653589793238462643383279");
        check(
            work.exp(&work.integer(1)),
            "2718281828459045235360287471352",
        );
        check(work.exp(&work.integer(-3)), "49787068367863942979342415650");
        check(
            work.ln(&work.integer(10)),
            "2302585092994045684017991454684",
        );
        check(
            work.sqrt(&work.integer(2)),
            "1414213562373095048801688724209",
        );
        check(
            work.atan(&work.integer(2)),
            "1107148717794090503017065460178",
        );
        check(
            work.sin_cos(&work.integer(100)).map(|both| both.0.abs()),
            "506365641109758793656557610459",
        );
        check(
            work.sin_cos(&work.integer(100)).map(|both| both.1),
            "862318872287683934101938513950",
        );
        check(
            work.angle(&work.integer(-1), &work.integer(1)),
            "2356194490192344928846982537459",
        );
        check(
            work.angle(&work.integer(-1), &work.integer(-2))
                .map(|a| a.abs()),
            "2034443935795702735445577923100",
        );
    }

    #[test]
    fn calculations_that_cost_too_much_are_stopped() {
        let work = Work::new(1 << 20, 1 << 30);
        assert_eq!(work.exp(&work.integer(1)), None);
        let work = Work::new(256, u64::MAX);
        assert_eq!(work.exp(&work.integer(1 << 40)), None);
        assert_eq!(work.div(&work.integer(1), &Real::zero()), None);
    }
}
