//! Decoding on the device: it computes one token of every row through all layers, draws it and does the bookkeeping,
//! without allocations, so that a step can be captured into a graph and replayed.
//!
//! All data that varies is in buffers: tokens, positions, states, random streams. A row that is not live costs little
//! and changes nothing. Keys and values are stored in blocks of 64 tokens; a row takes as many as its prompt and its
//! longest response need. Results of burn's own operations may have padded rows, and are made dense.
//!
//! For up to 128 rows of a small decoder in bf16 on Hopper, one kernel computes all layers of a step
//! (`decode/layers.rs`); otherwise each layer has its own kernels (`decode/step.rs`).
//!
//! Dims: `R` rows, `D` width, `H`/`K` query/key heads, `Dh` head width, `I` width inside the MLP, `V` vocabulary.

mod book;
mod drawing;
mod layers;
mod prefill;
mod step;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor};
use cubecl::client::Graph;
use cubecl::server::Handle;

use super::product::{Joined, supports_projection};
use super::tensor::{CubeTensor, empty, integers, leading, primitive};
use crate::Heads;
use crate::pool::{BLOCK, Pool, blocks_of};

use self::book::Book;
use self::layers::LayersKernel;

pub use self::book::{Response, RowStates, Start, state};
pub use self::drawing::Drawing;

/// The sizes of a decoder, and the ε of its norms.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Width of the residual stream.
    pub width: usize,
    /// Width inside the MLP.
    pub inner: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Heads of the attention.
    pub heads: Heads,
    /// ε of every norm.
    pub epsilon: f64,
}

/// The weights of a decoder in the order of a step. Matrices are `[out, in]`.
pub struct Weights {
    /// `[V, D]`.
    pub embedding: Tensor<2>,
    /// Layers, lowest first.
    pub layers: Vec<LayerWeights>,
    /// Norm after the last layer.
    pub norm: Tensor<1>,
    /// `[V, D]`; `None` if it is the embedding.
    pub head: Option<Tensor<2>>,
    /// Cosines and signed sines of the positions from 0, in f32 and at least as many as [`Sizes::positions`].
    pub rotation: [Tensor<2>; 2],
}

/// The weights of a layer.
pub struct LayerWeights {
    /// Norm before attention.
    pub input_norm: Tensor<1>,
    /// Projections of queries, keys and values.
    pub projections: [Tensor<2>; 3],
    /// Their biases, one after another.
    pub bias: Option<Tensor<1>>,
    /// Norms of query and of key heads.
    pub head_norms: Option<[Tensor<1>; 2]>,
    /// Projection of the attention's result.
    pub output: Tensor<2>,
    /// Norm before the MLP.
    pub mlp_norm: Tensor<1>,
    /// Gate of the MLP.
    pub gate: Tensor<2>,
    /// What the gate scales.
    pub up: Tensor<2>,
    /// Projection back to the residual stream.
    pub down: Tensor<2>,
}

/// Sizes of the buffers.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Rows of a step.
    pub rows: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
    /// Tokens of the longest response.
    pub new_tokens: usize,
    /// Blocks of the cache for all rows together.
    pub blocks: usize,
}

impl Sizes {
    /// Positions that rows may have: complete blocks.
    pub fn positions(&self) -> usize {
        blocks_of(self.tokens) * BLOCK
    }
}

/// Weights of a layer: all that are multiplied with the same vector form one product.
struct Layer {
    input_norm: CubeTensor,
    /// Queries, keys and values, `[(H + 2K) Dh, D]`.
    qkv: Joined,
    bias: Option<CubeTensor>,
    head_norms: Option<[CubeTensor; 2]>,
    output: Joined,
    mlp_norm: CubeTensor,
    /// Gates, then ups: `[2I, D]`.
    gate_up: Joined,
    down: Joined,
    /// Blocks of keys and of values.
    cache: [CubeTensor; 2],
}

/// Buffers of a step.
struct Buffers {
    x: CubeTensor,
    /// The norm of `x`.
    normed: CubeTensor,
    scale: CubeTensor,
    qkv: CubeTensor,
    mixed: CubeTensor,
    /// `[R, 2I]`, only in f32.
    wide: Option<CubeTensor>,
    inner: CubeTensor,
    logits: CubeTensor,
    /// Parts of the race for a token.
    partial: Handle,
    /// For each row, the number of parts that have ended; zeros between steps.
    ended: Handle,
    /// For each row, the ids on its shortlist with their words, and their number; zeros between steps.
    shortlist: Handle,
    shortlisted: Handle,
}

/// A decoder with a cache, a step and its bookkeeping on the device.
pub struct DeviceDecoder {
    shape: Shape,
    dtype: DType,
    sizes: Sizes,
    /// Rows of a step, at most those of the buffers.
    rows: usize,
    /// Columns of the table of blocks.
    blocks: usize,
    pool: Pool,
    layers: Vec<Layer>,
    embedding: CubeTensor,
    last_norm: CubeTensor,
    head: Joined,
    cos: CubeTensor,
    sin: CubeTensor,
    buffers: Buffers,
    book: Book,
    drawing: Drawing,
    stop_width: usize,
    step: Recorded,
    /// The kernel that computes all layers of a step, if the decoder has it; it has the addresses of `layers`.
    /// Declared, and thus dropped, after `step`, whose drop waits for the device.
    layers_kernel: Option<LayersKernel>,
}

/// How a step is launched.
enum Recorded {
    /// Not recorded yet for this number of rows.
    Pending,
    Graph(Graph),
    /// Kernel by kernel, on a device that does not support recording.
    Unsupported,
}

impl Layer {
    /// Bias of the projections, norms of queries and of keys; `any` replaces those that the model does not have.
    fn optional<'a>(&'a self, any: &'a CubeTensor) -> [&'a CubeTensor; 3] {
        let norms = self.head_norms.as_ref().map(<[CubeTensor; 2]>::each_ref);
        let [q_norm, k_norm] = norms.unwrap_or([any, any]);
        [self.bias.as_ref().unwrap_or(any), q_norm, k_norm]
    }
}

/// Whether a step supports heads of this width: part of a warp prepares a head, up to four adjacent elements of each
/// half per lane.
fn supports_head_dim(head_dim: usize) -> bool {
    let half = head_dim / 2;
    let together = [4, 2].into_iter().find(|width| half.is_multiple_of(*width));
    half / together.unwrap_or(1) <= 32
}

/// Whether the kernels support a decoder with this embedding and no biases other than those of queries, keys and values.
pub fn supports(shape: &Shape, embedding: Tensor<2>) -> bool {
    let heads = shape.heads;
    let widths = [
        shape.width,
        heads.query_width(),
        heads.key_width(),
        shape.inner,
        shape.vocab,
    ];
    super::attention::supports(heads.dim)
        && supports_head_dim(heads.dim)
        && supports_projection(&primitive(embedding), &widths)
}

/// Size in bytes of the memory of the device on which a tensor is, if the device reports it.
pub fn memory(tensor: Tensor<2>) -> Option<u64> {
    primitive(tensor).client.properties().memory.max_memory()
}

impl DeviceDecoder {
    /// A decoder without live rows.
    pub fn new(shape: Shape, weights: Weights, sizes: Sizes, drawing: Drawing) -> Self {
        let embedding = primitive(weights.embedding);
        let dtype = embedding.dtype();
        let blocks = blocks_of(sizes.tokens);
        let [cos, sin] = weights.rotation.map(primitive);
        let positions = cos.shape()[0].min(sin.shape()[0]);
        assert!(
            positions >= sizes.positions(),
            "rotations for {positions} positions are too few"
        );
        let cache = || {
            let heads = shape.heads;
            let cached = [sizes.blocks, heads.key_value, BLOCK, heads.dim];
            empty(&embedding, cached, dtype)
        };
        let layers = weights.layers.into_iter().map(|layer| Layer {
            input_norm: primitive(layer.input_norm),
            qkv: Joined::stacked(layer.projections.map(primitive).into()),
            bias: layer.bias.map(primitive),
            head_norms: layer.head_norms.map(|norms| norms.map(primitive)),
            output: Joined::one(primitive(layer.output)),
            mlp_norm: primitive(layer.mlp_norm),
            gate_up: Joined::halves(primitive(layer.gate), primitive(layer.up)),
            down: Joined::one(primitive(layer.down)),
            cache: [cache(), cache()],
        });
        let layers = layers.collect();
        let head = weights.head.map_or_else(|| embedding.clone(), primitive);
        let mut new = DeviceDecoder {
            layers,
            layers_kernel: None,
            last_norm: primitive(weights.norm),
            head: Joined::one(head),
            cos,
            sin,
            buffers: Buffers::new(&shape, sizes, &embedding),
            book: Book::new(sizes, blocks, &drawing, &embedding),
            stop_width: drawing.stops.iter().map(Vec::len).max().unwrap_or(1).max(1),
            drawing,
            step: Recorded::Pending,
            embedding,
            shape,
            dtype,
            rows: sizes.rows,
            pool: Pool::new(sizes.rows, sizes.blocks),
            sizes,
            blocks,
        };
        new.layers_kernel = LayersKernel::of(&new);
        new
    }

    /// Computes one token for every live row. The first step with a given number of rows is launched kernel by kernel,
    /// which compiles new kernels, and is then recorded.
    ///
    /// # Errors
    /// The device's error.
    pub fn step(&mut self) -> Result<(), String> {
        if let Recorded::Graph(graph) = &self.step {
            return replay(graph).map_err(|error| error.to_string());
        }
        let client = self.embedding.client.clone();
        let records = matches!(self.step, Recorded::Pending) && client.graph_prepare().is_ok();
        self.launch_step();
        self.step = Recorded::Unsupported;
        if records && client.start_capture().is_ok() {
            self.launch_step();
            // cubecl no longer reads anything that a failed recording would have written, so decoding cannot continue.
            let refused = |error| format!("a step cannot be recorded: {error}");
            self.step = Recorded::Graph(client.stop_capture().map_err(refused)?);
        }
        Ok(())
    }

    /// Continues with `rows` rows; the first are those of `kept`, in this order, and the others are inactive.
    ///
    /// # Errors
    /// The device's error.
    pub fn shrink(&mut self, rows: usize, kept: &[usize]) -> Result<(), String> {
        // The recording keeps memory that the next one may use.
        self.step = Recorded::Pending;
        self.pool.keep(kept);
        self.keep(kept)?;
        self.rows = rows;
        self.buffers.use_leading_rows(rows);
        Ok(())
    }

    /// Takes blocks for a row whose sequence has at most `tokens` tokens; false if too few are free.
    pub fn reserve(&mut self, row: usize, tokens: usize) -> bool {
        self.pool.take(row, blocks_of(tokens))
    }

    fn epsilon(&self) -> f64 {
        self.shape.epsilon
    }
}

#[expect(
    unsafe_code,
    reason = "a replay reads and writes the captured buffers: they live as long as the graph, in one struct, \
              and all work goes through one client on one thread"
)]
fn replay(graph: &Graph) -> Result<(), cubecl::server::ServerError> {
    // SAFETY: see the reason above.
    unsafe { graph.replay() }
}

impl Buffers {
    fn new(shape: &Shape, sizes: Sizes, like: &CubeTensor) -> Self {
        let dtype = like.dtype();
        let heads = shape.heads;
        let rows = sizes.rows;
        let matrix = |width: usize| empty(like, [rows, width], dtype);
        Buffers {
            x: matrix(shape.width),
            normed: matrix(shape.width),
            scale: empty(like, [rows], DType::F32),
            qkv: matrix(heads.joined_width()),
            mixed: matrix(heads.query_width()),
            wide: (dtype == DType::F32).then(|| matrix(2 * shape.inner)),
            inner: matrix(shape.inner),
            logits: matrix(shape.vocab),
            partial: like.client.empty(drawing::race_parts(rows) * 32),
            ended: integers(like, &vec![0; rows]),
            shortlist: like.client.empty(rows * drawing::SHORTLIST * 8),
            shortlisted: integers(like, &vec![0; rows]),
        }
    }

    /// Uses only the first `rows` rows from now on.
    fn use_leading_rows(&mut self, rows: usize) {
        let Buffers {
            x,
            normed,
            scale,
            qkv,
            mixed,
            wide,
            inner,
            logits,
            partial: _,
            ended: _,
            shortlist: _,
            shortlisted: _,
        } = self;
        let all = [x, normed, scale, qkv, mixed, inner, logits];
        for tensor in all.into_iter().chain(wide) {
            *tensor = leading(tensor, rows);
        }
    }
}
