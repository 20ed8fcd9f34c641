//! Runs the rules on each step and reports what they find.

use std::collections::{BTreeMap, VecDeque};
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use verl_rules::format::Side;
use verl_rules::stats::StatRow;
use verl_rules::{
    Anomaly, EARLY_STEPS, Fired, HISTORY_STEPS, MetricsView, RuleBook, RuleSeverity, SeenBatch,
    StepView,
};
use verl_words::batch::Batch;
use verl_words::resource::WeightsVersion;
use verl_words::stage::MetricRoles;

use crate::files::{Layout, TraceError};
use crate::record::reported::Reported;
use crate::record::show_command::ShowCommand;
use crate::record::step_data::{StageAbout, StepData};
use crate::record::step_stats::Distances;

/// The rules of a run, with what they need of earlier steps.
///
/// Between calls: `rows_checked` and `has_fired` are about the current step, whose rows are checked at most once.
/// `stop` is the first anomaly that asks to stop and that no gate has returned. `history`, `early` and `versions` have at
/// most as many entries as the rules use.
pub(crate) struct RuleRunner {
    book: RuleBook,
    stages: Arc<[StageAbout]>,
    layout: Layout,
    on_cpu: bool,
    /// What the rules found so far.
    fired: Arc<Mutex<Vec<Fired>>>,
    /// Rules on rows have run on the current step; they run once a step, at its first gate or else at its end.
    rows_checked: bool,
    /// A rule fired in the current step.
    pub(super) has_fired: bool,
    /// The first anomaly that asks to stop and has not been passed on yet; the next gate returns it before its update.
    stop: Option<Box<Anomaly>>,
    history: VecDeque<BTreeMap<String, f64>>,
    early: Vec<BTreeMap<String, f64>>,
    /// By stage, the setting that bounds its responses, and its value.
    limits: BTreeMap<String, (&'static str, usize)>,
    versions: Vec<(u64, BTreeMap<String, WeightsVersion>)>,
}

impl RuleRunner {
    pub(crate) fn new(
        book: RuleBook,
        stages: Arc<[StageAbout]>,
        layout: Layout,
        on_cpu: bool,
        fired: Arc<Mutex<Vec<Fired>>>,
    ) -> RuleRunner {
        let limits = stages
            .iter()
            .filter_map(|about| Some((about.name.clone(), about.longest?)))
            .collect();
        RuleRunner {
            book,
            stages,
            layout,
            on_cpu,
            fired,
            rows_checked: false,
            has_fired: false,
            stop: None,
            history: VecDeque::new(),
            early: Vec::new(),
            limits,
            versions: Vec::new(),
        }
    }

    /// Whether a rule is on.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.book.has(name)
    }

    /// A step has begun.
    pub(crate) fn begin(&mut self) {
        self.rows_checked = false;
        self.has_fired = false;
    }

    /// Whether the rules on rows have run on the current step.
    pub(crate) fn rows_checked(&self) -> bool {
        self.rows_checked
    }

    /// Whether a rule fired in the current step.
    pub(crate) fn has_fired(&self) -> bool {
        self.has_fired
    }

    /// The first anomaly that asks to stop, unless it was returned before.
    pub(crate) fn take_stop(&mut self) -> Option<Box<Anomaly>> {
        self.stop.take()
    }

    /// Keeps an anomaly for the next gate, unless one is kept already.
    pub(crate) fn keep_stop(&mut self, stop: Option<Box<Anomaly>>) {
        self.stop = self.stop.take().or(stop);
    }

    /// Adds the versions of the models after `step`.
    pub(crate) fn add_versions(&mut self, step: u64, versions: BTreeMap<String, WeightsVersion>) {
        self.versions.push((step, versions));
        let extra = self.versions.len().saturating_sub(2);
        self.versions.drain(..extra);
    }

    /// Runs the rules on rows on the step so far; returns the first anomaly that asks to stop. `rows_recorded` says
    /// whether the rows will be on disk if a rule fires.
    pub(crate) fn check_rows(
        &mut self,
        data: &StepData,
        (rows, distances): (&[StatRow], &Distances),
        update: Option<(usize, &Batch)>,
        rows_recorded: bool,
        reported: &mut Reported,
    ) -> Option<Box<Anomaly>> {
        self.rows_checked = true;
        let batches: Vec<SeenBatch<'_>> = data
            .parts
            .iter()
            .map(|part| SeenBatch {
                stage: &self.stages[part.stage].name,
                side: part.side,
                batch: &part.batch,
            })
            .collect();
        let update = update.map(|(stage, batch)| SeenBatch {
            stage: &self.stages[stage].name,
            side: Side::Input,
            batch,
        });
        let view = StepView {
            step: data.step,
            stats: rows,
            batches: &batches,
            update,
            distances,
            limits: &self.limits,
        };
        let command = ShowCommand {
            dir: self.layout.run_dir(),
            step: data.step,
            stages: &self.stages,
            rows_recorded,
        };
        let found = self.book.before_update(&view, &|hit| command.for_hit(hit));
        self.report(found, reported)
    }

    /// Runs the rules on metrics; returns whether one fired.
    pub(crate) fn check_metrics(
        &mut self,
        step: u64,
        values: BTreeMap<String, f64>,
        roles: &MetricRoles,
        rows_recorded: bool,
        reported: &mut Reported,
    ) -> bool {
        let command = ShowCommand {
            dir: self.layout.run_dir(),
            step,
            stages: &self.stages,
            rows_recorded,
        };
        let view = MetricsView {
            step,
            metrics: &values,
            roles,
            history: &self.history,
            early: &self.early,
            versions: &self.versions,
            on_cpu: self.on_cpu,
        };
        let found = self.book.after_step(&view, &|hit| command.for_hit(hit));
        if self.early.len() < EARLY_STEPS {
            self.early.push(values.clone());
        }
        self.history.push_back(values);
        if self.history.len() > HISTORY_STEPS {
            self.history.pop_front();
        }
        let any = !found.is_empty();
        let stop = self.report(found, reported);
        self.keep_stop(stop);
        any
    }

    /// Reports what rules found; returns the first anomaly that asks to stop.
    fn report(&mut self, found: Vec<Anomaly>, reported: &mut Reported) -> Option<Box<Anomaly>> {
        self.has_fired |= !found.is_empty();
        let mut fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        *fired = self.book.fired();
        drop(fired);
        for anomaly in &found {
            tracing::warn!("{anomaly:#}");
            reported.error("anomalies", self.append(anomaly));
        }
        let stops = |anomaly: &Anomaly| anomaly.severity == RuleSeverity::Stop;
        found.into_iter().find(stops).map(Box::new)
    }

    /// Appends a line to `anomalies.jsonl`.
    fn append(&self, anomaly: &Anomaly) -> Result<(), TraceError> {
        let path = self.layout.anomalies();
        let line =
            serde_json::to_string(anomaly).map_err(|e| TraceError::file("write", &path, e))?;
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
            .map_err(|e| TraceError::file("write", &path, e))
    }
}
