//! The type of a model's weights on its device.

use burn::tensor::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::device::DeviceKind;
use verl_words::stage::ConfigError;

/// Type of the weights on the device, and of the matrix products.
///
/// Sums, log-probs, losses, gradients and the optimiser are always f32. For a trained model in bf16 the optimiser also
/// keeps the weights in f32: steps that are too small for bf16 add up there, and exports in f32 use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightsDType {
    /// bf16 on a GPU, f32 on the CPU.
    #[default]
    Auto,
    /// Half the memory, and faster products on a GPU; the CPU has no kernels for it. Weights of a folder in f32 are
    /// rounded when they are loaded.
    Bf16,
    /// Twice the memory; products are computed in f32.
    F32,
}

impl WeightsDType {
    /// The type on the device called `device`.
    ///
    /// # Errors
    /// bf16 on a device that does not support it.
    pub(crate) fn on(self, device: &str) -> Result<DType, ConfigError> {
        let has_bf16 = DeviceKind::named(device).is_some_and(DeviceKind::bf16);
        match self {
            WeightsDType::F32 => Ok(DType::F32),
            WeightsDType::Auto if has_bf16 => Ok(DType::BF16),
            WeightsDType::Auto => Ok(DType::F32),
            WeightsDType::Bf16 if has_bf16 => Ok(DType::BF16),
            WeightsDType::Bf16 => Err(ConfigError::new(
                "dtype",
                "is `bf16`, but the model is on the CPU, whose kernels only support f32",
                "set it to `f32`, remove it (the default is bf16 on a GPU and f32 on the CPU), or set `devices.group` to a GPU",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_follows_the_device() {
        let on = |dtype: WeightsDType, device| dtype.on(device).map_err(|error| error.setting);
        assert_eq!(on(WeightsDType::Auto, "cpu"), Ok(DType::F32));
        assert_eq!(on(WeightsDType::Auto, ""), Ok(DType::F32));
        assert_eq!(on(WeightsDType::Auto, "cuda:1"), Ok(DType::BF16));
        assert_eq!(on(WeightsDType::F32, "cuda:0"), Ok(DType::F32));
        assert_eq!(on(WeightsDType::Bf16, "cuda:0"), Ok(DType::BF16));
        assert_eq!(on(WeightsDType::Bf16, "cpu"), Err("dtype".to_owned()));
    }

    #[test]
    fn it_is_written_in_lower_case() {
        let read = |text: &str| serde_json::from_str::<WeightsDType>(text).ok();
        assert_eq!(read("\"bf16\""), Some(WeightsDType::Bf16));
        assert_eq!(read("\"f32\""), Some(WeightsDType::F32));
        assert_eq!(read("\"auto\""), Some(WeightsDType::Auto));
        assert_eq!(read("\"fp8\""), None);
    }
}
