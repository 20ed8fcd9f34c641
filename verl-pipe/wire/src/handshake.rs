//! Who may connect. The worker introduces itself; the run accepts or refuses it, and both say why.

use std::fmt::Write as _;
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::frame::{self, Frame, FrameError, FrameReader, Kind};
use crate::message::Message;
use crate::socket::Stream;

/// Largest message of a connection that is not established.
const LIMIT: u64 = 64 << 10;
/// How often waiting threads check what else happened.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// A secret that a run passes to its worker, and that the worker sends back: 32 random bytes.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token(String);

impl Token {
    /// A new one.
    ///
    /// # Errors
    /// When the system has no randomness.
    pub fn random() -> io::Result<Token> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let mut text = String::new();
        for byte in bytes {
            let _ = write!(text, "{byte:02x}");
        }
        Ok(Token(text))
    }

    /// The token that a worker got as `text`.
    pub fn received(text: impl Into<String>) -> Token {
        Token(text.into())
    }

    /// Its text, for the environment of the worker.
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// Whether both are equal, in a time that does not depend on where they differ.
    fn matches(&self, other: &Token) -> bool {
        let (left, right) = (self.0.as_bytes(), other.0.as_bytes());
        let differences = left.iter().zip(right).fold(0, |all, (a, b)| all | (a ^ b));
        left.len() == right.len() && differences == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Which start of which worker of which run, and which program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Version of verl.
    pub version: String,
    /// Hash of the executable.
    pub build: String,
    /// The run.
    pub run: String,
    /// The worker.
    pub worker: String,
    /// Which start of the worker, counted from 1.
    pub incarnation: u64,
}

impl Identity {
    /// The identity of a worker that runs the executable of this process.
    ///
    /// # Errors
    /// When the executable cannot be read.
    pub fn of_this_program(run: &str, worker: &str, incarnation: u64) -> io::Result<Identity> {
        Ok(Identity {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            build: build_of_this_program()?,
            run: run.to_owned(),
            worker: worker.to_owned(),
            incarnation,
        })
    }

    /// Why `other` cannot work with this one.
    fn refusal(&self, other: &Identity) -> Option<String> {
        let differ = |what: &str, ours: &str, theirs: &str, help: &str| {
            (ours != theirs)
                .then(|| format!("{what} is `{theirs}`, and `{ours}` is expected; {help}"))
        };
        let incarnation = |identity: &Identity| identity.incarnation.to_string();
        differ(
            "the run",
            &self.run,
            &other.run,
            "it was started by another run",
        )
        .or_else(|| {
            differ(
                "the worker",
                &self.worker,
                &other.worker,
                "it was started as another worker",
            )
        })
        .or_else(|| {
            let help = "it was replaced by a later start of the worker";
            differ(
                "the incarnation",
                &incarnation(self),
                &incarnation(other),
                help,
            )
        })
        .or_else(|| {
            differ(
                "the version of verl",
                &self.version,
                &other.version,
                SAME_PROGRAM,
            )
        })
        .or_else(|| {
            differ(
                "the build of the program",
                &self.build,
                &other.build,
                SAME_PROGRAM,
            )
        })
    }
}

const SAME_PROGRAM: &str =
    "run and worker must be the same executable; do not rebuild or replace it during a run";

/// Hash of the executable of this process.
fn build_of_this_program() -> io::Result<String> {
    static BUILD: OnceLock<String> = OnceLock::new();
    if let Some(build) = BUILD.get() {
        return Ok(build.clone());
    }
    // On Linux the file that is running, even if another one was put in its place.
    let running = Path::new("/proc/self/exe");
    let path = match running.exists() {
        true => running.to_owned(),
        false => std::env::current_exe()?,
    };
    let mut file = std::fs::File::open(path)?;
    let (mut hash, mut bytes) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut bytes)? {
            0 => break,
            read => hash.update(&bytes[..read]),
        }
    }
    Ok(BUILD
        .get_or_init(|| format!("{:032x}", hash.digest128()))
        .clone())
}

#[derive(Serialize, Deserialize)]
struct Hello {
    token: Token,
    identity: Identity,
    process: u32,
}

/// Why a connection was not established.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The stream ended, was silent, or contains something else.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The other side answered with something else.
    #[error("it does not follow the worker protocol: {0}")]
    Unexpected(String),
    /// This side refuses the other one.
    #[error("{0}")]
    Refused(String),
    /// The other side refuses this one.
    #[error("the run refuses this worker: {0}")]
    RefusedByRun(String),
}

/// A connection after its hand-shake, for [`Client::start`](crate::client::Client::start) and
/// [`serve`](crate::serve::serve).
#[derive(Debug)]
pub struct Connection {
    pub(crate) stream: Stream,
    pub(crate) reader: FrameReader<Stream>,
    /// Incarnation of the worker.
    pub incarnation: u64,
    /// Process of the worker.
    pub process: u32,
}

fn open(stream: &Stream, deadline: Duration) -> io::Result<FrameReader<Stream>> {
    stream.set_tick(TICK.min(deadline))?;
    let reading = stream.try_clone()?;
    Ok(FrameReader::new(
        reading,
        LIMIT,
        TICK.min(deadline),
        deadline,
    ))
}

/// The end of a write whose reader is not there.
fn stuck(deadline: Duration) -> impl FnMut() -> Result<(), FrameError> {
    move || Err(FrameError::Silent(deadline))
}

fn head<T: serde::de::DeserializeOwned>(frame: &Frame) -> Result<T, HandshakeError> {
    let head = frame.message.head();
    head.map_err(|e| HandshakeError::Unexpected(e.to_string()))
}

/// The worker's side: introduces itself and waits for the answer, up to `deadline`.
///
/// # Errors
/// When the run refuses it, or is not the one that started it.
pub fn introduce(
    stream: Stream,
    token: &Token,
    identity: &Identity,
    deadline: Duration,
) -> Result<Connection, HandshakeError> {
    let mut reader = open(&stream, deadline).map_err(FrameError::from)?;
    let process = std::process::id();
    let hello = Hello {
        token: token.clone(),
        identity: identity.clone(),
        process,
    };
    let hello = message(&hello)?;
    let mut writing = &mut stream.try_clone().map_err(FrameError::from)?;
    frame::write(
        &mut writing,
        (Kind::Hello, identity.incarnation, 0),
        &hello,
        stuck(deadline),
    )?;
    let answer = reader.read()?;
    match answer.header.kind {
        Kind::Welcome => {}
        Kind::Refused => return Err(HandshakeError::RefusedByRun(head(&answer)?)),
        kind => {
            return Err(HandshakeError::Unexpected(format!(
                "a hello was answered with {kind:?}"
            )));
        }
    }
    if let Some(reason) = identity.refusal(&head(&answer)?) {
        return Err(HandshakeError::Refused(reason));
    }
    Ok(Connection {
        stream,
        reader,
        incarnation: identity.incarnation,
        process,
    })
}

/// The run's side: waits up to `deadline` for a worker to introduce itself, and accepts or refuses it.
///
/// # Errors
/// When it is not the expected worker, or not a worker at all.
pub fn accept(
    stream: Stream,
    token: &Token,
    expected: &Identity,
    deadline: Duration,
) -> Result<Connection, HandshakeError> {
    let mut reader = open(&stream, deadline).map_err(FrameError::from)?;
    let mut writing = stream.try_clone().map_err(FrameError::from)?;
    let mut answer = |kind, message: &Message| {
        frame::write(
            &mut writing,
            (kind, expected.incarnation, 0),
            message,
            stuck(deadline),
        )
    };
    let checked = reader
        .read()
        .map_err(HandshakeError::from)
        .and_then(|first| {
            if first.header.kind != Kind::Hello {
                let found = format!("the first message is {:?}", first.header.kind);
                return Err(HandshakeError::Unexpected(found));
            }
            let hello: Hello = head(&first)?;
            // Whoever does not know the token learns nothing else.
            match token.matches(&hello.token) {
                false => Err(HandshakeError::Refused(WRONG_TOKEN.to_owned())),
                true => match expected.refusal(&hello.identity) {
                    Some(reason) => Err(HandshakeError::Refused(reason)),
                    None => Ok(hello.process),
                },
            }
        });
    match checked {
        Ok(process) => {
            answer(Kind::Welcome, &message(expected)?)?;
            Ok(Connection {
                stream,
                reader,
                incarnation: expected.incarnation,
                process,
            })
        }
        Err(error) => {
            let reason = match &error {
                HandshakeError::Frame(frame) => {
                    Some(format!("its messages cannot be read: {frame}"))
                }
                error => Some(error.to_string()),
            };
            // It may be gone, or may not understand the answer; the error is reported here in any case.
            if let Some(Ok(reason)) = reason.map(|reason| message(&reason)) {
                let _ = answer(Kind::Refused, &reason);
            }
            Err(error)
        }
    }
}

const WRONG_TOKEN: &str = "its token is wrong: it was not started by this run";

fn message<T: Serialize>(head: &T) -> Result<Message, HandshakeError> {
    Message::new(head).map_err(|e| HandshakeError::Unexpected(e.to_string()))
}

#[cfg(test)]
mod tests;
