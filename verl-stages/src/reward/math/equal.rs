//! Whether an answer states what the reference does, by the rules of Math-Verify.

use super::expr::{Expr, Sign};
use super::real_set::RealSet;
use super::scalar::Comparison;

impl Comparison {
    /// Whether `answer` states what `reference` does. Not symmetric: `x = 3` answers 3, and 3 answers `x = 3`, but 1
    /// does not answer `2x + z = 1`.
    pub(super) fn answers(&self, reference: &Expr, answer: &Expr) -> bool {
        let (reference, answer) = (&shortened(reference), &shortened(answer));
        let (reference, answer) = match (equation(reference), equation(answer)) {
            (None, Some((_, right))) => (reference, right),
            (Some((left, right)), None) if left.is_of_symbols() => (right, answer),
            _ => (reference, answer),
        };
        match (reference, answer) {
            (Expr::Relation(left, signs), Expr::Relation(right, others)) => {
                let relation = Relation { sides: left, signs };
                let answer = Relation {
                    sides: right,
                    signs: others,
                };
                self.same_relation(relation, answer)
            }
            (Expr::Relation(..), set) if is_set(set) => self.same_real_set(reference, answer),
            (Expr::Relation(..), _) | (_, Expr::Relation(..)) => false,
            (Expr::Matrix(rows), Expr::Matrix(others)) => {
                let shape = |rows: &[Vec<Expr>]| (rows.len(), rows[0].len());
                shape(rows) == shape(others) && self.all_answer(&rows.concat(), &others.concat())
            }
            (Expr::Text(words), Expr::Text(others)) => words == others,
            (a, b) if is_set(a) || is_set(b) => self.same_set(a, b),
            (a, b) => a.is_scalar() && b.is_scalar() && self.equal(a, b),
        }
    }

    fn all_answer(&self, references: &[Expr], answers: &[Expr]) -> bool {
        references.len() == answers.len()
            && references
                .iter()
                .zip(answers)
                .all(|(a, b)| self.answers(a, b))
    }

    fn same_real_set(&self, a: &Expr, b: &Expr) -> bool {
        match (RealSet::of(a, self), RealSet::of(b, self)) {
            (Some(a), Some(b)) => a.equals(&b),
            _ => false,
        }
    }

    fn same_set(&self, reference: &Expr, answer: &Expr) -> bool {
        match (reference, answer) {
            (Expr::Set(items), Expr::Set(others) | Expr::Tuple(others))
                if names_values(items) && !others.iter().any(|other| equation(other).is_some()) =>
            {
                self.all_answer(items, others)
            }
            (Expr::Set(items), Expr::Set(others)) => self.same_items(items, others),
            // A point answers a set of its coordinates, and a list in the right order a point.
            (Expr::Set(items), Expr::Tuple(others)) => self.same_items(items, others),
            (Expr::Tuple(items), Expr::Set(others)) => self.all_answer(items, others),
            (Expr::Tuple(items), Expr::Tuple(others)) => self.all_answer(items, others),
            // A set of one member, however often it is written, is that member.
            (Expr::Set(items), single) if !is_set(single) => {
                !items.is_empty() && items.iter().all(|item| self.answers(item, single))
            }
            (single, Expr::Set(items)) if !is_set(single) => {
                !items.is_empty() && items.iter().all(|item| self.answers(single, item))
            }
            (Expr::Named(a), Expr::Named(b)) => a == b,
            (
                Expr::Interval {
                    low,
                    low_open,
                    high,
                    high_open,
                },
                Expr::Interval {
                    low: l,
                    low_open: lo,
                    high: h,
                    high_open: ho,
                },
            ) => low_open == lo && high_open == ho && self.equal(low, l) && self.equal(high, h),
            _ => self.same_real_set(reference, answer) || self.same_parts(reference, answer),
        }
    }

    /// Compares unions, intersections and differences of sets whose ends are not constants, part by part; the parts of a
    /// union may be in any order.
    fn same_parts(&self, a: &Expr, b: &Expr) -> bool {
        match (a, b) {
            (Expr::Union(..), Expr::Union(..)) => {
                let (mut parts, mut others) = (Vec::new(), Vec::new());
                united(a, &mut parts);
                united(b, &mut others);
                self.same_items(&parts, &others)
            }
            (Expr::Intersection(a, b), Expr::Intersection(c, d))
            | (Expr::Difference(a, b), Expr::Difference(c, d)) => {
                self.answers(a, c) && self.answers(b, d)
            }
            _ => false,
        }
    }

    /// Whether both lists have the same items, in any order and with any repetitions.
    fn same_items(&self, items: &[Expr], others: &[Expr]) -> bool {
        let covered = items
            .iter()
            .all(|item| others.iter().any(|other| self.answers(item, other)));
        covered
            && others
                .iter()
                .all(|other| items.iter().any(|item| self.answers(item, other)))
    }

    fn same_relation(&self, relation: Relation<'_>, answer: Relation<'_>) -> bool {
        let (links, mut answer_links) = (relation.links(), answer.links());
        let all = |others: &[Link]| {
            links.len() == others.len()
                && links.iter().zip(others).all(|(a, b)| self.same_link(a, b))
        };
        if all(&answer_links) {
            return true;
        }
        answer_links.reverse();
        let (a, b) = (relation.expr(), answer.expr());
        let same_variables = {
            let (mut names, mut other_names) = (Vec::new(), Vec::new());
            a.symbols(&mut names);
            b.symbols(&mut other_names);
            names == other_names
        };
        all(&answer_links) || same_variables && self.same_real_set(&a, &b)
    }

    /// Whether two relations of two sides each are the same up to a factor of both sides.
    fn same_link(&self, link: &Link, answer: &Link) -> bool {
        let Link {
            left: a,
            sign,
            right: b,
        } = link;
        let Link {
            left: c,
            sign: other,
            right: d,
        } = answer;
        let scalar = |x: &Expr, y: &Expr| x.is_scalar() && y.is_scalar();
        if !scalar(a, b) || !scalar(c, d) {
            return sign == other && self.answers(a, c) && self.answers(b, d);
        }
        let difference = |x: &Expr, y: &Expr| Expr::Sum(vec![x.clone(), y.clone().negative()]);
        let (left, right) = (difference(a, b), difference(c, d));
        let symmetric = matches!(sign, Sign::Equal | Sign::Unequal);
        let same_sides = sign == other && self.equal(a, c) && self.equal(b, d);
        same_sides
            || match self.ratio(&left, &right) {
                Some(true) => sign == other,
                Some(false) if symmetric => sign == other,
                Some(false) => *sign == other.flipped(),
                None => false,
            }
    }
}

/// Sides, and the sign between each side and the next.
#[derive(Clone, Copy)]
struct Relation<'a> {
    sides: &'a [Expr],
    signs: &'a [Sign],
}

impl Relation<'_> {
    fn links(self) -> Vec<Link> {
        let pairs = self.sides.windows(2).zip(self.signs);
        let link = |(pair, sign): (&[Expr], &Sign)| Link {
            left: pair[0].clone(),
            sign: *sign,
            right: pair[1].clone(),
        };
        pairs.map(link).collect()
    }

    fn expr(self) -> Expr {
        Expr::Relation(self.sides.to_vec(), self.signs.to_vec())
    }
}

/// Two neighbouring sides of a relation.
struct Link {
    left: Expr,
    sign: Sign,
    right: Expr,
}

/// The sides of an equation.
fn equation(expr: &Expr) -> Option<(&Expr, &Expr)> {
    match expr {
        Expr::Relation(sides, signs) if signs.iter().all(|sign| *sign == Sign::Equal) => {
            Some((sides.first()?, sides.last()?))
        }
        _ => None,
    }
}

/// Whether items give values to different variables: `x = 1, y = 2`, which 1, 2 answers, but not 2, 1.
fn names_values(items: &[Expr]) -> bool {
    let names: Option<Vec<_>> = items
        .iter()
        .map(|item| equation(item).map(|(left, _)| left))
        .collect();
    names.is_some_and(|names| {
        names.len() > 1
            && names
                .iter()
                .enumerate()
                .all(|(at, name)| name.is_of_symbols() && !names[..at].contains(name))
    })
}

/// `x = 1 + 2 = 3` as `x = 3`; other answers as they are.
fn shortened(expr: &Expr) -> Expr {
    match equation(expr) {
        Some((left, right)) if left.is_of_symbols() => {
            Expr::Relation(vec![left.clone(), right.clone()], vec![Sign::Equal])
        }
        _ => expr.clone(),
    }
}

fn is_set(expr: &Expr) -> bool {
    matches!(
        expr,
        Expr::Set(_)
            | Expr::Tuple(_)
            | Expr::Interval { .. }
            | Expr::Named(_)
            | Expr::Union(..)
            | Expr::Intersection(..)
            | Expr::Difference(..)
    )
}

fn united(expr: &Expr, into: &mut Vec<Expr>) {
    match expr {
        Expr::Union(a, b) => {
            united(a, into);
            united(b, into);
        }
        part => into.push(part.clone()),
    }
}
