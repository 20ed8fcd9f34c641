//! The decoder for rollouts on a CPU: weights are packed once, keys and values are in blocks, and there is no tensor
//! operation in between, whose fixed cost exceeds the arithmetic of a small model.
//!
//! It computes in f32 for any dtype of the weights, and accepts the weights of any device. The packed copy takes four
//! bytes per parameter.

use std::sync::Arc;

use burn::tensor::Tensor;
use rayon::prelude::*;
use verl_decoder::blocks::linear::Linear;
use verl_decoder::blocks::norm::RmsNorm;
use verl_decoder::blocks::rope::RopeConfig;
use verl_decoder::decoder::{Decoder, DecoderLayer};
use verl_kernels::host::{KvShape, KvTrack, Lane, Packed, Spread, Write, attend};
use verl_kernels::vector::{LANES, gated, rms_norm, rms_norm_in_place, rotate};
use verl_kernels::{FlexTensor, on_cpu, tensor, values};

use super::batched::{Prompt, StepModel};
use super::engine::RolloutError;

/// Size of weights that a core keeps in its second-level cache while rows stream by: below, each thread takes its own
/// rows and threads synchronise once per step; above, each takes its own outputs, so that a weight is read from memory
/// once.
const CACHED_BYTES: usize = 4 << 20;
/// Prompt tokens of one pass; bounds the activations.
const PASS_TOKENS: usize = 2048;

/// A [`Decoder`] with packed weights and the sequences that are being decoded.
pub(crate) struct HostDecoder {
    weights: Weights,
    slots: Vec<Option<Lane>>,
}

struct Weights {
    /// `[V, D]`
    embedding: FlexTensor,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Packed,
    width: usize,
    intermediate: usize,
    epsilon: f32,
    query_heads: usize,
    kv: KvShape,
    rope: RopeConfig,
    /// Tokens of the longest sequence of the call.
    positions: usize,
    /// Cosines and sines of each position, `[positions][2][Dh/2]`.
    rotations: Vec<f32>,
    /// Whether weights are small enough for threads to divide the rows.
    cached: bool,
}

struct Layer {
    attention_norm: Vec<f32>,
    qkv: Packed,
    query_norm: Option<Vec<f32>>,
    key_norm: Option<Vec<f32>>,
    output: Packed,
    mlp_norm: Vec<f32>,
    gate_up: Packed,
    down: Packed,
}

impl HostDecoder {
    /// Packs the weights of `decoder`.
    ///
    /// # Errors
    /// [`RolloutError::Device`] when weights cannot be read.
    pub fn new(decoder: &Decoder) -> Result<Self, RolloutError> {
        let config = &decoder.config;
        let embedding = host(decoder.model.embed_tokens.weight.val())?;
        let head = match &decoder.lm_head {
            Some(head) => pack(&[head])?,
            None => Packed::new(&[values(&embedding)], config.hidden_size, None),
        };
        let layers = decoder.model.layers.iter().map(Layer::new);
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let bytes = head.bytes() + layers.iter().map(Layer::bytes).sum::<usize>();
        let weights = Weights {
            embedding,
            layers,
            norm: norm(&decoder.model.norm)?,
            head,
            width: config.hidden_size,
            intermediate: config.intermediate_size,
            epsilon: config.norm_epsilon as f32,
            query_heads: config.heads.query,
            kv: KvShape {
                layers: config.layers,
                heads: config.heads.key_value,
                dim: config.heads.dim,
            },
            rope: config.rope,
            positions: 0,
            rotations: Vec::new(),
            cached: bytes <= CACHED_BYTES,
        };
        Ok(HostDecoder {
            weights,
            slots: Vec::new(),
        })
    }

    /// Prepares a call with `slots` rows of at most `tokens` tokens.
    pub fn begin(&mut self, slots: usize, tokens: usize) {
        let weights = &mut self.weights;
        // Frequencies may depend on the longest sequence.
        if tokens != weights.positions {
            weights.rotations = rotations(&weights.rope, weights.kv.dim, tokens);
            weights.positions = tokens;
        }
        self.slots = (0..slots).map(|_| None).collect();
    }

    /// Frees the sequences of a call, which remain if it failed.
    pub fn end(&mut self) {
        self.slots.clear();
    }
}

impl StepModel for HostDecoder {
    type Keys = Arc<KvTrack>;

    fn prefill(&mut self, prompts: &[&[u32]]) -> Result<Vec<Prompt<Self::Keys>>, RolloutError> {
        let mut done = Vec::with_capacity(prompts.len());
        let mut rest = prompts;
        while !rest.is_empty() {
            let (pass, others) = rest.split_at(pass_len(rest));
            let lane = || Lane {
                shared: None,
                own: KvTrack::new(self.weights.kv),
            };
            let mut lanes: Vec<Lane> = pass.iter().map(|_| lane()).collect();
            let mut feeds: Vec<Feed<'_>> = lanes
                .iter_mut()
                .zip(pass)
                .map(|(lane, ids)| Feed { lane, ids })
                .collect();
            let logits = self.weights.run(&mut feeds);
            let rows = logits.chunks_exact(self.weights.vocab());
            done.extend(lanes.into_iter().zip(rows).map(|(lane, logits)| Prompt {
                keys: Arc::new(lane.own),
                logits: logits.to_vec(),
            }));
            rest = others;
        }
        Ok(done)
    }

    fn occupy(&mut self, slot: usize, keys: &Self::Keys) {
        self.slots[slot] = Some(Lane {
            shared: Some(Arc::clone(keys)),
            own: KvTrack::new(self.weights.kv),
        });
    }

    fn release(&mut self, slot: usize) {
        self.slots[slot] = None;
    }

    fn step(&mut self, ids: &[Option<u32>]) -> Result<Vec<f32>, RolloutError> {
        let mut feeds: Vec<Feed<'_>> = self
            .slots
            .iter_mut()
            .zip(ids)
            .filter_map(|(lane, id)| {
                let (lane, id) = (lane.as_mut()?, id.as_ref()?);
                Some(Feed {
                    lane,
                    ids: std::slice::from_ref(id),
                })
            })
            .collect();
        Ok(self.weights.run(&mut feeds))
    }
}

/// How many of the first prompts pass through the layers together.
fn pass_len(prompts: &[&[u32]]) -> usize {
    let mut tokens = 0;
    let fitting = prompts.iter().take_while(|prompt| {
        tokens += prompt.len();
        tokens <= PASS_TOKENS
    });
    fitting.count().max(1)
}

/// New tokens of a sequence.
struct Feed<'a> {
    lane: &'a mut Lane,
    ids: &'a [u32],
}

/// A new token: its sequence, and its place among the sequence's own.
#[derive(Clone, Copy)]
struct Token {
    feed: usize,
    index: usize,
}

impl Weights {
    fn vocab(&self) -> usize {
        values(&self.embedding).len() / self.width
    }

    /// Appends the feeds to their sequences; returns the logits after the last token of each: `[feeds, V]`.
    fn run(&self, feeds: &mut [Feed<'_>]) -> Vec<f32> {
        let mut logits = vec![0.0; feeds.len() * self.vocab()];
        if self.cached {
            // One piece per thread, because each piece reads all weights once.
            let piece = feeds.len().div_ceil(rayon::current_num_threads()).max(1);
            feeds
                .par_chunks_mut(piece)
                .zip(logits.par_chunks_mut(piece * self.vocab()))
                .for_each(|(feeds, logits)| self.forward(feeds, Spread::Alone, logits));
        } else if !feeds.is_empty() {
            self.forward(feeds, Spread::Panels, &mut logits);
        }
        logits
    }

    fn forward(&self, feeds: &mut [Feed<'_>], spread: Spread, logits: &mut [f32]) {
        let tokens = self.tokens(feeds);
        let (count, width) = (tokens.len(), self.width);
        let mut x = self.embed(feeds);
        let mut normed = vec![0.0; count * width];
        let mut qkv = vec![0.0; count * self.qkv_width()];
        let mut mixed = vec![0.0; count * self.query_width()];
        let mut gate_up = vec![0.0; count * 2 * self.intermediate];
        let mut active = vec![0.0; count * self.intermediate];
        for (index, layer) in self.layers.iter().enumerate() {
            rms_norm(&x, &layer.attention_norm, self.epsilon, &mut normed);
            layer.qkv.multiply(&normed, &mut qkv, Write::Set, spread);
            self.keep(index, layer, feeds, &tokens, &mut qkv);
            self.mix(index, feeds, &tokens, &qkv, &mut mixed, spread);
            layer.output.multiply(&mixed, &mut x, Write::Add, spread);
            rms_norm(&x, &layer.mlp_norm, self.epsilon, &mut normed);
            layer
                .gate_up
                .multiply(&normed, &mut gate_up, Write::Set, spread);
            gated(&gate_up, self.intermediate, &mut active);
            layer.down.multiply(&active, &mut x, Write::Add, spread);
        }
        let last = self.last_rows(feeds, &x);
        let mut normed = vec![0.0; last.len()];
        rms_norm(&last, &self.norm, self.epsilon, &mut normed);
        self.head.multiply(&normed, logits, Write::Set, spread);
        for feed in feeds {
            feed.lane.own.advance(feed.ids.len());
        }
    }

    fn query_width(&self) -> usize {
        self.query_heads * self.kv.dim
    }

    fn qkv_width(&self) -> usize {
        (self.query_heads + 2 * self.kv.heads) * self.kv.dim
    }

    /// New tokens, sequence by sequence.
    fn tokens(&self, feeds: &[Feed<'_>]) -> Vec<Token> {
        let of = |(feed, new): (usize, &Feed<'_>)| {
            let first = new.lane.own.len();
            (0..new.ids.len()).map(move |i| Token {
                feed,
                index: first + i,
            })
        };
        feeds.iter().enumerate().flat_map(of).collect()
    }

    fn embed(&self, feeds: &[Feed<'_>]) -> Vec<f32> {
        let embedding = values(&self.embedding);
        let ids = feeds.iter().flat_map(|feed| feed.ids);
        let rows = ids.flat_map(|&id| {
            let start = id as usize * self.width;
            &embedding[start..start + self.width]
        });
        rows.copied().collect()
    }

    /// Norms and rotates queries and keys; writes keys and values into the sequences.
    fn keep(
        &self,
        index: usize,
        layer: &Layer,
        feeds: &mut [Feed<'_>],
        tokens: &[Token],
        qkv: &mut [f32],
    ) {
        let (query, key_value) = (self.query_width(), self.kv.heads * self.kv.dim);
        for (token, row) in tokens.iter().zip(qkv.chunks_exact_mut(self.qkv_width())) {
            let lane = &mut feeds[token.feed].lane;
            let (turned, values) = row.split_at_mut(query + key_value);
            if let Some(norm) = &layer.query_norm {
                rms_norm_in_place(&mut turned[..query], norm, self.epsilon);
            }
            if let Some(norm) = &layer.key_norm {
                rms_norm_in_place(&mut turned[query..], norm, self.epsilon);
            }
            let position = lane.shared_len() + token.index;
            let rotation = &self.rotations[position * self.kv.dim..(position + 1) * self.kv.dim];
            let (cos, sin) = rotation.split_at(self.kv.dim / 2);
            rotate(turned, cos, sin);
            lane.own.write(index, token.index, &turned[query..], values);
        }
    }

    /// Attention of every new token.
    fn mix(
        &self,
        layer: usize,
        feeds: &[Feed<'_>],
        tokens: &[Token],
        qkv: &[f32],
        mixed: &mut [f32],
        spread: Spread,
    ) {
        let (query, row) = (self.query_width(), self.qkv_width());
        let one = |scores: &mut Vec<[f32; LANES]>,
                   ((token, qkv), out): ((&Token, &[f32]), &mut [f32])| {
            let lane = &*feeds[token.feed].lane;
            attend(
                lane,
                token.index + 1,
                layer,
                self.kv,
                &qkv[..query],
                scores,
                out,
            );
        };
        match spread {
            Spread::Alone => {
                let mut scores = Vec::new();
                let rows = tokens.iter().zip(qkv.chunks_exact(row));
                for task in rows.zip(mixed.chunks_exact_mut(query)) {
                    one(&mut scores, task);
                }
            }
            Spread::Panels => {
                let rows = tokens.par_iter().zip(qkv.par_chunks_exact(row));
                rows.zip(mixed.par_chunks_exact_mut(query))
                    .for_each_init(Vec::new, one);
            }
        }
    }

    /// The rows of each sequence's last new token.
    fn last_rows(&self, feeds: &[Feed<'_>], x: &[f32]) -> Vec<f32> {
        let mut end = 0;
        let rows = feeds.iter().flat_map(|feed| {
            end += feed.ids.len() * self.width;
            &x[end - self.width..end]
        });
        rows.copied().collect()
    }
}

impl Layer {
    fn new(layer: &DecoderLayer) -> Result<Self, RolloutError> {
        let (attention, mlp) = (&layer.self_attn, &layer.mlp);
        Ok(Layer {
            attention_norm: norm(&layer.input_layernorm)?,
            qkv: pack(&[&attention.q_proj, &attention.k_proj, &attention.v_proj])?,
            query_norm: attention.q_norm.as_ref().map(norm).transpose()?,
            key_norm: attention.k_norm.as_ref().map(norm).transpose()?,
            output: pack(&[&attention.o_proj])?,
            mlp_norm: norm(&layer.post_attention_layernorm)?,
            gate_up: pack(&[&mlp.gate_proj, &mlp.up_proj])?,
            down: pack(&[&mlp.down_proj])?,
        })
    }

    fn bytes(&self) -> usize {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
            .into_iter()
            .map(Packed::bytes)
            .sum()
    }
}

/// Packs several maps of the same input as one.
fn pack(maps: &[&Linear]) -> Result<Packed, RolloutError> {
    let inputs = maps[0].weight.val().dims()[1];
    let weights = maps.iter().map(|map| host(map.weight.val()));
    let weights = weights.collect::<Result<Vec<_>, _>>()?;
    let weights: Vec<&[f32]> = weights.iter().map(values).collect();
    let biases = maps.iter().filter_map(|map| map.bias.as_ref());
    let biases = biases.map(|bias| Ok(values(&host(bias.val())?).to_vec()));
    let biases = biases.collect::<Result<Vec<_>, RolloutError>>()?;
    let bias = (biases.len() == maps.len()).then(|| biases.concat());
    Ok(Packed::new(&weights, inputs, bias))
}

fn norm(norm: &RmsNorm) -> Result<Vec<f32>, RolloutError> {
    Ok(values(&host(norm.weight.val())?).to_vec())
}

/// A parameter's numbers in f32; those on the CPU are not copied.
fn host<const D: usize>(parameter: Tensor<D>) -> Result<FlexTensor, RolloutError> {
    if let Some(numbers) = on_cpu(parameter.clone()) {
        return Ok(numbers);
    }
    let shape = parameter.shape();
    let flat = parameter.reshape([1, shape.num_elements()]);
    Ok(tensor(super::eager::read(flat)?, shape))
}

/// Cosines and sines of positions `0..length`, rounded like the decoder's own tables.
fn rotations(rope: &RopeConfig, head_dim: usize, length: usize) -> Vec<f32> {
    let frequencies = rope.frequencies(head_dim, length);
    let magnitude = rope.scaling.magnitude() as f32;
    let mut table = Vec::with_capacity(length * 2 * frequencies.len());
    for position in 0..length {
        let angles = frequencies.iter().map(|f| f64::from(position as f32 * f));
        table.extend(
            angles
                .clone()
                .map(|angle| magnitude * libm::cos(angle) as f32),
        );
        table.extend(angles.map(|angle| magnitude * libm::sin(angle) as f32));
    }
    table
}
