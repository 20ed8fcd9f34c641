//! Models on one device, or as replicas on several.

use verl_models::critic::Critic;
use verl_models::model::{ModelInterface, PolicyModel, ValueInterface, ValueModel};
use verl_models::optim::OptimizerConfig;
use verl_models::policy::Policy;
use verl_models::replicas::{ReplicaSettings, ReplicatedCritic, ReplicatedPolicy, Sharding};
use verl_words::resource::ResourceError;

use super::failed;

/// A device, and how many replicas of a model are loaded onto it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct OnDevice<'a> {
    pub device: &'a str,
    replicas: usize,
}

impl<'a> OnDevice<'a> {
    /// A single model.
    pub fn one(device: &'a str) -> Self {
        OnDevice {
            device,
            replicas: 1,
        }
    }

    /// A replica of model `name` on each of `devices`. Those of the CPU, `cpu:N`, are shares of its cores.
    ///
    /// # Errors
    /// No device; several devices that are not on the CPU.
    pub fn all(name: &str, devices: &'a [String]) -> Result<Self, ResourceError> {
        let refusal = |reason: String| Err(ResourceError::Failed(reason.into()));
        if devices.is_empty() {
            return refusal(format!("model `{name}` is loaded onto no device"));
        }
        if devices.iter().all(|device| is_on_cpu(device)) {
            return Ok(OnDevice {
                device: "cpu",
                replicas: devices.len(),
            });
        }
        match devices {
            [device] => Ok(OnDevice::one(device)),
            _ => refusal(format!(
                "replicas of model `{name}` need devices of the CPU, such as `cpu:0-3`, but its group has {}; use one GPU",
                devices.join(", ")
            )),
        }
    }

    /// The policy with this module; the cores are divided among its replicas.
    pub fn policy<M: ModelInterface>(
        self,
        module: M,
        optimizer: Option<OptimizerConfig>,
        sharding: Sharding,
    ) -> Result<Box<dyn PolicyModel>, ResourceError> {
        Ok(match self.settings(sharding) {
            None => Box::new(Policy::new(module, optimizer).map_err(failed)?),
            Some(settings) => {
                Box::new(ReplicatedPolicy::new(module, optimizer, &settings).map_err(failed)?)
            }
        })
    }

    /// The value model with this module, in the same way.
    pub fn values<M: ValueInterface>(
        self,
        module: M,
        optimizer: Option<OptimizerConfig>,
        sharding: Sharding,
    ) -> Result<Box<dyn ValueModel>, ResourceError> {
        Ok(match self.settings(sharding) {
            None => Box::new(Critic::new(module, optimizer).map_err(failed)?),
            Some(settings) => {
                Box::new(ReplicatedCritic::new(module, optimizer, &settings).map_err(failed)?)
            }
        })
    }

    fn settings(self, sharding: Sharding) -> Option<ReplicaSettings> {
        (self.replicas > 1).then(|| ReplicaSettings {
            sharding,
            ..ReplicaSettings::new(self.replicas)
        })
    }
}

/// Whether a setting has its default and is not written.
pub(super) fn is_default(sharding: &Sharding) -> bool {
    *sharding == Sharding::default()
}

/// Whether a device is the CPU, or one of several shares of it.
fn is_on_cpu(device: &str) -> bool {
    let index = device.strip_prefix("cpu:");
    device == "cpu" || index.is_some_and(|index| index.parse::<usize>().is_ok())
}

#[cfg(test)]
#[path = "replicas_tests.rs"]
mod tests;
