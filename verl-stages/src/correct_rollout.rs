//! Stage `correct_rollout`: corrects for differences between the rollout engine's probabilities and the trainer's.
//!
//! An engine may use other kernels, another precision or older weights. From the log-probs of both the stage computes
//! importance weights, which multiply the policy loss of `update`, and a mask that excludes tokens or responses whose
//! log-probs differ too much. Put it after a `log_probs` stage that scores the responses itself (not `bypass`);
//! `update` reads what it writes.
//!
//! ```toml
//! [[stages]]
//! kind = "correct_rollout"
//! preset = "decoupled_token_is"
//! ```
//!
//! In *bypass* mode (presets that begin with `bypass_`) the rollout engine's policy replaces the old one: weights and
//! rejection are the same, and the ratio of the loss is relative to the rollout engine's log-probs. Rename the key that
//! `update` reads, and choose the matching kind of loss (`grpo` for `bypass_ppo_clip*`, `reinforce` for `bypass_pg_*`):
//!
//! ```toml
//! [[stages]]
//! kind = "correct_rollout"
//! preset = "bypass_ppo_clip_geo_rs"
//!
//! [[stages]]
//! kind = "update"
//! rename = { old_log_probs = "rollout_log_probs" }
//! ```
//!
//! # Differences
//! verl's bypass mode recomputes the distance with the policy of each optimiser step; here it is computed once, with
//! the policy at the start of the step, as in decoupled mode. With one optimiser step per step the two are the same.
//!
//! Custom rules replace the preset:
//! `weights = "token"`, `bound = "2.0"`, `rejection = [{ rule = "seq_mean_k3", bound = "0.01" }]`.
//!
//! All numbers of [`verl_algos::rollout_correction::Correction::metrics`] are reported under `rollout_correction/`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::rollout_correction::{
    Correction, LogProbPair, Mode, RejectionRule, RolloutCorrection, RolloutWeights,
    TrlSamplerRatio, WeightBound, all_scored,
};
use verl_algos::{AlgoError, Ragged};
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::field::{LogProbTag, Support, Weights};
use verl_words::keys::{
    GROUP_MEANS, MASK_KINDS, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, ROLLOUT_MASKS, ROLLOUT_WEIGHTS, mask,
};
use verl_words::stage::{
    BuildContext, Cardinality, ConfigError, Metric, RowRule, Stage, StageConfig, StageContext,
    StageError, StageSpec,
};

pub use verl_algos::rollout_correction::{
    Preset, RejectionRuleName, SamplerRatioMode, WeightLevel,
};

use crate::advantages::NO_OLD;
use crate::log_probs::LogProbs;
use crate::settings::{metrics, refusal};

metrics! {
    ESS: "rollout_correction/rollout_is_eff_sample_size", "share", "effective sample size under the importance weights, as a share of the step: 1 / mean((w / mean w)^2)";
    CHI2: "rollout_correction/chi2_token", "", "chi-squared of the token distributions of trainer and rollout engine";
    KL: "rollout_correction/kl", "nats", "mean log-prob of the rollout engine minus that of the trainer", RolloutKl;
    PROBABILITY_DIFFERENCE: "rollout_correction/probs_diff_mean", "probability", "mean |p_trainer - p_rollout| of the sampled tokens; investigate above 0.01";
}

/// A rule that excludes tokens or responses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// Name: what the rule checks and its estimate of the divergence, for example `seq_mean_k3`.
    pub rule: RejectionRuleName,
    /// Largest estimate that is kept, for example `0.01`. For `k1` the bounds of π_rollout/π_trainer: `0.5_2.0`, or
    /// only the upper one.
    pub bound: String,
}

/// Importance weights as in TRL.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SamplerRatio {
    /// Whether each token has a weight or all tokens of a response share one, and whether weights outside the bounds
    /// are clamped or set to 0.
    pub mode: SamplerRatioMode,
    /// Lower bound; 0 when absent.
    pub clip_min: Option<f64>,
    /// Upper bound.
    pub clip_max: f64,
}

impl Default for SamplerRatio {
    fn default() -> Self {
        SamplerRatio {
            mode: SamplerRatioMode::SequenceMask,
            clip_min: None,
            clip_max: TrlSamplerRatio::default().clip_max,
        }
    }
}

/// Settings of stage `correct_rollout`; without a preset, weights or rules it only measures.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectRollout {
    /// A correction by name.
    pub preset: Option<Preset>,
    /// Importance weights of each `token`, or one for all tokens of a response (`sequence`); none when absent.
    pub weights: Option<WeightLevel>,
    /// Bound of the weights: `2.0` is an upper bound, `0.5_5.0` a band outside which a weight is 0 (IcePop). `2.0` when
    /// absent.
    pub bound: Option<String>,
    /// Whether weights are divided by their mean over the step.
    pub normalize: bool,
    /// Importance weights as in TRL, instead of `weights`: `{ mode = "sequence_mask", clip_max = 3.0 }`.
    pub sampler_ratio: Option<SamplerRatio>,
    /// Rules that exclude tokens from training; a token is kept if all rules keep it.
    pub rejection: Vec<Rejection>,
}

impl StageConfig for CorrectRollout {
    const KIND: &'static str = "correct_rollout";
    const SUMMARY: &'static str = "computes importance weights against the rollout engine, and selects the tokens to train on";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let correction = match self.preset {
            Some(preset) => self.by_name(preset)?,
            None => self.by_rules()?,
        };
        let ratio = self.sampler_ratio.as_ref();
        let ratio = ratio.map(|own| TrlSamplerRatio::named(own.mode, own.clip_min, own.clip_max));
        let ratio = ratio.transpose().map_err(|error| {
            let fault = refusal("mode", &error);
            let setting = format!("sampler_ratio.{}", fault.setting);
            vec![ConfigError { setting, ..fault }]
        })?;
        Ok(Box::new(CorrectRolloutStage { correction, ratio }))
    }
}

impl CorrectRollout {
    fn by_name(&self, preset: Preset) -> Result<RolloutCorrection, Vec<ConfigError>> {
        let only_preset = CorrectRollout {
            preset: Some(preset),
            ..CorrectRollout::default()
        };
        if *self != only_preset {
            return Err(vec![ConfigError::new(
                "preset",
                format!("is `{preset}`, but custom rules are set too"),
                "remove `preset`, or `weights`, `bound`, `normalize`, `sampler_ratio` and `rejection`",
            )]);
        }
        Ok(preset.into())
    }

    fn by_rules(&self) -> Result<RolloutCorrection, Vec<ConfigError>> {
        let mut faults = Vec::new();
        let mut report = |setting: &str, error: AlgoError| {
            faults.push(ConfigError {
                setting: setting.to_owned(),
                ..refusal(setting, &error)
            });
        };
        let bound = WeightBound::parse(self.bound.as_deref().unwrap_or("2.0"));
        let bound = bound.map_err(|error| report("bound", error)).ok();
        let mut rejection = Vec::new();
        for (at, Rejection { rule, bound }) in self.rejection.iter().enumerate() {
            match RejectionRule::named(*rule, bound) {
                Ok(rule) => rejection.push(rule),
                Err(error) => report(&format!("rejection[{at}]"), error),
            }
        }
        if self.weights.is_some() && self.sampler_ratio.is_some() {
            faults.push(ConfigError::new(
                "sampler_ratio",
                "replaces `weights`, but both are set",
                "remove one of the two",
            ));
        }
        if self.weights.is_none() && (self.bound.is_some() || self.normalize) {
            faults.push(ConfigError::new(
                if self.normalize { "normalize" } else { "bound" },
                "applies to weights, but no weights are set",
                "set `weights = \"token\"` or `\"sequence\"`, or remove it",
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        let weights = self
            .weights
            .zip(bound)
            .map(|(level, bound)| RolloutWeights {
                level,
                bound,
                normalize: self.normalize,
            });
        Ok(RolloutCorrection {
            mode: Mode::Decoupled,
            weights,
            rejection,
        })
    }
}

/// The running stage.
struct CorrectRolloutStage {
    correction: RolloutCorrection,
    /// TRL's weights, which replace those of the correction.
    ratio: Option<TrlSamplerRatio>,
}

impl CorrectRolloutStage {
    fn masks(&self) -> bool {
        !self.correction.rejection.is_empty()
    }

    /// Records declared metrics under their constants, which include their meaning, and the others by name.
    fn report(correction: &Correction, tokens: f64, context: &mut StageContext<'_>) {
        let declared: [&Metric; 4] = [&ESS, &CHI2, &KL, &PROBABILITY_DIFFERENCE];
        for (name, value) in correction.metrics() {
            let name = format!("rollout_correction/{name}");
            match declared.iter().find(|metric| metric.name == name) {
                Some(metric) => context.record_weighted(metric, value, tokens),
                None => context.sink.record_named(&name, value, tokens),
            }
        }
    }
}

impl Stage for CorrectRolloutStage {
    fn spec(&self) -> StageSpec {
        let tag = LogProbTag {
            support: Some(Support::Full),
            weights: Some(Weights::StepStart),
            ..LogProbTag::default()
        };
        let mut spec = StageSpec::new()
            .reads(MASK_KINDS)
            .reads(OLD_LOG_PROBS.tagged(tag.clone()))
            .remedy(OLD_LOG_PROBS.name(), NO_OLD)
            .reads(ROLLOUT_LOG_PROBS.tagged(tag))
            .scored_by(LogProbs::KIND)
            // Only for its rows: rows that `filter_groups` dropped are not corrected.
            .reads_optional(GROUP_MEANS)
            .cardinality(Cardinality::Batch)
            .metrics(&[CHI2, KL, PROBABILITY_DIFFERENCE]);
        if self.correction.weights.is_some() {
            spec = spec.writes(ROLLOUT_WEIGHTS).metrics(&[ESS]);
        } else if self.ratio.is_some() {
            spec = spec.writes(ROLLOUT_WEIGHTS);
        }
        if self.masks() {
            spec = spec.writes(ROLLOUT_MASKS);
        }
        if spec.writes.is_empty() {
            spec = spec.rows(RowRule::Sink);
        }
        spec
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let kinds = input.get(&MASK_KINDS)?;
        let actions = Ragged::<bool>::from_rows(kinds.rows().map(|row| {
            let actions = row.iter().map(|kind| *kind == mask::ACTION);
            actions.collect::<Vec<_>>()
        }));
        let train = Ragged::<f64>::from_rows(input.get(&OLD_LOG_PROBS)?.rows());
        let rollout = Ragged::<f64>::from_rows(input.get(&ROLLOUT_LOG_PROBS)?.rows());
        let tokens: usize = actions.counts().into_iter().sum();
        // Without actions there is nothing to measure, and what is written is never read.
        let (weights, kept) = if tokens == 0 {
            (Some(actions.map(|_, _, _| 0.0)), actions)
        } else {
            let pair = LogProbPair {
                actions: &actions,
                train_log_probs: &train,
                rollout_log_probs: &all_scored(&rollout),
            };
            let corrected = self.correction.correct(&pair).map_err(StageError::failed)?;
            Self::report(&corrected, tokens as f64, context);
            let ratios = self.ratio.map(|ratio| ratio.ratios(&pair));
            let ratios = ratios.transpose().map_err(StageError::failed)?;
            (ratios.or(corrected.weights), corrected.actions)
        };
        let mut output = input.rows_only();
        let writes = self.correction.weights.is_some() || self.ratio.is_some();
        if let Some(weights) = weights.filter(|_| writes) {
            let rows = weights.map(|_, _, weight| weight as f32);
            output.put(&ROLLOUT_WEIGHTS, RaggedColumn::from_rows(rows.rows()))?;
        }
        if self.masks() {
            let rows = kept.map(|_, _, kept| u8::from(kept));
            output.put(&ROLLOUT_MASKS, RaggedColumn::from_rows(rows.rows()))?;
        }
        if output.keys().is_empty() {
            return Ok(());
        }
        context.emit(output)
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RowId;

    use super::*;
    use crate::sink::{RecordingSink, run};

    /// A response of two actions around an observation whose log-probs differ, and a response whose log-probs agree.
    fn corrected(config: &CorrectRollout) -> RecordingSink {
        let ids = [RowId::prompt(0, 1).unwrap(), RowId::prompt(0, 2).unwrap()];
        let mut batch = Batch::with_rows(&ids);
        let kinds: [&[u8]; 2] = [&[1, 0, 1], &[1]];
        let old: [&[f32]; 2] = [&[-1.0, 7.0, -1.0], &[-1.0]];
        let rollout: [&[f32]; 2] = [&[-3.0, -9.0, -1.0], &[-1.0]];
        let (kinds, old) = (RaggedColumn::from_rows(kinds), RaggedColumn::from_rows(old));
        batch.put(&MASK_KINDS, kinds).unwrap();
        batch.put(&OLD_LOG_PROBS, old).unwrap();
        let rollout = RaggedColumn::from_rows(rollout);
        batch.put(&ROLLOUT_LOG_PROBS, rollout).unwrap();
        let mut stage = config.build(&BuildContext::default()).unwrap();
        run(stage.as_mut(), 1, batch)
    }

    #[test]
    fn weights_and_masks_by_hand() {
        let config = CorrectRollout {
            weights: Some(WeightLevel::Token),
            bound: Some("3.0".to_owned()),
            rejection: vec![Rejection {
                rule: RejectionRuleName::TokenK2,
                bound: "1.5".to_owned(),
            }],
            ..CorrectRollout::default()
        };
        let kept = corrected(&config);
        let weights = kept.batches[0].get(&ROLLOUT_WEIGHTS).unwrap();
        assert_eq!(
            (weights.row(0), weights.row(1)),
            (&[3.0, 0.0, 1.0][..], &[1.0][..])
        );
        // q = 2 at the first token: k2 is 2.
        let masks = kept.batches[0].get(&ROLLOUT_MASKS).unwrap();
        assert_eq!((masks.row(0), masks.row(1)), (&[0, 0, 1][..], &[1][..]));
        let near = |metric, expected: f64| {
            let value = kept.mean(metric).unwrap();
            assert!((value - expected).abs() < 1e-6, "{value} is not {expected}");
        };
        near(&KL, -2.0 / 3.0);
        // (5/3)² / (11/3).
        near(&ESS, 25.0 / 33.0);
        near(&CHI2, (4.0f64.exp() - 1.0) / 3.0);
        near(
            &PROBABILITY_DIFFERENCE,
            ((-1.0f64).exp() - (-3.0f64).exp()) / 3.0,
        );
    }

    #[test]
    fn ratios_of_trl_by_hand() {
        let with = |mode, clip_max| {
            let config = CorrectRollout {
                sampler_ratio: Some(SamplerRatio {
                    mode,
                    clip_max,
                    ..SamplerRatio::default()
                }),
                ..CorrectRollout::default()
            };
            let kept = corrected(&config);
            let weights = kept.batches[0].get(&ROLLOUT_WEIGHTS).unwrap();
            (weights.row(0).to_vec(), weights.row(1).to_vec())
        };
        // q = 2 and 0 in the first response; an observation's ratio is 1.
        let (first, second) = with(SamplerRatioMode::TokenTruncate, 3.0);
        assert_eq!((first, second), (vec![3.0, 1.0, 1.0], vec![1.0]));
        let (first, _) = with(SamplerRatioMode::TokenMask, 3.0);
        assert_eq!(first, [0.0, 1.0, 1.0]);
        let (first, _) = with(SamplerRatioMode::SequenceMask, 3.0);
        assert_eq!(first, [0.0, 1.0, 0.0]);
        let both = CorrectRollout {
            weights: Some(WeightLevel::Token),
            sampler_ratio: Some(SamplerRatio::default()),
            ..CorrectRollout::default()
        };
        check_refused(&both, &["sampler_ratio"]);
        let negative = CorrectRollout {
            sampler_ratio: Some(SamplerRatio {
                clip_min: Some(-1.0),
                ..SamplerRatio::default()
            }),
            ..CorrectRollout::default()
        };
        check_refused(&negative, &["sampler_ratio.clip_min"]);
    }

    #[test]
    fn without_rules_it_only_measures() {
        let kept = corrected(&CorrectRollout::default());
        assert!(kept.batches.is_empty());
        assert!(kept.mean(&CHI2).is_some() && kept.mean(&ESS).is_none());
    }

    #[test]
    fn every_preset_corrects() {
        for preset in Preset::ALL {
            let config = CorrectRollout {
                preset: Some(*preset),
                ..CorrectRollout::default()
            };
            let stage = config.build(&BuildContext::default()).expect("a stage");
            let kept = corrected(&config);
            let emitted = kept.batches.first();
            for field in stage.spec().writes {
                emitted.expect("rows").check_field(&field).unwrap();
            }
        }
    }

    #[track_caller]
    fn check_refused(config: &CorrectRollout, expected: &[&str]) {
        let faults = config
            .build(&BuildContext::default())
            .err()
            .expect("refused");
        let settings: Vec<&str> = faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(settings, expected, "{faults:?}");
    }

    #[test]
    fn invalid_settings_are_reported_together() {
        let text = |text: &str| Some(text.to_owned());
        let config = CorrectRollout {
            weights: Some(WeightLevel::Token),
            bound: text("-1"),
            rejection: vec![Rejection {
                rule: RejectionRuleName::SeqMeanK3,
                bound: "x".to_owned(),
            }],
            ..CorrectRollout::default()
        };
        check_refused(&config, &["bound", "rejection[0]"]);
        let config = CorrectRollout {
            bound: text("2.0"),
            ..CorrectRollout::default()
        };
        check_refused(&config, &["bound"]);
        let config = CorrectRollout {
            preset: Some(Preset::DecoupledTokenIs),
            normalize: true,
            ..CorrectRollout::default()
        };
        check_refused(&config, &["preset"]);
    }
}
