//! Kernels for the CPU over contiguous f32 slices: fused, with their backward passes.
//!
//! Work is cut by row or by sequence, never by the number of threads, so results have the same bits however many
//! threads run. Loops are written for the compiler to vectorise and are dispatched to the widest instructions that
//! the machine has.
//!
//! Dims: `N` tokens, `D` width, `B` sequences, `S` tokens of a sequence, `H`/`K` query/key heads, `Dh` head width.

use rayon::prelude::*;

use crate::vector::{exp, vectorised};

/// Tokens of one task of the element-wise kernels.
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
            sums[lane] += x[lane] * y[lane];
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
    let mut y = vec![0.0; x.len()];
    y.par_chunks_mut(d * TASK_TOKENS)
        .zip(x.par_chunks(d * TASK_TOKENS))
        .for_each(|(y, x)| {
            vectorised(
                #[inline(always)]
                || {
                    for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                        let scale = inverse_root(x, epsilon);
                        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                            *y = x * scale * w;
                        }
                    }
                },
            );
        });
    y
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
    let mut dx = vec![0.0; x.len()];
    let block = d * TASK_TOKENS;
    let parts: Vec<Vec<f32>> = dx
        .par_chunks_mut(block)
        .zip(x.par_chunks(block))
        .zip(gradient.par_chunks(block))
        .map(|((dx, x), gradient)| {
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
                            dx[i] = h[i] * s - x[i] * pull;
                        }
                    }
                },
            );
            dw
        })
        .collect();
    let mut dw = vec![0.0; d];
    for part in parts {
        add_scaled(&mut dw, 1.0, &part);
    }
    (dx, dw)
}

/// silu(gate) · up, silu(x) = x / (1 + e^−x); all `[N, I]`.
pub(super) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    const BLOCK: usize = 8192;
    let mut y = vec![0.0; gate.len()];
    y.par_chunks_mut(BLOCK)
        .zip(gate.par_chunks(BLOCK))
        .zip(up.par_chunks(BLOCK))
        .for_each(|((y, gate), up)| {
            vectorised(
                #[inline(always)]
                || {
                    for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                        *y = g * sigmoid(*g) * u;
                    }
                },
            );
        });
    y
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Gradients of [`swiglu`] for `gate` and `up`.
pub(super) fn swiglu_backward(gate: &[f32], up: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    const BLOCK: usize = 8192;
    let (mut d_gate, mut d_up) = (vec![0.0; gate.len()], vec![0.0; gate.len()]);
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
                        d_up[i] = gradient[i] * silu;
                        d_gate[i] = gradient[i] * up[i] * (s + silu * (1.0 - s));
                    }
                },
            );
        });
    (d_gate, d_up)
}

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences, `B`.
    pub sequences: usize,
    /// Tokens of a sequence, `S`.
    pub tokens: usize,
    /// Query heads, `H`.
    pub query_heads: usize,
    /// Key/value heads, `K`; a divisor of `H`.
    pub key_heads: usize,
    /// Width of a head, `Dh`, even.
    pub head_dim: usize,
}

/// Rotary tables: cosines and signed sines of each position, `[S, Dh]`.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

/// One sequence's keys and values of one head, turned and laid out for vector loops over positions.
struct KeyValues {
    /// `[Dh, S]`
    keys: Vec<f32>,
    /// `[Dh, S]`
    values: Vec<f32>,
}

/// Scratch rows of one task.
struct Scratch {
    /// `[Dh]`: the turned, scaled query.
    query: Vec<f32>,
    /// `[S]`
    weights: Vec<f32>,
    /// `[S]`
    slopes: Vec<f32>,
}

impl AttentionShape {
    fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    fn key_width(&self) -> usize {
        self.key_heads * self.head_dim
    }

    fn scratch(&self) -> Scratch {
        Scratch {
            query: vec![0.0; self.head_dim],
            weights: vec![0.0; self.tokens],
            slopes: vec![0.0; self.tokens],
        }
    }

    /// Keys and values of one sequence (`[S, K·Dh]`) for head `head`.
    #[inline(always)]
    fn key_values(
        &self,
        keys: &[f32],
        values: &[f32],
        head: usize,
        tables: Tables<'_>,
    ) -> KeyValues {
        let (s, dim, width) = (self.tokens, self.head_dim, self.key_width());
        let mut out = KeyValues {
            keys: vec![0.0; dim * s],
            values: vec![0.0; dim * s],
        };
        let mut turned = vec![0.0; dim];
        for t in 0..s {
            let at = t * width + head * dim;
            turn(&keys[at..at + dim], t, tables, 1.0, &mut turned);
            for d in 0..dim {
                out.keys[d * s + t] = turned[d];
                out.values[d * s + t] = values[at + d];
            }
        }
        out
    }

    /// Softmax weights of position `t` over positions 0..=t into `scratch.weights`.
    #[inline(always)]
    fn weights(&self, scratch: &mut Scratch, kv: &KeyValues, t: usize) {
        let s = self.tokens;
        let weights = &mut scratch.weights[..=t];
        weights.fill(0.0);
        for (d, q) in scratch.query.iter().enumerate() {
            add_scaled(weights, *q, &kv.keys[d * s..d * s + t + 1]);
        }
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for w in weights.iter_mut() {
            *w = exp(*w - largest);
        }
        let mut sums = [0.0f32; 16];
        let blocks = weights.chunks_exact(16);
        let tail: f32 = blocks.remainder().iter().sum();
        for block in blocks {
            for lane in 0..16 {
                sums[lane] += block[lane];
            }
        }
        let inverse = 1.0 / (sums.iter().sum::<f32>() + tail);
        for w in weights.iter_mut() {
            *w *= inverse;
        }
    }
}

/// Turns a head's vector `x` at position `t` and scales it: y_d = (x_d cos_d + x_{d±Dh/2} sin_d) · scale.
#[inline(always)]
fn turn(x: &[f32], t: usize, tables: Tables<'_>, scale: f32, y: &mut [f32]) {
    let dim = x.len();
    let half = dim / 2;
    let (cos, sin) = (&tables.cos[t * dim..][..dim], &tables.sin[t * dim..][..dim]);
    for d in 0..half {
        y[d] = (x[d] * cos[d] + x[d + half] * sin[d]) * scale;
        y[d + half] = (x[d + half] * cos[d + half] + x[d] * sin[d + half]) * scale;
    }
}

/// Transpose of [`turn`]: the gradient of x from that of y.
#[inline(always)]
fn turn_back(gradient: &[f32], t: usize, tables: Tables<'_>, scale: f32, x: &mut [f32]) {
    let dim = gradient.len();
    let half = dim / 2;
    let (cos, sin) = (&tables.cos[t * dim..][..dim], &tables.sin[t * dim..][..dim]);
    for d in 0..half {
        x[d] = (gradient[d] * cos[d] + gradient[d + half] * sin[d + half]) * scale;
        x[d + half] = (gradient[d + half] * cos[d + half] + gradient[d] * sin[d]) * scale;
    }
}

/// Causal attention with rotary positions: softmax(R q (R k)ᵀ / √Dh) v for every query head.
///
/// `queries`: `[B·S, H·Dh]`; `keys`, `values`: `[B·S, K·Dh]`; result: `[B·S, H·Dh]`. Scores are never stored: a row of
/// them exists at a time.
pub(super) fn attention(
    shape: AttentionShape,
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    tables: Tables<'_>,
) -> Vec<f32> {
    let (s, dim) = (shape.tokens, shape.head_dim);
    let (qw, kw) = (shape.query_width(), shape.key_width());
    let scale = (dim as f32).powf(-0.5);
    let group = shape.query_heads / shape.key_heads;
    let mut output = vec![0.0; queries.len()];
    output
        .par_chunks_mut((s * qw).max(1))
        .enumerate()
        .for_each(|(b, output)| {
            let (queries, keys, values) = (
                &queries[b * s * qw..][..s * qw],
                &keys[b * s * kw..][..s * kw],
                &values[b * s * kw..][..s * kw],
            );
            vectorised(
                #[inline(always)]
                || {
                    let mut scratch = shape.scratch();
                    for head in 0..shape.key_heads {
                        let kv = shape.key_values(keys, values, head, tables);
                        for query_head in head * group..(head + 1) * group {
                            for t in 0..s {
                                let at = t * qw + query_head * dim;
                                turn(&queries[at..at + dim], t, tables, scale, &mut scratch.query);
                                shape.weights(&mut scratch, &kv, t);
                                for d in 0..dim {
                                    output[at + d] = dot(
                                        &scratch.weights[..=t],
                                        &kv.values[d * s..d * s + t + 1],
                                    );
                                }
                            }
                        }
                    }
                },
            );
        });
    output
}

/// Gradients of [`attention`] for queries, keys and values.
pub(super) fn attention_backward(
    shape: AttentionShape,
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    tables: Tables<'_>,
    gradient: &[f32],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (s, dim) = (shape.tokens, shape.head_dim);
    let (qw, kw) = (shape.query_width(), shape.key_width());
    let scale = (dim as f32).powf(-0.5);
    let group = shape.query_heads / shape.key_heads;
    let (mut dq, mut dk, mut dv) = (
        vec![0.0; queries.len()],
        vec![0.0; keys.len()],
        vec![0.0; values.len()],
    );
    dq.par_chunks_mut((s * qw).max(1))
        .zip(dk.par_chunks_mut((s * kw).max(1)))
        .zip(dv.par_chunks_mut((s * kw).max(1)))
        .enumerate()
        .for_each(|(b, ((dq, dk), dv))| {
            let (queries, gradient) = (
                &queries[b * s * qw..][..s * qw],
                &gradient[b * s * qw..][..s * qw],
            );
            let (keys, values) = (
                &keys[b * s * kw..][..s * kw],
                &values[b * s * kw..][..s * kw],
            );
            vectorised(
                #[inline(always)]
                || {
                    let mut scratch = shape.scratch();
                    let mut d_query = vec![0.0; dim];
                    let mut column = vec![0.0; dim];
                    for head in 0..shape.key_heads {
                        let kv = shape.key_values(keys, values, head, tables);
                        let (mut d_keys, mut d_values) = (vec![0.0; dim * s], vec![0.0; dim * s]); // [Dh, S]
                        for query_head in head * group..(head + 1) * group {
                            for t in 0..s {
                                let at = t * qw + query_head * dim;
                                let g = &gradient[at..at + dim];
                                turn(&queries[at..at + dim], t, tables, scale, &mut scratch.query);
                                shape.weights(&mut scratch, &kv, t);
                                let (weights, slopes) =
                                    (&scratch.weights[..=t], &mut scratch.slopes[..=t]);
                                slopes.fill(0.0);
                                for d in 0..dim {
                                    add_scaled(slopes, g[d], &kv.values[d * s..d * s + t + 1]);
                                    add_scaled(&mut d_values[d * s..d * s + t + 1], g[d], weights);
                                }
                                let mean = dot(weights, slopes);
                                for (slope, w) in slopes.iter_mut().zip(weights) {
                                    *slope = w * (*slope - mean);
                                }
                                for d in 0..dim {
                                    d_query[d] = dot(slopes, &kv.keys[d * s..d * s + t + 1]);
                                    add_scaled(
                                        &mut d_keys[d * s..d * s + t + 1],
                                        scratch.query[d],
                                        slopes,
                                    );
                                }
                                turn_back(&d_query, t, tables, scale, &mut dq[at..at + dim]);
                            }
                        }
                        for t in 0..s {
                            let at = t * kw + head * dim;
                            for d in 0..dim {
                                column[d] = d_keys[d * s + t];
                                dv[at + d] = d_values[d * s + t];
                            }
                            turn_back(&column, t, tables, 1.0, &mut dk[at..at + dim]);
                        }
                    }
                },
            );
        });
    (dq, dk, dv)
}
