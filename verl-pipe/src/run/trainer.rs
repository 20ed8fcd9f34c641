//! [`Trainer`]: a whole run with its folder, console and summary.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::config::to_toml;
use crate::diagnostic::quoted;
use crate::plan::Plan;
use crate::run::console::{Console, Summary};
use crate::run::error::RunError;
use crate::run::folder::{RunFolder, RunState, Status};
use crate::run::metrics::StepMetrics;
use crate::run::runner::{LeftOver, Run, RunOptions, RunSnapshot, StepOutput};
use crate::run::timeline::{Kernels, Timeline, start_line};
use crate::trace::config::TraceWeights;
use crate::trace::describe::describe;
use crate::trace::recorder::Recorder;
use crate::trace::tap::Both;

/// File of a run folder that tells editors what `config.toml` may hold.
const CONFIG_SCHEMA: &str = "config.schema.json";

/// What is called after each step.
type OnStep = Box<dyn FnMut(&StepMetrics) + Send>;

/// Runs a plan: [`Trainer::step`] for one step, [`Trainer::train`] for all.
pub struct Trainer {
    run: Run,
    folder: RunFolder,
    console: Option<Console>,
    on_step: Vec<OnStep>,
    summary: Summary,
    samples_per_step: usize,
    recorder: Option<Arc<Recorder>>,
    /// State before each of the last steps, for the flight recorder.
    snapshots: VecDeque<RunSnapshot>,
    since: Option<Instant>,
    /// Until the first step is done.
    timeline: Option<Timeline>,
    /// Models that were saved.
    saved: BTreeSet<String>,
}

/// How a trainer behaves besides what the plan says.
#[derive(Default)]
pub struct TrainerOptions {
    /// Threads, cancellation, tap.
    pub run: RunOptions,
    /// Where lines go; none are written when absent.
    pub console: Option<Console>,
    /// Further versions for `versions.json`: name and version.
    pub versions: Vec<(String, String)>,
    /// Schema of pipeline files, to be written beside `config.toml`, which then names it for editors.
    pub schema: Option<serde_json::Value>,
    /// When the work on the plan began, for `start.json`.
    pub began: Option<Instant>,
    /// What compiles kernels below the engine.
    pub kernels: Option<Arc<dyn Kernels>>,
}

impl Trainer {
    /// A trainer that writes its lines to standard output.
    ///
    /// # Errors
    /// As [`Trainer::with_options`].
    pub fn new(plan: Plan) -> Result<Trainer, RunError> {
        let console = Console::new(plan.pipe.run.steps, plan.pipe.run.console_every);
        Self::with_options(
            plan,
            TrainerOptions {
                console: Some(console),
                ..TrainerOptions::default()
            },
        )
    }

    /// Makes the run folder, then opens data and loads models. The folder is removed again when that fails.
    ///
    /// # Errors
    /// A plan that cannot be placed, a run folder that exists, and all that [`Schedule::start`] tells.
    ///
    /// [`Schedule::start`]: crate::schedule::placement::Schedule::start
    pub fn with_options(plan: Plan, options: TrainerOptions) -> Result<Trainer, RunError> {
        let schedule = plan.schedule().map_err(RunError::Schedule)?;
        let settings = &plan.pipe.run;
        let mut config = to_toml(&plan.pipe).map_err(|e| RunError::Config {
            reason: e.to_string(),
        })?;
        if options.schema.is_some() {
            config.insert_str(0, &format!("#:schema ./{CONFIG_SCHEMA}\n"));
        }
        let folder = RunFolder::create(&settings.dir, settings.steps)?;
        let begin = || {
            folder.write_text("config.toml", &config)?;
            if let Some(schema) = &options.schema {
                folder.write_text(CONFIG_SCHEMA, &schema.to_string())?;
            }
            folder.write_text("plan.txt", &plan.to_string())?;
            if plan.pipe.records_in_full() {
                folder.write_text("schema.json", &describe(&plan))?;
            }
            let recorder = Recorder::start(folder.path(), &schedule)?;
            let mut run = options.run;
            run.run_dir = Some(folder.path().to_owned());
            if let Some(recorder) = &recorder {
                run.tap = Arc::new(Both(run.tap, recorder.clone()));
            }
            let mut timeline = Timeline::load(&schedule.plan, options.began, options.kernels);
            let run = schedule.start(run)?;
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
                console: options.console,
                on_step: Vec::new(),
                summary: Summary::default(),
                samples_per_step: settings.samples_per_step,
                since: None,
                timeline: Some(timeline),
                saved: BTreeSet::new(),
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

    /// The run below.
    pub fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    /// The run folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    fn target(&self) -> u64 {
        self.run.schedule().plan.context.steps
    }

    /// Runs one step with the observers that are due, before the first step too, and records it.
    ///
    /// # Errors
    /// What ended the step, or a disk that refuses.
    pub fn step(&mut self) -> Result<StepMetrics, RunError> {
        self.begin()?;
        self.record_state();
        let output = self.run.step();
        self.record_late_states();
        let StepOutput {
            mut metrics,
            samples,
        } = output?;
        self.tally(&metrics);
        self.record_metrics(&metrics);
        let kept = samples.len().min(self.samples_per_step);
        self.folder.sample(metrics.step, &samples[..kept])?;
        let observed = self.observe(metrics.step);
        if let Ok(Some(observed)) = &observed {
            metrics.values.extend(observed.values.clone());
        }
        // The step is learnt, so it is recorded whatever became of its observers.
        self.folder.record(&metrics)?;
        if let Some(timeline) = self.timeline.take() {
            let start = timeline.first_step(&metrics);
            self.folder.write_start(&start)?;
            self.say(&start_line(&start));
        }
        self.summary.steps = metrics.step;
        self.summary.seconds = self
            .since
            .map_or(0.0, |since| since.elapsed().as_secs_f64());
        let observed = observed?;
        if let Some(console) = &mut self.console {
            console.step(&metrics);
            observed
                .iter()
                .for_each(|observed| console.observed(observed));
        }
        for callback in &mut self.on_step {
            callback(&metrics);
        }
        Ok(metrics)
    }

    /// Tells the recorder the state before the next step, where the step is recorded in full.
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
        match self.run.state(full, &recorder.kept_versions()) {
            Ok(state) => recorder.state(step, state),
            Err(error) => tracing::warn!("step {step} is traced without its state: {error}"),
        }
    }

    /// Keeps the state before the next step, in case the flight recorder writes it.
    fn keep_snapshot(&mut self) {
        let kept = self.recorder.as_ref().map_or(0, |r| r.kept_snapshots());
        if kept == 0 {
            return;
        }
        match self.run.quick_snapshot() {
            Ok(snapshot) => self.snapshots.push_back(snapshot),
            Err(error) => tracing::warn!("the flight recorder goes without this state: {error}"),
        }
        while self.snapshots.len() > kept {
            self.snapshots.pop_front();
        }
    }

    /// Gives the recorder the state of steps that the flight recorder wrote.
    fn record_late_states(&mut self) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        for step in recorder.wanted_states() {
            let mut snapshots = self.snapshots.iter();
            let Some(snapshot) = snapshots.find(|snapshot| snapshot.step + 1 == step) else {
                continue;
            };
            match self.run.store(snapshot, &recorder.kept_versions()) {
                Ok(state) => recorder.late_state(step, state),
                Err(error) => tracing::warn!("step {step} is traced without its state: {error}"),
            }
        }
    }

    /// Tells the recorder what came of a step.
    fn record_metrics(&mut self, metrics: &StepMetrics) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        if recorder.wants_versions(metrics.step) {
            match self.run.versions() {
                Ok(versions) => recorder.versions(metrics.step, versions),
                Err(error) => tracing::warn!("versions are not looked at: {error}"),
            }
        }
        recorder.metrics(metrics);
    }

    /// Once: observers before the first step.
    fn begin(&mut self) -> Result<(), RunError> {
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
        if let Some(console) = &mut self.console {
            console.observed(&metrics);
        }
        Ok(())
    }

    fn observe(&mut self, step: u64) -> Result<Option<StepMetrics>, RunError> {
        if !self.run.observes(step) {
            return Ok(None);
        }
        let StepOutput { metrics, samples } = self.run.observe(step)?;
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

    /// Runs all steps that are left, saves models, and writes how it ended to `status.json`.
    ///
    /// A run that ends early saves what it learnt too, as the last whole step left it. Where the step that failed has
    /// changed a model already, that is saved as it is, and `status.json` lists it as partial.
    ///
    /// # Errors
    /// What ended the run. `Ok` means that the target step was reached and all is saved.
    pub fn train(&mut self) -> Result<Summary, RunError> {
        let ran = self.run_steps();
        if let Some(recorder) = self.recorder.clone() {
            recorder.sync();
            self.record_late_states();
            recorder.close();
        }
        if let Some(console) = &mut self.console {
            console.end();
        }
        let unsaved = if ran.is_ok() || self.has_learnt() {
            self.save_models().err()
        } else {
            None
        };
        let ended = match (ran, unsaved) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(error)) => Err(error),
            (Err(error), unsaved) => {
                if let Some(unsaved) = unsaved {
                    tracing::error!("{unsaved}");
                }
                Err(error)
            }
        };
        match ended {
            Ok(()) => {
                let state = self.state(Status::Finished);
                self.folder.set_state(&state)?;
                let summary = self.summary.clone();
                self.say(summary.to_string().trim_end());
                Ok(summary)
            }
            Err(error) => {
                self.end_early(&error);
                Err(error)
            }
        }
    }

    fn run_steps(&mut self) -> Result<(), RunError> {
        self.begin()?;
        while self.run.steps_done() < self.target() {
            self.step()?;
        }
        Ok(())
    }

    /// Tells how a run ended before its target.
    fn end_early(&mut self, error: &RunError) {
        let status = match error {
            RunError::Cancelled { .. } => Status::Cancelled,
            _ => Status::Failed,
        };
        let state = RunState {
            reason: error.to_string(),
            ..self.state(status)
        };
        if !state.saved.is_empty() {
            let saved = quoted(state.saved.iter().map(String::as_str));
            let mut line = format!("saved as step {} left it: {saved}", state.step);
            if !state.partial.is_empty() {
                let partial = quoted(state.partial.iter().map(String::as_str));
                line.push_str(&format!(
                    "; with a part of step {}: {partial}",
                    state.step + 1
                ));
            }
            self.say(&line);
        }
        if let Err(unwritten) = self.folder.set_state(&state) {
            // A disk that refused one file refuses the other, and one message is enough.
            match error {
                RunError::File { .. } => tracing::debug!("{unwritten}"),
                _ => tracing::error!("{unwritten}"),
            }
        }
    }

    fn state(&self, status: Status) -> RunState {
        let left = self.run.left_over();
        RunState {
            status,
            step: self.run.steps_done(),
            reason: String::new(),
            saved: self.saved.iter().cloned().collect(),
            partial: left
                .keys()
                .filter(|name| self.saved.contains(*name))
                .cloned()
                .collect(),
        }
    }

    fn say(&mut self, text: &str) {
        if let Some(console) = &mut self.console {
            console.line(text);
        }
    }

    /// Whether some model is no longer what it was when it was loaded.
    fn has_learnt(&self) -> bool {
        self.run.steps_done() > 0 || !self.run.left_over().is_empty()
    }

    /// Saves the models that the run settings name: by default those that a stage updates. One that cannot be saved
    /// keeps no other from it; the first error is told.
    fn save_models(&mut self) -> Result<(), RunError> {
        let plan = &self.run.schedule().plan;
        let names = plan.pipe.run.save.clone().unwrap_or_else(|| {
            plan.models
                .iter()
                .filter(|m| !m.updaters.is_empty())
                .map(|m| m.name.clone())
                .collect()
        });
        let mut first = Ok(());
        for name in names {
            if self.saved.contains(&name) {
                continue;
            }
            match self.save_model(&name) {
                Ok(()) => drop(self.saved.insert(name)),
                Err(error) if first.is_ok() => first = Err(error),
                Err(error) => tracing::error!("{error}"),
            }
        }
        first
    }

    fn save_model(&mut self, name: &str) -> Result<(), RunError> {
        if self.run.left_over().get(name) == Some(&LeftOver::Torn) {
            return Err(RunError::State {
                what: "model",
                name: name.to_owned(),
                action: "save",
                source: "an optimiser step on it panicked, so its weights may be half of one step and half of another"
                    .into(),
            });
        }
        self.folder.save_model(&mut self.run, name).map(drop)
    }
}
