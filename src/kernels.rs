//! Compiled kernels of a GPU, as the engine sees them.

use verl::models::compiled;
use verl::models::device::DeviceKind;
use verl::pipe::run::records::KernelTally;
use verl::pipe::run::timeline::Kernels;

/// The kernels of this build.
pub(crate) struct GpuKernels;

impl GpuKernels {
    /// Starts to count them.
    pub(crate) fn counted() -> GpuKernels {
        compiled::begin();
        GpuKernels
    }
}

impl Kernels for GpuKernels {
    fn used_on(&self, device: &str) -> bool {
        DeviceKind::named(device).is_some_and(DeviceKind::compiles)
    }

    fn tally(&self) -> Option<KernelTally> {
        let tally = compiled::tally()?;
        Some(KernelTally {
            compiled: tally.compiled,
            driver_cache: tally.driver_cache,
        })
    }
}
