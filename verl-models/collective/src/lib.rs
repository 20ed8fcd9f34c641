//! Operations among the replicas of a model: ordered sums, gathers, broadcasts, barriers.
//!
//! A group has `world` members, numbered by rank. Each member is one [`Collective`], used by one thread; all members call
//! the same operations in the same order. Members are threads of one process ([`threads()`]) or processes that are connected
//! through TCP ([`tcp`]); both run the same operations ([`Member`]) over different transports.
//!
//! - Sums add in the order of ranks, so their bits do not depend on the transport, on timing or on how values are divided.
//! - Every operation has a deadline. The first error of a member ends the group: the others return
//!   [`CollectiveError::Aborted`] or an error of their own as soon as they learn of it, and no later operation succeeds.
//!   Until then, a member may complete an operation for which it has received everything. Whoever goes on builds a new group
//!   with the next epoch; messages of another epoch are dropped.
//!
//! ```
//! use std::time::Duration;
//! use verl_collective::{Collective, threads};
//!
//! let members = threads(2, 0, Duration::from_secs(10));
//! let sums: Vec<f32> = std::thread::scope(|scope| {
//!     let each = members.into_iter().map(|mut member| {
//!         scope.spawn(move || {
//!             let own = vec![1.0, 10.0 * (member.rank() as f32 + 1.0)];
//!             let mut sum = [0.0];
//!             member.reduce_scatter_ordered(Some(own), &[0..1, 1..2], &mut sum).map(|()| sum[0])
//!         })
//!     });
//!     let each: Vec<_> = each.collect();
//!     each.into_iter().filter_map(|thread| thread.join().ok()?.ok()).collect()
//! });
//! assert_eq!(sums, [2.0, 30.0]);
//! ```

mod member;
pub mod tcp;
mod threads;
mod transport;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use member::{Aborter, Member};
pub use threads::{ThreadMember, threads};

/// Numbers that members exchange.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// Weights, gradients.
    F32(Vec<f32>),
    /// Partial sums.
    F64(Vec<f64>),
    /// Anything else.
    Bytes(Vec<u8>),
}

impl Data {
    /// The numbers, if they are f32.
    #[must_use]
    pub fn as_f32(&self) -> Option<&[f32]> {
        match self {
            Data::F32(values) => Some(values),
            Data::F64(_) | Data::Bytes(_) => None,
        }
    }

    /// The numbers, if they are f64.
    #[must_use]
    pub fn as_f64(&self) -> Option<&[f64]> {
        match self {
            Data::F64(values) => Some(values),
            Data::F32(_) | Data::Bytes(_) => None,
        }
    }
}

/// An operation of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Connecting the members.
    Join,
    /// [`Collective::reduce_scatter_ordered`].
    ReduceScatter,
    /// [`Collective::all_gather`].
    AllGather,
    /// [`Collective::broadcast`].
    Broadcast,
    /// [`Collective::barrier`].
    Barrier,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Join => "join",
            Operation::ReduceScatter => "reduce-scatter",
            Operation::AllGather => "all-gather",
            Operation::Broadcast => "broadcast",
            Operation::Barrier => "barrier",
        })
    }
}

/// Why an operation failed. The group cannot be used afterwards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A member ended, or its connection broke.
    #[error("rank {rank} was lost: it ended, or its connection was closed")]
    PeerLost {
        /// The member.
        rank: usize,
    },
    /// A member did not answer before the deadline.
    #[error("rank {rank} did not answer in the {operation} before the deadline")]
    Timeout {
        /// The member that was waited for.
        rank: usize,
        /// The operation.
        operation: Operation,
    },
    /// The group was aborted: another member failed, or someone ended the group.
    #[error("the group was aborted; build a new one with the next epoch")]
    Aborted,
    /// Members do not call the same operations with matching sizes.
    #[error("rank {rank} does not follow the protocol of the group: {reason}")]
    Protocol {
        /// The member that sent, or passed, what does not match.
        rank: usize,
        /// What does not match.
        reason: String,
    },
}

/// A member of a group; see the [crate] for its rules.
pub trait Collective: Send {
    /// Its number, below [`Collective::world`].
    fn rank(&self) -> usize;

    /// Number of members.
    fn world(&self) -> usize;

    /// The group's incarnation: a group that replaces a failed one has a higher epoch.
    fn epoch(&self) -> u64;

    /// Adds the values of all members to `sum`, at the owner of each part: `((sum + v₀) + v₁) + …` in the order of ranks,
    /// where v are the values of rank 0, 1, … at `parts[rank]` of this member. A member without values passes `None` and
    /// is left out of the sums.
    ///
    /// # Errors
    /// A lost member, the deadline, an abort; parts or sizes that do not match.
    fn reduce_scatter_ordered(
        &mut self,
        values: Option<Vec<f32>>,
        parts: &[Range<usize>],
        sum: &mut [f32],
    ) -> Result<(), CollectiveError>;

    /// The data of all members, in the order of ranks. Lengths may differ.
    ///
    /// # Errors
    /// A lost member, the deadline, an abort.
    fn all_gather(&mut self, own: Data) -> Result<Vec<Arc<Data>>, CollectiveError>;

    /// The data of rank `root`; the other members pass `None`.
    ///
    /// # Errors
    /// A lost member, the deadline, an abort; a root without data.
    fn broadcast(&mut self, root: usize, data: Option<Data>) -> Result<Arc<Data>, CollectiveError>;

    /// Returns after all members have called it.
    ///
    /// # Errors
    /// A lost member, the deadline, an abort.
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// Ends the group: the operations of all members fail from now on, those that wait included.
    fn abort(&mut self);
}

#[cfg(test)]
mod tests;
