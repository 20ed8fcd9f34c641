//! The units of a micro-batch, and sums over their rows.

use burn::tensor::{IndexingUpdateOp, Tensor};

use super::objective::PreparedTokens;
use super::units::Units;
use crate::error::AlgoError;
use crate::tensor::{constant_like, indices_like};

/// A number for each pair's chosen and rejected side, `[P]` each.
#[derive(Debug, Clone)]
pub struct Sides {
    /// Of the chosen rows.
    pub chosen: Tensor<1>,
    /// Of the rejected rows.
    pub rejected: Tensor<1>,
}

impl Sides {
    /// Chosen minus rejected, `[P]`.
    pub fn margin(&self) -> Tensor<1> {
        self.chosen.clone() - self.rejected.clone()
    }

    /// Applies a function to both sides.
    pub fn map(&self, f: impl Fn(Tensor<1>) -> Tensor<1>) -> Sides {
        Sides {
            chosen: f(self.chosen.clone()),
            rejected: f(self.rejected.clone()),
        }
    }

    /// Divides each side by that of `other`.
    pub fn over(&self, other: &Sides) -> Sides {
        Sides {
            chosen: self.chosen.clone() / other.chosen.clone(),
            rejected: self.rejected.clone() / other.rejected.clone(),
        }
    }
}

/// Input of a row loss: the units of a micro-batch, and its tokens.
#[derive(Debug)]
pub struct PreparedRows<'a> {
    tokens: PreparedTokens<'a>,
    units: Vec<usize>,
    /// Row of each token, counted among the rows of these units, `[M]`.
    slots: Vec<usize>,
    /// Tokens of each of those rows.
    lengths: Vec<usize>,
}

impl<'a> PreparedRows<'a> {
    pub(super) fn new(
        tokens: PreparedTokens<'a>,
        all: &Units,
    ) -> Result<PreparedRows<'a>, AlgoError> {
        let units = all.of(tokens.positions(), tokens.batch())?;
        let size = all.size();
        let lengths = units.iter().flat_map(|&unit| all.lengths(unit));
        let lengths = lengths.copied().collect();
        // Units are in ascending order, so that a search finds their positions.
        let slot = |&position: &usize| {
            let row = tokens.batch().rows[position];
            units.partition_point(|&unit| unit < row / size) * size + row % size
        };
        let slots = tokens.positions().iter().map(slot).collect();
        Ok(PreparedRows {
            tokens,
            units,
            slots,
            lengths,
        })
    }

    /// The tokens of the micro-batch.
    pub fn tokens(&self) -> &PreparedTokens<'a> {
        &self.tokens
    }

    /// Numbers of the units in the mini-batch: rows or pairs, `[U]`.
    pub fn units(&self) -> &[usize] {
        &self.units
    }

    /// Sum of `values` over each row, `[M]` to `[U]`, or `[2P]` if units are pairs; 0 for a row without tokens.
    pub fn row_sums(&self, values: Tensor<1>) -> Tensor<1> {
        self.scatter(values, &self.slots)
    }

    /// Sum of `values` over each side of each pair, `[M]` to `[P]` twice; 0 for a side without tokens.
    pub fn sides(&self, values: Tensor<1>) -> Sides {
        split(self.row_sums(values))
    }

    /// Mean of `values` over each side of each pair; 0 for a side without tokens.
    pub fn side_means(&self, values: Tensor<1>) -> Sides {
        self.sides(values).over(&self.side_lengths())
    }

    /// Number of tokens of each side of each pair, but at least 1, so that a mean over no tokens is 0.
    pub fn side_lengths(&self) -> Sides {
        let lengths = self.lengths.iter().map(|&n| n.max(1) as f64);
        split(constant_like(lengths.collect(), &self.tokens.log_probs()))
    }

    /// `values` at the last action token of each side; the others are not read. 0 for a side without tokens.
    pub fn side_lasts(&self, values: Tensor<1>) -> Sides {
        let mut lasts = vec![None; self.lengths.len()];
        for (token, &slot) in self.slots.iter().enumerate() {
            lasts[slot] = Some(token);
        }
        let each = lasts.iter().enumerate();
        let (slots, tokens): (Vec<usize>, Vec<usize>) = each
            .filter_map(|(slot, last)| Some((slot, (*last)?)))
            .unzip();
        let index = indices_like(&tokens, &values);
        split(self.scatter(values.select(0, index), &slots))
    }

    /// The units' share of a column with a number for each, `[U]`.
    pub fn column(&self, column: &[f64]) -> Tensor<1> {
        let values = self.units.iter().map(|&unit| column[unit]).collect();
        constant_like(values, &self.tokens.log_probs())
    }

    /// Adds each value to its slot.
    fn scatter(&self, values: Tensor<1>, slots: &[usize]) -> Tensor<1> {
        let index = indices_like(slots, &values);
        constant_like(vec![0.0; self.lengths.len()], &values).select_assign(
            0,
            index,
            values,
            IndexingUpdateOp::Add,
        )
    }
}

/// Splits chosen, rejected, chosen, … into the two sides, `[2P]` to `[P]` twice.
fn split(rows: Tensor<1>) -> Sides {
    let side = |first: usize| {
        let places: Vec<usize> = (first..rows.dims()[0]).step_by(2).collect();
        rows.clone().select(0, indices_like(&places, &rows))
    };
    Sides {
        chosen: side(0),
        rejected: side(1),
    }
}
