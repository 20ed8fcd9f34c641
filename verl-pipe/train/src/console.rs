//! Console output of a run: a progress bar on a terminal, one line per step, a summary at the end.
//!
//! Numbers have four digits after the decimal point, or use exponent notation if they are too small for that.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use verl_plan::Plan;
use verl_rules::Fired;
use verl_run::metrics::{StepMetrics, number};

use crate::columns::Columns;

/// Number of samples that a summary shows before and after.
const SHOWN: usize = 5;

/// The progress bar on the screen; it is hidden while a log line is written.
static DRAWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Standard error for log lines: hides the progress bar while it writes.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bar = DRAWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match bar {
            Some(bar) => bar.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Writes lines to standard output; the bar is drawn on standard error if that is a terminal.
pub struct Console {
    bar: ProgressBar,
    out: Box<dyn Write + Send>,
    steps: u64,
    every: u64,
    columns: Columns,
}

impl Console {
    /// The console of a run of `steps` steps with a line every `every` steps.
    pub fn new(steps: u64, every: u64) -> Console {
        let bar = ProgressBar::new(steps);
        let style = ProgressStyle::with_template(
            "{bar:30} {pos}/{len} steps, {elapsed} elapsed, {eta} left",
        );
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        *DRAWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        Console {
            bar,
            out: Box::new(std::io::stdout()),
            steps,
            every,
            columns: Columns::default(),
        }
    }

    /// A console that writes lines to `out` and draws no bar.
    pub fn to(out: Box<dyn Write + Send>, steps: u64, every: u64) -> Console {
        Console {
            bar: ProgressBar::hidden(),
            out,
            steps,
            every,
            columns: Columns::default(),
        }
    }

    /// Sets the columns of the line after each step to those that the stages of `plan` declare.
    pub fn show(&mut self, plan: &Plan) {
        self.columns = Columns::of(plan);
    }

    /// Prints a line without disturbing the bar.
    pub fn line(&mut self, line: &str) {
        let out = &mut self.out;
        // A closed pipe must not end the run.
        self.bar.suspend(|| drop(writeln!(out, "{line}")));
    }

    /// Prints the line of a step, if one is due.
    pub fn step(&mut self, metrics: &StepMetrics) {
        self.bar.set_position(metrics.step);
        let due = self.every > 0 && metrics.step.is_multiple_of(self.every);
        if due || metrics.step == self.steps {
            let line = self.columns.line(metrics, self.steps);
            self.line(&line);
        }
    }

    /// Prints what observers recorded: a line for each group of metrics.
    pub fn observed(&mut self, metrics: &StepMetrics) {
        for line in observed_lines(metrics, self.steps) {
            self.line(&line);
        }
    }

    /// Removes the bar.
    pub fn end(&mut self) {
        self.bar.finish_and_clear();
        *DRAWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A line for each group of metrics that observers recorded, such as
/// `[eval] step 40/320 | exact_match 0.5120 | well_formed 0.9980`.
pub fn observed_lines(metrics: &StepMetrics, steps: u64) -> Vec<String> {
    let mut groups: BTreeMap<&str, String> = BTreeMap::new();
    for (name, value) in &metrics.values {
        let (group, own) = name.split_once('/').unwrap_or(("observed", name));
        if group != "perf" {
            let line = groups.entry(group).or_default();
            line.push_str(&format!(" | {own} {}", number(*value)));
        }
    }
    let line = |(group, values)| format!("[{group}] step {}/{steps}{values}", metrics.step);
    groups.into_iter().map(line).collect()
}

/// Summary of a complete run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Number of completed steps.
    pub steps: u64,
    /// Duration of the run without loading (seconds).
    pub seconds: f64,
    /// Time in each stage's calls (seconds). Stages overlap, so the sum may exceed `seconds`.
    pub stage_seconds: BTreeMap<String, f64>,
    /// Metrics that observers recorded before the first step.
    pub before: BTreeMap<String, f64>,
    /// Metrics that observers recorded last.
    pub after: BTreeMap<String, f64>,
    /// Samples that observers reported before the first step.
    pub samples_before: Vec<Value>,
    /// Samples that observers reported last.
    pub samples_after: Vec<Value>,
    /// Anomaly rules that fired.
    pub anomalies: Vec<Fired>,
}

impl Summary {
    /// The rules that fired, with a command that shows the first step of each; empty if none fired.
    pub fn anomaly_lines(&self) -> String {
        let mut text = String::new();
        if !self.anomalies.is_empty() {
            text += "anomalies:\n";
        }
        for fired in &self.anomalies {
            text += &format!("  {fired}\n");
            if !fired.command.is_empty() {
                text += &format!("    {}\n", fired.command);
            }
        }
        text
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.steps == 1 { "" } else { "s" };
        writeln!(f, "{} step{plural} in {:.1} s", self.steps, self.seconds)?;
        if !self.stage_seconds.is_empty() {
            writeln!(f, "time in stages, which may overlap:")?;
        }
        let mut stages: Vec<_> = self.stage_seconds.iter().collect();
        stages.sort_by(|a, b| b.1.total_cmp(a.1));
        for (name, seconds) in stages {
            write!(f, "  {name:<24} {seconds:>9.2} s")?;
            // A run that only observed has no step time to compute shares of.
            if self.steps > 0 {
                let share = 100.0 * seconds / self.seconds.max(1e-9);
                write!(f, " {share:>6.1} %")?;
            }
            writeln!(f)?;
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
        write!(f, "{}", self.anomaly_lines())
    }
}

fn sample_line(sample: &Value) -> String {
    let text = |key: &str| sample.get(key).and_then(Value::as_str);
    match (text("prompt"), text("response")) {
        (Some(prompt), Some(response)) => {
            let verdict = match sample.get("correct").and_then(Value::as_bool) {
                Some(true) => "right  ",
                Some(false) => "wrong  ",
                None => "",
            };
            let wanted = text("answer").filter(|answer| !answer.is_empty());
            let wanted = wanted.map_or(String::new(), |answer| format!("  (wanted: {answer:?})"));
            format!("{verdict}{prompt:?} -> {response:?}{wanted}")
        }
        _ => sample.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use verl_rules::RuleSeverity;

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
            ..StepMetrics::default()
        }
    }

    #[test]
    fn observed_metrics_have_a_line_per_group() {
        let observed = metrics(&[
            ("eval/a", 0.5),
            ("eval/b", 12.0),
            ("perf/step_s", 1.0),
            ("x", 2.0),
        ]);
        assert_eq!(
            observed_lines(&observed, 320),
            [
                "[eval] step 10/320 | a 0.5000 | b 12.0000",
                "[observed] step 10/320 | x 2.0000"
            ]
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
                serde_json::json!({"prompt": "1+1=", "response": "3", "answer": "2", "correct": false}),
            ],
            samples_after: Vec::new(),
            anomalies: vec![Fired {
                rule: "grad_norm_spike".to_owned(),
                severity: RuleSeverity::Warn,
                events: 1,
                steps: 2,
                first_step: 1,
                last_step: 2,
                what: "the norm is 17.4".to_owned(),
                command: "pipe debug trace --run runs/x --step 1".to_owned(),
            }],
        };
        let expected = [
            "2 steps in 4.0 s",
            "time in stages, which may overlap:",
            "  generate                      3.00 s   75.0 %",
            "  reward                        1.00 s   25.0 %",
            "eval/exact_match: 0.5000 -> 0.7500",
            "samples before:",
            "  \"1+1=\" -> \"3\"",
            "  wrong  \"1+1=\" -> \"3\"  (wanted: \"2\")",
            "anomalies:",
            "  grad_norm_spike: steps 1 to 2, at first: the norm is 17.4",
            "    pipe debug trace --run runs/x --step 1",
            "",
        ];
        assert_eq!(summary.to_string(), expected.join("\n"));
    }

    #[test]
    fn a_summary_without_steps_has_no_shares() {
        let summary = Summary {
            stage_seconds: BTreeMap::from([("evaluate".to_owned(), 3.75)]),
            ..Summary::default()
        };
        let expected = [
            "0 steps in 0.0 s",
            "time in stages, which may overlap:",
            "  evaluate                      3.75 s",
            "",
        ];
        assert_eq!(summary.to_string(), expected.join("\n"));
    }
}
