//! [`Trainer`]: a complete run with its folder, console and summary.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tracing::dispatcher::{DefaultGuard, Dispatch};
use verl_declare::config::to_toml;
use verl_plan::Plan;
use verl_rules::config::TraceWeights;
use verl_run::error::RunError;
use verl_run::metrics::StepMetrics;
use verl_run::records::WarningLevel;
use verl_run::runner::{Run, RunOptions, RunSnapshot, StepOutput};
use verl_run::space::{FreeSpace, Room};
use verl_run::spans::SpanKind;
use verl_run::tap::Both;
use verl_trace::files::describe_pipeline;
use verl_trace::record::Recorder;

use crate::console::{Console, Summary};
use crate::ending::Failure;
use crate::folder::RunFolder;
use crate::state_file::ReportCounts;
use crate::timeline::{Kernels, Timeline, start_line};
use crate::timeline_file::TimelineFile;
use crate::warnings::{SharedConsole, Warnings, set_listener};

/// File of a run folder with the schema of `config.toml`, for editors.
const CONFIG_SCHEMA: &str = "config.schema.json";

/// Callback that is called after each step.
type OnStep = Box<dyn FnMut(&StepMetrics) + Send>;

/// Runs a plan: [`Trainer::train`] runs all steps; [`Trainer::step`] runs one at a time, and [`Trainer::finish`] at the
/// end saves the models.
///
/// Warnings of the run, its stages and its models are printed on the console and written to `warnings.jsonl` in the run
/// folder. If the program has a [`tracing`] subscriber, it receives them instead of the console.
///
/// A trainer that is dropped without [`Trainer::finish`] also saves the models, but cannot return errors.
///
/// ```
/// use verl_pipe::keys::PROMPTS;
/// use verl_pipe::batch::{Batch, RaggedColumn, RowId};
/// use verl_pipe::pipe::{DataPipe, RunConfig, stage_fn};
/// use verl_pipe::plan::Plannable;
/// use verl_pipe::run::trainer::{Trainer, TrainerOptions};
/// use verl_pipe::schedule::batching::BatchConfig;
/// use verl_pipe::stage::{RowRule, StageSpec};
///
/// let temp = tempfile::tempdir()?;
/// let source = StageSpec::new().rows(RowRule::Source).writes(PROMPTS);
/// let plan = DataPipe::new("one_row")
///     .run(RunConfig { dir: temp.path().join("run"), steps: 3, ..RunConfig::default() })
///     .batch(BatchConfig { prompts: 1, ..BatchConfig::default() })
///     .add_stage("source", stage_fn(source, |_, ctx| {
///         let mut row = Batch::with_rows(&[RowId::prompt(0, ctx.step)?]);
///         row.put(&PROMPTS, RaggedColumn::from_rows([[1u32]]))?;
///         ctx.emit(row)
///     }))
///     .plan()
///     .expect("a plan");
/// let mut trainer = Trainer::with_options(plan, TrainerOptions::default())?;
/// for _ in 0..3 {
///     trainer.step()?;
/// }
/// assert_eq!(trainer.finish()?.steps, 3);
/// let status = std::fs::read_to_string(temp.path().join("run/status.json"))?;
/// assert!(status.contains("\"finished\""));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Trainer {
    pub(super) run: Run,
    pub(super) folder: RunFolder,
    pub(super) console: Option<SharedConsole>,
    on_step: Vec<OnStep>,
    pub(super) summary: Summary,
    samples_per_step: usize,
    pub(super) recorder: Option<Arc<Recorder>>,
    /// State before each of the last steps, for the flight recorder.
    snapshots: VecDeque<RunSnapshot>,
    since: Option<Instant>,
    /// Until the first step is done.
    timeline: Option<Timeline>,
    /// Where and when calls ran.
    timeline_file: TimelineFile,
    /// Models that have been saved.
    pub(super) saved: BTreeSet<String>,
    pub(super) warnings: Warnings,
    /// Receives the warnings of this run.
    listener: Dispatch,
    pub(super) room: Room,
    /// How the last step failed, if it did.
    pub(super) failure: Option<Failure>,
    /// The run has ended; no further step is run.
    pub(super) ended: bool,
    /// Some model could not be saved.
    pub(super) unsaved: bool,
}

/// Options of a trainer besides the plan.
#[derive(Default)]
pub struct TrainerOptions {
    /// Threads, cancellation, tap.
    pub run: RunOptions,
    /// Where lines are printed; none are printed if absent.
    pub console: Option<Console>,
    /// Further versions for `versions.json`: name and version.
    pub versions: Vec<(String, String)>,
    /// Schema of pipeline files. It is written next to `config.toml`, which then refers to it for editors.
    pub schema: Option<serde_json::Value>,
    /// When the work on the plan started, for `start.json`.
    pub began: Option<Instant>,
    /// Information about kernels that are compiled below the engine.
    pub kernels: Option<Arc<dyn Kernels>>,
    /// The warnings of the plan have already been shown; they are still written to the run folder.
    pub plan_warnings_shown: bool,
    /// Returns the free space of the disk, for disks whose quotas the system does not report; if absent, the system is
    /// asked.
    pub free_space: Option<FreeSpace>,
}

impl Trainer {
    /// A trainer that writes its lines to standard output.
    ///
    /// # Errors
    /// See [`Trainer::with_options`].
    pub fn new(plan: Plan) -> Result<Trainer, RunError> {
        let console = Console::new(plan.pipe().run.steps, plan.pipe().run.console_every);
        Self::with_options(
            plan,
            TrainerOptions {
                console: Some(console),
                ..TrainerOptions::default()
            },
        )
    }

    /// Creates the run folder, then opens data and loads models. The folder is removed again if that fails. Nothing is
    /// written to standard output without [`TrainerOptions::console`].
    ///
    /// # Errors
    /// If the plan cannot be placed, the run folder already exists, or [`Run::start`] fails.
    pub fn with_options(plan: Plan, options: TrainerOptions) -> Result<Trainer, RunError> {
        let console = options.console.map(|mut console| {
            console.show(&plan);
            Arc::new(Mutex::new(console))
        });
        let warnings = Warnings::new(console.clone());
        let listener = warnings.listener();
        let _guard = set_listener(&listener);
        let schedule = plan.schedule().map_err(RunError::Schedule)?;
        let settings = &plan.pipe().run;
        let room = Room::of(&settings.dir, options.free_space);
        let mut config = to_toml(plan.pipe()).map_err(|e| RunError::Config {
            reason: e.to_string(),
        })?;
        if options.schema.is_some() {
            config.insert_str(0, &format!("#:schema ./{CONFIG_SCHEMA}\n"));
        }
        let folder = RunFolder::create_in(&settings.dir, settings.steps, room.clone())?;
        warnings.write_into(folder.path());
        if let Some(reason) = folder.replaced() {
            tracing::warn!(
                "replaced `{}`, which contained a run that ended before completing its first step; that run ended with: {reason}",
                folder.path().display()
            );
        }
        for finding in plan.warnings() {
            match options.plan_warnings_shown {
                true => warnings.note(WarningLevel::Warning, "plan", &finding.to_string()),
                false => tracing::warn!("{finding}"),
            }
        }
        let timeline_mb = plan.pipe().trace.timeline_mb;
        let timeline_file = TimelineFile::new(folder.path(), timeline_mb, room.clone());
        let begin = || {
            room.reserve_for(&plan)?;
            folder.write_text("config.toml", &config)?;
            if let Some(schema) = &options.schema {
                folder.write_text(CONFIG_SCHEMA, &schema.to_string())?;
            }
            folder.write_text("plan.txt", &plan.to_string())?;
            if plan.pipe().records_in_full() {
                folder.write_text("schema.json", &describe_pipeline(&plan))?;
            }
            let recorder =
                Recorder::start_in(folder.path(), &schedule, &room).map_err(|error| {
                    RunError::Trace {
                        code: error.code(),
                        source: error.into(),
                    }
                })?;
            let mut run = options.run;
            run.run_dir = Some(folder.path().to_owned());
            if let Some(recorder) = &recorder {
                run.tap = Arc::new(Both(run.tap, timeline_file.timed(recorder.clone())));
            }
            let mut timeline = Timeline::load(schedule.plan(), options.began, options.kernels);
            let run = Run::start(schedule, run)?;
            timeline.loaded();
            folder.write_origin(&run, &options.versions)?;
            Ok((run, recorder, timeline))
        };
        match begin() {
            Ok((run, recorder, timeline)) => Ok(Trainer {
                recorder,
                snapshots: VecDeque::new(),
                run,
                folder,
                console,
                on_step: Vec::new(),
                summary: Summary::default(),
                samples_per_step: settings.samples_per_step,
                since: None,
                timeline: Some(timeline),
                timeline_file,
                saved: BTreeSet::new(),
                warnings,
                listener,
                room,
                failure: None,
                ended: false,
                unsaved: false,
            }),
            Err(error) => {
                folder.discard();
                Err(error)
            }
        }
    }

    /// Calls `callback` after each step with its metrics, those of observers included.
    pub fn on_step(&mut self, callback: impl FnMut(&StepMetrics) + Send + 'static) {
        self.on_step.push(Box::new(callback));
    }

    /// The underlying run.
    pub fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    pub(super) fn target(&self) -> u64 {
        self.run.schedule().plan().context().steps
    }

    /// Runs one step and the observers that are due, including those before the first step, and records it.
    ///
    /// # Errors
    /// The error that ended the step, or a file that cannot be written. [`RunError::Ended`] after [`Trainer::finish`].
    pub fn step(&mut self) -> Result<StepMetrics, RunError> {
        if self.ended {
            let step = self.run.steps_done();
            return Err(RunError::Ended { step });
        }
        let _guard = self.set_listener();
        self.failure = None;
        self.try_step().inspect_err(|error| self.fail(error))
    }

    fn try_step(&mut self) -> Result<StepMetrics, RunError> {
        self.begin()?;
        self.warnings.at_step(self.run.steps_done() + 1);
        let since = Instant::now();
        self.record_state();
        self.timeline_file.note(SpanKind::Snapshot, "state", since);
        let began = Instant::now();
        let output = self.run.step();
        let ended = Instant::now();
        if output.is_err() {
            let (step, spans) = (self.run.steps_done() + 1, self.run.failed_spans());
            self.timeline_file.failed(step, spans, began, ended);
        }
        self.record_late_states();
        let rows_written = self.folder.row_errors(self.run.row_errors());
        let StepOutput {
            mut metrics,
            samples,
            spans,
        } = output?;
        rows_written?;
        self.update_counts();
        self.tally(&metrics);
        self.record_metrics(&metrics);
        let kept = samples.len().min(self.samples_per_step);
        self.folder.sample(metrics.step, &samples[..kept])?;
        self.timeline_file.note(SpanKind::Record, "samples", ended);
        let observed = self.observe(metrics.step);
        if let Ok(Some(observed)) = &observed {
            metrics.values.extend(observed.values.clone());
        }
        self.room
            .step_done(metrics.step, self.run.schedule().plan());
        // The models have been updated, so the step is recorded even if an observer failed.
        let since = Instant::now();
        self.folder.record(&metrics)?;
        self.timeline_file.note(SpanKind::Record, "metrics", since);
        self.timeline_file.step(&metrics, spans, began);
        if let Some(timeline) = self.timeline.take() {
            let start = timeline.first_step(&metrics);
            self.folder.write_start(&start)?;
            self.print(&start_line(&start));
        }
        self.summary.steps = metrics.step;
        self.summary.seconds = self
            .since
            .map_or(0.0, |since| since.elapsed().as_secs_f64());
        let observed = observed?;
        self.with_console(|console| {
            console.step(&metrics);
            observed
                .iter()
                .for_each(|observed| console.observed(observed));
        });
        for callback in &mut self.on_step {
            callback(&metrics);
        }
        Ok(metrics)
    }

    /// Passes the state before the next step to the recorder, if the step is recorded in full.
    fn record_state(&mut self) {
        let step = self.run.steps_done() + 1;
        let Some(recorder) = &self.recorder else {
            return;
        };
        let Some(weights) = recorder.wants_state(step) else {
            self.keep_snapshot();
            return;
        };
        let full = weights == TraceWeights::Full;
        match self.run.state(full, &recorder.stored_versions()) {
            Ok(state) => recorder.state(step, state),
            Err(error) => tracing::warn!("step {step} is traced without its state: {error}"),
        }
    }

    /// Keeps a snapshot of the state before the next step, in case the flight recorder writes it.
    fn keep_snapshot(&mut self) {
        let kept = self.recorder.as_ref().map_or(0, |r| r.num_snapshots());
        if kept == 0 {
            return;
        }
        match self.run.quick_snapshot() {
            Ok(snapshot) => self.snapshots.push_back(snapshot),
            Err(error) => {
                tracing::warn!("the flight recorder has no snapshot of this state: {error}")
            }
        }
        while self.snapshots.len() > kept {
            self.snapshots.pop_front();
        }
    }

    /// Passes the state of steps that the flight recorder wrote to the recorder.
    pub(super) fn record_late_states(&mut self) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        for step in recorder.wanted_states() {
            let mut snapshots = self.snapshots.iter();
            let Some(snapshot) = snapshots.find(|snapshot| snapshot.step + 1 == step) else {
                continue;
            };
            match self.run.store(snapshot, &recorder.stored_versions()) {
                Ok(state) => recorder.late_state(step, state),
                Err(error) => {
                    tracing::warn!("step {step} is traced without its state: {error}");
                    if matches!(error, RunError::Lost { .. }) {
                        return;
                    }
                }
            }
        }
    }

    /// Passes the metrics of a step to the recorder.
    fn record_metrics(&mut self, metrics: &StepMetrics) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        if recorder.wants_versions(metrics.step) {
            match self.run.versions() {
                Ok(versions) => recorder.versions(metrics.step, versions),
                Err(error) => tracing::warn!("versions of weights are not checked: {error}"),
            }
        }
        recorder.metrics(metrics);
    }

    /// Runs the observers before the first step, once.
    pub(super) fn begin(&mut self) -> Result<(), RunError> {
        if self.since.is_some() {
            return Ok(());
        }
        self.since = Some(Instant::now());
        let Some(metrics) = self.observe(0)? else {
            return Ok(());
        };
        self.summary.before = self.summary.after.clone();
        self.summary.samples_before = std::mem::take(&mut self.summary.samples_after);
        self.folder.record(&metrics)?;
        self.with_console(|console| console.observed(&metrics));
        Ok(())
    }

    fn observe(&mut self, step: u64) -> Result<Option<StepMetrics>, RunError> {
        if !self.run.observes(step) {
            return Ok(None);
        }
        let since = Instant::now();
        let StepOutput {
            metrics,
            samples,
            spans,
        } = self.run.observe(step)?;
        self.timeline_file.observed(spans, since);
        self.tally(&metrics);
        self.folder.sample(step, &samples)?;
        self.summary.after = metrics
            .values
            .iter()
            .filter(|(name, _)| !name.starts_with("perf/"))
            .map(|(n, v)| (n.clone(), *v))
            .collect();
        self.summary.samples_after = samples;
        Ok(Some(metrics))
    }

    fn tally(&mut self, metrics: &StepMetrics) {
        for (name, seconds) in &metrics.values {
            let stage = name
                .strip_prefix("perf/stage/")
                .and_then(|rest| rest.strip_suffix("_s"));
            if let Some(stage) = stage {
                *self
                    .summary
                    .stage_seconds
                    .entry(stage.to_owned())
                    .or_default() += seconds;
            }
        }
    }

    /// Until the returned guard is dropped, warnings on this thread belong to this run.
    pub(super) fn set_listener(&self) -> DefaultGuard {
        set_listener(&self.listener)
    }

    /// Updates the counts of warnings and anomalies for `status.json`.
    pub(super) fn update_counts(&mut self) {
        let recorder = self.recorder.as_ref();
        self.folder.set_counts(ReportCounts {
            warnings: self.warnings.count(),
            anomalies: recorder.map(|r| r.anomalies()).unwrap_or_default(),
        });
    }

    pub(super) fn print(&self, text: &str) {
        self.with_console(|console| console.line(text));
    }

    pub(super) fn with_console(&self, write: impl FnOnce(&mut Console)) {
        if let Some(console) = &self.console {
            write(&mut console.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}
