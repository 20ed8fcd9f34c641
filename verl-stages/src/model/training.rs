//! How a model is trained in a run: its optimiser, given the number of optimiser steps.

use serde::Serialize;
use verl_models::optim::OptimizerConfig;
use verl_words::stage::{BuildContext, ConfigError, Training};

/// The optimiser of the model `name` in the run of `context`.
pub(super) fn optimizer_of(
    optimizer: Option<&OptimizerConfig>,
    name: &str,
    context: &BuildContext,
) -> Option<OptimizerConfig> {
    optimizer.map(|optimizer| {
        let steps = context.optimizer_steps.get(name).copied();
        optimizer.clone().for_run(steps)
    })
}

/// How a model is trained; `with` turns the settings of the optimiser into those of the model.
pub(super) fn training<S: Serialize>(
    own: OptimizerConfig,
    steps: u64,
    with: impl FnOnce(Option<OptimizerConfig>) -> S,
) -> Training {
    let optimizer = own.clone().for_run(Some(steps));
    Training {
        summary: format!(
            "learning rate {:e}, {}",
            optimizer.learning_rate, optimizer.schedule
        ),
        warnings: warning(&own, steps).into_iter().collect(),
        settings: serde_json::to_value(with(Some(optimizer))).unwrap_or_default(),
    }
}

/// The first warning about settings that are valid but probably not intended.
fn warning(own: &OptimizerConfig, steps: u64) -> Option<ConfigError> {
    if steps == 0 {
        return None;
    }
    let total = own.schedule.total_steps();
    if let Some(total) = total.filter(|total| *total != 0 && *total != steps) {
        let effect = if total < steps {
            "the final learning rate is reached too early"
        } else {
            "the run ends before the final learning rate is reached"
        };
        return Some(ConfigError::new(
            "optimizer.schedule.total_steps",
            format!(
                "is {total}, but the run takes {steps} optimiser steps with this model, so {effect}"
            ),
            format!("remove it to follow the run, or set it to {steps}"),
        ));
    }
    let warmup = own.schedule.warmup_steps();
    let warning = own.schedule.warning().or_else(|| {
        (warmup > steps).then(|| {
            let reason = format!(
                "has `warmup_steps = {warmup}`, but the run takes {steps} optimiser steps, so the learning rate never reaches its setting"
            );
            (reason, format!("set `warmup_steps` to less than {steps}"))
        })
    });
    warning.map(|(reason, help)| ConfigError::new("optimizer.schedule", reason, help))
}

#[cfg(test)]
mod tests {
    use verl_models::optim::Schedule;

    use super::*;

    fn linear(total_steps: Option<u64>, warmup_steps: u64) -> OptimizerConfig {
        let schedule = Schedule::Linear {
            warmup_steps,
            total_steps,
            final_share: 0.0,
        };
        OptimizerConfig {
            schedule,
            ..OptimizerConfig::default()
        }
    }

    fn training_of(own: OptimizerConfig, steps: u64) -> Training {
        training(own, steps, |optimizer| optimizer)
    }

    #[track_caller]
    fn check(own: OptimizerConfig, steps: u64, expected: &[&str]) {
        let warnings = training_of(own, steps).warnings;
        assert_eq!(
            warnings.len(),
            usize::from(!expected.is_empty()),
            "{warnings:?}"
        );
        for words in expected {
            let text = format!("{} {}", warnings[0], warnings[0].help);
            assert!(text.contains(words), "`{words}` is not in {text}");
        }
    }

    #[test]
    fn a_number_of_steps_other_than_the_plans_is_reported() {
        check(linear(None, 0), 16, &[]);
        check(linear(Some(16), 0), 16, &[]);
        check(
            linear(Some(4), 0),
            16,
            &["is 4", "takes 16", "too early", "set it to 16"],
        );
        check(
            linear(Some(400), 0),
            16,
            &["is 400", "takes 16", "ends before"],
        );
        check(linear(Some(0), 0), 16, &["total_steps = 0"]);
        // A run without steps gives no warning.
        check(linear(Some(4), 0), 0, &[]);
        check(linear(None, 0), 0, &[]);
    }

    #[test]
    fn a_warm_up_longer_than_the_run_is_reported() {
        check(linear(Some(16), 16), 16, &["only rises"]);
        check(linear(None, 16), 16, &[]);
        check(
            linear(None, 20),
            16,
            &["warmup_steps = 20", "16 optimiser steps"],
        );
        let constant = OptimizerConfig {
            schedule: Schedule::Constant { warmup_steps: 20 },
            ..OptimizerConfig::default()
        };
        check(constant, 16, &["warmup_steps = 20", "16 optimiser steps"]);
    }

    #[test]
    fn what_the_run_decides_is_in_the_settings() {
        let found = training_of(linear(None, 2), 16);
        assert_eq!(found.settings["schedule"]["total_steps"], 16);
        assert_eq!(
            found.summary,
            "learning rate 1e-6, linear over 16 steps to 0 of the peak, warm-up 2"
        );
        let found = training_of(linear(Some(4), 0), 16);
        assert_eq!(found.settings["schedule"]["total_steps"], 4);
    }
}
