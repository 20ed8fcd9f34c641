//! Response tokens of padded rows, packed for the head: only they are multiplied with it.

use burn::tensor::{Device, Int, Tensor};

use crate::kernels;
use crate::model::{ModelInterface, ScoreRow};
use crate::rows;
use crate::scoring::{Extras, TokenScores, linear_log_probs};

/// Response tokens of a call, one after the other.
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

    /// Fills up with tokens of no row.
    pub(crate) fn pad(&mut self, length: usize) {
        self.positions.resize(length, 0);
        self.targets.resize(length, 0);
    }

    /// Where the states are in which the tokens are chosen, in the flattened call: `[N]`.
    pub(crate) fn states(&self, device: &Device) -> Tensor<1, Int> {
        rows::indices(self.positions.clone(), device)
    }

    /// Forward pass of the padded `ids`, then log-probs and extras of the packed tokens only.
    pub(crate) fn score<M: ModelInterface>(
        &self,
        module: &M,
        ids: Tensor<2, Int>,
        device: &Device,
        temperature: f64,
        extras: Extras,
        chunk: usize,
    ) -> TokenScores {
        let hidden = module.hidden(ids); // [B, S, D]
        let [b, s, d] = hidden.dims();
        let ascending = self.positions.is_sorted();
        let hidden = hidden.reshape([b * s, d]);
        let hidden = kernels::take_rows(hidden, self.states(device), ascending); // [N, D]
        let targets = rows::indices(self.targets.clone(), device);
        // Greedy rollouts report log-probs of temperature 1.
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        linear_log_probs(hidden, module.head(), targets, temperature, extras, chunk)
    }
}

/// What a micro-batch runs through the model: rows with a selected token, up to the last one that is needed.
pub(crate) struct TrainingBatch {
    /// Positions of the rows in the request.
    pub(crate) rows: Vec<usize>,
    /// Tokens of each padded row.
    pub(crate) width: usize,
    /// The selected tokens.
    pub(crate) packed: Packed,
}

impl TrainingBatch {
    /// None where no token is selected.
    pub(crate) fn new(
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
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
        let width = lengths.max()?;
        let mut packed = Packed::default();
        for (place, (row, chosen)) in selected.iter().enumerate() {
            for &token in chosen {
                packed.push(place * width, *row, &rows[*row], token);
            }
        }
        Some(TrainingBatch {
            rows: selected.into_iter().map(|(row, _)| row).collect(),
            width,
            packed,
        })
    }
}
