//! Fields, which describe the columns on edges, and keys, which are typed handles to fields.
//!
//! A field's name, shape, dtype, unit and meaning are defined in one constant ([`Key`]); the build check, the run-time
//! guards, the schema and the trace all read it.
//!
//! ```
//! use verl_pipe::field::{Key, Ragged, Scalar};
//!
//! /// Length penalty of a response.
//! const LENGTH_PENALTIES: Key<Scalar<f32>> = Key::new("length_penalties", "[B]", "reward", "penalty for overlong responses");
//! /// Attention entropy of each response token.
//! const FOCUS: Key<Ragged<f32>> = Key::new("focus", "[B, T~]", "nats", "attention entropy per response token");
//!
//! assert_eq!(LENGTH_PENALTIES.field().to_string(), "length_penalties: f32 [B]");
//! assert_eq!(FOCUS.field().to_string(), "focus: f32 [B, T~]");
//! ```

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shape::Shape;

/// Element type of a column.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// Boolean.
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Unsigned 32-bit integer (token ids).
    U32,
    /// Unsigned 64-bit integer (row identities).
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// UTF-8 text.
    Text,
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::I64 => "i64",
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Text => "text",
        })
    }
}

/// Which tokens a log-probability's distribution covers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Support {
    /// The whole vocabulary.
    Full,
    /// The tokens that sampling keeps (top-k, top-p, min-p, penalties), renormalised.
    Sampling,
}

impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Support::Full => "full",
            Support::Sampling => "sampling",
        })
    }
}

/// Which weights of a policy computed a log-probability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// The weights that the step started with.
    StepStart,
    /// Weights that never change during the run.
    Frozen,
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Weights::StepStart => "step_start",
            Weights::Frozen => "frozen",
        })
    }
}

/// Under which distribution a log-probability (or entropy) was computed.
///
/// A writer sets every part that it knows; a reader sets what it requires and leaves the rest `None` (anything).
/// A ratio of two log-probabilities whose tags differ is a build error. Other numbers of a model, such as a critic's
/// values, have only a model and weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LogProbTag {
    /// Name of the model.
    pub policy: Option<String>,
    /// Sampling temperature by which logits were divided.
    pub temperature: Option<f64>,
    /// Tokens over which the distribution is normalised.
    pub support: Option<Support>,
    /// Which weights of the model.
    pub weights: Option<Weights>,
}

impl LogProbTag {
    /// The parts in which `self` (as required) differs from `written`: name, required, written.
    pub fn mismatches(&self, written: &LogProbTag) -> Vec<(&'static str, String, String)> {
        fn one<T: PartialEq + ToString>(
            part: &'static str,
            want: &Option<T>,
            have: &Option<T>,
            out: &mut Vec<(&'static str, String, String)>,
        ) {
            if let Some(want) = want
                && have.as_ref() != Some(want)
            {
                let have = have
                    .as_ref()
                    .map_or_else(|| "unknown".to_owned(), ToString::to_string);
                out.push((part, want.to_string(), have));
            }
        }
        let mut out = Vec::new();
        one("policy", &self.policy, &written.policy, &mut out);
        one(
            "temperature",
            &self.temperature,
            &written.temperature,
            &mut out,
        );
        one("support", &self.support, &written.support, &mut out);
        one("weights", &self.weights, &written.weights, &mut out);
        out
    }
}

impl fmt::Display for LogProbTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(policy) = &self.policy {
            parts.push(format!("policy {policy}"));
        }
        if let Some(temperature) = self.temperature {
            parts.push(format!("T {temperature}"));
        }
        if let Some(support) = self.support {
            parts.push(format!("support {support}"));
        }
        if let Some(weights) = self.weights {
            parts.push(format!("weights {weights}"));
        }
        write!(f, "{{{}}}", parts.join(", "))
    }
}

/// A column on an edge: name, dtype, shape, unit, meaning, tags.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Field {
    /// Name of the key.
    pub name: Cow<'static, str>,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape as written, for example `[B, T~]`; [`Field::parsed_shape`] parses it.
    pub shape: Cow<'static, str>,
    /// Unit of a value, for example `nats`; empty where there is none.
    pub unit: Cow<'static, str>,
    /// What a value means.
    pub meaning: Cow<'static, str>,
    /// Values may be null (a row without a score).
    pub nullable: bool,
    /// Every value must be finite; the run-time guard checks it.
    pub finite: bool,
    /// Which model and weights a number comes from; for a log-probability also its distribution.
    pub tag: Option<LogProbTag>,
}

impl Field {
    /// The shape, parsed.
    ///
    /// # Errors
    /// When the text is not a valid shape.
    pub fn parsed_shape(&self) -> Result<Shape, crate::shape::ShapeParseError> {
        self.shape.parse()
    }

    /// Whether its values are identifiers instead of measurements, such as token ids, row numbers, flags and masks:
    /// they are equal or different, but their mean is meaningless. Integers are identifiers unless their unit is a
    /// quantity; texts and booleans always are.
    pub fn is_identifier(&self) -> bool {
        let kinds = [
            "id", "ids", "row", "flag", "kind", "reason", "mask", "index", "class",
        ];
        let last = self.unit.rsplit(' ').next().unwrap_or_default();
        match self.dtype {
            DType::Text | DType::Bool => true,
            DType::F32 | DType::F64 => false,
            DType::U8 | DType::U32 | DType::U64 | DType::I64 => {
                last.is_empty() || kinds.contains(&last)
            }
        }
    }

    /// The same field under another name.
    pub fn renamed(mut self, name: impl Into<Cow<'static, str>>) -> Field {
        self.name = name.into();
        self
    }

    /// The same field with another shape, for example `[P]` for a key that one stage keeps per prompt.
    pub fn shaped(mut self, shape: impl Into<Cow<'static, str>>) -> Field {
        self.shape = shape.into();
        self
    }

    /// The same field with the distribution of its log-probabilities.
    pub fn tagged(mut self, tag: LogProbTag) -> Field {
        self.tag = Some(tag);
        self
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {}", self.name, self.dtype, self.shape)?;
        if let Some(tag) = &self.tag {
            write!(f, " {tag}")?;
        }
        Ok(())
    }
}

/// A Rust element type that a column can contain.
pub trait Element: Copy + Send + Sync + 'static {
    /// Its dtype.
    const DTYPE: DType;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),*) => {$(
        impl Element for $ty { const DTYPE: DType = DType::$dtype; }
    )*};
}
element!(u8 => U8, u32 => U32, u64 => U64, i64 => I64, f32 => F32, f64 => F64);

/// Column kind: one number per row, `[B]`.
#[derive(Debug, Clone, Copy)]
pub struct Scalar<T>(PhantomData<fn() -> T>);

/// Column kind: a list of numbers per row, `[B, T~]`.
#[derive(Debug, Clone, Copy)]
pub struct Ragged<T>(PhantomData<fn() -> T>);

/// Column kind: one text per row, `[B]`.
#[derive(Debug, Clone, Copy)]
pub struct Text;

/// A kind of column: [`Scalar`], [`Ragged`] or [`Text`].
pub trait ColumnKind: 'static {
    /// Element type of the kind.
    const DTYPE: DType;
    /// Whether a row contains a list.
    const RAGGED: bool;
}

impl<T: Element> ColumnKind for Scalar<T> {
    const DTYPE: DType = T::DTYPE;
    const RAGGED: bool = false;
}
impl<T: Element> ColumnKind for Ragged<T> {
    const DTYPE: DType = T::DTYPE;
    const RAGGED: bool = true;
}
impl ColumnKind for Text {
    const DTYPE: DType = DType::Text;
    const RAGGED: bool = false;
}

/// A typed handle to a field; defined as a constant and used for every access to the column.
pub struct Key<K> {
    name: &'static str,
    shape: &'static str,
    unit: &'static str,
    meaning: &'static str,
    nullable: bool,
    finite: bool,
    kind: PhantomData<fn() -> K>,
}

impl<K> Clone for Key<K> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K> Copy for Key<K> {}

impl<K: ColumnKind> fmt::Debug for Key<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.field())
    }
}

impl<K: ColumnKind> Key<K> {
    /// A key for `name` of `shape`, whose values are in `unit` and mean `meaning`.
    pub const fn new(
        name: &'static str,
        shape: &'static str,
        unit: &'static str,
        meaning: &'static str,
    ) -> Self {
        Key {
            name,
            shape,
            unit,
            meaning,
            nullable: false,
            finite: false,
            kind: PhantomData,
        }
    }

    /// Values must be finite; a run stops at the edge where one is not.
    pub const fn finite(mut self) -> Self {
        self.finite = true;
        self
    }

    /// Values may be null.
    pub const fn nullable(mut self) -> Self {
        self.nullable = true;
        self
    }

    /// Name of the key.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The field that the key names.
    pub fn field(&self) -> Field {
        Field {
            name: Cow::Borrowed(self.name),
            dtype: K::DTYPE,
            shape: Cow::Borrowed(self.shape),
            unit: Cow::Borrowed(self.unit),
            meaning: Cow::Borrowed(self.meaning),
            nullable: self.nullable,
            finite: self.finite,
            tag: None,
        }
    }

    /// The field with the distribution of its log-probabilities.
    pub fn tagged(&self, tag: LogProbTag) -> Field {
        self.field().tagged(tag)
    }
}

impl<K: ColumnKind> From<Key<K>> for Field {
    fn from(key: Key<K>) -> Field {
        key.field()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys;

    #[test]
    fn identifiers_are_distinguished_from_measurements() {
        let names: [Field; 8] = [
            keys::RESPONSES.into(),
            keys::DATA_ROWS.into(),
            keys::DESIRABLE.into(),
            keys::MASK_KINDS.into(),
            keys::FINISH_REASONS.into(),
            keys::ROLLOUT_MASKS.into(),
            keys::ANSWERS.into(),
            Key::<Ragged<u32>>::new("experts", "[B, T~]", "expert id", "expert of each token")
                .into(),
        ];
        for field in names {
            assert!(field.is_identifier(), "{field}");
        }
        let measures: [Field; 3] = [
            keys::REWARDS.into(),
            keys::OLD_LOG_PROBS.into(),
            Key::<Scalar<u32>>::new("turns", "[B]", "turns", "turns of an episode").into(),
        ];
        for field in measures {
            assert!(!field.is_identifier(), "{field}");
        }
    }
}
