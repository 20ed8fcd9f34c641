//! Rules on the metrics of a step, mainly of optimisation; those that compare with the first steps are in `trends`.

use verl_words::stage::MetricRole;

use super::built_in::KLS;
use super::robust::{median, percent, shown, times};
use super::trends::baseline;
use super::{Hit, MetricsView};

/// Fewest steps of history that a spike is measured against.
const SPIKE_HISTORY: usize = 8;
/// Smallest gradient norm that is a spike.
const SPIKE_FLOOR: f64 = 0.1;
/// One in this many previous steps may have at least half the norm of a spike.
const SPIKE_RARITY: usize = 16;
/// Number of steps whose median is checked if a single step may be chance.
pub(super) const RECENT: usize = 5;
/// Share of its value in the first steps below which an entropy has collapsed.
const ENTROPY_SHARE: f64 = 0.1;
/// Factor on the tolerance of log-probs for devices that use different kernels for different shapes.
const DEVICE_FACTOR: f64 = 100.0;

pub(super) fn ratio_not_one(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    let limit = if view.on_cpu {
        limit
    } else {
        limit * DEVICE_FACTOR
    };
    metrics(view, &[MetricRole::SameWeightsDifference], |_, value| {
        (value.is_nan() || value.abs() > limit).then(|| {
            format!(
                "old minus current log-probs is {} nats on the first mini-batch instead of 0, so the ratio is not 1",
                shown(value)
            )
        })
    })
}

pub(super) fn row_errors(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::RowErrors], |_, rows| {
        (rows > limit).then(|| match rows {
            1.0 => "1 row failed; its keys are null".to_owned(),
            n => format!("{n} rows failed; their keys are null"),
        })
    })
}

pub(super) fn no_update(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    let mut truncated = view.with_roles(&[MetricRole::TruncatedShare]);
    let all_cut = truncated.next().is_some_and(|(_, share)| share >= 1.0);
    metrics(view, &[MetricRole::OptimizerSteps], |_, steps| {
        (steps <= limit).then(|| {
            let why = match all_cut {
                true => "; every response reached the token limit",
                false => "",
            };
            let taken = match steps {
                0.0 => "no optimiser step".to_owned(),
                n => format!("{n} optimiser steps"),
            };
            format!("the update took {taken}: no token was left to train on{why}")
        })
    })
}

pub(super) fn zero_learning_rate(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::LearningRate], |name, _| {
        zero_for(view, name, limit).map(|steps| {
            format!("the learning rate was 0 in {steps} steps in a row, so nothing is learnt")
        })
    })
}

pub(super) fn zero_gradient(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::GradientNorm], |name, _| {
        zero_for(view, name, limit)
            .map(|steps| format!("the gradient norm was 0 in {steps} steps in a row"))
    })
}

/// The number of steps, if the metric was exactly 0 in the last `limit` steps, including this one.
fn zero_for(view: &MetricsView<'_>, name: &str, limit: f64) -> Option<usize> {
    let steps = (limit.ceil() as usize).max(1);
    let values = view.last(name, steps)?;
    values.iter().all(|value| *value == 0.0).then_some(steps)
}

pub(super) fn grad_norm_spike(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::GradientNorm], |name, value| {
        let before = view.before(name);
        let center = median(&before)?;
        let alike = before.iter().filter(|norm| **norm >= value / 2.0);
        let spikes = before.len() >= SPIKE_HISTORY
            && value > SPIKE_FLOOR
            && value > limit * center
            && alike.count() * SPIKE_RARITY <= before.len();
        spikes.then(|| {
            let steps = before.len();
            match center > 0.0 {
                true => format!(
                    "the norm is {}, {} its median of {} over the last {steps} steps",
                    shown(value),
                    times(value / center),
                    shown(center)
                ),
                false => format!(
                    "the norm is {}, but 0 in most of the last {steps} steps",
                    shown(value)
                ),
            }
        })
    })
}

pub(super) fn large_update(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::UpdateKl], |_, value| {
        (value.is_nan() || value.abs() > limit).then(|| {
            format!(
                "the updates of the step moved the policy by {} nats per token, above {}",
                shown(value),
                shown(limit)
            )
        })
    })
}

pub(super) fn clip_share(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::ClippedShare], |name, _| {
        let share = median(&view.last(name, RECENT)?)?;
        (share > limit).then(|| {
            format!(
                "the ratio of {} of the tokens is clipped (median of {RECENT} steps)",
                percent(share)
            )
        })
    })
}

pub(super) fn kl_blow_up(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, KLS, |_, value| {
        (value.is_nan() || value.abs() > limit).then(|| {
            format!(
                "the divergence is {} nats per token, above {}",
                shown(value),
                shown(limit)
            )
        })
    })
}

pub(super) fn entropy_collapse(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::Entropy], |name, _| {
        let entropy = median(&view.last(name, RECENT)?)?;
        let first = baseline(&view.first(name))?;
        (entropy < limit && entropy < ENTROPY_SHARE * first).then(|| {
            format!(
                "the entropy is {} nats per token (median of {RECENT} steps), below {}; it was {} in the first steps",
                shown(entropy),
                shown(limit),
                shown(first)
            )
        })
    })
}

pub(super) fn weights_unchanged(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    let [.., (from, before), (to, now)] = view.versions else {
        return Vec::new();
    };
    let moved = view
        .history
        .iter()
        .chain([view.metrics])
        .flat_map(|step| step.iter())
        .any(|(name, value)| {
            view.roles.get(name) == Some(MetricRole::GradientNorm) && *value > 0.0
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
                "the weights have the same hash {} at steps {from} and {to}, although gradients were not zero in between",
                version.hash.get(..12).unwrap_or(&version.hash)
            ),
        })
        .collect()
}

/// Hits on the metrics with one of `roles`; `judge` receives the name and the value of each.
pub(super) fn metrics(
    view: &MetricsView<'_>,
    roles: &[MetricRole],
    judge: impl Fn(&str, f64) -> Option<String>,
) -> Vec<Hit> {
    view.with_roles(roles)
        .filter_map(|(name, value)| {
            let (group, _) = name.rsplit_once('/').unwrap_or((name, name));
            Some(Hit {
                stage: group.to_owned(),
                key: name.to_owned(),
                value,
                samples: Vec::new(),
                what: judge(name, value)?,
            })
        })
        .collect()
}
