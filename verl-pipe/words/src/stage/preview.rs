//! Previews of rows as a source would write them, without a run and without loading weights.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::data::{DataError, DataLoaderInterface};
use crate::resource::ModelInfo;

/// The context in which a source previews rows.
#[derive(Clone, Copy)]
pub struct PreviewContext<'a> {
    /// Opened data sets by name; of a large one perhaps only the first rows.
    pub data: &'a BTreeMap<String, Arc<dyn DataLoaderInterface>>,
    /// Information about the models, by their names in the pipeline.
    pub models: &'a BTreeMap<String, ModelInfo>,
}

impl PreviewContext<'_> {
    /// The text converter of the model `name`, as the type that the source works with.
    pub fn texts<T: Any>(&self, name: &str) -> Option<&T> {
        let texts = self.models.get(name)?.texts.as_ref()?;
        let texts: &dyn Any = texts.0.as_ref();
        texts.downcast_ref()
    }
}

/// What is imitated or judged after a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetPreview {
    /// Its name: `target`, `response`, `chosen`, `rejected`.
    pub name: String,
    /// Token ids after the prompt.
    pub tokens: Vec<u32>,
    /// Which of them are trained.
    pub trained: Vec<bool>,
}

/// A row as a source writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPreview {
    /// Text of the prompt.
    pub prompt_text: String,
    /// Its token ids.
    pub prompt: Vec<u32>,
    /// The reference answer, if rows have one.
    pub answer: Option<String>,
    /// What follows the prompt; empty if a model is to write it.
    pub targets: Vec<TargetPreview>,
    /// Why the row is too long, if it is.
    pub too_long: Option<String>,
    /// Notes about what is valid but perhaps not intended.
    pub notes: Vec<NotePreview>,
}

/// A note about something in a row that is valid but perhaps not intended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotePreview {
    /// Its category: one note of each category is reported.
    pub sort: &'static str,
    /// The note.
    pub text: String,
}

/// What a source does with rows that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LongRows {
    /// They end the run before its first step.
    Refused,
    /// They are dropped.
    Dropped,
    /// They are truncated.
    Cut,
}

/// The rows of a source.
pub trait RowPreviews: Send + Sync {
    /// The data set, by its name in the pipeline.
    fn data(&self) -> &str;

    /// The model whose tokens are shown, by its name in the pipeline.
    fn model(&self) -> &str;

    /// Number of rows that a run would use, starting with the first.
    fn rows(&self) -> usize;

    /// What happens to rows that are too long.
    fn long_rows(&self) -> LongRows;

    /// Reads row `index` (from 0) without rendering it; returns its approximate length in bytes.
    ///
    /// # Errors
    /// Errors of its columns that a run would report.
    fn measure(&self, index: usize) -> Result<usize, DataError>;

    /// Row `index` (from 0), before anything is cut off.
    ///
    /// # Errors
    /// Errors of the row that a run would report.
    fn row(&self, index: usize) -> Result<RowPreview, DataError>;
}
