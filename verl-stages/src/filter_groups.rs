//! Stage `filter_groups`: drops groups of samples that carry no signal, and has others drawn in their place.
//!
//! A group whose responses are all right, or all wrong, has advantage 0 in every row: it costs time, dilutes the
//! gradient and shrinks the effective batch by a different amount in each step. Dropping such groups and drawing more
//! prompts until enough groups remain is DAPO's dynamic sampling.
//!
//! A step draws `batch.prompts` prompts, a *wave*. While fewer than `groups` groups are kept and fewer than `max_waves`
//! waves are drawn, the source draws another one; rewards and other row-wise stages run as waves arrive. Of the groups
//! that are kept, the first `groups` are passed on, in the order in which they were drawn. A draw is a pure function of
//! step, wave and position, so `max_waves` changes nothing in a step that needs fewer.
//!
//! The stage writes `group_means`; `log_probs` and `advantages` read it, and so process only the rows that were kept.
//! Besides its own metrics, the engine records `filter_groups/waves`, `…/groups_kept` and `…/groups_surplus`.
//!
//! # Differences
//! DAPO's recipe stops when too few groups are left after its last wave, and so does this stage unless `on_short` says
//! otherwise. verl tests the standard deviation, which rounding can make non-zero, and keeps groups of one response;
//! here rewards are compared exactly, and a group with fewer than two scored responses is dropped. OpenRLHF keeps a
//! group whose mean lies inside the range even if its rewards are all equal; here it is dropped.
//!
//! # Source
//! Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2; the range of means is OpenRLHF's.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::{Batch, RowId};
use verl_words::keys::{GROUP_MEANS, REWARDS};
use verl_words::stage::{
    BuildContext, Cardinality, ConfigError, Metric, OnShort, Reduce, Refill, RowRule, Stage,
    StageConfig, StageContext, StageError, StageSpec,
};

macro_rules! metrics {
    ($($ident:ident: $name:literal, $unit:literal, $reduce:ident, $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $ident: Metric = Metric { name: $name, unit: $unit, meaning: $meaning, reduce: Reduce::$reduce, role: None };)*
        const ALL: &[Metric] = &[$($ident),*];
    };
}

metrics! {
    SIGNAL: "filter_groups/signal_share", "share", Mean, "share of the drawn groups that carry a signal";
    ALL_HIGH: "filter_groups/all_high", "groups", Sum, "groups dropped as too easy: equal rewards above 0, or a mean at `max_mean` or above";
    ALL_LOW: "filter_groups/all_low", "groups", Sum, "groups dropped as too hard: equal rewards of 0 or below, or a mean at `min_mean` or below";
    UNSCORED: "filter_groups/unscored", "groups", Sum, "groups dropped with fewer than two scored responses";
    SCORE_MEAN: "filter_groups/score_mean", "reward", Mean, "mean score over the scored responses of all drawn groups";
    SCORE_MIN: "filter_groups/score_min", "reward", Min, "lowest score of the step";
    SCORE_MAX: "filter_groups/score_max", "reward", Max, "highest score of the step";
}

/// Settings of stage `filter_groups`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FilterGroups {
    /// Key that groups are filtered by: one number per response, such as the reward before shaping.
    pub key: String,
    /// Groups that a step keeps (groups); `batch.prompts` when absent. With fewer, most steps need only one wave.
    pub groups: Option<usize>,
    /// Maximum number of waves of `batch.prompts` prompts that a step draws; 1 drops groups without refilling (waves).
    pub max_waves: usize,
    /// What happens if a step has kept fewer groups after its last wave: `error` ends the run before the update,
    /// `continue` continues with the groups that it has, at least one. When absent: `error`, or `continue` if
    /// `max_waves` is 1.
    pub on_short: Option<OnShort>,
    /// A group is dropped unless its mean is above this; no limit when absent.
    pub min_mean: Option<f64>,
    /// A group is dropped unless its mean is below this; no limit when absent.
    pub max_mean: Option<f64>,
}

impl Default for FilterGroups {
    fn default() -> Self {
        FilterGroups {
            key: REWARDS.name().to_owned(),
            groups: None,
            max_waves: 3,
            on_short: None,
            min_mean: None,
            max_mean: None,
        }
    }
}

/// Whether a group is kept, or why it is dropped.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    /// It carries a signal; the mean of its scores.
    Keep(f64),
    TooEasy,
    TooHard,
    Unscored,
}

impl FilterGroups {
    fn judge(&self, scores: &[f64]) -> Verdict {
        let [first, others @ ..] = scores else {
            return Verdict::Unscored;
        };
        if others.is_empty() {
            return Verdict::Unscored;
        }
        // Compares for equality: rounding can make a standard deviation non-zero.
        if others.iter().all(|score| score == first) {
            return if *first > 0.0 {
                Verdict::TooEasy
            } else {
                Verdict::TooHard
            };
        }
        let mean = scores.iter().sum::<f64>() / scores.len() as f64;
        if self.max_mean.is_some_and(|max| mean >= max) {
            Verdict::TooEasy
        } else if self.min_mean.is_some_and(|min| mean <= min) {
            Verdict::TooHard
        } else {
            Verdict::Keep(mean)
        }
    }

    fn faults(&self, context: &BuildContext) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        let mut fault = |setting: &str, bad: bool, reason: String, help: String| {
            if bad {
                faults.push(ConfigError::new(setting, reason, help));
            }
        };
        let (prompts, samples) = (context.batch.prompts.max(1), context.batch.samples);
        let most = RowId::MAX_WAVES;
        fault(
            "key",
            self.key.is_empty(),
            "is empty".to_owned(),
            format!("set it to `{}`, or remove it", REWARDS.name()),
        );
        fault(
            "batch.samples",
            samples == 1,
            "is 1: the rewards of a group of one never differ, so every group would be dropped"
                .to_owned(),
            "sample several responses to each prompt".to_owned(),
        );
        fault(
            "max_waves",
            !(1..=most).contains(&(self.max_waves as u64)),
            format!("is {}, outside 1 to {most}", self.max_waves),
            "raise `batch.prompts` to draw more prompts per wave".to_owned(),
        );
        let groups = self.groups.unwrap_or(prompts);
        let drawn = prompts.saturating_mul(self.max_waves.max(1));
        fault(
            "groups",
            groups == 0 || groups > drawn,
            format!("is {groups}, outside 1 to max_waves · batch.prompts = {drawn}"),
            "keep fewer groups, or raise `batch.prompts` or `max_waves`".to_owned(),
        );
        let (min, max) = (
            self.min_mean.unwrap_or(f64::NEG_INFINITY),
            self.max_mean.unwrap_or(f64::INFINITY),
        );
        fault(
            "min_mean",
            min.is_nan() || max.is_nan() || min >= max,
            format!("is {min} and `max_mean` is {max}, so no mean lies between them"),
            "set `min_mean` below `max_mean`".to_owned(),
        );
        faults
    }
}

impl StageConfig for FilterGroups {
    const KIND: &'static str = "filter_groups";
    const SUMMARY: &'static str =
        "drops groups whose rewards carry no signal, and has more prompts drawn in their place";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let faults = self.faults(context);
        if !faults.is_empty() {
            return Err(faults);
        }
        let on_short = self.on_short.unwrap_or(if self.max_waves == 1 {
            OnShort::Continue
        } else {
            OnShort::Error
        });
        Ok(Box::new(FilterStage {
            refill: Refill {
                groups: self.groups.unwrap_or(context.batch.prompts).max(1),
                waves: self.max_waves,
                on_short,
            },
            config: self.clone(),
        }))
    }
}

/// The running stage.
#[derive(Clone)]
struct FilterStage {
    config: FilterGroups,
    refill: Refill,
}

impl Stage for FilterStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(REWARDS.field().renamed(self.config.key.clone()))
            .writes(GROUP_MEANS)
            .rows(RowRule::Filter)
            .cardinality(Cardinality::Group)
            .refill(self.refill)
            .metrics(ALL)
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let judged = input.rename(&[(self.config.key.as_str(), REWARDS.name())]);
        let scores = judged.get(&REWARDS)?;
        let (mut rows, mut means) = (Vec::new(), Vec::new());
        for group in input.group_ranges() {
            let scored = group.clone().filter_map(|row| scores.row(row));
            let scored: Vec<f64> = scored.map(f64::from).filter(|s| !s.is_nan()).collect();
            for score in &scored {
                for metric in [&SCORE_MEAN, &SCORE_MIN, &SCORE_MAX] {
                    context.record(metric, *score);
                }
            }
            let verdict = self.config.judge(&scored);
            let kept = matches!(verdict, Verdict::Keep(_));
            context.record(&SIGNAL, f64::from(kept));
            for (metric, dropped) in [
                (&ALL_HIGH, Verdict::TooEasy),
                (&ALL_LOW, Verdict::TooHard),
                (&UNSCORED, Verdict::Unscored),
            ] {
                context.record(metric, f64::from(verdict == dropped));
            }
            if let Verdict::Keep(mean) = verdict {
                means.extend(group.clone().map(|_| mean as f32));
                rows.extend(group);
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        let mut output = input.rows_only().take(&rows)?;
        output.put(&GROUP_MEANS, means)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests;
