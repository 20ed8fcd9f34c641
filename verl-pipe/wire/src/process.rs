//! Starting, watching and ending a worker process.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::{Program, START, Start, TOKEN};
use crate::handshake::{Connection, Identity, Token, accept};
use crate::link::LinkSettings;
use crate::socket::{Listener, Transport};

/// How a worker process is started.
#[derive(Debug, Clone)]
pub struct Spawn {
    /// The program, which calls [`child::enter`](crate::child::enter) first.
    pub program: Program,
    /// Further environment variables.
    pub variables: Vec<(String, String)>,
    /// Identifies the run.
    pub run: String,
    /// Name of the worker.
    pub worker: String,
    /// Which start of the worker, counted from 1.
    pub incarnation: u64,
    /// How it is connected.
    pub transport: Transport,
    /// Deadlines and limits of the connection.
    pub settings: LinkSettings,
    /// How long the process may take to connect.
    pub deadline: Duration,
    /// Receives each line that the process writes to its standard error; the last ones are kept in any case.
    pub on_line: fn(worker: &str, line: &str),
}

/// Lines of the standard error that are kept.
const KEPT_LINES: usize = 20;
/// Longest kept line in bytes; the rest is cut off.
const LONGEST_LINE: u64 = 4096;
/// Longest wait for a connection to introduce itself, so that a stranger cannot block the worker.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// How often a waiting run looks after the process.
const LOOK: Duration = Duration::from_millis(10);

/// Why a worker process did not start to serve.
#[derive(Debug, thiserror::Error)]
#[error("worker `{worker}` did not start: {reason}{}\n  help: {help}", said(.lines))]
pub struct SpawnError {
    /// The worker.
    pub worker: String,
    /// Why.
    pub reason: String,
    /// What to do.
    pub help: String,
    /// The last lines of its standard error.
    pub lines: Vec<String>,
}

/// The last lines of a process, as a part of a message.
fn said(lines: &[String]) -> String {
    let lines = lines.iter().map(|line| format!("\n  | {line}"));
    lines.collect()
}

/// How a process ended, in words: "it …".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(ExitStatus);

impl Exit {
    /// The status of the system.
    pub fn status(&self) -> ExitStatus {
        self.0
    }

    /// Number of the signal that killed it, if one did.
    pub fn signal(&self) -> Option<i32> {
        #[cfg(unix)]
        {
            std::os::unix::process::ExitStatusExt::signal(&self.0)
        }
        #[cfg(not(unix))]
        {
            None
        }
    }
}

/// Names of signals that end processes; the numbers are the same on all Unix systems, except for the last one.
const SIGNALS: [(i32, &str, &str); 9] = [
    (1, "SIGHUP", ""),
    (2, "SIGINT", ""),
    (3, "SIGQUIT", ""),
    (
        4,
        "SIGILL",
        "; the processor does not have an instruction that it used",
    ),
    (6, "SIGABRT", ""),
    (8, "SIGFPE", ""),
    (
        9,
        "SIGKILL",
        "; if nobody killed it, the system ran out of memory",
    ),
    (11, "SIGSEGV", ""),
    (15, "SIGTERM", ""),
];

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.code(), self.signal()) {
            (Some(code), _) => write!(f, "it exited with status {code}"),
            (None, Some(signal)) => match SIGNALS.iter().find(|known| known.0 == signal) {
                Some((_, name, hint)) => {
                    write!(f, "it was killed by signal {signal} ({name}){hint}")
                }
                None => write!(f, "it was killed by signal {signal}"),
            },
            (None, None) => f.write_str("it ended"),
        }
    }
}

type Lines = Arc<Mutex<VecDeque<String>>>;

/// A running worker process. Dropping it ends the process.
#[derive(Debug)]
pub struct WorkerProcess {
    worker: String,
    child: Child,
    /// The process ends when this pipe does.
    lifeline: Option<ChildStdin>,
    lines: Lines,
    exit: Option<Exit>,
}

/// How long a dropped process may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);

impl WorkerProcess {
    /// Starts a process and waits until it has introduced itself.
    ///
    /// # Errors
    /// When the program cannot be started, ends, or does not introduce itself in time.
    pub fn spawn(spawn: &Spawn) -> Result<(WorkerProcess, Connection), SpawnError> {
        let failed = |reason: String, help: &str| SpawnError {
            worker: spawn.worker.clone(),
            reason,
            help: help.to_owned(),
            lines: Vec::new(),
        };
        let system = |what: &str, error: io::Error| {
            failed(
                format!("{what}: {error}"),
                "check the limits of the system, such as open files",
            )
        };
        let identity = Identity::of_this_program(&spawn.run, &spawn.worker, spawn.incarnation);
        let identity =
            identity.map_err(|e| system("the executable of this program cannot be read", e))?;
        let token = Token::random().map_err(|e| system("no random token can be made", e))?;
        let listener =
            Listener::bind(spawn.transport).map_err(|e| system("no socket can be made", e))?;
        let start = Start {
            address: listener.address().to_string(),
            run: spawn.run.clone(),
            worker: spawn.worker.clone(),
            incarnation: spawn.incarnation,
            settings: spawn.settings.clone(),
        };
        let start = serde_json::to_string(&start)
            .map_err(|e| system("its settings cannot be written", e.into()))?;
        let path = spawn.program.path.display();
        let child = Command::new(&spawn.program.path)
            .args(&spawn.program.arguments)
            .envs(spawn.variables.iter().map(|(name, value)| (name, value)))
            .env(START, start)
            .env(TOKEN, token.secret())
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.map_err(|error| {
            let help = "check that the executable still exists and that the system can start further processes";
            failed(format!("`{path}` cannot be started: {error}"), help)
        })?;
        let lines = Lines::default();
        if let Some(stderr) = child.stderr.take() {
            let (kept, worker, on_line) = (lines.clone(), spawn.worker.clone(), spawn.on_line);
            let reader = thread::Builder::new().name("worker-lines".to_owned());
            // Without this thread, the process would block once the pipe is full; closing it is better.
            drop(reader.spawn(move || keep_lines(stderr, &kept, |line| on_line(&worker, line))));
        }
        let mut process = WorkerProcess {
            worker: spawn.worker.clone(),
            lifeline: child.stdin.take(),
            child,
            lines,
            exit: None,
        };
        match process.wait_for_introduction(&listener, &token, &identity, spawn.deadline) {
            Ok(connection) => Ok((process, connection)),
            Err((reason, help)) => {
                process.end(Duration::ZERO);
                Err(SpawnError {
                    lines: process.last_lines(),
                    ..failed(reason, help)
                })
            }
        }
    }

    /// Waits for the process to connect. Others that connect are refused.
    fn wait_for_introduction(
        &mut self,
        listener: &Listener,
        token: &Token,
        identity: &Identity,
        deadline: Duration,
    ) -> Result<Connection, (String, &'static str)> {
        let until = Instant::now() + deadline;
        let mut refused: Option<String> = None;
        let because = |refused: &Option<String>| {
            refused.as_ref().map_or_else(String::new, |reason| {
                format!("; a connection was refused: {reason}")
            })
        };
        loop {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                let reason = format!(
                    "it did not connect within {:.1} s{}",
                    deadline.as_secs_f64(),
                    because(&refused)
                );
                return Err((
                    reason,
                    "if the machine is only slow, allow more time; otherwise read its output above",
                ));
            }
            let soon = Instant::now() + rest.min(LOOK);
            let accepted = listener
                .accept(soon)
                .map_err(|error| (format!("its socket failed: {error}"), "start the run again"))?;
            if let Some(stream) = accepted {
                match accept(stream, token, identity, rest.min(INTRODUCTION)) {
                    Ok(connection) => return Ok(connection),
                    Err(error) => refused = Some(error.to_string()),
                }
            } else if let Some(exit) = self.try_exit() {
                let reason = format!("{exit} before it connected{}", because(&refused));
                return Err((
                    reason,
                    "fix what it reports; `main` of a program that starts itself must call `verl::worker_main` first",
                ));
            }
        }
    }

    /// Its id in the system.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it did.
    pub fn try_exit(&mut self) -> Option<Exit> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait().ok().flatten().map(Exit);
        }
        self.exit
    }

    /// The last lines of its standard error.
    pub fn last_lines(&self) -> Vec<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().cloned().collect()
    }

    /// What is known about the loss of the worker: `reason`, how the process ended if it does so within `wait`, and its last
    /// lines.
    pub fn describe_loss(&mut self, reason: &str, wait: Duration) -> String {
        let exit = self.wait(wait).map_or_else(
            || format!("; its process {} is still there", self.id()),
            |exit| format!("; {exit}"),
        );
        format!("{reason}{exit}{}", said(&self.last_lines()))
    }

    fn wait(&mut self, up_to: Duration) -> Option<Exit> {
        let until = Instant::now() + up_to;
        loop {
            if let Some(exit) = self.try_exit() {
                return Some(exit);
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return None;
            }
            thread::sleep(rest.min(LOOK));
        }
    }

    /// Ends the process: asks it by closing its standard input, and kills it if it is still there after `grace`. Returns how
    /// it ended.
    pub fn end(&mut self, grace: Duration) -> Option<Exit> {
        self.lifeline = None;
        if let Some(exit) = self.wait(grace) {
            return Some(exit);
        }
        tracing::debug!(
            "worker `{}` did not end within {grace:?} and is killed",
            self.worker
        );
        // Also ends a stopped process. It fails only if the process has ended by itself.
        let _ = self.child.kill();
        self.wait(GRACE)
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.end(GRACE);
    }
}

/// Reads lines until the pipe ends.
fn keep_lines(pipe: impl io::Read, kept: &Mutex<VecDeque<String>>, on_line: impl Fn(&str)) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut bytes = Vec::new();
        match io::Read::take(&mut pipe, LONGEST_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&bytes);
        let line = line.trim_end_matches(['\n', '\r']);
        on_line(line);
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line.to_owned());
    }
}
