//! The properties of a device, and a kernel that shows that kernels can be compiled and run there.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use std::sync::OnceLock;

use cubecl::device::CudaDevice;
use cubecl::prelude::Client;

use super::launch::{CudaKernel, Source};

static SOURCE: Source = Source::new(include_str!("probe.cu"));

/// Threads of the test kernel.
const THREADS: u32 = 64;

/// Properties that a device reports.
pub(crate) struct Properties {
    /// Its name.
    pub name: String,
    /// 90 for compute capability 9.0.
    pub capability: u32,
    /// Bytes.
    pub memory: Option<u64>,
    /// Bytes of shared memory that a block can have.
    pub shared_memory: u64,
}

fn client(index: usize) -> Client {
    cubecl::Device::Cuda(CudaDevice { index }).client()
}

/// The properties of the device at `index`, which must exist.
pub(crate) fn properties(index: usize) -> Properties {
    let client = client(index);
    let properties = client.properties();
    let identity = &properties.identity;
    // Such as `ptx_sm90`.
    let digits = identity.fingerprint.split("sm").last().unwrap_or_default();
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    Properties {
        name: identity.name.clone(),
        capability: digits.parse().unwrap_or(0),
        memory: properties.memory.max_memory(),
        shared_memory: properties.hardware.max_shared_memory_size as u64,
    }
}

/// Bytes of shared memory that a block of the deepest kernels declares.
pub(crate) const LARGE: usize = 232_448;

/// Whether a kernel may declare [`LARGE`] bytes of shared memory: needs Hopper, and a driver of CUDA 13. Tried once.
pub(crate) fn supports_large(client: &Client) -> bool {
    static SUPPORTS_LARGE: OnceLock<bool> = OnceLock::new();
    *SUPPORTS_LARGE.get_or_init(|| {
        if client.properties().hardware.max_shared_memory_size < LARGE {
            return false;
        }
        let output = client.empty(4);
        // SAFETY: the kernel writes one number; the device supports as much shared memory.
        unsafe {
            CudaKernel::new(&SOURCE, "large", 256)
                .define("LARGE", LARGE)
                .launch(client, [1, 1, 1], &[&output], vec![]);
        }
        let words = LARGE as u32 / 4;
        let expected = (words / 2).wrapping_mul(words - 1);
        let found = client.read_one(output);
        let supported = found.is_ok_and(|bytes| bytes.to_vec() == expected.to_le_bytes());
        if !supported {
            tracing::info!(
                "kernels use at most 48 KiB of shared memory: the driver does not support more"
            );
        }
        supported
    })
}

/// Compiles a kernel that multiplies numbers, runs it and checks the result.
///
/// # Errors
/// The device's error, or that the numbers are wrong.
pub(crate) fn run(index: usize) -> Result<(), String> {
    let client = client(index);
    let numbers: Vec<u8> = (0..THREADS).flat_map(u32::to_le_bytes).collect();
    let input = client.create_from_slice(&numbers);
    let output = client.empty(numbers.len());
    // SAFETY: both buffers have a number for each thread.
    unsafe {
        CudaKernel::new(&SOURCE, "probe", THREADS)
            .define("OFFSET", 5)
            .launch(&client, [1, 1, 1], &[&input, &output], vec![3, 1 << 33]);
    }
    let bytes = client.read_one(output).map_err(|error| error.to_string())?;
    let found = bytes
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let expected = (0..THREADS).map(|x| 3 * x + 5 + 2);
    if found.eq(expected) {
        Ok(())
    } else {
        Err("it returned wrong numbers".to_owned())
    }
}
