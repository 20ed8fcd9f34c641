//! Devices by name, chosen at run time.
//!
//! Burn's default device depends on the enabled features, not on the hardware; so a device is always chosen by name
//! here.

mod memory;
mod preflight;

use burn::tensor::{DType, Device};

use crate::allocation;

pub use memory::{Shortage, memory, memory_of, shortage};
pub use preflight::{Preflight, preflight};

/// The device named `name`: `cpu`, or `cuda:N` (`cuda` is `cuda:0`) in a build with the feature `cuda`.
///
/// The first use of the CPU makes glibc's allocator keep freed memory, unless `GLIBC_TUNABLES` or `MALLOC_…` is set.
///
/// # Errors
/// The name is invalid, the CUDA device does not exist, or the build lacks the feature.
pub fn device(name: &str) -> Result<Device, DeviceError> {
    match parse(name)? {
        Named::Cpu => {
            allocation::keep_freed_memory();
            Ok(Device::flex())
        }
        Named::Cuda(index) => cuda(name, index),
    }
}

/// A kind of device. Code asks it what the device offers, and never which kind it is.
///
/// ```
/// use verl_kernels::device::DeviceKind;
///
/// let named = |name| DeviceKind::named(name).map(DeviceKind::bf16);
/// assert_eq!([named("cuda:1"), named("cpu"), named("gpu")], [Some(true), Some(false), None]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl DeviceKind {
    /// The kind of a device, with or without autodiff.
    pub fn of(device: &Device) -> DeviceKind {
        match device.clone().without_autodiff() == Device::flex() {
            true => DeviceKind::Cpu,
            false => DeviceKind::Cuda,
        }
    }

    /// The kind of the device named `name`, which need not exist on this machine; `None` if it is not a name of a device.
    pub fn named(name: &str) -> Option<DeviceKind> {
        match parse(name).ok()? {
            Named::Cpu => Some(DeviceKind::Cpu),
            Named::Cuda(_) => Some(DeviceKind::Cuda),
        }
    }

    /// Its name without an index.
    pub fn as_str(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        }
    }

    /// Whether it runs models in bf16. CPU kernels are f32 only, and a GPU without bf16 does not pass [`preflight`].
    pub fn bf16(self) -> bool {
        self == DeviceKind::Cuda
    }

    /// Whether this build has fused operations for tensors in `dtype`.
    pub(crate) fn fused(self, dtype: DType) -> bool {
        match (self, dtype) {
            (DeviceKind::Cpu, DType::F32) => true,
            (DeviceKind::Cuda, DType::F32 | DType::BF16) => cfg!(feature = "cuda"),
            _ => false,
        }
    }

    /// Whether each half of a layer is best computed as one operation, whose inner values can also be recomputed. On the
    /// CPU single operations are faster, because they work on one sequence at a time.
    pub fn fuses_halves(self) -> bool {
        self == DeviceKind::Cuda
    }

    /// Whether sequences with a common prefix share its computation.
    pub fn shares_prefixes(self) -> bool {
        self == DeviceKind::Cpu
    }

    /// Whether tensors are in the machine's memory, where code can read them without a copy; otherwise the device has its
    /// own memory.
    pub fn is_host(self) -> bool {
        self == DeviceKind::Cpu
    }

    /// Whether a call only queues an operation. Then one launch for many tensors is much faster than many launches.
    pub fn queues(self) -> bool {
        self == DeviceKind::Cuda
    }

    /// Whether this build compiles kernels for it at run time.
    pub fn compiles(self) -> bool {
        cfg!(feature = "cuda") && self == DeviceKind::Cuda
    }
}

/// Names of the devices that this build and machine offer.
pub fn available() -> Vec<String> {
    let mut names = vec!["cpu".to_string()];
    names.extend((0..cuda_count()).map(|index| format!("cuda:{index}")));
    names
}

/// Why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The name has no known form.
    #[error("unknown device `{name}`; use `cpu` or `cuda:N` (available here: {})", available.join(", "))]
    Unknown {
        /// The name as given.
        name: String,
        /// Devices that exist.
        available: Vec<String>,
    },
    /// The machine does not have the device.
    #[error("device `{name}` is not available on this machine; available: {}", available.join(", "))]
    Absent {
        /// The name as given.
        name: String,
        /// Devices that exist.
        available: Vec<String>,
    },
    /// A CUDA device in a build without CUDA.
    #[error(
        "device `{name}` needs a build with the feature `cuda` (cargo build --features cuda); this one has: {}",
        available.join(", ")
    )]
    NotBuilt {
        /// The name as given.
        name: String,
        /// Devices that exist.
        available: Vec<String>,
    },
    /// A CUDA device that exists but cannot run this build.
    #[error("device `{name}` cannot be used: {reason}; {help}")]
    Unusable {
        /// The name as given.
        name: String,
        /// What is missing.
        reason: String,
        /// What to do.
        help: &'static str,
    },
}

#[derive(Debug, PartialEq, Eq)]
enum Named {
    Cpu,
    Cuda(usize),
}

fn parse(name: &str) -> Result<Named, DeviceError> {
    let named = match name.split_once(':') {
        None if name == "cpu" => Some(Named::Cpu),
        None if name == "cuda" => Some(Named::Cuda(0)),
        Some(("cuda", index)) => index.parse().ok().map(Named::Cuda),
        _ => None,
    };
    named.ok_or_else(|| DeviceError::Unknown {
        name: name.to_string(),
        available: available(),
    })
}

#[cfg(feature = "cuda")]
fn cuda(name: &str, index: usize) -> Result<Device, DeviceError> {
    if index < cuda_count() {
        return Ok(Device::cuda(index));
    }
    Err(DeviceError::Absent {
        name: name.to_string(),
        available: available(),
    })
}

#[cfg(feature = "cuda")]
fn cuda_count() -> usize {
    Device::enumerate(burn::tensor::DeviceType::Cuda)
        .into_vec()
        .len()
}

#[cfg(not(feature = "cuda"))]
fn cuda(name: &str, _index: usize) -> Result<Device, DeviceError> {
    Err(DeviceError::NotBuilt {
        name: name.to_string(),
        available: available(),
    })
}

#[cfg(not(feature = "cuda"))]
fn cuda_count() -> usize {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        assert_eq!(parse("cpu"), Ok(Named::Cpu));
        assert_eq!(parse("cuda"), Ok(Named::Cuda(0)));
        assert_eq!(parse("cuda:3"), Ok(Named::Cuda(3)));
        assert_eq!(device("cpu").unwrap(), Device::flex());
    }

    #[test]
    fn unknown_names_are_refused_with_the_available_devices() {
        for name in ["gpu", "cuda:x", "cuda:-1", "cpu:0", ""] {
            let error = device(name).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}`")), "{error}");
            assert!(error.contains("available here: cpu"), "{error}");
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn without_cuda_the_error_says_how_to_enable_it() {
        insta::assert_snapshot!(
            device("cuda:1").unwrap_err(),
            @"device `cuda:1` needs a build with the feature `cuda` (cargo build --features cuda); this one has: cpu"
        );
    }
}
