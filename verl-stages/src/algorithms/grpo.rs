//! GRPO and its relatives: the clipped policy loss, with KL to a reference and an entropy bonus where asked for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::kl::KlEstimator;
use verl_algos::losses::{ClippedPolicyLoss, EntropyBonus, KlLoss, Objective, TokenLoss};
use verl_pipe::field::{Field, Key, LogProbTag, Ragged, Weights};
use verl_pipe::keys::{
    ADVANTAGES, MASK_KINDS, OLD_LOG_PROBS, REF_LOG_PROBS, RESPONSES, ROLLOUT_LOG_PROBS,
};
use verl_pipe::stage::ConfigError;

use super::{Algorithm, aggregation, fault};

/// Settings of loss `grpo`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Grpo {
    /// ε_low: the ratio is clipped at 1 − ε_low where that lowers the gain.
    pub clip_low: f64,
    /// ε_high: the ratio is clipped at 1 + ε_high; above ε_low is clip-higher (DAPO: 0.28).
    pub clip_high: f64,
    /// c: bound of the ratio where the advantage is negative (dual clip); absent: none.
    pub dual_clip: Option<f64>,
    /// How token losses become one number: `token-mean` (DAPO), `seq-mean-token-mean` (the first GRPO),
    /// `seq-mean-token-sum`, `seq-mean-token-sum-norm` (Dr. GRPO), `token-sum`.
    pub aggregation: String,
    /// Divisor of `seq-mean-token-sum-norm`: the longest response in tokens.
    pub loss_scale_factor: Option<f64>,
    /// β: coefficient of the KL to the reference; 0 needs no reference.
    pub kl_coef: f64,
    /// Estimator of that KL: `k1`, `k2`, `k3`, `abs`, with `+` for the gradient of k2.
    pub kl_estimator: String,
    /// Coefficient of the entropy bonus; 0 computes no entropies.
    pub entropy_coef: f64,
}

impl Default for Grpo {
    fn default() -> Self {
        Grpo {
            clip_low: 0.2,
            clip_high: 0.2,
            dual_clip: Some(3.0),
            aggregation: "token-mean".to_owned(),
            loss_scale_factor: None,
            kl_coef: 0.0,
            kl_estimator: "k3".to_owned(),
            entropy_coef: 0.0,
        }
    }
}

impl Algorithm for Grpo {
    fn tokens(&self) -> Key<Ragged<u32>> {
        RESPONSES
    }

    fn reads(&self, policy: &LogProbTag) -> Vec<Field> {
        let mut fields = vec![MASK_KINDS.field(), ADVANTAGES.field()];
        if self.kl_coef != 0.0 {
            let reference = LogProbTag {
                policy: None,
                weights: Some(Weights::Frozen),
                ..policy.clone()
            };
            fields.push(REF_LOG_PROBS.tagged(reference));
        }
        fields
    }

    fn reads_optional(&self, policy: &LogProbTag) -> Vec<Field> {
        // The engine's own log-probs are read for their tag alone: responses that were sampled at another temperature
        // are not those of the policy that is trained.
        vec![
            OLD_LOG_PROBS.tagged(policy.clone()),
            ROLLOUT_LOG_PROBS.tagged(policy.clone()),
        ]
    }

    fn penalises_kl(&self) -> bool {
        self.kl_coef != 0.0
    }

    fn entropies(&self) -> bool {
        self.entropy_coef != 0.0
    }

    fn objective(&self) -> Result<Objective, Vec<ConfigError>> {
        let mut faults = Vec::new();
        let policy = ClippedPolicyLoss {
            clip_low: self.clip_low,
            clip_high: self.clip_high,
            dual_clip: self.dual_clip,
        };
        if let Err(error) = policy.check() {
            faults.push(fault("clip_low, clip_high, dual_clip", &error));
        }
        for (name, value) in [
            ("kl_coef", self.kl_coef),
            ("entropy_coef", self.entropy_coef),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                faults.push(ConfigError::new(
                    name,
                    format!("is {value}"),
                    "set it to a number from 0",
                ));
            }
        }
        let estimator = KlEstimator::parse(&self.kl_estimator)
            .map_err(|error| faults.push(fault("kl_estimator", &error)));
        let aggregation = aggregation(&self.aggregation, self.loss_scale_factor)
            .map_err(|errors| faults.extend(errors));
        let (Ok(estimator), Ok(aggregation), true) = (estimator, aggregation, faults.is_empty())
        else {
            return Err(faults);
        };
        let mut objective = Objective::new(aggregation).with(1.0, policy);
        if self.kl_coef != 0.0 {
            objective = objective.with(self.kl_coef, KlLoss { estimator });
        }
        if self.entropy_coef != 0.0 {
            objective = objective.with(-self.entropy_coef, EntropyBonus);
        }
        Ok(objective)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senseless_settings_are_told_together() {
        let config = Grpo {
            clip_low: -1.0,
            kl_coef: -0.1,
            kl_estimator: "k4".to_owned(),
            aggregation: "mean".to_owned(),
            ..Grpo::default()
        };
        let faults = config.objective().expect_err("four faults");
        let settings: Vec<_> = faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(
            settings,
            [
                "clip_low, clip_high, dual_clip",
                "kl_coef",
                "kl_estimator",
                "aggregation"
            ]
        );
    }

    #[test]
    fn dr_grpo_needs_its_divisor() {
        let mut config = Grpo {
            aggregation: "seq-mean-token-sum-norm".to_owned(),
            ..Grpo::default()
        };
        assert!(config.objective().is_err());
        config.loss_scale_factor = Some(64.0);
        assert!(config.objective().is_ok());
    }
}
