//! What a device can do at most, measured in the process that measures everything else.

use burn::tensor::{DType, Device, Distribution, Tensor};
use serde::Serialize;

use super::{BenchError, repeat};
use crate::blocks::linear::Linear;
use crate::device::is_cpu;
use burn::module::Param;

/// Rates that a copy and a large matrix product reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// Bytes read and written in a second by a pass over a buffer, in 10⁹.
    pub copy_gb_s: f64,
    /// Operations (two a multiplication with its addition) in a second of a square product, in 10¹².
    pub product_tflop_s: f64,
}

impl Ceilings {
    /// Measures both on random numbers, products in `dtype`; `quick` takes small buffers.
    ///
    /// # Errors
    /// When the device fails.
    pub fn measure(device: &Device, dtype: DType, quick: bool) -> Result<Self, BenchError> {
        let (elements, size) = match (is_cpu(device), quick) {
            (_, true) => (1 << 16, 64),
            (true, false) => (1 << 24, 768),
            (false, false) => (1 << 28, 8192),
        };
        Ok(Ceilings {
            copy_gb_s: copy(device, elements)?,
            product_tflop_s: product(device, dtype, size)?,
        })
    }
}

fn copy(device: &Device, elements: usize) -> Result<f64, BenchError> {
    let x = Tensor::<1>::random([elements], Distribution::Default, (device, DType::F32));
    let times = repeat(device, 2, 8, || {
        drop(x.clone() * 1.5);
        Ok::<(), BenchError>(())
    })?;
    // Four bytes read, four written.
    Ok(8.0 * elements as f64 / times.median_ms * 1e-6)
}

fn product(device: &Device, dtype: DType, size: usize) -> Result<f64, BenchError> {
    let matrix = || {
        let matrix = Tensor::<2>::random(
            [size, size],
            Distribution::Normal(0.0, 1.0),
            (device, DType::F32),
        );
        matrix.cast(dtype)
    };
    let linear = Linear {
        weight: Param::from_tensor(matrix()),
        bias: None,
    };
    let x = matrix();
    let times = repeat(device, 2, 8, || {
        drop(linear.forward(x.clone()));
        Ok::<(), BenchError>(())
    })?;
    let operations = 2.0 * (size as f64).powi(3);
    Ok(operations / times.median_ms * 1e-9)
}
