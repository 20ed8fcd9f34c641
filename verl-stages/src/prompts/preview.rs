//! Rows as a source writes them, previewed before a run.

use serde_json::Value;
use verl_models::targets::Target;
use verl_words::data::DataError;
use verl_words::stage::{
    LongRows, NotePreview, PreviewContext, RowPreview, RowPreviews, StageError, TargetPreview,
};

use super::encode::{EncodedExample, TooLong};
use super::format::Row;
use super::notes::RowNote;
use super::{OnLong, PromptFormat, Source, SurveyedRow};
use crate::model::TextTools;

/// An encoded row before truncation, with what is too long in it and its notes.
pub(crate) struct Shown {
    pub text: String,
    pub prompt: Vec<u32>,
    pub answer: Option<String>,
    /// Targets, each with its name.
    pub targets: Vec<(&'static str, Target)>,
    pub long: Option<TooLong>,
    pub notes: Vec<RowNote>,
}

impl Shown {
    /// An example whose target is called `name`; without a name it shows no target.
    pub fn example(
        format: &PromptFormat,
        source: &Source,
        row: usize,
        example: EncodedExample,
        answer: Option<String>,
        name: Option<&'static str>,
    ) -> Result<Shown, DataError> {
        let long = format.long_example(&example, source.context);
        let EncodedExample {
            prompt,
            target,
            notes,
        } = example;
        let notes = notes.into_iter().map(RowNote::Written);
        Ok(Shown {
            text: prompt.text,
            prompt: prompt.tokens,
            answer,
            targets: name
                .into_iter()
                .map(|name| (name, target.clone()))
                .collect(),
            long,
            notes: notes.chain(format.tools_note(source, row)?).collect(),
        })
    }

    /// The part that a survey reads.
    pub fn surveyed(self) -> SurveyedRow {
        SurveyedRow {
            long: self.long,
            notes: self.notes,
        }
    }
}

/// How a source previews its rows before a run.
pub(crate) struct RowPreviewer {
    /// Maximum number of rows, from the first on.
    pub rows: usize,
    /// Reads a row without rendering it; returns its length in bytes.
    pub measure: Measure,
    /// Writes a row.
    pub show: Show,
}

/// Reads a row and returns its length in bytes.
type Measure = Box<dyn Fn(&Source, &Row<'_>) -> Result<usize, DataError> + Send + Sync>;
/// Writes a row.
type Show = Box<dyn Fn(&Source, usize) -> Result<Shown, DataError> + Send + Sync>;

impl RowPreviewer {
    /// Previews all rows.
    pub fn new(
        measure: impl Fn(&Source, &Row<'_>) -> Result<usize, DataError> + Send + Sync + 'static,
        show: impl Fn(&Source, usize) -> Result<Shown, DataError> + Send + Sync + 'static,
    ) -> Self {
        RowPreviewer {
            rows: usize::MAX,
            measure: Box::new(measure),
            show: Box::new(show),
        }
    }

    /// Previews only the first `rows` rows.
    pub fn first(self, rows: usize) -> Self {
        RowPreviewer { rows, ..self }
    }
}

/// Bytes of the texts in a value.
pub(crate) fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 0,
    }
}

/// The rows of a source.
struct Preview {
    data: String,
    model: String,
    on_long: OnLong,
    source: Source,
    looks: RowPreviewer,
}

/// The rows of `data` as they are written for `model`; `None` if one of the two is not in `context`.
///
/// # Errors
/// Those of [`Source::new`].
pub(crate) fn preview(
    context: PreviewContext<'_>,
    data: &str,
    model: &str,
    format: &PromptFormat,
    has_answers: bool,
    looks: RowPreviewer,
) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
    let rows = context.data.get(data).cloned();
    let (Some(rows), Some(texts)) = (rows, context.texts::<TextTools>(model)) else {
        return Ok(None);
    };
    Ok(Some(Box::new(Preview {
        source: Source::new(rows, texts, model, format, has_answers)?,
        data: data.to_owned(),
        model: model.to_owned(),
        on_long: format.on_long,
        looks,
    })))
}

impl RowPreviews for Preview {
    fn data(&self) -> &str {
        &self.data
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn rows(&self) -> usize {
        self.source.data.len().min(self.looks.rows)
    }

    fn long_rows(&self) -> LongRows {
        match self.on_long {
            OnLong::Error => LongRows::Refused,
            OnLong::Drop => LongRows::Dropped,
            OnLong::Truncate => LongRows::Cut,
        }
    }

    fn measure(&self, index: usize) -> Result<usize, DataError> {
        let row = Row::read(self.source.data.as_ref(), index)?;
        (self.looks.measure)(&self.source, &row)
    }

    fn row(&self, index: usize) -> Result<RowPreview, DataError> {
        let shown = (self.looks.show)(&self.source, index)?;
        let targets = shown.targets.into_iter();
        let targets = targets.map(|(name, Target { tokens, trained })| TargetPreview {
            name: name.to_owned(),
            tokens,
            trained,
        });
        Ok(RowPreview {
            prompt_text: shown.text,
            prompt: shown.prompt,
            answer: shown.answer,
            targets: targets.collect(),
            too_long: shown.long.map(|long| long.reason),
            notes: shown.notes.iter().map(note).collect(),
        })
    }
}

fn note(note: &RowNote) -> NotePreview {
    NotePreview {
        sort: note.kind(),
        text: note.text(),
    }
}
