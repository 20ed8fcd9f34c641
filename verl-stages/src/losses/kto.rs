//! Kahneman–Tversky optimisation: single answers that are good or bad.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::Aggregation;
use verl_algos::losses::{Kto as Maths, KtoBaseline, Objective, RowLoss};
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError};

use super::Loss;
use super::judged::judged;
use crate::settings::{refusal, settings};

/// The baseline that the rewards of [`Kto`] are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// z₀: the KL of the policy to the reference, estimated on prompts of the mini-batch with answers to other prompts
    /// of it, which both models score before each optimiser step.
    #[default]
    Kl,
    /// 0, which makes it APO-zero on single answers.
    Zero,
}

settings! {
    /// KTO on answers that are good or bad, with log-probs of a reference.
    ///
    /// The answers may come from pairs, or one by one (`labels` of stage `preferences`).
    Kto {
        /// β: strength of the penalty on departures from the reference.
        beta: f64 = 0.1,
        /// Weight of desirable answers.
        desirable_weight: f64 = 1.0,
        /// Weight of undesirable answers.
        undesirable_weight: f64 = 1.0,
        /// What rewards are compared with.
        baseline: Baseline = Baseline::Kl,
        /// Frozen model that scores answers to other prompts for z₀: the one that computes the reference log-probs.
        reference: String = "ref".to_owned(),
    }
}

impl PartConfig for Kto {
    type Slot = Loss;
    const KIND: &'static str = "kto";
    const SUMMARY: &'static str =
        "KTO on answers that are good or bad, with log-probs of a reference";

    fn build(&self, context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let maths = Maths {
            baseline: match self.baseline {
                Baseline::Kl => KtoBaseline::Kl,
                Baseline::Zero => KtoBaseline::Zero,
            },
            beta: self.beta,
            desirable_weight: self.desirable_weight,
            undesirable_weight: self.undesirable_weight,
        };
        let mut faults = Vec::from_iter(maths.check().err().map(|e| refusal("beta", &e)));
        let batch = &context.batch;
        let compares = self.baseline == Baseline::Kl;
        // 0 rows: the batch arithmetic is not known.
        if compares && batch.mini_rows > 0 && batch.mini_rows <= batch.samples {
            faults.push(ConfigError::new(
                "kind",
                "is `kto`, but a mini-batch has only one prompt: z₀ is estimated on answers to other prompts, and there are none",
                "set `mini_batch` in [batch] to 2 or more (16 is better), or set `baseline = \"zero\"`",
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        let objective = Objective::new(Aggregation::default()).with_rows(1.0, maths);
        Ok(Loss {
            reference: compares.then(|| self.reference.clone()),
            ..judged(objective, Some(maths.id()))
        })
    }
}
