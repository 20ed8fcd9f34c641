//! What a run shows: a progress bar on a terminal, one line a step, a summary at the end.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::run::metrics::StepMetrics;

/// Samples that a summary shows before and after.
const SHOWN: usize = 5;

/// Writes lines to standard output; the bar is drawn on standard error where that is a terminal.
pub struct Console {
    bar: ProgressBar,
    out: Box<dyn Write + Send>,
    steps: u64,
    every: u64,
}

impl Console {
    /// The console of a run of `steps` steps with a line every `every` steps.
    pub fn new(steps: u64, every: u64) -> Console {
        let bar = ProgressBar::new(steps);
        let style =
            ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {elapsed} gone, {eta} to go");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Console {
            bar,
            out: Box::new(std::io::stdout()),
            steps,
            every,
        }
    }

    /// A console that writes lines to `out` and draws no bar.
    pub fn to(out: Box<dyn Write + Send>, steps: u64, every: u64) -> Console {
        Console {
            bar: ProgressBar::hidden(),
            out,
            steps,
            every,
        }
    }

    /// Writes a line without disturbing the bar.
    pub fn line(&mut self, line: &str) {
        let out = &mut self.out;
        // A closed pipe must not end a run.
        self.bar.suspend(|| drop(writeln!(out, "{line}")));
    }

    /// After a step.
    pub fn step(&mut self, metrics: &StepMetrics) {
        self.bar.set_position(metrics.step);
        let due = self.every > 0 && metrics.step.is_multiple_of(self.every);
        if due || metrics.step == self.steps {
            self.line(&step_line(metrics, self.steps));
        }
    }

    /// After observers ran.
    pub fn observed(&mut self, metrics: &StepMetrics) {
        let values = metrics
            .values
            .iter()
            .filter(|(name, _)| !name.starts_with("perf/"));
        let values: Vec<String> = values
            .map(|(name, value)| format!("{name} {}", number(*value)))
            .collect();
        if !values.is_empty() {
            self.line(&format!(
                "[observed] step {}/{} | {}",
                metrics.step,
                self.steps,
                values.join(" | ")
            ));
        }
    }

    /// Takes the bar away.
    pub fn end(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// `[epoch 0] step 10/320 | loss 0.0123 | kl 0.0010 | reward 0.512 | tok/s 12345 | mem 210 MB`; what a run does not
/// record is left out.
pub fn step_line(metrics: &StepMetrics, steps: u64) -> String {
    let loss = metrics.loss().or_else(|| {
        metrics
            .values
            .iter()
            .find(|(name, _)| name.ends_with("/loss"))
            .map(|(_, value)| *value)
    });
    let parts = [
        loss.map(|v| format!("loss {v:.4}")),
        metrics.kl().map(|v| format!("kl {v:.4}")),
        metrics.reward().map(|v| format!("reward {v:.3}")),
        metrics
            .get("perf/tokens_per_s")
            .map(|v| format!("tok/s {v:.0}")),
        metrics
            .get("perf/memory_mb")
            .map(|v| format!("mem {v:.0} MB")),
    ];
    let mut line = format!("[epoch {}] step {}/{steps}", metrics.epoch, metrics.step);
    for part in parts.into_iter().flatten() {
        line.push_str(" | ");
        line.push_str(&part);
    }
    line
}

fn number(value: f64) -> String {
    if value == value.trunc() && value.abs() < 1e9 {
        format!("{value}")
    } else {
        format!("{value:.4}")
    }
}

/// What a whole run did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Seconds of the whole run, loading left out.
    pub seconds: f64,
    /// Seconds in each stage's calls. Stages overlap, so that the sum may pass `seconds`.
    pub stage_seconds: BTreeMap<String, f64>,
    /// What observers saw before the first step.
    pub before: BTreeMap<String, f64>,
    /// What observers saw last.
    pub after: BTreeMap<String, f64>,
    /// Samples that observers gave before the first step.
    pub samples_before: Vec<Value>,
    /// Samples that observers gave last.
    pub samples_after: Vec<Value>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} steps in {:.1} s; time in stages (they overlap):",
            self.steps, self.seconds
        )?;
        let mut stages: Vec<_> = self.stage_seconds.iter().collect();
        stages.sort_by(|a, b| b.1.total_cmp(a.1));
        for (name, seconds) in stages {
            let share = 100.0 * seconds / self.seconds.max(1e-9);
            writeln!(f, "  {name:<24} {seconds:>9.2} s {share:>6.1} %")?;
        }
        for (name, before) in &self.before {
            if let Some(after) = self.after.get(name) {
                writeln!(f, "{name}: {} -> {}", number(*before), number(*after))?;
            }
        }
        for (word, samples) in [
            ("before", &self.samples_before),
            ("after", &self.samples_after),
        ] {
            if !samples.is_empty() {
                writeln!(f, "samples {word}:")?;
            }
            for sample in samples.iter().take(SHOWN) {
                writeln!(f, "  {}", sample_line(sample))?;
            }
        }
        Ok(())
    }
}

fn sample_line(sample: &Value) -> String {
    let text = |key: &str| sample.get(key).and_then(Value::as_str);
    match (text("prompt"), text("response")) {
        (Some(prompt), Some(response)) => format!("{prompt:?} -> {response:?}"),
        _ => sample.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(values: &[(&str, f64)]) -> StepMetrics {
        let values = values
            .iter()
            .map(|(name, value)| ((*name).to_owned(), *value))
            .collect();
        StepMetrics {
            step: 10,
            epoch: 0,
            timestamp: 0.0,
            values,
        }
    }

    #[test]
    fn a_step_in_one_line() {
        let grpo = metrics(&[
            ("actor/loss", 0.0123),
            ("actor/kl", 0.001),
            ("reward/mean", 0.5),
            ("perf/tokens_per_s", 12345.6),
            ("perf/memory_mb", 210.2),
        ]);
        assert_eq!(
            step_line(&grpo, 320),
            "[epoch 0] step 10/320 | loss 0.0123 | kl 0.0010 | reward 0.500 | tok/s 12346 | mem 210 MB"
        );
        assert_eq!(
            step_line(&metrics(&[("sft/loss", 2.0)]), 20),
            "[epoch 0] step 10/20 | loss 2.0000"
        );
    }

    #[test]
    fn a_summary_shows_shares_and_both_ends() {
        let summary = Summary {
            steps: 2,
            seconds: 4.0,
            stage_seconds: BTreeMap::from([
                ("reward".to_owned(), 1.0),
                ("generate".to_owned(), 3.0),
            ]),
            before: BTreeMap::from([("eval/exact_match".to_owned(), 0.5)]),
            after: BTreeMap::from([("eval/exact_match".to_owned(), 0.75)]),
            samples_before: vec![
                serde_json::json!({"phase": "before", "prompt": "1+1=", "response": "3"}),
            ],
            samples_after: Vec::new(),
        };
        let expected = [
            "2 steps in 4.0 s; time in stages (they overlap):",
            "  generate                      3.00 s   75.0 %",
            "  reward                        1.00 s   25.0 %",
            "eval/exact_match: 0.5000 -> 0.7500",
            "samples before:",
            "  \"1+1=\" -> \"3\"",
            "",
        ];
        assert_eq!(summary.to_string(), expected.join("\n"));
    }
}
