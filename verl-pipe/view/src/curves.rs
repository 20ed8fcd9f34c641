//! Curves over the steps of a run: one per metric, and for each key the curves of its statistics.

use std::collections::BTreeMap;

use serde::Serialize;
use verl_plan::Plan;
use verl_rules::format::Side;
use verl_rules::stats::StatRow;
use verl_run::records::{ENGINE_METRICS, MetricsLine, of_stage};
use verl_words::field::DType;

use super::thin::{ThinnedPoint, largest, least, rounded, thin};

/// Relative tolerance within which two numbers of a key are equal: sums of repeated rows round differently.
const SAME: f64 = 1e-9;

/// The property of a key that a curve shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// Its values.
    Value,
    /// List items or characters.
    Length,
    /// Mean of counterpart minus key.
    K1,
    /// Effective sample size of the ratios.
    Ess,
    /// Mean absolute difference of the probabilities.
    ProbabilityDiff,
    /// Responses that reached the token limit.
    TruncatedShare,
}

/// A curve. Lists are as long as `step`, or empty if there are no values.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Curve {
    /// Stage; empty for a metric.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub stage: String,
    /// `input` or `output`; empty for a metric.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub side: &'static str,
    /// The stage's own name of the key, or the metric.
    pub key: String,
    /// The pipeline's name of the key, if it differs.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The property of the key that is shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what: Option<What>,
    /// The key that it was compared with.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub counterpart: String,
    /// Unit of the values.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// What a value means.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub meaning: String,
    /// Number of steps before the curve was thinned.
    pub steps: usize,
    /// Steps of the run.
    pub step: Vec<u64>,
    /// The value, or the mean of the step's values.
    pub mean: Vec<Option<f64>>,
    /// Smallest value of all steps that the point represents.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub low: Vec<Option<f64>>,
    /// Largest value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub high: Vec<Option<f64>>,
    /// Median.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub p50: Vec<Option<f64>>,
    /// Maximum number of non-finite values in a step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub non_finite: Vec<u64>,
}

/// A curve before it is thinned.
#[derive(Debug, Default)]
struct FullCurve {
    step: Vec<u64>,
    mean: Vec<Option<f64>>,
    low: Vec<Option<f64>>,
    high: Vec<Option<f64>>,
    p50: Vec<Option<f64>>,
    non_finite: Vec<u64>,
}

impl FullCurve {
    fn push(&mut self, step: u64, mean: Option<f64>) {
        self.step.push(step);
        self.mean.push(mean.filter(|mean| mean.is_finite()));
    }

    /// The curve with `most` points; the caller adds its names.
    fn thinned(&self, most: usize) -> Curve {
        let kept = thin(&self.mean, most);
        let at = |list: &Vec<Option<f64>>, take: &dyn Fn(&ThinnedPoint) -> Option<f64>| match list
            .len()
        {
            0 => Vec::new(),
            _ => kept.iter().map(|kept| rounded(take(kept))).collect(),
        };
        let odd = self.non_finite.iter().any(|n| *n > 0);
        let worst = |kept: &ThinnedPoint| self.non_finite[kept.part.clone()].iter().copied().max();
        Curve {
            steps: self.step.len(),
            step: kept.iter().map(|kept| self.step[kept.at]).collect(),
            mean: at(&self.mean, &|kept| self.mean[kept.at]),
            low: at(&self.low, &|kept| least(&self.low, &kept.part)),
            high: at(&self.high, &|kept| largest(&self.high, &kept.part)),
            p50: at(&self.p50, &|kept| self.p50[kept.at]),
            non_finite: match odd {
                true => kept.iter().map(|kept| worst(kept).unwrap_or(0)).collect(),
                false => Vec::new(),
            },
            ..Curve::default()
        }
    }
}

/// A curve for each metric, by name.
pub(crate) fn metric_curves(lines: &[MetricsLine], plan: Option<&Plan>, most: usize) -> Vec<Curve> {
    let mut curves: BTreeMap<&str, FullCurve> = BTreeMap::new();
    for line in lines {
        for (name, value) in &line.values {
            curves
                .entry(name)
                .or_default()
                .push(line.step, value.as_f64());
        }
    }
    let notes = metric_notes(plan);
    let curves = curves.into_iter().map(|(name, full)| {
        let (unit, meaning) = notes.get(name).copied().unwrap_or_default();
        Curve {
            key: name.to_owned(),
            unit: unit.to_owned(),
            meaning: meaning.to_owned(),
            ..full.thinned(most)
        }
    });
    curves.collect()
}

/// Unit and meaning of the metrics that the stages of a plan, and the engine, declare.
fn metric_notes(plan: Option<&Plan>) -> BTreeMap<String, (&'static str, &'static str)> {
    let mut notes = BTreeMap::new();
    for stage in plan.into_iter().flat_map(|plan| plan.stages()) {
        for metric in ENGINE_METRICS {
            notes.insert(
                of_stage(&metric, stage.name()),
                (metric.unit, metric.meaning),
            );
        }
        for metric in &stage.spec().metrics {
            notes.insert(metric.name.to_owned(), (metric.unit, metric.meaning));
        }
    }
    notes
}

/// Stage by order of first occurrence, side, the stage's own name of the key, the property shown.
type Id = (usize, Side, String, What);

/// Collects the curves of the keys from statistics. An input of a stage is shown only if it differs from what its
/// writer emitted, or if it was compared with another key.
#[derive(Default)]
pub(crate) struct KeyCurves {
    stages: Vec<String>,
    curves: BTreeMap<Id, KeyCurve>,
}

#[derive(Default)]
struct KeyCurve {
    full: FullCurve,
    shown: bool,
    name: String,
    counterpart: String,
    unit: String,
}

impl KeyCurves {
    /// Adds the statistics of complete steps.
    pub(crate) fn add(&mut self, stats: &[StatRow], plan: Option<&Plan>) {
        let written: BTreeMap<(u64, &str), &StatRow> = stats
            .iter()
            .filter(|row| row.side == Side::Output)
            .map(|row| ((row.step, row.name.as_str()), row))
            .collect();
        for row in stats {
            let changed = match written.get(&(row.step, row.name.as_str())) {
                Some(emitted) if row.side == Side::Input => !same(row, emitted),
                _ => true,
            };
            let known = self.stages.iter().position(|stage| *stage == row.stage);
            let stage = known.unwrap_or_else(|| {
                self.stages.push(row.stage.clone());
                self.stages.len() - 1
            });
            for (what, middle) in shown(row, plan) {
                let id = (stage, row.side, row.key.clone(), what);
                let curve = self
                    .curves
                    .entry(id)
                    .or_insert_with(|| KeyCurve::of(row, what, plan));
                curve.shown |= changed || !matches!(what, What::Value | What::Length);
                add(&mut curve.full, row, what, middle);
            }
        }
    }

    /// Number of steps of the longest curve.
    pub(crate) fn steps(&self) -> usize {
        let steps = self.curves.values().map(|curve| curve.full.step.len());
        steps.max().unwrap_or(0)
    }

    /// The curves with `most` points each, in the order of the plan.
    pub(crate) fn finish(self, plan: Option<&Plan>, most: usize) -> Vec<Curve> {
        let position = |stage: &str| {
            let planned = plan.and_then(|p| p.stages().iter().position(|s| s.name() == stage));
            planned.unwrap_or(usize::MAX)
        };
        let mut curves: Vec<_> = self
            .curves
            .into_iter()
            .filter(|(_, curve)| curve.shown)
            .collect();
        curves.sort_by_key(|((stage, ..), _)| position(&self.stages[*stage]));
        let curves = curves.into_iter().map(|((stage, side, key, what), curve)| {
            let field = plan.and_then(|plan| plan.fields().get(&curve.name));
            Curve {
                stage: self.stages[stage].clone(),
                side: side.as_str(),
                name: if curve.name == key {
                    String::new()
                } else {
                    curve.name
                },
                key,
                what: Some(what),
                counterpart: curve.counterpart,
                unit: curve.unit,
                meaning: field.map_or_else(String::new, |field| field.meaning.to_string()),
                ..curve.full.thinned(most)
            }
        });
        curves.collect()
    }
}

impl KeyCurve {
    fn of(row: &StatRow, what: What, plan: Option<&Plan>) -> KeyCurve {
        let field = plan.and_then(|plan| plan.fields().get(&row.name));
        let unit = match what {
            What::Value => field.map_or("", |field| &field.unit),
            What::Length if row.tokens > 0 || is_list(plan, row) => "tokens",
            What::Length => "characters",
            What::K1 => "nats",
            What::Ess | What::TruncatedShare => "share",
            What::ProbabilityDiff => "probability",
        };
        let compared = matches!(what, What::K1 | What::Ess | What::ProbabilityDiff);
        let ratio = row.ratio.as_ref().filter(|_| compared);
        KeyCurve {
            name: row.name.clone(),
            counterpart: ratio.map_or_else(String::new, |ratio| ratio.counterpart.clone()),
            unit: unit.to_owned(),
            ..KeyCurve::default()
        }
    }
}

fn is_list(plan: Option<&Plan>, row: &StatRow) -> bool {
    let field = plan.and_then(|plan| plan.fields().get(&row.name));
    field.is_some_and(|field| field.dtype != DType::Text)
}

/// The properties to show of a row of statistics, each with its middle.
fn shown(row: &StatRow, plan: Option<&Plan>) -> Vec<(What, Option<f64>)> {
    let field = plan.and_then(|plan| plan.fields().get(&row.name));
    let measured = match field.map(|field| field.dtype) {
        // A mean of ids is meaningless.
        Some(DType::U32 | DType::U64 | DType::Text) => false,
        Some(_) => true,
        None => row.mean.is_some() || row.non_finite > 0,
    };
    let mut shown = Vec::new();
    if measured {
        // Lists of the same row have equal lengths, so only lists of ids have a curve of lengths.
        shown.push((What::Value, row.mean));
    } else {
        shown.extend(row.length_mean.map(|mean| (What::Length, Some(mean))));
    }
    if let Some(ratio) = &row.ratio {
        shown.push((What::K1, Some(ratio.k1)));
        shown.push((What::Ess, Some(ratio.ess)));
        shown.push((What::ProbabilityDiff, Some(ratio.probability_diff)));
    }
    shown.extend(
        row.truncated_share
            .map(|share| (What::TruncatedShare, Some(share))),
    );
    shown
}

fn add(full: &mut FullCurve, row: &StatRow, what: What, middle: Option<f64>) {
    full.push(row.step, middle);
    match what {
        What::Value => {
            full.low.push(row.min);
            full.high.push(row.max);
            full.p50.push(row.quantiles[3]);
            full.non_finite.push(row.non_finite);
        }
        What::Length => {
            full.low.push(row.length_min.map(|n| n as f64));
            full.high.push(row.length_max.map(|n| n as f64));
        }
        What::K1 | What::Ess | What::ProbabilityDiff | What::TruncatedShare => {}
    }
}

/// Whether the input equals what was emitted, judged by statistics only; rows may be repeated.
fn same(given: &StatRow, emitted: &StatRow) -> bool {
    let near = |a: Option<f64>, b: Option<f64>| match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() <= SAME * a.abs().max(b.abs()).max(1.0),
        (a, b) => a == b,
    };
    given.hash == emitted.hash
        || given.non_finite == 0
            && emitted.non_finite == 0
            && near(given.min, emitted.min)
            && near(given.max, emitted.max)
            && near(given.mean, emitted.mean)
            && near(given.length_mean, emitted.length_mean)
}

#[cfg(test)]
#[path = "curves_tests.rs"]
mod tests;
