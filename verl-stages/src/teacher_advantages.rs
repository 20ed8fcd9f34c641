//! Stage `teacher_advantages`: advantages from a teacher's log-probs of the sampled tokens, so that any policy loss
//! distils.
//!
//! It replaces `reward` and `advantages`. The student's log-probs are `old_log_probs`; the teacher's are the
//! `ref_log_probs` of a `log_probs` stage whose reference model is the teacher.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::Ragged as AlgoRagged;
use verl_algos::losses::teacher_advantages;
use verl_words::batch::{Batch, RaggedColumn, RaggedView};
use verl_words::field::{LogProbTag, Support, Weights};
use verl_words::keys::{ADVANTAGES, MASK_KINDS, OLD_LOG_PROBS, REF_LOG_PROBS, mask};
use verl_words::stage::{
    BuildContext, ConfigError, Stage, StageConfig, StageContext, StageError, StageSpec,
};

use crate::log_probs::{LogProbs, scoring_temperature, scoring_temperature_fault};
use crate::settings::{metrics, refusal};

metrics! {
    REVERSE_KL: "distill/reverse_kl", "nats", "mean of log student − log teacher over sampled tokens: an estimate of the reverse KL per token";
}

/// Settings of stage `teacher_advantages`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TeacherAdvantages {
    /// Discount of later tokens, in [0, 1]; 0 counts only a token's own divergence against it.
    pub gamma: f64,
    /// Temperature of the compared log-probs; the sampling temperature when absent.
    pub temperature: Option<f64>,
}

impl Default for TeacherAdvantages {
    fn default() -> Self {
        TeacherAdvantages {
            gamma: 0.0,
            temperature: None,
        }
    }
}

impl StageConfig for TeacherAdvantages {
    const KIND: &'static str = "teacher_advantages";
    const SUMMARY: &'static str = "advantages from a teacher's log-probs of the sampled tokens";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(scoring_temperature_fault(self.temperature));
        let none = AlgoRagged::<f64>::from_rows([[0.0; 0]; 0]);
        let checked = teacher_advantages(&none, &none, &none.map(|_, _, _| true), self.gamma);
        faults.extend(checked.err().map(|error| refusal("gamma", &error)));
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(TeacherAdvantagesStage {
            config: self.clone(),
            temperature: scoring_temperature(self.temperature, context),
        }))
    }
}

/// The running stage.
#[derive(Clone)]
struct TeacherAdvantagesStage {
    config: TeacherAdvantages,
    temperature: f64,
}

fn numbers(column: RaggedView<'_, f32>) -> AlgoRagged<f64> {
    AlgoRagged::from_rows(
        column
            .rows()
            .map(|row| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>()),
    )
}

impl Stage for TeacherAdvantagesStage {
    fn spec(&self) -> StageSpec {
        let tag = |weights| LogProbTag {
            policy: None,
            temperature: Some(self.temperature),
            support: Some(Support::Full),
            weights: Some(weights),
        };
        StageSpec::new()
            .reads(MASK_KINDS)
            .at_temperature_of(MASK_KINDS.name())
            .reads(OLD_LOG_PROBS.tagged(tag(Weights::StepStart)))
            .reads(REF_LOG_PROBS.tagged(tag(Weights::Frozen)))
            .scored_by(LogProbs::KIND)
            .remedy(
                REF_LOG_PROBS.name(),
                "add a `log_probs` stage with `model` set to the teacher and `role = \"reference\"`",
            )
            .remedy(
                OLD_LOG_PROBS.name(),
                "add a `log_probs` stage for the student; with `bypass = true` it uses the rollout's log-probs",
            )
            .writes(ADVANTAGES)
            .metrics(&[REVERSE_KL])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let kinds = input.get(&MASK_KINDS)?;
        let actions = kinds.rows().map(|row| {
            row.iter()
                .map(|kind| *kind == mask::ACTION)
                .collect::<Vec<_>>()
        });
        let actions = AlgoRagged::<bool>::from_rows(actions);
        let student = numbers(input.get(&OLD_LOG_PROBS)?);
        let teacher = numbers(input.get(&REF_LOG_PROBS)?);
        let found = teacher_advantages(&student, &teacher, &actions, self.config.gamma)
            .map_err(StageError::failed)?;
        let own = student.map(|b, t, log_prob| log_prob - teacher.row(b)[t]);
        let own = own
            .select("log_probs", &actions)
            .map_err(StageError::failed)?;
        if !own.is_empty() {
            let count = own.len() as f64;
            context.record_weighted(&REVERSE_KL, own.iter().sum::<f64>() / count, count);
        }
        let mut output = input.rows_only();
        let rows = found
            .rows()
            .map(|row| row.iter().map(|x| *x as f32).collect::<Vec<_>>());
        output.put(&ADVANTAGES, RaggedColumn::from_rows(rows))?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RowId;

    use super::*;
    use crate::sink::run;

    #[test]
    fn actions_get_advantages_and_observations_get_zero() {
        let ids: Vec<RowId> = (0..2).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        let ragged = |rows: [Vec<f32>; 2]| RaggedColumn::from_rows(rows);
        let student = ragged([vec![-1.0, -9.0, -2.0], vec![-0.5]]);
        let teacher = ragged([vec![-1.5, -1.0, -1.0], vec![-0.5]]);
        batch.put(&OLD_LOG_PROBS, student).unwrap();
        batch.put(&REF_LOG_PROBS, teacher).unwrap();
        let kinds = RaggedColumn::from_rows([vec![1u8, 0, 1], vec![1]]);
        batch.put(&MASK_KINDS, kinds).unwrap();
        for (gamma, expected) in [(0.0, [-0.5f32, 0.0, 1.0, 0.0]), (1.0, [0.5, 0.0, 1.0, 0.0])] {
            let config = TeacherAdvantages {
                gamma,
                ..TeacherAdvantages::default()
            };
            let mut stage = StageConfig::build(&config, &BuildContext::default()).unwrap();
            let kept = run(stage.as_mut(), 1, batch.clone());
            let advantages = kept.batches[0].get(&ADVANTAGES).unwrap();
            assert_eq!(advantages.values(), expected);
            assert_eq!(kept.mean(&REVERSE_KL), Some((0.5 - 1.0 + 0.0) / 3.0));
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let config = TeacherAdvantages {
            gamma: 1.5,
            temperature: Some(0.0),
        };
        let errors = StageConfig::build(&config, &BuildContext::default());
        let errors = errors.err().expect("a refusal");
        let settings: Vec<_> = errors.iter().map(|error| error.setting.as_str()).collect();
        assert_eq!(settings, ["temperature", "gamma"]);
    }
}
