//! Supervised fine-tuning: imitate the targets.

use verl_algos::losses::{MetricId, Objective, SftLoss};
use verl_declare::part::PartConfig;
use verl_words::keys::TARGETS;
use verl_words::stage::{BuildContext, ConfigError};

use super::{AggregationName, Loss, aggregation};
use crate::settings::{metrics, settings};

metrics! {
    SFT_LOSS: "actor/sft_loss", "nats", "negative log-likelihood of the targets";
}

settings! {
    /// Negative log-likelihood of target tokens.
    Sft {
        /// How token losses become one number.
        aggregation: AggregationName = AggregationName::TokenMean,
        /// Divisor of `seq-mean-token-sum-norm`: the longest target in tokens.
        loss_scale_factor: Option<f64> = None,
    }
}

impl PartConfig for Sft {
    type Slot = Loss;
    const KIND: &'static str = "sft";
    const SUMMARY: &'static str = "negative log-likelihood of target tokens";

    fn build(&self, _context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let aggregation = aggregation(self.aggregation, self.loss_scale_factor);
        let objective = Objective::new(aggregation.map_err(|error| vec![error])?);
        Ok(Loss {
            tokens: TARGETS,
            metrics: vec![(MetricId::SFT_LOSS, SFT_LOSS)],
            ..Loss::new(objective.with(1.0, SftLoss))
        })
    }
}
