//! Supervised fine-tuning: imitate the targets.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::{Objective, SftLoss};
use verl_pipe::field::{Field, Key, LogProbTag, Ragged};
use verl_pipe::keys::TARGETS;
use verl_pipe::stage::ConfigError;

use super::{Algorithm, aggregation};

/// Settings of loss `sft`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sft {
    /// How token losses become one number: `token-mean`, `seq-mean-token-mean`, …
    pub aggregation: String,
}

impl Default for Sft {
    fn default() -> Self {
        Sft {
            aggregation: "token-mean".to_owned(),
        }
    }
}

impl Algorithm for Sft {
    fn tokens(&self) -> Key<Ragged<u32>> {
        TARGETS
    }

    fn reads(&self, _policy: &LogProbTag) -> Vec<Field> {
        Vec::new()
    }

    fn objective(&self) -> Result<Objective, Vec<ConfigError>> {
        Ok(Objective::new(aggregation(&self.aggregation, None)?).with(1.0, SftLoss))
    }
}
