//! Sizes and devices as a pipeline file declares them: sections `[batch]` and `[devices]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most devices of a group.
const MAX_DEVICES: u16 = 1024;

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
    /// The device of all models and stages: `cpu`, shares of its cores for replicas (`cpu:0-3`), or a GPU by its index
    /// (`cuda:0`). In a file with `[groups]`: the name of the group of models that name none.
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

/// A named device group (`[groups.NAME]`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Its device: `cpu`, or a GPU by its index (`cuda:0`). `cpu:0-3` is four shares of the cores: each model of the group
    /// has a replica on each, which compute micro-batches at the same time.
    pub devices: String,
    /// What its worker is.
    #[serde(default, skip_serializing_if = "WorkerKind::is_thread")]
    pub worker: WorkerKind,
}

/// What the worker of a device group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerKind {
    /// A thread of the run's process.
    #[default]
    Thread,
    /// A process on the same machine, which is started again if it is lost.
    Process,
}

impl WorkerKind {
    fn is_thread(&self) -> bool {
        *self == WorkerKind::Thread
    }
}

impl GroupConfig {
    /// A group whose worker is a thread.
    pub fn new(devices: impl Into<String>) -> GroupConfig {
        GroupConfig {
            devices: devices.into(),
            worker: WorkerKind::Thread,
        }
    }

    /// The devices of the group, as [`DevicesConfig::list`] reads them.
    ///
    /// # Errors
    /// If `devices` is not valid.
    pub fn list(&self) -> Result<Vec<String>, GroupError> {
        list(&self.devices)
    }
}

impl DevicesConfig {
    /// The devices of the group, in order: `cuda:0-2` is `cuda:0`, `cuda:1`, `cuda:2`.
    ///
    /// ```
    /// use verl_pipe::sizes::DevicesConfig;
    ///
    /// let devices = DevicesConfig { group: "cuda:4-5".to_owned(), ..DevicesConfig::default() };
    /// assert_eq!(devices.list().unwrap(), ["cuda:4", "cuda:5"]);
    /// ```
    ///
    /// # Errors
    /// If `group` is not a valid device group.
    pub fn list(&self) -> Result<Vec<String>, GroupError> {
        list(&self.group)
    }
}

/// The devices that `text` describes, in order.
fn list(text: &str) -> Result<Vec<String>, GroupError> {
    let fail = |reason| GroupError {
        group: text.to_owned(),
        reason,
    };
    let (kind, range) = match text.trim().split_once(':') {
        None => (text.trim(), None),
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
    if kind == "cpu" && !range.contains('-') {
        return Err(fail(
            "the CPU is a single device and takes no index, only a range of shares such as `cpu:0-3`",
        ));
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

/// An invalid device group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid device group `{group}`: {reason}")]
pub struct GroupError {
    /// The device group as written.
    pub group: String,
    /// What is wrong with it.
    pub reason: &'static str,
}
