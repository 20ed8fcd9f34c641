//! Batch arithmetic: prompts → samples → shards → micro-batches → optimiser steps. Pure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Sizes as the pipeline file declares them (`[batch]`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BatchConfig {
    /// Prompts of a step [prompts].
    pub prompts: usize,
    /// Responses sampled for each prompt [samples per prompt].
    pub samples: usize,
    /// Prompts whose samples one optimiser step uses [prompts]; all of them when absent.
    pub mini_batch: Option<usize>,
    /// Samples of one forward and backward pass on one device [samples]; the whole mini-batch of a device when absent.
    pub micro_batch: Option<usize>,
    /// Samples of one log-prob forward on one device [samples]; `micro_batch` when absent.
    pub log_prob_micro_batch: Option<usize>,
    /// Passes over the step's samples [passes].
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
    /// The device group of training and rollout: `cpu`, `cuda:0`, `cuda:0-5`.
    pub group: String,
    /// Devices that share one rollout engine (tensor parallel) [devices].
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
    /// Prompts of a step.
    pub prompts: usize,
    /// Samples per prompt.
    pub samples: usize,
    /// Samples of a step: `prompts · samples`.
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
}
