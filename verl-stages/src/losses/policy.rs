//! Shared by policy losses: aggregation, KL to a reference, entropy bonus, and the selection of tokens.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use verl_algos::kl::KlEstimator;
use verl_algos::losses::{
    EntropyBonus, ImportanceKlLoss, KlLoss, MetricId, Objective, OffPolicyRows, TokenFilter,
    TokenLoss, TopEntropyBonus, TopEntropyTokens,
};
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError, Metric, Shown};

use super::clip_bounds::ClipBounds;
use super::{AggregationName, KlEstimatorName, Level, Loss, LossState, aggregation};
use crate::settings::{coefficient_fault, metrics, refusal};
use crate::steering::{Control, EntropyControl, KlControl};

metrics! {
    PG_LOSS: "actor/pg_loss", "", "policy term of the loss";
    CLIPPED: "actor/pg_clipfrac", "share", "share of tokens whose ratio is clipped", ClippedShare;
    CLIPPED_LOWER: "actor/pg_clipfrac_lower", "share", "share of tokens where the dual clip applies";
    PPO_KL: "actor/ppo_kl", "nats", "mean of old minus current log-probs over the updates of the step", UpdateKl;
    KL_LOSS: "actor/kl_loss", "nats", "KL term of the loss, aggregated, before its coefficient";
    KL: "actor/kl", "nats", "mean over tokens of the estimated KL to the reference", ReferenceKl;
    ENTROPY_LOSS: "actor/entropy_loss", "nats", "entropy term of the loss, aggregated, before its coefficient";
    TOP_ENTROPY_LOSS: "actor/top_entropy_loss", "nats", "mean entropy of the tokens that `top_entropy_tokens` keeps, before its coefficient";
    ENTROPY: "actor/entropy_now", "nats", "mean entropy of the policy over tokens during the update", Entropy;
}

/// The metrics that the console shows.
pub(super) const SHOWN: [Shown; 3] = [
    Shown::of(&ENTROPY, "ent", Shown::RESPONSES + 3).narrow(),
    Shown::of(&KL, "kl", Shown::DISTANCE),
    Shown::of(&CLIPPED, "clip", Shown::DISTANCE + 1).narrow(),
];

/// What an objective reports, and the metrics as which it is recorded: of every policy loss, and of each additional
/// term that the objective has.
const OF_POLICY: [(MetricId, Metric); 3] = [
    (MetricId::PG_CLIPFRAC, CLIPPED),
    (MetricId::PG_CLIPFRAC_LOWER, CLIPPED_LOWER),
    (MetricId::PPO_KL, PPO_KL),
];
const OF_KL: [(MetricId, Metric); 2] = [(MetricId::KL_LOSS, KL_LOSS), (MetricId::REF_KL, KL)];
const OF_ENTROPY: [(MetricId, Metric); 2] = [
    (MetricId::ENTROPY_LOSS, ENTROPY_LOSS),
    (MetricId::ENTROPY, ENTROPY),
];
const OF_TOP_ENTROPY: [(MetricId, Metric); 1] = [(MetricId::TOP_ENTROPY_LOSS, TOP_ENTROPY_LOSS)];

/// The settings of a policy loss on advantages, without the terms that all policy losses share.
///
/// Register one as [`PolicyObjective`]: `registry.part::<PolicyObjective<MyLoss>>()`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy loss",
    note = "implement `PolicyLoss` for its settings: derive `Default`, `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` if you do not depend on these crates)"
)]
pub trait PolicyLoss:
    DeserializeOwned + Serialize + JsonSchema + Default + Clone + Send + Sync + 'static
{
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;
    /// Default aggregation of its token losses.
    const AGGREGATION: AggregationName = AggregationName::TokenMean;

    /// The loss of a token.
    fn token_loss(&self) -> Box<dyn TokenLoss>;

    /// The bounds of its clip, whose order is checked; by default it has none.
    fn clip_bounds(&self) -> Option<ClipBounds> {
        None
    }
}

/// Agg(policy loss) + β·Agg(KL to the reference) − c·Agg(entropy): what a [`PolicyLoss`] is trained with.
///
/// In a pipeline file the settings of `policy` are next to the others:
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
    /// How token losses become one number.
    pub aggregation: AggregationName,
    /// Divisor of `seq-mean-token-sum-norm`: the longest response in tokens.
    pub loss_scale_factor: Option<f64>,
    /// β: coefficient of the KL to the reference; 0 needs no reference.
    pub kl_coef: f64,
    /// Whether β is fixed or follows the KL of each step: `{ kind = "adaptive", target = 0.1, horizon = 10000 }`.
    pub kl_control: KlControl,
    /// Estimator of that KL; a `+` takes the gradient of `k2`.
    pub kl_estimator: KlEstimatorName,
    /// Weights the KL of each token by the ratio of the policy to the old one, over `token`, `sequence` or
    /// `sequence_product`, which is unbiased if an older policy sampled. Not weighted when absent.
    pub kl_importance: Option<Level>,
    /// c: coefficient of the entropy bonus; 0 computes no entropies.
    pub entropy_coef: f64,
    /// Adapts c to a target mean entropy after each optimiser step: `{ target = 0.2 }`; c is fixed when absent.
    pub entropy_control: Option<EntropyControl>,
    /// Excludes responses with a negative advantage from the policy loss if their mean log-ratio of sampler to policy
    /// exceeds this (nats per token; DeepSeek-V3.2). All count when absent.
    pub off_policy_rows: Option<f64>,
    /// Share of the mini-batch's tokens, those with the largest entropies, that counts in the policy loss, in (0, 1].
    /// All count when absent.
    pub top_entropy_tokens: Option<f64>,
    /// Coefficient of a bonus on the mean entropy of only those tokens.
    pub top_entropy_coef: f64,
}

impl<L: PolicyLoss> Default for PolicyObjective<L> {
    fn default() -> Self {
        PolicyObjective {
            policy: L::default(),
            aggregation: L::AGGREGATION,
            loss_scale_factor: None,
            kl_coef: 0.0,
            kl_control: KlControl::default(),
            kl_estimator: KlEstimatorName::K3,
            kl_importance: None,
            entropy_coef: 0.0,
            entropy_control: None,
            off_policy_rows: None,
            top_entropy_tokens: None,
            top_entropy_coef: 0.0,
        }
    }
}

impl<L: PolicyLoss> PolicyObjective<L> {
    /// The filters that select the tokens of the policy loss.
    fn filters(&self, faults: &mut Vec<ConfigError>) -> Vec<Box<dyn TokenFilter>> {
        let rows = self.off_policy_rows.map(|threshold| {
            let filter: Box<dyn TokenFilter> = Box::new(OffPolicyRows { threshold });
            ("off_policy_rows", filter)
        });
        let tokens = self.top_entropy_tokens.map(|quantile| {
            let filter: Box<dyn TokenFilter> = Box::new(TopEntropyTokens { quantile });
            ("top_entropy_tokens", filter)
        });
        let mut filters = Vec::new();
        for (setting, filter) in rows.into_iter().chain(tokens) {
            if let Err(error) = filter.check() {
                faults.push(ConfigError {
                    setting: setting.to_owned(),
                    ..refusal(setting, &error)
                });
            }
            filters.push(filter);
        }
        filters
    }

    /// The controllers of the coefficients.
    fn state(&self, context: &BuildContext, faults: &mut Vec<ConfigError>) -> LossState {
        let rows = context.batch.groups.max(context.batch.prompts) * context.batch.samples;
        let kl = self.kl_control.controller(self.kl_coef.max(0.0), rows);
        let kl = kl.map_err(|errors| faults.extend(errors)).ok();
        let entropy = self.entropy_control.as_ref();
        let entropy = entropy.map(|control| control.controller(self.entropy_coef));
        let entropy = entropy.transpose().map_err(|error| faults.push(error));
        LossState {
            kl: kl.filter(|_| self.kl_control.kind == Control::Adaptive),
            entropy: entropy.ok().flatten(),
            ..LossState::default()
        }
    }

    /// Errors in the coefficients and in the settings that they need.
    fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        faults.extend(coefficient_fault("kl_coef", self.kl_coef));
        faults.extend(coefficient_fault("entropy_coef", self.entropy_coef));
        faults.extend(coefficient_fault("top_entropy_coef", self.top_entropy_coef));
        if self.kl_importance.is_some() && self.kl_coef == 0.0 {
            faults.push(ConfigError::new(
                "kl_importance",
                "weights the KL to the reference, but `kl_coef` is 0",
                "set `kl_coef`, or remove it",
            ));
        }
        if self.top_entropy_coef != 0.0 && self.top_entropy_tokens.is_none() {
            faults.push(ConfigError::new(
                "top_entropy_coef",
                "is a bonus on the tokens that `top_entropy_tokens` keeps, but that is not set",
                "set `top_entropy_tokens` to a share, or use `entropy_coef` for all tokens",
            ));
        }
        faults
    }
}

impl<L: PolicyLoss> PartConfig for PolicyObjective<L> {
    type Slot = Loss;
    const KIND: &'static str = L::KIND;
    const SUMMARY: &'static str = L::SUMMARY;

    fn build(&self, context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let mut faults = Vec::new();
        let state = self.state(context, &mut faults);
        let policy = self.policy.token_loss();
        match policy.check() {
            Err(error) => faults.push(refusal(L::KIND, &error)),
            Ok(()) => {
                let bounds = self.policy.clip_bounds();
                faults.extend(bounds.into_iter().flat_map(ClipBounds::faults));
            }
        }
        faults.extend(self.faults());
        let filters = self.filters(&mut faults);
        let estimator = KlEstimator::from(self.kl_estimator);
        let aggregation = aggregation(self.aggregation, self.loss_scale_factor)
            .map_err(|error| faults.push(error));
        let (Ok(aggregation), true) = (aggregation, faults.is_empty()) else {
            return Err(faults);
        };
        let mut metrics = vec![(policy.id(), PG_LOSS)];
        metrics.extend(OF_POLICY);
        let mut objective = Objective::new(aggregation).with_boxed_filters(1.0, policy, filters);
        if self.kl_coef != 0.0 {
            metrics.extend(OF_KL);
            objective = match self.kl_importance.map(Into::into) {
                None => objective.with(self.kl_coef, KlLoss { estimator }),
                Some(level) => objective.with(self.kl_coef, ImportanceKlLoss { estimator, level }),
            };
        }
        if self.entropy_coef != 0.0 || state.entropy.is_some() {
            metrics.extend(OF_ENTROPY);
            objective = objective.with(-self.entropy_coef, EntropyBonus);
        }
        if self.top_entropy_tokens.is_some() {
            metrics.extend(OF_TOP_ENTROPY);
        }
        if let Some(quantile) = self
            .top_entropy_tokens
            .filter(|_| self.top_entropy_coef != 0.0)
        {
            objective = objective.with(-self.top_entropy_coef, TopEntropyBonus { quantile });
        }
        Ok(Loss {
            penalises_kl: self.kl_coef != 0.0,
            state,
            metrics,
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
            let text = format!("{fault}; {}", fault.help);
            assert!(text.contains(words), "`{words}` is not in: {text}");
        }
    }

    #[test]
    fn invalid_settings_are_reported_together() {
        let policy = |clip_low, clip_high, dual_clip| Grpo {
            clip_low,
            clip_high,
            dual_clip,
        };
        let all = PolicyObjective {
            policy: policy(-1.0, 0.2, 3.0),
            kl_coef: -0.1,
            aggregation: AggregationName::SeqMeanTokenSumNorm,
            ..PolicyObjective::default()
        };
        check_refused(
            all,
            &[
                ("clip_low", "is -1, but it must lie in [0, 1]"),
                ("kl_coef", "is -0.1"),
                ("loss_scale_factor", "is not set"),
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
    fn terms_and_filters_report_the_setting_that_they_need() {
        let base = PolicyObjective::<Grpo>::default;
        let fault = |loss: PolicyObjective<Grpo>, expected| check_refused(loss, &[expected]);
        let loss = PolicyObjective {
            kl_importance: Some(Level::Token),
            ..base()
        };
        fault(loss, ("kl_importance", "`kl_coef` is 0"));
        let loss = PolicyObjective {
            top_entropy_coef: 0.1,
            ..base()
        };
        fault(loss, ("top_entropy_coef", "set `top_entropy_tokens`"));
        let loss = PolicyObjective {
            top_entropy_tokens: Some(1.5),
            ..base()
        };
        fault(loss, ("top_entropy_tokens", "(0, 1]"));
        let loss = PolicyObjective {
            off_policy_rows: Some(f64::NAN),
            ..base()
        };
        fault(loss, ("off_policy_rows", "finite"));
    }

    /// A loss has the setting that its error names.
    #[test]
    fn errors_name_settings_of_the_loss() {
        #[track_caller]
        fn check<L: PolicyLoss>(settings: serde_json::Value) {
            let policy: L = serde_json::from_value(settings.clone()).unwrap();
            let loss = PolicyObjective {
                policy,
                ..PolicyObjective::default()
            };
            let faults = build(loss).expect_err("refused");
            let names: Vec<&String> = settings.as_object().unwrap().keys().collect();
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert_eq!(&faults[0].setting, names[0], "{}", L::KIND);
        }
        use crate::losses::*;
        use serde_json::json;
        check::<Cispo>(json!({ "clip_low": 2.0 }));
        check::<ClipCov>(json!({ "ratio": 0.0 }));
        check::<ClipCov>(json!({ "lower": 9.0 }));
        check::<DppoKl>(json!({ "ratio_cap": 0.0 }));
        check::<DppoTv>(json!({ "clip_high": -1.0 }));
        check::<Dro>(json!({ "beta": 0.0 }));
        check::<Gmpo>(json!({ "clip_low": -1.0 }));
        check::<Gmpo>(json!({ "clip_high": -1.0 }));
        check::<KlCov>(json!({ "ratio": 2.0 }));
        check::<KlCov>(json!({ "cov_kl_coef": -1.0 }));
        check::<Sapo>(json!({ "tau_neg": 0.0 }));
        check::<TrlCispo>(json!({ "clip_high": -1.0 }));
        check::<TrlGrpo>(json!({ "delta": 0.0 }));
        check::<TrlGspo>(json!({ "clip_low": -1.0 }));
        check::<TrlRloo>(json!({ "clip_high": -1.0 }));
        check::<Vespo>(json!({ "k_pos": -1.0 }));
        check::<Vespo>(json!({ "lambda_neg": 0.0 }));
    }

    #[test]
    fn dr_grpo_needs_its_divisor() {
        let mut loss = PolicyObjective::<Grpo> {
            aggregation: AggregationName::SeqMeanTokenSumNorm,
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
    fn adaptive_coefficients_require_their_settings() {
        let adaptive = |target, horizon| PolicyObjective::<Grpo> {
            kl_coef: 0.1,
            kl_control: KlControl {
                kind: Control::Adaptive,
                target,
                horizon,
            },
            entropy_control: Some(EntropyControl::default()),
            ..PolicyObjective::default()
        };
        let needs = "an adaptive coefficient needs it";
        check_refused(
            adaptive(None, None),
            &[("kl_control.target", needs), ("kl_control.horizon", needs)],
        );
        let loss = build(adaptive(Some(0.1), Some(1e4))).unwrap();
        assert!(loss.state.kl.is_some() && loss.state.entropy.is_some());
        // An entropy coefficient that starts at 0 still needs the entropies.
        assert!(loss.reads(LossInput::Entropies));
        assert!(
            !build(PolicyObjective::<Grpo>::default())
                .unwrap()
                .state
                .is_some()
        );
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
    fn a_loss_may_have_its_own_default_aggregation() {
        let of = |text: &str| -> AggregationName {
            let loss: PolicyObjective<Gspo> = serde_json::from_str(text).unwrap();
            loss.aggregation
        };
        assert_eq!(of("{\"clip_low\": 0.1}"), AggregationName::SeqMeanTokenMean);
        assert_eq!(
            of("{\"aggregation\": \"token-sum\"}"),
            AggregationName::TokenSum
        );
    }
}
