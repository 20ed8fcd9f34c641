//! The run's end of a link: requests to a worker, their replies, and what happens in between.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use crate::frame::Kind;
use crate::handshake::Connection;
use crate::link::{Incoming, Link, LinkError, LinkSettings};
use crate::message::Message;

/// What a worker sends without being waited for.
#[derive(Debug)]
pub enum FromWorker {
    /// Something that happened during request `request`.
    Event {
        /// The number that [`Client::begin`] returned.
        request: u64,
        /// What happened.
        message: Message,
    },
    /// Request `request` ended. Only for requests that [`Client::begin`] sent.
    Reply {
        /// The number that [`Client::begin`] returned.
        request: u64,
        /// Its result; an error if it panicked, after which the worker ends.
        result: Result<Message, LinkError>,
    },
    /// The worker is lost; nothing else follows.
    Lost(LinkError),
}

/// Replies that someone waits for, by request.
type Waiting = Mutex<BTreeMap<u64, Sender<Result<Message, LinkError>>>>;

/// The run's end of a link. Dropping it ends the connection, and with it the worker.
pub struct Client {
    link: Link,
    waiting: Arc<Waiting>,
    next: AtomicU64,
}

impl Client {
    /// Starts the link. `report` receives what the worker sends without being waited for, in the order in which it was
    /// sent, on the thread that reads; while it blocks, the worker is slowed down.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(
        connection: Connection,
        settings: &LinkSettings,
        mut report: impl FnMut(FromWorker) + Send + 'static,
    ) -> io::Result<Client> {
        let waiting = Arc::new(Waiting::default());
        let of_reader = waiting.clone();
        let link = Link::start(connection, settings, move |incoming| {
            let locked = || of_reader.lock().unwrap_or_else(PoisonError::into_inner);
            let frame = match incoming {
                Incoming::Frame(frame) => frame,
                Incoming::Lost(reason) => {
                    for (_, waiting) in std::mem::take(&mut *locked()) {
                        let _ = waiting.send(Err(reason.clone()));
                    }
                    return report(FromWorker::Lost(reason));
                }
            };
            let (request, message) = (frame.header.request, frame.message);
            let result = match frame.header.kind {
                Kind::Event => return report(FromWorker::Event { request, message }),
                Kind::Reply => Ok(message),
                Kind::Panicked => Err(LinkError::Panicked(message.head().unwrap_or_default())),
                // Nothing that a worker of this protocol sends.
                _ => return,
            };
            let waiting = locked().remove(&request);
            match waiting {
                // Whoever waited may have passed its deadline.
                Some(waiting) => drop(waiting.send(result)),
                None => report(FromWorker::Reply { request, result }),
            }
        })?;
        Ok(Client {
            link,
            waiting,
            next: AtomicU64::new(1),
        })
    }

    /// Sends a request, whose end is reported as [`FromWorker::Reply`] with the returned number. `deadline` is for the
    /// worker to take the message.
    ///
    /// # Errors
    /// When the worker is lost, or does not take the message.
    pub fn begin(&self, message: &Message, deadline: Duration) -> Result<u64, LinkError> {
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        self.link.send(Kind::Request, request, message, deadline)?;
        Ok(request)
    }

    /// Sends a request and waits for its reply; `what` completes "when asked …".
    ///
    /// # Errors
    /// When the worker is lost, panics, or does not reply before the deadline.
    pub fn ask(
        &self,
        message: &Message,
        what: &str,
        deadline: Duration,
    ) -> Result<Message, LinkError> {
        let since = Instant::now();
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = bounded(1);
        let waiting = || self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting().insert(request, sender);
        if let Err(error) = self.link.send(Kind::Request, request, message, deadline) {
            waiting().remove(&request);
            return Err(error);
        }
        // The link may have been lost before the entry was made, and then no one answers it.
        if let Some(lost) = self.link.lost()
            && waiting().remove(&request).is_some()
        {
            return Err(lost);
        }
        match reply.recv_timeout(deadline.saturating_sub(since.elapsed())) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                // The entry stays, so that a late reply is dropped.
                Err(LinkError::Deadline {
                    what: what.to_owned(),
                    after: deadline,
                })
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.link.lost().unwrap_or(LinkError::Ended))
            }
        }
    }

    /// Sends a message that the worker processes at once, even during a request.
    ///
    /// # Errors
    /// When the worker is lost, or does not take the message.
    pub fn signal(&self, message: &Message, deadline: Duration) -> Result<(), LinkError> {
        self.link.send(Kind::Signal, 0, message, deadline)
    }

    /// Incarnation of the worker.
    pub fn incarnation(&self) -> u64 {
        self.link.incarnation()
    }

    /// Why the worker is lost, if it is.
    pub fn lost(&self) -> Option<LinkError> {
        self.link.lost()
    }

    /// Number of messages of other incarnations that arrived and were dropped.
    pub fn dropped(&self) -> u64 {
        self.link.dropped()
    }

    /// Ends the connection; the worker ends, and nothing of it is reported any more except the loss.
    pub fn end(&self) {
        self.link.end();
    }
}
