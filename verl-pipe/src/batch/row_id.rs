//! Identities of rows: what a row is called from its prompt to its trace.

use super::BatchError;

const SAMPLE_BITS: u32 = 12;
const ROW_BITS: u32 = 36;

/// Identity of a row: epoch, data-set row and sample index packed into 64 bits (16, 36 and 12 of them).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(pub u64);

impl RowId {
    /// The row of a prompt: sample 0 of data-set row `row` in `epoch`.
    ///
    /// # Errors
    /// When epoch (16 bits) or row (36 bits) is out of range.
    pub fn prompt(epoch: u64, row: u64) -> Result<RowId, BatchError> {
        if epoch >= 1 << 16 || row >= 1 << ROW_BITS {
            return Err(BatchError::IdOutOfRange {
                epoch,
                row,
                sample: 0,
            });
        }
        Ok(RowId(
            (epoch << (ROW_BITS + SAMPLE_BITS)) | (row << SAMPLE_BITS),
        ))
    }

    /// Sample `index` of this prompt.
    ///
    /// # Errors
    /// When `index` needs more than 12 bits.
    pub fn sample(self, index: u64) -> Result<RowId, BatchError> {
        if index >= 1 << SAMPLE_BITS {
            return Err(BatchError::IdOutOfRange {
                epoch: self.epoch(),
                row: self.row(),
                sample: index,
            });
        }
        Ok(RowId((self.0 >> SAMPLE_BITS << SAMPLE_BITS) | index))
    }

    /// Epoch in which the prompt was drawn.
    pub fn epoch(self) -> u64 {
        self.0 >> (ROW_BITS + SAMPLE_BITS)
    }

    /// Row of the data set.
    pub fn row(self) -> u64 {
        (self.0 >> SAMPLE_BITS) & ((1 << ROW_BITS) - 1)
    }

    /// Which of the responses of its prompt.
    pub fn sample_index(self) -> u64 {
        self.0 & ((1 << SAMPLE_BITS) - 1)
    }

    /// What the samples of one prompt share.
    pub fn group(self) -> u64 {
        self.0 >> SAMPLE_BITS
    }
}

impl std::fmt::Display for RowId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}#{}", self.epoch(), self.row(), self.sample_index())
    }
}
