//! The memory of devices, and messages that mean a device ran out of it.

use burn::tensor::Device;

use super::{DeviceKind, Named};

/// Bytes of memory of the device named `name`; `None` if it does not exist here or does not report them. For the CPU,
/// the machine's memory.
///
/// ```
/// assert_eq!(verl_kernels::device::memory("gpu"), None);
/// ```
pub fn memory(name: &str) -> Option<u64> {
    match super::parse(name).ok()? {
        Named::Cpu => machine(),
        Named::Cuda(index) => card(index),
    }
}

/// [`memory`] of `device`.
pub fn memory_of(device: &Device) -> Option<u64> {
    if DeviceKind::of(device).is_host() {
        return machine();
    }
    #[cfg(feature = "cuda")]
    for index in 0..super::cuda_count() {
        if device.clone().without_autodiff() == Device::cuda(index) {
            return card(index);
        }
    }
    None
}

#[cfg(feature = "cuda")]
fn card(index: usize) -> Option<u64> {
    let exists = index < super::cuda_count();
    exists.then(|| crate::cuda::probe::properties(index).memory)?
}

#[cfg(not(feature = "cuda"))]
fn card(_index: usize) -> Option<u64> {
    None
}

/// The machine's memory, as Linux reports it.
fn machine() -> Option<u64> {
    total(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

/// A device ran out of memory for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Requested bytes, if the message contains them.
    pub asked: Option<u64>,
}

/// Messages of GPU libraries that report exhausted memory. Where a text ends with a space, a number of bytes follows.
const TEXTS: &[&str] = &[
    "out of device memory allocating ",
    "couldn't map storage for a deferred allocation of ",
    "can't allocate buffer of size: ",
    "An out-of-memory error happened during launch",
    "CUDA_ERROR_OUT_OF_MEMORY",
];

/// Whether the message of a panic or an error reports that a device ran out of memory.
///
/// Kernels and copies are queued, so an allocation fails on the thread of the device's server, and the failure surfaces
/// in the call that reads a result: the message of that call then contains that of the allocation.
///
/// ```
/// use verl_kernels::device::shortage;
///
/// let found = shortage("An IO error happened\nCaused by:\n  out of device memory allocating 4096 bytes");
/// assert_eq!(found.unwrap().asked, Some(4096));
/// assert_eq!(shortage("index out of bounds"), None);
/// ```
pub fn shortage(message: &str) -> Option<Shortage> {
    let found = TEXTS.iter().find_map(|text| {
        let at = message.find(text)?;
        Some(&message[at + text.len()..])
    })?;
    let digits = found.find(|c: char| !c.is_ascii_digit());
    let asked = found[..digits.unwrap_or(found.len())].parse().ok();
    Some(Shortage { asked })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_reports_its_memory() {
        assert_eq!(
            total("MemTotal:       16384 kB\nMemFree: 1 kB\n"),
            Some(16 << 20)
        );
        assert_eq!(total("MemFree: 1 kB\n"), None);
        if cfg!(target_os = "linux") {
            assert!(memory("cpu").is_some_and(|bytes| bytes > 64 << 20));
            assert_eq!(memory_of(&Device::flex().autodiff()), memory("cpu"));
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_missing_gpu_reports_no_memory() {
        assert_eq!(memory("cuda:0"), None);
    }

    /// The panic message of a failed read: the error's debug text, in which line ends are escaped.
    const PANIC: &str = "Error while reading data: use `try_into_data` instead to catch the error at runtime: Generic { \
                         reason: \"An error happened during execution\\nCaused by:\\n  The bytes were never written \
                         (failure #3, still claiming 1 buffer(s))\\nCaused by:\\n  An IO error happened\\nCaused by:\\n  \
                         out of device memory allocating 8589934592 bytes\\n\" }";

    #[test]
    fn out_of_memory_messages_are_recognised_with_the_requested_bytes() {
        let asked = |message: &str| shortage(message).map(|shortage| shortage.asked);
        assert_eq!(asked(PANIC), Some(Some(8 << 30)));
        assert_eq!(asked("can't allocate buffer of size: 77\n"), Some(Some(77)));
        let deferred =
            "couldn't map storage for a deferred allocation of 12 bytes\nCaused by:\n  …";
        assert_eq!(asked(deferred), Some(Some(12)));
        let launch = "An out-of-memory error happened during launch\nCaused by:\n  …";
        assert_eq!(asked(launch), Some(None));
        assert_eq!(
            asked("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")"),
            Some(None)
        );
        for other in [
            "",
            "a stage ran out of memory for names",
            "CUDA_ERROR_ILLEGAL_ADDRESS",
        ] {
            assert_eq!(asked(other), None, "{other}");
        }
    }
}
