//! Causal attention with rotary positions on the CPU, forward and backward, in tiles of sixteen queries.
//!
//! The lanes of a register are queries, so that maxima, sums and normalisation run down the keys and lanes never mix.
//! A tile meets the keys from the first to its own last one; what that is does not depend on the rows beside it or on
//! how far they are padded, and neither do the bits of a row. Scores of one tile exist at a time.
//!
//! Dims: `B` sequences, `S` tokens of a sequence, `H`/`K` query/key heads, `Dh` head width, `J` keys that a tile meets.

use rayon::prelude::*;

use crate::lanes::{Kernel, Lanes, Row, run};
use crate::vector::{LANES, exp};

/// Dims of a head that are worked on side by side; a head is filled up with zeros.
const DIMS: usize = 8;
/// Keys that share the loads of a tile in [`products`].
const KEYS: usize = 4;

/// Scores this far below the largest one weigh nothing: e^−64 is 10⁻²⁸ of what a sum has. Smaller weights would make
/// numbers below 10⁻³⁸ of products with gradients, which some processors compute a hundred times slower than others.
const NOTHING: f32 = -64.0;

/// Eight neighbouring dims of a token.
type Dims = [f32; DIMS];

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

impl AttentionShape {
    fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    fn key_width(&self) -> usize {
        self.key_heads * self.head_dim
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Query heads that share key head `head`.
    fn sharing(&self, head: usize) -> std::ops::Range<usize> {
        let group = self.query_heads / self.key_heads;
        head * group..(head + 1) * group
    }

    /// Where head `head` of token `t` lies among rows of `width`.
    #[inline(always)]
    fn place(&self, t: usize, width: usize, head: usize) -> std::ops::Range<usize> {
        let start = t * width + head * self.head_dim;
        start..start + self.head_dim
    }

    /// Sequence `b` of a column with rows of `width`.
    fn sequence<'a>(&self, column: &'a [f32], width: usize, b: usize) -> &'a [f32] {
        &column[b * self.tokens * width..][..self.tokens * width]
    }
}

/// Rotary tables: cosines and signed sines of each position, `[S, Dh]`.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl<'a> Tables<'a> {
    /// Cosines and sines of position `t`, each in halves.
    #[inline(always)]
    fn at(&self, t: usize, dim: usize) -> [(&'a [f32], &'a [f32]); 2] {
        [self.cos, self.sin].map(|table| table[t * dim..][..dim].split_at(dim / 2))
    }
}

/// Queries, keys and values of a call, with the tables.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// `[B·S, H·Dh]`
    pub queries: &'a [f32],
    /// `[B·S, K·Dh]`
    pub keys: &'a [f32],
    /// `[B·S, K·Dh]`
    pub values: &'a [f32],
    pub tables: Tables<'a>,
}

impl<'a> Inputs<'a> {
    fn sequence(&self, shape: AttentionShape, b: usize) -> Inputs<'a> {
        Inputs {
            queries: shape.sequence(self.queries, shape.query_width(), b),
            keys: shape.sequence(self.keys, shape.key_width(), b),
            values: shape.sequence(self.values, shape.key_width(), b),
            tables: self.tables,
        }
    }
}

/// softmax(R q (R k)ᵀ / √Dh) v for every query head; result: `[B·S, H·Dh]`.
pub(super) fn attention(shape: AttentionShape, inputs: Inputs<'_>) -> Vec<f32> {
    let mut output = vec![0.0; inputs.queries.len()];
    output
        .par_chunks_mut((shape.tokens * shape.query_width()).max(1))
        .enumerate()
        .for_each(|(b, output)| {
            run(Forward {
                shape,
                inputs: inputs.sequence(shape, b),
                output,
            });
        });
    output
}

/// Gradients of [`attention`] for queries, keys and values, from its output and the output's gradient.
pub(super) fn attention_backward(
    shape: AttentionShape,
    inputs: Inputs<'_>,
    output: &[f32],
    gradient: &[f32],
) -> [Vec<f32>; 3] {
    let [mut dq, mut dk, mut dv] =
        [inputs.queries, inputs.keys, inputs.values].map(|x| vec![0.0; x.len()]);
    let query_block = (shape.tokens * shape.query_width()).max(1);
    let key_block = (shape.tokens * shape.key_width()).max(1);
    dq.par_chunks_mut(query_block)
        .zip(dk.par_chunks_mut(key_block))
        .zip(dv.par_chunks_mut(key_block))
        .enumerate()
        .for_each(|(b, ((dq, dk), dv))| {
            run(Backward {
                shape,
                inputs: inputs.sequence(shape, b),
                output: shape.sequence(output, shape.query_width(), b),
                gradient: shape.sequence(gradient, shape.query_width(), b),
                dq,
                dk,
                dv,
            });
        });
    [dq, dk, dv]
}

/// [`attention`] of one sequence.
struct Forward<'a> {
    shape: AttentionShape,
    inputs: Inputs<'a>,
    output: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Forward {
            shape,
            inputs,
            output,
        } = self;
        let (s, dim, width) = (shape.tokens, shape.head_dim, shape.query_width());
        let (mut keys, mut values) = (Head::new(s, dim), Head::new(s, dim));
        let mut queries = Head::new(LANES, dim);
        let mut tile = vec![[0.0; LANES]; queries.blocks * DIMS];
        let mut weights = vec![[0.0; LANES]; s.next_multiple_of(LANES)];
        for head in 0..shape.key_heads {
            fill(&shape, &inputs, head, &mut keys, &mut values);
            for query_head in shape.sharing(head) {
                for first in (0..s).step_by(LANES) {
                    let own = LANES.min(s - first);
                    for lane in 0..own {
                        let query = &inputs.queries[shape.place(first + lane, width, query_head)];
                        let row = &mut queries.row(lane)[..dim];
                        turn(query, first + lane, inputs.tables, shape.scale(), row);
                    }
                    let seen = first + LANES;
                    let weights = &mut weights[..seen];
                    transpose(&queries.rows, &mut tile);
                    products::<L>(keys.first(seen), &tile, weights);
                    let inverse = exponentiate(weights, first);
                    mix::<L>(values.first(seen), weights, &mut tile);
                    for lane in 0..own {
                        let row = &mut output[shape.place(first + lane, width, query_head)];
                        for (to, d) in row.iter_mut().zip(&tile) {
                            *to = d[lane] * inverse[lane];
                        }
                    }
                }
            }
        }
    }
}

/// [`attention_backward`] of one sequence.
///
/// With p the softmax, o its output and g the gradient of o: s = p ⊙ (g vᵀ − g·o), dq = s k, dk = sᵀ q, dv = pᵀ g.
struct Backward<'a> {
    shape: AttentionShape,
    inputs: Inputs<'a>,
    output: &'a [f32],
    gradient: &'a [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Backward {
            shape,
            inputs,
            output,
            gradient,
            dq,
            dk,
            dv,
        } = self;
        let (s, dim, width) = (shape.tokens, shape.head_dim, shape.query_width());
        let [mut keys, mut values, mut d_keys, mut d_values] = [(); 4].map(|()| Head::new(s, dim));
        let [mut queries, mut gradients, mut outputs] = [(); 3].map(|()| Head::new(LANES, dim));
        let [mut tile, mut output_tile] =
            [(); 2].map(|()| vec![[0.0; LANES]; queries.blocks * DIMS]);
        let [mut weights, mut slopes] =
            [(); 2].map(|()| vec![[0.0; LANES]; s.next_multiple_of(LANES)]);
        let mut turned = vec![0.0; dim];
        for head in 0..shape.key_heads {
            fill(&shape, &inputs, head, &mut keys, &mut values);
            d_keys.rows.fill([0.0; DIMS]);
            d_values.rows.fill([0.0; DIMS]);
            for query_head in shape.sharing(head) {
                for first in (0..s).step_by(LANES) {
                    let own = LANES.min(s - first);
                    for lane in 0..own {
                        let place = shape.place(first + lane, width, query_head);
                        let row = &mut queries.row(lane)[..dim];
                        let query = &inputs.queries[place.clone()];
                        turn(query, first + lane, inputs.tables, shape.scale(), row);
                        copy(&gradient[place.clone()], gradients.row(lane));
                        copy(&output[place], outputs.row(lane));
                    }
                    let seen = first + LANES;
                    let (weights, slopes) = (&mut weights[..seen], &mut slopes[..seen]);
                    transpose(&queries.rows, &mut tile);
                    products::<L>(keys.first(seen), &tile, weights);
                    let inverse = exponentiate(weights, first);
                    transpose(&gradients.rows, &mut tile);
                    transpose(&outputs.rows, &mut output_tile);
                    let means = dots::<L>(&output_tile, &tile);
                    differentiate::<L>(
                        values.first(seen),
                        &tile,
                        (&inverse, &means),
                        weights,
                        slopes,
                    );
                    spread(weights, &gradients, own, &mut d_values);
                    spread(slopes, &queries, own, &mut d_keys);
                    mix::<L>(keys.first(seen), slopes, &mut tile);
                    for lane in 0..own {
                        for (to, d) in turned.iter_mut().zip(&tile) {
                            *to = d[lane];
                        }
                        let row = &mut dq[shape.place(first + lane, width, query_head)];
                        turn_back(&turned, first + lane, inputs.tables, shape.scale(), row);
                    }
                }
            }
            for t in 0..s {
                let place = shape.place(t, shape.key_width(), head);
                let row = &mut dk[place.clone()];
                turn_back(&d_keys.row(t)[..dim], t, inputs.tables, 1.0, row);
                copy(&d_values.row(t)[..dim], &mut dv[place]);
            }
        }
    }
}

/// One head of some tokens, `[tokens, blocks, DIMS]`; both are filled up with zeros, tokens to whole tiles.
struct Head {
    rows: Vec<Dims>,
    blocks: usize,
}

impl Head {
    #[inline(always)]
    fn new(tokens: usize, dim: usize) -> Head {
        let blocks = dim.div_ceil(DIMS);
        Head {
            rows: vec![[0.0; DIMS]; tokens.next_multiple_of(LANES) * blocks],
            blocks,
        }
    }

    #[inline(always)]
    fn row(&mut self, token: usize) -> &mut [f32] {
        self.rows[token * self.blocks..(token + 1) * self.blocks].as_flattened_mut()
    }

    #[inline(always)]
    fn first(&self, tokens: usize) -> &[Dims] {
        &self.rows[..tokens * self.blocks]
    }
}

/// Turned keys, and values, of head `head`.
#[inline(always)]
fn fill(
    shape: &AttentionShape,
    inputs: &Inputs<'_>,
    head: usize,
    keys: &mut Head,
    values: &mut Head,
) {
    for t in 0..shape.tokens {
        let place = shape.place(t, shape.key_width(), head);
        let row = &mut keys.row(t)[..shape.head_dim];
        turn(&inputs.keys[place.clone()], t, inputs.tables, 1.0, row);
        copy(&inputs.values[place], values.row(t));
    }
}

#[inline(always)]
fn copy(from: &[f32], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
}

/// y = (a·cos + b·sin)·scale of a half of a head.
#[inline(always)]
fn turn_half(y: &mut [f32], (a, cos): (&[f32], &[f32]), (b, sin): (&[f32], &[f32]), scale: f32) {
    let n = y.len();
    let (a, b, cos, sin) = (&a[..n], &b[..n], &cos[..n], &sin[..n]);
    for (i, y) in y.iter_mut().enumerate() {
        *y = (a[i] * cos[i] + b[i] * sin[i]) * scale;
    }
}

/// Turns a head's vector `x` at position `t` and scales it: y_d = (x_d cos_d + x_{d±Dh/2} sin_d) · scale.
#[inline(always)]
fn turn(x: &[f32], t: usize, tables: Tables<'_>, scale: f32, y: &mut [f32]) {
    let [cos, sin] = tables.at(t, x.len());
    let x = x.split_at(x.len() / 2);
    let y = y.split_at_mut(y.len() / 2);
    turn_half(y.0, (x.0, cos.0), (x.1, sin.0), scale);
    turn_half(y.1, (x.1, cos.1), (x.0, sin.1), scale);
}

/// Transpose of [`turn`]: the gradient of x from that of y.
#[inline(always)]
fn turn_back(y: &[f32], t: usize, tables: Tables<'_>, scale: f32, x: &mut [f32]) {
    let [cos, sin] = tables.at(t, y.len());
    let y = y.split_at(y.len() / 2);
    let x = x.split_at_mut(x.len() / 2);
    turn_half(x.0, (y.0, cos.0), (y.1, sin.1), scale);
    turn_half(x.1, (y.1, cos.1), (y.0, sin.0), scale);
}

/// The tokens of a tile side by side: `[LANES, Dh]` to `[Dh, LANES]`.
#[inline(always)]
fn transpose(rows: &[Dims], tile: &mut [Row]) {
    let blocks = tile.len() / DIMS;
    for lane in 0..LANES {
        for b in 0..blocks {
            for d in 0..DIMS {
                tile[b * DIMS + d][lane] = rows[lane * blocks + b][d];
            }
        }
    }
}

/// Σ_d rows[j, d] tile[d] for [`KEYS`] neighbouring j.
#[inline(always)]
fn products_of_keys<L: Lanes>(rows: &[Dims], tile: &[Row]) -> [L; KEYS] {
    let blocks = tile.len() / DIMS;
    let mut sums = [L::splat(0.0); KEYS];
    for (b, tile) in tile.as_chunks::<DIMS>().0.iter().enumerate() {
        for d in 0..DIMS {
            let of_queries = L::load(&tile[d]);
            for (k, sum) in sums.iter_mut().enumerate() {
                *sum = L::splat(rows[k * blocks + b][d]).mul_add(of_queries, *sum);
            }
        }
    }
    sums
}

/// out[j] = Σ_d rows[j, d] tile[d]; `rows`: `[J, Dh]`, `tile`: `[Dh, LANES]`, `out`: `[J, LANES]`.
#[inline(always)]
fn products<L: Lanes>(rows: &[Dims], tile: &[Row], out: &mut [Row]) {
    let blocks = tile.len() / DIMS;
    let out = out.as_chunks_mut::<KEYS>().0;
    for (rows, out) in rows.chunks_exact(KEYS * blocks).zip(out) {
        let sums = products_of_keys::<L>(rows, tile);
        for (sum, out) in sums.into_iter().zip(out) {
            sum.store(out);
        }
    }
}

/// Σ_d a[d] b[d] of each query, in the order of [`products`], so that a query that sees one key has a slope of zero.
#[inline(always)]
fn dots<L: Lanes>(a: &[Row], b: &[Row]) -> Row {
    let mut sum = L::splat(0.0);
    for (a, b) in a.iter().zip(b) {
        sum = L::load(a).mul_add(L::load(b), sum);
    }
    let mut out = [0.0; LANES];
    sum.store(&mut out);
    out
}

/// Scores into e^(score − largest) over the positions up to each query's own, 0 after it; returns 1/Σ of each query.
/// The tile's queries stand at `first` and after it.
#[inline(always)]
fn exponentiate(scores: &mut [Row], first: usize) -> Row {
    for (key, row) in scores[first..].iter_mut().enumerate() {
        for (query, score) in row.iter_mut().enumerate() {
            *score = if key > query {
                f32::NEG_INFINITY
            } else {
                *score
            };
        }
    }
    let mut largest = [f32::NEG_INFINITY; LANES];
    for row in scores.iter() {
        for lane in 0..LANES {
            largest[lane] = if row[lane] > largest[lane] {
                row[lane]
            } else {
                largest[lane]
            };
        }
    }
    let mut sums = [0.0_f32; LANES];
    for row in scores.iter_mut() {
        for lane in 0..LANES {
            let below = row[lane] - largest[lane];
            let weight = exp(below);
            row[lane] = if below < NOTHING { 0.0 } else { weight };
            sums[lane] += row[lane];
        }
    }
    sums.map(|sum| 1.0 / sum)
}

/// tile[d] = Σ_j weights[j] rows[j, d]
#[inline(always)]
fn mix<L: Lanes>(rows: &[Dims], weights: &[Row], tile: &mut [Row]) {
    let blocks = tile.len() / DIMS;
    let tiles = tile.as_chunks_mut::<DIMS>().0;
    for (b, tile) in tiles.iter_mut().enumerate() {
        let mut sums = [L::splat(0.0); DIMS];
        for (row, weights) in rows.chunks_exact(blocks).zip(weights) {
            let weights = L::load(weights);
            for (d, sum) in sums.iter_mut().enumerate() {
                *sum = L::splat(row[b][d]).mul_add(weights, *sum);
            }
        }
        for (sum, to) in sums.into_iter().zip(tile) {
            sum.store(to);
        }
    }
}

/// Normalises `weights` with 1/Σ, and slopes[j] = weights[j] (Σ_d rows[j, d] tile[d] − mean).
#[inline(always)]
fn differentiate<L: Lanes>(
    rows: &[Dims],
    tile: &[Row],
    (inverse, means): (&Row, &Row),
    weights: &mut [Row],
    slopes: &mut [Row],
) {
    let blocks = tile.len() / DIMS;
    let (inverse, means) = (L::load(inverse), L::load(means));
    let weights = weights.as_chunks_mut::<KEYS>().0;
    let slopes = slopes.as_chunks_mut::<KEYS>().0;
    for ((rows, weights), slopes) in rows.chunks_exact(KEYS * blocks).zip(weights).zip(slopes) {
        let sums = products_of_keys::<L>(rows, tile);
        for ((sum, weight), slope) in sums.into_iter().zip(weights).zip(slopes) {
            let normalised = L::load(weight).mul(inverse);
            normalised.store(weight);
            normalised.mul(sum.sub(means)).store(slope);
        }
    }
}

/// to[j] += Σ_lane weights[j, lane] tile[lane], over the first `own` lanes.
#[inline(always)]
fn spread(weights: &[Row], tile: &Head, own: usize, to: &mut Head) {
    /// Keys whose sums are in registers at once: enough to hide the latency of additions.
    const TOGETHER: usize = 8;
    let blocks = tile.blocks;
    let rows = to.rows.chunks_exact_mut(TOGETHER * blocks);
    for (rows, weights) in rows.zip(weights.as_chunks::<TOGETHER>().0) {
        for b in 0..blocks {
            let mut sums = [[0.0; DIMS]; TOGETHER];
            for (k, sum) in sums.iter_mut().enumerate() {
                *sum = rows[k * blocks + b];
            }
            for (lane, x) in tile.rows.chunks_exact(blocks).take(own).enumerate() {
                let x = x[b];
                for (k, sum) in sums.iter_mut().enumerate() {
                    let weight = weights[k][lane];
                    for d in 0..DIMS {
                        sum[d] = weight.mul_add(x[d], sum[d]);
                    }
                }
            }
            for (k, sum) in sums.into_iter().enumerate() {
                rows[k * blocks + b] = sum;
            }
        }
    }
}
