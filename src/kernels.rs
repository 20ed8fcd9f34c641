//! Compiled kernels of a GPU, as the engine sees them.

use verl::models::kernel_cache::{self, Place};
use verl::pipe::run::records::KernelTally;
use verl::pipe::run::timeline::Kernels;

/// The kernels of this build.
pub(crate) struct OfGpu;

impl Kernels for OfGpu {
    fn are_for(&self, device: &str) -> bool {
        cfg!(feature = "cuda") && device.starts_with("cuda")
    }

    fn prepare(&self, job: &str) {
        kernel_cache::prepare(job);
    }

    fn tally(&self) -> Option<KernelTally> {
        let tally = kernel_cache::tally()?;
        Some(KernelTally {
            compiled: tally.compiled,
            found: tally.found,
            cache: tally.cache,
        })
    }

    fn save(&self) {
        kernel_cache::save();
    }

    fn place(&self) -> String {
        match cfg!(feature = "kernel-cache") {
            true => Place::of_environment().to_string(),
            false => "none: this build is without the feature `kernel-cache`".to_owned(),
        }
    }
}
