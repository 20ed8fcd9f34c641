//! A run as one HTML page that needs nothing else: pipeline, curves, steps, samples, texts, anomalies.
//!
//! The page is written here as data and drawn by the scripts of `assets/view` in the browser. What would make it large
//! is thinned or left out ([`ViewOptions`]), and the page says what: curves keep the smallest and the largest value of
//! each part.
//! A run that goes on, that failed, or of which files are missing has a page too; what could not be read is told on it.

mod curves;
mod files;
mod graph;
mod html;
mod layout;
mod samples;
mod serve;
mod tables;
mod texts;
mod thin;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::registry::Registry;
use crate::run::held::{ABANDONED, Process, process_of};
use crate::run::records::{SampleLine, StatusFile};
use crate::schedule::placement::Schedule;
use crate::trace::error::TraceError;
use crate::trace::rules::Anomaly;
use crate::trace::store::TraceDir;
use crate::trace::text::count;
use crate::trace::traced_run::{LookError, TracedRun, schedule_of};

use curves::{Curve, KeyCurves, metric_curves};
use files::RunFiles;
use graph::Graph;
use samples::{SampleHead, Samples};
use tables::{Tables, choose};

pub use serve::{ServeError, Server};

/// How much of a run a page holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ViewOptions {
    /// Samples that can be looked at token by token, at most.
    pub samples: usize,
    /// Points of a curve, at most.
    pub points: usize,
    /// Steps whose tables can be looked at, at most.
    pub tables: usize,
}

impl Default for ViewOptions {
    fn default() -> Self {
        ViewOptions {
            samples: 200,
            points: 1200,
            tables: 200,
        }
    }
}

/// A page, and what is on it.
#[derive(Debug, Clone)]
pub struct Page {
    /// The whole page.
    pub html: String,
    /// Curves on it.
    pub curves: usize,
    /// Steps with a table.
    pub tables: usize,
    /// Samples that can be looked at.
    pub samples: usize,
    /// Anomalies.
    pub anomalies: usize,
    /// What was left out or could not be read.
    pub notes: Vec<String>,
}

/// What is always needed; tables and samples stand in documents of their own, which are read when they are looked at.
#[derive(Debug, Serialize)]
struct Document<'a> {
    run: RunHead<'a>,
    notes: &'a [String],
    graph: Option<Graph>,
    metrics: &'a [Curve],
    keys: &'a [Curve],
    anomalies: &'a [Anomaly],
    texts: &'a [SampleLine],
    samples: &'a [SampleHead],
    words: &'a BTreeMap<u32, String>,
    tables: Vec<u64>,
}

/// What the head of the page says.
#[derive(Debug, Serialize)]
struct RunHead<'a> {
    name: String,
    pipeline: Option<&'a str>,
    seed: Option<u64>,
    version: Option<&'a str>,
    #[serde(flatten)]
    status: Option<&'a StatusFile>,
}

/// Makes the page of the run in `dir`, whose kinds `registry` knows. Reads only.
///
/// # Errors
/// A folder without a run; a trace in another format.
pub fn page(dir: &Path, registry: &Registry, options: &ViewOptions) -> Result<Page, LookError> {
    let mut notes = Vec::new();
    let run = Seen::open(dir, registry, &mut notes)?;
    let mut files = RunFiles::read(dir);
    notes.append(&mut files.notes);
    let plan = run.schedule().map(|schedule| &schedule.plan);
    let metrics = metric_curves(&files.metrics, plan, options.points);
    let (keys, tables) = run.statistics(&files, options, &mut notes);
    let samples = match &run.traced {
        Some(traced) => samples::samples(traced, &files.anomalies, options.samples),
        None => Samples::default(),
    };
    let (texts, left) = texts::texts(std::mem::take(&mut files.samples));
    notes.extend(samples.notes);
    notes.extend(left);
    notes.extend(told_of_curves(metrics.iter().chain(&keys), options.points));
    if process_of(dir).is_ok_and(|process| process == Process::Gone) {
        notes.push(ABANDONED.to_owned());
    }
    notes.extend(files.told_of_no_step(dir));
    let head = run.head(dir, &files);
    let title = head.name.clone();
    let mut blocks = html::Blocks::default();
    blocks.add(
        "data",
        &Document {
            run: head,
            notes: &notes,
            graph: run.schedule().map(graph::graph),
            metrics: &metrics,
            keys: &keys,
            anomalies: &files.anomalies,
            texts: &texts,
            samples: &samples.heads,
            words: &samples.words,
            tables: tables.steps(),
        },
    );
    blocks.add("tables", &tables);
    for (number, block) in samples.blocks.iter().enumerate() {
        blocks.add_json(&format!("sample-{number}"), block);
    }
    Ok(Page {
        html: html::page(&title, &blocks),
        curves: metrics.len() + keys.len(),
        tables: tables.len(),
        samples: samples.heads.len(),
        anomalies: files.anomalies.len(),
        notes,
    })
}

/// What there is of a run.
struct Seen {
    traced: Option<TracedRun>,
    /// Where the run has no trace.
    schedule: Option<Schedule>,
    /// Where its pipeline is not accepted any more.
    trace: Option<TraceDir>,
}

impl Seen {
    fn open(dir: &Path, registry: &Registry, notes: &mut Vec<String>) -> Result<Seen, LookError> {
        let schedule = match schedule_of(dir, registry) {
            Ok(found) => Some(found),
            Err(LookError::Config(findings)) => {
                let n = count(findings.len() as u64, "finding");
                notes.push(format!(
                    "this version does not accept the run's config.toml ({n}, see T011): the pipeline is not drawn, and there are no samples"
                ));
                None
            }
            Err(other) => return Err(other),
        };
        let trace = match TraceDir::open(dir) {
            Ok(trace) => Some(trace),
            Err(TraceError::NoTrace { .. }) => {
                notes.push("the run has no trace: there are metrics and texts only".to_owned());
                None
            }
            Err(other) => return Err(other.into()),
        };
        notes.extend(trace.iter().flat_map(|trace| trace.notes().to_vec()));
        Ok(match (schedule, trace) {
            (Some((schedule, gone)), Some(trace)) => Seen {
                traced: Some(TracedRun::of(dir, schedule, gone, trace)),
                schedule: None,
                trace: None,
            },
            (schedule, trace) => Seen {
                traced: None,
                schedule: schedule.map(|(schedule, _)| schedule),
                trace,
            },
        })
    }

    fn schedule(&self) -> Option<&Schedule> {
        let traced = self.traced.as_ref().map(TracedRun::schedule);
        traced.or(self.schedule.as_ref())
    }

    fn trace(&self) -> Option<&TraceDir> {
        let traced = self.traced.as_ref().map(TracedRun::trace);
        traced.or(self.trace.as_ref())
    }

    fn head<'a>(&'a self, dir: &Path, files: &'a RunFiles) -> RunHead<'a> {
        // `.` has a name too.
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let format = self.trace().map(TraceDir::format);
        let plan = self.schedule().map(|schedule| &schedule.plan);
        let planned = plan.map(|plan| (plan.pipe.name.as_str(), plan.context.seed));
        let traced = format.map(|format| (format.pipeline.as_str(), format.seed));
        let (pipeline, seed) = traced.or(planned).unzip();
        RunHead {
            name: name.into_owned(),
            pipeline,
            seed,
            version: format.map(|format| format.verl.as_str()),
            status: files.status.as_ref(),
        }
    }

    /// The curves of the keys, and the tables of steps; what cannot be read is told.
    fn statistics(
        &self,
        files: &RunFiles,
        options: &ViewOptions,
        notes: &mut Vec<String>,
    ) -> (Vec<Curve>, Tables) {
        let steps: Vec<u64> = match (files.metrics.as_slice(), &files.status) {
            ([], Some(status)) => (1..=status.step).collect(),
            (lines, _) => lines
                .iter()
                .map(|line| line.step)
                .filter(|s| *s > 0)
                .collect(),
        };
        let worth = self.worth(&files.anomalies);
        let all: Vec<u64> = steps.iter().chain(&worth).copied().collect();
        let mut tables = Tables::of(choose(&all, &worth, options.tables));
        let mut curves = KeyCurves::default();
        let plan = self.schedule().map(|schedule| &schedule.plan);
        let read = self.trace().map(|trace| {
            trace.each_stats(.., |rows| {
                tables.add(&rows);
                curves.add(&rows, plan);
            })
        });
        let damaged = read.unwrap_or_default();
        notes.extend(damaged.iter().map(|file| {
            format!(
                "statistics are not complete: error[{}]: {file}",
                file.error.code()
            )
        }));
        let (shown, of) = (tables.len(), curves.steps());
        if shown < of {
            notes.push(format!(
                "tables are of {shown} of {}: those of anomalies and of recorded steps first; --tables N takes more",
                count(of as u64, "step")
            ));
        }
        (curves.finish(plan, options.points), tables)
    }

    /// Steps whose tables are worth most: those that rules named and the ones before them, then those recorded in full.
    fn worth(&self, anomalies: &[Anomaly]) -> Vec<u64> {
        let named = anomalies.iter().map(|anomaly| anomaly.step);
        let before = anomalies
            .iter()
            .map(|anomaly| anomaly.step.saturating_sub(1));
        let recorded = self.trace().map_or_else(Vec::new, TraceDir::steps);
        let steps = named.chain(before).chain(recorded);
        steps.filter(|step| *step > 0).collect()
    }
}

fn told_of_curves<'a>(curves: impl Iterator<Item = &'a Curve>, most: usize) -> Option<String> {
    let longest = curves.map(|curve| curve.steps).max()?;
    (longest > most).then(|| {
        format!(
            "curves of {longest} steps are drawn with {most} points at most, the smallest and the largest value of each part among them; --points N takes more"
        )
    })
}
