//! The peak rates of a device, measured in the same process as everything else.

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use serde::Serialize;
use verl_decoder::blocks::linear::Linear;
use verl_kernels::device::DeviceKind;
use verl_kernels::lanes::{Kernel, Lanes, Row, run};
use verl_kernels::vector::LANES;

use super::{BenchError, repeat};
use burn::module::Param;

/// Rates reached by a copy and by a large matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// Bytes read and written per second by a pass over a buffer, in 10⁹.
    pub copy_gb_s: f64,
    /// Operations per second of a square product, in 10¹²; a multiply-add counts as two.
    pub product_tflop_s: f64,
    /// On a CPU in f32: operations per second of multiply-adds on registers, on all threads, in 10¹². No kernel can
    /// exceed it.
    pub arithmetic_tflop_s: Option<f64>,
}

impl Ceilings {
    /// Measures the rates on random numbers, products in `dtype`; `quick` uses small buffers.
    ///
    /// # Errors
    /// The device fails.
    pub fn measure(device: &Device, dtype: DType, quick: bool) -> Result<Self, BenchError> {
        let (elements, size) = match (DeviceKind::of(device).is_host(), quick) {
            (_, true) => (1 << 16, 64),
            (true, false) => (1 << 24, 768),
            (false, false) => (1 << 28, 8192),
        };
        Ok(Ceilings {
            copy_gb_s: copy(device, elements)?,
            product_tflop_s: product(device, dtype, size)?,
            arithmetic_tflop_s: (DeviceKind::of(device).is_host() && dtype == DType::F32)
                .then(arithmetic),
        })
    }
}

/// Independent chains of multiply-adds, enough to hide each other's latency.
const CHAINS: usize = 12;
/// Links of each chain.
const LINKS: usize = 100_000;

/// Chains on one thread.
struct Arithmetic<'a>(&'a mut [Row; CHAINS]);

impl Kernel for Arithmetic<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (factor, term) = (L::splat(0.999), L::splat(0.001));
        // As many chains at a time as fit in the registers.
        let at_once = if L::ARE_WIDE { CHAINS } else { CHAINS / 2 };
        for rows in self.0.chunks_exact_mut(at_once) {
            if L::ARE_WIDE {
                links::<L, CHAINS>(rows, factor, term);
            } else {
                links::<L, { CHAINS / 2 }>(rows, factor, term);
            }
        }
    }
}

#[inline(always)]
fn links<L: Lanes, const N: usize>(rows: &mut [Row], factor: L, term: L) {
    let mut chains: [L; N] = std::array::from_fn(|i| L::load(&rows[i]));
    for _ in 0..LINKS {
        for chain in &mut chains {
            *chain = chain.mul_add(factor, term);
        }
    }
    for (chain, row) in chains.into_iter().zip(rows) {
        chain.store(row);
    }
}

/// The best of several runs on all threads at once, in 10¹² operations per second.
fn arithmetic() -> f64 {
    let best = (0..10).map(|_| {
        let start = Instant::now();
        let threads = rayon::broadcast(|_| {
            let mut rows = [[0.5; LANES]; CHAINS];
            run(Arithmetic(&mut rows));
            black_box(rows);
        });
        let operations = 2 * threads.len() * CHAINS * LANES * LINKS;
        operations as f64 / start.elapsed().as_secs_f64() * 1e-12
    });
    best.fold(0.0, f64::max)
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
