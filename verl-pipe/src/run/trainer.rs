//! [`Trainer`]: a whole run with its folder, console and summary.

use std::time::Instant;

use crate::config::to_toml;
use crate::plan::Plan;
use crate::run::console::{Console, Summary};
use crate::run::error::RunError;
use crate::run::folder::{RunFolder, Status};
use crate::run::metrics::StepMetrics;
use crate::run::runner::{Run, RunOptions, StepOutput};

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
    since: Option<Instant>,
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
        let config = to_toml(&plan.pipe).map_err(|e| RunError::Config {
            reason: e.to_string(),
        })?;
        let folder = RunFolder::create(&settings.dir, settings.steps)?;
        let begin = || {
            folder.write_text("config.toml", &config)?;
            folder.write_text("plan.txt", &plan.to_string())?;
            let run = schedule.start(options.run)?;
            folder.write_origin(&run, &options.versions)?;
            Ok(run)
        };
        match begin() {
            Ok(run) => Ok(Trainer {
                run,
                folder,
                console: options.console,
                on_step: Vec::new(),
                summary: Summary::default(),
                samples_per_step: settings.samples_per_step,
                since: None,
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
        let StepOutput {
            mut metrics,
            samples,
        } = self.run.step()?;
        self.tally(&metrics);
        let kept = samples.len().min(self.samples_per_step);
        self.folder.sample(metrics.step, &samples[..kept])?;
        let observed = self.observe(metrics.step)?;
        if let Some(observed) = &observed {
            metrics.values.extend(observed.values.clone());
        }
        self.folder.record(&metrics)?;
        if let Some(console) = &mut self.console {
            console.step(&metrics);
            observed
                .iter()
                .for_each(|observed| console.observed(observed));
        }
        for callback in &mut self.on_step {
            callback(&metrics);
        }
        self.summary.steps = metrics.step;
        self.summary.seconds = self
            .since
            .map_or(0.0, |since| since.elapsed().as_secs_f64());
        Ok(metrics)
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
    /// A run that is cancelled, or finds no signal, saves its models too; `status.json` tells that they are not those
    /// of the target step.
    ///
    /// # Errors
    /// What ended the run. `Ok` means that the target step was reached and all is saved.
    pub fn train(&mut self) -> Result<Summary, RunError> {
        let result = self.run_all();
        if let Some(console) = &mut self.console {
            console.end();
        }
        let step = self.run.steps_done();
        match result {
            Ok(()) => {
                self.folder.set_status(Status::Finished, step, "")?;
                let summary = self.summary.clone();
                if let Some(console) = &mut self.console {
                    console.line(summary.to_string().trim_end());
                }
                Ok(summary)
            }
            Err(error) => {
                let cancelled = matches!(error, RunError::Cancelled { .. });
                // Both end between two steps as far as weights go, so what was learnt is whole.
                let sound = cancelled || matches!(error, RunError::NoSignal { .. });
                if sound
                    && step > 0
                    && let Err(unsaved) = self.save_models()
                {
                    tracing::error!("{unsaved}");
                }
                let status = if cancelled {
                    Status::Cancelled
                } else {
                    Status::Failed
                };
                if let Err(unsaved) = self.folder.set_status(status, step, &error.to_string()) {
                    tracing::error!("{unsaved}");
                }
                Err(error)
            }
        }
    }

    fn run_all(&mut self) -> Result<(), RunError> {
        self.begin()?;
        while self.run.steps_done() < self.target() {
            self.step()?;
        }
        self.save_models()
    }

    /// Saves the models that the run settings name: by default those that a stage updates.
    fn save_models(&mut self) -> Result<(), RunError> {
        let plan = &self.run.schedule().plan;
        let names = plan.pipe.run.save.clone().unwrap_or_else(|| {
            plan.models
                .iter()
                .filter(|m| !m.updaters.is_empty())
                .map(|m| m.name.clone())
                .collect()
        });
        for name in names {
            self.folder.save_model(&mut self.run, &name)?;
        }
        Ok(())
    }
}
