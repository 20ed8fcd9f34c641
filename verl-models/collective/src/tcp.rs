//! Members that are connected through TCP, usually processes: a connection for each pair of members.
//!
//! A connection starts with a greeting (key of the group, epoch, number of members, rank); one that does not match is
//! closed, and the member waits for the right one until the deadline. Messages are frames with checksums, tagged with the
//! epoch. A thread for each connection receives frames, so that two members that send to each other do not block.

mod frame;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::member::Member;
use crate::transport::{Message, Received, Transport, Unsent};
use crate::{CollectiveError, Operation};

pub(crate) use frame::{Frame, encode};

/// How long a member waits before it tries again to connect, or looks for the next connection.
const RETRY: Duration = Duration::from_millis(5);
/// Longest wait for the greeting of one connection, so that a silent one does not block the others for long.
const GREETING: Duration = Duration::from_millis(500);

/// A member of a group that is connected through TCP.
pub type TcpMember = Member<Connections>;

/// What the members of a group agree on before they connect.
#[derive(Debug, Clone)]
pub struct Group {
    /// Address at which each rank listens.
    pub addresses: Vec<SocketAddr>,
    /// Incarnation of the group.
    pub epoch: u64,
    /// A secret of the group; connections with another one are closed.
    pub key: [u8; 16],
    /// Longest duration of an operation.
    pub timeout: Duration,
}

/// The connections of a member.
#[derive(Debug)]
pub struct Connections {
    rank: usize,
    epoch: u64,
    /// By rank; none to itself.
    peers: Vec<Option<Peer>>,
}

#[derive(Debug)]
struct Peer {
    stream: TcpStream,
    received: Receiver<Message>,
}

impl Group {
    /// Connects rank `rank` to all others: to lower ranks at their addresses, to higher ones through `listener`, which
    /// listens at the address of `rank`. The listener can be used again for the next epoch.
    ///
    /// # Errors
    /// [`CollectiveError::Timeout`] names a rank that did not connect before the deadline.
    pub fn join(&self, rank: usize, listener: &TcpListener) -> Result<TcpMember, CollectiveError> {
        let world = self.addresses.len();
        let deadline = Instant::now() + self.timeout;
        let aborted = Arc::new(AtomicBool::new(false));
        let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
        for (peer, stream) in streams.iter_mut().enumerate().take(rank) {
            *stream = Some(self.connect(rank, peer, deadline)?);
        }
        while let Some(missing) = (rank + 1..world).find(|peer| streams[*peer].is_none()) {
            match self.accept(rank, listener) {
                Some((peer, stream)) => streams[peer] = Some(stream),
                None if Instant::now() >= deadline => return Err(no_answer(missing)),
                None => std::thread::sleep(RETRY),
            }
        }
        let mut peers = Vec::with_capacity(world);
        for (peer, stream) in streams.into_iter().enumerate() {
            let found = stream.map(|stream| Peer::new(stream, self.epoch, &aborted));
            peers.push(found.transpose().map_err(|_| lost(peer))?);
        }
        Ok(Member {
            rank,
            world,
            epoch: self.epoch,
            timeout: self.timeout,
            sequence: 0,
            aborted,
            transport: Connections {
                rank,
                epoch: self.epoch,
                peers,
            },
        })
    }

    /// Connects to a lower rank; tries again until the deadline, because it may not listen yet, or still belong to an
    /// earlier epoch.
    fn connect(
        &self,
        rank: usize,
        peer: usize,
        deadline: Instant,
    ) -> Result<TcpStream, CollectiveError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(no_answer(peer));
            }
            let stream = TcpStream::connect_timeout(&self.addresses[peer], left);
            if let Ok(mut stream) = stream
                && stream.write_all(&self.greeting(rank)).is_ok()
                && self.read_greeting(&mut stream, left) == Some(peer)
            {
                return Ok(stream);
            }
            std::thread::sleep(RETRY);
        }
    }

    /// A connection of a higher rank that waits at the listener, if there is a valid one.
    fn accept(&self, rank: usize, listener: &TcpListener) -> Option<(usize, TcpStream)> {
        listener.set_nonblocking(true).ok()?;
        let (mut stream, _) = listener.accept().ok()?;
        stream.set_nonblocking(false).ok()?;
        let peer = self.read_greeting(&mut stream, GREETING)?;
        let expected = rank < peer && peer < self.addresses.len();
        let answered = expected && stream.write_all(&self.greeting(rank)).is_ok();
        answered.then_some((peer, stream))
    }

    fn greeting(&self, rank: usize) -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[..16].copy_from_slice(&self.key);
        let numbers = [self.epoch, self.addresses.len() as u64, rank as u64];
        for (place, number) in bytes[16..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The rank that greets with this group's key, epoch and size; `None` for any other greeting.
    fn read_greeting(&self, stream: &mut TcpStream, wait: Duration) -> Option<usize> {
        stream.set_read_timeout(Some(wait)).ok()?;
        let mut found = [0; 40];
        stream.read_exact(&mut found).ok()?;
        stream.set_read_timeout(None).ok()?;
        stream.set_nodelay(true).ok()?;
        let ranks = 0..self.addresses.len();
        ranks.into_iter().find(|rank| self.greeting(*rank) == found)
    }
}

fn no_answer(rank: usize) -> CollectiveError {
    CollectiveError::Timeout {
        rank,
        operation: Operation::Join,
    }
}

fn lost(rank: usize) -> CollectiveError {
    CollectiveError::PeerLost { rank }
}

impl Peer {
    /// Starts the thread that receives frames; it ends when the connection is closed.
    fn new(stream: TcpStream, epoch: u64, aborted: &Arc<AtomicBool>) -> std::io::Result<Self> {
        let (sender, received) = unbounded();
        let reader = stream.try_clone()?;
        let aborted = Arc::clone(aborted);
        std::thread::Builder::new()
            .name("collective-receive".to_owned())
            .spawn(move || receive_frames(reader, epoch, &sender, &aborted))?;
        Ok(Peer { stream, received })
    }
}

/// Receives until the connection ends or a frame is damaged; the receiver of messages then sees that the sender is gone.
fn receive_frames(
    mut stream: TcpStream,
    epoch: u64,
    messages: &Sender<Message>,
    aborted: &AtomicBool,
) {
    while let Ok(frame) = Frame::read(&mut stream) {
        match frame {
            Frame::Abort { epoch: of } if of == epoch => aborted.store(true, Ordering::SeqCst),
            Frame::Abort { .. } => {}
            Frame::Message(message) => {
                if messages.send(message).is_err() {
                    break;
                }
            }
        }
    }
    // The peer must not wait for someone to read what it sends.
    let _ = stream.shutdown(Shutdown::Both);
}

impl Transport for Connections {
    fn send(&mut self, to: usize, message: Message, deadline: Instant) -> Result<(), Unsent> {
        let peer = self.peers[to].as_mut().ok_or(Unsent::Lost)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Unsent::Late);
        }
        let limited = peer.stream.set_write_timeout(Some(left));
        let sent = limited.and_then(|()| peer.stream.write_all(&encode(&Frame::Message(message))));
        sent.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Unsent::Late,
            _ => Unsent::Lost,
        })
    }

    fn receive(&mut self, from: usize, wait: Duration) -> Received {
        let Some(peer) = self.peers.get(from).and_then(Option::as_ref) else {
            return Received::Lost;
        };
        match peer.received.recv_timeout(wait) {
            Ok(message) => Received::Message(message),
            Err(RecvTimeoutError::Timeout) => Received::Nothing,
            Err(RecvTimeoutError::Disconnected) => Received::Lost,
        }
    }

    fn abort_others(&mut self) {
        let frame = encode(&Frame::Abort { epoch: self.epoch });
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if rank != self.rank
                && let Some(peer) = peer
            {
                let _ = peer.stream.set_write_timeout(Some(RETRY));
                let _ = peer.stream.write_all(&frame);
                // Nothing follows in this group; the peer still reads what was sent.
                let _ = peer.stream.shutdown(Shutdown::Write);
            }
        }
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        for peer in self.peers.iter().flatten() {
            let _ = peer.stream.shutdown(Shutdown::Write);
            let _ = peer.stream.shutdown(Shutdown::Read);
        }
    }
}

#[cfg(test)]
impl Connections {
    /// The connection to a rank, for tests that send something wrong.
    pub(crate) fn stream(&self, to: usize) -> Option<TcpStream> {
        self.peers[to].as_ref()?.stream.try_clone().ok()
    }
}
