//! Room on the disk of a run: what its models need at the end is kept free of everything else that it writes.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::diagnostic::quoted;
use crate::plan::display::bytes;
use crate::plan::{Plan, PlannedModel};
use crate::run::error::{NoRoom, RunError};
use crate::trace::config::bytes_of;

/// Tells how many bytes may still be written to the disk of a folder; `None` where that is not known.
pub type FreeSpace = Arc<dyn Fn(&Path) -> Option<u64> + Send + Sync>;

/// Bytes beside the models that are kept free for the last lines, `status.json`, and what a file system takes for itself.
const MARGIN: u64 = 64 << 10;

/// Bytes of a line of metrics and of a sample, about.
const METRICS_LINE: u64 = 2 << 10;
const SAMPLE_LINE: u64 = 1 << 10;

/// Bytes that are left to lines to the end: each is looked at as if it were a block.
const LAST_LINES: u64 = 32 << 10;

/// Part of what is free that is left to lines at most.
const LINES_SHARE: u64 = 4;

/// Part of the models' size that is kept free beside it: file systems round up.
const ROUNDING: u64 = 64;

/// Room on the disk of a run folder.
#[derive(Clone)]
pub(crate) struct Room(Arc<Inner>);

struct Inner {
    dir: PathBuf,
    /// Bytes that nobody but the models may take.
    kept: AtomicU64,
    /// Bytes that lines of the steps to come take, about: the trace leaves them room.
    lines: AtomicU64,
    free: FreeSpace,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room")
            .field("dir", &self.0.dir)
            .field("kept", &self.0.kept)
            .finish_non_exhaustive()
    }
}

impl Room {
    /// That of folder `dir`, of which nothing is kept yet.
    pub(crate) fn of(dir: &Path, free: Option<FreeSpace>) -> Room {
        Room(Arc::new(Inner {
            dir: dir.to_owned(),
            kept: AtomicU64::new(0),
            lines: AtomicU64::new(0),
            free: free.unwrap_or_else(|| Arc::new(free_space)),
        }))
    }

    /// Keeps room for the models that a plan saves.
    ///
    /// # Errors
    /// [`RunError::NoRoom`] where there is less.
    pub(crate) fn keep_for(&self, plan: &Plan) -> Result<(), RunError> {
        let models: Vec<&PlannedModel> = saved_models(plan).collect();
        let sizes = models.iter().map(|model| saved_bytes(model));
        let sum = sizes.fold(0, u64::saturating_add);
        if sum == 0 {
            return Ok(());
        }
        let needed = sum.saturating_add(sum / ROUNDING).saturating_add(MARGIN);
        if let Some(free) = self.free()
            && free < needed
        {
            return Err(RunError::NoRoom(Box::new(NoRoom {
                dir: self.0.dir.clone(),
                free,
                needed,
                models: quoted(models.iter().map(|model| model.name.as_str())),
            })));
        }
        self.0.kept.store(needed, Ordering::Relaxed);
        self.step_done(0, plan);
        Ok(())
    }

    /// Step `step` is done: those behind it write as many lines less.
    pub(crate) fn step_done(&self, step: u64, plan: &Plan) {
        let samples = plan.pipe.run.samples_per_step as u64;
        let of_step = METRICS_LINE.saturating_add(samples.saturating_mul(SAMPLE_LINE));
        let left = plan.context.steps.saturating_sub(step);
        let lines = left.saturating_mul(of_step).saturating_add(LAST_LINES);
        self.0.lines.store(lines, Ordering::Relaxed);
    }

    /// Bytes that are free, what is kept included.
    pub(crate) fn free(&self) -> Option<u64> {
        (self.0.free)(&self.0.dir)
    }

    /// Bytes that may be written beside the models; `None` where that is not known.
    fn beside_models(&self) -> Option<u64> {
        Some(
            self.free()?
                .saturating_sub(self.0.kept.load(Ordering::Relaxed)),
        )
    }

    /// Tells a budget of the trace that is larger than the disk beside the models.
    pub(crate) fn tell_budget(&self, budget_mb: u64) {
        if let Some(free) = self.beside_models()
            && free < bytes_of(budget_mb)
        {
            tracing::warn!(
                "trace: steps in full may take {budget_mb} MB (`trace.budget_mb`), but the disk has {} for them beside the models that the run saves; recording ends when they are used up",
                bytes(free)
            );
        }
    }

    /// Whether so many bytes may be written beside the models.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] where the models would no longer fit.
    pub(crate) fn take(&self, size: u64) -> io::Result<()> {
        self.take_beside(size, |_| 0)
    }

    /// Whether so many bytes may be written beside the models and the lines of the steps to come; for the trace.
    ///
    /// # Errors
    /// As [`Room::take`].
    pub(crate) fn take_beside_lines(&self, size: u64) -> io::Result<()> {
        let lines = self.0.lines.load(Ordering::Relaxed);
        // A run that is to go on for ever would have none left for its trace.
        self.take_beside(size, |free| lines.min(free / LINES_SHARE))
    }

    fn take_beside(&self, size: u64, lines: impl Fn(u64) -> u64) -> io::Result<()> {
        let kept = self.0.kept.load(Ordering::Relaxed);
        if kept == 0 {
            return Ok(());
        }
        match self.free() {
            Some(free) if free < kept.saturating_add(size).saturating_add(lines(free)) => {
                let reason = format!(
                    "the disk has {} free, of which {} are kept for saving the models",
                    bytes(free),
                    bytes(kept)
                );
                Err(io::Error::new(io::ErrorKind::StorageFull, reason))
            }
            _ => Ok(()),
        }
    }
}

/// Models that a plan saves at the end: those that the settings name, by default those that a stage updates.
pub(crate) fn saved_models(plan: &Plan) -> impl Iterator<Item = &PlannedModel> {
    let named = plan.pipe.run.save.as_ref();
    plan.models.iter().filter(move |model| match named {
        Some(named) => named.contains(&model.name),
        None => !model.updaters.is_empty(),
    })
}

/// Bytes that a saved model takes.
pub(crate) fn saved_bytes(model: &PlannedModel) -> u64 {
    match model.info.saved_bytes {
        0 => model.info.weight_bytes,
        saved => saved,
    }
}

/// Bytes that this user may still write to the disk of `dir`, as the system tells.
pub fn free_space(dir: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let disk = rustix::fs::statvfs(dir).ok()?;
        // Some file systems that lie elsewhere count nothing.
        (disk.f_blocks > 0).then(|| disk.f_bavail.saturating_mul(disk.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = dir;
        None
    }
}
