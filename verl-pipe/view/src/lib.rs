//! A run as one self-contained HTML page: pipeline, curves, steps, samples, texts, anomalies; and a step as a
//! [`timeline`].
//!
//! This crate writes the page as data, and the scripts of `assets/view` draw it in the browser. Data that would make
//! the page large is thinned or left out ([`ViewOptions`]), and the page says so: curves keep the smallest and the
//! largest value of each part.
//! A run that is in progress, that failed, or that lacks files has a page too; the page lists what could not be read.

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
pub mod timeline;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use verl_declare::registry::Registry;
use verl_plan::schedule::placement::Schedule;
use verl_rules::Anomaly;
use verl_run::records::{SampleLine, StatusFile};
use verl_trace::files::{TraceDir, TraceError};
use verl_trace::replay::{InspectError, TracedRun, schedule_of};
use verl_trace::text::count;
use verl_train::folder_lock::{ABANDONED, Process, process_of};

use curves::{Curve, KeyCurves, metric_curves};
use files::RunFiles;
use graph::Graph;
use samples::{SampleHead, Samples};
use tables::{Tables, choose};

pub use serve::{ServeError, Server};

/// How much of a run a page contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ViewOptions {
    /// Most samples shown token by token.
    pub samples: usize,
    /// Most points of a curve.
    pub points: usize,
    /// Most steps with tables.
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

/// A page, and the number of its items.
#[derive(Debug, Clone)]
pub struct Page {
    /// The complete page.
    pub html: String,
    /// Curves on it.
    pub curves: usize,
    /// Steps with a table.
    pub tables: usize,
    /// Samples shown token by token.
    pub samples: usize,
    /// Anomalies.
    pub anomalies: usize,
    /// What was left out or could not be read.
    pub notes: Vec<String>,
}

/// The data that is always needed; tables and samples are separate documents, which the script parses on demand.
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

/// The content of the head of the page.
#[derive(Debug, Serialize)]
struct RunHead<'a> {
    name: String,
    pipeline: Option<&'a str>,
    seed: Option<u64>,
    version: Option<&'a str>,
    #[serde(flatten)]
    status: Option<&'a StatusFile>,
}

/// Makes the page of the run in `dir`, whose kinds `registry` contains. Only reads files.
///
/// # Errors
/// A folder without a run; a trace in another format.
pub fn page(dir: &Path, registry: &Registry, options: &ViewOptions) -> Result<Page, InspectError> {
    let mut notes = Vec::new();
    let run = ViewedRun::open(dir, registry, &mut notes)?;
    let mut files = RunFiles::read(dir);
    notes.append(&mut files.notes);
    let plan = run.schedule().map(|schedule| schedule.plan());
    let metrics = metric_curves(&files.metrics, plan, options.points);
    let (keys, tables) = run.statistics(&files, options, &mut notes);
    let samples = match &run.traced {
        Some(traced) => samples::samples(traced, &files.anomalies, options.samples),
        None => Samples::default(),
    };
    let (texts, left) = texts::texts(std::mem::take(&mut files.samples));
    notes.extend(samples.notes);
    notes.extend(left);
    notes.extend(thinned_note(metrics.iter().chain(&keys), options.points));
    if process_of(dir).is_ok_and(|process| process == Process::Gone) {
        notes.push(ABANDONED.to_owned());
    }
    notes.extend(files.no_metrics_note(dir));
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

/// The available parts of a run.
struct ViewedRun {
    traced: Option<TracedRun>,
    /// Set only if the run has no trace.
    schedule: Option<Schedule>,
    /// Set only if this version does not accept the run's pipeline.
    trace: Option<TraceDir>,
}

impl ViewedRun {
    fn open(
        dir: &Path,
        registry: &Registry,
        notes: &mut Vec<String>,
    ) -> Result<ViewedRun, InspectError> {
        let schedule = match schedule_of(dir, registry) {
            Ok(found) => Some(found),
            Err(InspectError::Config(findings)) => {
                let n = count(findings.len() as u64, "finding");
                notes.push(format!(
                    "this version does not accept the run's config.toml ({n}, see T011): the page shows no pipeline and no samples"
                ));
                None
            }
            Err(other) => return Err(other),
        };
        let trace = match TraceDir::open(dir) {
            Ok(trace) => Some(trace),
            Err(TraceError::NoTrace { .. }) => {
                notes.push(
                    "the run has no trace, so the page shows only metrics and texts".to_owned(),
                );
                None
            }
            Err(other) => return Err(other.into()),
        };
        notes.extend(trace.iter().flat_map(|trace| trace.notes().to_vec()));
        Ok(match (schedule, trace) {
            (Some((schedule, gone)), Some(trace)) => ViewedRun {
                traced: Some(TracedRun::of(dir, schedule, gone, trace)),
                schedule: None,
                trace: None,
            },
            (schedule, trace) => ViewedRun {
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
        // Resolve `.`, which has no file name.
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let format = self.trace().map(TraceDir::format);
        let plan = self.schedule().map(|schedule| schedule.plan());
        let planned = plan.map(|plan| (plan.pipe().name.as_str(), plan.context().seed));
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

    /// The curves of the keys, and the tables of steps. Adds notes about files that cannot be read.
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
        let important = self.important_steps(&files.anomalies);
        let all: Vec<u64> = steps.iter().chain(&important).copied().collect();
        let mut tables = Tables::of(choose(&all, &important, options.tables));
        let mut curves = KeyCurves::default();
        let plan = self.schedule().map(|schedule| schedule.plan());
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
                "the page has tables of {shown} of {}, steps with anomalies and recorded steps first; use --tables N for more",
                count(of as u64, "step")
            ));
        }
        (curves.finish(plan, options.points), tables)
    }

    /// The most important steps: steps with anomalies and the steps before them, then steps recorded in full.
    fn important_steps(&self, anomalies: &[Anomaly]) -> Vec<u64> {
        let anomalous = anomalies.iter().map(|anomaly| anomaly.step);
        let before = anomalies
            .iter()
            .map(|anomaly| anomaly.step.saturating_sub(1));
        let recorded = self.trace().map_or_else(Vec::new, TraceDir::steps);
        let steps = anomalous.chain(before).chain(recorded);
        steps.filter(|step| *step > 0).collect()
    }
}

fn thinned_note<'a>(curves: impl Iterator<Item = &'a Curve>, most: usize) -> Option<String> {
    let longest = curves.map(|curve| curve.steps).max()?;
    (longest > most).then(|| {
        format!(
            "curves of {longest} steps are drawn with at most {most} points, including the smallest and the largest value of each part; use --points N for more"
        )
    })
}
