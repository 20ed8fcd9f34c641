//! What the process does with memory that a training step has freed.

use std::sync::Once;

/// Makes the allocator keep what is freed, so that the next micro-batch gets its buffers without asking the system.
///
/// Every micro-batch allocates and frees the same large buffers; by default glibc returns them to the system, which
/// zeroes every page again. Takes effect once, on Linux with glibc, unless the user has set `GLIBC_TUNABLES` or a
/// `MALLOC_…` variable; elsewhere it does nothing. There is only one allocator per process, so this also applies to the
/// rest of the program.
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
#[expect(
    unsafe_code,
    reason = "only a C function tunes the allocator of the whole process"
)]
fn set() {
    // No block gets a mapping of its own: after an unmap its pages would be zeroed again (the gradient of a
    // vocabulary's embedding is larger than any threshold that glibc accepts). A single arena, or threads would keep
    // memory that others could use. Rejected settings are ignored.
    //
    // SAFETY: the arguments are plain numbers, and no allocation becomes invalid. Other threads may allocate meanwhile:
    // each setting is a word that glibc reads anew for every decision, so a mixture of old and new settings is valid.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn set() {}
