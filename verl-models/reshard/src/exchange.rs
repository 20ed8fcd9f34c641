//! A plan carried out on byte buffers.
//!
//! [`execute`] runs all ranks of both sides on threads; a process with a single rank calls [`Exchange::send_from`] and
//! [`Exchange::receive_at`] for it.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::block::Block;
use crate::buffers::{Placed, RankBuffers, check_count};
use crate::layout::Layout;
use crate::plan::{Piece, Transfers};

/// Carries packages between ranks, in any order.
pub trait Transport: Sync {
    /// Hands over package `package`, by its position in [`Transfers::packages`], for a rank of the destination.
    ///
    /// # Errors
    /// Why it cannot be sent.
    fn send(&self, package: usize, destination: usize, bytes: Vec<u8>) -> Result<(), String>;

    /// The next package for a rank of the destination; `None` once `deadline` has passed.
    ///
    /// # Errors
    /// Why nothing more can arrive.
    fn receive(
        &self,
        destination: usize,
        deadline: Instant,
    ) -> Result<Option<(usize, Vec<u8>)>, String>;
}

/// A queue in memory for each rank of the destination.
pub struct InMemory {
    queues: Vec<(Sender<Parcel>, Mutex<Receiver<Parcel>>)>,
}

type Parcel = (usize, Vec<u8>);

impl InMemory {
    /// Queues for this many ranks.
    #[must_use]
    pub fn new(destinations: usize) -> Self {
        let queue = |_| {
            let (sender, receiver) = channel();
            (sender, Mutex::new(receiver))
        };
        InMemory {
            queues: (0..destinations).map(queue).collect(),
        }
    }
}

impl Transport for InMemory {
    fn send(&self, package: usize, destination: usize, bytes: Vec<u8>) -> Result<(), String> {
        let queue = self.queues.get(destination).ok_or("unknown rank")?;
        queue
            .0
            .send((package, bytes))
            .map_err(|error| error.to_string())
    }

    fn receive(&self, destination: usize, deadline: Instant) -> Result<Option<Parcel>, String> {
        let queue = self.queues.get(destination).ok_or("unknown rank")?;
        let queue = queue.1.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        match queue.recv_timeout(left) {
            Ok(parcel) => Ok(Some(parcel)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Why a change of layout was not completed. The source's buffers are unchanged; discard those of the destination.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// Buffers of another layout.
    #[error(
        "rank {rank} has {got} bytes of `{tensor}`, but its shard has {expected}; pass the buffers of this layout"
    )]
    Buffer {
        /// The rank.
        rank: usize,
        /// The tensor.
        tensor: String,
        /// Bytes passed.
        got: usize,
        /// Bytes of the shard.
        expected: usize,
    },
    /// A number of ranks or tensors that is not the layout's.
    #[error("buffers for {got} {what} were passed, but the layout has {expected}")]
    Count {
        /// Ranks or tensors.
        what: &'static str,
        /// Passed.
        got: usize,
        /// In the layout.
        expected: usize,
    },
    /// The transport failed.
    #[error("rank {rank} could not {action}: {reason}")]
    Transport {
        /// Rank of the source that sends, or of the destination that receives.
        rank: usize,
        /// The failed action.
        action: &'static str,
        /// Why.
        reason: String,
    },
    /// Packages that did not arrive.
    #[error(
        "rank {rank} waited {timeout:?} for package {package} from rank {source_rank}; pending: {pending} of {expected} packages"
    )]
    Deadline {
        /// Rank of the destination.
        rank: usize,
        /// The first missing package.
        package: usize,
        /// Its sender.
        source_rank: usize,
        /// Packages that are missing.
        pending: usize,
        /// Packages of the rank.
        expected: usize,
        /// How long it waited.
        timeout: Duration,
    },
    /// A package that is not this rank's, or has arrived before, or has another length.
    #[error("rank {rank} received package {package} with {bytes} bytes, which it does not expect")]
    Unexpected {
        /// Rank of the destination.
        rank: usize,
        /// Number of the package.
        package: usize,
        /// Its length.
        bytes: usize,
    },
    /// Replicas that disagree.
    #[error("rank {rank} has other values of `{tensor}` than the ranks before it")]
    Replica {
        /// The rank.
        rank: usize,
        /// The tensor.
        tensor: String,
    },
    /// Cells that no rank has.
    #[error("no rank has cells {block} of `{tensor}`")]
    Missing {
        /// The tensor.
        tensor: String,
        /// The cells.
        block: Block,
    },
}

/// A plan and the layouts that it leads from and to.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    /// The plan.
    pub transfers: &'a Transfers,
    /// Where it starts.
    pub source: &'a Layout,
    /// Where it ends.
    pub destination: &'a Layout,
}

impl Exchange<'_> {
    /// The content of a package, from the buffers of the source rank that sends it.
    ///
    /// # Errors
    /// The plan is not one of these layouts.
    ///
    /// # Panics
    /// Panics if there is no such package.
    pub fn pack(&self, package: usize, buffers: &RankBuffers) -> Result<Vec<u8>, ExchangeError> {
        let package = &self.transfers.packages[package];
        let mut bytes = vec![0; package.bytes];
        for piece in &package.pieces {
            let (tensor, packed) = (piece.tensor, Placed::of(piece));
            let from = containing(self.source, tensor, package.source, &piece.block)?;
            let size = self.source.tensors()[tensor].element.size();
            from.copy(&buffers[tensor], &packed, &mut bytes, &piece.block, size);
        }
        Ok(bytes)
    }

    /// Writes the content of a package into the buffers of the rank that receives it.
    ///
    /// # Errors
    /// The plan is not one of these layouts.
    ///
    /// # Panics
    /// Panics if there is no such package, or it has another length.
    pub fn unpack(
        &self,
        package: usize,
        bytes: &[u8],
        buffers: &mut RankBuffers,
    ) -> Result<(), ExchangeError> {
        let package = &self.transfers.packages[package];
        for piece in &package.pieces {
            let (tensor, packed) = (piece.tensor, Placed::of(piece));
            let to = containing(self.destination, tensor, package.destination, &piece.block)?;
            let size = self.destination.tensors()[tensor].element.size();
            packed.copy(bytes, &to, &mut buffers[tensor], &piece.block, size);
        }
        Ok(())
    }

    /// Sends everything that a rank of the source has to send.
    ///
    /// # Errors
    /// The buffers are not the rank's, or the transport fails.
    pub fn send_from(
        &self,
        rank: usize,
        buffers: &RankBuffers,
        transport: &dyn Transport,
    ) -> Result<(), ExchangeError> {
        self.source.check_buffers(rank, buffers)?;
        for (at, package) in self.transfers.packages.iter().enumerate() {
            if package.source == rank {
                let bytes = self.pack(at, buffers)?;
                let sent = transport.send(at, package.destination, bytes);
                sent.map_err(|reason| ExchangeError::Transport {
                    rank,
                    action: "send",
                    reason,
                })?;
            }
        }
        Ok(())
    }

    /// The buffers of a rank of the destination: what it has already, from the buffers `own` of the source rank whose memory
    /// it shares, and what arrives. `timeout` limits each wait for the next package.
    ///
    /// # Errors
    /// Packages are missing after the timeout, or one arrives that the plan does not contain; the transport fails; `own` is
    /// needed, but absent.
    pub fn receive_at(
        &self,
        rank: usize,
        own: Option<&RankBuffers>,
        transport: &dyn Transport,
        timeout: Duration,
    ) -> Result<RankBuffers, ExchangeError> {
        let mut buffers = self.destination.empty(rank);
        let kept = self.transfers.kept.iter();
        for kept in kept.filter(|kept| kept.destination == rank) {
            let (tensor, block) = (kept.tensor, &kept.block);
            let spec = &self.source.tensors()[tensor];
            let own = own.ok_or_else(|| missing(&spec.name, block))?;
            let from = containing(self.source, tensor, kept.source, block)?;
            let to = containing(self.destination, tensor, rank, block)?;
            let size = spec.element.size();
            from.copy(&own[tensor], &to, &mut buffers[tensor], block, size);
        }
        let packages = self.transfers.packages.iter().enumerate();
        let own = packages.filter(|(_, package)| package.destination == rank);
        let mut pending: BTreeSet<usize> = own.map(|(at, _)| at).collect();
        let expected = pending.len();
        while let Some(&first) = pending.first() {
            let arrived = transport.receive(rank, Instant::now() + timeout);
            let arrived = arrived.map_err(|reason| ExchangeError::Transport {
                rank,
                action: "receive",
                reason,
            })?;
            let Some((package, bytes)) = arrived else {
                return Err(ExchangeError::Deadline {
                    rank,
                    package: first,
                    source_rank: self.transfers.packages[first].source,
                    pending: pending.len(),
                    expected,
                    timeout,
                });
            };
            let fits =
                pending.contains(&package) && self.transfers.packages[package].bytes == bytes.len();
            if !fits {
                let bytes = bytes.len();
                return Err(ExchangeError::Unexpected {
                    rank,
                    package,
                    bytes,
                });
            }
            self.unpack(package, &bytes, &mut buffers)?;
            pending.remove(&package);
        }
        Ok(buffers)
    }
}

/// Carries out a plan with all ranks of both sides on threads of this process. `ranks` are the buffers of the source's ranks;
/// returns those of the destination.
///
/// # Errors
/// As [`Exchange::send_from`] and [`Exchange::receive_at`].
pub fn execute(
    exchange: Exchange<'_>,
    ranks: &[RankBuffers],
    transport: &dyn Transport,
    timeout: Duration,
) -> Result<Vec<RankBuffers>, ExchangeError> {
    check_count("ranks", ranks.len(), exchange.source.ranks())?;
    let own = |rank| {
        let mut kept = exchange.transfers.kept.iter();
        let kept = kept.find(|kept| kept.destination == rank);
        kept.and_then(|kept| ranks.get(kept.source))
    };
    thread::scope(|scope| {
        let senders = ranks.iter().enumerate().map(|(rank, buffers)| {
            scope.spawn(move || exchange.send_from(rank, buffers, transport))
        });
        let senders: Vec<_> = senders.collect();
        let receivers = (0..exchange.destination.ranks()).map(|rank| {
            let own = own(rank);
            scope.spawn(move || exchange.receive_at(rank, own, transport, timeout))
        });
        let receivers: Vec<_> = receivers.collect();
        for sender in senders {
            joined(sender)?;
        }
        receivers.into_iter().map(joined).collect()
    })
}

/// The result of a thread; passes on its panic.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Placed {
    fn of(piece: &Piece) -> Self {
        Placed {
            block: piece.block.clone(),
            offset: piece.offset,
        }
    }
}

/// The part of a rank's buffer that contains `block`.
fn containing(
    layout: &Layout,
    tensor: usize,
    rank: usize,
    block: &Block,
) -> Result<Placed, ExchangeError> {
    let mut placed = layout.placed(tensor, rank).into_iter();
    let found = placed.find(|own| own.block.contains(block));
    found.ok_or_else(|| missing(&layout.tensors()[tensor].name, block))
}

fn missing(tensor: &str, block: &Block) -> ExchangeError {
    ExchangeError::Missing {
        tensor: tensor.to_owned(),
        block: block.clone(),
    }
}
