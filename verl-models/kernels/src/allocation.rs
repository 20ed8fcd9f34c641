//! What the process does with memory that a training step has freed.

use std::sync::Once;

/// Makes the allocator keep what is freed, so that the next micro-batch gets its buffers without asking the system.
///
/// Every micro-batch allocates and frees the same large buffers; by default glibc returns them to the system, which
/// zeroes every page again. Takes effect once, on Linux with glibc, unless the user has set `GLIBC_TUNABLES` or a
/// `MALLOC_…` variable; elsewhere it does nothing.
pub(crate) fn keep_freed_memory() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let is_configured = std::env::vars_os().any(|(name, _)| {
            let name = name.to_string_lossy();
            name == "GLIBC_TUNABLES" || name.starts_with("MALLOC_")
        });
        if !is_configured {
            set();
        }
    });
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "mallopt only changes allocator settings")]
fn set() {
    // No block gets a mapping of its own: after an unmap its pages would be zeroed again (the gradient of a
    // vocabulary's embedding is larger than any threshold that glibc accepts). A single arena, or threads would keep
    // memory that others could use. Rejected settings are ignored.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn set() {}
