//! A place where two versions of the same data differ, and how far apart values may be.

use std::fmt;

use serde::{Serialize, Serializer};
use verl_words::batch::RowId;

/// How far apart two floats may be: |a − b| ≤ absolute + relative · |a|. Other values must be equal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tolerance {
    /// In the unit of the key.
    pub absolute: f64,
    /// Share of the recorded value.
    pub relative: f64,
}

impl Tolerance {
    /// The same bits. Two NaNs with the same bits are equal; 0 and −0 are not.
    pub const EXACT: Tolerance = Tolerance {
        absolute: 0.0,
        relative: 0.0,
    };

    /// Whether only the same bits are accepted.
    pub fn is_exact(&self) -> bool {
        *self == Tolerance::EXACT
    }

    pub(crate) fn allows(&self, a: f64, b: f64) -> bool {
        !self.is_exact() && (a - b).abs() <= self.absolute + self.relative * a.abs()
    }
}

/// What differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DifferenceKind {
    /// One side has a key that the other lacks.
    Key,
    /// The two columns have different types.
    Type,
    /// One side has a row that the other lacks.
    Row,
    /// A row occurs more than once.
    RepeatedRow,
    /// The lists of a row have different lengths.
    Length,
    /// A value.
    Value,
    /// Weights of a model.
    Weights,
}

/// A place where two versions of a stage's data differ.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The stage.
    pub stage: String,
    /// The stage's own name of the key; for weights the model.
    pub key: String,
    /// What differs.
    pub kind: DifferenceKind,
    /// Position among the stage's rows.
    pub row: Option<usize>,
    /// Identity of the row, as `epoch.row#sample`.
    #[serde(serialize_with = "as_text")]
    pub sample: Option<RowId>,
    /// Position in the row's list, for ragged keys.
    pub index: Option<usize>,
    /// The value on the left; the recorded one, if one side is a trace.
    pub left: String,
    /// The value on the right.
    pub right: String,
    /// Representable floats between the two.
    pub ulps: Option<u64>,
    /// Distance between the two numbers, in the unit of the key.
    pub absolute: Option<f64>,
    /// Whether it is in the stage's input and not in its output.
    pub is_input: bool,
}

fn as_text<S: Serializer>(sample: &Option<RowId>, serializer: S) -> Result<S::Ok, S::Error> {
    sample.map(|id| id.to_string()).serialize(serializer)
}

impl Difference {
    pub(crate) fn new(stage: &str, key: &str, kind: DifferenceKind) -> Difference {
        Difference {
            stage: stage.to_owned(),
            key: key.to_owned(),
            kind,
            row: None,
            sample: None,
            index: None,
            left: String::new(),
            right: String::new(),
            ulps: None,
            absolute: None,
            is_input: false,
        }
    }

    /// The same difference, in the stage's input.
    pub(crate) fn of_input(mut self) -> Self {
        self.is_input = true;
        self
    }

    pub(crate) fn values(mut self, left: impl fmt::Display, right: impl fmt::Display) -> Self {
        (self.left, self.right) = (left.to_string(), right.to_string());
        self
    }

    pub(super) fn at(mut self, row: usize, id: u64) -> Self {
        (self.row, self.sample) = (Some(row), Some(RowId(id)));
        self
    }

    /// Where it is: stage, key, row, index.
    pub fn place(&self) -> String {
        let what = match self.kind {
            DifferenceKind::Weights => "weights of",
            _ if self.is_input => "input key",
            _ => "key",
        };
        let mut place = format!("stage `{}`, {what} `{}`", self.stage, self.key);
        if let (Some(row), Some(id)) = (self.row, self.sample) {
            place += &format!(", sample {id} (row {row})");
        }
        if let Some(index) = self.index {
            place += &format!(", index {index}");
        }
        place
    }

    /// The two values, labelled with the names of the two sides, and their distance; as lines of text.
    pub fn explain(&self, left: &str, right: &str) -> String {
        let width = left.len().max(right.len()).max("distance".len());
        let mut text = format!(
            "  {left:<width$}  {}\n  {right:<width$}  {}",
            self.left, self.right
        );
        match (self.ulps, self.absolute) {
            (Some(ulps), Some(absolute)) => {
                let s = if ulps == 1 { "" } else { "s" };
                text += &format!("\n  {:<width$}  {ulps} ULP{s}, {absolute:e}", "distance");
            }
            (None, Some(absolute)) => {
                text += &format!("\n  {:<width$}  {absolute:e}", "distance");
            }
            _ => {}
        }
        text
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Rows that were compared.
    pub rows: usize,
    /// Values that were compared.
    pub values: u64,
    /// Values, lengths, rows and keys that differ.
    pub differences: u64,
    /// Largest distance between two numbers.
    pub largest: f64,
    /// Sum of the distances of all pairs of numbers.
    pub total: f64,
    /// Pairs of numbers; lists of different lengths are paired up to the end of the shorter one, different types not at
    /// all.
    pub numbers: u64,
    /// The first pair without a distance, in words: `lengths 5 and 7`, `types f32 and i64`.
    pub unlike: Option<String>,
    /// The first difference: by key in declared order, then by row.
    pub first: Option<Difference>,
}

impl Comparison {
    pub(crate) fn note(&mut self, difference: impl FnOnce() -> Difference) {
        self.differences += 1;
        if self.first.is_none() {
            self.first = Some(difference());
        }
    }
}
