//! What policy losses have in common: aggregation, KL to a reference, entropy bonus.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use verl_algos::kl::KlEstimator;
use verl_algos::losses::{EntropyBonus, KlLoss, Objective, TokenLoss};
use verl_pipe::part::PartConfig;
use verl_pipe::stage::{BuildContext, ConfigError, Metric};

use super::{Loss, aggregation};
use crate::settings::{coefficient_fault, metrics, refusal};

metrics! {
    PG_LOSS: "actor/pg_loss", "", "policy term of the loss";
    CLIPPED: "actor/pg_clipfrac", "share", "share of tokens whose ratio is clipped";
    CLIPPED_LOWER: "actor/pg_clipfrac_lower", "share", "share of tokens where the dual clip acts";
    PPO_KL: "actor/ppo_kl", "nats", "mean of old minus current log-probs over the updates of the step";
    KL_LOSS: "actor/kl_loss", "nats", "KL term of the loss, aggregated, before its coefficient";
    KL: "actor/kl", "nats", "mean over tokens of the estimated KL to the reference";
    ENTROPY_LOSS: "actor/entropy_loss", "nats", "entropy term of the loss, aggregated, before its coefficient";
    ENTROPY: "actor/entropy_now", "nats", "mean entropy of the policy over tokens during the update";
}

/// Names of the maths and the metrics under which they are reported, for every policy loss.
const REPORTED: [(&str, Metric); 7] = [
    ("pg_clipfrac", CLIPPED),
    ("pg_clipfrac_lower", CLIPPED_LOWER),
    ("ppo_kl", PPO_KL),
    ("kl_loss", KL_LOSS),
    ("ref_kl", KL),
    ("entropy_loss", ENTROPY_LOSS),
    ("entropy", ENTROPY),
];

/// The settings of a loss of the policy on advantages: what it is apart from the terms that all of them share.
///
/// Register one as [`PolicyObjective`]: `registry.part::<PolicyObjective<MyLoss>>()`.
pub trait PolicyLoss:
    DeserializeOwned + Serialize + JsonSchema + Default + Clone + Send + Sync + 'static
{
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;
    /// How its token losses become one number unless that is set.
    const AGGREGATION: &'static str = "token-mean";

    /// The loss of a token.
    fn token_loss(&self) -> Box<dyn TokenLoss>;
}

/// Agg(policy loss) + β·Agg(KL to the reference) − c·Agg(entropy): what a [`PolicyLoss`] is trained with.
///
/// In a pipeline file the settings of `policy` stand beside the others:
/// `loss = { kind = "grpo", clip_high = 0.28, kl_coef = 0.001 }`.
///
/// ```
/// use verl_stages::losses::{Grpo, PolicyObjective};
/// use verl_stages::update::Update;
///
/// let loss = PolicyObjective {
///     policy: Grpo { clip_high: 0.28, ..Grpo::default() },
///     kl_coef: 0.001,
///     ..PolicyObjective::default()
/// };
/// let update = Update { loss: loss.into(), ..Update::default() };
/// assert_eq!(update.loss.kind(), "grpo");
/// assert_eq!(update.loss.settings()["clip_high"], 0.28);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, bound = "")]
pub struct PolicyObjective<L: PolicyLoss> {
    /// The policy loss.
    #[serde(flatten)]
    pub policy: L,
    /// How token losses become one number: `token-mean` (DAPO), `seq-mean-token-mean` (the first GRPO, GSPO),
    /// `seq-mean-token-sum`, `seq-mean-token-sum-norm` (Dr. GRPO), `token-sum`.
    pub aggregation: String,
    /// Divisor of `seq-mean-token-sum-norm`: the longest response in tokens.
    pub loss_scale_factor: Option<f64>,
    /// β: coefficient of the KL to the reference; 0 needs no reference.
    pub kl_coef: f64,
    /// Estimator of that KL: `k1`, `k2`, `k3`, `abs`, with `+` for the gradient of k2.
    pub kl_estimator: String,
    /// c: coefficient of the entropy bonus; 0 computes no entropies.
    pub entropy_coef: f64,
}

impl<L: PolicyLoss> Default for PolicyObjective<L> {
    fn default() -> Self {
        PolicyObjective {
            policy: L::default(),
            aggregation: L::AGGREGATION.to_owned(),
            loss_scale_factor: None,
            kl_coef: 0.0,
            kl_estimator: "k3".to_owned(),
            entropy_coef: 0.0,
        }
    }
}

impl<L: PolicyLoss> PartConfig for PolicyObjective<L> {
    type Slot = Loss;
    const KIND: &'static str = L::KIND;
    const SUMMARY: &'static str = L::SUMMARY;

    fn build(&self, _context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let mut faults = Vec::new();
        let policy = self.policy.token_loss();
        if let Err(error) = policy.check() {
            faults.push(refusal(L::KIND, &error));
        }
        faults.extend(coefficient_fault("kl_coef", self.kl_coef));
        faults.extend(coefficient_fault("entropy_coef", self.entropy_coef));
        let estimator = KlEstimator::parse(&self.kl_estimator)
            .map_err(|error| faults.push(refusal("kl_estimator", &error)));
        let aggregation = aggregation(&self.aggregation, self.loss_scale_factor)
            .map_err(|error| faults.push(error));
        let (Ok(estimator), Ok(aggregation), true) = (estimator, aggregation, faults.is_empty())
        else {
            return Err(faults);
        };
        let own = (policy.name(), PG_LOSS);
        let mut objective = Objective::new(aggregation).with_boxed(1.0, policy);
        if self.kl_coef != 0.0 {
            objective = objective.with(self.kl_coef, KlLoss { estimator });
        }
        if self.entropy_coef != 0.0 {
            objective = objective.with(-self.entropy_coef, EntropyBonus);
        }
        Ok(Loss {
            penalises_kl: self.kl_coef != 0.0,
            metrics: std::iter::once(own).chain(REPORTED).collect(),
            ..Loss::new(objective)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::{Grpo, Gspo};
    use verl_algos::losses::LossInput;

    fn build<L: PolicyLoss>(loss: PolicyObjective<L>) -> Result<Loss, Vec<ConfigError>> {
        loss.build(&BuildContext::default())
    }

    #[track_caller]
    fn check_refused(loss: PolicyObjective<Grpo>, expected: &[(&str, &str)]) {
        let faults = build(loss).expect_err("refused");
        assert_eq!(faults.len(), expected.len(), "{faults:?}");
        for (fault, (setting, words)) in faults.iter().zip(expected) {
            assert_eq!(fault.setting, *setting);
            let told = format!("{fault}; {}", fault.help);
            assert!(told.contains(words), "`{words}` is not in: {told}");
        }
    }

    #[test]
    fn senseless_settings_are_told_together() {
        let policy = |clip_low, clip_high, dual_clip| Grpo {
            clip_low,
            clip_high,
            dual_clip,
        };
        let all = PolicyObjective {
            policy: policy(-1.0, 0.2, 3.0),
            kl_coef: -0.1,
            kl_estimator: "k4".to_owned(),
            aggregation: "tokenmean".to_owned(),
            ..PolicyObjective::default()
        };
        check_refused(
            all,
            &[
                ("clip_low", "is -1, but it must lie in [0, 1]"),
                ("kl_coef", "is -0.1"),
                ("kl_estimator", "`k4`, which is the name of no KL estimator"),
                ("aggregation", "did you mean `token-mean`?"),
            ],
        );
        for (policy, setting) in [
            (policy(1.2, 0.2, 3.0), "clip_low"),
            (policy(0.2, f64::NAN, 3.0), "clip_high"),
            (policy(0.2, 0.2, 0.9), "dual_clip"),
        ] {
            let loss = PolicyObjective {
                policy,
                ..PolicyObjective::default()
            };
            check_refused(loss, &[(setting, "must")]);
        }
    }

    #[test]
    fn dr_grpo_needs_its_divisor() {
        let mut loss = PolicyObjective::<Grpo> {
            aggregation: "seq-mean-token-sum-norm".to_owned(),
            ..PolicyObjective::default()
        };
        check_refused(
            loss.clone(),
            &[("loss_scale_factor", "longest response in tokens")],
        );
        loss.loss_scale_factor = Some(0.0);
        check_refused(loss.clone(), &[("loss_scale_factor", "must be a positive")]);
        loss.loss_scale_factor = Some(64.0);
        assert!(build(loss).is_ok());
    }

    #[test]
    fn terms_read_what_they_need() {
        let reads = |kl_coef, entropy_coef| {
            let loss = PolicyObjective::<Grpo> {
                kl_coef,
                entropy_coef,
                ..PolicyObjective::default()
            };
            let loss = build(loss).unwrap();
            let inputs = [LossInput::RefLogProbs, LossInput::Entropies];
            (inputs.map(|input| loss.reads(input)), loss.penalises_kl)
        };
        assert_eq!(reads(0.0, 0.0), ([false, false], false));
        assert_eq!(reads(0.1, 0.0), ([true, false], true));
        assert_eq!(reads(0.0, 0.1), ([false, true], false));
    }

    #[test]
    fn a_loss_may_have_an_aggregation_of_its_own() {
        let of = |text: &str| -> String {
            let loss: PolicyObjective<Gspo> = serde_json::from_str(text).unwrap();
            loss.aggregation
        };
        assert_eq!(of("{\"clip_low\": 0.1}"), "seq-mean-token-mean");
        assert_eq!(of("{\"aggregation\": \"token-sum\"}"), "token-sum");
    }
}
