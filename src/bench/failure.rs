//! Why nothing could be measured, and what to do about it.

use verl::models::agreement::AgreementError;
use verl::models::bench::BenchError;
use verl::models::device::DeviceError;
use verl::models::hf::LoadError;

/// Why there is no result, and what to do.
pub(super) struct Failure {
    pub message: String,
    pub help: String,
}

impl Failure {
    pub fn new(error: impl ToString, help: impl Into<String>) -> Self {
        Failure {
            message: error.to_string(),
            help: help.into(),
        }
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        let help = match &error {
            DeviceError::NotBuilt { .. } | DeviceError::Unusable { .. } => {
                "fix it, or omit `--device` to measure the CPU"
            }
            _ => "set `--device` to an available device",
        };
        Failure::new(&error, help)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Failure::new(
            error,
            "set `--model` to a Hugging Face folder with the config.json of a supported family and all weights in \
             safetensors",
        )
    }
}

impl From<AgreementError> for Failure {
    fn from(error: AgreementError) -> Self {
        let help = match &error {
            AgreementError::Context { .. } => "compare a model with a longer context",
            _ => "check that the weights are complete and finite",
        };
        Failure::new(&error, help)
    }
}

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Self {
        Failure::new(&error, error.help())
    }
}
