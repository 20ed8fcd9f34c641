//! Data sets as pipelines see them: numbered rows of named values.

mod columns;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use columns::{column_names, find_column};

/// What can go wrong with a data set.
#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
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
    #[error("`{path}` has no rows")]
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
    /// A row without a required column.
    #[error("`{path}`, row {row}: there is no column `{column}`; {known}")]
    MissingColumn {
        /// The file or generator.
        path: String,
        /// The row, counted from 1.
        row: usize,
        /// The column.
        column: String,
        /// The columns of the row, after the one that was probably meant.
        known: String,
    },
}

impl DataError {
    /// The error for row `index` (counted from 0) of the data set at `path`, which has no `column`; `names` are the
    /// columns that it has, nested ones with dots.
    pub fn missing_column(path: String, index: usize, column: &str, names: &[String]) -> Self {
        DataError::MissingColumn {
            path,
            row: index + 1,
            column: column.to_owned(),
            known: columns::missing_column_help(column, names),
        }
    }
}

/// A data set: random access to rows, a fingerprint of the content.
///
/// Rows are numbered from 0 and never change during a run. The stage that reads them decides the order in which they
/// are drawn, so that it can be resumed and replayed.
pub trait DataLoaderInterface: Send + Sync {
    /// Number of rows, at least 1.
    fn len(&self) -> usize;

    /// Whether there are no rows; a loader that opens successfully has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row `index`.
    ///
    /// # Errors
    /// When the row is malformed or `index` is not below [`len`](Self::len).
    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError>;

    /// Row `index` with numbers as strings, as the data set writes them, if it stores text: `1.10`, not 1.1. Used to
    /// read a number as text.
    ///
    /// # Errors
    /// As [`row`](Self::row).
    fn written(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        self.row(index)
    }

    /// The value of `column` in row `index`, found as [`find_column`] does; `None` where the row has no such column.
    ///
    /// # Errors
    /// As [`row`](Self::row); when the column's type has no JSON equivalent.
    fn value(&self, index: usize, column: &str) -> Result<Option<Value>, DataError> {
        Ok(find_column(&self.row(index)?, column).cloned())
    }

    /// Whether columns are stored separately, so that [`value`](Self::value) reads only the requested column.
    fn is_columnar(&self) -> bool {
        false
    }

    /// Names of the columns of row `index`, nested ones with dots ([`column_names`]).
    ///
    /// # Errors
    /// As [`row`](Self::row).
    fn names(&self, index: usize) -> Result<Vec<String>, DataError> {
        Ok(column_names(&self.row(index)?))
    }

    /// Where rows come from, for messages: a path, or a generator's name.
    fn origin(&self) -> String;

    /// Hash of the content: equal fingerprints mean equal rows.
    fn fingerprint(&self) -> String;
}

/// A data set as a check opens it: all of a small one, only the beginning of a large one.
#[derive(Clone)]
pub struct OpenedData {
    /// Its rows, or the first ones.
    pub rows: Arc<dyn DataLoaderInterface>,
    /// Whether these are all its rows.
    pub is_complete: bool,
}

impl OpenedData {
    /// All rows of a data set.
    pub fn complete(rows: Arc<dyn DataLoaderInterface>) -> Self {
        OpenedData {
            rows,
            is_complete: true,
        }
    }
}
