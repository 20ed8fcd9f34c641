//! Sets of real numbers: unions, intersections and differences of intervals and points, and the solutions of linear
//! inequalities in one variable.
//!
//! Two sets are equal if they contain the same ends and the same points between ends.

use std::cmp::Ordering;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Signed, Zero};

use super::expr::{Expr, Sign};
use super::scalar::{Comparison, infinity};

/// A set of real numbers.
#[derive(Debug)]
pub(super) enum RealSet {
    Everything,
    Points(Vec<BigRational>),
    /// Between two ends; `None` for an infinite one.
    Interval {
        low: Option<BigRational>,
        low_open: bool,
        high: Option<BigRational>,
        high_open: bool,
    },
    Union(Box<RealSet>, Box<RealSet>),
    Intersection(Box<RealSet>, Box<RealSet>),
    Difference(Box<RealSet>, Box<RealSet>),
}

impl RealSet {
    /// The set that `expr` describes; `None` if it is not a set of real numbers, or has ends that are not constants.
    pub(super) fn of(expr: &Expr, comparison: &Comparison) -> Option<RealSet> {
        let both = |a: &Expr, b: &Expr| {
            Some((
                Box::new(RealSet::of(a, comparison)?),
                Box::new(RealSet::of(b, comparison)?),
            ))
        };
        match expr {
            Expr::Named('R') => Some(RealSet::Everything),
            Expr::Set(items) => items
                .iter()
                .map(|item| comparison.number(item))
                .collect::<Option<_>>()
                .map(RealSet::Points),
            Expr::Tuple(ends) => match ends.as_slice() {
                [low, high] => interval(low, true, high, true, comparison),
                _ => None,
            },
            Expr::Interval {
                low,
                low_open,
                high,
                high_open,
            } => interval(low, *low_open, high, *high_open, comparison),
            Expr::Union(a, b) => both(a, b).map(|(a, b)| RealSet::Union(a, b)),
            Expr::Intersection(a, b) => both(a, b).map(|(a, b)| RealSet::Intersection(a, b)),
            Expr::Difference(a, b) => both(a, b).map(|(a, b)| RealSet::Difference(a, b)),
            Expr::Relation(sides, signs) => solutions(sides, signs, comparison),
            _ => None,
        }
    }

    pub(super) fn equals(&self, other: &RealSet) -> bool {
        let mut ends = Vec::new();
        self.ends(&mut ends);
        other.ends(&mut ends);
        ends.sort();
        ends.dedup_by(|a, b| Comparison::same_number(a, b));
        let one = BigRational::one();
        let mut points = ends.clone();
        points.extend(
            ends.windows(2)
                .map(|pair| (&pair[0] + &pair[1]) / BigInt::from(2)),
        );
        points.extend(ends.first().map(|first| first - &one));
        points.extend(ends.last().map(|last| last + &one));
        points.push(BigRational::zero());
        points
            .iter()
            .all(|point| self.contains(point) == other.contains(point))
    }

    fn ends(&self, into: &mut Vec<BigRational>) {
        match self {
            RealSet::Everything => {}
            RealSet::Points(points) => into.extend(points.iter().cloned()),
            RealSet::Interval { low, high, .. } => into.extend(low.iter().chain(high).cloned()),
            RealSet::Union(a, b) | RealSet::Intersection(a, b) | RealSet::Difference(a, b) => {
                a.ends(into);
                b.ends(into);
            }
        }
    }

    fn contains(&self, point: &BigRational) -> bool {
        let order = |a: &BigRational, b: &BigRational| match Comparison::same_number(a, b) {
            true => Ordering::Equal,
            false => a.cmp(b),
        };
        match self {
            RealSet::Everything => true,
            RealSet::Points(points) => points
                .iter()
                .any(|known| Comparison::same_number(known, point)),
            RealSet::Interval {
                low,
                low_open,
                high,
                high_open,
            } => {
                let above = low.as_ref().is_none_or(|low| match order(point, low) {
                    Ordering::Equal => !low_open,
                    order => order == Ordering::Greater,
                });
                let below = high.as_ref().is_none_or(|high| match order(point, high) {
                    Ordering::Equal => !high_open,
                    order => order == Ordering::Less,
                });
                above && below
            }
            RealSet::Union(a, b) => a.contains(point) || b.contains(point),
            RealSet::Intersection(a, b) => a.contains(point) && b.contains(point),
            RealSet::Difference(a, b) => a.contains(point) && !b.contains(point),
        }
    }
}

fn interval(
    low: &Expr,
    low_open: bool,
    high: &Expr,
    high_open: bool,
    comparison: &Comparison,
) -> Option<RealSet> {
    let end = |expr: &Expr, positive: bool| match infinity(expr) {
        Some(found) => (found == positive).then_some(None),
        None => comparison.number(expr).map(Some),
    };
    let (low, high) = (end(low, false)?, end(high, true)?);
    Some(RealSet::Interval {
        low,
        low_open,
        high,
        high_open,
    })
}

/// The solutions of a chain of linear inequalities in one variable.
fn solutions(sides: &[Expr], signs: &[Sign], comparison: &Comparison) -> Option<RealSet> {
    let mut names = Vec::new();
    sides.iter().for_each(|side| side.symbols(&mut names));
    let [name] = names[..] else {
        return None;
    };
    let links = sides.windows(2).zip(signs);
    let sets = links.map(|(pair, sign)| link(&pair[0], *sign, &pair[1], name, comparison));
    let sets: Vec<RealSet> = sets.collect::<Option<_>>()?;
    sets.into_iter()
        .reduce(|a, b| RealSet::Intersection(Box::new(a), Box::new(b)))
}

/// The solutions of one inequality, whose difference must be linear.
fn link(
    left: &Expr,
    sign: Sign,
    right: &Expr,
    name: &str,
    comparison: &Comparison,
) -> Option<RealSet> {
    let difference = Expr::Sum(vec![left.clone(), right.clone().negative()]);
    if !difference.is_scalar() {
        return None;
    }
    let at = |point: i64| comparison.number(&replaced(&difference, name, point));
    let (zero, one, two, three) = (at(0)?, at(1)?, at(2)?, at(3)?);
    let slope = &one - &zero;
    let linear = Comparison::same_number(&(&two - &one), &slope)
        && Comparison::same_number(&(&three - &two), &slope);
    if !linear || slope.is_zero() {
        return None;
    }
    let root = -zero / &slope;
    let sign = if slope.is_negative() {
        sign.flipped()
    } else {
        sign
    };
    let (end, all) = (Some(root.clone()), None);
    Some(match sign {
        Sign::Less => RealSet::Interval {
            low: all,
            low_open: true,
            high: end,
            high_open: true,
        },
        Sign::LessEqual => RealSet::Interval {
            low: all,
            low_open: true,
            high: end,
            high_open: false,
        },
        Sign::Greater => RealSet::Interval {
            low: end,
            low_open: true,
            high: all,
            high_open: true,
        },
        Sign::GreaterEqual => RealSet::Interval {
            low: end,
            low_open: false,
            high: all,
            high_open: true,
        },
        Sign::Equal => RealSet::Points(vec![root]),
        Sign::Unequal => RealSet::Difference(
            Box::new(RealSet::Everything),
            Box::new(RealSet::Points(vec![root])),
        ),
    })
}

/// A scalar with a variable replaced by a number.
fn replaced(expr: &Expr, name: &str, number: i64) -> Expr {
    let one = |expr: &Expr| Box::new(replaced(expr, name, number));
    let all = |parts: &[Expr]| {
        parts
            .iter()
            .map(|part| replaced(part, name, number))
            .collect()
    };
    match expr {
        Expr::Symbol(symbol) if symbol == name => Expr::integer(number),
        Expr::Sum(parts) => Expr::Sum(all(parts)),
        Expr::Product(parts) => Expr::Product(all(parts)),
        Expr::Call(function, parts) => Expr::Call(*function, all(parts)),
        Expr::Power(base, power) => Expr::Power(one(base), one(power)),
        Expr::Root(inner, order) => Expr::Root(one(inner), *order),
        Expr::Negative(inner) => Expr::Negative(one(inner)),
        Expr::Percent(inner) => Expr::Percent(one(inner)),
        other => other.clone(),
    }
}
