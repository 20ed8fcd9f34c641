//! The operations of a group, over any transport.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::transport::{Message, Payload, Received, Transport, Unsent};
use crate::{Collective, CollectiveError, Data, Operation};

/// How often a waiting member looks whether the group was aborted.
const POLL: Duration = Duration::from_millis(10);

/// A member of a group, over threads or TCP.
///
/// Each pair of members exchanges messages directly. The owner of a part receives it from all others and adds in the order
/// of ranks; each member sends (world − 1) / world of its values, as in a ring, but a ring would add in another order for
/// each part.
#[derive(Debug)]
pub struct Member<T> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) epoch: u64,
    pub(crate) timeout: Duration,
    /// Operations called.
    pub(crate) sequence: u64,
    /// Whether the group was aborted, here or by another member.
    pub(crate) aborted: Arc<AtomicBool>,
    pub(crate) transport: T,
}

/// Aborts a group from another thread than the member's, for example when the caller gives up.
#[derive(Debug, Clone)]
pub struct Aborter(Arc<AtomicBool>);

impl Aborter {
    /// Ends the group: the member's operation fails within milliseconds and informs the other members.
    pub fn abort(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl<T: Transport> Member<T> {
    /// A handle that aborts the group.
    pub fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.aborted))
    }

    /// Ends the group because of `error`, and returns it.
    fn fail(&mut self, error: CollectiveError) -> CollectiveError {
        self.aborted.store(true, Ordering::SeqCst);
        self.transport.abort_others();
        error
    }

    /// Begins an operation and returns its deadline.
    fn begin(&mut self) -> Result<Instant, CollectiveError> {
        if self.aborted.load(Ordering::SeqCst) {
            return Err(self.fail(CollectiveError::Aborted));
        }
        self.sequence += 1;
        Ok(Instant::now() + self.timeout)
    }

    /// The other ranks, from the next one on, so that members do not all send to the same one.
    fn others(&self) -> impl Iterator<Item = usize> + use<T> {
        let (rank, world) = (self.rank, self.world);
        (1..world).map(move |distance| (rank + distance) % world)
    }

    fn send(
        &mut self,
        to: usize,
        operation: Operation,
        payload: Payload,
        deadline: Instant,
    ) -> Result<(), CollectiveError> {
        let message = Message {
            epoch: self.epoch,
            sequence: self.sequence,
            operation,
            payload,
        };
        let sent = self.transport.send(to, message, deadline);
        sent.map_err(|unsent| match unsent {
            _ if self.aborted.load(Ordering::SeqCst) => self.fail(CollectiveError::Aborted),
            Unsent::Lost => self.fail(CollectiveError::PeerLost { rank: to }),
            Unsent::Late => self.fail(CollectiveError::Timeout {
                rank: to,
                operation,
            }),
        })
    }

    fn receive(
        &mut self,
        from: usize,
        operation: Operation,
        deadline: Instant,
    ) -> Result<Payload, CollectiveError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let received = self.transport.receive(from, left.min(POLL));
            match received {
                Received::Message(message) if message.epoch == self.epoch => {
                    let (sequence, expected) = (message.sequence, self.sequence);
                    if message.operation == operation && sequence == expected {
                        return Ok(message.payload);
                    }
                    let reason = format!(
                        "its operation {sequence} is a {}, but operation {expected} of rank {} is a {operation}",
                        message.operation, self.rank
                    );
                    return Err(self.fail(CollectiveError::Protocol { rank: from, reason }));
                }
                // Messages of another epoch come from a group that failed; they are dropped.
                Received::Message(_) | Received::Nothing => {}
                Received::Lost if self.aborted.load(Ordering::SeqCst) => {}
                Received::Lost => {
                    return Err(self.fail(CollectiveError::PeerLost { rank: from }));
                }
            }
            if self.aborted.load(Ordering::SeqCst) {
                return Err(self.fail(CollectiveError::Aborted));
            }
            if left.is_zero() {
                return Err(self.fail(CollectiveError::Timeout {
                    rank: from,
                    operation,
                }));
            }
        }
    }

    /// Ends the group because `rank` passed or sent something that does not match.
    fn mismatch<R>(&mut self, rank: usize, reason: String) -> Result<R, CollectiveError> {
        Err(self.fail(CollectiveError::Protocol { rank, reason }))
    }

    /// Checks the arguments of a sum before anything is sent.
    fn check_parts(
        &mut self,
        values: Option<usize>,
        parts: &[Range<usize>],
        sum: usize,
    ) -> Result<(), CollectiveError> {
        let (rank, world) = (self.rank, self.world);
        if parts.len() != world {
            let reason = format!(
                "it divides values into {} parts for {world} ranks",
                parts.len()
            );
            return self.mismatch(rank, reason);
        }
        if parts[rank].len() != sum {
            let reason = format!(
                "its part has {} values, but its sum {sum}",
                parts[rank].len()
            );
            return self.mismatch(rank, reason);
        }
        let outside = |length: usize| {
            parts
                .iter()
                .find(|part| part.end > length || part.start > part.end)
        };
        if let Some(length) = values
            && let Some(part) = outside(length)
        {
            let reason = format!("its part {part:?} is not a part of {length} values");
            return self.mismatch(rank, reason);
        }
        Ok(())
    }
}

/// Adds `values` to `sum`.
fn add(sum: &mut [f32], values: &[f32]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value;
    }
}

impl<T: Transport> Collective for Member<T> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn reduce_scatter_ordered(
        &mut self,
        values: Option<Vec<f32>>,
        parts: &[Range<usize>],
        sum: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let deadline = self.begin()?;
        let operation = Operation::ReduceScatter;
        self.check_parts(values.as_ref().map(Vec::len), parts, sum.len())?;
        let own = values.map(|values| Arc::new(Data::F32(values)));
        for to in self.others() {
            let payload = match &own {
                Some(own) => Payload::Part(Arc::clone(own), parts[to].clone()),
                None => Payload::Empty,
            };
            self.send(to, operation, payload, deadline)?;
        }
        for (from, part) in parts.iter().enumerate() {
            let payload = match &own {
                Some(own) if from == self.rank => Payload::Part(Arc::clone(own), part.clone()),
                None if from == self.rank => Payload::Empty,
                _ => self.receive(from, operation, deadline)?,
            };
            let part = match &payload {
                Payload::Empty => continue,
                Payload::Whole(data) => data.as_f32(),
                Payload::Part(data, part) => data.as_f32().and_then(|all| all.get(part.clone())),
            };
            match part {
                Some(part) if part.len() == sum.len() => add(sum, part),
                _ => {
                    let found = part.map_or(0, <[f32]>::len);
                    let reason = format!(
                        "it sent {found} values for the part of rank {}, which has {}",
                        self.rank,
                        sum.len()
                    );
                    return self.mismatch(from, reason);
                }
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, own: Data) -> Result<Vec<Arc<Data>>, CollectiveError> {
        let deadline = self.begin()?;
        let operation = Operation::AllGather;
        let own = Arc::new(own);
        for to in self.others() {
            self.send(to, operation, Payload::Whole(Arc::clone(&own)), deadline)?;
        }
        let mut all = Vec::with_capacity(self.world);
        for from in 0..self.world {
            if from == self.rank {
                all.push(Arc::clone(&own));
                continue;
            }
            match self.receive(from, operation, deadline)? {
                Payload::Whole(data) => all.push(data),
                _ => return self.mismatch(from, "it sent no data to gather".to_owned()),
            }
        }
        Ok(all)
    }

    fn broadcast(&mut self, root: usize, data: Option<Data>) -> Result<Arc<Data>, CollectiveError> {
        let deadline = self.begin()?;
        let operation = Operation::Broadcast;
        if root >= self.world {
            let reason = format!("its root {root} is not a rank below {}", self.world);
            return self.mismatch(self.rank, reason);
        }
        if root != self.rank {
            return match self.receive(root, operation, deadline)? {
                Payload::Whole(data) => Ok(data),
                _ => self.mismatch(root, "it sent no data to broadcast".to_owned()),
            };
        }
        let Some(data) = data else {
            return self.mismatch(
                root,
                "it is the root of a broadcast without data".to_owned(),
            );
        };
        let data = Arc::new(data);
        for to in self.others() {
            self.send(to, operation, Payload::Whole(Arc::clone(&data)), deadline)?;
        }
        Ok(data)
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        let deadline = self.begin()?;
        let operation = Operation::Barrier;
        for to in self.others() {
            self.send(to, operation, Payload::Empty, deadline)?;
        }
        for from in self.others() {
            self.receive(from, operation, deadline)?;
        }
        Ok(())
    }

    fn abort(&mut self) {
        self.fail(CollectiveError::Aborted);
    }
}
