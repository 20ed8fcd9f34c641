//! Sums, products and powers.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Signed};

use super::super::evaluate::exact;
use super::super::expr::{Expr, Function};
use super::token::Token;
use super::{Parser, one_or_set};

impl Parser {
    pub(super) fn sum(&mut self) -> Option<Expr> {
        let mut terms = vec![match self.sign() {
            Some(sign @ ('±' | '∓')) => {
                self.at += 1;
                let right = Box::new(self.product()?);
                Expr::PlusMinus {
                    left: Box::new(Expr::integer(0)),
                    right,
                    upper: sign == '±',
                }
            }
            _ => self.product()?,
        }];
        loop {
            match self.sign() {
                Some('+') => {
                    self.at += 1;
                    terms.push(self.product()?);
                }
                Some('-') => {
                    self.at += 1;
                    terms.push(self.product()?.negative());
                }
                Some(sign @ ('±' | '∓')) => {
                    self.at += 1;
                    let right = Box::new(self.product()?);
                    let left = Box::new(one_or_sum(std::mem::take(&mut terms))?);
                    terms.push(Expr::PlusMinus {
                        left,
                        right,
                        upper: sign == '±',
                    });
                }
                _ => return one_or_sum(terms),
            }
        }
    }

    /// Factors; those without a sign between them bind tighter than a division: `1/2x` is 1/(2x), as Math-Verify reads it.
    fn product(&mut self) -> Option<Expr> {
        let mut product = self.unary()?;
        loop {
            match self.sign() {
                Some('*') => {
                    self.at += 1;
                    let next = self.unary()?;
                    product = times(product, next);
                }
                Some('/' | ':') => {
                    self.at += 1;
                    product = product.quotient(self.unary()?);
                }
                _ => return Some(product),
            }
        }
    }

    fn unary(&mut self) -> Option<Expr> {
        let mut negative = false;
        let mut signs = 0;
        while let Some(sign @ ('+' | '-')) = self.sign() {
            negative ^= sign == '-';
            self.at += 1;
            signs += 1;
            if signs > 2 {
                return None;
            }
        }
        let factors = self.factors()?;
        Some(if negative {
            factors.negative()
        } else {
            factors
        })
    }

    /// Factors without a sign between them, and a unit after them.
    fn factors(&mut self) -> Option<Expr> {
        let mut number = self.is_number();
        let first = self.mixed()?;
        let mut factors = vec![first];
        while self.starts_factor() {
            if let Some(Token::Text(_)) = self.peek() {
                self.unit()?;
                break;
            }
            let next_is_number = self.is_number();
            if number && next_is_number {
                // Two adjacent numbers are not a product.
                return None;
            }
            let next = self.power()?;
            if !(factors.iter().all(Expr::is_scalar) && next.is_scalar()) && factors.len() > 1 {
                return None;
            }
            number = next_is_number;
            factors.push(next);
        }
        match factors.len() {
            1 => factors.pop(),
            _ => Some(Expr::Product(factors)),
        }
    }

    fn is_number(&self) -> bool {
        matches!(self.peek(), Some(Token::Number(_)))
    }

    /// A power, or a mixed number.
    fn mixed(&mut self) -> Option<Expr> {
        let start = self.at;
        let mixed = self.mixed_number();
        mixed.or_else(|| {
            self.at = start;
            self.power()
        })
    }

    /// An integer with a fraction after it: `2\frac{1}{2}`, and `2 1/2` with less than 1 after it.
    fn mixed_number(&mut self) -> Option<Expr> {
        let Some(Token::Number(whole)) = self.peek() else {
            return None;
        };
        let whole: BigInt = whole.parse().ok()?;
        self.at += 1;
        let (fraction, limit) = match self.peek()? {
            Token::Command(name) if name == "frac" => (self.power()?, None),
            Token::Number(_) => {
                let top = self.primary()?;
                let bottom = (self.take('/') && self.is_number()).then(|| self.primary());
                (top.quotient(bottom??), Some(BigRational::one()))
            }
            _ => return None,
        };
        let Expr::Product(parts) = &fraction else {
            return None;
        };
        let signed = parts.iter().any(|part| matches!(part, Expr::Negative(_)));
        let value = exact(&fraction).filter(|value| value.is_positive() && !signed)?;
        limit
            .is_none_or(|limit| value < limit)
            .then(|| Expr::Number {
                value: value + BigRational::from_integer(whole),
                decimal: false,
            })
    }

    /// Whether a factor may begin here.
    pub(super) fn starts_factor(&self) -> bool {
        match self.peek() {
            Some(Token::Number(_) | Token::Letter(_) | Token::Text(_) | Token::Begin) => true,
            Some(Token::Command(name)) => !name.starts_with("set"),
            Some(Token::Sign(sign)) => match sign {
                '(' | '{' | 'π' | '∞' | '⌊' | '⌈' => true,
                '|' => self.bars == 0,
                _ => false,
            },
            _ => false,
        }
    }

    /// Words after a number, with a power, a slash and further words; the end of the item.
    fn unit(&mut self) -> Option<()> {
        while let Some(Token::Text(_) | Token::Letter(_)) | Some(Token::Sign('/' | '*' | '°')) =
            self.peek()
        {
            self.at += 1;
            if self.take('^') {
                self.argument()?;
            }
        }
        match self.peek() {
            None => Some(()),
            Some(Token::Sign(sign)) => matches!(
                sign,
                ',' | ')' | ']' | '}' | '⦄' | '=' | '<' | '>' | '≤' | '≥' | '≈'
            )
            .then_some(()),
            Some(_) => None,
        }
    }

    /// A factor with its suffixes: powers, subscripts, `!`, `%`, degrees.
    pub(super) fn power(&mut self) -> Option<Expr> {
        let mut base = self.primary()?;
        let mut raised = false;
        loop {
            match self.sign() {
                Some('^') if self.tokens.get(self.at + 1) == Some(&Token::Sign('°')) => {
                    self.at += 2
                }
                Some('^') if self.is_braced_degree() => self.at += 4,
                Some('^') if raised => return None,
                Some('^') => {
                    self.at += 1;
                    let power = self.exponent()?;
                    base = base.power(power);
                    raised = true;
                }
                Some('!') => {
                    self.at += 1;
                    base = Expr::call(Function::Factorial, base);
                }
                Some('%') => {
                    self.at += 1;
                    base = Expr::Percent(Box::new(base));
                }
                Some('°') => self.at += 1,
                Some('_') => {
                    self.at += 1;
                    base = self.subscript(base)?;
                }
                Some('\'') => {
                    self.at += 1;
                    if let Expr::Symbol(name) = &mut base {
                        name.push('\'');
                    }
                }
                _ => return Some(base),
            }
        }
    }

    fn is_braced_degree(&self) -> bool {
        let next =
            |ahead: usize, sign: char| self.tokens.get(self.at + ahead) == Some(&Token::Sign(sign));
        next(1, '{') && next(2, '°') && next(3, '}')
    }

    /// An exponent: a complete number, although LaTeX would raise only its first digit, or one argument with its sign.
    pub(super) fn exponent(&mut self) -> Option<Expr> {
        let negative = self.take('-');
        let power = match self.is_number() {
            true => self.primary()?,
            false => self.argument()?,
        };
        Some(if negative { power.negative() } else { power })
    }

    fn subscript(&mut self, base: Expr) -> Option<Expr> {
        let start = self.at;
        let index = self.argument()?;
        match base {
            Expr::Symbol(mut name) => {
                name.push('_');
                for token in &self.tokens[start..self.at] {
                    match token {
                        Token::Number(text) | Token::Command(text) | Token::Text(text) => {
                            name.push_str(text)
                        }
                        Token::Letter(letter) => name.push(*letter),
                        Token::Sign('{' | '}') => {}
                        Token::Sign(sign) => name.push(*sign),
                        _ => return None,
                    }
                }
                Some(Expr::Symbol(name))
            }
            Expr::Number { value, .. } => Some(Expr::Based {
                value,
                base: exact(&index)?,
            }),
            _ => None,
        }
    }
}

fn one_or_sum(mut terms: Vec<Expr>) -> Option<Expr> {
    match terms.len() {
        1 => terms.pop(),
        _ => one_or_set(vec![Expr::Sum(terms)]),
    }
}

/// The product of a product and a further factor, kept flat.
fn times(product: Expr, factor: Expr) -> Expr {
    match product {
        Expr::Product(mut factors) => {
            factors.push(factor);
            Expr::Product(factors)
        }
        product => Expr::Product(vec![product, factor]),
    }
}
