//! The worker's end of a link: one request after the other, signals at once.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use verl_words::panics::catch_panic;

use crate::frame::Kind;
use crate::handshake::Connection;
use crate::link::{Incoming, Link, LinkError, LinkSettings};
use crate::message::{Message, MessageError};

/// Processes the requests of a run.
pub trait Serve {
    /// Processes one request and returns the reply. What happens in between goes through `events`. A panic ends the worker.
    ///
    /// # Errors
    /// A request that cannot be read or a reply that cannot be written, which is the same as a panic.
    fn handle(&mut self, request: Message, events: &Events) -> Result<Message, MessageError>;
}

/// What a worker does outside of requests, on the thread that reads.
pub trait Signals: Send {
    /// Processes a signal, also during a request; must not block.
    fn signal(&mut self, message: Message);

    /// The run is gone, silent, or has ended the worker. The request in progress may never end, so a process exits here.
    fn lost(&mut self, reason: &LinkError);
}

/// Sends events of one request.
#[derive(Clone)]
pub struct Events {
    link: Arc<Link>,
    request: u64,
}

impl Events {
    /// Sends an event, waiting up to `deadline` while the run does not take it.
    ///
    /// # Errors
    /// When the run is gone, or does not take the event.
    pub fn send(&self, message: &Message, deadline: Duration) -> Result<(), LinkError> {
        self.link.send(Kind::Event, self.request, message, deadline)
    }

    /// Number of the request.
    pub fn request(&self) -> u64 {
        self.request
    }
}

/// Longest wait for the run to take a reply. The run reads replies at all times, except while it processes earlier events.
const REPLY: Duration = Duration::from_secs(24 * 3600);

/// Serves until the link is lost, and returns why.
///
/// # Errors
/// When no thread can be started.
pub fn serve(
    connection: Connection,
    settings: &LinkSettings,
    server: &mut dyn Serve,
    mut signals: impl Signals + 'static,
) -> io::Result<LinkError> {
    let (sender, requests) = unbounded();
    let link = Link::start(connection, settings, move |incoming| match incoming {
        Incoming::Frame(frame) if frame.header.kind == Kind::Signal => {
            signals.signal(frame.message)
        }
        Incoming::Frame(frame) if frame.header.kind == Kind::Request => {
            let _ = sender.send(Ok((frame.header.request, frame.message)));
        }
        // Nothing that a run of this protocol sends.
        Incoming::Frame(_) => {}
        Incoming::Lost(reason) => {
            signals.lost(&reason);
            let _ = sender.send(Err(reason));
        }
    })?;
    let link = Arc::new(link);
    loop {
        let (request, message) = match requests.recv() {
            Ok(Ok(next)) => next,
            Ok(Err(reason)) => return Ok(reason),
            Err(_) => return Ok(link.lost().unwrap_or(LinkError::Ended)),
        };
        let events = Events {
            link: link.clone(),
            request,
        };
        let reply = catch_panic(|| server.handle(message, &events));
        let sent = match reply {
            Ok(Ok(reply)) => link.send(Kind::Reply, request, &reply, REPLY),
            Ok(Err(error)) => Err(LinkError::Unsendable(error.to_string())),
            Err(text) => Err(LinkError::Panicked(text)),
        };
        let Err(error) = sent else {
            continue;
        };
        // The run would wait for the reply in vain, and the state of the server may be inconsistent.
        let text = match &error {
            LinkError::Panicked(text) => text.clone(),
            error => error.to_string(),
        };
        if let Ok(text) = Message::new(&text) {
            let _ = link.send(Kind::Panicked, request, &text, REPLY);
        }
        return Ok(error);
    }
}
