//! The rows or pairs of a mini-batch, and those of a micro-batch.

use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::AlgoError;

/// The units of a mini-batch that row losses are functions of: rows, or pairs of rows 2i and 2i + 1.
///
/// A pair without any token is padding and does not count. A row without tokens counts if `desirable` lists it: it has
/// no gradient, but a share in the mean. Because no token shows which micro-batch it is in, it is assigned to the row
/// before it (or, at the head, after it), so that the shares of any micro-batches add up.
#[derive(Debug)]
pub(super) struct Units {
    loss: &'static str,
    cut_unit: CutUnit,
    /// Tokens of each row, `[units · rows of a unit]`.
    lengths: Vec<usize>,
    /// The unit with tokens to which each is assigned, usually itself; `None` if it does not count.
    hosts: Vec<Option<usize>>,
}

impl Units {
    /// Rows for [`CutUnit::Row`], pairs for the others.
    ///
    /// # Errors
    /// [`AlgoError::OddRows`] for rows that cannot be pairs.
    pub fn new(
        loss: &'static str,
        cut_unit: CutUnit,
        batch: &MiniBatch,
    ) -> Result<Units, AlgoError> {
        let mut lengths = batch.row_lengths();
        let hosts = if cut_unit == CutUnit::Row {
            let listed = batch.preferences.desirable.as_ref().map_or(0, Vec::len);
            lengths.resize(listed.max(lengths.len()), 0);
            hosts_of_rows(&lengths, listed)
        } else {
            let rows = batch.counts.sequences.unwrap_or(lengths.len());
            if !rows.is_multiple_of(2) {
                return Err(AlgoError::OddRows { loss, rows });
            }
            lengths.resize(lengths.len().next_multiple_of(2), 0);
            let pairs = lengths.chunks(2).enumerate();
            pairs
                .map(|(pair, sides)| sides.iter().any(|n| *n > 0).then_some(pair))
                .collect()
        };
        Ok(Units {
            loss,
            cut_unit,
            lengths,
            hosts,
        })
    }

    /// Rows of a unit: 1, or 2 for pairs.
    pub fn size(&self) -> usize {
        if self.cut_unit == CutUnit::Row { 1 } else { 2 }
    }

    /// Number of units that count.
    pub fn num_counted(&self) -> usize {
        self.hosts.iter().flatten().count()
    }

    /// Number of tokens of chosen rows, if units are pairs.
    pub fn num_chosen_tokens(&self) -> usize {
        self.lengths.iter().step_by(2).sum()
    }

    /// Tokens of the rows of `unit`.
    pub fn lengths(&self, unit: usize) -> &[usize] {
        &self.lengths[unit * self.size()..][..self.size()]
    }

    /// The units of a micro-batch with the tokens at `positions`, in ascending order.
    ///
    /// # Errors
    /// [`AlgoError::CutPair`], [`AlgoError::CutMiniBatch`] for a micro-batch with incomplete units. Rows have been
    /// checked before.
    pub fn of(&self, positions: &[usize], batch: &MiniBatch) -> Result<Vec<usize>, AlgoError> {
        if self.cut_unit == CutUnit::MiniBatch && positions.len() != batch.num_tokens() {
            return Err(AlgoError::CutMiniBatch {
                loss: self.loss,
                got: positions.len(),
                expected: batch.num_tokens(),
            });
        }
        let mut is_here = vec![false; self.lengths.len()];
        for &position in positions {
            is_here[batch.rows[position]] = true;
        }
        let size = self.size();
        for (row, &here) in is_here.iter().enumerate() {
            if size == 2 && here && !is_here[row ^ 1] && self.lengths[row ^ 1] > 0 {
                return Err(AlgoError::CutPair {
                    pair: row / 2,
                    side: ["chosen", "rejected"][row % 2],
                });
            }
        }
        let unit_is_here = |unit: usize| is_here[unit * size..][..size].contains(&true);
        Ok((0..self.hosts.len())
            .filter(|&unit| self.hosts[unit].is_some_and(unit_is_here))
            .collect())
    }
}

/// Rows with tokens are their own hosts; the first `listed` rows without tokens are assigned to the nearest row before,
/// or else after them.
fn hosts_of_rows(lengths: &[usize], listed: usize) -> Vec<Option<usize>> {
    let mut host = lengths.iter().position(|n| *n > 0);
    let each = lengths.iter().enumerate();
    each.map(|(row, &length)| {
        if length > 0 {
            host = Some(row);
        }
        host.filter(|_| length > 0 || row < listed)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Counts;

    /// A mini-batch of rows with these lengths.
    fn batch(lengths: &[usize]) -> MiniBatch {
        let each = lengths.iter().enumerate();
        let mut batch = MiniBatch::new(
            each.flat_map(|(row, &n)| std::iter::repeat_n(row, n))
                .collect(),
        );
        batch.counts = Counts::declared(batch.num_tokens(), lengths.len());
        batch
    }

    #[test]
    fn a_pair_without_tokens_does_not_count() {
        let batch = batch(&[2, 1, 0, 0, 0, 3, 1, 0]);
        let units = Units::new("loss", CutUnit::Pair, &batch).unwrap();
        assert_eq!(units.num_counted(), 3);
        assert_eq!(units.num_chosen_tokens(), 3);
        assert_eq!(units.lengths(2), [0, 3]);
        let all: Vec<usize> = (0..7).collect();
        assert_eq!(units.of(&all, &batch).unwrap(), [0, 2, 3]);
        assert_eq!(units.of(&[3, 4, 5], &batch).unwrap(), [2]);
        assert_eq!(units.of(&[6], &batch).unwrap(), [3]);
    }

    #[test]
    fn a_row_without_tokens_is_assigned_to_a_neighbour() {
        let mut batch = batch(&[0, 1, 0, 1, 0]);
        let without = Units::new("loss", CutUnit::Row, &batch).unwrap();
        assert_eq!(without.num_counted(), 2);
        batch.preferences.desirable = Some(vec![true; 5]);
        let units = Units::new("loss", CutUnit::Row, &batch).unwrap();
        assert_eq!(units.num_counted(), 5);
        assert_eq!(units.of(&[0], &batch).unwrap(), [0, 1, 2]);
        assert_eq!(units.of(&[1], &batch).unwrap(), [3, 4]);
    }

    #[test]
    fn rejects_cut_units_and_odd_rows() {
        let pairs = batch(&[1, 1, 1, 1]);
        let units = Units::new("loss", CutUnit::Pair, &pairs).unwrap();
        let error = units.of(&[0, 1, 3], &pairs).unwrap_err();
        assert_eq!(
            error,
            AlgoError::CutPair {
                pair: 1,
                side: "rejected"
            }
        );
        let units = Units::new("loss", CutUnit::MiniBatch, &pairs).unwrap();
        let error = units.of(&[0, 1], &pairs).unwrap_err();
        assert!(matches!(error, AlgoError::CutMiniBatch { .. }), "{error}");
        let mut odd = batch(&[1, 1, 1]);
        assert!(Units::new("loss", CutUnit::Pair, &odd).is_err());
        assert!(Units::new("loss", CutUnit::Row, &odd).is_ok());
        // Nothing declared: the last side may be missing, or may not exist.
        odd.counts = Counts::LOCAL;
        let error = Units::new("loss", CutUnit::Pair, &odd).unwrap_err();
        assert!(error.to_string().contains("3 rows"), "{error}");
        odd.counts = Counts::declared(3, 4);
        assert!(Units::new("loss", CutUnit::Pair, &odd).is_ok());
    }
}
