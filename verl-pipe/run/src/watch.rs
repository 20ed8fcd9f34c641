//! Waits outside the row flow of a step: observers, states that are read for the trace, and the thread of the trace. A
//! separate thread reports them in `stall.json`, since the waiting thread is blocked.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use crate::dispatch::{current_dispatch, set_dispatch};
use crate::error::RunError;
use crate::metrics::now;
use crate::notice::WaitThresholds;
use crate::stall::{PendingEdge, StallReport, remove_stall};

/// How often the thread checks the wait; more often if deadlines are short.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A wait of the run.
#[derive(Debug, Clone, Default)]
pub struct Wait {
    /// The step during or after which the run waits.
    pub step: u64,
    /// Who is working (a stage, the trace); also the kind of the wait.
    pub who: String,
    /// What the run waits for.
    pub pending: String,
    /// Where it is working.
    pub on: String,
    /// Deadline of the wait.
    pub deadline: Duration,
}

/// Reports long waits. Does nothing if the run has no folder.
#[derive(Debug)]
pub struct Watch {
    shared: Option<Arc<Shared>>,
    /// Dropping it ends the thread.
    _ends: Option<Sender<()>>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    thresholds: WaitThresholds,
    /// The current wait; there is at most one at a time.
    wait: Option<(Wait, Instant)>,
    /// What the awaited thread is working on and since when, if that has its own name.
    at: Option<(String, Instant)>,
    /// The wait has been reported.
    reported: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports the current wait once it is long.
    fn check(&self) {
        let mut state = self.state();
        let Some((wait, since)) = &state.wait else {
            return;
        };
        if state.reported || since.elapsed() < state.thresholds.of(&wait.who) {
            return;
        }
        let report = state.report(wait, *since, None);
        state.reported = true;
        tracing::warn!("{}", report.to_string().trim_end());
        report.save(&self.dir);
    }
}

impl State {
    fn report(&self, wait: &Wait, since: Instant, error: Option<String>) -> StallReport {
        let (who, working) = match &self.at {
            Some((at, begun)) => (at.clone(), *begun),
            None => (wait.who.clone(), since),
        };
        StallReport {
            step: wait.step,
            timestamp: now(),
            quiet_s: since.elapsed().as_secs_f64(),
            error,
            running: vec![PendingEdge {
                stage: who,
                keys: vec![wait.pending.clone()],
                samples: format!("step {}", wait.step),
                waited_s: working.elapsed().as_secs_f64(),
                deadline_s: Some(wait.deadline.as_secs_f64()),
                on: wait.on.clone(),
            }],
            waiting: Vec::new(),
        }
    }
}

impl Watch {
    /// Watches the waits of the run in `run_dir`, whose calls have the given `deadline`.
    pub fn start(run_dir: Option<&Path>, deadline: Duration) -> Watch {
        let Some(dir) = run_dir else {
            return Watch {
                shared: None,
                _ends: None,
            };
        };
        let shared = Arc::new(Shared {
            dir: dir.to_owned(),
            state: Mutex::new(State {
                thresholds: WaitThresholds::new(deadline),
                wait: None,
                at: None,
                reported: false,
            }),
        });
        let (ends, ended) = bounded::<()>(0);
        let interval = POLL_INTERVAL
            .min(deadline / 16)
            .max(Duration::from_millis(1));
        let watched = shared.clone();
        let listens = current_dispatch();
        let thread = std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || {
                let _guard = set_dispatch(listens.as_ref());
                while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                    watched.check();
                }
            });
        if let Err(error) = thread {
            tracing::warn!("long waits between steps are not reported: {error}");
        }
        Watch {
            shared: Some(shared),
            _ends: Some(ends),
        }
    }

    /// Starts a wait, which ends when the returned guard is dropped.
    pub fn begin(&self, wait: Wait) -> WaitGuard {
        let shared = self.shared.clone();
        if let Some(shared) = &shared {
            let mut state = shared.state();
            state.wait = Some((wait, Instant::now()));
            state.reported = false;
        }
        WaitGuard { shared }
    }

    /// A handle with which the awaited thread reports what it is working on.
    pub fn activity_reporter(&self) -> ActivityReporter {
        ActivityReporter(self.shared.clone())
    }
}

/// A wait in progress. Dropping it means that the wait succeeded, and removes its report.
#[derive(Debug)]
pub struct WaitGuard {
    shared: Option<Arc<Shared>>,
}

impl WaitGuard {
    /// Ends the wait with `result`.
    pub(crate) fn finish<T>(self, result: Result<T, RunError>) -> Result<T, RunError> {
        if let Err(error) = &result {
            self.failed(error);
        }
        result
    }

    /// Ends the wait with `error`. If the error is about the wait, the report stays on disk.
    pub(crate) fn failed(mut self, error: &RunError) {
        let late = matches!(error, RunError::Deadline { .. } | RunError::Lost { .. });
        let Some(shared) = self.shared.take_if(|_| late) else {
            return;
        };
        let mut state = shared.state();
        let reported = state.reported;
        if let Some((wait, since)) = state.wait.take() {
            // What is lost at once did not make the run wait.
            if !reported && since.elapsed() < wait.deadline {
                return;
            }
            let report = state.report(&wait, since, Some(error.to_string()));
            tracing::error!("{}", report.to_string().trim_end());
            report.save(&shared.dir);
        }
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        let Some(shared) = &self.shared else { return };
        let mut state = shared.state();
        if let Some((wait, since)) = state.wait.take() {
            state.thresholds.record(&wait.who, since.elapsed());
        }
        if std::mem::take(&mut state.reported) {
            remove_stall(&shared.dir);
        }
    }
}

/// Reports what a thread is working on.
#[derive(Debug, Clone)]
pub struct ActivityReporter(Option<Arc<Shared>>);

impl ActivityReporter {
    /// Runs `work` and reports it as `name` in the meantime.
    pub fn at<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let Some(shared) = &self.0 else {
            return work();
        };
        shared.state().at = Some((name.to_owned(), Instant::now()));
        let done = work();
        shared.state().at = None;
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait() -> Wait {
        Wait {
            step: 3,
            who: "trace".to_owned(),
            pending: "its files".to_owned(),
            on: "its own thread".to_owned(),
            deadline: Duration::from_secs(600),
        }
    }

    /// The report, once it exists.
    fn report(dir: &Path) -> StallReport {
        loop {
            if let Ok(Some(report)) = StallReport::read(dir) {
                return report;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_long_wait_is_reported_until_it_ends() {
        let temp = tempfile::tempdir().expect("a folder");
        let watch = Watch::start(Some(temp.path()), Duration::from_millis(40));
        let waiting = watch.begin(wait());
        let found = report(temp.path());
        let edge = &found.running[0];
        assert_eq!((found.step, edge.stage.as_str()), (3, "trace"));
        assert_eq!(edge.deadline_s, Some(600.0));
        drop(waiting);
        assert_eq!(StallReport::read(temp.path()).expect("reads"), None);
        // The awaited thread reports what it is working on.
        let waiting = watch.begin(wait());
        let found = watch
            .activity_reporter()
            .at("rule `slow`", || report(temp.path()));
        assert_eq!(found.running[0].stage, "rule `slow`");
        // An error about a wait keeps its report; any other error does not.
        waiting.failed(&RunError::Lost {
            worker: "trace".to_owned(),
            reason: "it hangs".to_owned(),
        });
        let found = StallReport::read(temp.path()).expect("reads");
        let error = found.expect("it stays").error.expect("how it ended");
        assert!(error.contains("it hangs"), "{error}");
        let waiting = watch.begin(wait());
        waiting.failed(&RunError::Cancelled { step: 3 });
    }

    #[test]
    fn nothing_is_reported_without_a_folder() {
        let watch = Watch::start(None, Duration::from_millis(1));
        let waiting = watch.begin(wait());
        assert_eq!(watch.activity_reporter().at("x", || 5), 5);
        waiting.failed(&RunError::Cancelled { step: 3 });
    }
}
