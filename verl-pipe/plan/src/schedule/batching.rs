//! Batch arithmetic: prompts → samples → shards → micro-batches → optimiser steps. Pure.

mod rules;

pub use verl_declare::sizes::{BatchConfig, DevicesConfig, GroupError};
pub use verl_words::stage::BatchPlan;
use verl_words::stage::Refill;

/// One rule of the arithmetic that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The setting that the finding is about, with its section: `batch.micro_batch`.
    pub setting: &'static str,
    /// The rule that does not hold, with all its numbers.
    pub rule: String,
    /// The nearest values of the setting, below and above, with which all its rules hold.
    pub nearest: Vec<usize>,
    /// If no value of the setting fits: another setting, and its nearest values that make the sizes fit after this one
    /// is removed.
    pub instead: Option<(&'static str, Vec<usize>)>,
}

/// The setting of a violation about the group of devices.
pub(crate) const GROUP: &str = "devices.group";
/// The setting of a violation that depends on how many groups a refilling filter keeps.
pub(crate) const MINI_BATCH: &str = "batch.mini_batch";

/// Largest valid count: larger values are treated as mistakes.
const MAX_COUNT: usize = 1 << 30;

/// Range around a value in which to search for the nearest valid values.
const SEARCH: usize = 1 << 16;

/// All numbers of the arithmetic before any rule is applied.
#[derive(Clone, Copy)]
struct Sizes {
    devices: usize,
    tensor_parallel: usize,
    prompts: usize,
    samples: usize,
    mini_batch: usize,
    /// Whether the mini-batch is set; otherwise it contains all prompts that an update sees.
    mini_is_set: bool,
    micro_batch: Option<usize>,
    log_prob_micro_batch: Option<usize>,
    epochs: usize,
    /// Waves, and groups kept from them.
    refill: Option<(usize, usize)>,
}

impl Sizes {
    fn new(
        batch: &BatchConfig,
        devices: usize,
        tensor_parallel: usize,
        refill: Option<&Refill>,
    ) -> Self {
        let refill = refill.map(|refill| (refill.waves, refill.groups));
        let groups = refill.map_or(batch.prompts, |(_, groups)| groups);
        Sizes {
            devices,
            tensor_parallel,
            refill,
            prompts: batch.prompts,
            samples: batch.samples,
            mini_batch: batch.mini_batch.unwrap_or(groups),
            mini_is_set: batch.mini_batch.is_some(),
            micro_batch: batch.micro_batch,
            log_prob_micro_batch: batch.log_prob_micro_batch,
            epochs: batch.epochs,
        }
    }

    /// Clamps counts to 1..=[`MAX_COUNT`], so that the arithmetic neither divides by zero nor overflows.
    fn clamped(self) -> Self {
        let count = |value: usize| value.clamp(1, MAX_COUNT);
        Sizes {
            devices: count(self.devices),
            tensor_parallel: count(self.tensor_parallel),
            prompts: count(self.prompts),
            samples: count(self.samples),
            mini_batch: count(self.mini_batch),
            mini_is_set: self.mini_is_set,
            micro_batch: self.micro_batch.map(count),
            log_prob_micro_batch: self.log_prob_micro_batch.map(count),
            epochs: count(self.epochs),
            refill: self
                .refill
                .map(|(waves, groups)| (count(waves), count(groups))),
        }
    }

    /// Prompts whose samples the update sees.
    fn groups(self) -> usize {
        self.refill.map_or(self.prompts, |(_, groups)| groups)
    }

    fn rows(self) -> usize {
        self.prompts * self.samples
    }

    fn mini_rows(self) -> usize {
        self.mini_batch * self.samples
    }

    /// Samples of a mini-batch on one device, rounded down.
    fn mini_rows_per_device(self) -> usize {
        self.mini_rows() / self.devices
    }

    fn divides_devices(self) -> bool {
        self.devices.is_multiple_of(self.tensor_parallel)
    }

    fn rollout_shards(self) -> usize {
        (self.devices / self.tensor_parallel).max(1)
    }

    fn rollout_divides(self) -> bool {
        self.rows().is_multiple_of(self.rollout_shards())
    }

    fn mini_divides(self) -> bool {
        self.mini_batch <= self.groups() && self.groups().is_multiple_of(self.mini_batch)
    }

    fn mini_spreads(self) -> bool {
        self.mini_rows().is_multiple_of(self.devices)
    }

    /// The nearest numbers of prompts whose samples divide evenly among all devices and rollout engines, as one
    /// mini-batch; empty if a stage decides how many groups are kept.
    fn other_prompts(self) -> Vec<usize> {
        if self.refill.is_some() {
            return Vec::new();
        }
        let whole = |prompts| Sizes {
            prompts,
            mini_batch: prompts,
            ..self
        };
        let spreads = |prompts| whole(prompts).rollout_divides() && whole(prompts).mini_spreads();
        let nearest = nearest_values(self.prompts, |prompts| {
            spreads(prompts) && whole(prompts).micro_divides()
        });
        if nearest.is_empty() {
            return nearest_values(self.prompts, spreads);
        }
        nearest
    }

    /// The nearest numbers of prompts that divide evenly among the rollout engines and satisfy the other rules too:
    /// with the configured mini-batch, or without it if it does not fit the devices for any number of prompts.
    fn nearest_prompts(self) -> Vec<usize> {
        if self.refill.is_none() && !(self.mini_is_set && self.mini_spreads()) {
            return self.other_prompts();
        }
        nearest_values(self.prompts, |prompts| {
            let sizes = Sizes { prompts, ..self };
            sizes.rollout_divides() && sizes.mini_divides()
        })
    }

    fn micro_divides(self) -> bool {
        self.micro_batch.is_none_or(|micro| {
            micro <= self.mini_rows_per_device()
                && self.mini_rows_per_device().is_multiple_of(micro)
        })
    }

    fn plan(self) -> BatchPlan {
        let micro_rows = self
            .micro_batch
            .unwrap_or(self.mini_rows_per_device())
            .max(1);
        let log_prob_micro_rows = self.log_prob_micro_batch.unwrap_or(micro_rows);
        let rows_per_rollout_shard = self.rows() / self.rollout_shards();
        let mini_batches = (self.groups() / self.mini_batch).max(1);
        BatchPlan {
            devices: self.devices,
            prompts: self.prompts,
            samples: self.samples,
            rows: self.rows(),
            rollout_shards: self.rollout_shards(),
            rows_per_rollout_shard,
            rows_per_device: self.rows() / self.devices,
            log_prob_micro_rows,
            log_prob_micro_batches: rows_per_rollout_shard.div_ceil(log_prob_micro_rows),
            mini_rows: self.mini_rows(),
            mini_batches,
            micro_rows,
            micro_batches: (self.mini_rows_per_device() / micro_rows).max(1),
            epochs: self.epochs,
            optimizer_steps: mini_batches * self.epochs,
            waves: self.refill.map_or(1, |(waves, _)| waves),
            groups: self.groups(),
        }
    }
}

/// The nearest values below and above `value` for which `holds`.
fn nearest_values(value: usize, holds: impl Fn(usize) -> bool) -> Vec<usize> {
    let below = (value.saturating_sub(SEARCH).max(1)..value)
        .rev()
        .find(|&v| holds(v));
    let above = (value + 1..=(value.saturating_add(SEARCH)).min(MAX_COUNT)).find(|&v| holds(v));
    below.into_iter().chain(above).collect()
}

/// Solves the arithmetic of one step.
///
/// With P prompts, n samples, G devices, rollout tensor parallel t, mini-batch M (prompts), micro-batch u:
/// rows = P·n; rollout shards = G/t, each of rows·t/G samples; mini-batches = P/M of M·n samples, M·n/G on each
/// device, in M·n/(G·u) micro-batches; optimiser steps = P/M · epochs. Every division must be exact, except that
/// the last log-prob micro-batch may be smaller.
///
/// ```
/// use verl_pipe::schedule::batching::{BatchConfig, DevicesConfig, solve};
///
/// let batch = BatchConfig { prompts: 60, samples: 12, log_prob_micro_batch: Some(8), ..BatchConfig::default() };
/// let devices = DevicesConfig { group: "cuda:0-5".to_owned(), rollout_tensor_parallel: 2 };
/// let plan = solve(&batch, &devices).unwrap();
/// assert_eq!((plan.rows, plan.rollout_shards, plan.rows_per_rollout_shard), (720, 3, 240));
/// assert_eq!(plan.log_prob_micro_batches, 30);
/// ```
///
/// # Errors
/// All rules that do not hold, each with the nearest valid values of the setting.
///
/// # Source
/// The batch checks of HybridFlow's implementation, reported all at once.
pub fn solve(batch: &BatchConfig, devices: &DevicesConfig) -> Result<BatchPlan, Vec<Violation>> {
    let (plan, violations) = estimate(batch, devices, None);
    if violations.is_empty() {
        Ok(plan)
    } else {
        Err(violations)
    }
}

/// The arithmetic with every division rounded down, and the rules that do not hold. The other checks of a pipeline
/// can continue with it if the sizes are wrong; only [`solve`] returns a plan to run. With a `refill`
/// the update's mini-batches are cut from the groups that it keeps instead of the prompts of a wave.
pub fn estimate(
    batch: &BatchConfig,
    devices: &DevicesConfig,
    refill: Option<&Refill>,
) -> (BatchPlan, Vec<Violation>) {
    let mut violations = Vec::new();
    let num_devices = match devices.list() {
        Ok(list) => list.len(),
        Err(error) => {
            violations.push(Violation {
                setting: GROUP,
                rule: error.to_string(),
                nearest: Vec::new(),
                instead: None,
            });
            1
        }
    };
    let given = Sizes::new(batch, num_devices, devices.rollout_tensor_parallel, refill);
    rules::check_counts(&given, batch, &mut violations);
    let sizes = given.clamped();
    rules::check_rules(sizes, &mut violations);
    (sizes.plan(), violations)
}

#[cfg(test)]
#[path = "batching_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "batching_property_tests.rs"]
mod properties;
