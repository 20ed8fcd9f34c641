//! The Arrow side of a batch, for the crates of verl-pipe: the executor, the trace and their tests. Stages use typed keys
//! ([`Batch::get`], [`Batch::put`]), so this module is not part of the public interface.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field as ArrowField, Schema};

use super::{Batch, BatchError, GROUP_ID, SAMPLE_ID};

/// Access to the Arrow arrays of a [`Batch`].
pub trait ArrowBatch: Sized {
    /// A batch from an Arrow record batch whose first two columns are the identity columns.
    ///
    /// # Errors
    /// When an identity column is missing or has another type.
    fn from_record(record: RecordBatch) -> Result<Self, BatchError>;

    /// The Arrow record batch, identity columns first.
    fn record(&self) -> &RecordBatch;

    /// The Arrow array of a key.
    fn column(&self, name: &str) -> Option<&ArrayRef>;

    /// Sets a column from an Arrow array, replacing one of that name.
    ///
    /// # Errors
    /// When the number of rows differs.
    fn put_array(&mut self, name: &str, array: ArrayRef) -> Result<(), BatchError>;
}

impl ArrowBatch for Batch {
    fn from_record(record: RecordBatch) -> Result<Batch, BatchError> {
        for (at, name) in [SAMPLE_ID, GROUP_ID].into_iter().enumerate() {
            let right = record.num_columns() > at
                && record.schema().field(at).name() == name
                && record.schema().field(at).data_type() == &DataType::UInt64;
            if !right {
                return Err(BatchError::Missing {
                    key: name.to_owned(),
                    known: record
                        .schema()
                        .fields()
                        .iter()
                        .map(|f| f.name().as_str())
                        .collect::<Vec<_>>()
                        .join(", "),
                });
            }
        }
        Ok(Batch { record })
    }

    fn record(&self) -> &RecordBatch {
        &self.record
    }

    fn column(&self, name: &str) -> Option<&ArrayRef> {
        self.record.column_by_name(name)
    }

    fn put_array(&mut self, name: &str, array: ArrayRef) -> Result<(), BatchError> {
        if array.len() != self.num_rows() {
            return Err(BatchError::Rows {
                key: name.to_owned(),
                rows: self.num_rows(),
                found: array.len(),
            });
        }
        let mut fields: Vec<_> = self.record.schema().fields().iter().cloned().collect();
        let mut columns = self.record.columns().to_vec();
        let field = Arc::new(ArrowField::new(name, array.data_type().clone(), true));
        match self.record.schema().index_of(name) {
            Ok(at) => {
                fields[at] = field;
                columns[at] = array;
            }
            Err(_) => {
                fields.push(field);
                columns.push(array);
            }
        }
        self.record = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?;
        Ok(())
    }
}
