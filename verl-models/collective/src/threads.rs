//! Members that are threads of one process: messages go through channels and share buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::member::Member;
use crate::transport::{Message, Received, Transport, Unsent};

/// A member of a group of threads.
pub type ThreadMember = Member<Channels>;

/// One channel from each member to each other.
#[derive(Debug)]
pub struct Channels {
    pub(crate) to: Vec<Sender<Message>>,
    from: Vec<Receiver<Message>>,
    /// Abort flags of all members.
    flags: Vec<Arc<AtomicBool>>,
}

/// The members of a group of `world` threads, by rank; each operation ends after `timeout` at the latest.
#[must_use]
pub fn threads(world: usize, epoch: u64, timeout: Duration) -> Vec<ThreadMember> {
    let flags: Vec<Arc<AtomicBool>> = (0..world).map(|_| Arc::default()).collect();
    let mut to: Vec<Vec<Sender<Message>>> = (0..world).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<Receiver<Message>>> = (0..world).map(|_| Vec::new()).collect();
    for sender in &mut to {
        for receiver in &mut from {
            let (send, receive) = unbounded();
            sender.push(send);
            receiver.push(receive);
        }
    }
    let each = to.into_iter().zip(from).enumerate();
    each.map(|(rank, (to, from))| Member {
        rank,
        world,
        epoch,
        timeout,
        sequence: 0,
        aborted: Arc::clone(&flags[rank]),
        transport: Channels {
            to,
            from,
            flags: flags.clone(),
        },
    })
    .collect()
}

impl Transport for Channels {
    fn send(&mut self, to: usize, message: Message, _deadline: Instant) -> Result<(), Unsent> {
        self.to[to].send(message).map_err(|_| Unsent::Lost)
    }

    fn receive(&mut self, from: usize, wait: Duration) -> Received {
        match self.from[from].recv_timeout(wait) {
            Ok(message) => Received::Message(message),
            Err(RecvTimeoutError::Timeout) => Received::Nothing,
            Err(RecvTimeoutError::Disconnected) => Received::Lost,
        }
    }

    fn abort_others(&mut self) {
        for flag in &self.flags {
            flag.store(true, Ordering::SeqCst);
        }
    }
}
