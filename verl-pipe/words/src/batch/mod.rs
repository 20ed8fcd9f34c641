//! Batches: Arrow record batches with ragged list columns and row identities, behind typed access.
//!
//! Every row has a `sample_id` and a `group_id` (the responses of one prompt share it), so it stays traceable through
//! split, shuffle, filter and join. Slices, selections and joins by equal rows share buffers; only `take`, `concat`
//! and `repeat` copy.
//!
//! ```
//! use verl_pipe::batch::{Batch, RaggedColumn, RowId};
//! use verl_pipe::keys::{PROMPTS, REWARDS};
//!
//! let ids = vec![RowId::prompt(0, 7)?, RowId::prompt(0, 3)?];
//! let mut batch = Batch::with_rows(&ids);
//! batch.put(&PROMPTS, RaggedColumn::from_rows([vec![1u32, 2, 3], vec![4]]))?;
//! let samples = batch.repeat(2)?;
//! assert_eq!(samples.num_rows(), 4);
//! assert_eq!(samples.get(&PROMPTS)?.row(1), &[1, 2, 3]);
//! assert_eq!(samples.ids()[1], RowId::prompt(0, 7)?.sample(1)?);
//! assert!(samples.get(&REWARDS).is_err());
//! # Ok::<(), verl_pipe::batch::BatchError>(())
//! ```

#[doc(hidden)]
pub mod arrow;
mod column;
mod row_id;

use std::ops::Range;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, UInt32Array, UInt64Array};
use arrow_schema::{DataType, Field as ArrowField, Schema};
use serde::{Deserialize, Serialize};

pub use column::{
    ArrowElement, Column, RaggedColumn, RaggedView, ScalarColumn, ScalarView, TextView, arrow_type,
};
pub use row_id::RowId;

use crate::batch::arrow::ArrowBatch;
use crate::field::{Field, Key};

/// Name of the identity column.
pub const SAMPLE_ID: &str = "sample_id";
/// Name of the column that rows of one prompt share.
pub const GROUP_ID: &str = "group_id";

/// What can go wrong with a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A key that the batch does not have.
    #[error("the batch has no key `{key}`; it has {known}")]
    Missing {
        /// The key.
        key: String,
        /// Keys of the batch.
        known: String,
    },
    /// A column of another type than the key's.
    #[error("`{key}` has type {found}, but is read as {wanted}")]
    Type {
        /// The key.
        key: String,
        /// The requested type.
        wanted: String,
        /// The actual type.
        found: String,
    },
    /// A column with another number of rows.
    #[error("`{key}` has {found} rows in a batch of {rows}")]
    Rows {
        /// The key.
        key: String,
        /// Rows of the batch.
        rows: usize,
        /// Rows of the column.
        found: usize,
    },
    /// A null in a key that is not nullable.
    #[error("`{key}` is null in row {row} ({id}), but the key is not nullable")]
    Null {
        /// The key.
        key: String,
        /// Position in the batch.
        row: usize,
        /// Identity of the row.
        id: String,
    },
    /// Two batches whose rows differ.
    #[error("cannot join: row {row} is {left} on one side and {right} on the other")]
    JoinRows {
        /// First position that differs.
        row: usize,
        /// Identity on the left.
        left: String,
        /// Identity on the right.
        right: String,
    },
    /// Two batches that both have a key.
    #[error("cannot join: both sides have `{key}`")]
    JoinKey {
        /// The key.
        key: String,
    },
    /// A row range past the end.
    #[error("rows {start}..{end} are out of range for a batch of {rows} rows")]
    Range {
        /// First row.
        start: usize,
        /// Row after the last.
        end: usize,
        /// Rows of the batch.
        rows: usize,
    },
    /// An identity that does not fit.
    #[error(
        "epoch {epoch}, wave {wave}, row {row}, sample {sample} do not fit into a row identity (16, 4, 32 and 12 bits)"
    )]
    IdOutOfRange {
        /// Epoch.
        epoch: u64,
        /// Wave of the step.
        wave: u64,
        /// Data-set row.
        row: u64,
        /// Sample index.
        sample: u64,
    },
    /// An error of Arrow: a bug in verl, or more than 2^31 values in a column.
    #[error("arrow: {0}")]
    Arrow(String),
}

impl From<arrow_schema::ArrowError> for BatchError {
    fn from(error: arrow_schema::ArrowError) -> Self {
        BatchError::Arrow(error.to_string())
    }
}

/// Rows with identities and typed columns; see the module.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    record: RecordBatch,
}

impl Batch {
    /// A batch of the given rows without any column.
    pub fn with_rows(ids: &[RowId]) -> Batch {
        let samples: ArrayRef = Arc::new(UInt64Array::from_iter_values(ids.iter().map(|id| id.0)));
        let groups: ArrayRef = Arc::new(UInt64Array::from_iter_values(
            ids.iter().map(|id| id.group()),
        ));
        let schema = Schema::new(vec![
            ArrowField::new(SAMPLE_ID, DataType::UInt64, false),
            ArrowField::new(GROUP_ID, DataType::UInt64, false),
        ]);
        let record = RecordBatch::try_new(Arc::new(schema), vec![samples, groups])
            .expect("two columns of equal length");
        Batch { record }
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.record.num_rows()
    }

    /// Identities of the rows.
    pub fn ids(&self) -> Vec<RowId> {
        let array = self
            .record
            .column(0)
            .as_any()
            .downcast_ref::<UInt64Array>()
            .expect("checked when made");
        array.values().iter().map(|id| RowId(*id)).collect()
    }

    /// Group of each row.
    pub fn groups(&self) -> &[u64] {
        self.record
            .column(1)
            .as_any()
            .downcast_ref::<UInt64Array>()
            .expect("checked when made")
            .values()
    }

    /// Names of the keys, without the identity columns.
    pub fn keys(&self) -> Vec<String> {
        self.record
            .schema()
            .fields()
            .iter()
            .skip(2)
            .map(|f| f.name().clone())
            .collect()
    }

    /// Whether the batch has the key `name`.
    pub fn has(&self, name: &str) -> bool {
        self.record.schema().index_of(name).is_ok()
    }

    /// Typed read access to the column of `key`.
    ///
    /// # Errors
    /// When the key is missing, has another type, or contains a null although it is not nullable.
    pub fn get<K: Column>(&self, key: &Key<K>) -> Result<K::View<'_>, BatchError> {
        self.get_as(key, key.name())
    }

    /// As [`Batch::get`], for a column of the key's type with another name.
    ///
    /// # Errors
    /// As [`Batch::get`].
    pub fn get_as<K: Column>(&self, key: &Key<K>, name: &str) -> Result<K::View<'_>, BatchError> {
        let array = self.column(name).ok_or_else(|| BatchError::Missing {
            key: name.to_owned(),
            known: self.keys().join(", "),
        })?;
        let field = key.field();
        if !field.nullable && array.null_count() > 0 {
            let row = (0..array.len()).find(|i| array.is_null(*i)).unwrap_or(0);
            return Err(BatchError::Null {
                key: name.to_owned(),
                row,
                id: self.ids()[row].to_string(),
            });
        }
        K::view(array).ok_or_else(|| BatchError::Type {
            key: name.to_owned(),
            wanted: arrow_type(K::DTYPE, K::RAGGED).to_string(),
            found: array.data_type().to_string(),
        })
    }

    /// Sets the column of `key`, replacing one of that name.
    ///
    /// # Errors
    /// When the number of rows differs.
    pub fn put<K: Column>(
        &mut self,
        key: &Key<K>,
        data: impl Into<K::Data>,
    ) -> Result<(), BatchError> {
        self.put_array(key.name(), K::build(data.into())?)
    }

    /// The same rows without any column.
    pub fn rows_only(&self) -> Batch {
        Batch {
            record: self
                .record
                .project(&[0, 1])
                .expect("identity columns are there"),
        }
    }

    /// The rows with only the named keys, in that order; shares buffers.
    ///
    /// # Errors
    /// When a key is missing.
    pub fn select<S: AsRef<str>>(&self, names: &[S]) -> Result<Batch, BatchError> {
        let mut at = vec![0, 1];
        for name in names {
            let name = name.as_ref();
            at.push(
                self.record
                    .schema()
                    .index_of(name)
                    .map_err(|_| BatchError::Missing {
                        key: name.to_owned(),
                        known: self.keys().join(", "),
                    })?,
            );
        }
        Ok(Batch {
            record: self.record.project(&at)?,
        })
    }

    /// Renames keys: pairs of (old, new); shares buffers. Missing keys are ignored.
    pub fn rename<S: AsRef<str>>(&self, names: &[(S, S)]) -> Batch {
        let fields: Vec<ArrowField> = self
            .record
            .schema()
            .fields()
            .iter()
            .map(|field| {
                let new = names
                    .iter()
                    .find(|(old, _)| old.as_ref() == field.name())
                    .map(|(_, new)| new.as_ref().to_owned());
                field
                    .as_ref()
                    .clone()
                    .with_name(new.unwrap_or_else(|| field.name().clone()))
            })
            .collect();
        let record = RecordBatch::try_new(
            Arc::new(Schema::new(fields)),
            self.record.columns().to_vec(),
        )
        .expect("only names change");
        Batch { record }
    }

    /// Rows `range`; shares buffers.
    ///
    /// # Errors
    /// When the range passes the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Batch, BatchError> {
        if range.start > range.end || range.end > self.num_rows() {
            return Err(BatchError::Range {
                start: range.start,
                end: range.end,
                rows: self.num_rows(),
            });
        }
        Ok(Batch {
            record: self.record.slice(range.start, range.len()),
        })
    }

    /// Consecutive slices of `size` rows, the last one shorter; shares buffers.
    pub fn split(&self, size: usize) -> Vec<Batch> {
        let size = size.max(1);
        (0..self.num_rows())
            .step_by(size)
            .map(|start| Batch {
                record: self.record.slice(start, size.min(self.num_rows() - start)),
            })
            .collect()
    }

    /// The rows at `indices`, copied.
    ///
    /// # Errors
    /// When an index passes the end.
    pub fn take(&self, indices: &[usize]) -> Result<Batch, BatchError> {
        if let Some(&bad) = indices.iter().find(|i| **i >= self.num_rows()) {
            return Err(BatchError::Range {
                start: bad,
                end: bad + 1,
                rows: self.num_rows(),
            });
        }
        let indices = UInt32Array::from_iter_values(indices.iter().map(|i| *i as u32));
        Ok(Batch {
            record: arrow_select::take::take_record_batch(&self.record, &indices)?,
        })
    }

    /// One batch of all rows in order, copied. All parts must have the same columns.
    ///
    /// # Errors
    /// When the columns differ or `parts` is empty.
    pub fn concat(parts: &[Batch]) -> Result<Batch, BatchError> {
        let first = parts
            .first()
            .ok_or_else(|| BatchError::Arrow("cannot concatenate zero batches".to_owned()))?;
        if parts.len() == 1 {
            return Ok(first.clone());
        }
        let keys = first.keys();
        let aligned = parts
            .iter()
            .map(|part| part.select(&keys))
            .collect::<Result<Vec<_>, _>>()?;
        let record = arrow_select::concat::concat_batches(
            &first.record.schema(),
            aligned.iter().map(|b| &b.record),
        )?;
        Ok(Batch { record })
    }

    /// The columns of both batches, whose rows must be the same in the same order; shares buffers.
    ///
    /// # Errors
    /// When rows differ, or both batches have the same key.
    pub fn join(&self, other: &Batch) -> Result<Batch, BatchError> {
        let (left, right) = (self.ids(), other.ids());
        if left != right {
            let row = left
                .iter()
                .zip(&right)
                .position(|(a, b)| a != b)
                .unwrap_or(left.len().min(right.len()));
            let show = |ids: &[RowId]| {
                ids.get(row)
                    .map_or_else(|| "missing".to_owned(), ToString::to_string)
            };
            return Err(BatchError::JoinRows {
                row,
                left: show(&left),
                right: show(&right),
            });
        }
        let mut fields: Vec<_> = self.record.schema().fields().iter().cloned().collect();
        let mut columns = self.record.columns().to_vec();
        for (field, column) in other
            .record
            .schema()
            .fields()
            .iter()
            .zip(other.record.columns())
            .skip(2)
        {
            if self.has(field.name()) {
                return Err(BatchError::JoinKey {
                    key: field.name().clone(),
                });
            }
            fields.push(field.clone());
            columns.push(column.clone());
        }
        Ok(Batch {
            record: RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?,
        })
    }

    /// Repeats each row `n` times in place (`P → P·n`): row i becomes the adjacent samples 0..n of its prompt.
    ///
    /// # Errors
    /// When `n` does not fit into a row identity.
    pub fn repeat(&self, n: usize) -> Result<Batch, BatchError> {
        let indices: Vec<usize> = (0..self.num_rows())
            .flat_map(|row| std::iter::repeat_n(row, n))
            .collect();
        let taken = self.take(&indices)?;
        let ids = taken
            .ids()
            .iter()
            .enumerate()
            .map(|(i, id)| id.sample((i % n.max(1)) as u64))
            .collect::<Result<Vec<_>, _>>()?;
        let mut columns = taken.record.columns().to_vec();
        columns[0] = Arc::new(UInt64Array::from_iter_values(ids.iter().map(|id| id.0)));
        Ok(Batch {
            record: RecordBatch::try_new(taken.record.schema(), columns)?,
        })
    }

    /// Ranges of adjacent rows of one group.
    pub fn group_ranges(&self) -> Vec<Range<usize>> {
        let groups = self.groups();
        let mut ranges = Vec::new();
        let mut start = 0;
        for end in 1..=groups.len() {
            if end == groups.len() || groups[end] != groups[start] {
                ranges.push(start..end);
                start = end;
            }
        }
        ranges
    }

    /// Bytes of all columns.
    pub fn num_bytes(&self) -> usize {
        self.record.get_array_memory_size()
    }

    /// Checks that `field` is present with its dtype and raggedness.
    ///
    /// # Errors
    /// When the key is missing or has another type.
    pub fn check_field(&self, field: &Field) -> Result<(), BatchError> {
        let array = self
            .column(&field.name)
            .ok_or_else(|| BatchError::Missing {
                key: field.name.to_string(),
                known: self.keys().join(", "),
            })?;
        let ragged = field.parsed_shape().is_ok_and(|s| s.ragged().is_some());
        let wanted = arrow_type(field.dtype, ragged);
        if !array.data_type().equals_datatype(&wanted) {
            return Err(BatchError::Type {
                key: field.name.to_string(),
                wanted: wanted.to_string(),
                found: array.data_type().to_string(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
