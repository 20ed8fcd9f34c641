//! Kernels for the CPU over contiguous f32 slices: fused, with their backward passes.
//!
//! Work is divided by row, never by the number of threads, so results have the same bits with any number of threads.
//! Loops are written for the compiler to vectorise and are dispatched to the widest instructions that the processor
//! has.
//!
//! Dims: `N` tokens, `D` width, `I` inner width of the MLP.

use rayon::prelude::*;

use crate::unset::{self, Unset};
use crate::vector::{exp, vectorised};

/// Tokens per task of the element-wise kernels.
const TASK_TOKENS: usize = 64;

/// Σ a·b with sixteen running sums, so that it vectorises; the order is fixed.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a_blocks, b_blocks) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = a_blocks
        .remainder()
        .iter()
        .zip(b_blocks.remainder())
        .map(|(x, y)| x * y)
        .sum();
    for (x, y) in a_blocks.zip(b_blocks) {
        for lane in 0..16 {
            sums[lane] = x[lane].mul_add(y[lane], sums[lane]);
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// out += factor · x
#[inline(always)]
fn add_scaled(out: &mut [f32], factor: f32, x: &[f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += factor * x;
    }
}

/// y = w · x / sqrt(mean(x²) + ε); `x`: `[N, D]`, `weight`: `[D]`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f64) -> Vec<f32> {
    let d = weight.len();
    assert_eq!(x.len() % d, 0, "rows have the wrong width");
    let write = |y: &mut [Unset]| {
        y.par_chunks_mut(d * TASK_TOKENS)
            .zip(x.par_chunks(d * TASK_TOKENS))
            .for_each(|(y, x)| {
                vectorised(
                    #[inline(always)]
                    || {
                        for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                            let scale = inverse_root(x, epsilon);
                            for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                                y.write(x * scale * w);
                            }
                        }
                    },
                );
            });
    };
    #[expect(unsafe_code, reason = "consecutive rows of `x` cover `y`")]
    unsafe {
        unset::made(x.len(), write)
    }
}

#[inline(always)]
fn inverse_root(x: &[f32], epsilon: f64) -> f32 {
    let mean_square = dot(x, x) / x.len() as f32;
    1.0 / (mean_square + epsilon as f32).sqrt()
}

/// Gradients of [`rms_norm`] for `x` and `weight`.
///
/// With s = 1/√(mean(x²) + ε) and h = g·w: dx = s h − x s³ mean(h x), dw = Σ_n g x s.
pub(super) fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    epsilon: f64,
    gradient: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let d = weight.len();
    assert_eq!(x.len() % d, 0, "rows have the wrong width");
    assert_eq!(x.len(), gradient.len(), "input and gradient differ in size");
    let block = d * TASK_TOKENS;
    let mut parts: Vec<Vec<f32>> = Vec::new();
    let write = |dx: &mut [Unset]| {
        let tasks = dx
            .par_chunks_mut(block)
            .zip(x.par_chunks(block))
            .zip(gradient.par_chunks(block));
        let part = |((dx, x), gradient): ((&mut [Unset], &[f32]), &[f32])| {
            let mut dw = vec![0.0; d];
            vectorised(
                #[inline(always)]
                || {
                    let mut h = vec![0.0; d];
                    for ((dx, x), g) in dx
                        .chunks_exact_mut(d)
                        .zip(x.chunks_exact(d))
                        .zip(gradient.chunks_exact(d))
                    {
                        let s = inverse_root(x, epsilon);
                        for i in 0..d {
                            h[i] = g[i] * weight[i];
                            dw[i] += g[i] * x[i] * s;
                        }
                        let pull = dot(&h, x) / d as f32 * s * s * s;
                        for i in 0..d {
                            dx[i].write(h[i] * s - x[i] * pull);
                        }
                    }
                },
            );
            dw
        };
        parts = tasks.map(part).collect();
    };
    #[expect(unsafe_code, reason = "consecutive rows of `x` cover `dx`")]
    let dx = unsafe { unset::made(x.len(), write) };
    let mut dw = vec![0.0; d];
    for part in parts {
        add_scaled(&mut dw, 1.0, &part);
    }
    (dx, dw)
}

/// silu(gate) · up, silu(x) = x / (1 + e^−x); all `[N, I]`.
pub(super) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    const BLOCK: usize = 8192;
    assert_eq!(gate.len(), up.len(), "gate and up differ in size");
    let write = |y: &mut [Unset]| {
        y.par_chunks_mut(BLOCK)
            .zip(gate.par_chunks(BLOCK))
            .zip(up.par_chunks(BLOCK))
            .for_each(|((y, gate), up)| {
                vectorised(
                    #[inline(always)]
                    || {
                        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                            y.write(g * sigmoid(*g) * u);
                        }
                    },
                );
            });
    };
    #[expect(unsafe_code, reason = "blocks of `gate` and of `up` cover `y`")]
    unsafe {
        unset::made(gate.len(), write)
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Gradients of [`swiglu`] for `gate` and `up`.
pub(super) fn swiglu_backward(gate: &[f32], up: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    const BLOCK: usize = 8192;
    assert_eq!(gate.len(), up.len(), "gate and up differ in size");
    assert_eq!(
        gate.len(),
        gradient.len(),
        "gate and gradient differ in size"
    );
    let mut d_up = Vec::new();
    let write = |d_gate: &mut [Unset]| {
        let both = |d_up: &mut [Unset]| {
            d_gate
                .par_chunks_mut(BLOCK)
                .zip(d_up.par_chunks_mut(BLOCK))
                .zip(gate.par_chunks(BLOCK))
                .zip(up.par_chunks(BLOCK))
                .zip(gradient.par_chunks(BLOCK))
                .for_each(|((((d_gate, d_up), gate), up), gradient)| {
                    vectorised(
                        #[inline(always)]
                        || {
                            for i in 0..gate.len() {
                                let s = sigmoid(gate[i]);
                                let silu = gate[i] * s;
                                d_up[i].write(gradient[i] * silu);
                                d_gate[i].write(gradient[i] * up[i] * (s + silu * (1.0 - s)));
                            }
                        },
                    );
                });
        };
        #[expect(
            unsafe_code,
            reason = "blocks of `gate`, `up` and `gradient` cover both"
        )]
        unsafe {
            d_up = unset::made(gate.len(), both);
        }
    };
    #[expect(
        unsafe_code,
        reason = "blocks of `gate`, `up` and `gradient` cover both"
    )]
    let d_gate = unsafe { unset::made(gate.len(), write) };
    (d_gate, d_up)
}
