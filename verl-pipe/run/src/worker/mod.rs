//! Workers: each owns the models of one device group and runs the stages that use them, one call at a time.
//!
//! The engine speaks to a worker only in messages (`message.rs`), which contain nothing but data. So the engine does not know
//! whether a worker is a thread of this process (`ThreadWorker`) or another process (`ProcessWorker`). A call is answered
//! by events; a `Query` has one `Answer`.

pub(crate) mod hosted;
pub(crate) mod message;
mod process;
mod sent;
mod serving;
mod thread;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};

use crate::error::RunError;
pub(crate) use hosted::start_stage;
pub(crate) use message::{Answer, DeviceCall, Query, StoredStates};
pub use process::ProcessOptions;
pub(crate) use process::{LoadingProcess, ProcessWorker};
pub use serving::{GroupServer, WorkerServer, enter, run_worker};
pub(crate) use thread::{Loading, ThreadWorker, WorkerStart};

/// The engine's side of a worker.
pub(crate) trait Worker: Send {
    /// Name of its device group.
    fn name(&self) -> &str;

    /// Starts a call; its rows and its end arrive as events.
    ///
    /// # Errors
    /// If the worker is lost.
    fn call(&mut self, call: DeviceCall) -> Result<(), RunError>;

    /// Sends a query, which is answered after the calls and queries before it.
    ///
    /// # Errors
    /// If the worker is lost.
    fn send(&mut self, query: Query) -> Result<PendingAnswer, RunError>;

    /// Gives the worker up: a call or a query did not end, so its state is unknown.
    fn abandon(&mut self);

    /// Whether it is a process that is lost or was given up.
    fn is_lost(&self) -> bool;

    /// Snapshots that nobody needs any more.
    fn dropped(&self) -> &Arc<DroppedSnapshots>;
}

/// An answer that has not arrived yet.
pub(crate) struct PendingAnswer {
    /// Completes "when asked …".
    pub what: &'static str,
    pub answer: Receiver<Result<Answer, QueryFailure>>,
}

/// Why a query has no answer.
#[derive(Debug)]
pub(crate) enum QueryFailure {
    /// The models and stages of the worker are as before.
    Refused(RunError),
    /// The worker panicked, so its state is unknown.
    Panicked(RunError),
}

impl dyn Worker {
    /// Sends `query` and waits for its answer.
    ///
    /// # Errors
    /// If the query is refused, or the worker is lost.
    pub(crate) fn ask(&mut self, query: Query, deadline: Duration) -> Result<Answer, RunError> {
        let pending = self.send(query)?;
        self.receive(pending, deadline)
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// As [`Worker::ask`](trait.Worker.html#method.ask).
    pub(crate) fn receive(
        &mut self,
        pending: PendingAnswer,
        deadline: Duration,
    ) -> Result<Answer, RunError> {
        match pending.answer.recv_timeout(deadline) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(QueryFailure::Refused(error))) => Err(error),
            Ok(Err(QueryFailure::Panicked(error))) => {
                self.abandon();
                Err(error)
            }
            Err(error) => {
                self.abandon();
                Err(unanswered(self.name(), pending.what, error, deadline))
            }
        }
    }
}

/// The error for a worker that did not answer when asked `what`.
pub(crate) fn unanswered(
    worker: &str,
    what: &str,
    error: RecvTimeoutError,
    deadline: Duration,
) -> RunError {
    let reason = match error {
        RecvTimeoutError::Timeout => format!(
            "no answer within {:.1} s when asked {what}",
            deadline.as_secs_f64()
        ),
        RecvTimeoutError::Disconnected => format!("its thread panicked when asked {what}"),
    };
    RunError::Lost {
        worker: worker.to_owned(),
        reason,
    }
}

/// Snapshots of a worker that were dropped; the worker forgets them before its next message.
#[derive(Debug, Default)]
pub(crate) struct DroppedSnapshots(Mutex<Vec<u64>>);

impl DroppedSnapshots {
    /// Takes all of them.
    pub(crate) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A snapshot that a worker keeps until this is dropped.
#[derive(Debug)]
pub(crate) struct SnapshotHandle {
    pub id: u64,
    dropped: Arc<DroppedSnapshots>,
}

impl SnapshotHandle {
    /// The handle of a new snapshot on the worker with these `dropped` ones. Ids are unique in the process, so that a
    /// worker of another run does not know them.
    pub(crate) fn new(dropped: Arc<DroppedSnapshots>) -> SnapshotHandle {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        SnapshotHandle {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            dropped,
        }
    }
}

impl Drop for SnapshotHandle {
    fn drop(&mut self) {
        let mut dropped = self
            .dropped
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        dropped.push(self.id);
    }
}
