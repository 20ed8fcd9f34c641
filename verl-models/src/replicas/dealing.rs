//! Calls without gradient: rows in contiguous pieces, one for each replica.

use std::ops::Range;
use std::sync::{Arc, mpsc};

use burn::module::Module;
use rayon::ThreadPool;
use verl_rollout::engine::{
    OutputSink, PreparedModel, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings,
    check_requests,
};

use super::{Failure, Replicas, all_or_cause, on_pool, panicked};
use crate::model::{ModelError, ModelInterface};

/// Contiguous pieces of items with these sizes, of about the same total size, at most `count`; none is empty.
pub(super) fn deal(sizes: &[usize], count: usize) -> Vec<Range<usize>> {
    let total: usize = sizes.iter().map(|size| size + 1).sum();
    let mut pieces = Vec::new();
    let (mut start, mut before) = (0, 0);
    for (item, size) in sizes.iter().enumerate() {
        before += size + 1;
        // The end of the piece is the item that reaches its share of the total.
        let share = (pieces.len() + 1) * total;
        if before * count >= share {
            pieces.push(start..item + 1);
            start = item + 1;
        }
    }
    pieces
}

impl<M: Module> Replicas<M> {
    /// The results of `read` for contiguous pieces of rows with these sizes, concatenated; each piece runs on the threads of
    /// another replica, with a module that shares the weights.
    ///
    /// # Errors
    /// The first error, in the order of replicas; a panic.
    pub fn read<R: Send>(
        &self,
        sizes: &[usize],
        read: impl Fn(M, Range<usize>) -> Result<Vec<R>, ModelError> + Sync,
    ) -> Result<Vec<R>, ModelError> {
        let pieces = deal(sizes, self.replicas.len());
        let results = std::thread::scope(|scope| {
            let started = self.replicas.iter().zip(pieces).map(|(replica, piece)| {
                let (pool, read) = (&replica.pool, &read);
                // Modules are `Send` but not `Sync`, so each thread gets its own handle.
                let module = replica.state.trained.module().clone();
                scope.spawn(move || match on_pool(pool, || read(module, piece)) {
                    Ok(done) => done.map_err(Failure::Model),
                    Err(message) => Err(Failure::Panic(message)),
                })
            });
            let started: Vec<_> = started.collect();
            let joined = started.into_iter().map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Failure::Panic("no message".to_owned())))
            });
            joined.collect()
        });
        Ok(all_or_cause(results)?.into_iter().flatten().collect())
    }
}

/// What the thread of a replica sends while it samples.
type Sampled = (usize, RolloutOutput);

/// Why a rollout ended: nothing more is received.
#[derive(Debug, thiserror::Error)]
#[error("the rollout has ended")]
struct Ended;

/// The replicas of a policy, prepared for sampling; each samples a piece of the requests on its own threads.
pub(super) struct PreparedReplicas<M: ModelInterface> {
    replicas: Vec<PreparedReplica<M>>,
}

struct PreparedReplica<M: ModelInterface> {
    pool: Arc<ThreadPool>,
    module: M,
    /// `None` after a panic, which may have left it inconsistent.
    model: Option<Box<dyn PreparedModel>>,
}

impl<M: ModelInterface> PreparedReplica<M> {
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        let mut model = match self.model.take() {
            Some(model) => model,
            None => self.module.prepare()?,
        };
        let sampled = model.generate(requests, settings, on_done);
        self.model = Some(model);
        sampled
    }
}

impl<M: ModelInterface> Replicas<M> {
    /// The replicas, prepared for sampling at the same time.
    ///
    /// # Errors
    /// The first one in the order of replicas.
    pub(super) fn prepare(&self) -> Result<PreparedReplicas<M>, RolloutError> {
        let prepared = std::thread::scope(|scope| {
            let started = self.replicas.iter().map(|replica| {
                let pool = replica.pool.clone();
                let module = replica.state.trained.module().clone();
                scope.spawn(move || {
                    let prepared = on_pool(&pool, move || {
                        let model = module.prepare();
                        model.map(|model| (module, model))
                    });
                    (pool, prepared)
                })
            });
            let started: Vec<_> = started.collect();
            started
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect::<Vec<_>>()
        });
        let failed = |replica: usize, message: &str| RolloutError::Replica {
            replica,
            reason: panicked(message),
        };
        let replicas = prepared.into_iter().enumerate().map(|(replica, joined)| {
            let (pool, prepared) = joined.map_err(|_| failed(replica, "no message"))?;
            let (module, model) = prepared.map_err(|message| failed(replica, &message))??;
            Ok(PreparedReplica {
                pool,
                module,
                model: Some(model),
            })
        });
        Ok(PreparedReplicas {
            replicas: replicas.collect::<Result<_, RolloutError>>()?,
        })
    }
}

impl<M: ModelInterface> PreparedModel for PreparedReplicas<M> {
    /// The error is that of `on_done`, else the first one in the order of replicas.
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        if let Some(first) = self.replicas.first() {
            let module = &first.module;
            check_requests(requests, module.vocab_size(), module.max_tokens())?;
        }
        // The lengths of responses are not known, so each replica gets as many requests.
        let pieces = deal(&vec![0; requests.len()], self.replicas.len());
        std::thread::scope(|scope| {
            let (sender, received) = mpsc::channel::<Sampled>();
            let started = self
                .replicas
                .iter_mut()
                .zip(pieces)
                .map(|(replica, piece)| {
                    let (pool, sender) = (replica.pool.clone(), sender.clone());
                    scope.spawn(move || {
                        let start = piece.start;
                        let own = &requests[piece];
                        let sampled = on_pool(&pool, move || {
                            replica.generate(own, settings, &mut |index, output| {
                                let sent = sender.send((start + index, output));
                                sent.map_err(|_| RolloutError::Stopped(Box::new(Ended)))
                            })
                        });
                        (start, sampled)
                    })
                });
            let started: Vec<_> = started.collect();
            drop(sender);
            let mut stopped = None;
            for (index, output) in &received {
                if let Err(error) = on_done(index, output) {
                    stopped = Some(error);
                    break;
                }
            }
            // The replicas stop at their next response.
            drop(received);
            let mut failed = stopped;
            for (replica, thread) in started.into_iter().enumerate() {
                let error = match thread.join() {
                    Ok((_, Ok(Ok(())))) => continue,
                    Ok((start, Ok(Err(error)))) => numbered_from(error, start),
                    Ok((_, Err(message))) => RolloutError::Replica {
                        replica,
                        reason: panicked(&message),
                    },
                    Err(_) => RolloutError::Replica {
                        replica,
                        reason: panicked("no message"),
                    },
                };
                failed.get_or_insert(error);
            }
            failed.map_or(Ok(()), Err)
        })
    }
}

/// The error of a piece that begins at request `start`.
fn numbered_from(error: RolloutError, start: usize) -> RolloutError {
    match error {
        RolloutError::NonFinite { request, tokens } => RolloutError::NonFinite {
            request: start + request,
            tokens,
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_items_and_have_about_the_same_size() {
        for count in 1..6 {
            for items in 0..20 {
                let sizes: Vec<usize> = (0..items).map(|item| item * 7 % 5).collect();
                let pieces = deal(&sizes, count);
                assert!(pieces.len() <= count);
                let covered: Vec<usize> = pieces.iter().cloned().flatten().collect();
                assert_eq!(covered, (0..items).collect::<Vec<_>>());
                assert!(pieces.iter().all(|piece| !piece.is_empty()));
            }
        }
        assert_eq!(deal(&[0; 8], 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(deal(&[0; 3], 4), [0..1, 1..2, 2..3]);
        assert_eq!(deal(&[9, 0, 0, 0, 0, 4], 2), [0..1, 1..6]);
    }
}
