//! An established connection: a thread that reads, a thread that sends heartbeats, and a lock for those who write.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use serde::{Deserialize, Serialize};

use crate::frame::{self, Frame, FrameError, Kind};
use crate::handshake::{Connection, TICK};
use crate::message::Message;
use crate::socket::Stream;

/// Deadlines and limits of a link, the same on both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkSettings {
    /// How often each side sends a heartbeat.
    pub heartbeat: Duration,
    /// How long nothing may arrive before the other side is considered lost; a few heartbeats at least.
    pub deadline: Duration,
    /// Largest message in bytes.
    pub limit: u64,
}

impl Default for LinkSettings {
    fn default() -> Self {
        LinkSettings {
            heartbeat: Duration::from_secs(1),
            deadline: Duration::from_secs(10),
            limit: 16 << 30,
        }
    }
}

/// Why a link no longer works. Sentences are about the other side: "it …".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The other side closed the connection, or its process ended.
    #[error("it closed the connection")]
    Closed,
    /// The other side is stopped, ended within a message, or sends something else.
    #[error("{0}")]
    Lost(String),
    /// This side has ended the link.
    #[error("the connection was ended")]
    Ended,
    /// A wait passed its deadline, while the other side is alive.
    #[error("no answer within {:.1} s when asked {what}, though its process sends heartbeats", .after.as_secs_f64())]
    Deadline {
        /// What was asked, after "when asked".
        what: String,
        /// The deadline.
        after: Duration,
    },
    /// The other side does not take messages, while it is alive.
    #[error("it did not take a message within {:.1} s, though its process sends heartbeats", .0.as_secs_f64())]
    Congested(Duration),
    /// A request panicked on the other side.
    #[error("it panicked: {0}")]
    Panicked(String),
    /// A message that cannot be sent.
    #[error("a message cannot be sent: {0}")]
    Unsendable(String),
}

impl From<FrameError> for LinkError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed => LinkError::Closed,
            error => LinkError::Lost(error.to_string()),
        }
    }
}

/// State that the threads of a link share.
struct Shared {
    /// For writing; never locked while anything but a frame is made.
    writer: Mutex<Stream>,
    /// For closing, without the lock.
    stream: Stream,
    lost: OnceLock<LinkError>,
    incarnation: u64,
    dropped: AtomicU64,
}

impl Shared {
    /// Records why the link is lost, unless it is already, and closes it. Returns the recorded reason.
    fn lose(&self, reason: LinkError) -> LinkError {
        let recorded = self.lost.get_or_init(|| reason).clone();
        self.stream.close();
        recorded
    }

    fn write(
        &self,
        mut writer: MutexGuard<'_, Stream>,
        (kind, request): (Kind, u64),
        message: &Message,
        deadline: Duration,
    ) -> Result<(), LinkError> {
        let since = Instant::now();
        let result = frame::write(
            &mut *writer,
            (kind, self.incarnation, request),
            message,
            || match self.lost.get() {
                Some(_) => Err(FrameError::Closed),
                None if since.elapsed() < deadline => Ok(()),
                None => Err(FrameError::Silent(deadline)),
            },
        );
        // A frame that was written in part cannot be continued, so nothing can follow it.
        result.map_err(|error| match error {
            FrameError::TooLarge { .. } => LinkError::Unsendable(error.to_string()),
            FrameError::Silent(deadline) => self.lose(LinkError::Congested(deadline)),
            // What it sent before is still read; the reading thread then finds out how it ended.
            FrameError::Io(error) if is_closed(&error) => LinkError::Closed,
            error => self.lose(error.into()),
        })
    }
}

fn is_closed(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

/// What a link's reading thread reports.
#[derive(Debug)]
pub(crate) enum Incoming {
    Frame(Frame),
    /// The last report.
    Lost(LinkError),
}

/// One end of an established connection. Dropping it ends the connection.
pub(crate) struct Link {
    shared: Arc<Shared>,
    limit: u64,
    /// Dropping it ends the heartbeats.
    _heartbeats: Sender<()>,
}

impl Link {
    /// Starts the threads. `report` runs on the reading thread; while it blocks, nothing is read, and the other side
    /// cannot send more than the system's buffers take.
    pub(crate) fn start(
        connection: Connection,
        settings: &LinkSettings,
        mut report: impl FnMut(Incoming) + Send + 'static,
    ) -> std::io::Result<Link> {
        let Connection {
            stream,
            mut reader,
            incarnation,
            ..
        } = connection;
        reader.set_limit(settings.limit);
        reader.set_deadline(settings.deadline.max(TICK));
        let shared = Arc::new(Shared {
            writer: Mutex::new(stream.try_clone()?),
            stream,
            lost: OnceLock::new(),
            incarnation,
            dropped: AtomicU64::new(0),
        });
        let of_reader = shared.clone();
        thread::Builder::new().name("link-reader".to_owned()).spawn(move || {
            loop {
                match reader.read() {
                    Ok(frame) if frame.header.incarnation != incarnation => {
                        of_reader.dropped.fetch_add(1, Ordering::Relaxed);
                        tracing::debug!(
                            "a message of incarnation {} arrived at incarnation {incarnation} and was dropped",
                            frame.header.incarnation
                        );
                    }
                    Ok(frame) if frame.header.kind == Kind::Heartbeat => {}
                    Ok(frame) => report(Incoming::Frame(frame)),
                    Err(error) => {
                        return report(Incoming::Lost(of_reader.lose(error.into())));
                    }
                }
            }
        })?;
        let (heartbeats, ended) = bounded::<()>(0);
        let (of_heartbeats, every, deadline) =
            (shared.clone(), settings.heartbeat, settings.deadline);
        let beat = Message::default();
        thread::Builder::new()
            .name("link-heartbeats".to_owned())
            .spawn(move || {
                while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                    let writer = match of_heartbeats.writer.try_lock() {
                        Ok(writer) => writer,
                        Err(TryLockError::Poisoned(error)) => error.into_inner(),
                        // What is being written is a sign of life as well.
                        Err(TryLockError::WouldBlock) => continue,
                    };
                    if of_heartbeats
                        .write(writer, (Kind::Heartbeat, 0), &beat, deadline)
                        .is_err()
                    {
                        return;
                    }
                }
            })?;
        Ok(Link {
            shared,
            limit: settings.limit,
            _heartbeats: heartbeats,
        })
    }

    /// Sends a message, waiting up to `deadline` for the other side to take it.
    pub(crate) fn send(
        &self,
        kind: Kind,
        request: u64,
        message: &Message,
        deadline: Duration,
    ) -> Result<(), LinkError> {
        if let Some(lost) = self.shared.lost.get() {
            return Err(lost.clone());
        }
        let bytes = message
            .parts()
            .iter()
            .map(|part| part.len() as u64)
            .sum::<u64>();
        if bytes > self.limit {
            let limit = self.limit;
            let error = FrameError::TooLarge { bytes, limit };
            return Err(LinkError::Unsendable(error.to_string()));
        }
        let writer = self
            .shared
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.shared
            .write(writer, (kind, request), message, deadline)
    }

    /// Incarnation of the worker.
    pub(crate) fn incarnation(&self) -> u64 {
        self.shared.incarnation
    }

    /// Why the link is lost, if it is.
    pub(crate) fn lost(&self) -> Option<LinkError> {
        self.shared.lost.get().cloned()
    }

    /// Number of messages of other incarnations that arrived and were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Ends the link.
    pub(crate) fn end(&self) {
        self.shared.lose(LinkError::Ended);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end();
    }
}
