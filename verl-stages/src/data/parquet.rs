//! Parquet files: columns of text, numbers, booleans, dates, times and decimals, dictionaries of them (categories), and
//! lists, structs and maps of these.
//!
//! Opening a file reads its metadata and its hash. A column is decoded completely on first use and stays in memory as Arrow
//! arrays; of a struct, only the requested part is decoded. So an unused column costs nothing and may be of any type. A
//! value is converted to JSON on demand: a number that JSON cannot represent (NaN, infinity) becomes null; a date, time or
//! decimal becomes its text.

mod path;
mod values;

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use ::parquet::basic::Compression;
use arrow_array::ArrayRef;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_words::data::{DataError, DataLoaderInterface, OpenedData};
use verl_words::stage::{BuildContext, ConfigError, DataConfig};

use path::{ColumnPath, column_paths};
use values::unsupported;

/// A Parquet file, uncompressed or compressed with Snappy, LZ4 or gzip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parquet {
    /// The file; relative to the folder of the pipeline file.
    pub path: PathBuf,
}

impl DataConfig for Parquet {
    const KIND: &'static str = "parquet";
    const SUMMARY: &'static str = "rows of a Parquet file";

    fn check(&self, context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        super::check_format(&context.base, &self.path, Some(true))
    }

    fn open(&self, context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        let path = super::resolve(&context.base, &self.path);
        Ok(Arc::new(ParquetRows::open(&path)?))
    }

    fn open_start(&self, context: &BuildContext) -> Result<OpenedData, DataError> {
        ParquetRows::open_start(&super::resolve(&context.base, &self.path))
    }
}

/// The rows of a Parquet file.
#[derive(Debug)]
pub struct ParquetRows {
    path: PathBuf,
    origin: String,
    /// State of the file when it was opened: a column that is decoded later must come from the same file.
    file: Metadata,
    metadata: ArrowReaderMetadata,
    /// Row groups that are read, from the first on.
    groups: usize,
    rows: usize,
    fingerprint: String,
    /// Decoded columns, by the requested name.
    columns: Mutex<HashMap<String, Arc<Column>>>,
}

/// A decoded column, or the requested part of it.
#[derive(Debug)]
struct Column {
    path: ColumnPath,
    arrays: Vec<ArrayRef>,
    /// Total number of rows up to the end of each array.
    ends: Vec<usize>,
}

impl Column {
    fn value(&self, row: usize) -> Option<Value> {
        let part = self.ends.partition_point(|&end| end <= row);
        let array = self.arrays.get(part)?;
        self.path.pick(array, row + array.len() - self.ends[part])
    }
}

/// Minimum number of rows of a large file that [`ParquetRows::open_start`] reads.
const START_ROWS: usize = 4096;

impl ParquetRows {
    /// Opens a file.
    ///
    /// # Errors
    /// [`DataError::Unreadable`] when it is missing, truncated or damaged; [`DataError::Empty`].
    pub fn open(path: &Path) -> Result<ParquetRows, DataError> {
        let fingerprint = super::sha256_of_file(path)?;
        let rows = ParquetRows::with_metadata(path, fingerprint)?;
        Ok(rows)
    }

    /// Opens the first row groups of a large file, or all of a small one.
    ///
    /// # Errors
    /// Those of [`ParquetRows::open`].
    pub fn open_start(path: &Path) -> Result<OpenedData, DataError> {
        let mut rows = ParquetRows::with_metadata(path, String::new())?;
        if rows.file.len() <= super::START_BYTES {
            return Ok(OpenedData::complete(Arc::new(ParquetRows::open(path)?)));
        }
        let all = rows.groups;
        rows.first_groups(START_ROWS);
        Ok(OpenedData {
            is_complete: rows.groups == all,
            rows: Arc::new(rows),
        })
    }

    fn with_metadata(path: &Path, fingerprint: String) -> Result<ParquetRows, DataError> {
        let origin = path.display().to_string();
        let unreadable = |reason: String| DataError::Unreadable {
            path: origin.clone(),
            reason,
        };
        let opened = File::open(path).map_err(|e| unreadable(e.to_string()))?;
        let file = opened.metadata().map_err(|e| unreadable(e.to_string()))?;
        if file.len() == 0 {
            return Err(DataError::Empty { path: origin });
        }
        if let Some(other) = super::recognise_file(path) {
            return Err(unreadable(format!("it {}; {}", other.what, other.help)));
        }
        let metadata = ArrowReaderMetadata::load(&opened, ArrowReaderOptions::new())
            .map_err(|e| unreadable(e.to_string()))?;
        let groups = metadata.metadata().num_row_groups();
        let mut rows = ParquetRows {
            path: path.to_owned(),
            origin,
            file,
            metadata,
            groups,
            rows: 0,
            fingerprint,
            columns: Mutex::default(),
        };
        rows.first_groups(usize::MAX);
        if rows.rows == 0 {
            return Err(DataError::Empty { path: rows.origin });
        }
        Ok(rows)
    }

    /// Keeps the first row groups, until they have `least` rows.
    fn first_groups(&mut self, least: usize) {
        let (mut groups, mut rows) = (0, 0);
        for group in self.metadata.metadata().row_groups() {
            if rows >= least {
                break;
            }
            groups += 1;
            rows += usize::try_from(group.num_rows()).unwrap_or(0);
        }
        (self.groups, self.rows) = (groups, rows);
    }

    fn unreadable(&self, reason: String) -> DataError {
        DataError::Unreadable {
            path: self.origin.clone(),
            reason,
        }
    }

    /// The column called `name`, decoded; `None` if there is none.
    fn column(&self, name: &str) -> Result<Option<Arc<Column>>, DataError> {
        // A poisoned lock is harmless: only complete columns are inserted.
        let mut columns = self.columns.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(column) = columns.get(name) {
            return Ok(Some(column.clone()));
        }
        let Some(path) = ColumnPath::find(self.metadata.schema().fields(), name) else {
            return Ok(None);
        };
        if let Some(unknown) = unsupported(path.data_type()) {
            return Err(self.unreadable(format!(
                "column `{name}` contains {unknown}; supported are text, numbers, booleans, dates, times, decimals, dictionaries of them, and lists, structs and maps of these"
            )));
        }
        let column = Arc::new(self.decode(name, path)?);
        columns.insert(name.to_owned(), column.clone());
        Ok(Some(column))
    }

    fn decode(&self, name: &str, path: ColumnPath) -> Result<Column, DataError> {
        let file = File::open(&self.path).map_err(|e| self.unreadable(e.to_string()))?;
        let now = file
            .metadata()
            .map_err(|e| self.unreadable(e.to_string()))?;
        if (now.len(), now.modified().ok()) != (self.file.len(), self.file.modified().ok()) {
            return Err(self.unreadable("it has changed since it was opened".to_owned()));
        }
        let schema = self.metadata.metadata().file_metadata().schema_descr();
        let leaves = path.leaves(schema);
        for group in self
            .metadata
            .metadata()
            .row_groups()
            .iter()
            .take(self.groups)
        {
            for &leaf in &leaves {
                let codec = group.column(leaf).compression();
                if matches!(
                    codec,
                    Compression::ZSTD(_) | Compression::BROTLI(_) | Compression::LZO
                ) {
                    return Err(self.unreadable(format!(
                        "column `{name}` is compressed with {codec}; supported are none, snappy, lz4 and gzip. Rewrite the file, \
                         for example in Python: `import pyarrow.parquet as pq; \
                         pq.write_table(pq.read_table(\"OLD\"), \"NEW\", compression=\"snappy\")`"
                    )));
                }
            }
        }
        let builder =
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
                .with_projection(ProjectionMask::leaves(schema, leaves))
                .with_row_groups((0..self.groups).collect());
        let batches = builder.build().and_then(|reader| {
            reader
                .collect::<Result<Vec<_>, _>>()
                .map_err(::parquet::errors::ParquetError::from)
        });
        let batches = batches.map_err(|e| self.unreadable(format!("column `{name}`: {e}")))?;
        let mut rows = 0;
        let (arrays, ends) = batches
            .iter()
            .filter_map(|batch| {
                rows += batch.num_rows();
                Some((batch.columns().first()?.clone(), rows))
            })
            .unzip();
        if rows != self.rows {
            let reason = format!(
                "column `{name}` has {rows} rows, but the file has {}",
                self.rows
            );
            return Err(self.unreadable(reason));
        }
        Ok(Column { path, arrays, ends })
    }
}

impl DataLoaderInterface for ParquetRows {
    fn len(&self) -> usize {
        self.rows
    }

    /// All columns except those of an unsupported type.
    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        if index >= self.rows {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        }
        let mut row = Map::new();
        for field in self.metadata.schema().fields() {
            if unsupported(field.data_type()).is_none()
                && let Some(value) = self.value(index, field.name())?
            {
                row.insert(field.name().clone(), value);
            }
        }
        Ok(row)
    }

    fn value(&self, index: usize, column: &str) -> Result<Option<Value>, DataError> {
        if index >= self.rows {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        }
        Ok(self.column(column)?.and_then(|column| column.value(index)))
    }

    fn is_columnar(&self) -> bool {
        true
    }

    fn names(&self, _index: usize) -> Result<Vec<String>, DataError> {
        Ok(column_paths(self.metadata.schema().fields()))
    }

    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

#[cfg(test)]
pub(crate) mod tests;
