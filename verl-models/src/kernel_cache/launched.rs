//! Counts the kernels of a start, those of burn too.

use std::sync::{Mutex, PoisonError};

use cubecl::launched::LaunchedKernels;

use super::Tally;

struct Count {
    open: Option<LaunchedKernels>,
    last: Option<Tally>,
}

static COUNT: Mutex<Count> = Mutex::new(Count {
    open: None,
    last: None,
});

pub(super) fn begin() {
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    *count = Count {
        open: Some(LaunchedKernels::new()),
        last: None,
    };
}

pub(super) fn end() -> Option<Tally> {
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(launched) = count.open.take() {
        let ids = launched.finish();
        let found = ids.iter().filter(|id| is_found(**id)).count();
        count.last = (!ids.is_empty()).then(|| Tally {
            compiled: ids.len() - found,
            found,
            cache: cache(),
        });
    }
    count.last.clone()
}

#[cfg(feature = "kernel-cache")]
use super::store::{cache, is_found};

#[cfg(not(feature = "kernel-cache"))]
fn is_found(_: u128) -> bool {
    false
}

#[cfg(not(feature = "kernel-cache"))]
fn cache() -> String {
    "none: this build is without the feature `kernel-cache`".to_owned()
}
