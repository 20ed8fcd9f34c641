//! Rows of a data set as a source would write them, for a look before a run: no weights are loaded.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::data::{DataError, DataLoaderInterface};
use crate::resource::ModelInfo;

/// What a source is given to show rows.
#[derive(Clone, Copy)]
pub struct PreviewContext<'a> {
    /// Opened data sets by name; of a large one perhaps the first rows alone.
    pub data: &'a BTreeMap<String, Arc<dyn DataLoaderInterface>>,
    /// What the models tell of themselves, by their names in the pipeline.
    pub models: &'a BTreeMap<String, ModelInfo>,
}

impl PreviewContext<'_> {
    /// What turns texts into tokens of the model `name`, as the type that the source works with.
    pub fn texts<T: Any>(&self, name: &str) -> Option<&T> {
        let texts = self.models.get(name)?.texts.as_ref()?;
        let texts: &dyn Any = texts.0.as_ref();
        texts.downcast_ref()
    }
}

/// What is imitated or judged behind a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetPreview {
    /// What it is called: `target`, `response`, `chosen`, `rejected`.
    pub name: String,
    /// Token ids behind the prompt.
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
    /// The reference answer, where rows have one.
    pub answer: Option<String>,
    /// What stands behind the prompt; none where a model is to write it.
    pub targets: Vec<TargetPreview>,
    /// Why the row is too long, where it is.
    pub too_long: Option<String>,
    /// What is possible and perhaps not meant.
    pub notes: Vec<NotePreview>,
}

/// Something of a row that is possible and perhaps not meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotePreview {
    /// What sort of thing it is: of each sort one is reported.
    pub sort: &'static str,
    /// What it is.
    pub text: String,
}

/// What a source does with rows that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LongRows {
    /// They end the run before its first step.
    Refused,
    /// They are left out.
    Dropped,
    /// They are cut.
    Cut,
}

/// The rows of a source.
pub trait RowPreviews: Send + Sync {
    /// The data set, by its name in the pipeline.
    fn data(&self) -> &str;

    /// The model whose tokens are shown, by its name in the pipeline.
    fn model(&self) -> &str;

    /// Number of rows that a run would look at, from the first on.
    fn rows(&self) -> usize;

    /// What becomes of rows that are too long.
    fn long_rows(&self) -> LongRows;

    /// Reads row `index`, from 0, and renders nothing; gives its length in bytes, more or less.
    ///
    /// # Errors
    /// What a run would refuse of its columns.
    fn glance(&self, index: usize) -> Result<usize, DataError>;

    /// Row `index`, from 0, before anything is cut off.
    ///
    /// # Errors
    /// What a run would refuse of the row.
    fn row(&self, index: usize) -> Result<RowPreview, DataError>;
}
