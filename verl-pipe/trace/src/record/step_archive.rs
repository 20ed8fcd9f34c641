//! Steps in full on disk: which stages the settings select, and what is written of a step.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use verl_rules::config::{TraceConfig, bytes_of};
use verl_rules::format::FORMAT;
use verl_words::diagnostic::quoted;

use crate::files::{
    ROWS_MISSING, Reason, StepManifest, TraceError, TraceFormat, TraceWriter, parse,
};
use crate::record::open_step::{OpenStep, StateRefs};
use crate::record::reported::Reported;
use crate::record::step_data::{StageAbout, StepFiles, StepHeader};

/// Writes steps in full.
///
/// Between calls: every step in `complete` is on disk with all its stages, `used` counts all finished files, and
/// `unrecorded` contains the selected stages that have received no rows and have no file.
pub(crate) struct StepArchive {
    writer: TraceWriter,
    stages: Arc<[StageAbout]>,
    config: TraceConfig,
    format: TraceFormat,
    /// Bytes of steps and states on disk.
    used: Arc<AtomicU64>,
    /// Steps that the flight recorder wrote without their state.
    pub(super) wanted: Arc<Mutex<Vec<u64>>>,
    /// Steps that are on disk with all their stages.
    complete: BTreeSet<u64>,
    /// Stages to record by name that have received no rows yet.
    unrecorded: BTreeSet<usize>,
    /// A step with a stage to record in full has begun.
    has_begun: bool,
}

impl StepArchive {
    pub(crate) fn new(
        writer: TraceWriter,
        stages: Arc<[StageAbout]>,
        config: TraceConfig,
        format: TraceFormat,
        used: Arc<AtomicU64>,
        wanted: Arc<Mutex<Vec<u64>>>,
    ) -> StepArchive {
        // Steps beyond the end of the run were reported before it started.
        let asked = config.captures_up_to(format.steps);
        let named =
            |about: &StageAbout| about.debug || asked && config.stages.contains(&about.name);
        let unrecorded = stages.iter().enumerate();
        let unrecorded = unrecorded.filter(|(_, about)| about.in_step && named(about));
        StepArchive {
            unrecorded: unrecorded.map(|(stage, _)| stage).collect(),
            writer,
            stages,
            config,
            format,
            used,
            wanted,
            complete: BTreeSet::new(),
            has_begun: false,
        }
    }

    /// Bytes of steps and states on disk.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether all stages of a step are on disk.
    pub(crate) fn is_complete(&self, step: u64) -> bool {
        self.complete.contains(&step)
    }

    /// A step has begun.
    pub(crate) fn begin(&mut self, step: u64) {
        self.has_begun |= self.chosen(step).contains(&true);
    }

    /// Rows of a stage to record in full have arrived.
    pub(crate) fn received(&mut self, stage: usize) {
        self.unrecorded.remove(&stage);
    }

    /// The warning about stages that were to be recorded and received no rows, with the reason.
    pub(crate) fn unrecorded_warning(&self) -> Option<String> {
        let names = self
            .unrecorded
            .iter()
            .map(|stage| self.stages[*stage].name.as_str());
        let why = match self.has_begun {
            true => "no rows arrived in the steps to record in full",
            false => "the run ended before a step to record in full",
        };
        (!self.unrecorded.is_empty()).then(|| {
            format!(
                "trace: nothing is recorded for {}, selected by `trace.stages` or `debug`: {why}",
                quoted(names)
            )
        })
    }

    /// Whether the settings record a stage in full in this step.
    pub(crate) fn is_chosen(&self, step: u64, stage: usize) -> bool {
        let about = &self.stages[stage];
        let by_step = self.config.captures_step(step) && self.config.captures_stage(&about.name);
        about.debug || by_step
    }

    /// Whether the settings record each stage in full in this step.
    pub(crate) fn chosen(&self, step: u64) -> Vec<bool> {
        let stages = 0..self.stages.len();
        stages.map(|stage| self.is_chosen(step, stage)).collect()
    }

    /// Moves the rows of the stages in `chosen` from memory to the unfinished files.
    pub(crate) fn spill(&self, open: &mut OpenStep, chosen: &[bool]) -> Result<(), TraceError> {
        let header = header(&self.stages, &self.format, &open.step_state());
        let chosen = |stage: usize| chosen[stage];
        self.writer.take_room(open.data.bytes as u64)?;
        open.files.spill(&self.writer, &header, &open.data, &chosen)
    }

    /// Writes the step's rows and its manifest, if they fit in the budget.
    pub(crate) fn write(
        &mut self,
        open: &mut OpenStep,
        reason: Reason,
        chosen: &[bool],
        reported: &mut Reported,
    ) {
        let (step, budget) = (open.data.step, bytes_of(self.config.budget_mb));
        let size = open.data.bytes as u64 + open.files.bytes_written();
        let used = self.used();
        if used + size > budget {
            open.files = StepFiles::default();
            if reported.is_first("budget") {
                tracing::warn!(
                    "trace: step {step} is not recorded in full, nor is any later step of its size: it takes about {:.1} MB, and {:.1} MB of {} MB (`trace.budget_mb`) are used; statistics are still recorded",
                    size as f64 / f64::from(1 << 20),
                    used as f64 / f64::from(1 << 20),
                    self.config.budget_mb
                );
            }
            return;
        }
        let written = self.try_write(open, reason, chosen);
        if written.is_ok() && chosen.iter().all(|chosen| *chosen) {
            self.complete.insert(step);
        }
        reported.error("a step", written);
    }

    /// Writes the stages in `chosen`. Stages of the step that are on disk with all their rows are left as they are,
    /// since memory may have fewer of their rows.
    ///
    /// The manifest is written last and lists only finished files, those of an earlier manifest of the step included.
    /// So a reader that finds a manifest finds all files that it lists, even if the process is killed in between.
    fn try_write(
        &mut self,
        open: &mut OpenStep,
        reason: Reason,
        chosen: &[bool],
    ) -> Result<(), TraceError> {
        let step = open.data.step;
        let before = match open.data.on_disk.is_empty() {
            true => None,
            false => Some(self.manifest(step)?),
        };
        let on_disk = &open.data.on_disk;
        let missing = chosen.iter().enumerate();
        let missing: Vec<bool> = missing
            .map(|(stage, chosen)| *chosen && !on_disk.contains(&stage))
            .collect();
        let spilt = self.spill(open, &missing);
        let files = std::mem::take(&mut open.files);
        spilt?;
        let mut stages = files.finish()?;
        let written = stages.iter().map(|file| file.bytes).sum::<u64>();
        self.used.fetch_add(written, Ordering::Relaxed);
        let mut notes = Vec::new();
        if open.data.lost || open.data.dropped && reason != Reason::Asked {
            notes.push(ROWS_MISSING.to_owned());
        }
        if !open.data.ended {
            notes.push(
                "the step ended with an error; only what came before it is recorded".to_owned(),
            );
        }
        let StateRefs {
            mut models,
            stages: mut stage_states,
        } = open.step_state();
        if let Some(before) = before {
            stages.extend(before.stages);
            let place = |name: &str| self.stages.iter().position(|about| about.name == name);
            stages.sort_by_key(|file| place(&file.stage));
            if models.is_empty() {
                (models, stage_states) = (before.models, before.stage_states);
            }
        }
        let stateless = models.is_empty();
        // The flight recorder may have written stages that were not chosen.
        let about = &self.stages;
        let is_written = |stage: &usize| stages.iter().any(|file| file.stage == about[*stage].name);
        self.unrecorded.retain(|stage| !is_written(stage));
        self.writer.end_step(&StepManifest {
            format: FORMAT,
            step,
            reason,
            ended: open.data.ended,
            stages,
            models,
            stage_states,
            notes,
        })?;
        let chosen = chosen.iter().enumerate().filter(|(_, chosen)| **chosen);
        open.data.on_disk.extend(chosen.map(|(stage, _)| stage));
        if reason != Reason::Asked && stateless {
            let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
            wanted.push(step);
        }
        Ok(())
    }

    /// The manifest of a step that is on disk.
    fn manifest(&self, step: u64) -> Result<StepManifest, TraceError> {
        let path = self.writer.layout().manifest(step);
        let text = fs::read_to_string(&path).map_err(|e| TraceError::file("read", &path, e))?;
        parse(&path, &text)
    }

    /// Adds its state to a step that is on disk.
    pub(crate) fn add_state(&self, step: u64, state: StateRefs) -> Result<(), TraceError> {
        let manifest = self.manifest(step)?;
        self.writer.end_step(&StepManifest {
            models: state.models,
            stage_states: state.stages,
            ..manifest
        })
    }
}

fn header<'a>(stages: &'a [StageAbout], format: &TraceFormat, state: &StateRefs) -> StepHeader<'a> {
    StepHeader {
        stages,
        seed: format.seed,
        steps: format.steps,
        models: state
            .models
            .iter()
            .map(|(name, reference)| (name.clone(), reference.version.clone()))
            .collect(),
    }
}
