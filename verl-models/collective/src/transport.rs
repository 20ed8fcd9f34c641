//! What carries messages between two members.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Data, Operation};

/// A message of an operation.
#[derive(Debug, Clone)]
pub struct Message {
    /// Epoch of the sender's group.
    pub epoch: u64,
    /// Operations that the sender called before this one.
    pub sequence: u64,
    /// The operation.
    pub operation: Operation,
    /// Its content.
    pub payload: Payload,
}

/// The content of a message.
#[derive(Debug, Clone)]
pub enum Payload {
    /// Nothing.
    Empty,
    /// All of the data.
    Whole(Arc<Data>),
    /// The part of f32 numbers at this range.
    Part(Arc<Data>, Range<usize>),
}

/// What arrived.
#[derive(Debug)]
pub enum Received {
    /// A message.
    Message(Message),
    /// Nothing in time.
    Nothing,
    /// The sender is gone, and all its messages were received.
    Lost,
}

/// Why a message was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsent {
    /// The receiver is gone.
    Lost,
    /// The receiver takes nothing.
    Late,
}

/// Carries messages between the members of a group.
pub trait Transport: Send {
    /// Sends a message before the deadline.
    ///
    /// # Errors
    /// The receiver is gone or takes nothing.
    fn send(&mut self, to: usize, message: Message, deadline: Instant) -> Result<(), Unsent>;

    /// Waits for the next message of `from`.
    fn receive(&mut self, from: usize, wait: Duration) -> Received;

    /// Sets the abort flags of all other members as soon as they can be reached; does not wait.
    fn abort_others(&mut self);
}
