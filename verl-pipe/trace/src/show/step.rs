//! A step as a table: each recorded stage with statistics of its outputs, and marks where something is wrong.

use std::fmt;

use serde::Serialize;
use verl_plan::PlannedStage;
use verl_plan::schedule::placement::Schedule;

use crate::compare::{Cell, Rows, compare_inputs, first_violation};
use crate::files::{RecordedStage, RecordedStep};
use crate::text::{Align, Table, short};

/// Statistics of one key that a stage emitted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct KeySummary {
    /// The stage's own name of the key.
    pub key: String,
    /// Number of values; tokens of lists are counted one by one.
    pub values: usize,
    /// Smallest finite value; for texts the smallest length (characters).
    pub min: Option<f64>,
    /// Mean of the finite values.
    pub mean: Option<f64>,
    /// Largest finite value.
    pub max: Option<f64>,
    /// Standard deviation (divides by n).
    pub std: Option<f64>,
    /// Number of null values.
    pub nulls: usize,
    /// Number of floats that are not finite.
    pub non_finite: usize,
}

/// One stage of a recorded step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageSummary {
    /// Its name.
    pub stage: String,
    /// Its kind.
    pub kind: String,
    /// Number of input rows.
    pub rows_in: usize,
    /// Number of output rows.
    pub rows_out: usize,
    /// Number of calls.
    pub calls: usize,
    /// Keys that it emitted, with their statistics.
    pub keys: Vec<KeySummary>,
    /// What is wrong with its recorded rows.
    pub marks: Vec<String>,
}

/// A recorded step as a table of stages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepSummary {
    /// The step.
    pub step: u64,
    /// Name of the pipeline.
    pub pipeline: String,
    /// Stages in the order of the plan.
    pub stages: Vec<StageSummary>,
    /// Unreadable files of the step, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
}

/// Summarises a step: each recorded stage with statistics of its outputs, and marks where something is wrong.
pub fn step_summary(schedule: &Schedule, recorded: &RecordedStep) -> StepSummary {
    let planned = schedule.plan().stages().iter().enumerate();
    let stages = planned.filter_map(|(index, planned)| {
        let stage = recorded.stages.get(planned.name())?;
        Some(StageSummary {
            stage: planned.name().to_owned(),
            kind: planned.kind().to_owned(),
            rows_in: stage
                .inputs
                .iter()
                .map(|input| input.batch.num_rows())
                .sum(),
            rows_out: stage
                .outputs
                .iter()
                .map(|output| output.batch.num_rows())
                .sum(),
            calls: stage.inputs.len(),
            keys: key_summaries(planned, stage),
            marks: marks(schedule, recorded, index, stage),
        })
    });
    StepSummary {
        step: recorded.step,
        pipeline: schedule.plan().pipe().name.clone(),
        stages: stages.collect(),
        damaged: recorded.damaged.iter().map(ToString::to_string).collect(),
    }
}

fn marks(
    schedule: &Schedule,
    recorded: &RecordedStep,
    index: usize,
    stage: &RecordedStage,
) -> Vec<String> {
    let altered = recorded.altered.iter();
    let mut marks: Vec<String> = altered
        .filter(|key| key.stage == schedule.plan().stages()[index].name())
        .map(|key| format!("{}: {}", key.side.as_str(), key.what(recorded.step)))
        .collect();
    let edges = compare_inputs(schedule, recorded, index).into_iter();
    marks.extend(edges.filter_map(|edges| {
        let writer = schedule.plan().stages()[edges.writer].name();
        let first = edges.compared.first?;
        Some(format!(
            "differs from what `{writer}` wrote: {}",
            first.place()
        ))
    }));
    marks.extend(first_violation(schedule, index, stage).map(|violation| {
        let side = if violation.output { "output" } else { "input" };
        let sample = violation
            .sample
            .map_or_else(String::new, |id| format!(", sample {id}"));
        format!("{side} key `{}`{sample}: {}", violation.key, violation.what)
    }));
    marks
}

fn key_summaries(planned: &PlannedStage, stage: &RecordedStage) -> Vec<KeySummary> {
    let rows = Rows::new(stage.outputs.iter().map(|output| &output.batch));
    let keys = planned.spec().writes.iter();
    keys.map(|field| key_summary(&field.name, &rows)).collect()
}

fn key_summary(key: &str, rows: &Rows<'_>) -> KeySummary {
    let mut summary = KeySummary {
        key: key.to_owned(),
        ..KeySummary::default()
    };
    let mut numbers: Vec<f64> = Vec::new();
    for id in rows.ids() {
        match rows.cell(*id, key) {
            None | Some(Cell::Null) => summary.nulls += 1,
            Some(Cell::Text(texts)) => {
                summary.values += texts.len();
                numbers.extend(texts.iter().map(|text| text.chars().count() as f64));
            }
            Some(values) => {
                summary.values += values.len();
                numbers.extend((0..values.len()).filter_map(|at| values.number(at)));
            }
        }
    }
    let total = numbers.len();
    numbers.retain(|number| number.is_finite());
    summary.non_finite = total - numbers.len();
    if !numbers.is_empty() {
        let n = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / n;
        let variance = numbers.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        summary.min = numbers.iter().copied().reduce(f64::min);
        summary.max = numbers.iter().copied().reduce(f64::max);
        (summary.mean, summary.std) = (Some(mean), Some(variance.sqrt()));
    }
    summary
}

impl fmt::Display for StepSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "step {} of {}", self.step, self.pipeline)?;
        let mut table = Table::new(&[
            ("stage", Align::Left),
            ("calls", Align::Right),
            ("rows", Align::Right),
            ("key", Align::Left),
            ("values", Align::Right),
            ("min", Align::Right),
            ("mean", Align::Right),
            ("max", Align::Right),
            ("std", Align::Right),
            ("marks", Align::Left),
        ]);
        let shown = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), short);
        for stage in &self.stages {
            let rows = match (stage.rows_in, stage.rows_out) {
                (given, made) if given == made || made == 0 => given.to_string(),
                (given, made) => format!("{given}→{made}"),
            };
            let mut head = vec![stage.stage.clone(), stage.calls.to_string(), rows];
            let mut mark = match stage.marks.len() {
                0 => String::new(),
                n => format!("! {n}"),
            };
            for key in &stage.keys {
                let mut marks: Vec<String> =
                    Vec::from_iter((!mark.is_empty()).then(|| mark.clone()));
                if key.non_finite > 0 {
                    marks.push(format!("{} not finite", key.non_finite));
                }
                if key.nulls > 0 {
                    marks.push(format!("{} null", key.nulls));
                }
                let numbers = [key.min, key.mean, key.max, key.std].map(shown);
                let own = [key.key.clone(), key.values.to_string()];
                table.row(
                    head.into_iter()
                        .chain(own)
                        .chain(numbers)
                        .chain([marks.join(", ")]),
                );
                head = vec![String::new(); 3];
                mark.clear();
            }
            if stage.keys.is_empty() {
                let blank = vec![String::new(); 5];
                table.row(
                    head.into_iter()
                        .chain(["-".to_owned()])
                        .chain(blank)
                        .chain([mark]),
                );
            }
        }
        write!(f, "{table}")?;
        for stage in &self.stages {
            for mark in &stage.marks {
                writeln!(f, "! `{}`: {mark}", stage.stage)?;
            }
        }
        for file in &self.damaged {
            writeln!(f, "! not shown, {file}")?;
        }
        Ok(())
    }
}
