//! What all parts of a trace share: the number of its format, and the side of a stage that a batch is on.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of the format that this version writes and reads.
pub const FORMAT: u32 = 1;

/// Which side of a stage a batch is on.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// It entered the stage.
    Input,
    /// It left the stage.
    Output,
}

impl Side {
    /// `input` or `output`, as in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Side::Input => "input",
            Side::Output => "output",
        }
    }
}
