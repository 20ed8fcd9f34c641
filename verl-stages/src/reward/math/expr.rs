//! An answer as a tree of expressions.

use num_rational::BigRational;

/// An answer or a part of one. Its depth is bounded by the parser.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Expr {
    /// A number; `decimal` if it is written with a point, and so may be rounded.
    Number {
        value: BigRational,
        decimal: bool,
    },
    /// A number with the base of its digits.
    Based {
        value: BigRational,
        base: BigRational,
    },
    /// A variable, in lower case.
    Symbol(String),
    Pi,
    E,
    I,
    Infinity,
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Power(Box<Expr>, Box<Expr>),
    /// A root of order 2 or more.
    Root(Box<Expr>, i64),
    Negative(Box<Expr>),
    Percent(Box<Expr>),
    /// `a ± b` and `a ∓ b`; `upper` says whether the upper sign is plus.
    PlusMinus {
        left: Box<Expr>,
        right: Box<Expr>,
        upper: bool,
    },
    Call(Function, Vec<Expr>),
    /// Words, in lower case.
    Text(String),
    /// `{a, b}`, and `a, b` without brackets, which Math-Verify reads as a set.
    Set(Vec<Expr>),
    /// `(a, b)`: a point, or an open interval if the other answer is a set of real numbers.
    Tuple(Vec<Expr>),
    Interval {
        low: Box<Expr>,
        low_open: bool,
        high: Box<Expr>,
        high_open: bool,
    },
    /// ℝ, ℤ and the like.
    Named(char),
    Union(Box<Expr>, Box<Expr>),
    Intersection(Box<Expr>, Box<Expr>),
    Difference(Box<Expr>, Box<Expr>),
    /// `a < b ≤ c`: one sign fewer than sides.
    Relation(Vec<Expr>, Vec<Sign>),
    /// Rows of equal length.
    Matrix(Vec<Vec<Expr>>),
}

/// A sign of a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    Equal,
    Unequal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

impl Sign {
    /// The sign of the relation with its sides exchanged.
    pub(super) fn flipped(self) -> Sign {
        match self {
            Sign::Less => Sign::Greater,
            Sign::LessEqual => Sign::GreaterEqual,
            Sign::Greater => Sign::Less,
            Sign::GreaterEqual => Sign::LessEqual,
            same => same,
        }
    }
}

/// A function by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Arcsin,
    Arccos,
    Arctan,
    Sinh,
    Cosh,
    Tanh,
    Exp,
    Ln,
    Abs,
    Floor,
    Ceil,
    Factorial,
    Binomial,
    Gcd,
    Lcm,
    Max,
    Min,
}

impl Function {
    /// A function whose argument may be written without brackets, by the name of its command.
    pub(super) fn named(name: &str) -> Option<Function> {
        Some(match name {
            "sin" => Function::Sin,
            "cos" => Function::Cos,
            "tan" | "tg" => Function::Tan,
            "cot" | "ctg" => Function::Cot,
            "sec" => Function::Sec,
            "csc" => Function::Csc,
            "arcsin" | "asin" => Function::Arcsin,
            "arccos" | "acos" => Function::Arccos,
            "arctan" | "atan" => Function::Arctan,
            "sinh" => Function::Sinh,
            "cosh" => Function::Cosh,
            "tanh" => Function::Tanh,
            "exp" => Function::Exp,
            "ln" => Function::Ln,
            "gcd" => Function::Gcd,
            "lcm" => Function::Lcm,
            "max" => Function::Max,
            "min" => Function::Min,
            "abs" => Function::Abs,
            "floor" => Function::Floor,
            "ceil" => Function::Ceil,
            _ => return None,
        })
    }

    /// The inverse function, written as the power −1 of the function's name.
    pub(super) fn inverse(self) -> Option<Function> {
        Some(match self {
            Function::Sin => Function::Arcsin,
            Function::Cos => Function::Arccos,
            Function::Tan => Function::Arctan,
            _ => return None,
        })
    }
}

impl Expr {
    pub(super) fn integer(value: i64) -> Expr {
        Expr::Number {
            value: BigRational::from_integer(value.into()),
            decimal: false,
        }
    }

    pub(super) fn negative(self) -> Expr {
        Expr::Negative(Box::new(self))
    }

    pub(super) fn power(self, power: Expr) -> Expr {
        Expr::Power(Box::new(self), Box::new(power))
    }

    pub(super) fn quotient(self, below: Expr) -> Expr {
        Expr::Product(vec![self, below.power(Expr::integer(-1))])
    }

    pub(super) fn call(function: Function, argument: Expr) -> Expr {
        Expr::Call(function, vec![argument])
    }

    /// The direct parts of this expression.
    pub(super) fn parts(&self) -> Vec<&Expr> {
        match self {
            Expr::Sum(all)
            | Expr::Product(all)
            | Expr::Call(_, all)
            | Expr::Set(all)
            | Expr::Tuple(all)
            | Expr::Relation(all, _) => all.iter().collect(),
            Expr::Power(a, b)
            | Expr::Union(a, b)
            | Expr::Intersection(a, b)
            | Expr::Difference(a, b) => vec![a, b],
            Expr::PlusMinus { left, right, .. } => vec![left, right],
            Expr::Interval { low, high, .. } => vec![low, high],
            Expr::Root(a, _) | Expr::Negative(a) | Expr::Percent(a) => vec![a],
            Expr::Matrix(rows) => rows.iter().flatten().collect(),
            _ => Vec::new(),
        }
    }

    /// Whether it is a number, a variable or made of these, without sets, relations and texts.
    pub(super) fn is_scalar(&self) -> bool {
        let own = !matches!(
            self,
            Expr::Text(_)
                | Expr::Set(_)
                | Expr::Tuple(_)
                | Expr::Interval { .. }
                | Expr::Named(_)
                | Expr::Union(..)
                | Expr::Intersection(..)
                | Expr::Difference(..)
                | Expr::Relation(..)
                | Expr::Matrix(_)
                | Expr::PlusMinus { .. }
        );
        own && self.parts().into_iter().all(Expr::is_scalar)
    }

    /// Whether it is made only of variables: `x`, `f(x)`, `a/4`, `(x, y)`.
    pub(super) fn is_of_symbols(&self) -> bool {
        match self {
            Expr::Symbol(_) => true,
            Expr::Product(parts) | Expr::Tuple(parts) => parts.iter().all(Expr::is_of_symbols),
            Expr::Power(base, power) => {
                let below = base.is_of_symbols() || matches!(**base, Expr::Number { .. });
                below && **power == Expr::integer(-1)
            }
            _ => false,
        }
    }

    /// The names of its variables.
    pub(super) fn symbols<'e>(&'e self, into: &mut Vec<&'e str>) {
        if let Expr::Symbol(name) = self
            && !into.contains(&name.as_str())
        {
            into.push(name);
        }
        for part in self.parts() {
            part.symbols(into);
        }
    }
}
