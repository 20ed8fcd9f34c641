//! Identities of rows: they identify a row from its prompt to its trace.

use serde::{Deserialize, Serialize};

use super::BatchError;

const SAMPLE_BITS: u32 = 12;
const ROW_BITS: u32 = 32;
const WAVE_BITS: u32 = 4;
const EPOCH_BITS: u32 = 16;

/// Identity of a row: epoch, wave, data-set row and sample index packed into 64 bits (16, 4, 32 and 12 of them).
///
/// A wave is what a source draws at once; most steps have only one, with number 0. A row of the data set that is drawn
/// again in a later wave is another row, with another identity.
///
/// ```
/// use verl_pipe::batch::RowId;
///
/// let row = RowId::prompt(2, 7)?.sample(1)?;
/// assert_eq!((row.epoch(), row.wave(), row.row(), row.sample_index()), (2, 0, 7, 1));
/// let again = row.in_wave(3)?;
/// assert_eq!((row.to_string(), again.to_string()), ("2.7#1".to_owned(), "2.7/3#1".to_owned()));
/// assert_ne!(row.group(), again.group());
/// # Ok::<(), verl_pipe::batch::BatchError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowId(pub u64);

impl RowId {
    /// Maximum number of waves of a step.
    pub const MAX_WAVES: u64 = 1 << WAVE_BITS;

    /// The row of a prompt: sample 0 of data-set row `row` in `epoch`, drawn in the first wave of a step.
    ///
    /// # Errors
    /// When epoch (16 bits) or row (32 bits) is out of range.
    pub fn prompt(epoch: u64, row: u64) -> Result<RowId, BatchError> {
        if epoch >= 1 << EPOCH_BITS || row >= 1 << ROW_BITS {
            return Err(BatchError::IdOutOfRange {
                epoch,
                wave: 0,
                row,
                sample: 0,
            });
        }
        Ok(RowId(
            (epoch << (WAVE_BITS + ROW_BITS + SAMPLE_BITS)) | (row << SAMPLE_BITS),
        ))
    }

    /// The same row, drawn in wave `wave` of a step.
    ///
    /// # Errors
    /// When `wave` is not below [`RowId::MAX_WAVES`].
    pub fn in_wave(self, wave: u64) -> Result<RowId, BatchError> {
        if wave >= Self::MAX_WAVES {
            return Err(BatchError::IdOutOfRange {
                epoch: self.epoch(),
                wave,
                row: self.row(),
                sample: self.sample_index(),
            });
        }
        let shift = ROW_BITS + SAMPLE_BITS;
        let others = !((Self::MAX_WAVES - 1) << shift);
        Ok(RowId((self.0 & others) | (wave << shift)))
    }

    /// Sample `index` of this prompt.
    ///
    /// # Errors
    /// When `index` needs more than 12 bits.
    pub fn sample(self, index: u64) -> Result<RowId, BatchError> {
        if index >= 1 << SAMPLE_BITS {
            return Err(BatchError::IdOutOfRange {
                epoch: self.epoch(),
                wave: self.wave(),
                row: self.row(),
                sample: index,
            });
        }
        Ok(RowId((self.0 >> SAMPLE_BITS << SAMPLE_BITS) | index))
    }

    /// Epoch in which the prompt was drawn.
    pub fn epoch(self) -> u64 {
        self.0 >> (WAVE_BITS + ROW_BITS + SAMPLE_BITS)
    }

    /// Wave of the step in which the prompt was drawn; 0 is the first.
    pub fn wave(self) -> u64 {
        (self.0 >> (ROW_BITS + SAMPLE_BITS)) & (Self::MAX_WAVES - 1)
    }

    /// Row of the data set.
    pub fn row(self) -> u64 {
        (self.0 >> SAMPLE_BITS) & ((1 << ROW_BITS) - 1)
    }

    /// Which of the responses of its prompt.
    pub fn sample_index(self) -> u64 {
        self.0 & ((1 << SAMPLE_BITS) - 1)
    }

    /// The row as shown in messages: its identity, which counts from 0, and the row of the data set, counted from 1 as
    /// in messages about the file.
    ///
    /// ```
    /// use verl_pipe::batch::RowId;
    ///
    /// let row = RowId::prompt(0, 168)?;
    /// assert_eq!(row.in_words(), "sample 0.168#0 (row 169 of the data set)");
    /// # Ok::<(), verl_pipe::batch::BatchError>(())
    /// ```
    pub fn in_words(self) -> String {
        format!("sample {self} (row {} of the data set)", self.row() + 1)
    }

    /// The group, which the samples of one prompt share.
    pub fn group(self) -> u64 {
        self.0 >> SAMPLE_BITS
    }
}

/// `epoch.row#sample`, with `/wave` after the row if it is not the first.
impl std::fmt::Display for RowId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.epoch(), self.row())?;
        if self.wave() > 0 {
            write!(f, "/{}", self.wave())?;
        }
        write!(f, "#{}", self.sample_index())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        let (epochs, rows, samples) = ([0, 1, 65_535], [0, 1, (1 << 32) - 1], [0, 1, 4095]);
        let mut seen = std::collections::HashSet::new();
        for (epoch, row) in epochs.into_iter().flat_map(|e| rows.map(|r| (e, r))) {
            for (wave, sample) in [0, 1, 15].into_iter().flat_map(|w| samples.map(|s| (w, s))) {
                let id = RowId::prompt(epoch, row).and_then(|id| id.sample(sample));
                let id = id.and_then(|id| id.in_wave(wave)).expect("in range");
                let parts = (id.epoch(), id.wave(), id.row(), id.sample_index());
                assert_eq!(parts, (epoch, wave, row, sample));
                assert_eq!(id.in_wave(0).and_then(|id| id.in_wave(wave)), Ok(id));
                assert!(seen.insert(id));
            }
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_rejected() {
        assert!(RowId::prompt(1 << 16, 0).is_err());
        assert!(RowId::prompt(0, 1 << 32).is_err());
        let id = RowId(0);
        assert!(id.sample(1 << 12).is_err());
        let message = id.in_wave(16).expect_err("too many").to_string();
        assert!(message.contains("wave 16") && message.contains("16, 4, 32 and 12 bits"));
    }
}
