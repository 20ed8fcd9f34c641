//! Learning-rate schedules: a factor on the peak learning rate for each optimiser step.

use std::f64::consts::PI;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the learning rate changes over the optimiser steps of a run; just the name of a kind selects its defaults.
///
/// Step k (the first is 1) of a warm-up of w steps uses k/w of the learning rate, so the first step already changes the
/// weights and step w uses all of it. After the warm-up, with progress x = (k − w)/(total − w) clamped to [0, 1] and
/// final share f: linear is f + (1 − f)(1 − x), cosine is f + (1 − f)(1 + cos πx)/2.
///
/// # Differences
/// PyTorch and Hugging Face schedulers count from 0, so that the first step of a warm-up has a learning rate of 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// A constant learning rate.
    Constant {
        /// Optimiser steps of linear warm-up.
        #[serde(default)]
        warmup_steps: u64,
    },
    /// Linear decay.
    Linear {
        /// Optimiser steps of linear warm-up.
        #[serde(default)]
        warmup_steps: u64,
        /// Optimiser steps over which it decays, including warm-up; by default those of the run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64>,
        /// Share of the learning rate left after the last of these steps, in 0..=1.
        #[serde(default)]
        final_share: f64,
    },
    /// Decay along half a cosine wave.
    Cosine {
        /// Optimiser steps of linear warm-up.
        #[serde(default)]
        warmup_steps: u64,
        /// Optimiser steps over which it decays, including warm-up; by default those of the run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64>,
        /// Share of the learning rate left after the last of these steps, in 0..=1.
        #[serde(default)]
        final_share: f64,
    },
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule::Constant { warmup_steps: 0 }
    }
}

impl Schedule {
    /// Optimiser steps over which the learning rate decays, if it decays and the number is set.
    pub fn total_steps(&self) -> Option<u64> {
        match *self {
            Schedule::Constant { .. } => None,
            Schedule::Linear { total_steps, .. } | Schedule::Cosine { total_steps, .. } => {
                total_steps
            }
        }
    }

    /// Whether the learning rate decays over a number of steps that is not set.
    pub fn lacks_total_steps(&self) -> bool {
        !matches!(self, Schedule::Constant { .. }) && self.total_steps().is_none()
    }

    /// The same schedule over `steps` optimiser steps, unless it sets its own number. With 0 steps the number stays
    /// unset.
    #[must_use]
    pub fn for_run(mut self, steps: u64) -> Self {
        if let Schedule::Linear { total_steps, .. } | Schedule::Cosine { total_steps, .. } =
            &mut self
        {
            *total_steps = total_steps.or((steps > 0).then_some(steps));
        }
        self
    }

    /// Factor on the learning rate for the step that follows `steps_taken` optimiser steps. Without `total_steps` it
    /// stays 1 after the warm-up; [`AdamW`](super::AdamW) refuses such a schedule.
    pub fn factor(&self, steps_taken: u64) -> f64 {
        let step = steps_taken.saturating_add(1);
        let warmup = self.warmup_steps();
        if step <= warmup {
            return step as f64 / warmup as f64;
        }
        let Some(total_steps) = self.total_steps() else {
            return 1.0;
        };
        let progress = progress(step, warmup, total_steps);
        match *self {
            Schedule::Constant { .. } => 1.0,
            Schedule::Linear { final_share, .. } => {
                final_share + (1.0 - final_share) * (1.0 - progress)
            }
            Schedule::Cosine { final_share, .. } => {
                let wave = (1.0 + libm::cos(PI * progress)) / 2.0;
                final_share + (1.0 - final_share) * wave
            }
        }
    }

    /// Optimiser steps of linear warm-up.
    pub fn warmup_steps(&self) -> u64 {
        match *self {
            Schedule::Constant { warmup_steps }
            | Schedule::Linear { warmup_steps, .. }
            | Schedule::Cosine { warmup_steps, .. } => warmup_steps,
        }
    }

    /// Settings that are valid but probably a mistake: their effect, and the help.
    pub fn warning(&self) -> Option<(String, String)> {
        let total_steps = self.total_steps()?;
        let warmup = self.warmup_steps();
        if total_steps == 0 {
            let reason = "has `total_steps = 0`, so the first optimiser step already uses the final learning rate";
            let help = "remove `total_steps` to use the run's number of optimiser steps";
            return Some((reason.to_owned(), help.to_owned()));
        }
        (warmup >= total_steps).then(|| {
            let reason = format!(
                "has `warmup_steps = {warmup}` and `total_steps = {total_steps}`, so the learning rate only rises"
            );
            let help = "set `warmup_steps` to a share of `total_steps`, or use `kind = \"constant\"`";
            (reason, help.to_owned())
        })
    }

    /// Share of the learning rate left at the end.
    pub(super) fn final_share(&self) -> f64 {
        match *self {
            Schedule::Constant { .. } => 1.0,
            Schedule::Linear { final_share, .. } | Schedule::Cosine { final_share, .. } => {
                final_share
            }
        }
    }
}

impl fmt::Display for Schedule {
    /// A short summary: `linear over 400 steps to 0.1 of the peak, warm-up 5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Schedule::Constant { .. } => "constant",
            Schedule::Linear { .. } => "linear",
            Schedule::Cosine { .. } => "cosine",
        };
        let warmup = self.warmup_steps();
        f.write_str(kind)?;
        if let Some(total) = self.total_steps() {
            write!(
                f,
                " over {total} steps to {} of the peak",
                self.final_share()
            )?;
        }
        if warmup > 0 {
            write!(f, ", warm-up {warmup}")?;
        }
        Ok(())
    }
}

fn progress(step: u64, warmup: u64, total: u64) -> f64 {
    let length = total.saturating_sub(warmup).max(1);
    ((step - warmup) as f64 / length as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probable_mistakes_are_reported() {
        let cosine = |warmup_steps, total_steps| Schedule::Cosine {
            warmup_steps,
            total_steps: Some(total_steps),
            final_share: 0.0,
        };
        assert_eq!(cosine(5, 100).warning(), None);
        let reason = |schedule: Schedule| schedule.warning().unwrap().0;
        assert!(reason(cosine(0, 0)).contains("total_steps = 0"));
        assert!(reason(cosine(5000, 300)).contains("only rises"));
        let constant = Schedule::Constant { warmup_steps: 9 };
        assert_eq!(constant.warning(), None);
    }

    #[track_caller]
    fn check(schedule: Schedule, expected: &[f64]) {
        for (taken, expected) in expected.iter().enumerate() {
            let got = schedule.factor(taken as u64);
            assert!(
                (got - expected).abs() < 1e-12,
                "after {taken} steps: {got} is not {expected}"
            );
        }
    }

    #[test]
    fn constant_with_and_without_warmup() {
        check(Schedule::default(), &[1.0, 1.0, 1.0]);
        check(
            Schedule::Constant { warmup_steps: 4 },
            &[0.25, 0.5, 0.75, 1.0, 1.0],
        );
    }

    #[test]
    fn linear_reaches_its_end_and_stays() {
        let linear = |final_share| Schedule::Linear {
            warmup_steps: 2,
            total_steps: Some(6),
            final_share,
        };
        check(linear(0.0), &[0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        check(linear(0.2), &[0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]);
    }

    #[test]
    fn cosine_is_one_half_at_half_the_steps() {
        let cosine = Schedule::Cosine {
            warmup_steps: 0,
            total_steps: Some(4),
            final_share: 0.0,
        };
        let quarter = (1.0 + 0.5_f64.sqrt()) / 2.0;
        check(cosine, &[quarter, 0.5, 1.0 - quarter, 0.0, 0.0]);
    }

    #[test]
    fn a_warmup_longer_than_the_run_does_not_divide_by_zero() {
        let linear = Schedule::Linear {
            warmup_steps: 3,
            total_steps: Some(2),
            final_share: 0.0,
        };
        check(linear, &[1.0 / 3.0, 2.0 / 3.0, 1.0, 0.0]);
    }

    #[test]
    fn the_steps_of_the_run_are_the_default() {
        let open: Schedule =
            serde_json::from_str(r#"{"kind": "linear", "warmup_steps": 2}"#).unwrap();
        assert!(open.lacks_total_steps());
        let linear = Schedule::Linear {
            warmup_steps: 2,
            total_steps: Some(6),
            final_share: 0.0,
        };
        assert_eq!(open.for_run(6), linear);
        assert_eq!(linear.for_run(100), linear);
        assert!(open.for_run(0).lacks_total_steps());
        assert!(!Schedule::default().for_run(9).lacks_total_steps());
        assert_eq!(
            linear.to_string(),
            "linear over 6 steps to 0 of the peak, warm-up 2"
        );
        assert_eq!(Schedule::default().to_string(), "constant");
    }

    #[test]
    fn reads_from_json_and_refuses_unknown_keys() {
        let text = r#"{"kind": "cosine", "warmup_steps": 3, "total_steps": 9}"#;
        let expected = Schedule::Cosine {
            warmup_steps: 3,
            total_steps: Some(9),
            final_share: 0.0,
        };
        assert_eq!(serde_json::from_str::<Schedule>(text).ok(), Some(expected));
        let unknown = r#"{"kind": "constant", "warmup": 3}"#;
        assert!(serde_json::from_str::<Schedule>(unknown).is_err());
    }
}
