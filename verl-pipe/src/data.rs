//! Data sets as pipelines see them: numbered rows of named values.

use serde_json::{Map, Value};

/// What can go wrong with a data set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file that cannot be read.
    #[error("cannot read `{path}`: {reason}")]
    Unreadable {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// A file without rows.
    #[error("`{path}` holds no row")]
    Empty {
        /// The file.
        path: String,
    },
    /// A row that is malformed.
    #[error("`{path}`, row {row}: {reason}")]
    Row {
        /// The file or generator.
        path: String,
        /// The row, counted from 1 as an editor does.
        row: usize,
        /// What is wrong.
        reason: String,
    },
    /// A row without a column that is needed.
    #[error("`{path}`, row {row}: there is no column `{column}`; the row has {known}")]
    MissingColumn {
        /// The file or generator.
        path: String,
        /// The row, counted from 1.
        row: usize,
        /// The column.
        column: String,
        /// Columns that are there.
        known: String,
    },
}

/// A data set: random access to rows, a fingerprint of the content.
///
/// Rows are numbered from 0 and never change during a run; the order in which they are drawn belongs to the stage
/// that reads them, so that it can be resumed and replayed.
pub trait DataLoaderInterface: Send + Sync {
    /// Number of rows, at least 1.
    fn len(&self) -> usize;

    /// Whether there is no row; a loader that opens successfully has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row `index`.
    ///
    /// # Errors
    /// When the row is malformed or `index` is not below [`len`](Self::len).
    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError>;

    /// Where rows come from, for messages: a path, or a generator's name.
    fn origin(&self) -> String;

    /// Hash of the content: equal fingerprints mean equal rows.
    fn fingerprint(&self) -> String;
}
