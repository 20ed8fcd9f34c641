//! Disk space of a run: the space that its models need at the end is reserved from everything else that it writes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};

use verl_plan::display::bytes;
use verl_plan::{Plan, PlannedModel};
use verl_rules::config::bytes_of;
use verl_words::diagnostic::quoted;

use crate::error::{NoRoom, RunError};

/// Returns how many bytes can still be written to the disk of a folder; `None` if unknown.
pub type FreeSpace = Arc<dyn Fn(&Path) -> Option<u64> + Send + Sync>;

/// Bytes reserved in addition to the models, for the last lines, `status.json`, and file system metadata.
const MARGIN: u64 = 64 << 10;

/// Approximate size of a line of metrics and of a sample (bytes).
const METRICS_LINE: u64 = 2 << 10;
const SAMPLE_LINE: u64 = 1 << 10;

/// Bytes left for lines at the end: each line is counted as a full block.
const LAST_LINES: u64 = 32 << 10;

/// At most 1 / `LINES_SHARE` of the free space is left for lines.
const LINES_SHARE: u64 = 4;

/// 1 / `ROUNDING` of the models' size is reserved in addition, since file systems round up.
const ROUNDING: u64 = 64;

/// Space on the disk of a run folder.
#[derive(Clone)]
pub struct Room(Arc<Inner>);

struct Inner {
    dir: PathBuf,
    /// Bytes reserved for the models.
    reserved: AtomicU64,
    /// Approximate bytes that the lines of the remaining steps need; the trace leaves them free.
    lines: AtomicU64,
    free: FreeSpace,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room")
            .field("dir", &self.0.dir)
            .field("reserved", &self.0.reserved)
            .finish_non_exhaustive()
    }
}

impl Room {
    /// The space of folder `dir`, with nothing reserved.
    pub fn of(dir: &Path, free: Option<FreeSpace>) -> Room {
        Room(Arc::new(Inner {
            dir: dir.to_owned(),
            reserved: AtomicU64::new(0),
            lines: AtomicU64::new(0),
            free: free.unwrap_or_else(|| Arc::new(free_space)),
        }))
    }

    /// Reserves space for the models that a plan saves.
    ///
    /// # Errors
    /// [`RunError::NoRoom`] if there is not enough space.
    pub fn reserve_for(&self, plan: &Plan) -> Result<(), RunError> {
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
        self.0.reserved.store(needed, Ordering::Relaxed);
        self.step_done(0, plan);
        Ok(())
    }

    /// Updates the space that lines need after step `step`: fewer steps remain.
    pub fn step_done(&self, step: u64, plan: &Plan) {
        let samples = plan.pipe().run.samples_per_step as u64;
        let of_step = METRICS_LINE.saturating_add(samples.saturating_mul(SAMPLE_LINE));
        let left = plan.context().steps.saturating_sub(step);
        let lines = left.saturating_mul(of_step).saturating_add(LAST_LINES);
        self.0.lines.store(lines, Ordering::Relaxed);
    }

    /// Free bytes, including reserved ones.
    pub fn free(&self) -> Option<u64> {
        (self.0.free)(&self.0.dir)
    }

    /// Free bytes that are not reserved for the models; `None` if unknown.
    fn free_beside_models(&self) -> Option<u64> {
        Some(
            self.free()?
                .saturating_sub(self.0.reserved.load(Ordering::Relaxed)),
        )
    }

    /// Warns if the budget of the trace exceeds the free space that is not reserved for the models.
    pub fn warn_about_budget(&self, budget_mb: u64) {
        if let Some(free) = self.free_beside_models()
            && free < bytes_of(budget_mb)
        {
            tracing::warn!(
                "trace: full steps may use {budget_mb} MB (`trace.budget_mb`), but only {} are free on the disk after reserving space for the models that the run saves; recording stops when they are used up",
                bytes(free)
            );
        }
    }

    /// Checks that `size` bytes can be written without using the space reserved for the models.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] if the models would no longer fit.
    pub fn ensure_free(&self, size: u64) -> io::Result<()> {
        self.check(size, |_| 0)
    }

    /// Like [`Room::ensure_free`], but also leaves space for the lines of the remaining steps; for the trace.
    ///
    /// # Errors
    /// As [`Room::ensure_free`].
    pub fn ensure_free_beside_lines(&self, size: u64) -> io::Result<()> {
        let lines = self.0.lines.load(Ordering::Relaxed);
        // Without the limit, a run without an end would leave no space for its trace.
        self.check(size, |free| lines.min(free / LINES_SHARE))
    }

    fn check(&self, size: u64, lines: impl Fn(u64) -> u64) -> io::Result<()> {
        let reserved = self.0.reserved.load(Ordering::Relaxed);
        if reserved == 0 {
            return Ok(());
        }
        match self.free() {
            Some(free) if free < reserved.saturating_add(size).saturating_add(lines(free)) => {
                let reason = format!(
                    "the disk has {} free, of which {} are reserved for saving the models",
                    bytes(free),
                    bytes(reserved)
                );
                Err(io::Error::new(io::ErrorKind::StorageFull, reason))
            }
            _ => Ok(()),
        }
    }
}

/// Models that a plan saves at the end: those listed in the setting `run.save`, by default those that a stage updates.
pub fn saved_models(plan: &Plan) -> impl Iterator<Item = &PlannedModel> {
    let named = plan.pipe().run.save.as_ref();
    plan.models().iter().filter(move |model| match named {
        Some(named) => named.contains(&model.name),
        None => !model.updaters.is_empty(),
    })
}

/// Size of a saved model (bytes).
pub(crate) fn saved_bytes(model: &PlannedModel) -> u64 {
    match model.info.saved_bytes {
        0 => model.info.weight_bytes,
        saved => saved,
    }
}

/// Bytes that this user can still write to the disk of `dir`, as reported by the system.
pub fn free_space(dir: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let disk = rustix::fs::statvfs(dir).ok()?;
        // Some remote file systems report no sizes.
        (disk.f_blocks > 0).then(|| disk.f_bavail.saturating_mul(disk.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = dir;
        None
    }
}
