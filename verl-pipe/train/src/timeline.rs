//! The start of a run up to the end of its first step: how long each part took, and which kernels were compiled.

use std::sync::Arc;
use std::time::Instant;

use verl_plan::Plan;
use verl_run::metrics::StepMetrics;
use verl_run::records::{KernelTally, STAGE_S, StartFile, of_stage};

/// Information about kernels that are compiled below the engine.
pub trait Kernels: Send + Sync {
    /// Whether stages on `device` (its name in a pipeline) run compiled kernels.
    fn used_on(&self, device: &str) -> bool;

    /// Number of kernels compiled so far and where they are cached; `None` if no kernel was launched.
    fn tally(&self) -> Option<KernelTally>;
}

/// The clock of a start.
pub struct Timeline {
    kernels: Option<Arc<dyn Kernels>>,
    stages: Vec<String>,
    check_s: Option<f64>,
    load_s: f64,
    since: Instant,
}

impl Timeline {
    /// Starts measuring with loading; `began` is when the work on the plan started.
    pub fn load(plan: &Plan, began: Option<Instant>, kernels: Option<Arc<dyn Kernels>>) -> Self {
        let stages = plan.pipe().stages.iter().map(|stage| stage.name.clone());
        Timeline {
            kernels,
            stages: stages.collect(),
            check_s: began.map(|began| began.elapsed().as_secs_f64()),
            load_s: 0.0,
            since: Instant::now(),
        }
    }

    /// Marks the end of loading.
    pub fn loaded(&mut self) {
        self.load_s = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
    }

    /// Marks the end of the first step.
    pub fn first_step(self, metrics: &StepMetrics) -> StartFile {
        let run_s = self.since.elapsed().as_secs_f64();
        let step_s = metrics.get("perf/step_s").unwrap_or(run_s);
        let seconds = |stage: &String| {
            let seconds = metrics.get(&of_stage(&STAGE_S, stage))?;
            Some((stage.clone(), seconds))
        };
        StartFile {
            check_s: self.check_s,
            load_s: self.load_s,
            // Observers that run before the first step account for the difference.
            observe_s: (run_s - step_s).max(0.0),
            first_step_s: step_s,
            stages: self.stages.iter().filter_map(seconds).collect(),
            kernels: self.kernels.and_then(|kernels| kernels.tally()),
        }
    }
}

/// Formats a start on one line, with the stages that took at least a tenth of the first step:
/// `[start] check 0.31 s | load 0.80 s | first step 2.10 s: generate 1.20 s, update 0.70 s | 34 kernels compiled`.
pub(crate) fn start_line(start: &StartFile) -> String {
    let mut line = "[start]".to_owned();
    let mut part = |text: String| {
        line.push_str(if line.ends_with(']') { " " } else { " | " });
        line.push_str(&text);
    };
    if let Some(seconds) = start.check_s {
        part(format!("check {seconds:.2} s"));
    }
    part(format!("load {:.2} s", start.load_s));
    // The time of an evaluation; without one it is negligible.
    if start.observe_s >= 0.1 {
        part(format!("observe {:.2} s", start.observe_s));
    }
    let long = start.stages.iter();
    let long = long.filter(|(_, seconds)| **seconds >= 0.1 * start.first_step_s);
    let long: Vec<String> = long
        .map(|(name, seconds)| format!("{name} {seconds:.2} s"))
        .collect();
    let colon = if long.is_empty() { "" } else { ": " };
    part(format!(
        "first step {:.2} s{colon}{}",
        start.first_step_s,
        long.join(", ")
    ));
    if let Some(kernels) = &start.kernels {
        part(format!("{} kernels compiled", kernels.compiled));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> StartFile {
        StartFile {
            check_s: Some(0.25),
            load_s: 0.5,
            observe_s: 0.0,
            first_step_s: 2.0,
            stages: [("generate", 1.25), ("prompts", 0.01), ("update", 0.5)]
                .map(|(name, seconds)| (name.to_owned(), seconds))
                .into_iter()
                .collect(),
            kernels: None,
        }
    }

    #[test]
    fn a_start_is_printed_on_one_line() {
        assert_eq!(
            start_line(&start()),
            "[start] check 0.25 s | load 0.50 s | first step 2.00 s: generate 1.25 s, update 0.50 s"
        );
        let more = StartFile {
            check_s: None,
            observe_s: 3.0,
            stages: Default::default(),
            kernels: Some(KernelTally {
                compiled: 34,
                driver_cache: "/c".to_owned(),
            }),
            ..start()
        };
        assert_eq!(
            start_line(&more),
            "[start] load 0.50 s | observe 3.00 s | first step 2.00 s | 34 kernels compiled"
        );
    }

    #[test]
    fn stages_of_the_first_step_are_found_by_their_metrics() {
        let mut metrics = StepMetrics::default();
        for (name, value) in [
            ("perf/step_s", 0.5),
            ("perf/stage/update_s", 0.25),
            ("perf/stage/other_s", 9.0),
        ] {
            metrics.values.insert(name.to_owned(), value);
        }
        let mut timeline = Timeline {
            kernels: None,
            stages: vec!["generate".to_owned(), "update".to_owned()],
            check_s: None,
            load_s: 0.0,
            since: Instant::now(),
        };
        timeline.loaded();
        let start = timeline.first_step(&metrics);
        assert_eq!(start.first_step_s, 0.5);
        assert_eq!(
            start.stages.into_iter().collect::<Vec<_>>(),
            [("update".to_owned(), 0.25)]
        );
        assert!(start.load_s >= 0.0 && start.observe_s == 0.0);
    }
}
