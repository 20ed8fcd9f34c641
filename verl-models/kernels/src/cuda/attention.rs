//! Launches of `rope.cu` and `attention_train.cu`.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Slice};
use cubecl::server::Handle;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, cast, dense, empty, integers, short_element};
use crate::AttentionShape;

static ROPE: Source = Source::new(include_str!("rope.cu"));
static ATTENTION: Source = Source::new(include_str!("attention_train.cu"));

/// Queries or keys of a block, and its threads.
const ROWS: usize = 64;
const THREADS: u32 = 128;
/// Threads of a block of `rope.cu`.
const ROPE_THREADS: u32 = 256;
/// Threads that share the heads of a token in `rope.cu`.
const SHARE: usize = 4;
/// Widest head.
const MAX_WIDTH: usize = 256;
/// Multiprocessors of a Hopper GPU.
const PROCESSORS: f64 = 132.0;

/// Whether the kernels support heads of this width.
pub(crate) fn supports(head_dim: usize) -> bool {
    head_dim.is_multiple_of(2) && head_dim <= MAX_WIDTH
}

/// A call's sizes, dtype, and the positions of its tokens: sequences follow one another.
pub(crate) struct Call {
    /// `tokens` is the length of the longest sequence.
    shape: AttentionShape,
    tokens: usize,
    /// Sum of the squares of the lengths.
    pairs: usize,
    dtype: DType,
    /// First token of each sequence, and the end.
    starts: Handle,
    /// Position of each token.
    positions: Handle,
}

impl Call {
    fn new(shape: AttentionShape, like: &CubeTensor) -> Self {
        let lengths = vec![shape.tokens; shape.sequences];
        Call::packed(shape, &lengths, like)
    }

    /// For sequences of these lengths, whose starts and positions are on the device.
    pub fn placed(
        shape: AttentionShape,
        lengths: &[usize],
        [starts, positions]: [&CubeTensor; 2],
        dtype: DType,
    ) -> Self {
        Call {
            shape,
            tokens: lengths.iter().sum(),
            pairs: pairs(lengths),
            dtype,
            starts: starts.handle.clone(),
            positions: positions.handle.clone(),
        }
    }

    /// For sequences of these lengths.
    pub fn packed(shape: AttentionShape, lengths: &[usize], like: &CubeTensor) -> Self {
        let mut starts = vec![0];
        let mut positions = Vec::new();
        for &length in lengths {
            positions.extend(0..length as i32);
            starts.push(positions.len() as i32);
        }
        Call {
            shape,
            tokens: positions.len(),
            pairs: pairs(lengths),
            dtype: like.dtype(),
            starts: integers(like, &starts),
            positions: integers(like, &positions),
        }
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    /// Rotated queries and keys, and values, of a joined projection.
    pub fn split(&self, joined: &CubeTensor, [cos, sin]: [&CubeTensor; 2]) -> [CubeTensor; 3] {
        let (tokens, width, key_width) = (
            self.tokens(),
            self.shape.heads.query_width(),
            self.shape.heads.key_width(),
        );
        let queries = empty(joined, [tokens, width], self.dtype);
        let keys = empty(joined, [tokens, key_width], self.dtype);
        let values = empty(joined, [tokens, key_width], self.dtype);
        // SAFETY: the projection and the new tensors have a row for each token of the call, and a token's position
        // is below the number of rows of the tables.
        unsafe {
            self.kernel(&ROPE, "rope_split", ROPE_THREADS).launch(
                &joined.client,
                self.rope_grid(),
                &[
                    &joined.handle,
                    &self.positions,
                    &cos.handle,
                    &sin.handle,
                    &queries.handle,
                    &keys.handle,
                    &values.handle,
                ],
                vec![tokens as u64, 1],
            );
        }
        [queries, keys, values]
    }

    /// Mixed heads, and the logarithm of the sum of each softmax.
    pub fn attend(&self, [queries, keys, values]: [&CubeTensor; 3]) -> (CubeTensor, CubeTensor) {
        let output = empty(
            queries,
            [self.tokens(), self.shape.heads.query_width()],
            self.dtype,
        );
        let log_sums = empty(queries, [self.shape.heads.query, self.tokens()], DType::F32);
        // SAFETY: the operands are those of `split`, and the new tensors have as many rows; `starts` ends with the
        // number of tokens, and the grid covers the longest sequence.
        unsafe {
            self.kernel(&ATTENTION, "attention_forward", THREADS)
                .launch(
                    &queries.client,
                    self.grid(self.shape.heads.query),
                    &[
                        &queries.handle,
                        &keys.handle,
                        &values.handle,
                        &self.starts,
                        &output.handle,
                        &log_sums.handle,
                    ],
                    self.scalars(1),
                );
        }
        (output, log_sums)
    }

    fn kernel(&self, source: &'static Source, entry: &'static str, threads: u32) -> CudaKernel {
        CudaKernel::new(source, entry, threads)
            .define("ELEMENT", short_element(self.dtype))
            .define("HEAD_DIM", self.shape.heads.dim)
            .define("QUERY_HEADS", self.shape.heads.query)
            .define("KEY_HEADS", self.shape.heads.key_value)
    }

    /// Blocks of a kernel of `rope.cu`.
    fn rope_grid(&self) -> [u32; 3] {
        let half = self.shape.heads.dim / 2;
        let wide = if self.dtype == DType::F32 { 4 } else { 8 };
        let vector = if half.is_multiple_of(wide) { wide } else { 1 };
        let threads = self.tokens() * SHARE * half / vector;
        [threads.div_ceil(ROPE_THREADS as usize).max(1) as u32, 1, 1]
    }

    fn grid(&self, heads: usize) -> [u32; 3] {
        let blocks = self.shape.tokens.div_ceil(ROWS);
        [heads, self.shape.sequences, blocks].map(|size| size as u32)
    }

    fn scalars(&self, splits: usize) -> Vec<u64> {
        let scale = 1.0 / (self.shape.heads.dim as f64).sqrt();
        vec![scale.to_bits(), self.tokens() as u64, 0, splits as u64]
    }

    /// Parts into which a group's query heads are divided: the fewest for which the longest block does about a
    /// multiprocessor's share.
    fn splits(&self) -> usize {
        let AttentionShape { tokens, heads, .. } = self.shape;
        let group = heads.group();
        let pairs = (heads.query * self.pairs) as f64;
        let share = 1.2 * pairs / (256.0 * PROCESSORS);
        let small = |splits: &usize| (group.div_ceil(*splits) * tokens) as f64 <= share;
        (1..=group).find(small).unwrap_or(group)
    }

    /// Attention of joined queries, keys and values, and what its backward pass needs.
    pub fn forward(
        &self,
        joined: &CubeTensor,
        tables: [CubeTensor; 2],
    ) -> (CubeTensor, Vec<CubeTensor>) {
        let [cos, sin] = tables.map(|table| dense(cast(table, DType::F32)));
        let [queries, keys, values] = self.split(joined, [&cos, &sin]);
        let (output, log_sums) = self.attend([&queries, &keys, &values]);
        let saved = vec![queries, keys, values, cos, sin, output.clone(), log_sums];
        (output, saved)
    }

    /// The gradient for joined queries, keys and values before rotation.
    pub fn backward(&self, saved: &[CubeTensor], gradient: CubeTensor) -> CubeTensor {
        let [queries, keys, values, cos, sin, output, log_sums] = saved else {
            unreachable!("the forward pass saves seven tensors");
        };
        let gradient = dense(cast(gradient, self.dtype));
        let (tokens, width, key_width) = (
            self.tokens(),
            self.shape.heads.query_width(),
            self.shape.heads.key_width(),
        );
        let client = &queries.client;
        let d_queries = empty(queries, [tokens, width], self.dtype);
        let delta = empty(queries, [self.shape.heads.query, tokens], DType::F32);
        // SAFETY: the saved tensors are those of `split` and `attend`, the gradient has the shape of their output,
        // and the new tensors have as many rows; the grid is that of `attend`.
        unsafe {
            self.kernel(&ATTENTION, "attention_backward_q", THREADS)
                .launch(
                    client,
                    self.grid(self.shape.heads.query),
                    &[
                        &queries.handle,
                        &keys.handle,
                        &values.handle,
                        &self.starts,
                        &output.handle,
                        &gradient.handle,
                        &log_sums.handle,
                        &d_queries.handle,
                        &delta.handle,
                    ],
                    self.scalars(1),
                );
        }
        let splits = self.splits();
        let parts = || empty(queries, [splits, tokens, key_width], DType::F32);
        let (d_keys, d_values) = (parts(), parts());
        // SAFETY: as above; the parts of the gradients have `splits` matrices, and so many blocks share a key head.
        unsafe {
            self.kernel(&ATTENTION, "attention_backward_kv", THREADS)
                .launch(
                    client,
                    self.grid(self.shape.heads.key_value * splits),
                    &[
                        &queries.handle,
                        &keys.handle,
                        &values.handle,
                        &self.starts,
                        &gradient.handle,
                        &log_sums.handle,
                        &delta.handle,
                        &d_keys.handle,
                        &d_values.handle,
                    ],
                    self.scalars(splits),
                );
        }
        let joined = empty(queries, [tokens, width + 2 * key_width], self.dtype);
        // SAFETY: as in `split`; the parts are those written before.
        unsafe {
            self.kernel(&ROPE, "rope_backward", ROPE_THREADS).launch(
                client,
                self.rope_grid(),
                &[
                    &d_queries.handle,
                    &d_keys.handle,
                    &d_values.handle,
                    &self.positions,
                    &cos.handle,
                    &sin.handle,
                    &joined.handle,
                ],
                vec![tokens as u64, splits as u64],
            );
        }
        joined
    }
}

/// Sum of squares.
fn pairs(lengths: &[usize]) -> usize {
    lengths.iter().map(|length| length * length).sum()
}

/// Causal attention with rotary positions, and what its backward pass needs.
pub(crate) fn forward(
    shape: AttentionShape,
    [queries, keys, values, cos, sin]: [CubeTensor; 5],
) -> (CubeTensor, Vec<CubeTensor>) {
    let call = Call::new(shape, &queries);
    let joined = dense(Cube::float_cat(vec![queries, keys, values], 1));
    call.forward(&joined, [cos, sin])
}

/// Gradients for queries, keys and values before rotation.
pub(crate) fn backward(
    shape: AttentionShape,
    saved: &[CubeTensor],
    gradient: CubeTensor,
) -> [CubeTensor; 3] {
    let call = Call::new(shape, &saved[0]);
    let heads = call.shape.heads;
    let (width, key_width) = (heads.query_width(), heads.key_width());
    let joined = call.backward(saved, gradient);
    [
        0..width,
        width..width + key_width,
        width + key_width..width + 2 * key_width,
    ]
    .map(|columns| {
        let slices = [Slice::full(), Slice::from(columns)];
        dense(Cube::float_slice(joined.clone(), &slices))
    })
}
