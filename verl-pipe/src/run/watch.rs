//! Waits outside the flow of a step's rows: observers, states that are read for the trace, the trace's own thread. A
//! thread beside the run tells them in `stall.json`, since who waits cannot.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use crate::run::error::RunError;
use crate::run::metrics::now;
use crate::run::notice::Notices;
use crate::run::stall::{PendingEdge, StallReport, remove_stall};
use crate::run::warnings::{heard, heard_by};

/// How often the thread looks, where deadlines are long.
const LOOK: Duration = Duration::from_millis(500);

/// Something that is waited for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wait {
    /// The step during or behind which it is.
    pub step: u64,
    /// Who works, and the kind of wait that it is: a stage, the trace.
    pub who: String,
    /// What is awaited of it.
    pub owes: String,
    /// Where it works.
    pub on: String,
    /// How long it may take.
    pub deadline: Duration,
}

/// Tells waits that take long. It looks at nothing where a run has no folder.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Option<Arc<Shared>>,
    /// Its end ends the thread.
    _ends: Option<Sender<()>>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    notices: Notices,
    /// The wait that is on; whoever waits waits for one thing.
    wait: Option<(Wait, Instant)>,
    /// What the thread that is waited for is at, and since when, where it is something with a name of its own.
    at: Option<(String, Instant)>,
    /// The wait was told.
    told: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the wait that is on, once it has taken long.
    fn look(&self) {
        let mut state = self.state();
        let Some((wait, since)) = &state.wait else {
            return;
        };
        if state.told || since.elapsed() < state.notices.after(&wait.who) {
            return;
        }
        let report = state.report(wait, *since, None);
        state.told = true;
        tracing::warn!("{}", report.to_string().trim_end());
        report.keep(&self.dir);
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
                keys: vec![wait.owes.clone()],
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
    /// Watches the waits of the run in `run_dir`, whose calls may take as long as `deadline`.
    pub(crate) fn start(run_dir: Option<&Path>, deadline: Duration) -> Watch {
        let Some(dir) = run_dir else {
            return Watch {
                shared: None,
                _ends: None,
            };
        };
        let shared = Arc::new(Shared {
            dir: dir.to_owned(),
            state: Mutex::new(State {
                notices: Notices::new(deadline),
                wait: None,
                at: None,
                told: false,
            }),
        });
        let (ends, ended) = bounded::<()>(0);
        let look = LOOK.min(deadline / 16).max(Duration::from_millis(1));
        let seen = shared.clone();
        let listens = heard_by();
        let thread = std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || {
                let _heard = heard(listens.as_ref());
                while ended.recv_timeout(look) == Err(RecvTimeoutError::Timeout) {
                    seen.look();
                }
            });
        if let Err(error) = thread {
            tracing::warn!("what the run waits for beside its steps is not told: {error}");
        }
        Watch {
            shared: Some(shared),
            _ends: Some(ends),
        }
    }

    /// A wait begins; it ends with what is given back.
    pub(crate) fn begin(&self, wait: Wait) -> Waiting {
        let shared = self.shared.clone();
        if let Some(shared) = &shared {
            let mut state = shared.state();
            state.wait = Some((wait, Instant::now()));
            state.told = false;
        }
        Waiting { shared }
    }

    /// For the thread that is waited for, to tell what it is at.
    pub(crate) fn teller(&self) -> Teller {
        Teller(self.shared.clone())
    }
}

/// A wait that is on. Dropped, it has ended well, and what was told of it is taken back.
#[derive(Debug)]
pub(crate) struct Waiting {
    shared: Option<Arc<Shared>>,
}

impl Waiting {
    /// The wait ended with `result`.
    pub(crate) fn until<T>(self, result: Result<T, RunError>) -> Result<T, RunError> {
        if let Err(error) = &result {
            self.failed(error);
        }
        result
    }

    /// The wait ended with `error`: what was waited for stays told, where the error is about the wait.
    pub(crate) fn failed(mut self, error: &RunError) {
        let late = matches!(error, RunError::Deadline { .. } | RunError::Lost { .. });
        let Some(shared) = self.shared.take_if(|_| late) else {
            return;
        };
        let mut state = shared.state();
        if let Some((wait, since)) = state.wait.take() {
            let report = state.report(&wait, since, Some(error.to_string()));
            tracing::error!("{}", report.to_string().trim_end());
            report.keep(&shared.dir);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some(shared) = &self.shared else { return };
        let mut state = shared.state();
        if let Some((wait, since)) = state.wait.take() {
            state.notices.ended(&wait.who, since.elapsed());
        }
        if std::mem::take(&mut state.told) {
            remove_stall(&shared.dir);
        }
    }
}

/// Tells what a thread is at.
#[derive(Debug, Clone)]
pub(crate) struct Teller(Option<Arc<Shared>>);

impl Teller {
    /// Runs `work` as `name`.
    pub(crate) fn at<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
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
            owes: "its files".to_owned(),
            on: "its own thread".to_owned(),
            deadline: Duration::from_secs(600),
        }
    }

    /// The report, once it is there.
    fn report(dir: &Path) -> StallReport {
        loop {
            if let Ok(Some(report)) = StallReport::read(dir) {
                return report;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_long_wait_is_told_with_what_works_and_taken_back() {
        let temp = tempfile::tempdir().expect("a folder");
        let watch = Watch::start(Some(temp.path()), Duration::from_millis(40));
        let waiting = watch.begin(wait());
        let told = report(temp.path());
        let edge = &told.running[0];
        assert_eq!((told.step, edge.stage.as_str()), (3, "trace"));
        assert_eq!(edge.deadline_s, Some(600.0));
        drop(waiting);
        assert_eq!(StallReport::read(temp.path()).expect("reads"), None);
        // Who is waited for says what it is at.
        let waiting = watch.begin(wait());
        let told = watch.teller().at("rule `slow`", || report(temp.path()));
        assert_eq!(told.running[0].stage, "rule `slow`");
        // An error of a wait leaves it told, any other does not.
        waiting.failed(&RunError::Lost {
            worker: "trace".to_owned(),
            reason: "it hangs".to_owned(),
        });
        let told = StallReport::read(temp.path()).expect("reads");
        let error = told.expect("it stays").error.expect("how it ended");
        assert!(error.contains("it hangs"), "{error}");
        let waiting = watch.begin(wait());
        waiting.failed(&RunError::Cancelled { step: 3 });
    }

    #[test]
    fn nothing_is_told_without_a_folder() {
        let watch = Watch::start(None, Duration::from_millis(1));
        let waiting = watch.begin(wait());
        assert_eq!(watch.teller().at("x", || 5), 5);
        waiting.failed(&RunError::Cancelled { step: 3 });
    }
}
