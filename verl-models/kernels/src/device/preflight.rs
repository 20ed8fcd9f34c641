//! Checks that a CUDA device can run this build, before anything is loaded.

use std::fmt;

use serde::Serialize;

use super::DeviceError;

/// Properties of a usable device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Preflight {
    /// The device's own name.
    pub name: String,
    /// Its compute capability, such as 90 for 9.0; `None` for the CPU.
    pub capability: Option<u32>,
    /// The driver's version, if the system reports it.
    pub driver: Option<String>,
    /// Where the CUDA headers were found.
    pub toolkit: Option<String>,
    /// Bytes of memory, if the device reports them.
    pub memory: Option<u64>,
    /// Bytes of shared memory per block.
    pub shared_memory: Option<u64>,
}

impl fmt::Display for Preflight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(capability) = self.capability {
            write!(f, ", capability {}.{}", capability / 10, capability % 10)?;
        }
        if let Some(driver) = &self.driver {
            write!(f, ", driver {driver}")?;
        }
        if let Some(toolkit) = &self.toolkit {
            write!(f, ", CUDA in {toolkit}")?;
        }
        if let Some(memory) = self.memory {
            write!(f, ", {:.1} GiB", memory as f64 / (1u64 << 30) as f64)?;
        }
        Ok(())
    }
}

/// Checks the device named `name` and, on a GPU, compiles and runs a kernel there; the CPU always passes.
///
/// A GPU needs compute capability 8.0 (bf16 in matrix products), 48 KiB of shared memory per block, NVRTC and the CUDA
/// headers.
///
/// # Errors
/// As [`device`](super::device); [`DeviceError::Unusable`] says what is missing.
pub fn preflight(name: &str) -> Result<Preflight, DeviceError> {
    super::device(name)?;
    match super::parse(name)? {
        super::Named::Cpu => Ok(Preflight {
            name: "CPU".to_owned(),
            capability: None,
            driver: None,
            toolkit: None,
            memory: super::memory("cpu"),
            shared_memory: None,
        }),
        super::Named::Cuda(index) => cuda(name, index),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(name: &str, _index: usize) -> Result<Preflight, DeviceError> {
    Err(DeviceError::NotBuilt {
        name: name.to_owned(),
        available: super::available(),
    })
}

#[cfg(feature = "cuda")]
use with_cuda::cuda;

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::path::{Path, PathBuf};

    use super::{DeviceError, Preflight};
    use crate::cuda::probe;

    /// Matrix products of bf16 came with Ampere.
    const MIN_CAPABILITY: u32 = 80;
    /// The largest shared memory that a kernel declares.
    const MIN_SHARED_MEMORY: u64 = 48 << 10;

    pub(super) fn cuda(name: &str, index: usize) -> Result<Preflight, DeviceError> {
        let unusable = |reason: String, help: &'static str| DeviceError::Unusable {
            name: name.to_owned(),
            reason,
            help,
        };
        let toolkit = toolkit().ok_or_else(|| {
            unusable(
                "the CUDA headers were not found (no `include/cuda_bf16.h` under $CUDA_PATH, /usr/local/cuda, \
                 /opt/cuda or /usr)"
                    .to_owned(),
                "install the CUDA toolkit, or set CUDA_PATH to its folder",
            )
        })?;
        let found = probe::properties(index);
        if found.capability < MIN_CAPABILITY {
            return Err(unusable(
                format!(
                    "{} has compute capability {}.{}, but bf16 needs 8.0",
                    found.name,
                    found.capability / 10,
                    found.capability % 10
                ),
                "use a newer GPU, or set `group = \"cpu\"`",
            ));
        }
        if found.shared_memory < MIN_SHARED_MEMORY {
            return Err(unusable(
                format!(
                    "{} has {} bytes of shared memory per block, but kernels need {MIN_SHARED_MEMORY}",
                    found.name, found.shared_memory
                ),
                "use a newer GPU, or set `group = \"cpu\"`",
            ));
        }
        probe::run(index).map_err(|reason| {
            unusable(
                format!("a test kernel could not be compiled and run: {reason}"),
                "add the folder of libnvrtc.so to LD_LIBRARY_PATH; the driver must support its version",
            )
        })?;
        Ok(Preflight {
            name: found.name,
            capability: Some(found.capability),
            driver: driver(),
            toolkit: Some(toolkit.display().to_string()),
            memory: found.memory,
            shared_memory: Some(found.shared_memory),
        })
    }

    /// The folder from which cubecl reads the headers, if they exist.
    fn toolkit() -> Option<PathBuf> {
        let folder = match std::env::var_os("CUDA_PATH") {
            Some(path) => PathBuf::from(path),
            None => ["/usr/local/cuda", "/opt/cuda", "/usr"]
                .map(PathBuf::from)
                .into_iter()
                .find(|folder| folder.exists())?,
        };
        folder
            .join("include/cuda_bf16.h")
            .exists()
            .then_some(folder)
    }

    /// Such as `580.159.04`.
    fn driver() -> Option<String> {
        let text = std::fs::read_to_string(Path::new("/proc/driver/nvidia/version")).ok()?;
        let mut words = text.lines().next()?.split_whitespace();
        words
            .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'))
            .map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_passes() {
        let found = preflight("cpu").unwrap();
        assert_eq!((found.name.as_str(), found.capability), ("CPU", None));
    }

    #[test]
    fn a_gpu_prints_on_one_line() {
        let found = Preflight {
            name: "NVIDIA H200".to_owned(),
            capability: Some(90),
            driver: Some("580.159.04".to_owned()),
            toolkit: Some("/usr/local/cuda".to_owned()),
            memory: Some(150_754_820_096),
            shared_memory: Some(232_448),
        };
        assert_eq!(
            found.to_string(),
            "NVIDIA H200, capability 9.0, driver 580.159.04, CUDA in /usr/local/cuda, 140.4 GiB"
        );
    }

    #[test]
    fn unknown_names_are_refused() {
        assert!(preflight("gpu").is_err());
    }
}
