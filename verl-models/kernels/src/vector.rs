//! Loops over slices, compiled for the widest instructions of the processor.
//!
//! Every sum has a fixed order that does not depend on the number of rows or on threads, so that a row always has the
//! same bits. Products are fused with their additions ([`f32::mul_add`]) on every processor, so that the bits are the
//! same on any processor, too.

use crate::registers::{self, Registers};

/// Numbers that one sum runs over at a time.
pub const LANES: usize = 16;

/// Runs `op` compiled for the widest instructions of this processor. Only inlined code benefits: closures passed to it
/// and the functions that they call are marked `inline(always)`.
#[inline]
pub(crate) fn vectorised<R>(op: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    #[expect(
        unsafe_code,
        reason = "`used` returns what was detected on this processor"
    )]
    match registers::used() {
        Registers::Avx512 => return unsafe { with_avx512(op) },
        Registers::Avx2 => return unsafe { with_avx2(op) },
        Registers::Plain => {}
    }
    op()
}

/// Rows whose sums with one panel of [`LANES`] outputs fit into registers and hide the latency of additions: eight
/// with 32 registers of 16 numbers, four with 16 registers of 8.
#[inline]
pub(crate) fn tile_rows() -> usize {
    match registers::used() {
        Registers::Avx512 => 8,
        Registers::Avx2 | Registers::Plain => 4,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn with_avx512<R>(op: impl FnOnce() -> R) -> R {
    op()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<R>(op: impl FnOnce() -> R) -> R {
    op()
}

/// Prefetches the memory `ahead` rows after `row` into the cache; any address is valid.
#[inline(always)]
pub(crate) fn fetch(row: &[f32; LANES], ahead: usize) {
    let address = std::ptr::from_ref(row).wrapping_add(ahead);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(unsafe_code, reason = "nothing is read, and no address faults")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// eˣ within two units in the last place for −87 ≤ x ≤ 88; beyond, the value at the nearer bound.
///
/// x = n·ln 2 + r with |r| ≤ ½ ln 2; e^r by the polynomial of Cephes' `expf`; times 2ⁿ through the exponent's bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5·2²³: adding it leaves a rounded integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-n).mul_add(LN2_HIGH, x);
    let r = (-n).mul_add(LN2_LOW, r);
    let p = 1.987_569_1e-4_f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    y * f32::from_bits(exponent << 23)
}

/// Sum of lanes, pairwise.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// The largest number; `None` if one is NaN.
pub fn largest(x: &[f32]) -> Option<f32> {
    vectorised(
        #[inline(always)]
        || {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let mut nans = [false; LANES];
            let (chunks, rest) = x.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    nans[lane] |= chunk[lane].is_nan();
                    lanes[lane] = if chunk[lane] > lanes[lane] {
                        chunk[lane]
                    } else {
                        lanes[lane]
                    };
                }
            }
            let any_nan = nans.contains(&true) || rest.iter().any(|x| x.is_nan());
            let all = lanes.iter().chain(rest);
            let largest = all.fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            (!any_nan).then_some(largest)
        },
    )
}

/// Writes e^((x − max)·scale) of each number, at least e⁻⁸⁷, to `out`; returns their sum.
pub fn exponentials(x: &[f32], max: f32, scale: f32, out: &mut Vec<f32>) -> f64 {
    /// Numbers that are summed in f32.
    const PIECE: usize = 64 * LANES;
    out.clear();
    out.resize(x.len(), 0.0);
    vectorised(
        #[inline(always)]
        || {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = exp((x - max) * scale);
            }
            let mut sum = 0.0;
            for piece in out.chunks(PIECE) {
                let mut lanes = [0.0_f32; LANES];
                let (chunks, rest) = piece.as_chunks::<LANES>();
                for chunk in chunks {
                    for lane in 0..LANES {
                        lanes[lane] += chunk[lane];
                    }
                }
                sum += f64::from(sum_lanes(lanes)) + f64::from(rest.iter().sum::<f32>());
            }
            sum
        },
    )
}

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(value, *lane);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = value.mul_add(value, *lane);
    }
    sum_lanes(lanes)
}

#[inline(always)]
fn rms_norm_row(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let root = (sum_of_squares(x) / x.len() as f32 + epsilon).sqrt();
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x / root * weight;
    }
}

/// w · x / sqrt(mean(x²) + ε) of each row of `x`.
///
/// # Shapes
/// `x`, `out`: `[N, D]`; `weight`: `[D]`
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let width = weight.len();
    vectorised(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                rms_norm_row(x, weight, epsilon, out);
            }
        },
    );
}

/// [`rms_norm`] in place; used on the heads of a row.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], epsilon: f32) {
    vectorised(
        #[inline(always)]
        || {
            for head in x.chunks_exact_mut(weight.len()) {
                let root = (sum_of_squares(head) / head.len() as f32 + epsilon).sqrt();
                for (x, &weight) in head.iter_mut().zip(weight) {
                    *x = *x / root * weight;
                }
            }
        },
    );
}

/// silu(gate) ⊙ up of each row, with silu(g) = g / (1 + e^(−g)).
///
/// # Shapes
/// `gate_up`: `[N, 2·I]`, gates first; `out`: `[N, I]`
pub fn gated(gate_up: &[f32], width: usize, out: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            for (row, out) in gate_up
                .chunks_exact(2 * width)
                .zip(out.chunks_exact_mut(width))
            {
                let (gate, up) = row.split_at(width);
                for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                    *out = gate / (1.0 + exp(-gate)) * up;
                }
            }
        },
    );
}

/// Rotates the pairs (xᵢ, xᵢ₊ₕ) of each head by the angles with the given cosines and sines.
///
/// # Shapes
/// `x`: consecutive heads of width 2h; `cos`, `sin`: `[h]`
pub fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    vectorised(
        #[inline(always)]
        || {
            for head in x.chunks_exact_mut(2 * half) {
                let (low, high) = head.split_at_mut(half);
                for i in 0..half {
                    let (a, b) = (low[i], high[i]);
                    low[i] = a * cos[i] - b * sin[i];
                    high[i] = b * cos[i] + a * sin[i];
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_library() {
        for step in -8700..8800 {
            let x = step as f32 * 0.01;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.5e-7, "e^{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
        assert!(exp(1000.0).is_finite());
    }

    #[test]
    fn softmax_sums_over_full_and_partial_lanes() {
        for len in [1, 15, 16, 1024, 2500] {
            let x: Vec<f32> = (0..len)
                .map(|i| ((i * 37) % 101) as f32 / 25.0 - 4.0)
                .collect();
            let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(largest(&x), Some(max));
            let mut out = Vec::new();
            let sum = exponentials(&x, max, 0.5, &mut out);
            let want: f64 = x.iter().map(|&x| (f64::from(x - max) * 0.5).exp()).sum();
            assert!((sum / want - 1.0).abs() < 1e-6, "{sum} differs from {want}");
            for nan in [0, len / 2, len - 1] {
                let mut broken = x.clone();
                broken[nan] = f32::NAN;
                assert_eq!(largest(&broken), None);
            }
        }
        assert_eq!(largest(&[]), Some(f32::NEG_INFINITY));
    }

    #[test]
    fn norm_divides_by_the_root_mean_square() {
        let mut out = [0.0; 4];
        // mean(1, 49) = 25, mean(0, 0) = 0; ε = 0.5 under the root.
        rms_norm(&[1.0, 7.0, 0.0, 0.0], &[1.0, 2.0], 0.5, &mut out);
        let root = 25.5_f32.sqrt();
        assert_eq!(out, [1.0 / root, 7.0 / root * 2.0, 0.0, 0.0]);
    }

    #[test]
    fn gate_is_the_activated_half() {
        let mut out = [0.0];
        gated(&[2.0, 3.0], 1, &mut out);
        assert!((out[0] - 6.0 / (1.0 + (-2.0_f32).exp())).abs() < 1e-6);
    }

    #[test]
    fn pairs_are_rotated() {
        let mut x = [1.0, 0.0, 0.0, 2.0];
        let (cos, sin) = ([0.0, 1.0], [1.0, 0.0]);
        rotate(&mut x, &cos, &sin);
        // (1, 0) rotated by a right angle is (0, 1); (0, 2) stays.
        assert_eq!(x, [0.0, 0.0, 1.0, 2.0]);
    }
}
