//! The rows that a source makes, for people and programs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_declare::pipe::StageDecl;
use verl_words::data::DataError;
use verl_words::resource::Texts;
use verl_words::stage::{RowPreview, TargetPreview};

/// The rows that one source makes from its data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageRows {
    /// Name of the stage in the pipeline.
    pub stage: String,
    /// Name of the data set in the pipeline.
    pub data: String,
    /// Rows whose columns were read: all rows that the stage draws from, or the first rows of a large data set.
    pub rows: usize,
    /// Whether the data set was opened completely.
    #[serde(rename = "is_whole")]
    pub is_complete: bool,
    /// Rows that were rendered and tokenised.
    pub tokenised: usize,
    /// How many of the tokenised rows are too long.
    pub too_long: usize,
    /// Lengths of their prompts (tokens); absent if there is none.
    pub prompt_tokens: Option<Spread>,
    /// Lengths of the texts after the prompts (tokens), such as `target`, `chosen`.
    pub target_tokens: Vec<(String, Spread)>,
    /// The first rows as they are written, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shown: Vec<ShownRow>,
    #[serde(skip)]
    lengths: Vec<(String, Vec<usize>)>,
}

/// Minimum, median and maximum of lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Spread {
    /// The minimum.
    pub least: usize,
    /// The median, the lower of the two for an even number.
    pub median: usize,
    /// The maximum.
    pub most: usize,
}

impl Spread {
    /// The spread of `lengths`; `None` if there are none.
    fn of(mut lengths: Vec<usize>) -> Option<Spread> {
        lengths.sort_unstable();
        Some(Spread {
            least: *lengths.first()?,
            median: *lengths.get((lengths.len() - 1) / 2)?,
            most: *lengths.last()?,
        })
    }
}

/// A row as a run would see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ShownRow {
    /// The row of the data set, counted from 1.
    pub row: usize,
    /// The prompt as text.
    pub prompt_text: String,
    /// Its tokens.
    pub prompt: Vec<ShownToken>,
    /// The texts after it; empty if a model generates them.
    pub targets: Vec<ShownTarget>,
    /// The reference answer; absent if rows have none.
    pub answer: Option<String>,
    /// Why it is too long; absent if it is not.
    pub too_long: Option<String>,
    /// What is allowed but perhaps not intended.
    pub notes: Vec<String>,
    /// Why it cannot be used; absent if it can.
    pub refused: Option<String>,
}

/// A text after a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ShownTarget {
    /// Its name: `target`, `response`, `chosen`, `rejected`.
    pub name: String,
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<ShownToken>,
}

/// A token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ShownToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// Whether it is trained.
    pub trained: bool,
}

impl StageRows {
    pub(super) fn new(stage: &StageDecl, data: &str, rows: usize, is_complete: bool) -> Self {
        StageRows {
            stage: stage.name.clone(),
            data: data.to_owned(),
            rows,
            is_complete,
            tokenised: 0,
            too_long: 0,
            prompt_tokens: None,
            target_tokens: Vec::new(),
            shown: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// Counts a written row.
    pub(super) fn count(&mut self, row: &RowPreview) {
        self.tokenised += 1;
        self.too_long += usize::from(row.too_long.is_some());
        self.add_length(PROMPT, row.prompt.len());
        for target in &row.targets {
            self.add_length(&target.name, target.tokens.len());
        }
    }

    fn add_length(&mut self, name: &str, length: usize) {
        match self.lengths.iter_mut().find(|(other, _)| other == name) {
            Some((_, lengths)) => lengths.push(length),
            None => self.lengths.push((name.to_owned(), vec![length])),
        }
    }

    /// Summarises the lengths.
    pub(super) fn finish(&mut self) {
        for (name, lengths) in std::mem::take(&mut self.lengths) {
            let Some(spread) = Spread::of(lengths) else {
                continue;
            };
            match name == PROMPT {
                true => self.prompt_tokens = Some(spread),
                false => self.target_tokens.push((name, spread)),
            }
        }
    }
}

const PROMPT: &str = "prompt";

impl ShownRow {
    pub(super) fn new(
        row: usize,
        written: &Result<RowPreview, DataError>,
        texts: Option<&Texts>,
    ) -> Self {
        let written = match written {
            Ok(written) => written,
            Err(error) => return ShownRow::refused(row, error.to_string()),
        };
        let token = |id: u32, trained: bool| ShownToken {
            id,
            text: texts.map(|texts| texts.0.token(id)).unwrap_or_default(),
            trained,
        };
        let target = |target: &TargetPreview| ShownTarget {
            name: target.name.clone(),
            text: texts
                .map(|texts| texts.0.text(&target.tokens))
                .unwrap_or_default(),
            tokens: target
                .tokens
                .iter()
                .zip(&target.trained)
                .map(|(id, trained)| token(*id, *trained))
                .collect(),
        };
        ShownRow {
            row: row + 1,
            prompt_text: written.prompt_text.clone(),
            prompt: written.prompt.iter().map(|id| token(*id, false)).collect(),
            targets: written.targets.iter().map(target).collect(),
            answer: written.answer.clone(),
            too_long: written.too_long.clone(),
            notes: written.notes.iter().map(|note| note.text.clone()).collect(),
            refused: None,
        }
    }

    /// A row that a run refuses.
    pub(super) fn refused(row: usize, reason: String) -> Self {
        ShownRow {
            row: row + 1,
            prompt_text: String::new(),
            prompt: Vec::new(),
            targets: Vec::new(),
            answer: None,
            too_long: None,
            notes: Vec::new(),
            refused: Some(reason),
        }
    }
}
