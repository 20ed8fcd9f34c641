//! The value of an expression: an exact rational number if it has one, otherwise a complex number of many bits.

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::complex::{Complex, NOISE};
use super::expr::{Expr, Function};
use super::real::{Real, Work};

/// Largest exact number (bits).
const LARGEST: u64 = 1 << 14;
/// Largest argument of a factorial.
const LARGEST_FACTORIAL: u64 = 1000;

fn bits(value: &BigRational) -> u64 {
    value.numer().bits() + value.denom().bits()
}

fn bounded(value: BigRational) -> Option<BigRational> {
    (bits(&value) <= LARGEST).then_some(value)
}

/// The exact value of an expression without variables that is rational by its form.
pub(super) fn exact(expr: &Expr) -> Option<BigRational> {
    match expr {
        Expr::Number { value, .. } | Expr::Based { value, .. } => bounded(value.clone()),
        Expr::Sum(terms) => terms
            .iter()
            .try_fold(BigRational::zero(), |sum, term| bounded(sum + exact(term)?)),
        Expr::Product(factors) => factors
            .iter()
            .try_fold(BigRational::one(), |product, factor| {
                bounded(product * exact(factor)?)
            }),
        Expr::Negative(inner) => Some(-exact(inner)?),
        Expr::Percent(inner) => bounded(exact(inner)? / BigInt::from(100)),
        Expr::Power(base, power) => {
            let (base, power) = (exact(base)?, exact(power)?);
            let power = power
                .is_integer()
                .then(|| power.to_integer().to_i32())
                .flatten()?;
            if bits(&base).saturating_mul(u64::from(power.unsigned_abs())) > LARGEST
                || base.is_zero() && power <= 0
            {
                return None;
            }
            Some(base.pow(power))
        }
        Expr::Root(inner, order) => {
            let (inner, order) = (exact(inner)?, u32::try_from(*order).ok()?);
            if inner.is_negative() && order % 2 == 0 {
                return None;
            }
            let root =
                BigRational::new(inner.numer().nth_root(order), inner.denom().nth_root(order));
            (bits(&root).saturating_mul(order.into()) <= LARGEST
                && root.pow(i32::try_from(order).ok()?) == inner)
                .then_some(root)
        }
        Expr::Call(function, arguments) => {
            let arguments: Option<Vec<_>> = arguments.iter().map(exact).collect();
            exact_call(*function, &arguments?)
        }
        _ => None,
    }
}

fn exact_call(function: Function, arguments: &[BigRational]) -> Option<BigRational> {
    let integers = || -> Option<Vec<BigInt>> {
        let all = arguments.iter().all(BigRational::is_integer);
        all.then(|| arguments.iter().map(BigRational::to_integer).collect())
    };
    match (function, arguments) {
        (Function::Abs, [a]) => Some(a.abs()),
        (Function::Floor, [a]) => Some(a.floor()),
        (Function::Ceil, [a]) => Some(a.ceil()),
        (Function::Max, all) => all.iter().max().cloned(),
        (Function::Min, all) => all.iter().min().cloned(),
        (Function::Gcd, _) => Some(integers()?.into_iter().reduce(|a, b| a.gcd(&b))?.into()),
        (Function::Lcm, _) => bounded(integers()?.into_iter().reduce(|a, b| a.lcm(&b))?.into()),
        (Function::Factorial, [_]) => {
            let n = integers()?[0]
                .to_u64()
                .filter(|n| *n <= LARGEST_FACTORIAL)?;
            Some(BigRational::from_integer(
                (1..=n).map(BigInt::from).product(),
            ))
        }
        (Function::Binomial, [n, k]) => {
            let k = k
                .is_integer()
                .then(|| k.to_integer().to_i64())
                .flatten()
                .filter(|k| (0..=LARGEST_FACTORIAL as i64).contains(k))?;
            (0..k).try_fold(BigRational::one(), |product, i| {
                bounded(product * (n - BigInt::from(i)) / BigInt::from(i + 1))
            })
        }
        _ => None,
    }
}

/// Bits of the numbers in an expression, with powers multiplied out: two different values of such numbers differ within
/// this many bits, if no root or function is applied to them.
pub(super) fn weight(expr: &Expr) -> u64 {
    let own = match expr {
        Expr::Number { value, .. } | Expr::Based { value, .. } => bits(value).saturating_sub(16),
        _ => 0,
    };
    if let Expr::Power(base, power) = expr {
        let times = exact(power).map_or(1, |power| {
            power.abs().ceil().to_integer().to_u64().unwrap_or(u64::MAX)
        });
        return (weight(base) + small(base))
            .saturating_mul(times)
            .saturating_add(weight(power));
    }
    expr.parts()
        .into_iter()
        .fold(own, |sum, part| sum.saturating_add(weight(part)))
}

/// Bits of a number that is too small to count in [`weight`], but counts under a power.
fn small(base: &Expr) -> u64 {
    match base {
        Expr::Number { value, .. } => bits(value).min(16),
        _ => 0,
    }
}

/// The value of an expression whose variables have the values of `symbols`; `None` if it is undefined, not known, or takes
/// too long.
pub(super) fn value(expr: &Expr, symbols: &[(&str, Real)], work: &Work) -> Option<Complex> {
    work.pay(1)?;
    let of = |expr: &Expr| value(expr, symbols, work);
    Some(match expr {
        Expr::Number { value, .. } | Expr::Based { value, .. } => {
            Complex::real(work.rational(value)?)
        }
        Expr::Symbol(name) => {
            let (_, value) = symbols.iter().find(|(known, _)| known == name)?;
            Complex::real(value.clone())
        }
        Expr::Pi => Complex::real(work.pi()?),
        Expr::E => Complex::real(work.exp(&work.integer(1))?),
        Expr::I => Complex {
            re: Real::zero(),
            im: work.integer(1),
        },
        Expr::Sum(terms) => terms
            .iter()
            .try_fold(work.c_integer(0), |sum, term| work.c_add(&sum, &of(term)?))?,
        Expr::Product(factors) => {
            factors
                .iter()
                .try_fold(work.c_integer(1), |product, factor| match factor {
                    // A division rounds once, and is exact if there is no remainder.
                    Expr::Power(below, power) if **power == Expr::integer(-1) => {
                        work.c_div(&product, &of(below)?)
                    }
                    factor => work.c_mul(&product, &of(factor)?),
                })?
        }
        Expr::Negative(inner) => work.c_sub(&work.c_integer(0), &of(inner)?)?,
        Expr::Percent(inner) => work.c_div(&of(inner)?, &work.c_integer(100))?,
        Expr::Root(inner, order) => work.c_root(&of(inner)?, *order)?,
        Expr::Power(base, power) => raised(base, power, &of, work)?,
        Expr::Call(function, arguments) => {
            let arguments: Option<Vec<_>> = arguments.iter().map(of).collect();
            call(*function, &arguments?, work)?
        }
        _ => return None,
    })
}

fn raised(
    base: &Expr,
    power: &Expr,
    of: &dyn Fn(&Expr) -> Option<Complex>,
    work: &Work,
) -> Option<Complex> {
    let known = exact(power);
    if *base == Expr::E {
        return work.c_exp(&of(power)?);
    }
    let base = of(base)?;
    let Some(power_value) = known else {
        return work.c_pow(&base, &of(power)?);
    };
    let (top, order) = (power_value.numer().to_i64()?, power_value.denom().to_i64()?);
    if top.unsigned_abs() > 1 << 16 {
        return None;
    }
    match order {
        1 => work.c_powi(&base, top),
        order => work.c_powi(&work.c_root(&base, order)?, top),
    }
}

/// A real number as an integer, if it is one up to rounding.
fn integer(value: &Complex, work: &Work) -> Option<i64> {
    let nearest = work.nearest(&value.re)?;
    let rest = work.sub(&value.re, &work.integer(nearest));
    (value.is_real() && rest.magnitude() < -((work.bits - NOISE) as i64) / 2).then_some(nearest)
}

fn call(function: Function, arguments: &[Complex], work: &Work) -> Option<Complex> {
    let one = || work.c_integer(1);
    match (function, arguments) {
        (Function::Sin, [a]) => Some(work.c_sin_cos(a)?.0),
        (Function::Cos, [a]) => Some(work.c_sin_cos(a)?.1),
        (Function::Tan, [a]) => work
            .c_sin_cos(a)
            .and_then(|(sin, cos)| work.c_div(&sin, &cos)),
        (Function::Cot, [a]) => work
            .c_sin_cos(a)
            .and_then(|(sin, cos)| work.c_div(&cos, &sin)),
        (Function::Sec, [a]) => work.c_div(&one(), &work.c_sin_cos(a)?.1),
        (Function::Csc, [a]) => work.c_div(&one(), &work.c_sin_cos(a)?.0),
        (Function::Arcsin, [a]) => work.c_asin(a),
        (Function::Arccos, [a]) => {
            let quarter = Complex::real(work.pi()?.scaled(-1));
            work.c_sub(&quarter, &work.c_asin(a)?)
        }
        (Function::Arctan, [a]) => work.c_atan(a),
        (Function::Sinh, [a]) => Some(work.c_sinh_cosh(a)?.0),
        (Function::Cosh, [a]) => Some(work.c_sinh_cosh(a)?.1),
        (Function::Tanh, [a]) => work
            .c_sinh_cosh(a)
            .and_then(|(sinh, cosh)| work.c_div(&sinh, &cosh)),
        (Function::Exp, [a]) => work.c_exp(a),
        (Function::Ln, [a]) => work.c_ln(a),
        (Function::Abs, [a]) => work.c_abs(a).map(Complex::real),
        (Function::Floor, [a]) => floor(a, work),
        (Function::Ceil, [a]) => {
            let negated = work.c_sub(&work.c_integer(0), a)?;
            work.c_sub(&work.c_integer(0), &floor(&negated, work)?)
        }
        (Function::Binomial, [n, k]) => {
            let k = integer(k, work).filter(|k| (0..=LARGEST_FACTORIAL as i64).contains(k))?;
            (0..k).try_fold(one(), |product, i| {
                let factor = work.c_sub(n, &work.c_integer(i))?;
                work.c_div(&work.c_mul(&product, &factor)?, &work.c_integer(i + 1))
            })
        }
        (Function::Factorial, [n]) => {
            let n = integer(n, work).filter(|n| (0..=LARGEST_FACTORIAL as i64).contains(n))?;
            (1..=n).try_fold(one(), |product, i| work.c_mul(&product, &work.c_integer(i)))
        }
        (Function::Max | Function::Min, all) if all.iter().all(Complex::is_real) => {
            let by = |a: &&Complex, b: &&Complex| work.compare(&a.re, &b.re);
            let found = if function == Function::Max {
                all.iter().max_by(by)
            } else {
                all.iter().min_by(by)
            };
            found.cloned()
        }
        _ => None,
    }
}

fn floor(a: &Complex, work: &Work) -> Option<Complex> {
    if let Some(integer) = integer(a, work) {
        return Some(work.c_integer(integer));
    }
    let nearest = work.nearest(&a.re).filter(|_| a.is_real())?;
    let above = work.compare(&work.integer(nearest), &a.re).is_gt();
    Some(work.c_integer(if above { nearest - 1 } else { nearest }))
}
