//! How a trainer's run ends: models are saved, and `status.json` tells how far it came and why it ended.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::diagnostic::quoted;
use crate::plan::display::bytes;
use crate::run::channel::unwinding_panic;
use crate::run::console::{Console, Summary};
use crate::run::error::RunError;
use crate::run::folder::{RunState, Status};
use crate::run::runner::LeftOver;
use crate::run::space::saved_models;
use crate::run::trainer::Trainer;

/// Folders of one name that a process may make among temporary files.
const MOST_ELSEWHERE: usize = 1000;

/// How the last step failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    status: Status,
    reason: String,
    /// A disk refused a file.
    of_disk: bool,
}

impl Failure {
    fn of(error: &RunError) -> Failure {
        Failure {
            status: match error {
                RunError::Cancelled { .. } => Status::Cancelled,
                _ => Status::Failed,
            },
            reason: error.to_string(),
            of_disk: matches!(error, RunError::File { .. }),
        }
    }
}

impl Trainer {
    /// Runs all steps that are left, saves models, and writes how it ended to `status.json`.
    ///
    /// A run that ends early saves what it learnt too, as the last whole step left it. Where the step that failed has
    /// changed a model already, that is saved as it is, and `status.json` lists it as partial.
    ///
    /// # Errors
    /// What ended the run. `Ok` means that the target step was reached and all is saved.
    pub fn train(&mut self) -> Result<Summary, RunError> {
        let _heard = self.hear();
        match self.run_steps() {
            Ok(()) => self.finish(),
            Err(error) => {
                if !self.ended {
                    self.end_early();
                }
                Err(error)
            }
        }
    }

    /// Ends the run: saves models, and writes to `status.json` how far it came: `finished` where that is the target step,
    /// `stopped` where it is an earlier one, `failed` or `cancelled` where the last step was. No further step is taken.
    ///
    /// The error of a step that failed was told by [`Trainer::step`]; it is no error here that the run ends with it.
    ///
    /// # Errors
    /// A model that cannot be saved, or a disk that refuses. Called again, once there is room, it tries again.
    pub fn finish(&mut self) -> Result<Summary, RunError> {
        if self.ended && !self.unsaved {
            return Ok(self.summary.clone());
        }
        let _heard = self.hear();
        if self.failure.is_some() {
            self.end_early();
            return Ok(self.summary.clone());
        }
        let (done, target) = (self.run.steps_done(), self.target());
        let reached = done >= target;
        if let Err(error) = self.close(reached) {
            self.tell_saved();
            self.write_end(Failure::of(&error));
            return Err(error);
        }
        let state = match reached {
            true => self.state(Status::Finished, String::new()),
            false => self.state(
                Status::Stopped,
                format!("the program ended it behind step {done} of {target}"),
            ),
        };
        self.folder.set_state(&state)?;
        if !reached {
            self.say(&format!("ended behind step {done} of {target}"));
        }
        let summary = self.summary.clone();
        self.say(summary.to_string().trim_end());
        Ok(summary)
    }

    fn run_steps(&mut self) -> Result<(), RunError> {
        if !self.ended {
            self.begin().inspect_err(|error| self.fail(error))?;
        }
        while self.run.steps_done() < self.target() {
            self.step()?;
        }
        Ok(())
    }

    /// Has the end be that of `error`.
    pub(super) fn fail(&mut self, error: &RunError) {
        self.failure = Some(Failure::of(error));
    }

    /// Ends what runs beside the run, and saves models: all where the target was `reached`, else where something was
    /// learnt. The trace ends first: what it would still write might need the room.
    fn close(&mut self, reached: bool) -> Result<(), RunError> {
        self.ended = true;
        if let Some(recorder) = self.recorder.clone() {
            recorder.sync();
            self.record_late_states();
            recorder.close();
            self.summary.anomalies = recorder.fired();
        }
        self.with_console(Console::end);
        let saved = match reached || self.has_learnt() {
            true => self.save_models(),
            false => Ok(()),
        };
        self.unsaved = saved.is_err();
        self.count();
        saved
    }

    /// Ends a run that was left by the error of its last step.
    fn end_early(&mut self) {
        if let Err(unsaved) = self.close(false) {
            tracing::error!("{unsaved}");
        }
        self.tell_saved();
        let anomalies = self.summary.anomaly_lines();
        if !anomalies.is_empty() {
            self.say(anomalies.trim_end());
        }
        if let Some(failure) = self.failure.clone() {
            self.write_end(failure);
        }
    }

    /// Tells which models a run that ended early has saved.
    fn tell_saved(&self) {
        let state = self.state(Status::Failed, String::new());
        if state.saved.is_empty() {
            return;
        }
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

    /// Writes how a run ended that is ended by an error already, which is the one to tell.
    fn write_end(&mut self, failure: Failure) {
        self.count();
        let state = self.state(failure.status, failure.reason);
        if let Err(unwritten) = self.folder.set_state(&state) {
            // A disk that refused one file refuses the other, and one message is enough.
            match failure.of_disk {
                true => tracing::debug!("{unwritten}"),
                false => tracing::error!("{unwritten}"),
            }
        }
    }

    fn state(&self, status: Status, reason: String) -> RunState {
        let left = self.run.left_over();
        RunState {
            status,
            step: self.run.steps_done(),
            reason,
            saved: self.saved.iter().cloned().collect(),
            partial: left
                .keys()
                .filter(|name| self.saved.contains(*name))
                .cloned()
                .collect(),
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
        let names: Vec<String> = saved_models(plan).map(|model| model.name.clone()).collect();
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
        match self.folder.save_model(&mut self.run, name) {
            Ok(_) => Ok(()),
            Err(error @ (RunError::State { .. } | RunError::File { .. })) => {
                Err(self.save_elsewhere(name, &error))
            }
            Err(error) => Err(error),
        }
    }

    /// Saves a model that the disk of the run did not take into the system's folder of temporary files, so that what was
    /// learnt is not lost with the process; gives the error with where it is.
    fn save_elsewhere(&mut self, name: &str, error: &RunError) -> RunError {
        let saved = self.elsewhere().and_then(|elsewhere| {
            let dir = elsewhere.join(name);
            match self.run.save_model(name, &dir) {
                Ok(()) => Ok(dir),
                Err(error) => {
                    // Half a model is of no use, and nobody else has written there.
                    let _ = fs::remove_dir_all(&elsewhere);
                    Err(error.to_string())
                }
            }
        });
        let what = match saved {
            Ok(dir) => format!(
                "it is saved in `{}` instead; move it from there",
                dir.display()
            ),
            Err(_) => format!(
                "nor could it be saved below `{}`, so its weights are lost when this process ends",
                std::env::temp_dir().display()
            ),
        };
        let free = self.room.free().map_or(String::new(), |free| {
            format!("; the disk of the run has {} free", bytes(free))
        });
        let source = match error {
            RunError::State { source, .. } => source.to_string(),
            error => error.to_string(),
        };
        RunError::State {
            what: "model",
            name: name.to_owned(),
            action: "save",
            source: format!("{source}{free}; {what}").into(),
        }
    }

    /// Makes a folder of its own among the system's temporary files.
    fn elsewhere(&self) -> Result<PathBuf, String> {
        let run = self.folder.path().file_name().unwrap_or_default();
        let name = format!("verl-{}-{}", run.to_string_lossy(), std::process::id());
        for number in 0..MOST_ELSEWHERE {
            let dir = std::env::temp_dir().join(format!("{name}-{number}"));
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(dir),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(format!("`{name}` is taken"))
    }
}

impl Drop for Trainer {
    /// Ends a run that its program left without [`Trainer::finish`].
    fn drop(&mut self) {
        // A folder that was taken away is not made again.
        if self.ended || !self.folder.path().is_dir() {
            return;
        }
        let _heard = self.hear();
        if self.failure.is_some() {
            self.end_early();
            return;
        }
        let (done, target) = (self.run.steps_done(), self.target());
        let reached = done >= target && target > 0;
        let unsaved = self.close(reached).err();
        let mut reason = match std::thread::panicking() {
            true => format!(
                "the program panicked behind step {done} of {target}{}",
                unwinding_panic().map_or(String::new(), |text| format!(": {text}"))
            ),
            false => {
                format!("the trainer was dropped behind step {done} of {target} without `finish`")
            }
        };
        let status = match &unsaved {
            Some(error) => {
                tracing::error!("{error}");
                reason.push_str(&format!("; {error}"));
                Status::Failed
            }
            None if reached => Status::Finished,
            None => Status::Stopped,
        };
        if done > 0 {
            tracing::warn!(
                "{reason}; what was learnt is saved all the same, but errors of that can be told to nobody: call `finish`"
            );
            self.tell_saved();
        }
        if status == Status::Finished {
            reason.clear();
        }
        self.write_end(Failure {
            status,
            reason,
            of_disk: false,
        });
    }
}
