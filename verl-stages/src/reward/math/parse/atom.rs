//! The parts of sums and products: numbers, letters, brackets, commands and functions.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::ToPrimitive;

use super::super::evaluate::exact;
use super::super::expr::{Expr, Function};
use super::Parser;
use super::token::{Token, is_in};

/// Highest order of a root.
const HIGHEST_ROOT: i64 = 1000;
/// Commands that are letters; in upper case they are different letters.
const GREEK: &str = "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi \
    rho varrho sigma varsigma tau upsilon phi varphi chi psi omega ell hbar angle triangle nabla \
    partial";
/// Commands that put a mark over their argument, which makes it a different name.
const ACCENTS: &str =
    "overline bar vec overrightarrow hat widehat tilde widetilde dot ddot overarc";

impl Parser {
    /// One argument of a command: the contents of braces, or one digit, letter or command.
    pub(super) fn argument(&mut self) -> Option<Expr> {
        if let Some(Token::Number(digits)) = self.peek() {
            let mut first = digits.clone();
            let length = if first.starts_with('.') {
                first.len()
            } else {
                1
            };
            let rest = first.split_off(length);
            let argument = number(&first)?;
            if !rest.is_empty() {
                let two = [first, rest].map(Token::Number);
                self.tokens.splice(self.at..=self.at, two);
            }
            self.at += 1;
            return Some(argument);
        }
        self.deeper(Parser::primary)
    }

    pub(super) fn primary(&mut self) -> Option<Expr> {
        let token = self.peek()?.clone();
        self.at += 1;
        match token {
            Token::Number(text) => {
                let value = number(&text)?;
                self.repeating(&text).or(Some(value))
            }
            Token::Letter('e') => Some(Expr::E),
            Token::Letter('i') => Some(Expr::I),
            Token::Letter('π') => Some(Expr::Pi),
            Token::Letter(letter) => Some(Expr::Symbol(letter.to_string())),
            Token::Text(words) => Some(text(&words)),
            Token::Command(name) => self.deeper(|parser| parser.command(&name)),
            Token::Begin => self.deeper(Parser::matrix),
            Token::Sign(sign) => match sign {
                '(' | '[' | '{' | '⦃' => self.deeper(|parser| parser.bracket(sign)),
                'π' => Some(Expr::Pi),
                '∞' => Some(Expr::Infinity),
                '∅' => Some(Expr::Set(Vec::new())),
                '|' if self.bars == 0 => {
                    self.bars += 1;
                    let inner = self.deeper(Parser::sum)?;
                    self.bars -= 1;
                    self.take('|').then(|| Expr::call(Function::Abs, inner))
                }
                '⌊' | '⌈' => {
                    let inner = self.deeper(Parser::sum)?;
                    let (close, function) = if sign == '⌊' {
                        ('⌋', Function::Floor)
                    } else {
                        ('⌉', Function::Ceil)
                    };
                    self.take(close).then(|| Expr::call(function, inner))
                }
                _ => None,
            },
            Token::End | Token::Row => None,
        }
    }

    /// `0.1\overline{6}`: digits under a bar after a number repeat.
    fn repeating(&mut self, start: &str) -> Option<Expr> {
        let bar = matches!(self.peek(), Some(Token::Command(name)) if name == "overline" || name == "bar" || name == "dot");
        let decimals = start
            .split_once('.')
            .map_or(0, |(_, decimals)| decimals.len());
        let pointed = start.contains('.');
        let digits = match (
            self.tokens.get(self.at + 1),
            self.tokens.get(self.at + 2),
            self.tokens.get(self.at + 3),
        ) {
            (Some(Token::Sign('{')), Some(Token::Number(digits)), Some(Token::Sign('}')))
                if bar && pointed && !digits.contains('.') =>
            {
                digits.clone()
            }
            _ => return None,
        };
        self.at += 4;
        let ten = |power: usize| Some(BigInt::from(10).pow(u32::try_from(power).ok()?));
        let shown: BigInt = start.replace('.', "").parse().ok()?;
        let repeated = BigRational::new(digits.parse().ok()?, ten(digits.len())? - 1);
        let value = (BigRational::from_integer(shown) + repeated) / ten(decimals)?;
        Some(Expr::Number {
            value,
            decimal: false,
        })
    }

    fn command(&mut self, name: &str) -> Option<Expr> {
        match name {
            "frac" => {
                let (top, bottom) = (self.argument()?, self.argument()?);
                Some(top.quotient(bottom))
            }
            "binom" => {
                let (n, k) = (self.argument()?, self.argument()?);
                Some(Expr::Call(Function::Binomial, vec![n, k]))
            }
            "sqrt" => self.root(),
            "log" | "lg" => self.logarithm(),
            "sets" => None,
            set if set.starts_with("set") && set.len() == 4 => {
                Some(Expr::Named(set.chars().nth(3)?))
            }
            accent if is_in(ACCENTS, accent) => {
                let start = self.at;
                self.argument()?;
                Some(Expr::Symbol(format!(
                    "{accent}{:?}",
                    &self.tokens[start..self.at]
                )))
            }
            letter if is_in(GREEK, &letter.to_ascii_lowercase()) => {
                let lower = letter.to_ascii_lowercase();
                let known = if letter == lower {
                    lower
                } else {
                    letter.to_owned()
                };
                Some(Expr::Symbol(known))
            }
            name => self.function(Function::named(name)?),
        }
    }

    fn root(&mut self) -> Option<Expr> {
        let mut order = 2;
        if self.take('[') {
            let expr = self.deeper(Parser::sum)?;
            let value = exact(&expr)?;
            order = value
                .is_integer()
                .then(|| value.to_integer().to_i64())
                .flatten()?;
            if !self.take(']') {
                return None;
            }
        }
        let inner = self.argument()?;
        (2..=HIGHEST_ROOT)
            .contains(&order)
            .then(|| Expr::Root(Box::new(inner), order))
    }

    /// A logarithm, to the base 10 if none is given, as in Math-Verify.
    fn logarithm(&mut self) -> Option<Expr> {
        let base = match self.take('_') {
            true => self.argument()?,
            false => Expr::integer(10),
        };
        let power = self.power_of_name()?;
        let inner = self.applied()?;
        let quotient = Expr::call(Function::Ln, inner).quotient(Expr::call(Function::Ln, base));
        Some(power.map_or(quotient.clone(), |power| quotient.power(power)))
    }

    fn power_of_name(&mut self) -> Option<Option<Expr>> {
        Some(match self.take('^') {
            true => Some(self.exponent()?),
            false => None,
        })
    }

    fn function(&mut self, function: Function) -> Option<Expr> {
        let power = self.power_of_name()?;
        if matches!(
            function,
            Function::Gcd | Function::Lcm | Function::Max | Function::Min
        ) {
            let inner = self.primary()?;
            return match inner {
                Expr::Tuple(all) | Expr::Set(all) => Some(Expr::Call(function, all)),
                _ => None,
            };
        }
        let inner = self.applied()?;
        match power {
            Some(power) if power == Expr::integer(1).negative() || power == Expr::integer(-1) => {
                Some(Expr::call(function.inverse()?, inner))
            }
            Some(power) => Some(Expr::call(function, inner).power(power)),
            None => Some(Expr::call(function, inner)),
        }
    }

    /// The argument of a function: the contents of brackets, or the factors after it up to the next function.
    fn applied(&mut self) -> Option<Expr> {
        if matches!(self.sign(), Some('(' | '{' | '[' | '|')) {
            let bracketed = self.primary()?;
            return bracketed.is_scalar().then_some(bracketed);
        }
        let mut factors = Vec::new();
        let negative = self.take('-');
        loop {
            let function = matches!(self.peek(), Some(Token::Command(name)) if Function::named(name).is_some() || name == "log" || name == "lg");
            let ends = matches!(self.peek(), Some(Token::Text(_)))
                || self.sign() == Some('(') && !factors.is_empty();
            if !self.starts_factor() || ends || function && !factors.is_empty() {
                break;
            }
            factors.push(self.power()?);
        }
        let argument = match factors.len() {
            0 => return None,
            1 => factors.pop()?,
            _ => Expr::Product(factors),
        };
        Some(if negative {
            argument.negative()
        } else {
            argument
        })
    }
}

fn number(text: &str) -> Option<Expr> {
    let (integer, decimals) = text.split_once('.').unwrap_or((text, ""));
    let digits: BigInt = format!("0{integer}{decimals}").parse().ok()?;
    let below = BigInt::from(10).pow(u32::try_from(decimals.len()).ok()?);
    Some(Expr::Number {
        value: BigRational::new(digits, below),
        decimal: !decimals.is_empty(),
    })
}

/// Words as a factor: one letter, in brackets or not, is a variable, so that `\text{(A)}` is `A`.
fn text(words: &str) -> Expr {
    let inner = words
        .trim_start_matches('(')
        .trim_end_matches([')', '.'])
        .trim();
    let mut letters = inner.chars();
    match (letters.next(), letters.next()) {
        (Some('e'), None) => Expr::E,
        (Some('i'), None) => Expr::I,
        (Some(letter), None) => Expr::Symbol(letter.to_string()),
        _ => Expr::Text(inner.split_whitespace().collect::<Vec<_>>().join(" ")),
    }
}
