//! The built-in rules: one table, a function each.

use std::collections::BTreeMap;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, UInt8Type};
use arrow_array::{Array, ArrayRef};

use super::{Hit, MetricsView, Rule, SeenBatch, Severity, StepView};
use crate::batch::{Batch, RowId};
use crate::keys::{
    ADVANTAGES, FINISH_REASONS, MASK_KINDS, OLD_LOG_PROBS, REF_LOG_PROBS, REWARDS, finish, mask,
};
use crate::trace::format::Side;
use crate::trace::ratio::{bytes, floats};
use crate::trace::stats::StatRow;

/// Rows that a finding names.
const NAMED: usize = 5;
/// Steps of history that a spike is measured against at least.
const SPIKE_HISTORY: usize = 8;
/// Tokens below which an effective sample size says nothing.
const ESS_TOKENS: u64 = 32;
/// How much wider the tolerance of log-probs is where a device computes with other kernels for other shapes.
const DEVICE_FACTOR: f64 = 100.0;

/// Metrics, without their group, that are a mean entropy of the policy.
const ENTROPIES: &[&str] = &["entropy", "entropy_now"];
/// Metrics, without their group, that compare log-probs of the same weights.
const SAME_WEIGHTS: &[&str] = &["first_ppo_kl"];
/// Metrics, without their group, that are a norm of gradients.
const GRAD_NORMS: &[&str] = &["grad_norm"];
/// Metrics, without their group, that are a KL divergence.
const KLS: &[&str] = &["kl", "ppo_kl"];

/// What a rule needs in order to find anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LooksAt {
    /// Whatever keys there are.
    Anything,
    /// One of these keys, by the name under which a stage writes it.
    Keys(&'static [&'static str]),
    /// One of these metrics, by the name behind its group.
    Metrics(&'static [&'static str]),
}

/// When a rule looks, and how.
#[derive(Clone, Copy)]
enum Check {
    Step(fn(&StepView<'_>, f64) -> Vec<Hit>),
    Metrics(fn(&MetricsView<'_>, f64) -> Vec<Hit>),
}

/// A built-in rule.
#[derive(Clone, Copy)]
pub struct BuiltIn {
    /// Its name in `[trace.rules]`.
    pub name: &'static str,
    /// What it does by default.
    pub severity: Severity,
    /// Where it fires by default.
    pub limit: f64,
    /// Unit of the limit.
    pub unit: &'static str,
    /// When it fires.
    pub meaning: &'static str,
    /// What to look at next.
    pub advice: &'static str,
    /// What it needs in order to find anything.
    pub looks_at: LooksAt,
    check: Check,
}

impl BuiltIn {
    /// Whether the limit is a share, which lies between 0 and 1.
    pub fn is_share(&self) -> bool {
        self.unit.starts_with("share of ") || self.unit == "probability"
    }
}

impl Rule for BuiltIn {
    fn name(&self) -> &str {
        self.name
    }
    fn severity(&self) -> Severity {
        self.severity
    }
    fn limit(&self) -> f64 {
        self.limit
    }
    fn advice(&self) -> &str {
        self.advice
    }
    fn before_update(&mut self, view: &StepView<'_>, limit: f64) -> Vec<Hit> {
        match self.check {
            Check::Step(check) => check(view, limit),
            Check::Metrics(_) => Vec::new(),
        }
    }
    fn after_step(&mut self, view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
        match self.check {
            Check::Metrics(check) => check(view, limit),
            Check::Step(_) => Vec::new(),
        }
    }
}

/// The built-in rules, in the order in which they look.
pub const RULES: &[BuiltIn] = &[
    BuiltIn {
        name: "non_finite",
        severity: Severity::Stop,
        limit: 0.0,
        unit: "values",
        meaning: "more values than the limit that an update reads are NaN or infinite; observation tokens do not count",
        advice: "`pipe debug first-bad` names the stage where the first such value appeared",
        looks_at: LooksAt::Anything,
        check: Check::Step(non_finite),
    },
    BuiltIn {
        name: "advantage_variance",
        severity: Severity::Warn,
        limit: 100.0,
        unit: "variance",
        meaning: "the variance of the advantages is above the limit",
        advice: "look at the rewards of the samples and at how the estimator scales; clip or scale rewards",
        looks_at: LooksAt::Keys(&[ADVANTAGES.name()]),
        check: Check::Step(advantage_variance),
    },
    BuiltIn {
        name: "constant_reward",
        severity: Severity::Warn,
        limit: 0.95,
        unit: "share of groups",
        meaning: "all rewards of the step are equal, or those within more than this share of its groups",
        advice: "look at response texts and answers of the samples; filter groups, or take data that is neither too easy nor too hard",
        looks_at: LooksAt::Keys(&[REWARDS.name()]),
        check: Check::Step(constant_reward),
    },
    BuiltIn {
        name: "negative_kl",
        severity: Severity::Warn,
        limit: 0.05,
        unit: "nats",
        meaning: "the mean of k1, which estimates a KL divergence, is below zero by more than the limit",
        advice: "compare temperature, mask and token ids of the two log-probs: they are not of the same tokens or distribution",
        looks_at: LooksAt::Keys(&[OLD_LOG_PROBS.name(), REF_LOG_PROBS.name()]),
        check: Check::Step(negative_kl),
    },
    BuiltIn {
        name: "low_ess",
        severity: Severity::Warn,
        limit: 0.5,
        unit: "share of tokens",
        meaning: "the effective sample size of the importance weights trainer against rollout is below this share",
        advice: "look at `probability_diff` and at the samples' log-probs; use `correct_rollout`",
        looks_at: LooksAt::Keys(&[OLD_LOG_PROBS.name()]),
        check: Check::Step(low_ess),
    },
    BuiltIn {
        name: "probability_difference",
        severity: Severity::Warn,
        limit: 0.01,
        unit: "probability",
        meaning: "probabilities of the sampled tokens differ between rollout and trainer by more than this on average",
        advice: "compare temperature and weights version of rollout and trainer, then the samples token by token",
        looks_at: LooksAt::Keys(&[OLD_LOG_PROBS.name()]),
        check: Check::Step(probability_difference),
    },
    BuiltIn {
        name: "length_limit",
        severity: Severity::Warn,
        limit: 0.5,
        unit: "share of responses",
        meaning: "more than this share of the responses reached the token limit",
        advice: "look at the ends of the response texts; raise `max_new_tokens`, check the end-of-sequence ids, or shape overlong rewards",
        looks_at: LooksAt::Keys(&[FINISH_REASONS.name()]),
        check: Check::Step(length_limit),
    },
    BuiltIn {
        name: "ratio_not_one",
        severity: Severity::Warn,
        limit: 1e-4,
        unit: "nats",
        meaning: "old and current log-probs differ on the first mini-batch of a step, where both are of the same weights; 100 times the limit on other devices than a CPU",
        advice: "compare temperature, mask and token ids of `old_log_probs` and the update",
        looks_at: LooksAt::Metrics(SAME_WEIGHTS),
        check: Check::Metrics(ratio_not_one),
    },
    BuiltIn {
        name: "entropy_collapse",
        severity: Severity::Warn,
        limit: 0.01,
        unit: "nats",
        meaning: "the mean entropy of the policy is below the limit",
        advice: "look at how alike the responses of a group are; lower the learning rate, add an entropy or KL term",
        looks_at: LooksAt::Metrics(ENTROPIES),
        check: Check::Metrics(entropy_collapse),
    },
    BuiltIn {
        name: "weights_unchanged",
        severity: Severity::Warn,
        limit: 1.0,
        unit: "optimiser steps",
        meaning: "a model's weights have the same hash after at least so many optimiser steps, although gradients were not zero",
        advice: "check the learning rate against the weights' type, and that the update trains the model that is read",
        looks_at: LooksAt::Metrics(GRAD_NORMS),
        check: Check::Metrics(weights_unchanged),
    },
    BuiltIn {
        name: "grad_norm_spike",
        severity: Severity::Warn,
        limit: 10.0,
        unit: "times the median",
        meaning: "a gradient norm is above this multiple of its median over the last steps",
        advice: "look at advantages and log-probs of the step, longest and shortest responses first; clip gradients",
        looks_at: LooksAt::Metrics(GRAD_NORMS),
        check: Check::Metrics(grad_norm_spike),
    },
    BuiltIn {
        name: "kl_blow_up",
        severity: Severity::Warn,
        limit: 1.0,
        unit: "nats",
        meaning: "a KL divergence is above the limit, or no number",
        advice: "look at the samples whose log-probs moved most; lower the learning rate or raise the KL coefficient",
        looks_at: LooksAt::Metrics(KLS),
        check: Check::Metrics(kl_blow_up),
    },
];

fn non_finite(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    let Some(update) = view.update else {
        let of_outputs = view.stats.iter().filter(|row| row.side == Side::Output);
        return of_outputs
            .filter(|row| row.non_finite as f64 > limit)
            .map(|row| Hit {
                value: row.non_finite as f64,
                what: format!("{} values are NaN or infinite", row.non_finite),
                ..at(row)
            })
            .collect();
    };
    let ids = update.batch.ids();
    let kinds = update.batch.column(MASK_KINDS.name());
    let mut hits = Vec::new();
    for key in update.batch.keys() {
        let Some(array) = update.batch.column(&key) else {
            continue;
        };
        let bad: Vec<(usize, u64)> = (0..ids.len())
            .map(|row| (row, bad_values(array, kinds, row)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let total: u64 = bad.iter().map(|(_, count)| count).sum();
        if total as f64 > limit {
            hits.push(Hit {
                stage: update.stage.to_owned(),
                key,
                value: total as f64,
                samples: bad.iter().take(NAMED).map(|(row, _)| ids[*row]).collect(),
                what: format!(
                    "{total} values under the mask are NaN or infinite, in {} of {} rows",
                    bad.len(),
                    ids.len()
                ),
            });
        }
    }
    hits
}

/// Values of a row that are NaN or infinite and not at an observation.
fn bad_values(array: &ArrayRef, kinds: Option<&ArrayRef>, row: usize) -> u64 {
    if let Some(scalars) = array.as_primitive_opt::<Float32Type>() {
        return u64::from(scalars.is_valid(row) && !scalars.value(row).is_finite());
    }
    let Some(values) = floats(array, row) else {
        return 0;
    };
    let kinds = kinds.and_then(|kinds| bytes(kinds, row));
    let kinds = kinds.filter(|kinds| kinds.len() == values.len());
    let counts = |token: usize| kinds.is_none_or(|kinds| kinds[token] != mask::OBSERVATION);
    let bad = values.iter().enumerate();
    bad.filter(|(token, value)| !value.is_finite() && counts(*token))
        .count() as u64
}

fn advantage_variance(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, ADVANTAGES.name())
        .filter_map(|row| {
            let variance = row.std?.powi(2);
            let size = |batch: &Batch, at: usize| {
                let values = floats(batch.column(&row.key)?, at)?;
                values.iter().map(|v| f64::from(v.abs())).reduce(f64::max)
            };
            (variance > limit).then(|| Hit {
                value: variance,
                samples: worst(view, row, size),
                what: format!("the variance is {variance:.4}, above {limit}"),
                ..at(row)
            })
        })
        .collect()
}

fn constant_reward(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, REWARDS.name())
        .filter_map(|row| {
            let (min, max) = (row.min?, row.max?);
            let first = |_: &Batch, at: usize| Some(-(at as f64));
            if min == max && row.count > 1 {
                return Some(Hit {
                    value: 1.0,
                    samples: worst(view, row, first),
                    what: format!("all {} rewards are {min}", row.count),
                    ..at(row)
                });
            }
            let (constant, groups, samples) = constant_groups(view, row);
            let share = constant as f64 / groups.max(1) as f64;
            (groups > 1 && share > limit).then(|| Hit {
                value: share,
                samples,
                what: format!(
                    "rewards are equal within {constant} of {groups} groups, which teach nothing"
                ),
                ..at(row)
            })
        })
        .collect()
}

/// Groups of more than one row whose rewards are equal, all such groups, and a row of some of the former.
fn constant_groups(view: &StepView<'_>, row: &StatRow) -> (usize, usize, Vec<RowId>) {
    let mut groups: BTreeMap<u64, (Vec<f32>, RowId)> = BTreeMap::new();
    for seen in seen(view, row) {
        let column = seen.batch.column(&row.key);
        let Some(rewards) = column.and_then(|c| c.as_primitive_opt::<Float32Type>()) else {
            continue;
        };
        for (reward, id) in rewards.iter().zip(seen.batch.ids()) {
            let entry = groups.entry(id.group()).or_insert((Vec::new(), id));
            entry.0.extend(reward);
        }
    }
    groups.retain(|_, (rewards, _)| rewards.len() > 1);
    let constant: Vec<RowId> = groups
        .values()
        .filter(|(rewards, _)| rewards.iter().all(|reward| reward == &rewards[0]))
        .map(|(_, id)| *id)
        .collect();
    let named = constant.iter().take(NAMED).copied().collect();
    (constant.len(), groups.len(), named)
}

fn negative_kl(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    ratios(view, |row| {
        let ratio = row.ratio.as_ref()?;
        (ratio.k1 < -limit).then(|| {
            let what = format!(
                "the mean of k1 against `{}` is {:.4} over {} tokens, but a KL divergence is not negative",
                ratio.counterpart, ratio.k1, ratio.tokens
            );
            (ratio.k1, what)
        })
    })
}

fn low_ess(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    ratios(view, |row| {
        let ratio = row
            .ratio
            .as_ref()
            .filter(|_| row.key == OLD_LOG_PROBS.name())?;
        (ratio.ess < limit && ratio.tokens >= ESS_TOKENS).then(|| {
            let what = format!(
                "the effective sample size against `{}` is {:.3} of {} tokens",
                ratio.counterpart, ratio.ess, ratio.tokens
            );
            (ratio.ess, what)
        })
    })
}

fn probability_difference(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    ratios(view, |row| {
        let ratio = row
            .ratio
            .as_ref()
            .filter(|_| row.key == OLD_LOG_PROBS.name())?;
        (ratio.probability_diff > limit).then(|| {
            let what = format!(
                "probabilities differ from `{}` by {:.4} on average, log-probs by up to {:.3} nats",
                ratio.counterpart, ratio.probability_diff, ratio.diff_max
            );
            (ratio.probability_diff, what)
        })
    })
}

fn length_limit(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, FINISH_REASONS.name())
        .filter_map(|row| {
            let share = row.truncated_share?;
            let cut = |batch: &Batch, at: usize| {
                let reasons = batch.column(&row.key)?.as_primitive_opt::<UInt8Type>()?;
                (reasons.value(at) == finish::LENGTH).then_some(-(at as f64))
            };
            (share > limit).then(|| Hit {
                value: share,
                samples: worst(view, row, cut),
                what: format!(
                    "{:.0} % of the responses reached the token limit",
                    share * 100.0
                ),
                ..at(row)
            })
        })
        .collect()
}

fn ratio_not_one(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    let limit = if view.on_cpu {
        limit
    } else {
        limit * DEVICE_FACTOR
    };
    metrics(view, SAME_WEIGHTS, |value, _| {
        (value.is_nan() || value.abs() > limit).then(|| {
            format!(
                "old minus current log-probs is {value:e} on the first mini-batch instead of 0, so the ratio is not 1"
            )
        })
    })
}

fn entropy_collapse(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, ENTROPIES, |value, _| {
        (value < limit).then(|| format!("the entropy is {value:.5} nats, below {limit}"))
    })
}

fn grad_norm_spike(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, GRAD_NORMS, |value, before| {
        if before.len() < SPIKE_HISTORY {
            return None;
        }
        let mut sorted = before.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        (median > 0.0 && value > limit * median).then(|| {
            format!(
                "the norm is {value:.4}, {:.0} times its median of {median:.4}",
                value / median
            )
        })
    })
}

fn kl_blow_up(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, KLS, |value, _| {
        (value.is_nan() || value.abs() > limit)
            .then(|| format!("the divergence is {value:.4} nats, above {limit}"))
    })
}

fn weights_unchanged(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    let [.., (from, before), (to, now)] = view.versions else {
        return Vec::new();
    };
    let moved = view
        .history
        .iter()
        .chain([view.metrics])
        .flat_map(|step| step.iter())
        .any(|(name, value)| {
            let last = name.rsplit_once('/').map_or("", |(_, last)| last);
            GRAD_NORMS.contains(&last) && *value > 0.0
        });
    let unchanged = now.iter().filter(|(name, version)| {
        let old = before.get(*name);
        old.is_some_and(|old| {
            !old.hash.is_empty()
                && old.hash == version.hash
                && version.step as f64 >= old.step as f64 + limit
        })
    });
    unchanged
        .filter(|_| moved)
        .map(|(name, version)| Hit {
            stage: name.clone(),
            key: "weights".to_owned(),
            value: version.step as f64,
            samples: Vec::new(),
            what: format!(
                "the weights have the hash {} at steps {from} and {to}, though the optimiser moved in between",
                version.hash.get(..12).unwrap_or(&version.hash)
            ),
        })
        .collect()
}

fn at(row: &StatRow) -> Hit {
    Hit {
        stage: row.stage.clone(),
        key: row.key.clone(),
        ..Hit::default()
    }
}

/// Statistics of what stages wrote under their own name `key`.
fn outputs<'a>(view: &StepView<'a>, key: &'a str) -> impl Iterator<Item = &'a StatRow> {
    let rows = view.stats.iter();
    rows.filter(move |row| row.side == Side::Output && row.key == key)
}

/// The batches that a row of statistics is about.
fn seen<'a>(view: &StepView<'a>, row: &'a StatRow) -> impl Iterator<Item = SeenBatch<'a>> {
    let batches = view.batches.iter().copied();
    batches.filter(move |seen| seen.stage == row.stage && seen.side == row.side)
}

/// The rows with the largest size; those without one are left out.
fn worst(
    view: &StepView<'_>,
    row: &StatRow,
    size: impl Fn(&Batch, usize) -> Option<f64>,
) -> Vec<RowId> {
    let mut rows: Vec<(f64, RowId)> = Vec::new();
    for seen in seen(view, row) {
        let ids = seen.batch.ids();
        let sized = ids.iter().enumerate();
        rows.extend(sized.filter_map(|(at, id)| Some((size(seen.batch, at)?, *id))));
    }
    largest(rows)
}

fn largest(mut rows: Vec<(f64, RowId)>) -> Vec<RowId> {
    rows.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    rows.into_iter().take(NAMED).map(|(_, id)| id).collect()
}

/// Hits on log-prob keys that were compared with a counterpart, with the rows that lie farthest from it.
fn ratios(view: &StepView<'_>, judge: impl Fn(&StatRow) -> Option<(f64, String)>) -> Vec<Hit> {
    let rows = view.stats.iter().filter(|row| row.side == Side::Output);
    rows.filter_map(|row| {
        let (value, what) = judge(row)?;
        let distances = view.distances.get(&row.key).cloned().unwrap_or_default();
        let samples = largest(distances.into_iter().map(|(id, d)| (d, id)).collect());
        Some(Hit {
            value,
            samples,
            what,
            ..at(row)
        })
    })
    .collect()
}

/// Hits on metrics whose name without its group is among `names`; `judge` is given the value and those before.
fn metrics(
    view: &MetricsView<'_>,
    names: &[&str],
    judge: impl Fn(f64, &[f64]) -> Option<String>,
) -> Vec<Hit> {
    let named = view.metrics.iter().filter_map(|(name, value)| {
        let (group, last) = name.rsplit_once('/')?;
        names.contains(&last).then_some((name, group, *value))
    });
    named
        .filter_map(|(name, group, value)| {
            let before: Vec<f64> = view
                .history
                .iter()
                .filter_map(|step| step.get(name).copied())
                .collect();
            Some(Hit {
                stage: group.to_owned(),
                key: name.clone(),
                value,
                samples: Vec::new(),
                what: judge(value, &before)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_texts_stand_alone() {
        let names: std::collections::BTreeSet<&str> = RULES.iter().map(|rule| rule.name).collect();
        assert_eq!(names.len(), RULES.len());
        for rule in RULES {
            assert!(!rule.meaning.ends_with('.') && !rule.advice.ends_with('.'));
            assert!(rule.limit.is_finite() && rule.limit >= 0.0);
            assert!(!rule.is_share() || rule.limit <= 1.0);
        }
    }
}
