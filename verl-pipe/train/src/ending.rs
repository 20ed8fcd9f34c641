//! The end of a trainer's run: models are saved, and `status.json` records the last step and why the run ended.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use verl_plan::display::bytes;
use verl_run::error::RunError;
use verl_run::runner::LeftOver;
use verl_run::space::saved_models;
use verl_words::diagnostic::quoted;
use verl_words::panics::unwinding_panic;

use crate::console::{Console, Summary};
use crate::folder::{RunStatus, Status};
use crate::trainer::Trainer;

/// Maximum number of temporary folders with the same prefix.
const MAX_TEMP_DIRS: usize = 1000;

/// How the last step failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    status: Status,
    reason: String,
    /// A file could not be written.
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
    /// Runs all remaining steps, saves models, and writes how the run ended to `status.json`.
    ///
    /// A run that ends early also saves its models, as of the last completed step. A model that the failed step has
    /// already changed is saved as it is, and `status.json` lists it as partial.
    ///
    /// # Errors
    /// The error that ended the run. `Ok` means that the target step was reached and everything is saved.
    pub fn train(&mut self) -> Result<Summary, RunError> {
        let _guard = self.set_listener();
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

    /// Ends the run: saves models and writes the final state to `status.json`: `finished` if the target step was
    /// reached, `stopped` if not, `failed` or `cancelled` if the last step was. No further step can be run.
    ///
    /// If the last step failed, [`Trainer::step`] has already returned its error, and this function succeeds.
    ///
    /// # Errors
    /// If a model or a file cannot be written. Call it again to retry, for example after freeing disk space.
    pub fn finish(&mut self) -> Result<Summary, RunError> {
        if self.ended && !self.unsaved {
            return Ok(self.summary.clone());
        }
        let _guard = self.set_listener();
        if self.failure.is_some() {
            self.end_early();
            return Ok(self.summary.clone());
        }
        let (done, target) = (self.run.steps_done(), self.target());
        let reached = done >= target;
        if let Err(error) = self.close(reached) {
            self.print_saved();
            self.write_end_status(Failure::of(&error));
            return Err(error);
        }
        let state = match reached {
            true => self.run_status(Status::Finished, String::new()),
            false => self.run_status(
                Status::Stopped,
                format!("the program ended the run after step {done} of {target}"),
            ),
        };
        self.folder.set_status(&state)?;
        if !reached {
            self.print(&format!("ended after step {done} of {target}"));
        }
        let summary = self.summary.clone();
        self.print(summary.to_string().trim_end());
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

    /// Stores `error` as the reason for the end.
    pub(super) fn fail(&mut self, error: &RunError) {
        self.failure = Some(Failure::of(error));
    }

    /// Stops the recorder and the console, and saves models if the target was `reached` or any model was updated. The
    /// trace ends first, since its pending writes might use the space that the models need.
    fn close(&mut self, reached: bool) -> Result<(), RunError> {
        self.ended = true;
        if let Some(recorder) = self.recorder.clone() {
            recorder.sync();
            self.record_late_states();
            recorder.close();
            self.summary.anomalies = recorder.fired();
        }
        self.with_console(Console::end);
        let saved = match reached || self.has_trained() {
            true => self.save_models(),
            false => Ok(()),
        };
        self.unsaved = saved.is_err();
        self.update_counts();
        saved
    }

    /// Ends a run whose last step failed.
    fn end_early(&mut self) {
        if let Err(unsaved) = self.close(false) {
            tracing::error!("{unsaved}");
        }
        self.print_saved();
        let anomalies = self.summary.anomaly_lines();
        if !anomalies.is_empty() {
            self.print(anomalies.trim_end());
        }
        if let Some(failure) = self.failure.clone() {
            self.write_end_status(failure);
        }
    }

    /// Prints which models a run that ended early has saved.
    fn print_saved(&self) {
        let state = self.run_status(Status::Failed, String::new());
        if state.saved.is_empty() {
            return;
        }
        let saved = quoted(state.saved.iter().map(String::as_str));
        let mut line = format!("saved as of step {}: {saved}", state.step);
        if !state.partial.is_empty() {
            let partial = quoted(state.partial.iter().map(String::as_str));
            line.push_str(&format!(
                "; including a part of step {}: {partial}",
                state.step + 1
            ));
        }
        self.print(&line);
    }

    /// Writes the final state of a run that ended with an error. A failure to write is only logged, since that error is
    /// the one to report.
    fn write_end_status(&mut self, failure: Failure) {
        self.update_counts();
        let state = self.run_status(failure.status, failure.reason);
        if let Err(unwritten) = self.folder.set_status(&state) {
            // If another file could not be written, this failure has the same cause, and one message is enough.
            match failure.of_disk {
                true => tracing::debug!("{unwritten}"),
                false => tracing::error!("{unwritten}"),
            }
        }
    }

    fn run_status(&self, status: Status, reason: String) -> RunStatus {
        let left = self.run.left_over();
        RunStatus {
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

    /// Whether any model has changed since it was loaded.
    fn has_trained(&self) -> bool {
        self.run.steps_done() > 0 || !self.run.left_over().is_empty()
    }

    /// Saves the models listed in the settings of the run, by default those that a stage updates. If one cannot be
    /// saved, the others still are; returns the first error.
    fn save_models(&mut self) -> Result<(), RunError> {
        let plan = self.run.schedule().plan();
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
                source: "an optimiser step on it panicked, so its weights may be inconsistent"
                    .into(),
            });
        }
        match self.folder.save_model(&mut self.run, name) {
            Ok(_) => Ok(()),
            Err(error @ (RunError::State { .. } | RunError::File { .. })) => {
                Err(self.save_to_temp_dir(name, &error))
            }
            Err(error) => Err(error),
        }
    }

    /// Saves a model that could not be written to the run folder to the system's temporary folder, so that its weights
    /// are not lost with the process. Returns the error, including the new location.
    fn save_to_temp_dir(&mut self, name: &str, error: &RunError) -> RunError {
        let saved = self.create_temp_dir().and_then(|temp| {
            let dir = temp.join(name);
            match self.run.save_model(name, &dir) {
                Ok(()) => Ok(dir),
                Err(error) => {
                    // A partial model is useless, and the folder contains nothing else.
                    let _ = fs::remove_dir_all(&temp);
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
                "it could not be saved in `{}` either, so its weights are lost when this process ends",
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

    /// Creates a new folder in the system's temporary folder.
    fn create_temp_dir(&self) -> Result<PathBuf, String> {
        let run = self.folder.path().file_name().unwrap_or_default();
        let name = format!("verl-{}-{}", run.to_string_lossy(), std::process::id());
        for number in 0..MAX_TEMP_DIRS {
            let dir = std::env::temp_dir().join(format!("{name}-{number}"));
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(dir),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(format!("too many folders named `{name}`"))
    }
}

impl Drop for Trainer {
    /// Ends a run that the program dropped without [`Trainer::finish`].
    fn drop(&mut self) {
        // A folder that was removed is not created again.
        if self.ended || !self.folder.path().is_dir() {
            return;
        }
        let _guard = self.set_listener();
        if self.failure.is_some() {
            self.end_early();
            return;
        }
        let (done, target) = (self.run.steps_done(), self.target());
        let reached = done >= target && target > 0;
        let unsaved = self.close(reached).err();
        let mut reason = match std::thread::panicking() {
            true => format!(
                "the program panicked after step {done} of {target}{}",
                unwinding_panic().map_or(String::new(), |text| format!(": {text}"))
            ),
            false => {
                format!("the trainer was dropped after step {done} of {target} without `finish`")
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
                "{reason}; models are still saved, but errors cannot be returned: call `finish`"
            );
            self.print_saved();
        }
        if status == Status::Finished {
            reason.clear();
        }
        self.write_end_status(Failure {
            status,
            reason,
            of_disk: false,
        });
    }
}
