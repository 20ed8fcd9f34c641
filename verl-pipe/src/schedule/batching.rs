//! Batch arithmetic: prompts → samples → shards → micro-batches → optimiser steps. Pure.

mod rules;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::stage::Refill;

/// Sizes as the pipeline file declares them (`[batch]`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BatchConfig {
    /// Prompts of a step, or of each of its waves if a stage refills (prompts).
    pub prompts: usize,
    /// Responses sampled for each prompt (samples a prompt).
    pub samples: usize,
    /// Prompts whose samples one optimiser step uses (prompts); all of them if omitted.
    pub mini_batch: Option<usize>,
    /// Samples of one forward and backward pass on one device (samples); the whole mini-batch of a device if omitted.
    pub micro_batch: Option<usize>,
    /// Samples of one log-prob forward on one device (samples); `micro_batch` if omitted.
    pub log_prob_micro_batch: Option<usize>,
    /// Passes over the step's samples (passes).
    pub epochs: usize,
}

impl Default for BatchConfig {
    fn default() -> Self {
        BatchConfig {
            prompts: 8,
            samples: 1,
            mini_batch: None,
            micro_batch: None,
            log_prob_micro_batch: None,
            epochs: 1,
        }
    }
}

/// Devices as the pipeline file declares them (`[devices]`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DevicesConfig {
    /// The device of training and rollout: `cpu`, or a GPU by its index (`cuda:0`).
    pub group: String,
    /// Devices that share one rollout engine (tensor parallel); only 1 so far.
    pub rollout_tensor_parallel: usize,
}

impl Default for DevicesConfig {
    fn default() -> Self {
        DevicesConfig {
            group: "cpu".to_owned(),
            rollout_tensor_parallel: 1,
        }
    }
}

/// The solved arithmetic; every count is exact.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct BatchPlan {
    /// Devices of the group.
    pub devices: usize,
    /// Prompts of a step, or of each of its waves.
    pub prompts: usize,
    /// Samples per prompt.
    pub samples: usize,
    /// Samples of a step, or of each of its waves: `prompts · samples`.
    pub rows: usize,
    /// Rollout engines: `devices / rollout_tensor_parallel`.
    pub rollout_shards: usize,
    /// Samples of one rollout engine.
    pub rows_per_rollout_shard: usize,
    /// Samples of one training device.
    pub rows_per_device: usize,
    /// Samples of one log-prob forward.
    pub log_prob_micro_rows: usize,
    /// Log-prob forwards of one rollout shard's samples: `rows_per_rollout_shard / log_prob_micro_rows`, rounded up.
    pub log_prob_micro_batches: usize,
    /// Samples of one mini-batch, over all devices.
    pub mini_rows: usize,
    /// Mini-batches of one pass.
    pub mini_batches: usize,
    /// Samples of one training micro-batch on one device.
    pub micro_rows: usize,
    /// Micro-batches whose gradients one optimiser step adds up, on one device.
    pub micro_batches: usize,
    /// Passes over the samples.
    pub epochs: usize,
    /// Optimiser steps of a step: `mini_batches · epochs`.
    pub optimizer_steps: usize,
    /// Maximum number of waves, of `prompts` prompts each, in a step; 1 if no stage refills.
    pub waves: usize,
    /// Maximum number of prompts whose samples an update sees: `prompts`, or the groups that a refilling filter keeps.
    pub groups: usize,
}

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

/// Most devices of a group.
const MAX_DEVICES: u16 = 1024;

/// Range around a value in which to search for the nearest valid values.
const SEARCH: usize = 1 << 16;

impl DevicesConfig {
    /// The devices of the group, in order: `cuda:0-2` is `cuda:0`, `cuda:1`, `cuda:2`.
    ///
    /// ```
    /// use verl_pipe::schedule::batching::DevicesConfig;
    ///
    /// let devices = DevicesConfig { group: "cuda:4-5".to_owned(), ..DevicesConfig::default() };
    /// assert_eq!(devices.list().unwrap(), ["cuda:4", "cuda:5"]);
    /// ```
    ///
    /// # Errors
    /// If `group` is not a valid device group.
    pub fn list(&self) -> Result<Vec<String>, GroupError> {
        let fail = |reason| GroupError {
            group: self.group.clone(),
            reason,
        };
        let (kind, range) = match self.group.trim().split_once(':') {
            None => (self.group.trim(), None),
            Some((kind, range)) => (kind, Some(range)),
        };
        let well_named = kind.chars().next().is_some_and(|c| c.is_ascii_lowercase())
            && kind
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        if !well_named {
            return Err(fail("it does not start with a device kind"));
        }
        let Some(range) = range else {
            return Ok(vec![kind.to_owned()]);
        };
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if kind == "cpu" {
            return Err(fail("the CPU is a single device and takes no index"));
        }
        let number = |text: &str| {
            text.parse::<u16>()
                .map_err(|_| fail("a device index is an integer from 0 to 65535"))
        };
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return Err(fail("the range ends before it begins"));
        }
        if last - first >= MAX_DEVICES {
            return Err(fail("too many devices (limit 1024)"));
        }
        Ok((first..=last).map(|i| format!("{kind}:{i}")).collect())
    }
}

/// An invalid device group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid device group `{group}`: {reason}")]
pub struct GroupError {
    /// The device group as written.
    pub group: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

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

impl BatchPlan {
    /// Solves the arithmetic of one step.
    ///
    /// With P prompts, n samples, G devices, rollout tensor parallel t, mini-batch M (prompts), micro-batch u:
    /// rows = P·n; rollout shards = G/t, each of rows·t/G samples; mini-batches = P/M of M·n samples, M·n/G on each
    /// device, in M·n/(G·u) micro-batches; optimiser steps = P/M · epochs. Every division must be exact, except that
    /// the last log-prob micro-batch may be smaller.
    ///
    /// ```
    /// use verl_pipe::schedule::batching::{BatchConfig, BatchPlan, DevicesConfig};
    ///
    /// let batch = BatchConfig { prompts: 60, samples: 12, log_prob_micro_batch: Some(8), ..BatchConfig::default() };
    /// let devices = DevicesConfig { group: "cuda:0-5".to_owned(), rollout_tensor_parallel: 2 };
    /// let plan = BatchPlan::solve(&batch, &devices).unwrap();
    /// assert_eq!((plan.rows, plan.rollout_shards, plan.rows_per_rollout_shard), (720, 3, 240));
    /// assert_eq!(plan.log_prob_micro_batches, 30);
    /// ```
    ///
    /// # Errors
    /// All rules that do not hold, each with the nearest valid values of the setting.
    ///
    /// # Source
    /// The batch checks of HybridFlow's implementation, reported all at once.
    pub fn solve(
        batch: &BatchConfig,
        devices: &DevicesConfig,
    ) -> Result<BatchPlan, Vec<Violation>> {
        let (plan, violations) = BatchPlan::estimate(batch, devices, None);
        if violations.is_empty() {
            Ok(plan)
        } else {
            Err(violations)
        }
    }

    /// The arithmetic with every division rounded down, and the rules that do not hold. The other checks of a pipeline
    /// can continue with it if the sizes are wrong; only [`BatchPlan::solve`] returns a plan to run. With a `refill`
    /// the update's mini-batches are cut from the groups that it keeps instead of the prompts of a wave.
    pub(crate) fn estimate(
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
}

#[cfg(test)]
#[path = "batching_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "batching_property_tests.rs"]
mod properties;
