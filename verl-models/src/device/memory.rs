//! How much memory a device has, and what a message says of a device that ran out of it.

use burn::tensor::Device;

use super::{Named, is_cpu};

/// Bytes of memory of the device called `name`, where it is here and tells: for the CPU those of the machine.
///
/// ```
/// assert_eq!(verl_models::device::memory("gpu"), None);
/// ```
pub fn memory(name: &str) -> Option<u64> {
    match super::parse(name).ok()? {
        Named::Cpu => machine(),
        Named::Cuda(index) => card(index),
    }
}

/// The same of a device at hand.
pub(crate) fn memory_of(device: &Device) -> Option<u64> {
    if is_cpu(device) {
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
    let is_here = index < super::cuda_count();
    is_here.then(|| crate::kernels::cuda::probe::properties(index).memory)?
}

#[cfg(not(feature = "cuda"))]
fn card(_index: usize) -> Option<u64> {
    None
}

/// The machine's memory, as Linux tells it.
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

/// A device had no room for what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes that were asked for, where the message tells.
    pub asked: Option<u64>,
}

/// How the libraries of a GPU say that its memory is used up. A number of bytes follows where a text ends with a space.
const TEXTS: &[&str] = &[
    "out of device memory allocating ",
    "couldn't map storage for a deferred allocation of ",
    "can't allocate buffer of size: ",
    "An out-of-memory error happened during launch",
    "CUDA_ERROR_OUT_OF_MEMORY",
];

/// Whether a message, of a panic or an error, is about memory of a device that is used up.
///
/// Kernels and copies are queued, so an allocation fails on the thread of the device's server, and is told by the call
/// that reads a result: the message then holds that of the allocation.
///
/// ```
/// use verl_models::device::shortage;
///
/// let told = shortage("An IO error happened\nCaused by:\n  out of device memory allocating 4096 bytes");
/// assert_eq!(told.unwrap().asked, Some(4096));
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
    fn the_machine_tells_its_memory() {
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
    fn a_card_that_is_not_here_tells_nothing() {
        assert_eq!(memory("cuda:0"), None);
    }

    /// What a failed read panics with: the error's debug text, in which line ends are escaped.
    const PANIC: &str = "Error while reading data: use `try_into_data` instead to catch the error at runtime: Generic { \
                         reason: \"An error happened during execution\\nCaused by:\\n  The bytes were never written \
                         (failure #3, still claiming 1 buffer(s))\\nCaused by:\\n  An IO error happened\\nCaused by:\\n  \
                         out of device memory allocating 8589934592 bytes\\n\" }";

    #[test]
    fn messages_of_full_devices_are_known_with_what_was_asked_for() {
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
