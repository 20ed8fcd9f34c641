//! Counts the kernels that are launched: NVRTC compiles each at its first launch.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use cubecl::launched::LaunchedKernels;

use super::{DriverCache, Tally};

struct Count {
    open: Option<LaunchedKernels>,
    launched: BTreeSet<u128>,
}

static COUNT: Mutex<Count> = Mutex::new(Count {
    open: None,
    launched: BTreeSet::new(),
});

pub(super) fn begin() {
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    count.open.get_or_insert_with(LaunchedKernels::new);
}

pub(super) fn end() -> Option<Tally> {
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(open) = count.open.take() {
        count.launched.extend(open.finish());
    }
    let compiled = count.launched.len();
    (compiled > 0).then(|| Tally {
        compiled,
        driver_cache: DriverCache::of_environment().to_string(),
    })
}
