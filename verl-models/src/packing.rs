//! Response tokens of padded rows, packed for the head, so that only they are multiplied by it.

use burn::tensor::{Device, Int, Tensor};
use verl_kernels as kernels;
use verl_kernels::scoring::{Extras, TokenScores, linear_log_probs};

use crate::model::{ModelInterface, ScoreRow};
use crate::rows;

/// The response tokens of a call, concatenated.
#[derive(Default)]
pub(crate) struct Packed {
    /// Index of the hidden state that predicts each token, in the flattened call.
    positions: Vec<i32>,
    targets: Vec<i32>,
    /// Row of each token.
    pub(crate) rows: Vec<usize>,
}

impl Packed {
    /// Adds response token `token` of row `row`, which starts at `start` in the flattened call.
    pub(crate) fn push(&mut self, start: usize, row: usize, tokens: &ScoreRow<'_>, token: usize) {
        let predictor = start + tokens.prompt.len() + token - 1;
        self.positions.push(predictor as i32);
        self.targets.push(tokens.response[token] as i32);
        self.rows.push(row);
    }

    /// Pads to `length` with tokens that belong to no row.
    pub(crate) fn pad(&mut self, length: usize) {
        self.positions.resize(length, 0);
        self.targets.resize(length, 0);
    }

    /// Positions, in the flattened call, of the states in which the tokens are chosen: `[N]`.
    pub(crate) fn states(&self, device: &Device) -> Tensor<1, Int> {
        kernels::indices(self.positions.clone(), device)
    }

    /// Log-probs and extras of the packed tokens from the hidden states of the flattened call.
    ///
    /// # Shapes
    /// `hidden`: `[tokens of the call, D]`; `head`: `[V, D]`
    pub(crate) fn score(
        &self,
        hidden: Tensor<2>,
        head: Tensor<2>,
        device: &Device,
        temperature: f64,
        extras: Extras,
        chunk: usize,
    ) -> TokenScores {
        let ascending = self.positions.is_sorted();
        let hidden = kernels::take_rows(hidden, self.states(device), ascending); // [N, D]
        let targets = kernels::indices(self.targets.clone(), device);
        // Greedy rollouts report log-probs at temperature 1.
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        linear_log_probs(hidden, head, targets, temperature, extras, chunk)
    }
}

/// How rows are arranged in the flattened call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Every row is padded to the longest.
    Padded,
    /// Rows are concatenated.
    Packed,
}

impl Layout {
    /// The layout with which a model is faster.
    pub(crate) fn of<M: ModelInterface>(module: &M) -> Self {
        if module.packs() {
            Layout::Packed
        } else {
            Layout::Padded
        }
    }
}

/// The input of a micro-batch: the rows with a selected token, up to the last token that is needed.
pub(crate) struct TrainingBatch {
    /// Positions of the rows in the request.
    pub(crate) rows: Vec<usize>,
    /// Tokens of the longest row.
    pub(crate) width: usize,
    /// The selected tokens.
    pub(crate) packed: Packed,
    /// Tokens of each row.
    lengths: Vec<usize>,
    layout: Layout,
}

impl TrainingBatch {
    /// `None` if no token is selected.
    pub(crate) fn new(
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        layout: Layout,
    ) -> Option<Self> {
        let selected: Vec<(usize, Vec<usize>)> = rows
            .iter()
            .enumerate()
            .map(|(row, tokens)| {
                let chosen = (0..tokens.response.len()).filter(|&token| select(row, token));
                (row, chosen.collect())
            })
            .filter(|(_, chosen): &(usize, Vec<usize>)| !chosen.is_empty())
            .collect();
        let lengths = selected
            .iter()
            .filter_map(|(row, chosen)| Some(rows::input_len(&rows[*row], chosen.last()? + 1)));
        let lengths: Vec<usize> = lengths.collect();
        let width = lengths.iter().copied().max()?;
        let mut packed = Packed::default();
        let mut start = 0;
        for ((row, chosen), length) in selected.iter().zip(&lengths) {
            for &token in chosen {
                packed.push(start, *row, &rows[*row], token);
            }
            start += match layout {
                Layout::Padded => width,
                Layout::Packed => *length,
            };
        }
        Some(TrainingBatch {
            rows: selected.into_iter().map(|(row, _)| row).collect(),
            width,
            packed,
            lengths,
            layout,
        })
    }

    /// Hidden states of the flattened call of the rows, `[tokens of the call, D]`.
    pub(crate) fn hidden<M: ModelInterface>(
        &self,
        module: &M,
        rows: &[ScoreRow<'_>],
        device: &Device,
    ) -> Tensor<2> {
        let picked = self.rows.iter().map(|&row| &rows[row]);
        match self.layout {
            Layout::Padded => {
                let ids = rows::padded_ids(picked, self.rows.len(), self.width, device);
                let hidden = module.hidden(ids);
                let [b, s, d] = hidden.dims();
                hidden.reshape([b * s, d])
            }
            Layout::Packed => {
                let ids = rows::packed_ids(picked.zip(self.lengths.iter().copied()));
                module.hidden_packed(kernels::indices(ids, device), &self.lengths)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::{Toy, bits, rows, sequences};

    #[test]
    fn a_model_that_pads_gives_the_same_scores_packed() {
        let device = Device::flex();
        let toy = Toy::new(29, 12, 64);
        let sequences = sequences(&[(3, 4), (2, 0), (1, 9), (5, 2)], 29);
        let rows = rows(&sequences);
        let select = |row: usize, token: usize| row != 2 || token < 6;
        let [padded, packed] = [Layout::Padded, Layout::Packed].map(|layout| {
            let batch = TrainingBatch::new(&rows, &select, layout).unwrap();
            assert_eq!(batch.rows, [0, 2, 3]);
            let hidden = batch.hidden(&toy, &rows, &device);
            let scores = batch
                .packed
                .score(hidden, toy.head(), &device, 1.0, Extras::NONE, 64);
            let log_probs: Vec<f32> = scores.log_probs.into_data().iter().collect();
            (batch.packed.rows, bits(&log_probs))
        });
        assert_eq!(padded.0.len(), 4 + 6 + 2);
        assert_eq!(padded, packed);
    }
}
