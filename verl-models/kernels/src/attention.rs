//! Causal attention with rotary positions on the CPU, forward and backward, in tiles of sixteen queries.
//!
//! The lanes of a register are queries, so maxima, sums and normalisation run over the keys and lanes never mix. A tile
//! processes the keys from the first to its own last one; keys after a query's own have a weight of exactly 0. So the
//! bits of a row depend neither on the rows beside it nor on where tiles begin. Only the scores of one tile exist at a
//! time.
//!
//! Dims: `N` rows, in [segments](Segment) or as `B` sequences of `S` tokens; `H`/`K` query/key heads, `Dh` head width,
//! `J` keys that a tile processes.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::Heads;
use crate::lanes::{Kernel, Lanes, Row, run};
use crate::prefixes::{Segment, equal};
use crate::vector::{LANES, exp};

/// Dims of a head that are processed together; a head is padded with zeros.
const DIMS: usize = 8;
/// Keys that share the loads of a tile in [`products`].
const KEYS: usize = 4;
/// Keys whose sums are in registers at once in [`spread`]: enough to hide the latency of additions.
const STEP: usize = 8;

/// Scores this far below the largest one have no weight: e^−64 is 10⁻²⁸ of a sum. Smaller weights would create numbers
/// below 10⁻³⁸ in products with gradients, which some processors compute a hundred times more slowly than others.
const NEGLIGIBLE: f32 = -64.0;

/// Eight neighbouring dims of a token.
type Dims = [f32; DIMS];

/// Sizes of an attention call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences, `B`.
    pub sequences: usize,
    /// Tokens of a sequence, `S`.
    pub tokens: usize,
    /// Heads, of an even width.
    pub heads: Heads,
    /// The rows, if they are not `B` sequences of `S` tokens; only on the CPU.
    pub segments: Option<Arc<[Segment]>>,
}

impl AttentionShape {
    fn scale(&self) -> f32 {
        1.0 / (self.heads.dim as f32).sqrt()
    }

    /// Position of head `head` of row `row` among rows of `width`.
    #[inline(always)]
    fn place(&self, row: usize, width: usize, head: usize) -> Range<usize> {
        let start = row * width + head * self.heads.dim;
        start..start + self.heads.dim
    }

    /// Results of `run` for each key head of each tree of segments, computed in parallel: tree after tree, head by
    /// head.
    fn each<T: Send>(
        &self,
        run: impl Fn(&[Segment], usize) -> T + Send + Sync,
    ) -> (Vec<usize>, Vec<T>) {
        let segments = match &self.segments {
            Some(segments) => segments.clone(),
            None => equal(self.sequences, self.tokens),
        };
        let trees: Vec<&[Segment]> = segments.chunk_by(|_, next| next.position > 0).collect();
        let tasks: Vec<(&[Segment], usize)> = trees
            .iter()
            .flat_map(|tree| (0..self.heads.key_value).map(|head| (*tree, head)))
            .collect();
        let parts = tasks.into_par_iter().map(|(tree, head)| run(tree, head));
        (
            trees.iter().map(|tree| rows(tree).len()).collect(),
            parts.collect(),
        )
    }

    /// Joins the columns, `width` of each key head, that [`AttentionShape::each`] returned.
    fn joined(&self, trees: &[usize], parts: &[Vec<f32>], width: usize) -> Vec<f32> {
        let whole = self.heads.key_value * width;
        let mut joined = vec![0.0; trees.iter().sum::<usize>() * whole];
        let mut rest = joined.as_mut_slice();
        let mut tasks = Vec::with_capacity(trees.len());
        for (&rows, parts) in trees.iter().zip(parts.chunks(self.heads.key_value)) {
            let (own, others) = rest.split_at_mut(rows * whole);
            tasks.push((own, parts));
            rest = others;
        }
        tasks.into_par_iter().for_each(|(to, parts)| {
            for (head, part) in parts.iter().enumerate() {
                for (to, from) in to.chunks_exact_mut(whole).zip(part.chunks_exact(width)) {
                    to[head * width..][..width].copy_from_slice(from);
                }
            }
        });
        joined
    }
}

/// The rows of a tree.
fn rows(tree: &[Segment]) -> Range<usize> {
    let end = tree.last().map_or(0, |last| last.first + last.tokens);
    tree.first().map_or(0, |first| first.first)..end
}

/// Number of keys that a tile processes whose first query is at position `first`, in whole steps of [`STEP`].
#[inline(always)]
fn keys_of_tile(first: usize) -> usize {
    (first + LANES).next_multiple_of(STEP)
}

/// Number of positions of a tree, including those after it that a tile may read.
fn depth(tree: &[Segment]) -> usize {
    tree.iter().map(Segment::end).max().map_or(0, keys_of_tile)
}

/// Rotary tables: cosines and signed sines of each position, `[S, Dh]`.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl<'a> Tables<'a> {
    /// Cosines and sines of position `t`, in halves.
    #[inline(always)]
    fn at(&self, t: usize, dim: usize) -> [(&'a [f32], &'a [f32]); 2] {
        [self.cos, self.sin].map(|table| table[t * dim..][..dim].split_at(dim / 2))
    }
}

/// Queries, keys and values of a call, with the tables.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// `[N, H·Dh]`
    pub queries: &'a [f32],
    /// `[N, K·Dh]`
    pub keys: &'a [f32],
    /// `[N, K·Dh]`
    pub values: &'a [f32],
    pub tables: Tables<'a>,
}

/// softmax(R q (R k)ᵀ / √Dh) v for every query head; result: `[N, H·Dh]`.
pub(super) fn attention(shape: &AttentionShape, inputs: Inputs<'_>) -> Vec<f32> {
    let width = shape.heads.group() * shape.heads.dim;
    let (trees, parts) = shape.each(|tree, head| {
        let mut output = vec![0.0; rows(tree).len() * width];
        run(Forward {
            shape,
            inputs,
            tree,
            head,
            output: &mut output,
        });
        output
    });
    shape.joined(&trees, &parts, width)
}

/// Gradients of [`attention`] for queries, keys and values, from its output and the output's gradient.
pub(super) fn attention_backward(
    shape: &AttentionShape,
    inputs: Inputs<'_>,
    output: &[f32],
    gradient: &[f32],
) -> [Vec<f32>; 3] {
    let (dim, width) = (shape.heads.dim, shape.heads.group() * shape.heads.dim);
    let (trees, parts) = shape.each(|tree, head| {
        let rows = rows(tree).len();
        let [mut dq, mut dk, mut dv] = [width, dim, dim].map(|width| vec![0.0; rows * width]);
        run(Backward {
            shape,
            inputs,
            tree,
            head,
            output,
            gradient,
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        });
        (dq, dk, dv)
    });
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for part in parts {
        dq.push(part.0);
        dk.push(part.1);
        dv.push(part.2);
    }
    [(dq, width), (dk, dim), (dv, dim)].map(|(parts, width)| shape.joined(&trees, &parts, width))
}

/// [`attention`] of one key head of one tree.
struct Forward<'a> {
    shape: &'a AttentionShape,
    inputs: Inputs<'a>,
    tree: &'a [Segment],
    head: usize,
    /// `[rows of the tree, group · Dh]`
    output: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Forward {
            shape,
            inputs,
            tree,
            head,
            output,
        } = self;
        let (dim, group) = (shape.heads.dim, shape.heads.group());
        let (base, depth) = (rows(tree).start, depth(tree));
        let (mut keys, mut values) = (Head::new(depth, dim), Head::new(depth, dim));
        let mut queries = Head::new(LANES, dim);
        let mut tile = vec![[0.0; LANES]; queries.blocks * DIMS];
        let mut weights = vec![[0.0; LANES]; depth];
        for segment in tree {
            fill(shape, &inputs, head, segment, &mut keys, &mut values);
            for member in 0..group {
                for first in (0..segment.tokens).step_by(LANES) {
                    let own = LANES.min(segment.tokens - first);
                    let (row, position) = (segment.first + first, segment.position + first);
                    for lane in 0..own {
                        let place = shape.place(
                            row + lane,
                            shape.heads.query_width(),
                            head * group + member,
                        );
                        let to = &mut queries.row(lane)[..dim];
                        rotate(
                            &inputs.queries[place],
                            position + lane,
                            inputs.tables,
                            shape.scale(),
                            to,
                        );
                    }
                    let seen = keys_of_tile(position);
                    let weights = &mut weights[..seen];
                    transpose(&queries.rows, &mut tile);
                    products::<L>(keys.first(seen), &tile, weights);
                    let inverse = exponentiate(weights, position);
                    mix::<L>(values.first(seen), weights, &mut tile);
                    for lane in 0..own {
                        let place = shape.place(row + lane - base, group * dim, member);
                        for (to, d) in output[place].iter_mut().zip(&tile) {
                            *to = d[lane] * inverse[lane];
                        }
                    }
                }
            }
        }
    }
}

/// [`attention_backward`] of one key head of one tree.
///
/// With p the softmax, o its output and g the gradient of o: s = p ⊙ (g vᵀ − g·o), dq = s k, dk = sᵀ q, dv = pᵀ g.
///
/// Keys and values of a segment, and their gradients, follow those of the segment that it continues. Its own queries
/// come after all segments that continue it; by then its gradients are complete, and the data after it is unused.
struct Backward<'a> {
    shape: &'a AttentionShape,
    inputs: Inputs<'a>,
    tree: &'a [Segment],
    head: usize,
    /// `[N, H·Dh]`
    output: &'a [f32],
    /// `[N, H·Dh]`
    gradient: &'a [f32],
    /// `[rows of the tree, group · Dh]`
    dq: &'a mut [f32],
    /// `[rows of the tree, Dh]`
    dk: &'a mut [f32],
    /// `[rows of the tree, Dh]`
    dv: &'a mut [f32],
}

/// A step of [`Backward`]'s walk through a tree.
#[derive(Clone, Copy)]
enum Visit {
    /// The segment begins; the segments that continue it follow.
    Enter(Segment),
    /// All segments that continue it are done.
    Leave(Segment),
}

/// The walk through a tree, depth first.
fn walk(tree: &[Segment]) -> Vec<Visit> {
    let mut visits = Vec::with_capacity(2 * tree.len());
    let mut open: Vec<Segment> = Vec::new();
    for &segment in tree {
        while let Some(done) = open.pop_if(|open| open.position >= segment.position) {
            visits.push(Visit::Leave(done));
        }
        visits.push(Visit::Enter(segment));
        open.push(segment);
    }
    visits.extend(open.into_iter().rev().map(Visit::Leave));
    visits
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Backward {
            shape,
            inputs,
            tree,
            head,
            output,
            gradient,
            dq,
            dk,
            dv,
        } = self;
        let (dim, group, width) = (
            shape.heads.dim,
            shape.heads.group(),
            shape.heads.query_width(),
        );
        let (base, depth) = (rows(tree).start, depth(tree));
        let [mut keys, mut values, mut d_keys, mut d_values] =
            [(); 4].map(|()| Head::new(depth, dim));
        let [mut queries, mut gradients, mut outputs] = [(); 3].map(|()| Head::new(LANES, dim));
        let [mut tile, mut output_tile] =
            [(); 2].map(|()| vec![[0.0; LANES]; queries.blocks * DIMS]);
        let [mut weights, mut slopes] = [(); 2].map(|()| vec![[0.0; LANES]; depth]);
        let mut turned = vec![0.0; dim];
        for visit in walk(tree) {
            let segment = match visit {
                Visit::Enter(segment) => {
                    fill(shape, &inputs, head, &segment, &mut keys, &mut values);
                    for of in [&mut d_keys, &mut d_values] {
                        of.rows_mut(segment.position..segment.end())
                            .fill([0.0; DIMS]);
                    }
                    continue;
                }
                Visit::Leave(segment) => segment,
            };
            for of in [&mut keys, &mut values] {
                of.rows_mut(segment.end()..keys_of_tile(segment.end()))
                    .fill([0.0; DIMS]);
            }
            for member in 0..group {
                for first in (0..segment.tokens).step_by(LANES) {
                    let own = LANES.min(segment.tokens - first);
                    let (row, position) = (segment.first + first, segment.position + first);
                    for lane in 0..own {
                        let place = shape.place(row + lane, width, head * group + member);
                        let to = &mut queries.row(lane)[..dim];
                        let query = &inputs.queries[place.clone()];
                        rotate(query, position + lane, inputs.tables, shape.scale(), to);
                        copy(&gradient[place.clone()], gradients.row(lane));
                        copy(&output[place], outputs.row(lane));
                    }
                    let seen = keys_of_tile(position);
                    let (weights, slopes) = (&mut weights[..seen], &mut slopes[..seen]);
                    transpose(&queries.rows, &mut tile);
                    products::<L>(keys.first(seen), &tile, weights);
                    let inverse = exponentiate(weights, position);
                    transpose(&gradients.rows, &mut tile);
                    transpose(&outputs.rows, &mut output_tile);
                    let means = dots::<L>(&output_tile, &tile);
                    differentiate::<L>(
                        values.first(seen),
                        &tile,
                        &inverse,
                        &means,
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
                        let to = &mut dq[shape.place(row + lane - base, group * dim, member)];
                        rotate_back(&turned, position + lane, inputs.tables, shape.scale(), to);
                    }
                }
            }
            for token in 0..segment.tokens {
                let position = segment.position + token;
                let place = shape.place(segment.first + token - base, dim, 0);
                let d_key = &d_keys.row(position)[..dim];
                rotate_back(d_key, position, inputs.tables, 1.0, &mut dk[place.clone()]);
                copy(&d_values.row(position)[..dim], &mut dv[place]);
            }
        }
    }
}

/// One head of some tokens, `[tokens, blocks, DIMS]`, zero-padded in both; tokens are padded to whole tiles.
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
    fn rows_mut(&mut self, tokens: Range<usize>) -> &mut [Dims] {
        &mut self.rows[tokens.start * self.blocks..tokens.end * self.blocks]
    }

    #[inline(always)]
    fn first(&self, tokens: usize) -> &[Dims] {
        &self.rows[..tokens * self.blocks]
    }
}

/// Fills in rotated keys, and values, of the head and segment at its positions, and zeros where a tile may read past
/// it.
#[inline(always)]
fn fill(
    shape: &AttentionShape,
    inputs: &Inputs<'_>,
    head: usize,
    segment: &Segment,
    keys: &mut Head,
    values: &mut Head,
) {
    for token in 0..segment.tokens {
        let position = segment.position + token;
        let place = shape.place(segment.first + token, shape.heads.key_width(), head);
        let row = &mut keys.row(position)[..shape.heads.dim];
        rotate(
            &inputs.keys[place.clone()],
            position,
            inputs.tables,
            1.0,
            row,
        );
        copy(&inputs.values[place], values.row(position));
    }
    for of in [keys, values] {
        of.rows_mut(segment.end()..keys_of_tile(segment.end()))
            .fill([0.0; DIMS]);
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
fn rotate_half(y: &mut [f32], [a, b]: [&[f32]; 2], [cos, sin]: [&[f32]; 2], scale: f32) {
    let n = y.len();
    let (a, b, cos, sin) = (&a[..n], &b[..n], &cos[..n], &sin[..n]);
    for (i, y) in y.iter_mut().enumerate() {
        *y = (a[i] * cos[i] + b[i] * sin[i]) * scale;
    }
}

/// Rotates a head's vector `x` at position `t` and scales it: y_d = (x_d cos_d + x_{d±Dh/2} sin_d) · scale.
#[inline(always)]
fn rotate(x: &[f32], t: usize, tables: Tables<'_>, scale: f32, y: &mut [f32]) {
    let [cos, sin] = tables.at(t, x.len());
    let x = x.split_at(x.len() / 2);
    let y = y.split_at_mut(y.len() / 2);
    rotate_half(y.0, [x.0, x.1], [cos.0, sin.0], scale);
    rotate_half(y.1, [x.1, x.0], [cos.1, sin.1], scale);
}

/// Transpose of [`rotate`]: the gradient of x from that of y.
#[inline(always)]
fn rotate_back(y: &[f32], t: usize, tables: Tables<'_>, scale: f32, x: &mut [f32]) {
    let [cos, sin] = tables.at(t, y.len());
    let y = y.split_at(y.len() / 2);
    let x = x.split_at_mut(x.len() / 2);
    rotate_half(x.0, [y.0, y.1], [cos.0, sin.1], scale);
    rotate_half(x.1, [y.1, y.0], [cos.1, sin.0], scale);
}

/// Transposes the tokens of a tile: `[LANES, Dh]` to `[Dh, LANES]`.
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

/// Σ_d a[d] b[d] of each query, in the order of [`products`], so that a query that attends to one key has a slope of
/// zero.
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

/// Turns scores into e^(score − largest) over the positions up to each query's own, 0 after it; returns 1/Σ of each
/// query. The tile's queries are at `first` and after it.
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
            row[lane] = if below < NEGLIGIBLE { 0.0 } else { weight };
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
    inverse: &Row,
    means: &Row,
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
    let blocks = tile.blocks;
    let rows = to.rows.chunks_exact_mut(STEP * blocks);
    for (rows, weights) in rows.zip(weights.as_chunks::<STEP>().0) {
        for b in 0..blocks {
            let mut sums = [[0.0; DIMS]; STEP];
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
