//! Inputs of preference losses besides log-probs: labels, and KTO's z₀.

use verl_algos::losses::kl_baseline;
use verl_models::model::{Extras, ScoreRow};
use verl_words::batch::{Batch, RowId};
use verl_words::keys::{DESIRABLE, PROMPTS};
use verl_words::stage::{Access, ModelWork, Models, StageError, StageSpec, find_model};

use crate::losses::Loss;
use crate::model::{POLICY, PolicyResource};
use crate::refusals::refused_row;

/// Adds the inputs of `loss` to `spec`.
pub(super) fn spec(mut spec: StageSpec, loss: &Loss) -> StageSpec {
    if loss.reads_labels() {
        let help =
            "add a stage `pairs` after `preferences`, or set the column `labels` of `preferences`";
        spec = spec.reads(DESIRABLE).remedy(DESIRABLE.name(), help);
    }
    match &loss.reference {
        Some(reference) => spec
            .uses_as(POLICY, reference, Access::Read)
            .works(ModelWork::scoring(reference).of([PROMPTS.name(), loss.tokens.name()])),
        None => spec,
    }
}

/// Whether each row is desirable; empty if `loss` does not read it.
///
/// # Errors
/// Rows that are not pairs, for a loss on pairs.
pub(super) fn desirable(input: &Batch, loss: &Loss) -> Result<Vec<bool>, StageError> {
    if !loss.reads_labels() {
        return Ok(Vec::new());
    }
    let labels = input.get(&DESIRABLE)?;
    let labels: Vec<bool> = labels.values().iter().map(|label| *label == 1).collect();
    if loss.of_pairs
        && let Some(pair) = labels.chunks(2).position(|pair| pair != [true, false])
    {
        return Err(StageError::Row {
            row: 2 * pair,
            id: input.ids()[2 * pair],
            reason:
                "does not begin a pair of a chosen and a rejected answer, which the loss requires"
                    .to_owned(),
        });
    }
    Ok(labels)
}

/// The models that z₀ of KTO compares ([`kl_baseline`]): both score answers to other prompts, without gradients.
pub(super) struct Baseline<'a> {
    /// Name of the policy.
    pub policy: &'a str,
    /// Name of the reference.
    pub reference: &'a str,
    /// Divides the logits of both.
    pub temperature: f64,
}

impl Baseline<'_> {
    /// z₀ for a mini-batch.
    ///
    /// # Errors
    /// A mini-batch of one prompt; errors of the models.
    pub(super) fn of(
        &self,
        models: &mut Models,
        ids: &[RowId],
        rows: &[ScoreRow<'_>],
    ) -> Result<f64, StageError> {
        let mut context = usize::MAX;
        for name in [self.policy, self.reference] {
            let model = find_model::<PolicyResource>(models, name)?;
            context = context.min(model.policy().max_tokens());
        }
        let rows = mismatched(rows, context)?;
        let mut sums = |name: &str| -> Result<Vec<f64>, StageError> {
            let policy = find_model::<PolicyResource>(models, name)?.policy();
            let scores = policy.score(&rows, self.temperature, Extras::default());
            let scores = scores.map_err(|error| refused_row(error, ids))?.into_iter();
            Ok(scores
                .map(|row| row.log_probs.iter().map(|value| f64::from(*value)).sum())
                .collect())
        };
        let (now, frozen) = (sums(self.policy)?, sums(self.reference)?);
        let ratios: Vec<f64> = now.iter().zip(frozen).map(|(a, b)| a - b).collect();
        kl_baseline(&ratios).map_err(StageError::failed)
    }
}

/// Each prompt with the answer of the next row that has another prompt, cut off where the context ends.
///
/// # Differences
/// [`mismatched_rows`](verl_algos::losses::mismatched_rows) takes the next row itself; in a pair that is an answer to
/// the same prompt.
fn mismatched<'a>(rows: &[ScoreRow<'a>], context: usize) -> Result<Vec<ScoreRow<'a>>, StageError> {
    let after = |index: usize| rows[index + 1..].iter().chain(&rows[..index]);
    let each = rows.iter().enumerate().map(|(index, row)| {
        let other = after(index).find(|other| other.prompt != row.prompt);
        let other = other.ok_or_else(|| {
            StageError::failed(
                "all rows of a mini-batch have the same prompt, but z₀ of KTO is estimated on answers to other prompts; raise batch.mini_batch, or set `baseline = \"zero\"`",
            )
        })?;
        let room = context.saturating_sub(row.prompt.len());
        Ok(ScoreRow {
            prompt: row.prompt,
            response: &other.response[..other.response.len().min(room)],
        })
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use verl_declare::part::PartConfig;
    use verl_words::batch::RowId;
    use verl_words::stage::BuildContext;

    use super::*;

    use crate::losses::{Kto, Orpo};

    fn context() -> BuildContext {
        let mut context = BuildContext::default();
        context.batch.samples = 2;
        context
    }

    fn labelled(labels: &[u8]) -> Batch {
        let ids: Vec<RowId> = (0..labels.len() as u64).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        batch.put(&DESIRABLE, labels.to_vec()).unwrap();
        batch
    }

    #[test]
    fn answers_are_put_after_other_prompts() {
        let row = |prompt, response| ScoreRow { prompt, response };
        let (a, b) = (&[1u32, 2][..], &[3u32][..]);
        let rows = [
            row(a, &[10, 11][..]),
            row(a, &[12]),
            row(b, &[13, 14, 15]),
            row(b, &[]),
        ];
        let mixed = mismatched(&rows, 4).unwrap();
        let expected: [ScoreRow<'_>; 4] = [
            row(a, &[13, 14]),
            row(a, &[13, 14]),
            row(b, &[10, 11]),
            row(b, &[10, 11]),
        ];
        assert_eq!(mixed, expected);
        let error = mismatched(&rows[..2], 9).unwrap_err().to_string();
        assert!(error.contains("batch.mini_batch"), "{error}");
    }

    #[test]
    fn losses_on_pairs_require_pairs() {
        let (orpo, kto) = (
            Orpo::default().build(&context()).unwrap(),
            Kto::default().build(&context()).unwrap(),
        );
        let pairs = labelled(&[1, 0, 1, 0]);
        assert_eq!(
            desirable(&pairs, &orpo).unwrap(),
            [true, false, true, false]
        );
        for labels in [&[1, 0, 0, 1][..], &[1, 0, 1]] {
            let error = desirable(&labelled(labels), &orpo).unwrap_err().to_string();
            assert!(
                error.contains("sample 0.0#2 (row 1 of the data set)"),
                "{error}"
            );
            assert_eq!(
                desirable(&labelled(labels), &kto).unwrap().len(),
                labels.len()
            );
        }
    }
}
