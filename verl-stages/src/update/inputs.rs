//! Inputs of an objective that no stage writes.

use std::ops::Range;

use verl_algos::MiniBatch;
use verl_algos::losses::LossInput;
use verl_models::model::{Extras, PolicyModel};
use verl_models::random::{DrawKey, Purpose};
use verl_words::stage::{ConfigError, StageError};

use super::{Columns, UpdateStage};
use crate::losses::Loss;
use crate::refusals::refused_row;

/// The position of an optimiser step in the run.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepPosition {
    pub(super) seed: u64,
    /// Step of the run.
    pub(super) step: u64,
    /// Pass over the rows of the step.
    pub(super) pass: usize,
    /// Whether nothing has been trained on in this step yet, so that the policy is the one that sampled.
    pub(super) is_first: bool,
}

/// Errors for inputs of the loss that an update of a policy cannot provide.
pub(super) fn unavailable_inputs(loss: &Loss, kind: &str) -> Vec<ConfigError> {
    let inputs = loss.objective.inputs().into_iter();
    let missing = inputs.filter_map(|input| {
        let (what, help) = match input {
            LossInput::Advantages
            | LossInput::OldLogProbs
            | LossInput::RefLogProbs
            | LossInput::Entropies
            | LossInput::CurrentLogProbs
            | LossInput::CurrentEntropies
            | LossInput::Draws
            | LossInput::Desirable => return None,
            // The reference that the loss declares scores mismatched answers.
            LossInput::KlBaseline if loss.reference.is_some() => return None,
            LossInput::Values | LossInput::OldValues | LossInput::Returns => (
                "numbers of a scalar head, which a policy does not have",
                "train a critic with stage `update_critic`; `update` only trains policies",
            ),
            LossInput::KlBaseline => (
                "the KL of mismatched answers, which needs a reference",
                "set `reference` of the loss to the frozen model",
            ),
        };
        Some(ConfigError::new(
            "loss",
            format!("is `{kind}`, which reads {what}"),
            help,
        ))
    });
    let mut missing: Vec<ConfigError> = missing.collect();
    missing.dedup();
    missing
}

impl UpdateStage {
    /// Fills the columns by which the objective selects tokens; returns log Σ π² of the tokens if the loss reads it.
    ///
    /// At the first optimiser step of a step the policy is still that of the old log-probs, so it is scored only at
    /// later ones. Without old log-probs there is one optimiser step, and its scores are the old log-probs.
    pub(super) fn fill(
        &self,
        mini: &mut MiniBatch,
        policy: &dyn PolicyModel,
        columns: &Columns<'_>,
        rows: Range<usize>,
        at: StepPosition,
    ) -> Result<Option<Vec<f32>>, StageError> {
        let reads_squares = self.loss.reads_sum_pi_squared;
        let mut squares = None;
        let reads_current = self.loss.reads(LossInput::CurrentLogProbs);
        let entropies = self.loss.reads(LossInput::CurrentEntropies);
        let known = at.is_first && mini.old_log_probs.is_some();
        if entropies || reads_squares || (reads_current && !known) {
            let extras = Extras {
                entropies,
                sum_pi_squared: reads_squares,
            };
            let scores = policy.score(
                &columns.rows.score_rows(rows.clone()),
                self.temperature,
                extras,
            );
            let scores = scores.map_err(|error| refused_row(error, &columns.ids[rows.clone()]))?;
            let packed = |of: fn(&verl_models::model::Scores) -> &[f32]| {
                let each = rows.clone().zip(&scores);
                let tokens = each.flat_map(|(row, scores)| {
                    let numbers = of(scores);
                    columns
                        .rows
                        .actions(row)
                        .map(|token| f64::from(numbers[token]))
                });
                tokens.collect::<Vec<f64>>()
            };
            if entropies {
                mini.current_entropies = Some(packed(|scores| &scores.entropies));
            }
            if reads_squares {
                let squared = packed(|scores| &scores.sum_pi_squared);
                squares = Some(
                    squared
                        .into_iter()
                        .map(|sum| libm::log(sum) as f32)
                        .collect(),
                );
            }
            mini.current_log_probs = Some(packed(|scores| &scores.log_probs));
            if mini.old_log_probs.is_none() && self.loss.reads(LossInput::OldLogProbs) {
                mini.old_log_probs.clone_from(&mini.current_log_probs);
            }
        } else if reads_current {
            mini.current_log_probs.clone_from(&mini.old_log_probs);
        }
        if self.loss.reads(LossInput::Draws) {
            mini.draws = Some(draws(columns, rows, at));
        }
        Ok(squares)
    }
}

/// A number in (0, 1) for each action token: a function of seed, step, pass, the row's identity and the token's
/// position, so that neither the order of rows nor the split into mini-batches matters.
fn draws(columns: &Columns<'_>, rows: Range<usize>, at: StepPosition) -> Vec<f64> {
    let tokens = rows.flat_map(|row| {
        let key = DrawKey {
            seed: at.seed,
            purpose: Purpose::Subset,
            step: at.step,
            row: columns.ids[row].0,
            attempt: at.pass as u32,
        };
        let stream = key.stream();
        let actions = columns.rows.actions(row);
        actions.map(move |token| stream.uniform(token as u32, 0))
    });
    tokens.collect()
}

#[cfg(test)]
mod tests {
    use verl_words::batch::{Batch, RaggedColumn, RowId};
    use verl_words::keys::{MASK_KINDS, PROMPTS, RESPONSES};

    use super::*;
    use verl_algos::Aggregation;
    use verl_algos::losses::{Objective, ValueLoss};

    /// Rows with these identities, each with three tokens; the second is an observation.
    fn batch(ids: &[u64]) -> Batch {
        let ids: Vec<RowId> = ids.iter().map(|id| RowId(*id)).collect();
        let mut batch = Batch::with_rows(&ids);
        let rows = || ids.iter();
        let prompts = RaggedColumn::from_rows(rows().map(|_| [9u32]));
        batch.put(&PROMPTS, prompts).unwrap();
        let tokens = RaggedColumn::from_rows(rows().map(|_| [1u32, 2, 3]));
        batch.put(&RESPONSES, tokens).unwrap();
        let kinds = RaggedColumn::from_rows(rows().map(|_| [1u8, 0, 1]));
        batch.put(&MASK_KINDS, kinds).unwrap();
        batch
    }

    fn drawn(ids: &[u64], at: StepPosition) -> Vec<f64> {
        let batch = batch(ids);
        let columns = Columns::new(&batch, RESPONSES).unwrap();
        draws(&columns, 0..ids.len(), at)
    }

    #[test]
    fn draws_depend_on_the_row_and_not_on_its_position() {
        let at = StepPosition {
            seed: 1,
            step: 2,
            pass: 0,
            is_first: true,
        };
        let both = drawn(&[7, 8], at);
        assert_eq!(both.len(), 4);
        let mut swapped = drawn(&[8, 7], at);
        swapped.rotate_left(2);
        assert_eq!(both, swapped);
        assert_eq!(both[2..], drawn(&[8], at));
        assert!(both.iter().all(|draw| (0.0..1.0).contains(draw)));
        for other in [
            StepPosition { seed: 2, ..at },
            StepPosition { step: 3, ..at },
            StepPosition { pass: 1, ..at },
        ] {
            let draws = drawn(&[7, 8], other);
            assert!(draws.iter().zip(&both).all(|(a, b)| a != b), "{other:?}");
        }
    }

    #[test]
    fn a_critic_loss_is_refused() {
        let critic = Objective::new(Aggregation::TokenMean).with(1.0, ValueLoss::default());
        let faults = unavailable_inputs(&Loss::new(critic), "value");
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].reason.contains("scalar head"), "{faults:?}");
    }
}
