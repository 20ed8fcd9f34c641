//! Attention of one token over the keys and values of its sequence.

use super::kv_cache::{BLOCK, KvShape, KvTrack};
use crate::vector::{LANES, exp, sum_lanes, vectorised};

const _: () = assert!(BLOCK == LANES, "a block's scores fill the lanes");

/// A sequence while it is decoded: the part that it shares with the other samples of its prompt, and its own part.
///
/// A prompt's own keys and values are always in a separate track, shared or not, so that sums over them always have the
/// same order.
#[derive(Debug)]
pub struct Lane {
    /// The prompt, if it is complete.
    pub shared: Option<std::sync::Arc<KvTrack>>,
    /// Tokens after that.
    pub own: KvTrack,
}

impl Lane {
    /// Tokens before those of [`Lane::own`].
    pub fn shared_len(&self) -> usize {
        self.shared.as_ref().map_or(0, |track| track.len())
    }
}

/// softmax(q kᵀ / √Dh) v of one token's heads over the entire shared track and the first `own_len` tokens of its own.
///
/// # Shapes
/// `queries`, `out`: `[H·Dh]`
pub fn attend(
    lane: &Lane,
    own_len: usize,
    layer: usize,
    shape: KvShape,
    queries: &[f32],
    scores: &mut Vec<[f32; LANES]>,
    out: &mut [f32],
) {
    let group = queries.len() / (shape.heads * shape.dim);
    let tracks = [
        (lane.shared.as_deref(), lane.shared_len()),
        (Some(&lane.own), own_len),
    ];
    let heads = queries
        .chunks_exact(shape.dim)
        .zip(out.chunks_exact_mut(shape.dim));
    for (index, (query, out)) in heads.enumerate() {
        let head = index / group;
        scores.clear();
        vectorised(
            #[inline(always)]
            || {
                for (track, len) in tracks {
                    if let Some(track) = track {
                        push_scores(track, len, layer, head, query, scores);
                    }
                }
                let sum = weigh(scores, tracks.map(|(_, len)| len));
                let mut rest = scores.as_slice();
                let mut mixed = Mixed::new(out);
                for (track, len) in tracks {
                    let (weights, others) = rest.split_at(len.div_ceil(BLOCK));
                    if let Some(track) = track {
                        mixed.add(track, layer, head, shape, weights);
                    }
                    rest = others;
                }
                mixed.divide(sum);
            },
        );
    }
}

/// q·k / √Dh of the tokens of a track, a block at a time; −∞ in slots without a token.
#[inline(always)]
fn push_scores(
    track: &KvTrack,
    len: usize,
    layer: usize,
    head: usize,
    query: &[f32],
    scores: &mut Vec<[f32; LANES]>,
) {
    let scale = 1.0 / (query.len() as f32).sqrt();
    for block in 0..len.div_ceil(BLOCK) {
        let (keys, _) = track.block(layer, block, head);
        let mut sums = [0.0_f32; LANES];
        for (lanes, &q) in keys.as_chunks::<LANES>().0.iter().zip(query) {
            for lane in 0..LANES {
                sums[lane] = q.mul_add(lanes[lane], sums[lane]);
            }
        }
        for sum in &mut sums {
            *sum *= scale;
        }
        if let Some(outside) = sums.get_mut(len - block * BLOCK..) {
            outside.fill(f32::NEG_INFINITY);
        }
        scores.push(sums);
    }
}

/// Turns scores into e^(score − max), zero in slots without a token; returns their sum.
#[inline(always)]
fn weigh(scores: &mut [[f32; LANES]], lens: [usize; 2]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for lanes in scores.iter() {
        for lane in 0..LANES {
            largest[lane] = if lanes[lane] > largest[lane] {
                lanes[lane]
            } else {
                largest[lane]
            };
        }
    }
    let max = largest
        .iter()
        .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let mut sums = [0.0_f32; LANES];
    let mut rest = scores;
    for len in lens {
        let (blocks, others) = rest.split_at_mut(len.div_ceil(BLOCK));
        for (block, lanes) in blocks.iter_mut().enumerate() {
            for lane in lanes.iter_mut() {
                *lane = exp(*lane - max);
            }
            if let Some(outside) = lanes.get_mut(len - block * BLOCK..) {
                outside.fill(0.0);
            }
            for lane in 0..LANES {
                sums[lane] += lanes[lane];
            }
        }
        rest = others;
    }
    sum_lanes(sums)
}

/// The weighted sum of values of one head.
struct Mixed<'a> {
    out: &'a mut [f32],
}

impl<'a> Mixed<'a> {
    #[inline(always)]
    fn new(out: &'a mut [f32]) -> Self {
        out.fill(0.0);
        Mixed { out }
    }

    /// Adds Σ weight·value over the tokens of a track, in their order.
    #[inline(always)]
    fn add(
        &mut self,
        track: &KvTrack,
        layer: usize,
        head: usize,
        shape: KvShape,
        weights: &[[f32; LANES]],
    ) {
        let stride = shape.padded_dim();
        let mut first = 0;
        while first + 32 <= self.out.len() {
            self.add_columns::<32>(track, layer, head, stride, first, weights);
            first += 32;
        }
        while first < self.out.len() {
            self.add_columns::<8>(track, layer, head, stride, first, weights);
            first += 8;
        }
    }

    #[inline(always)]
    fn add_columns<const WIDTH: usize>(
        &mut self,
        track: &KvTrack,
        layer: usize,
        head: usize,
        stride: usize,
        first: usize,
        weights: &[[f32; LANES]],
    ) {
        let width = WIDTH.min(self.out.len() - first);
        let mut sums = [0.0_f32; WIDTH];
        sums[..width].copy_from_slice(&self.out[first..first + width]);
        for (block, weights) in weights.iter().enumerate() {
            let (_, values) = track.block(layer, block, head);
            for (values, &weight) in values.chunks_exact(stride).zip(weights) {
                let values = &values[first..first + WIDTH];
                for lane in 0..WIDTH {
                    sums[lane] = weight.mul_add(values[lane], sums[lane]);
                }
            }
        }
        self.out[first..first + width].copy_from_slice(&sums[..width]);
    }

    #[inline(always)]
    fn divide(self, sum: f32) {
        for out in self.out {
            *out /= sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn number(seed: usize) -> f32 {
        ((seed * 7919) % 199) as f32 / 100.0 - 1.0
    }

    /// Compares with plain sums in f64, over a prompt and a response that do not fill a block, for several head widths.
    #[test]
    fn attention_is_right() {
        for dim in [4, 8, 12, 64, 80] {
            let shape = KvShape {
                layers: 1,
                heads: 2,
                dim,
            };
            let (prompt, own) = (21, 5);
            let row = |token: usize, salt: usize| -> Vec<f32> {
                (0..2 * dim)
                    .map(|i| number(token * 131 + i * 17 + salt))
                    .collect()
            };
            let mut shared = KvTrack::new(shape);
            let mut tail = KvTrack::new(shape);
            for token in 0..prompt {
                shared.write(0, token, &row(token, 1), &row(token, 2));
            }
            shared.advance(prompt);
            for token in 0..own + 1 {
                tail.write(0, token, &row(prompt + token, 1), &row(prompt + token, 2));
            }
            let lane = Lane {
                shared: Some(Arc::new(shared)),
                own: tail,
            };
            let queries: Vec<f32> = (0..4 * dim).map(|i| 3.0 * number(i * 29 + 3)).collect();
            let mut out = vec![0.0; 4 * dim];
            attend(&lane, own, 0, shape, &queries, &mut Vec::new(), &mut out);
            for head in 0..4 {
                let at = head / 2 * dim;
                let query = &queries[head * dim..(head + 1) * dim];
                let weights: Vec<f64> = (0..prompt + own)
                    .map(|token| {
                        let keys = &row(token, 1)[at..at + dim];
                        let dot: f64 = query
                            .iter()
                            .zip(keys)
                            .map(|(&q, &k)| f64::from(q) * f64::from(k))
                            .sum();
                        (dot / (dim as f64).sqrt()).exp()
                    })
                    .collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let want: f64 = weights
                        .iter()
                        .enumerate()
                        .map(|(token, w)| w / sum * f64::from(row(token, 2)[at + d]))
                        .sum();
                    let got = f64::from(out[head * dim + d]);
                    assert!(
                        (got - want).abs() < 1e-5,
                        "{got} differs from {want} (width {dim})"
                    );
                }
            }
        }
    }
}
