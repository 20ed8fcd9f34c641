//! How the process treats memory that a training step has freed.

use std::sync::Once;

/// Makes the allocator keep what is freed, so that the next micro-batch gets its buffers without asking the system.
///
/// A micro-batch makes and frees the same large buffers each time; by default glibc hands them back to the system,
/// which clears every page anew. Acts once, on Linux with glibc, and not where `GLIBC_TUNABLES` or a `MALLOC_…`
/// variable says how the user wants it; elsewhere nothing changes.
pub(crate) fn keep_freed_memory() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let is_chosen = std::env::vars_os().any(|(name, _)| {
            let name = name.to_string_lossy();
            name == "GLIBC_TUNABLES" || name.starts_with("MALLOC_")
        });
        if !is_chosen {
            set();
        }
    });
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(
    unsafe_code,
    reason = "mallopt changes settings of the allocator alone"
)]
fn set() {
    // No block is mapped for itself: unmapped, it would be cleared anew (the gradient of a vocabulary's embedding is larger
    // than any threshold that glibc accepts). One arena, or threads keep what others could use. Refused settings are left
    // as they are.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn set() {}
