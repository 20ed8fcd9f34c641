//! Symbolic shapes such as `[B, T~]`: parsing and printing.
//!
//! A shape is a list of dims. The first dim of every field on an edge counts rows. A dim that ends in `~` is
//! ragged: its length differs from row to row and nothing is padded. Symbols unify over the whole graph
//! (see `verl_plan`); numbers are fixed sizes.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// One dim of a [`Shape`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dim {
    /// A named size, the same for all rows: `B`.
    Symbol(Cow<'static, str>),
    /// A named length that differs per row: `T~`.
    Ragged(Cow<'static, str>),
    /// A fixed size.
    Fixed(usize),
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Symbol(name) => f.write_str(name),
            Dim::Ragged(name) => write!(f, "{name}~"),
            Dim::Fixed(size) => write!(f, "{size}"),
        }
    }
}

/// A symbolic shape; printed and parsed as `[B, T~]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape(pub Vec<Dim>);

impl Shape {
    /// The dim that counts rows, if the shape has any dim at all.
    pub fn rows(&self) -> Option<&Dim> {
        self.0.first()
    }

    /// The ragged dim, if there is one.
    pub fn ragged(&self) -> Option<&str> {
        self.0.iter().find_map(|dim| match dim {
            Dim::Ragged(name) => Some(name.as_ref()),
            _ => None,
        })
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

/// Why a shape could not be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a valid shape: {reason}; write for example `[B, T~]`")]
pub struct ShapeParseError {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl FromStr for Shape {
    type Err = ShapeParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason| ShapeParseError {
            text: text.to_owned(),
            reason,
        };
        let inner = text
            .trim()
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .ok_or_else(|| fail("it is not enclosed in brackets"))?;
        if inner.trim().is_empty() {
            return Ok(Shape(Vec::new()));
        }
        inner
            .split(',')
            .map(|part| {
                parse_dim(part.trim())
                    .ok_or_else(|| fail("a dim is a name, a name with `~`, or a number"))
            })
            .collect::<Result<Vec<_>, _>>()
            .map(Shape)
    }
}

fn parse_dim(part: &str) -> Option<Dim> {
    if let Ok(size) = part.parse::<usize>() {
        return Some(Dim::Fixed(size));
    }
    let (name, ragged) = match part.strip_suffix('~') {
        Some(name) => (name, true),
        None => (part, false),
    };
    let starts_well = name.chars().next().is_some_and(char::is_alphabetic);
    if !starts_well
        || !name
            .chars()
            .all(|c| c.is_alphanumeric() || c == '_' || c == '\'')
    {
        return None;
    }
    let name = Cow::Owned(name.to_owned());
    Some(if ragged {
        Dim::Ragged(name)
    } else {
        Dim::Symbol(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, printed: Option<&str>) {
        assert_eq!(
            text.parse::<Shape>().ok().map(|s| s.to_string()).as_deref(),
            printed
        );
    }

    #[test]
    fn parses_and_prints() {
        check("[B]", Some("[B]"));
        check("[ B ,T~ ]", Some("[B, T~]"));
        check("[B, 4]", Some("[B, 4]"));
        check("[]", Some("[]"));
        check("B, T", None);
        check("[B, ~]", None);
        check("[B,, T]", None);
    }
}
