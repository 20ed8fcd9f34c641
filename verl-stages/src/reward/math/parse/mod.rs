//! Parses LaTeX and plain text into an [`Expr`]: items, relations and sets here, their parts in `term` and `atom`.
//!
//! The parser is a recursive descent over a bounded number of tokens, of bounded depth. It returns `None` for what it does
//! not understand.

mod atom;
mod term;
mod token;

use self::token::Token;
use super::expr::{Expr, Sign};

/// Deepest nesting of brackets, fractions, powers and the like.
const DEEPEST: usize = 40;
/// Most items of a list.
const MOST_ITEMS: usize = 64;

/// The answer that `text` states.
pub(super) fn parse(text: &str) -> Option<Expr> {
    let tokens = token::tokens(text)?;
    let mut parser = Parser {
        tokens,
        at: 0,
        depth: 0,
        bars: 0,
    };
    while parser
        .tokens
        .last()
        .is_some_and(|token| *token == Token::Sign(','))
    {
        parser.tokens.pop();
    }
    let items = parser.items()?;
    if parser.at < parser.tokens.len() {
        return None;
    }
    one_or_set(items)
}

fn one_or_set(mut items: Vec<Expr>) -> Option<Expr> {
    match items.len() {
        0 => None,
        1 => items.pop(),
        _ => Some(Expr::Set(items)),
    }
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    /// Open bars of absolute values.
    bars: usize,
}

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn sign(&self) -> Option<char> {
        match self.peek() {
            Some(Token::Sign(sign)) => Some(*sign),
            _ => None,
        }
    }

    fn take(&mut self, sign: char) -> bool {
        let found = self.sign() == Some(sign);
        self.at += usize::from(found);
        found
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Parser) -> Option<T>) -> Option<T> {
        if self.depth == DEEPEST {
            return None;
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// Items between commas, `±` written out as two.
    fn items(&mut self) -> Option<Vec<Expr>> {
        let mut items = Vec::new();
        loop {
            let item = self.relation()?;
            match two_signs(&item) {
                Some(both) => items.extend(both),
                None => items.push(item),
            }
            if items.len() > MOST_ITEMS {
                return None;
            }
            if !self.take(',') {
                return Some(items);
            }
        }
    }

    fn relation(&mut self) -> Option<Expr> {
        // A sign of approximation before a number is ignored.
        self.take('≈');
        let mut sides = vec![self.set()?];
        let mut signs = Vec::new();
        loop {
            let sign = match self.sign() {
                Some('=' | '∈') => Sign::Equal,
                Some('≠') => Sign::Unequal,
                Some('<') => Sign::Less,
                Some('≤') => Sign::LessEqual,
                Some('>') => Sign::Greater,
                Some('≥') => Sign::GreaterEqual,
                Some('≈') => {
                    self.at += 1;
                    let right = self.set()?;
                    let left = sides.pop()?;
                    sides.push(if left.is_of_symbols() { right } else { left });
                    continue;
                }
                _ => break,
            };
            self.at += 1;
            signs.push(sign);
            sides.push(self.set()?);
        }
        Some(match sides.len() {
            1 => sides.pop()?,
            _ => Expr::Relation(sides, signs),
        })
    }

    /// Sets joined by ∪, ∩ and ∖, which are left-associative and have the same precedence.
    fn set(&mut self) -> Option<Expr> {
        let mut left = self.sum()?;
        while let Some(sign @ ('∪' | '∩' | '∖')) = self.sign() {
            self.at += 1;
            let right = Box::new(self.sum()?);
            let both = Box::new(left);
            left = match sign {
                '∪' => Expr::Union(both, right),
                '∩' => Expr::Intersection(both, right),
                _ => Expr::Difference(both, right),
            };
        }
        Some(left)
    }

    /// The contents of brackets, after the opening one: a term, a point, an interval or a set.
    fn bracket(&mut self, open: char) -> Option<Expr> {
        let bars = std::mem::take(&mut self.bars);
        let closed = |parser: &Parser| matches!(parser.sign(), Some(')' | ']' | '}' | '⦄'));
        let items = match closed(self) {
            true => Vec::new(),
            false => self.deeper(Parser::items)?,
        };
        self.bars = bars;
        let close = self.sign()?;
        self.at += 1;
        let paired = match open {
            '(' | '[' => matches!(close, ')' | ']'),
            '{' => close == '}',
            _ => close == '⦄',
        };
        if !paired {
            return None;
        }
        Some(match (open, items.len()) {
            ('⦃', _) => Expr::Set(items),
            (_, 0) => return None,
            (_, 1) if (open == '[') == (close == ']') => items.into_iter().next()?,
            ('{', _) => Expr::Set(items),
            ('(', _) if close == ')' => Expr::Tuple(items),
            (_, 2) => {
                let mut ends = items.into_iter();
                let (low, high) = (Box::new(ends.next()?), Box::new(ends.next()?));
                Expr::Interval {
                    low,
                    low_open: open == '(',
                    high,
                    high_open: close == ')',
                }
            }
            _ if open == '[' && close == ']' => Expr::Tuple(items),
            _ => return None,
        })
    }

    /// Rows of a matrix, after its `\begin`.
    fn matrix(&mut self) -> Option<Expr> {
        let mut rows = vec![Vec::new()];
        loop {
            match self.peek()? {
                Token::End => {
                    self.at += 1;
                    break;
                }
                Token::Row => {
                    self.at += 1;
                    rows.push(Vec::new());
                }
                _ => {
                    let entry = self.deeper(Parser::sum)?;
                    rows.last_mut()?.push(entry);
                    self.take('&');
                }
            }
        }
        if rows.last().is_some_and(Vec::is_empty) {
            rows.pop();
        }
        let width = rows.first()?.len();
        let sound = width > 0
            && rows.iter().all(|row| row.len() == width)
            && rows.len() * width <= MOST_ITEMS;
        sound.then_some(Expr::Matrix(rows))
    }
}

/// An expression with `±` as the one with its upper signs and the one with its lower signs.
fn two_signs(expr: &Expr) -> Option<[Expr; 2]> {
    has_two_signs(expr).then(|| [with_sign(expr, true), with_sign(expr, false)])
}

fn has_two_signs(expr: &Expr) -> bool {
    matches!(expr, Expr::PlusMinus { .. }) || expr.parts().into_iter().any(has_two_signs)
}

fn with_sign(expr: &Expr, upper_signs: bool) -> Expr {
    let one = |expr: &Expr| Box::new(with_sign(expr, upper_signs));
    let all = |parts: &[Expr]| {
        parts
            .iter()
            .map(|part| with_sign(part, upper_signs))
            .collect()
    };
    match expr {
        Expr::PlusMinus { left, right, upper } => {
            let right = *one(right);
            let right = if *upper == upper_signs {
                right
            } else {
                right.negative()
            };
            Expr::Sum(vec![*one(left), right])
        }
        Expr::Sum(parts) => Expr::Sum(all(parts)),
        Expr::Product(parts) => Expr::Product(all(parts)),
        Expr::Tuple(parts) => Expr::Tuple(all(parts)),
        Expr::Call(function, parts) => Expr::Call(*function, all(parts)),
        Expr::Relation(parts, signs) => Expr::Relation(all(parts), signs.clone()),
        Expr::Power(base, power) => Expr::Power(one(base), one(power)),
        Expr::Root(inner, order) => Expr::Root(one(inner), *order),
        Expr::Negative(inner) => Expr::Negative(one(inner)),
        Expr::Percent(inner) => Expr::Percent(one(inner)),
        other => other.clone(),
    }
}
