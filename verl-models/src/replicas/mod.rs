//! Data parallelism: several replicas of a model that compute micro-batches, scores and rollouts at the same time.
//!
//! Replicas belong to one process and one device, the CPU; each has threads of its own. [`ReplicatedPolicy`] and
//! [`ReplicatedCritic`] are used like [`Policy`](crate::policy::Policy) and [`Critic`](crate::critic::Critic).
//!
//! # Bits
//! All results have the bits of a single model, for any number of replicas:
//!
//! - Micro-batch kN + r of an optimiser step runs on replica r of N. After each round of up to N micro-batches, the gradients
//!   are added in the order of the micro-batches, `((sum + g₀) + g₁) + …`, as a single model adds them; the last round may be
//!   short.
//! - AdamW works element by element. The norm of the gradient is summed per task of the kernels, and slices end between
//!   tasks.
//! - Rows are scored and sampled in contiguous pieces, one for each replica; on the CPU the bits of a row do not depend on
//!   the other rows of a call. Responses are reported as soon as they are complete, in any order.
//!
//! # Memory
//! Bytes per parameter, for f32 weights and N replicas. "Shared" is used once by all replicas of the process, since an
//! optimiser step gives them the same buffers:
//!
//! | | each of N copies of a model | each replica, [`Sharding::Optimizer`] | each replica, [`Sharding::Gradients`] |
//! |---|---|---|---|
//! | weights | 4 | 4 shared | 4 shared |
//! | moments of AdamW | 8 | 8 / N | 8 / N |
//! | sums of gradients | 4 | 4 | 4 / N |
//! | gradient of a micro-batch, until its round is added | 4 | 4 | 4 |
//! | all | 20 | 8 + 8 / N, 4 shared | 4 + 12 / N, 4 shared |
//!
//! The first column is plain replication, `Sharding::Optimizer` is ZeRO-1, `Sharding::Gradients` ZeRO-2. Weights narrower than
//! f32 need 4 / N more, for the optimiser's f32 weights. In an optimiser step 16 / N and 8 shared are added for a moment: the
//! slice's gradient, its new moments and weights next to the old ones, so that a step that fails changes nothing, and the new
//! weights as they are exchanged and as they are loaded. `Sharding::Gradients` also adds each gradient once, not on every
//! replica.
//!
//! # Failures
//! A panic on a replica's threads ends the call with one error that names the replica. The weights are then as before the
//! call, and the gradients of the unfinished optimiser step are discarded. The replicas exchange numbers through a
//! [group](verl_collective), which is built again with the next epoch.

mod critic;
mod dealing;
mod exchange;
mod policy;
mod snapshot;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use burn::module::Module;
use rayon::ThreadPool;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_collective::{Collective, CollectiveError, ThreadMember, threads};
use verl_reshard::{Bucket, SyncError, WeightSink, WeightSource, WeightsManifest, WeightsVersion};

use crate::model::{ModelError, ParameterGroup, RoundError, StepReport};
use crate::optim::flat::FlatLayout;
use crate::optim::{OptimizerConfig, OptimizerConfigError};
use crate::trained::{Backward, Trained};

pub use critic::ReplicatedCritic;
pub use policy::ReplicatedPolicy;

/// What is divided among replicas in training. The bits of all results are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// The state of the optimiser (ZeRO-1): each replica updates a slice of the parameters and has the sums of all gradients.
    #[default]
    Optimizer,
    /// The sums of gradients, too (ZeRO-2): each replica adds the gradients of its slice.
    Gradients,
}

/// How a model is replicated.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaSettings {
    /// Number of replicas, at least 1.
    pub replicas: usize,
    /// Threads of each replica; by default each has an equal share of the cores.
    pub threads: Option<usize>,
    /// What is divided among them.
    pub sharding: Sharding,
    /// Longest duration of an exchange of numbers, in which replicas wait for one another. Their computations are not
    /// limited by it.
    pub timeout: Duration,
}

impl ReplicaSettings {
    /// Settings of `replicas` replicas.
    #[must_use]
    pub fn new(replicas: usize) -> Self {
        ReplicaSettings {
            replicas,
            threads: None,
            sharding: Sharding::default(),
            timeout: Duration::from_secs(600),
        }
    }
}

/// Why replicas cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// No replica was requested.
    #[error("0 replicas of a model were requested, but at least 1 is necessary")]
    None,
    /// An invalid setting of the optimiser.
    #[error(transparent)]
    Optimizer(#[from] OptimizerConfigError),
    /// The threads of a replica could not be started.
    #[error("the threads of replica {replica} could not be started: {reason}")]
    Threads {
        /// Its number, from 0.
        replica: usize,
        /// Why.
        reason: String,
    },
}

/// The replicas of a module, with an optimiser that is divided among them unless they are frozen.
pub(crate) struct Replicas<M: Module> {
    replicas: Vec<Replica<M>>,
    layout: FlatLayout,
    sharding: Sharding,
    timeout: Duration,
    /// Incarnation of the group that connects the replicas.
    epoch: u64,
    /// Whether each parameter has a gradient since the last optimiser step.
    present: Vec<bool>,
}

struct Replica<M: Module> {
    pool: Arc<ThreadPool>,
    state: State<M>,
}

/// What the threads of a replica work on.
struct State<M: Module> {
    /// The module, and the optimiser's state of the replica's slice. Its accumulator is not used.
    trained: Trained<M>,
    member: ThreadMember,
    /// The gradient of a micro-batch that is not yet added.
    gradient: Option<Vec<f32>>,
    /// Sums of gradients: all parameters, or the replica's slice. Empty before the first.
    sums: Vec<f32>,
}

/// Why the work of a replica failed.
enum Failure {
    Model(ModelError),
    Exchange(CollectiveError),
    Panic(String),
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Failure::Model(error)
    }
}

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        Failure::Exchange(error)
    }
}

impl Failure {
    /// The failures that have a cause of their own come first, those that follow from other failures last.
    fn order(&self) -> usize {
        match self {
            Failure::Panic(_) => 0,
            Failure::Model(_) => 1,
            Failure::Exchange(CollectiveError::Aborted) => 3,
            Failure::Exchange(_) => 2,
        }
    }

    fn of_replica(self, replica: usize) -> ModelError {
        let reason = match self {
            Failure::Model(error) => return error,
            Failure::Exchange(error) => error.to_string(),
            Failure::Panic(message) => panicked(&message),
        };
        ModelError::Replica { replica, reason }
    }
}

fn panicked(message: &str) -> String {
    format!("it panicked: {message}")
}

/// The results of all replicas, or the error that caused the others.
fn all_or_cause<R>(results: Vec<Result<R, Failure>>) -> Result<Vec<R>, ModelError> {
    let mut done = Vec::with_capacity(results.len());
    let mut cause: Option<(usize, Failure)> = None;
    for (replica, result) in results.into_iter().enumerate() {
        match result {
            Ok(result) => done.push(result),
            Err(failure) => {
                let first = cause
                    .as_ref()
                    .is_none_or(|(_, other)| failure.order() < other.order());
                if first {
                    cause = Some((replica, failure));
                }
            }
        }
    }
    match cause {
        None => Ok(done),
        Some((replica, failure)) => Err(failure.of_replica(replica)),
    }
}

/// The message of a panic.
fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}

/// The result of `work` on the threads of `pool`, or the message of its panic.
fn on_pool<R: Send>(pool: &ThreadPool, work: impl FnOnce() -> R + Send) -> Result<R, String> {
    let done = catch_unwind(AssertUnwindSafe(|| pool.install(work)));
    done.map_err(|payload| panic_message(payload.as_ref()))
}

/// Runs `work` on the threads of each replica at the same time; results by replica.
fn on_each<M: Module, R: Send>(
    replicas: &mut [Replica<M>],
    work: impl Fn(usize, &mut State<M>) -> Result<R, Failure> + Sync,
) -> Vec<Result<R, Failure>> {
    std::thread::scope(|scope| {
        let started = replicas.iter_mut().enumerate().map(|(rank, replica)| {
            let work = &work;
            scope.spawn(move || {
                let Replica { pool, state } = replica;
                let done = on_pool(pool, || work(rank, &mut *state));
                done.unwrap_or_else(|message| {
                    // The others do not wait for it until the deadline.
                    state.member.abort();
                    Err(Failure::Panic(message))
                })
            })
        });
        let started: Vec<_> = started.collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            let joined = thread.join();
            joined.unwrap_or_else(|payload| Err(Failure::Panic(panic_message(payload.as_ref()))))
        };
        started.into_iter().map(join).collect()
    })
}

/// The first replica collects weights; all switch to them at once, and share them.
impl<M: Module> WeightSink for Replicas<M> {
    fn begin(&mut self, manifest: &WeightsManifest) -> Result<(), SyncError> {
        self.replicas[0].state.trained.begin(manifest)
    }

    fn accept(&mut self, bucket: &Bucket) -> Result<(), SyncError> {
        self.replicas[0].state.trained.accept(bucket)
    }

    fn finish(&mut self) -> Result<WeightsVersion, SyncError> {
        let (version, weights) = self.replicas[0].state.trained.arrived()?;
        let slices = self.layout.slices();
        for (Replica { state, .. }, slice) in self.replicas.iter_mut().zip(slices) {
            let piece = |position: usize, _: usize| self.layout.piece(position, slice);
            state.trained.switch(&weights, piece);
            state.gradient = None;
            state.sums = Vec::new();
        }
        self.present.fill(false);
        Ok(version)
    }
}

impl<M: Module> Replicas<M> {
    /// As [`Trained::weight_source`].
    ///
    /// # Errors
    /// As [`Trained::weight_source`].
    pub fn weight_source(
        &self,
        version: WeightsVersion,
        bucket_bytes: usize,
    ) -> Result<Box<dyn WeightSource>, SyncError> {
        self.first().weight_source(version, bucket_bytes)
    }

    /// Replicas of a module, which share its buffers until the first optimiser step; arguments as for [`Trained::new`].
    ///
    /// # Errors
    /// An invalid setting; threads that cannot be started.
    pub fn new(
        module: M,
        group: impl Fn(&M, &str, usize) -> ParameterGroup,
        optimizer: Option<OptimizerConfig>,
        settings: &ReplicaSettings,
    ) -> Result<Self, ReplicaError> {
        let count = settings.replicas;
        if count == 0 {
            return Err(ReplicaError::None);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let of_each = settings.threads.unwrap_or(cores / count).max(1);
        let mut replicas = Vec::with_capacity(count);
        for (replica, member) in threads(count, 0, settings.timeout).into_iter().enumerate() {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(of_each)
                .thread_name(move |thread| format!("replica-{replica}-{thread}"))
                .build();
            let pool = pool.map_err(|error| ReplicaError::Threads {
                replica,
                reason: error.to_string(),
            })?;
            let trained = Trained::new(module.clone(), &group, optimizer.clone())?;
            replicas.push(Replica {
                pool: Arc::new(pool),
                state: State {
                    trained,
                    member,
                    gradient: None,
                    sums: Vec::new(),
                },
            });
        }
        let training = replicas[0].state.trained.training.as_ref();
        let parameters = training.map(|training| training.parameters.clone());
        let layout = FlatLayout::new(&parameters.unwrap_or_default(), count);
        Ok(Replicas {
            present: vec![false; layout.parameters()],
            replicas,
            layout,
            sharding: settings.sharding,
            timeout: settings.timeout,
            epoch: 0,
        })
    }

    /// The first replica, which has the same weights as the others.
    pub fn first(&self) -> &Trained<M> {
        &self.replicas[0].state.trained
    }

    /// The module of the first replica.
    pub fn module(&self) -> &M {
        self.first().module()
    }

    /// Micro-batches that are computed at the same time.
    pub fn round_len(&self) -> usize {
        self.replicas.len()
    }

    pub fn optimizer_steps(&self) -> u64 {
        self.first().optimizer_steps()
    }

    pub fn weights_hash(&self) -> String {
        self.first().weights_hash()
    }

    /// Computes the backward passes of `micros` micro-batches, in rounds, and adds their gradients in order; `backward` gets
    /// the position of the micro-batch. Returns the losses.
    ///
    /// # Errors
    /// The first error in the order of micro-batches; those before it are added.
    pub fn round(
        &mut self,
        micros: usize,
        backward: impl Fn(usize, &Trained<M>) -> Result<Backward, ModelError> + Sync,
    ) -> Result<Vec<f64>, RoundError> {
        let mut losses = Vec::with_capacity(micros);
        let count = self.replicas.len();
        for start in (0..micros).step_by(count) {
            let taking_part = count.min(micros - start);
            let layout = &self.layout;
            let results = on_each(&mut self.replicas[..taking_part], |rank, state| {
                let done = backward(start + rank, &state.trained)?;
                Ok((done.loss, state.flatten(done.gradients, layout)))
            });
            let is_broken = |result: &Result<_, Failure>| {
                let failure = result.as_ref().err();
                failure.is_some_and(|failure| !matches!(failure, Failure::Model(_)))
            };
            let broken = results.iter().any(is_broken);
            let mut failed = None;
            for (rank, result) in results.into_iter().enumerate() {
                match result {
                    Ok((loss, present)) if failed.is_none() => {
                        losses.push(loss);
                        self.note(&present);
                    }
                    Ok(_) => self.replicas[rank].state.gradient = None,
                    Err(failure) => {
                        failed.get_or_insert_with(|| RoundError {
                            micro: start + rank,
                            error: failure.of_replica(rank),
                        });
                    }
                }
            }
            match broken {
                true => self.discard(),
                false => self.add().map_err(|error| RoundError {
                    micro: start,
                    error,
                })?,
            }
            if let Some(error) = failed {
                return Err(error);
            }
        }
        Ok(losses)
    }

    /// Adds the gradients of a single backward pass, which runs on the first replica and this thread; returns the loss.
    ///
    /// # Errors
    /// Errors of the backward pass; nothing is then added.
    pub fn accumulate(
        &mut self,
        backward: impl FnOnce(&Trained<M>) -> Result<Backward, ModelError>,
    ) -> Result<f64, ModelError> {
        let done = backward(self.first())?;
        let present = self.replicas[0].state.flatten(done.gradients, &self.layout);
        self.note(&present);
        self.add()?;
        Ok(done.loss)
    }

    /// Notes which parameters have a gradient.
    fn note(&mut self, present: &[bool]) {
        for (known, new) in self.present.iter_mut().zip(present) {
            *known |= new;
        }
    }

    /// Adds the gradients of a round in the order of replicas.
    fn add(&mut self) -> Result<(), ModelError> {
        let has_gradient = |replica: &Replica<M>| replica.state.gradient.is_some();
        if !self.replicas.iter().any(has_gradient) {
            return Ok(());
        }
        let (layout, sharding) = (&self.layout, self.sharding);
        let added = on_each(&mut self.replicas, |_, state| {
            Ok(state.add(layout, sharding)?)
        });
        all_or_cause(added)
            .map(drop)
            .inspect_err(|_| self.discard())
    }

    /// See [`TrainedModel::optimizer_step`](crate::model::TrainedModel::optimizer_step). Each replica computes the new
    /// weights and the new state of its slice; nothing changes before all have succeeded.
    ///
    /// # Errors
    /// A gradient is not finite, the model is frozen, or a replica failed; the weights are then unchanged.
    pub fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        self.first().check_trainable()?;
        let (layout, sharding, present) = (&self.layout, self.sharding, &self.present);
        let updates = on_each(&mut self.replicas, |_, state| {
            state.update(layout, sharding, present)
        });
        let updates = all_or_cause(updates).inspect_err(|_| self.discard())?;
        let module = self.first().module().clone();
        let weights = updates.first().map(|update| update.weights.as_slice());
        let module = exchange::with_weights(
            module,
            self.first(),
            &self.layout,
            &self.present,
            weights.unwrap_or_default(),
        );
        let report = updates.first().map(|update| update.report);
        for (replica, update) in self.replicas.iter_mut().zip(updates) {
            let trained = &mut replica.state.trained;
            trained.module = Some(module.clone());
            if let Some(training) = &mut trained.training {
                training.optimizer = update.optimizer;
            }
        }
        self.forget();
        Ok(report.unwrap_or_default())
    }

    /// Discards the gradients since the last optimiser step.
    fn forget(&mut self) {
        self.present.fill(false);
        for replica in &mut self.replicas {
            replica.state.gradient = None;
            replica.state.sums = Vec::new();
        }
    }

    /// Discards the gradients and connects the replicas again, after a failure that may have left them different.
    fn discard(&mut self) {
        self.forget();
        self.epoch += 1;
        let members = threads(self.replicas.len(), self.epoch, self.timeout);
        for (replica, member) in self.replicas.iter_mut().zip(members) {
            replica.state.member = member;
        }
    }
}
