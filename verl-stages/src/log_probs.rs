//! Stage `log_probs`: log-probs of the responses under a model, by the training forward pass.
//!
//! With role `old` they are the denominators of the policy ratio at the start of the update, with role `reference`
//! those of the KL penalty. Both are over the full softmax at the sampling temperature.

mod cache;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::model::{Extras, ScoreRow, Scores};
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::field::{Field, LogProbTag, Support, Weights};
use verl_words::keys::{
    ENTROPIES, GROUP_MEANS, OLD_LOG_PROBS, PROMPTS, REF_LOG_PROBS, RESPONSES, ROLLOUT_LOG_PROBS,
    SUM_PI_SQUARED,
};
use verl_words::stage::{
    Access, BuildContext, ConfigError, Metric, MetricRole, ModelWork, Reduce, Shown, Stage,
    StageConfig, StageContext, StageError, StageSpec, find_model,
};

use crate::model::{POLICY, PolicyResource};
use crate::refusals::refused_row;
use crate::training::score_rows;
use cache::Cache;

/// Mean entropy of the policy.
pub const ENTROPY: Metric = Metric {
    name: "actor/entropy",
    unit: "nats",
    meaning: "mean entropy of the policy over response tokens, before the update",
    reduce: Reduce::Mean,
    role: Some(MetricRole::Entropy),
};
/// Difference between the trainer's probabilities and the rollout engine's.
pub const ROLLOUT_DIFFERENCE: Metric = Metric {
    name: "rollout/probability_difference_mean",
    unit: "probability",
    meaning: "mean |p_trainer − p_rollout| of the sampled tokens; above 0.01 the two forward passes disagree",
    reduce: Reduce::Mean,
    role: None,
};

/// How much the cache saved. Under `perf/`, because it is not reproducible: a run that was resumed or rolled back finds
/// other rows in the cache.
pub const CACHED: Metric = Metric {
    name: "perf/log_probs_cached_share",
    unit: "share",
    meaning: "share of rows whose log-probs were cached in an earlier epoch",
    reduce: Reduce::Mean,
    role: None,
};

/// Which log-probs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// `old_log_probs`: the policy at the start of the update.
    #[default]
    Old,
    /// `ref_log_probs`: a model that never changes.
    Reference,
}

/// Settings of stage `log_probs`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogProbs {
    /// Model that scores.
    pub model: String,
    /// Which key is written.
    pub role: Role,
    /// Temperature that divides logits; the temperature at which the responses were sampled when absent.
    pub temperature: Option<f64>,
    /// Also writes `entropies`; only with role `old`.
    pub entropies: bool,
    /// Also writes `sum_pi_squared`, which the estimators `otb` and `tir_otb` read; only with role `old`.
    pub sum_pi_squared: bool,
    /// Copies the rollout engine's log-probs instead of running a forward pass (bypass); only with role `old`.
    pub bypass: bool,
    /// Keeps the log-probs of each row in memory and computes them once for all epochs; only with role `reference`. For
    /// data sets with fixed responses; the values are bit-identical.
    pub cache: bool,
}

impl Default for LogProbs {
    fn default() -> Self {
        LogProbs {
            model: "actor".to_owned(),
            role: Role::Old,
            temperature: None,
            entropies: false,
            sum_pi_squared: false,
            bypass: false,
            cache: false,
        }
    }
}

/// The temperature that divides logits in a scoring forward pass: its own, else the sampling temperature, else 1.
pub(crate) fn scoring_temperature(own: Option<f64>, context: &BuildContext) -> f64 {
    own.or(context.temperature).unwrap_or(1.0)
}

/// Refuses a temperature that is not positive.
pub(crate) fn scoring_temperature_fault(own: Option<f64>) -> Option<ConfigError> {
    let is_valid = |temperature: &f64| *temperature > 0.0 && temperature.is_finite();
    let invalid = own.filter(|temperature| !is_valid(temperature))?;
    Some(ConfigError::new(
        "temperature",
        format!("is {invalid}, but must be above 0"),
        "remove it to use the temperature at which the tokens are sampled",
    ))
}

impl StageConfig for LogProbs {
    const KIND: &'static str = "log_probs";
    const SUMMARY: &'static str = "log-probs of the responses under a policy or reference model";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(scoring_temperature_fault(self.temperature));
        if self.role == Role::Reference && self.bypass {
            faults.push(ConfigError::new(
                "bypass",
                "copies the rollout's log-probs, which are the policy's, not the reference's",
                "remove it or set `role = \"old\"`",
            ));
        }
        for (setting, wanted) in [
            ("entropies", self.entropies),
            ("sum_pi_squared", self.sum_pi_squared),
        ] {
            if wanted && (self.role == Role::Reference || self.bypass) {
                faults.push(ConfigError::new(
                    setting,
                    "needs a forward pass of the policy",
                    "remove it, or set `role = \"old\"` without `bypass`",
                ));
            }
        }
        if self.cache && self.role == Role::Old {
            faults.push(ConfigError::new(
                "cache",
                "would cache log-probs of weights that change in every step",
                "remove it, or set `role = \"reference\"`",
            ));
        }
        if faults.is_empty() {
            Ok(Box::new(LogProbsStage {
                config: self.clone(),
                temperature: scoring_temperature(self.temperature, context),
                cache: Cache::default(),
            }))
        } else {
            Err(faults)
        }
    }
}

/// The running stage.
#[derive(Clone)]
struct LogProbsStage {
    config: LogProbs,
    temperature: f64,
    cache: Cache,
}

impl LogProbsStage {
    fn tag(&self) -> LogProbTag {
        let weights = match self.config.role {
            Role::Old => Weights::StepStart,
            Role::Reference => Weights::Frozen,
        };
        LogProbTag {
            policy: Some(self.config.model.clone()),
            temperature: Some(self.temperature),
            support: Some(Support::Full),
            weights: Some(weights),
        }
    }

    /// The key whose tokens are scored.
    fn tokens(&self) -> &'static str {
        match self.config.bypass {
            true => ROLLOUT_LOG_PROBS.name(),
            false => RESPONSES.name(),
        }
    }

    fn writes(&self) -> Field {
        match self.config.role {
            Role::Old => OLD_LOG_PROBS.tagged(self.tag()),
            Role::Reference => REF_LOG_PROBS.tagged(self.tag()),
        }
    }

    /// Scores of `rows`, from the cache if they are there.
    fn scores(
        &mut self,
        ids: &[RowId],
        rows: &[ScoreRow<'_>],
        context: &mut StageContext<'_>,
    ) -> Result<Vec<Scores>, StageError> {
        let LogProbs {
            entropies,
            sum_pi_squared,
            cache,
            ..
        } = self.config;
        let temperature = self.temperature;
        let extras = Extras {
            entropies,
            sum_pi_squared,
        };
        let policy = find_model::<PolicyResource>(context.models, &self.config.model)?.policy();
        let score = |rows: &[ScoreRow<'_>], ids: &[RowId]| {
            policy
                .score(rows, temperature, extras)
                .map_err(|error| refused_row(error, ids))
        };
        if !cache {
            return score(rows, ids);
        }
        let (scores, known) = self.cache.scores(ids, rows, score)?;
        if !rows.is_empty() {
            let share = known as f64 / rows.len() as f64;
            context.record_weighted(&CACHED, share, rows.len() as f64);
        }
        Ok(scores)
    }

    fn copy_rollout(input: &Batch) -> Result<Batch, StageError> {
        let mut output = input.rows_only();
        let rows = input.get(&ROLLOUT_LOG_PROBS)?;
        output.put(&OLD_LOG_PROBS, RaggedColumn::from_rows(rows.rows()))?;
        Ok(output)
    }
}

impl Stage for LogProbsStage {
    fn spec(&self) -> StageSpec {
        // `GROUP_MEANS` is read only for its rows: after `filter_groups`, dropped rows are not scored.
        let spec = StageSpec::new()
            .reads_optional(GROUP_MEANS)
            .scored_by(LogProbs::KIND)
            .at_temperature_of(self.tokens());
        if self.config.bypass {
            return spec
                .reads(ROLLOUT_LOG_PROBS.tagged(self.tag()))
                .writes(self.writes());
        }
        let mut spec = spec
            .reads(PROMPTS)
            .reads(RESPONSES)
            .writes(self.writes())
            .uses_as(POLICY, &self.config.model, Access::Read)
            .works(ModelWork::scoring(&self.config.model).of([PROMPTS.name(), RESPONSES.name()]));
        if self.config.role == Role::Old {
            spec = spec
                .reads_optional(ROLLOUT_LOG_PROBS.tagged(self.tag()))
                .metrics(&[ROLLOUT_DIFFERENCE]);
        }
        if self.config.cache {
            spec = spec.metrics(&[CACHED]);
        }
        if self.config.entropies {
            spec = spec
                .writes(ENTROPIES.tagged(self.tag()))
                .metrics(&[ENTROPY])
                .shows(Shown::of(&ENTROPY, "ent", Shown::RESPONSES + 1).narrow());
        }
        if self.config.sum_pi_squared {
            spec = spec.writes(SUM_PI_SQUARED.tagged(self.tag()));
        }
        spec
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        if self.config.bypass {
            return context.emit(Self::copy_rollout(&input)?);
        }
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&RESPONSES)?);
        let rows = score_rows(&prompts, &responses);
        let scores = self.scores(&input.ids(), &rows, context)?;

        let mut output = input.rows_only();
        let column = RaggedColumn::from_rows(scores.iter().map(|s| &s.log_probs));
        match self.config.role {
            Role::Old => output.put(&OLD_LOG_PROBS, column)?,
            Role::Reference => output.put(&REF_LOG_PROBS, column)?,
        }
        if self.config.sum_pi_squared {
            let squares = scores.iter().map(|s| &s.sum_pi_squared);
            output.put(&SUM_PI_SQUARED, RaggedColumn::from_rows(squares))?;
        }
        if self.config.entropies {
            output.put(
                &ENTROPIES,
                RaggedColumn::from_rows(scores.iter().map(|s| &s.entropies)),
            )?;
            for score in &scores {
                // Values that are not finite are at observations; the guards refuse others.
                let finite = score.entropies.iter().filter(|h| h.is_finite());
                let count = finite.clone().count() as f64;
                let sum: f64 = finite.map(|h| f64::from(*h)).sum();
                if count > 0.0 {
                    context.record_weighted(&ENTROPY, sum / count, count);
                }
            }
        }
        if self.config.role == Role::Old && input.has(ROLLOUT_LOG_PROBS.name()) {
            let rollout = input.get(&ROLLOUT_LOG_PROBS)?;
            for (score, reported) in scores.iter().zip(rollout.rows()) {
                let pairs = score.log_probs.iter().zip(reported);
                let differences =
                    pairs.map(|(a, b)| (libm::exp(f64::from(*a)) - libm::exp(f64::from(*b))).abs());
                let finite = differences.filter(|difference| difference.is_finite());
                let (count, sum) =
                    finite.fold((0.0, 0.0), |(n, sum), value| (n + 1.0, sum + value));
                if count > 0.0 {
                    context.record_weighted(&ROLLOUT_DIFFERENCE, sum / count, count);
                }
            }
        }
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}
