//! [`BatchPlan`]: the sizes of a step, as stages are built with them.

use serde::Serialize;

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
