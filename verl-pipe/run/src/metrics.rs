//! Metrics of a step: values that stages recorded, reduced in declared order to one number per name.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use verl_plan::Plan;
use verl_words::stage::{MetricRole, MetricRoles, Reduce};

use crate::channel::Record;
use crate::records::{ENGINE_METRICS, MetricsLine, of_stage};

/// Tokens that stages processed, recorded by stages as a sum; the engine divides it by the duration of the step.
pub const TOKENS: &str = "perf/tokens";

/// Metrics of one step, one number per name.
///
/// ```
/// use verl_pipe::run::metrics::StepMetrics;
///
/// let mut metrics = StepMetrics { step: 3, ..StepMetrics::default() };
/// metrics.values.insert("judge/accuracy".to_owned(), 0.5);
/// assert_eq!(metrics.get("judge/accuracy"), Some(0.5));
/// assert_eq!(metrics.get("judge/length"), None);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepMetrics {
    /// Step of the run; 0 for observations before the first step.
    pub step: u64,
    /// Epoch of the step's first prompt.
    pub epoch: u64,
    /// When the step ended, in seconds since 1970-01-01 UTC.
    pub timestamp: f64,
    /// All recorded values, and the engine's own `perf/…`.
    pub values: BTreeMap<String, f64>,
    /// Roles of the metrics of the run.
    pub roles: MetricRoles,
}

/// The roles of the metrics that the stages of a plan declare, and of the engine's own metrics.
pub(crate) fn metric_roles(plan: &Plan) -> MetricRoles {
    let roles = plan.stages().iter().flat_map(|stage| {
        let own = stage.spec().metrics.iter();
        let own = own.filter_map(|metric| Some((metric.name.to_owned(), metric.role?)));
        let engine = ENGINE_METRICS.iter();
        let engine =
            engine.filter_map(move |metric| Some((of_stage(metric, stage.name()), metric.role?)));
        own.chain(engine)
    });
    roles.collect()
}

impl StepMetrics {
    /// The value of `name`.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }

    /// The first metric with this role, in the order of names: its name and value.
    pub fn with_role(&self, role: MetricRole) -> Option<(&str, f64)> {
        let mut values = self.values.iter();
        let found = values.find(|(name, _)| self.roles.get(name) == Some(role));
        found.map(|(name, value)| (name.as_str(), *value))
    }

    /// The loss, if the step has one.
    pub fn loss(&self) -> Option<f64> {
        self.with_role(MetricRole::Loss).map(|(_, value)| value)
    }

    /// The mean reward, if the step has one.
    pub fn reward(&self) -> Option<f64> {
        self.with_role(MetricRole::Reward).map(|(_, value)| value)
    }

    /// The KL divergence from the reference, if the step has one.
    pub fn kl(&self) -> Option<f64> {
        self.with_role(MetricRole::ReferenceKl)
            .map(|(_, value)| value)
    }

    /// One flat object: `step`, `epoch`, `timestamp`, then all names in order. A value that is not finite is `null`,
    /// since JSON cannot represent it.
    pub fn to_json(&self) -> Value {
        // These three names are reserved for the engine; values that a stage records under them are dropped.
        let own = |name: &String| ["step", "epoch", "timestamp"].contains(&name.as_str());
        let values = self.values.iter().filter(|(name, _)| !own(name));
        let line = MetricsLine {
            step: self.step,
            epoch: self.epoch,
            timestamp: self.timestamp,
            values: values
                .map(|(name, value)| (name.clone(), (*value).into()))
                .collect(),
        };
        // Names and numbers always serialise to an object.
        serde_json::to_value(line).unwrap_or_default()
    }
}

/// Seconds since 1970-01-01 UTC, to the millisecond.
pub fn now() -> f64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    since.as_millis() as f64 / 1000.0
}

/// Resident memory of this process (megabytes), if the system reports it.
pub(crate) fn memory_mb() -> Option<f64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: f64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    // The page size is 4 KiB on every platform that has /proc/self/statm and runs this crate by default.
    Some(pages * 4096.0 / 1e6)
}

#[derive(Debug, Clone, Copy)]
struct Total {
    reduce: Reduce,
    value: f64,
    weight: f64,
}

/// Reduces the values of each name to one number. The order of `records` determines rounding and `Last`, so it must be
/// the declared order.
pub(crate) fn reduce<'a>(records: impl IntoIterator<Item = &'a Record>) -> BTreeMap<String, f64> {
    let mut totals: BTreeMap<&str, Total> = BTreeMap::new();
    for record in records {
        let Record {
            reduce,
            value,
            weight,
            ..
        } = *record;
        let Some(total) = totals.get_mut(record.name.as_ref()) else {
            let value = if reduce == Reduce::Mean {
                value * weight
            } else {
                value
            };
            totals.insert(
                &record.name,
                Total {
                    reduce,
                    value,
                    weight,
                },
            );
            continue;
        };
        match total.reduce {
            Reduce::Mean => total.value += value * weight,
            Reduce::Sum => total.value += value,
            Reduce::Min => total.value = total.value.min(value),
            Reduce::Max => total.value = total.value.max(value),
            Reduce::Last => total.value = value,
        }
        total.weight += weight;
    }
    // A mean over nothing (weight 0) is not recorded: it has no correct value.
    let kept = totals
        .into_iter()
        .filter(|(_, t)| t.reduce != Reduce::Mean || t.weight != 0.0);
    kept.map(|(name, t)| {
        let value = if t.reduce == Reduce::Mean {
            t.value / t.weight
        } else {
            t.value
        };
        (name.to_owned(), value)
    })
    .collect()
}

/// Formats a value with its significant digits.
pub fn number(value: f64) -> String {
    // Below this, four digits after the decimal point would show fewer than two significant digits.
    if value != 0.0 && value.abs() < 1e-3 {
        format!("{value:.1e}")
    } else {
        format!("{value:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(kind: Reduce, values: &[(f64, f64)], expected: Option<f64>) {
        let records: Vec<Record> = values
            .iter()
            .map(|(value, weight)| Record {
                name: "m".into(),
                reduce: kind,
                value: *value,
                weight: *weight,
            })
            .collect();
        assert_eq!(reduce(&records).get("m").copied(), expected);
    }

    #[test]
    fn every_reduction_is_computed() {
        let values = [(1.0, 3.0), (5.0, 1.0), (0.0, 0.0)];
        check(Reduce::Mean, &values, Some(2.0));
        check(Reduce::Sum, &values, Some(6.0));
        check(Reduce::Min, &values, Some(0.0));
        check(Reduce::Max, &values, Some(5.0));
        check(Reduce::Last, &values, Some(0.0));
        check(Reduce::Mean, &[(3.0, 0.0)], None);
    }

    #[test]
    fn metrics_are_found_by_their_roles() {
        let values = [("a/loss", 0.5), ("b/loss", 0.25), ("b/reward", 1.0)];
        let roles = [
            ("b/loss", MetricRole::Loss),
            ("b/reward", MetricRole::Reward),
        ];
        let metrics = StepMetrics {
            values: values.map(|(name, v)| (name.to_owned(), v)).into(),
            roles: MetricRoles::from_iter(roles.map(|(name, role)| (name.to_owned(), role))),
            ..StepMetrics::default()
        };
        assert_eq!(metrics.with_role(MetricRole::Loss), Some(("b/loss", 0.25)));
        assert_eq!((metrics.reward(), metrics.kl()), (Some(1.0), None));
    }

    #[test]
    fn json_is_flat_with_null_for_values_that_are_not_finite() {
        let values = BTreeMap::from([
            ("a/x".to_owned(), 0.5),
            ("a/y".to_owned(), f64::NAN),
            ("epoch".to_owned(), 7.0),
        ]);
        let metrics = StepMetrics {
            step: 2,
            epoch: 1,
            timestamp: 3.5,
            values,
            ..StepMetrics::default()
        };
        assert_eq!(
            metrics.to_json().to_string(),
            r#"{"step":2,"epoch":1,"timestamp":3.5,"a/x":0.5,"a/y":null}"#
        );
    }
}
