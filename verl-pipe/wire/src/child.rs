//! Being a worker process: from the environment to the serving loop.
//!
//! A program that wants to run its own stages and models in worker processes calls [`enter`] first in its `main`. In a process
//! that a run started as a worker, it serves and then exits; anywhere else it returns at once.

use std::env;
use std::io::Read;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::handshake::{HandshakeError, Identity, Token, introduce};
use crate::link::{LinkError, LinkSettings};
use crate::message::Message;
use crate::serve::{Serve, Signals, serve};
use crate::socket::{Address, Stream};

/// Environment variable with the [`Start`] of a worker, as JSON.
pub const START: &str = "VERL_WORKER";
/// Environment variable with the token of a worker.
pub const TOKEN: &str = "VERL_WORKER_TOKEN";

/// Exit status of a worker that could not start to serve.
const CANNOT_START: i32 = 1;
/// Exit status of a worker whose run was silent for too long, or sent something else.
const LOST: i32 = 4;
/// Exit status of a worker in which a request panicked, which is that of Rust.
const PANICKED: i32 = 101;

/// What a run passes to a worker process that it starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Where the run waits for it.
    pub address: String,
    /// The run.
    pub run: String,
    /// The worker.
    pub worker: String,
    /// Which start of the worker.
    pub incarnation: u64,
    /// Deadlines and limits.
    pub settings: LinkSettings,
}

/// A program that can be started as a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its executable.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

static PROGRAM: OnceLock<Program> = OnceLock::new();

/// Declares that this program, started with `arguments`, calls [`enter`] or [`run_worker`] first. Only the first call counts.
pub fn register(arguments: &[&str]) {
    if let Ok(path) = env::current_exe() {
        let arguments = arguments
            .iter()
            .map(|&argument| argument.to_owned())
            .collect();
        let _ = PROGRAM.set(Program { path, arguments });
    }
}

/// How this program is started as a worker; `None` if it did not declare that it can be.
pub fn program() -> Option<&'static Program> {
    PROGRAM.get()
}

/// Whether the environment says that this process was started as a worker.
pub fn is_worker() -> bool {
    env::var_os(START).is_some()
}

/// Why a worker process cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// It was started by hand.
    #[error(
        "this is the command with which a run starts its worker processes; it needs a run that waits for it\n  help: \
         use `pipe train`, which starts the workers that a pipeline file declares"
    )]
    ByHand,
    /// The environment of the process is not that of a worker.
    #[error(
        "the environment variable `{variable}` does not describe a worker: {reason}\n  help: only a run sets it; unset it to \
         run this program by hand"
    )]
    Environment {
        /// The variable.
        variable: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The run cannot be reached.
    #[error(
        "worker `{worker}` cannot connect to its run at `{address}`: {reason}\n  help: only a run sets `{START}`; if this \
         program was started by a program that is itself a worker, remove `{START}` from its environment"
    )]
    Connect {
        /// The worker.
        worker: String,
        /// Where the run should wait.
        address: String,
        /// The error of the system.
        reason: String,
    },
    /// The hand-shake failed.
    #[error("worker `{worker}` cannot join its run: {source}")]
    Handshake {
        /// The worker.
        worker: String,
        /// Why.
        source: HandshakeError,
    },
    /// The system refused something else.
    #[error("worker `{worker}` cannot start: {reason}")]
    System {
        /// The worker.
        worker: String,
        /// The error of the system.
        reason: String,
    },
}

/// Makes the server of a worker, and what processes its signals.
pub trait Server: Sized {
    /// Processes requests.
    type Serve: Serve;

    /// Makes it for the worker that `start` describes. Called after the run has accepted this process.
    fn server(self, start: &Start) -> (Self::Serve, Box<dyn FnMut(Message) + Send>);
}

impl<S: Serve, F: FnOnce(&Start) -> (S, Box<dyn FnMut(Message) + Send>)> Server for F {
    type Serve = S;

    fn server(self, start: &Start) -> (S, Box<dyn FnMut(Message) + Send>) {
        self(start)
    }
}

/// Serves and exits if this process was started as a worker; otherwise declares that this program can be started as one,
/// and returns.
pub fn enter(server: impl Server) {
    if is_worker() {
        end_process(run_worker(server));
    }
    register(&[]);
}

/// Serves as the worker that the environment describes, and returns the exit status of the process.
pub fn run_worker(server: impl Server) -> i32 {
    match serve_from_environment(server) {
        Ok(status) => status,
        Err(error) => {
            report(&error.to_string());
            match error {
                ChildError::ByHand => 2,
                _ => CANNOT_START,
            }
        }
    }
}

/// Ends this process, whatever its threads do.
#[expect(
    clippy::disallowed_methods,
    reason = "a worker ends also during a call that never returns; files that a run keeps are written under another name first"
)]
fn end_process(status: i32) -> ! {
    std::process::exit(status)
}

/// The run keeps the last lines of a worker's standard error for its own messages.
fn report(text: &str) {
    use std::io::Write;

    // Without a standard error nobody reads it.
    let _ = writeln!(std::io::stderr(), "error: {text}");
}

/// What the environment says about this process.
///
/// # Errors
/// When it says nothing, or nothing useful.
fn start() -> Result<(Start, Token), ChildError> {
    let Ok(text) = env::var(START) else {
        return Err(ChildError::ByHand);
    };
    let invalid = |variable, reason: String| ChildError::Environment { variable, reason };
    let start = serde_json::from_str(&text).map_err(|e| invalid(START, e.to_string()))?;
    let token = env::var(TOKEN).map_err(|e| invalid(TOKEN, e.to_string()))?;
    Ok((start, Token::received(token)))
}

fn serve_from_environment(server: impl Server) -> Result<i32, ChildError> {
    let (start, token) = start()?;
    end_with_standard_input();
    let worker = || start.worker.clone();
    let system = |error: std::io::Error| ChildError::System {
        worker: worker(),
        reason: error.to_string(),
    };
    let address: Address = start
        .address
        .parse()
        .map_err(|reason| ChildError::Environment {
            variable: START,
            reason,
        })?;
    let identity =
        Identity::of_this_program(&start.run, &start.worker, start.incarnation).map_err(system)?;
    let stream = Stream::connect(&address).map_err(|error| ChildError::Connect {
        worker: worker(),
        address: start.address.clone(),
        reason: error.to_string(),
    })?;
    let deadline = start.settings.deadline.max(ANSWER);
    let connection =
        introduce(stream, &token, &identity, deadline).map_err(|source| ChildError::Handshake {
            worker: worker(),
            source,
        })?;
    let (mut serving, on_signal) = server.server(&start);
    let signals = Process {
        worker: worker(),
        on_signal,
    };
    let reason = serve(connection, &start.settings, &mut serving, signals).map_err(system)?;
    // The reading thread has usually ended the process before.
    Ok(match reason {
        LinkError::Panicked(_) => PANICKED,
        reason => status_of(&reason),
    })
}

/// Exit status of a worker whose link ended.
fn status_of(reason: &LinkError) -> i32 {
    match reason {
        LinkError::Closed | LinkError::Ended => 0,
        _ => LOST,
    }
}

/// Shortest deadline for the answer of a run, which may be busy with other workers.
const ANSWER: Duration = Duration::from_secs(10);

/// Ends the process when its standard input ends: the run has the other end of that pipe, so it is gone or wants this
/// process to end. This works before the connection is made, too.
fn end_with_standard_input() {
    let watch = thread::Builder::new()
        .name("lifeline".to_owned())
        .spawn(|| {
            let mut input = std::io::stdin().lock();
            let mut bytes = [0; 64];
            while input.read(&mut bytes).is_ok_and(|read| read > 0) {}
            end_process(0);
        });
    // Without this thread, the end of the connection still ends the process.
    drop(watch);
}

/// Signals of a worker process, which ends with its link.
struct Process {
    worker: String,
    on_signal: Box<dyn FnMut(Message) + Send>,
}

impl Signals for Process {
    fn signal(&mut self, message: Message) {
        (self.on_signal)(message);
    }

    fn lost(&mut self, reason: &LinkError) {
        let status = status_of(reason);
        if status != 0 {
            report(&format!(
                "worker `{}` ends, since its run is lost: {reason}",
                self.worker
            ));
        }
        // A call that is still running could block the end of the process for any length of time.
        end_process(status);
    }
}
