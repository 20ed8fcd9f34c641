//! Decoding on the device: one token of every row through all layers, drawn and booked there, without allocations, so that
//! a step can be captured into a graph and replayed.
//!
//! All that varies lies in buffers: tokens, positions, states, random streams. A row that is not live costs little and
//! changes nothing. Keys and values lie in blocks of 64 tokens; each row has blocks of its own. Results of burn's own
//! operations may have padded rows, and are made dense.
//!
//! Dims: `R` rows, `H`/`K` query/key heads, `Dh` head width, `I` width inside the MLP, `V` vocabulary.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use cubecl::client::Graph;
use cubecl::server::Handle;

use super::attention::Call;
use super::launch::{CudaKernel, Source};
use super::product::{Into, product_of_each_row, project, project_normed, projects};
use super::tensor::{CubeTensor, dense, element, empty, integers, primitive, short_element};
use super::{mlp, norm, rows};
use crate::blocks::linear::Linear;
use crate::blocks::norm::RmsNorm;
use crate::decoder::{Decoder, DecoderConfig};
use crate::kernels::AttentionShape;

static ATTENTION: Source = Source::new(include_str!("attention_decode.cu"));
static RACE: Source = Source::with_prefixes(
    include_str!("rowwise.cuh"),
    include_str!("draw.cuh"),
    include_str!("race.cu"),
);
static SAMPLE: Source = Source::with_prefixes(
    include_str!("rowwise.cuh"),
    include_str!("draw.cuh"),
    include_str!("sample.cu"),
);
static ADVANCE: Source = Source::with_prefixes(
    include_str!("rowwise.cuh"),
    include_str!("draw.cuh"),
    include_str!("advance.cu"),
);

/// Tokens of a block of the cache.
const BLOCK: usize = 64;
/// The position of a row that attends to nothing.
const AT_REST: i32 = -1;
/// Tokens of prompts that go through the layers at once.
const PREFILL: usize = 16_384;

/// What a row is at; the kernels' numbers.
pub(crate) mod state {
    /// Goes on.
    pub const LIVE: i32 = 0;
    /// Ended with an end-of-sequence id.
    pub const EOS: i32 = 1;
    /// Ended with a sequence of ids.
    pub const STOP: i32 = 2;
    /// Reached its limit.
    pub const LENGTH: i32 = 3;
}

/// How tokens are drawn, the same for all rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Drawing {
    pub temperature: f64,
    pub top_k: usize,
    pub top_p: f64,
    pub min_p: f64,
    pub min_new_tokens: usize,
    pub eos: Vec<i32>,
    pub stops: Vec<Vec<i32>>,
}

impl Drawing {
    fn races(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

/// Sizes of the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub rows: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
    /// Tokens of the longest response.
    pub new_tokens: usize,
}

/// A row that begins: its last prompt token is fed, the others are in the cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub row: usize,
    pub token: u32,
    pub position: usize,
    pub limit: usize,
    pub stream: [u32; 4],
}

/// Weights of a layer as the step takes them: what is multiplied with the same vector lies together.
struct Layer {
    input_norm: CubeTensor,
    /// Queries, keys and values, `[(H + 2K) Dh, D]`.
    qkv: CubeTensor,
    bias: Option<CubeTensor>,
    head_norms: Option<[CubeTensor; 2]>,
    output: CubeTensor,
    mlp_norm: CubeTensor,
    /// Gates, then ups: `[2I, D]`.
    gate_up: CubeTensor,
    down: CubeTensor,
    /// Blocks of keys and of values.
    cache: [CubeTensor; 2],
}

/// Buffers of a step.
struct Buffers {
    x: CubeTensor,
    normed: CubeTensor,
    scale: CubeTensor,
    qkv: CubeTensor,
    mixed: CubeTensor,
    /// `[R, 2I]`, in f32 alone.
    wide: Option<CubeTensor>,
    inner: CubeTensor,
    logits: CubeTensor,
    /// Parts of the race for a token.
    partial: Handle,
}

/// What rows are at, on the device.
struct Book {
    table: Handle,
    streams: Handle,
    token: Handle,
    positions: Handle,
    lengths: Handle,
    states: Handle,
    limits: Handle,
    live: Handle,
    seen: Handle,
    eos: Handle,
    stops: Handle,
    sampling_log_prob: Handle,
    log_prob: Handle,
    tokens: Handle,
    sampling_log_probs: Handle,
    log_probs: Handle,
}

/// What the host reads every few steps.
pub(crate) struct Standing {
    pub states: Vec<i32>,
    pub lengths: Vec<i32>,
}

/// Responses of all rows, `[R, new_tokens]` each.
pub(crate) struct Responses {
    pub tokens: Vec<i32>,
    pub sampling_log_probs: Vec<f32>,
    pub log_probs: Vec<f32>,
}

/// A decoder with a cache, a step and its bookkeeping on the device.
pub(crate) struct DeviceDecoder {
    config: DecoderConfig,
    dtype: DType,
    sizes: Sizes,
    /// Blocks of a row.
    blocks: usize,
    layers: Vec<Layer>,
    embedding: CubeTensor,
    last_norm: CubeTensor,
    head: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
    buffers: Buffers,
    book: Book,
    drawing: Drawing,
    stop_width: usize,
    graph: Option<Graph>,
}

fn weight(linear: &Linear) -> CubeTensor {
    primitive(linear.weight.val())
}

fn gain(norm: &RmsNorm) -> CubeTensor {
    primitive(norm.weight.val())
}

/// Whether the kernels take this decoder.
pub(crate) fn takes(decoder: &Decoder) -> bool {
    let config = &decoder.config;
    let widths = [
        config.hidden_size,
        config.heads.query * config.heads.dim,
        config.heads.key_value * config.heads.dim,
        config.intermediate_size,
        config.vocab_size,
    ];
    let embedding = primitive(decoder.model.embed_tokens.weight.val());
    !config.output_bias
        && !config.mlp_bias
        && super::attention::takes(config.heads.dim)
        && projects(&embedding, &widths)
}

/// Bytes of the device's memory, where it tells.
pub(crate) fn memory(decoder: &Decoder) -> Option<u64> {
    let embedding = primitive(decoder.model.embed_tokens.weight.val());
    embedding.client.properties().memory.max_memory()
}

impl DeviceDecoder {
    pub fn new(decoder: &Decoder, sizes: Sizes, drawing: Drawing) -> Self {
        let config = decoder.config.clone();
        let embedding = primitive(decoder.model.embed_tokens.weight.val());
        let dtype = embedding.dtype();
        // One more than the sequences have: a row that has ended still writes behind its last token.
        let blocks = (sizes.tokens + 1).div_ceil(BLOCK);
        let device = decoder.model.embed_tokens.weight.val().device();
        let rotation = decoder.rope.leading(blocks * BLOCK, &device, DType::F32);
        let [cos, sin] = rotation.tables().map(primitive);
        let heads = config.heads;
        let cache = || {
            let shape = [sizes.rows * blocks, heads.key_value, BLOCK, heads.dim];
            empty(&embedding, shape, dtype)
        };
        let layers = decoder.model.layers.iter().map(|layer| {
            let attention = &layer.self_attn;
            let projections = [&attention.q_proj, &attention.k_proj, &attention.v_proj];
            let bias = projections.map(|p| p.bias.as_ref().map(|bias| primitive(bias.val())));
            let bias: Vec<CubeTensor> = bias.into_iter().flatten().collect();
            let norms = attention.q_norm.as_ref().zip(attention.k_norm.as_ref());
            Layer {
                input_norm: gain(&layer.input_layernorm),
                qkv: dense(Cube::float_cat(projections.map(weight).into(), 0)),
                bias: (!bias.is_empty()).then(|| Cube::float_cat(bias, 0)),
                head_norms: norms.map(|(q, k)| [gain(q), gain(k)]),
                output: weight(&attention.o_proj),
                mlp_norm: gain(&layer.post_attention_layernorm),
                gate_up: dense(Cube::float_cat(
                    vec![weight(&layer.mlp.gate_proj), weight(&layer.mlp.up_proj)],
                    0,
                )),
                down: weight(&layer.mlp.down_proj),
                cache: [cache(), cache()],
            }
        });
        let head = match &decoder.lm_head {
            Some(head) => weight(head),
            None => embedding.clone(),
        };
        let mut made = DeviceDecoder {
            layers: layers.collect(),
            last_norm: gain(&decoder.model.norm),
            head,
            cos,
            sin,
            buffers: Buffers::new(&config, sizes, &embedding),
            book: Book::new(sizes, blocks, &drawing, &embedding),
            stop_width: drawing.stops.iter().map(Vec::len).max().unwrap_or(1).max(1),
            drawing,
            graph: None,
            embedding,
            config,
            dtype,
            sizes,
            blocks,
        };
        made.capture();
        made
    }

    /// Records a step, with all rows at rest. Without a graph, steps are launched kernel by kernel.
    fn capture(&mut self) {
        let client = self.embedding.client.clone();
        if client.graph_prepare().is_err() {
            return;
        }
        // Compiles what is new.
        self.launch_step();
        if client.start_capture().is_ok() {
            self.launch_step();
            self.graph = client
                .stop_capture()
                .inspect_err(|error| tracing::warn!("a step cannot be captured: {error}"))
                .ok();
        }
    }

    /// One token for every live row.
    ///
    /// # Errors
    /// What the device says.
    pub fn step(&mut self) -> Result<(), String> {
        let Some(graph) = &self.graph else {
            self.launch_step();
            return Ok(());
        };
        replay(graph).map_err(|error| error.to_string())
    }

    fn launch_step(&self) {
        let Buffers {
            x,
            qkv,
            mixed,
            inner,
            logits,
            ..
        } = &self.buffers;
        self.embed();
        for layer in &self.layers {
            self.project_normed(&layer.input_norm, &layer.qkv, qkv, Into::Product);
            self.attend(layer);
            project(mixed, &layer.output, x, Into::Sum);
            let (gain, weight) = (&layer.mlp_norm, &layer.gate_up);
            match &self.buffers.wide {
                Some(wide) => {
                    self.project_normed(gain, weight, wide, Into::Product);
                    mlp::joined_into(wide, inner);
                }
                None => self.project_normed(gain, weight, inner, Into::Swiglu),
            }
            project(inner, &layer.down, x, Into::Sum);
        }
        self.project_normed(&self.last_norm, &self.head, logits, Into::Product);
        self.draw();
        self.advance();
    }

    fn embed(&self) {
        let [_, width] = self.embedding.shape().dims();
        let count = self.sizes.rows;
        rows::take_into(
            &self.embedding,
            &self.book.token,
            &self.buffers.x,
            [count, width],
        );
    }

    /// The product of the normed residual stream with a weight.
    fn project_normed(&self, gain: &CubeTensor, weight: &CubeTensor, to: &CubeTensor, into: Into) {
        let Buffers {
            x, normed, scale, ..
        } = &self.buffers;
        let epsilon = self.config.norm_epsilon;
        if project_normed(x, (gain, epsilon), weight, to, into) {
            return;
        }
        norm::forward_into(x, gain, epsilon, [normed, scale]);
        project(normed, weight, to, into);
    }

    /// Query heads that share a tile of the kernel, as it divides them.
    fn head_tiles(config: &DecoderConfig, dtype: DType) -> usize {
        let heads = config.heads;
        let plain = dtype == DType::F32 || !heads.dim.is_multiple_of(16) || heads.dim > 128;
        let group = heads.query / heads.key_value;
        group.div_ceil(group.min(if plain { 8 } else { 16 }))
    }

    /// Blocks that share the tokens of a row: a function of the rows alone.
    fn cluster(&self) -> usize {
        let heads = self.config.heads.key_value * Self::head_tiles(&self.config, self.dtype);
        match self.sizes.rows * heads {
            0..=64 => 8,
            65..=128 => 4,
            129..=256 => 2,
            _ => 1,
        }
    }

    fn attend(&self, layer: &Layer) {
        let heads = self.config.heads;
        let tiles = Self::head_tiles(&self.config, self.dtype);
        let cluster = self.cluster();
        let any = &self.embedding.handle;
        let bias = layer.bias.as_ref().map_or(any, |bias| &bias.handle);
        let norms = layer.head_norms.as_ref();
        let [q_norm, k_norm] = norms.map_or([any, any], |norms| {
            norms.each_ref().map(|norm| &norm.handle)
        });
        let [keys, values] = &layer.cache;
        let Buffers { qkv, mixed, .. } = &self.buffers;
        let scale = (heads.dim as f64).powf(-0.5);
        self.attention_kernel("attention_decode_step", 128)
            .define("QKV_BIAS", u8::from(layer.bias.is_some()))
            .define("QK_NORM", u8::from(layer.head_norms.is_some()))
            .define("CLUSTER", cluster)
            .launch(
                &qkv.client,
                [heads.key_value * tiles, self.sizes.rows, cluster].map(|size| size as u32),
                &[
                    &qkv.handle,
                    bias,
                    q_norm,
                    k_norm,
                    &self.cos.handle,
                    &self.sin.handle,
                    &keys.handle,
                    &values.handle,
                    &self.book.table,
                    &self.book.positions,
                    &mixed.handle,
                ],
                vec![
                    scale.to_bits(),
                    self.config.norm_epsilon.to_bits(),
                    self.blocks as u64,
                ],
            );
    }

    fn attention_kernel(&self, entry: &'static str, block: u32) -> CudaKernel {
        let heads = self.config.heads;
        CudaKernel::new(&ATTENTION, entry, block)
            .define("ELEMENT", short_element(self.dtype))
            .define("HEAD_DIM", heads.dim)
            .define("QUERY_HEADS", heads.query)
            .define("KEY_HEADS", heads.key_value)
    }

    fn race_splits(rows: usize) -> usize {
        (4 * 132usize).div_ceil(rows).clamp(1, 32)
    }

    fn draw(&self) {
        let (rows, drawing) = (self.sizes.rows, &self.drawing);
        let splits = Self::race_splits(rows);
        let scalars = vec![
            rows as u64,
            self.config.vocab_size as u64,
            splits as u64,
            drawing.eos.len() as u64,
            drawing.min_new_tokens as u64,
            drawing.top_k as u64,
            drawing.temperature.to_bits(),
            drawing.top_p.to_bits(),
            drawing.min_p.to_bits(),
            1.0f64.to_bits(),
        ];
        let logits = &self.buffers.logits;
        let (client, book) = (&logits.client, &self.book);
        let kernel = |source: &'static Source, entry: &'static str, block: u32| {
            CudaKernel::new(source, entry, block).define("ELEMENT", element(self.dtype))
        };
        let inputs = [
            &logits.handle,
            &book.streams,
            &book.lengths,
            &book.states,
            &book.eos,
        ];
        let outputs = [&book.token, &book.sampling_log_prob, &book.log_prob];
        let joined = |middle: &[&Handle]| -> Vec<Handle> {
            let all = inputs.iter().chain(middle).chain(&outputs);
            all.map(|&handle| handle.clone()).collect()
        };
        let launch = |kernel: CudaKernel, grid: [u32; 3], handles: Vec<Handle>| {
            let handles: Vec<&Handle> = handles.iter().collect();
            kernel.launch(client, grid, &handles, scalars.clone());
        };
        if !drawing.races() {
            let handles = joined(&[&book.seen]);
            launch(kernel(&SAMPLE, "sample", 512), [rows as u32, 1, 1], handles);
            return;
        }
        let partial = &self.buffers.partial;
        let mut racing: Vec<Handle> = inputs.iter().map(|&handle| handle.clone()).collect();
        racing.push(partial.clone());
        let grid = [splits as u32, rows as u32, 1];
        launch(kernel(&RACE, "race", 256), grid, racing);
        let handles = joined(&[partial]);
        launch(kernel(&RACE, "settle", 32), [rows as u32, 1, 1], handles);
    }

    fn advance(&self) {
        let (book, drawing) = (&self.book, &self.drawing);
        CudaKernel::new(&ADVANCE, "advance", 1024)
            .define("ELEMENT", element(self.dtype))
            .launch(
                &self.embedding.client,
                [1, 1, 1],
                &[
                    &book.token,
                    &book.sampling_log_prob,
                    &book.log_prob,
                    &book.eos,
                    &book.stops,
                    &book.limits,
                    &book.lengths,
                    &book.positions,
                    &book.states,
                    &book.seen,
                    &book.tokens,
                    &book.sampling_log_probs,
                    &book.log_probs,
                    &book.live,
                ],
                vec![
                    self.sizes.rows as u64,
                    self.sizes.new_tokens as u64,
                    self.config.vocab_size as u64,
                    drawing.eos.len() as u64,
                    drawing.stops.len() as u64,
                    self.stop_width as u64,
                    0,
                    0,
                ],
            );
    }

    /// Puts keys and values of prompts into the caches of the rows that begin with them.
    ///
    /// A prompt goes through the layers once, whatever the number of its rows. Its last token is left to the first step.
    pub fn prefill(&mut self, prompts: &[(&[u32], Vec<usize>)]) {
        let mut first = 0;
        while first < prompts.len() {
            let mut tokens = 0;
            let fits = |(prompt, _): &&(&[u32], Vec<usize>)| {
                tokens += prompt.len();
                tokens <= PREFILL
            };
            let count = prompts[first..].iter().take_while(fits).count().max(1);
            self.prefill_packed(&prompts[first..first + count]);
            first += count;
        }
    }

    fn prefill_packed(&self, prompts: &[(&[u32], Vec<usize>)]) {
        let heads = self.config.heads;
        let (mut ids, mut slots, mut lengths, mut pairs) = (vec![], vec![], vec![], vec![]);
        for (prompt, rows) in prompts {
            let Some((&first, others)) = rows.split_first() else {
                continue;
            };
            let tokens = prompt.len() - 1;
            ids.extend(prompt[..tokens].iter().map(|&id| id as i32));
            let start = first * self.blocks * BLOCK;
            slots.extend((0..tokens).map(|at| (start + at) as i32));
            lengths.push(tokens);
            for &row in others {
                for block in 0..tokens.div_ceil(BLOCK) {
                    pairs.push((first * self.blocks + block) as i32);
                    pairs.push((row * self.blocks + block) as i32);
                }
            }
        }
        if ids.is_empty() {
            return;
        }
        let shape = AttentionShape {
            sequences: lengths.len(),
            tokens: lengths.iter().copied().max().unwrap_or(0),
            query_heads: heads.query,
            key_heads: heads.key_value,
            head_dim: heads.dim,
        };
        let like = &self.embedding;
        let call = Call::packed(shape, &lengths, like);
        let (ids_handle, slots) = (integers(like, &ids), integers(like, &slots));
        let pairs_handle = integers(like, &pairs);
        let width = self.config.hidden_size;
        let mut x = empty(like, [ids.len(), width], self.dtype);
        rows::take_into(like, &ids_handle, &x, [ids.len(), width]);
        let last = self.layers.len() - 1;
        for (at, layer) in self.layers.iter().enumerate() {
            let normed = norm::forward(x.clone(), layer.input_norm.clone(), self.epsilon()).0;
            let mut joined = self.product(normed, &layer.qkv);
            if let Some(bias) = &layer.bias {
                let bias = Cube::float_reshape(bias.clone(), Shape::new([1, bias.shape()[0]]));
                joined = Cube::float_add(joined, bias);
            }
            if let Some(norms) = &layer.head_norms {
                joined = self.norm_heads(joined, norms);
            }
            let joined = dense(joined);
            let [queries, keys, values] = call.split(&joined, [&self.cos, &self.sin]);
            self.store(layer, [&keys, &values], &slots, ids.len());
            if !pairs.is_empty() {
                self.copy(layer, &pairs_handle, pairs.len() / 2);
            }
            if at == last {
                break;
            }
            let (mixed, _) = call.attend([&queries, &keys, &values]);
            x = Cube::float_add(x, self.product(mixed, &layer.output));
            let normed = norm::forward(x.clone(), layer.mlp_norm.clone(), self.epsilon()).0;
            let wide = self.product(normed, &layer.gate_up);
            let inner = empty(like, [ids.len(), self.config.intermediate_size], self.dtype);
            mlp::joined_into(&wide, &inner);
            x = Cube::float_add(x, self.product(inner, &layer.down));
        }
    }

    fn epsilon(&self) -> f64 {
        self.config.norm_epsilon
    }

    fn product(&self, x: CubeTensor, weight: &CubeTensor) -> CubeTensor {
        product_of_each_row(x, weight.clone())
    }

    /// Norms of query and key heads in a joined projection.
    fn norm_heads(&self, joined: CubeTensor, [q, k]: &[CubeTensor; 2]) -> CubeTensor {
        let heads = self.config.heads;
        let [tokens, width] = joined.shape().dims();
        let (queries, keys) = (heads.query * heads.dim, heads.key_value * heads.dim);
        let part = |from: usize, to: usize| {
            let slices = [burn::tensor::Slice::full(), (from..to).into()];
            dense(Cube::float_slice(joined.clone(), &slices))
        };
        let normed = |part: CubeTensor, gain: &CubeTensor| {
            let [_, width] = part.shape().dims();
            let rows = Shape::new([tokens * width / heads.dim, heads.dim]);
            let rows = Cube::float_reshape(part, rows);
            let normed = norm::forward(rows, gain.clone(), self.epsilon()).0;
            Cube::float_reshape(normed, Shape::new([tokens, width]))
        };
        Cube::float_cat(
            vec![
                normed(part(0, queries), q),
                normed(part(queries, queries + keys), k),
                part(queries + keys, width),
            ],
            1,
        )
    }

    fn store(&self, layer: &Layer, new: [&CubeTensor; 2], slots: &Handle, tokens: usize) {
        let heads = self.config.heads;
        let wide = 16 / self.dtype.size();
        let chunk = if heads.dim.is_multiple_of(wide) {
            wide
        } else {
            1
        };
        let pieces = tokens * heads.key_value * heads.dim / chunk;
        let [keys, values] = &layer.cache;
        self.attention_kernel("kv_store", 256).launch(
            &keys.client,
            [pieces.div_ceil(256) as u32, 1, 1],
            &[
                &new[0].handle,
                &new[1].handle,
                slots,
                &keys.handle,
                &values.handle,
            ],
            vec![tokens as u64],
        );
    }

    fn copy(&self, layer: &Layer, pairs: &Handle, count: usize) {
        let [keys, values] = &layer.cache;
        self.attention_kernel("kv_copy_blocks", 256).launch(
            &keys.client,
            [count as u32, 2, 1],
            &[pairs, &keys.handle, &values.handle],
            vec![],
        );
    }

    /// Begins rows; all of them are at rest.
    ///
    /// # Errors
    /// What the device says.
    pub fn start(&mut self, starts: &[Start]) -> Result<(), String> {
        let book = &self.book;
        let client = &self.embedding.client;
        let handles = [
            &book.token,
            &book.positions,
            &book.lengths,
            &book.states,
            &book.limits,
        ];
        let mut columns = Vec::new();
        for bytes in read(client, &handles)? {
            columns.push(integers_of(&bytes));
        }
        let [token, positions, lengths, states, limits] = columns.as_mut_slice() else {
            return Err("the device gave back other buffers than were asked for".to_owned());
        };
        let mut streams = integers_of(&read(client, &[&book.streams])?.concat());
        for start in starts {
            token[start.row] = start.token as i32;
            positions[start.row] = start.position as i32;
            lengths[start.row] = 0;
            states[start.row] = state::LIVE;
            limits[start.row] = start.limit as i32;
            let words = start.stream.map(|word| word as i32);
            streams[4 * start.row..4 * start.row + 4].copy_from_slice(&words);
        }
        for (handle, column) in handles.into_iter().zip(&columns) {
            write(client, handle, column);
        }
        write(client, &book.streams, &streams);
        Ok(())
    }

    /// Puts rows to rest that have ended, so that they attend to nothing.
    ///
    /// # Errors
    /// What the device says.
    pub fn rest(&mut self, ended: &[usize]) -> Result<(), String> {
        let client = &self.embedding.client;
        let mut positions = integers_of(&read(client, &[&self.book.positions])?.concat());
        for &row in ended {
            positions[row] = AT_REST;
        }
        write(client, &self.book.positions, &positions);
        Ok(())
    }

    /// Where the rows are.
    ///
    /// # Errors
    /// What the device says.
    pub fn standing(&self) -> Result<Standing, String> {
        let client = &self.embedding.client;
        let read = read(client, &[&self.book.states, &self.book.lengths])?;
        Ok(Standing {
            states: integers_of(&read[0]),
            lengths: integers_of(&read[1]),
        })
    }

    /// What was drawn.
    ///
    /// # Errors
    /// What the device says.
    pub fn responses(&self) -> Result<Responses, String> {
        let book = &self.book;
        let handles = [&book.tokens, &book.sampling_log_probs, &book.log_probs];
        let read = read(&self.embedding.client, &handles)?;
        Ok(Responses {
            tokens: integers_of(&read[0]),
            sampling_log_probs: floats_of(&read[1]),
            log_probs: floats_of(&read[2]),
        })
    }
}

#[expect(
    unsafe_code,
    reason = "a replay reads and writes the buffers that were captured: they live as long as the graph, in one struct, \
              and all work goes through one client on one thread"
)]
fn replay(graph: &Graph) -> Result<(), cubecl::server::ServerError> {
    // SAFETY: see the reason above.
    unsafe { graph.replay() }
}

fn read(client: &cubecl::client::Client, handles: &[&Handle]) -> Result<Vec<Vec<u8>>, String> {
    let handles = handles.iter().map(|&handle| handle.clone()).collect();
    let bytes = client.read(handles).map_err(|error| error.to_string())?;
    Ok(bytes.iter().map(|bytes| bytes.to_vec()).collect())
}

fn write(client: &cubecl::client::Client, handle: &Handle, values: &[i32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    client.write(handle, burn::tensor::Bytes::from_bytes_vec(bytes));
}

fn integers_of(bytes: &[u8]) -> Vec<i32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| i32::from_le_bytes(word)).collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

impl Buffers {
    fn new(config: &DecoderConfig, sizes: Sizes, like: &CubeTensor) -> Self {
        let dtype = like.dtype();
        let heads = config.heads;
        let rows = sizes.rows;
        let matrix = |width: usize| empty(like, [rows, width], dtype);
        Buffers {
            x: matrix(config.hidden_size),
            normed: matrix(config.hidden_size),
            scale: empty(like, [rows], DType::F32),
            qkv: matrix((heads.query + 2 * heads.key_value) * heads.dim),
            mixed: matrix(heads.query * heads.dim),
            wide: (dtype == DType::F32).then(|| matrix(2 * config.intermediate_size)),
            inner: matrix(config.intermediate_size),
            logits: matrix(config.vocab_size),
            partial: like
                .client
                .empty(rows * DeviceDecoder::race_splits(rows) * 32),
        }
    }
}

impl Book {
    fn new(sizes: Sizes, blocks: usize, drawing: &Drawing, like: &CubeTensor) -> Self {
        let rows = sizes.rows;
        let table: Vec<i32> = (0..(rows * blocks) as i32).collect();
        let column = |value: i32| integers(like, &vec![value; rows]);
        let some = |values: &[i32]| integers(like, if values.is_empty() { &[-1] } else { values });
        let width = drawing.stops.iter().map(Vec::len).max().unwrap_or(0);
        let stops: Vec<i32> = drawing
            .stops
            .iter()
            .flat_map(|stop| vec![-1; width - stop.len()].into_iter().chain(stop.clone()))
            .collect();
        let responses = || like.client.empty(rows * sizes.new_tokens * 4);
        Book {
            table: integers(like, &table),
            streams: integers(like, &vec![0; 4 * rows]),
            token: column(0),
            positions: column(AT_REST),
            lengths: column(0),
            states: column(state::LENGTH),
            limits: column(0),
            live: integers(like, &[0]),
            // Only a penalty reads it, and such rollouts are not made here.
            seen: integers(like, &[0]),
            eos: some(&drawing.eos),
            stops: some(&stops),
            sampling_log_prob: column(0),
            log_prob: column(0),
            tokens: responses(),
            sampling_log_probs: responses(),
            log_probs: responses(),
        }
    }
}
