//! The decoder: one model for the Llama and Qwen families, described by its config.
//!
//! Fields are named as in checkpoints, so the path of a parameter is its name in a safetensors file.

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use verl_kernels::device::DeviceKind;
use verl_kernels::prefixes::Distinct;
use verl_kernels::{
    self as kernels, AttentionParameters, HalfSettings, Sequences, indices, random,
};

use crate::blocks::attention::{Attention, Heads, Rows, causal_mask};
use crate::blocks::linear::{Embedding, Linear};
use crate::blocks::mlp::Mlp;
use crate::blocks::norm::RmsNorm;
use crate::blocks::rope::{Rope, RopeConfig, Rotation};
use crate::error::ModelError;
use crate::hf::{self, LoadError, LoadReport};
use crate::padded::padded_hidden;
use crate::parameters::fill_parameters;

/// The architecture of a [`Decoder`]. [`crate::families`] reads it from a config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Size of the vocabulary, `V`.
    pub vocab_size: usize,
    /// Width, `D`.
    pub hidden_size: usize,
    /// Width inside the MLP, `I`.
    pub intermediate_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Heads of attention.
    pub heads: Heads,
    /// Longest sequence in tokens.
    pub max_tokens: usize,
    /// ε of every norm.
    pub norm_epsilon: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether query and key heads are normed.
    pub qk_norm: bool,
    /// Whether the output head is the embedding.
    pub tied_head: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
}

impl DecoderConfig {
    /// Whether [`kernels::attention_block`] and [`kernels::mlp_block`] can compute the two halves of a layer.
    pub fn has_block_kernels(&self) -> bool {
        !(self.qk_norm || self.output_bias || self.mlp_bias)
    }

    /// Number of parameters of the decoder.
    pub fn num_parameters(&self) -> u64 {
        let (width, inner) = (self.hidden_size, self.intermediate_size);
        let (query, joined) = (self.heads.query_width(), self.heads.joined_width());
        let biases = [
            (self.qkv_bias, joined),
            (self.output_bias, width),
            (self.mlp_bias, 2 * inner + width),
        ];
        let biases: usize = biases
            .iter()
            .map(|(has, count)| if *has { *count } else { 0 })
            .sum();
        let norms = 2 * width + if self.qk_norm { 2 * self.heads.dim } else { 0 };
        let layer = width * (query + joined + 3 * inner) + biases + norms;
        let tables = if self.tied_head { 1 } else { 2 };
        let outside = width + tables * self.vocab_size * width;
        (self.layers * layer + outside) as u64
    }

    /// Rejects a tokenizer with more ids than the embedding has rows. Fewer ids are normal: embeddings are often
    /// padded.
    ///
    /// # Errors
    /// [`LoadError::Vocabulary`].
    pub fn check_vocabulary(&self, tokenizer_ids: usize) -> Result<(), LoadError> {
        let rows = self.vocab_size;
        if tokenizer_ids > rows {
            return Err(LoadError::Vocabulary {
                tokens: tokenizer_ids,
                rows,
            });
        }
        Ok(())
    }
}

/// A causal language model.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Everything below the head.
    pub model: Backbone,
    /// The head, `[V, D]`; `None` in a tied decoder.
    pub lm_head: Option<Linear>,
    /// The architecture.
    #[module(skip)]
    pub config: DecoderConfig,
    /// Rotary tables, shared by clones.
    #[module(skip)]
    pub rope: Rope,
    /// The folder it was loaded from.
    #[module(skip)]
    pub origin: Option<Arc<hf::Origin>>,
    /// Type of the weights in folders that are written.
    #[module(skip)]
    pub save_dtype: hf::SaveDType,
}

/// Embedding, layers and last norm.
#[derive(Module, Debug)]
pub struct Backbone {
    /// `[V, D]`.
    pub embed_tokens: Embedding,
    /// Layers, lowest first.
    pub layers: Vec<DecoderLayer>,
    /// Norm after the last layer.
    pub norm: RmsNorm,
    /// Whether training keeps only the input of each half of a layer and recomputes the rest in the backward pass. Only
    /// used where [`kernels::blocks_are_fused`] is true.
    #[module(skip)]
    pub recompute: bool,
}

impl Backbone {
    /// Final hidden states of complete sequences, without a cache.
    ///
    /// # Shapes
    /// `ids`: `[B, S]`; result: `[B, S, D]`
    pub fn forward(&self, ids: Tensor<2, Int>, rope: &Rope) -> Tensor<3> {
        let [b, s] = ids.dims();
        if self.packs() {
            let hidden = self.packed(ids.reshape([b * s]), &vec![s; b], rope);
            let width = hidden.dims()[1];
            return hidden.reshape([b, s, width]);
        }
        let x = self.embed_tokens.forward(ids.reshape([b * s]));
        let (device, width) = (x.device(), x.dims()[1]);
        let x = if kernels::attention_is_fused(&device, x.dtype(), rope.head_dim()) {
            self.fused(x, &Rows::Equal([b, s]), s, rope)
        } else {
            let rotation = rope.leading(s, &device, x.dtype());
            let mask = causal_mask(s, &device);
            let layers = self.layers.iter();
            layers.fold(x, |x, layer| layer.forward(x, [b, s], &rotation, &mask))
        };
        self.norm.forward(x).reshape([b, s, width])
    }

    /// Runs the layers with the fused attention kernel; no sequence is longer than `longest`.
    ///
    /// # Shapes
    /// `x`, result: `[N, D]`
    fn fused(&self, x: Tensor<2>, rows: &Rows, longest: usize, rope: &Rope) -> Tensor<2> {
        // Fused attention rotates heads in f32.
        let rotation = rope.leading(longest, &x.device(), DType::F32);
        let layers = self.layers.iter();
        layers.fold(x, |x, layer| layer.fused(x, rows, &rotation))
    }

    /// Whether [`Backbone::packed`] is the fast path.
    fn packs(&self) -> bool {
        self.shares_prefixes() || self.is_plain() && self.has(kernels::blocks_are_fused)
    }

    /// Whether sequences with a common prefix share its computation. This requires attention over [segments].
    ///
    /// [segments]: verl_kernels::prefixes::Segment
    fn shares_prefixes(&self) -> bool {
        let shares = |device: &Device, dtype, head_dim| {
            DeviceKind::of(device).shares_prefixes()
                && kernels::attention_is_fused(device, dtype, head_dim)
        };
        self.has(shares)
    }

    /// Whether there are kernels for the device and dtype of the weights and the width of the heads.
    fn has(&self, kernels: impl FnOnce(&Device, DType, usize) -> bool) -> bool {
        let weight = self.embed_tokens.weight.val();
        let layer = self.layers.first();
        layer.is_some_and(|layer| {
            kernels(&weight.device(), weight.dtype(), layer.self_attn.heads.dim)
        })
    }

    /// Whether [`kernels::attention_block`] and [`kernels::mlp_block`] support every layer.
    fn is_plain(&self) -> bool {
        self.layers.iter().all(DecoderLayer::is_plain)
    }

    /// Whether [`Backbone::packed`] is available.
    fn can_pack(&self) -> bool {
        self.shares_prefixes() || self.is_plain()
    }

    /// Final hidden states of concatenated sequences of these lengths.
    ///
    /// # Shapes
    /// `ids`: `[N]`; result: `[N, D]`
    pub fn packed(&self, ids: Tensor<1, Int>, lengths: &[usize], rope: &Rope) -> Tensor<2> {
        let device = ids.device();
        if self.shares_prefixes() {
            let ids: Vec<i32> = ids.into_data().iter().collect();
            let distinct = Distinct::new(&ids, lengths);
            let x = self.embed_tokens.forward(indices(distinct.ids, &device));
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let x = self.fused(x, &Rows::Segments(distinct.segments), longest, rope);
            let hidden = self.norm.forward(x);
            return match distinct.rows {
                Some(rows) => hidden.select(0, indices(rows, &device)),
                None => hidden,
            };
        }
        let sequences = Sequences::new(lengths, &device);
        let tables = rope.full_tables(sequences.longest(), &device);
        let mut x = self.embed_tokens.forward(ids);
        for layer in &self.layers {
            x = layer.packed(x, &tables, &sequences, self.recompute);
        }
        self.norm.forward(x)
    }
}

/// x + attention(norm(x)), then x + mlp(norm(x)).
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// Norm before attention.
    pub input_layernorm: RmsNorm,
    /// Attention.
    pub self_attn: Attention,
    /// Norm before the MLP.
    pub post_attention_layernorm: RmsNorm,
    /// Feed-forward block.
    pub mlp: Mlp,
}

impl DecoderLayer {
    /// # Shapes
    /// `x`: `[B·S, D]`; `mask`: as in [`Attention::forward`]; result: `[B·S, D]`
    pub fn forward(
        &self,
        x: Tensor<2>,
        shape: [usize; 2],
        rotation: &Rotation,
        mask: &Tensor<4>,
    ) -> Tensor<2> {
        let normed = self.input_layernorm.forward(x.clone());
        let x = x + self.self_attn.forward(normed, shape, rotation, mask);
        self.feed_forward(x)
    }

    /// [`DecoderLayer::forward`] with the fused attention kernel; see [`Attention::fused`].
    ///
    /// # Shapes
    /// `x`, result: `[N, D]`
    pub fn fused(&self, x: Tensor<2>, rows: &Rows, rotation: &Rotation) -> Tensor<2> {
        let normed = self.input_layernorm.forward(x.clone());
        let x = x + self.self_attn.fused(normed, rows, rotation);
        self.feed_forward(x)
    }

    /// Whether [`DecoderLayer::packed`] supports this attention and MLP.
    fn is_plain(&self) -> bool {
        let (attention, mlp) = (&self.self_attn, &self.mlp);
        let unbiased = [
            &attention.o_proj,
            &mlp.gate_proj,
            &mlp.up_proj,
            &mlp.down_proj,
        ];
        attention.q_norm.is_none()
            && attention.k_norm.is_none()
            && unbiased.iter().all(|linear| linear.bias.is_none())
    }

    /// The layer on concatenated sequences, with [`kernels::attention_block`] and [`kernels::mlp_block`].
    ///
    /// # Shapes
    /// `x`: `[N, D]`; result: the same
    fn packed(
        &self,
        x: Tensor<2>,
        tables: &[Tensor<2>; 2],
        sequences: &Sequences,
        recompute: bool,
    ) -> Tensor<2> {
        let (attention, mlp) = (&self.self_attn, &self.mlp);
        let projections = [&attention.q_proj, &attention.k_proj, &attention.v_proj];
        let biases = projections.map(|linear| linear.bias.as_ref().map(Param::val));
        let biases: Vec<Tensor<1>> = biases.into_iter().flatten().collect();
        let parameters = AttentionParameters {
            gain: self.input_layernorm.weight.val(),
            projections: projections.map(|linear| linear.weight.val()),
            bias: (!biases.is_empty()).then(|| Tensor::cat(biases, 0)),
            output: attention.o_proj.weight.val(),
        };
        let settings = HalfSettings {
            epsilon: self.input_layernorm.epsilon,
            recompute,
        };
        let (tables, heads) = (tables.clone(), attention.heads);
        let x = kernels::attention_block(x, parameters, tables, sequences, heads, settings);
        let norm = &self.post_attention_layernorm;
        let weights = [&mlp.gate_proj, &mlp.up_proj, &mlp.down_proj];
        let weights = weights.map(|linear| linear.weight.val());
        let settings = HalfSettings {
            epsilon: norm.epsilon,
            recompute,
        };
        kernels::mlp_block(x, norm.weight.val(), weights, settings)
    }

    /// The second half of the layer.
    ///
    /// # Shapes
    /// `x`: `[N, D]`; result: the same
    pub fn feed_forward(&self, x: Tensor<2>) -> Tensor<2> {
        let normed = self.post_attention_layernorm.forward(x.clone());
        x + self.mlp.forward(normed)
    }
}

impl Decoder {
    /// A decoder whose parameters are allocated only when first used or loaded: zeros, except ones in norms.
    pub fn lazy(config: DecoderConfig, device: &Device) -> Self {
        let c = &config;
        Decoder {
            model: Backbone {
                embed_tokens: Embedding::lazy(c.vocab_size, c.hidden_size, device),
                layers: (0..c.layers).map(|_| layer(c, device)).collect(),
                norm: RmsNorm::lazy(c.hidden_size, c.norm_epsilon, device),
                recompute: false,
            },
            lm_head: (!c.tied_head)
                .then(|| Linear::lazy(c.vocab_size, c.hidden_size, false, device)),
            rope: Rope::new(c.rope, c.heads.dim),
            origin: None,
            save_dtype: hf::SaveDType::default(),
            config,
        }
    }

    /// A fresh decoder in f32: matrices are `initializer_range · normal(name, index)`, biases zero, norms one.
    ///
    /// `normal(name, count)` returns `count` draws from N(0, 1) for the parameter `name`.
    pub fn fresh(
        config: DecoderConfig,
        device: &Device,
        mut normal: impl FnMut(&str, usize) -> Vec<f32>,
    ) -> Self {
        let scale = config.initializer_range as f32;
        fill_parameters(Decoder::lazy(config, device), DType::F32, |name, shape| {
            (shape.len() == 2).then(|| {
                let draws = normal(name, shape.iter().product());
                let values: Vec<f32> = draws.into_iter().map(|draw| draw * scale).collect();
                TensorData::new(values, shape.to_vec())
            })
        })
    }

    /// A fresh decoder whose draws depend only on the seed and on each parameter's name.
    pub fn random(config: DecoderConfig, seed: u64, device: &Device) -> Self {
        Decoder::fresh(config, device, |name, count| {
            random::normals(seed, name, count)
        })
    }

    /// Sets the folder whose config.json, tokenizer and template belong to this decoder; saving copies them.
    #[must_use]
    pub fn with_origin(mut self, origin: hf::Origin) -> Self {
        self.origin = Some(Arc::new(origin));
        self
    }

    /// Loads the decoder of a Hugging Face folder, in f32.
    ///
    /// # Errors
    /// The folder does not exist or is of an unknown family, or its weights do not match its config.
    pub fn load(dir: &Path, device: &Device) -> Result<Self, LoadError> {
        Ok(Self::load_as(dir, device, DType::F32)?.0)
    }

    /// Loads the decoder of a Hugging Face folder with weights in `dtype`, and reports what was found there. A head
    /// that differs from the embedding is kept, even if config.json ties the two.
    ///
    /// # Errors
    /// See [`Decoder::load`].
    pub fn load_as(
        dir: &Path,
        device: &Device,
        dtype: DType,
    ) -> Result<(Self, LoadReport), LoadError> {
        let origin = hf::Origin::read(dir)?;
        let config = origin.stored_config()?;
        if config.tied_head != origin.decoder_config()?.tied_head {
            tracing::warn!(
                dir = %dir.display(),
                "config.json has `tie_word_embeddings` true, but lm_head.weight differs from the embedding; it is kept as a \
                 separate head, and saved folders have `tie_word_embeddings` false"
            );
        }
        let lazy = Decoder::lazy(config, device);
        let (mut decoder, report) = hf::weights::load(lazy, dir, dtype)?;
        decoder.origin = Some(Arc::new(origin));
        Ok((decoder, report))
    }

    /// Checks that [`Decoder::load`] would find weights that match `config`, without reading the weights.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn check_folder(dir: &Path, config: &DecoderConfig) -> Result<(), LoadError> {
        let lazy = Decoder::lazy(config.clone(), &Device::flex());
        hf::weights::check(&lazy, dir).map(drop)
    }

    /// Writes a Hugging Face folder with weights in `dtype`; see [`hf::save`].
    ///
    /// # Errors
    /// The folder exists and is not empty, or files cannot be written.
    pub fn save_as(&self, dir: &Path, dtype: hf::SaveDType) -> Result<(), ModelError> {
        hf::save::save(self, dir, dtype)
    }

    /// See [`DecoderConfig::check_vocabulary`].
    ///
    /// # Errors
    /// As [`DecoderConfig::check_vocabulary`].
    pub fn check_vocabulary(&self, tokenizer_ids: usize) -> Result<(), LoadError> {
        self.config.check_vocabulary(tokenizer_ids)
    }
}

fn layer(c: &DecoderConfig, device: &Device) -> DecoderLayer {
    let Heads {
        query,
        key_value,
        dim,
    } = c.heads;
    let norm = || RmsNorm::lazy(c.hidden_size, c.norm_epsilon, device);
    let head_norm = || {
        c.qk_norm
            .then(|| RmsNorm::lazy(dim, c.norm_epsilon, device))
    };
    let projection = |heads| Linear::lazy(heads * dim, c.hidden_size, c.qkv_bias, device);
    DecoderLayer {
        input_layernorm: norm(),
        self_attn: Attention {
            q_proj: projection(query),
            k_proj: projection(key_value),
            v_proj: projection(key_value),
            o_proj: Linear::lazy(c.hidden_size, query * dim, c.output_bias, device),
            q_norm: head_norm(),
            k_norm: head_norm(),
            heads: c.heads,
        },
        post_attention_layernorm: norm(),
        mlp: Mlp::lazy(c.hidden_size, c.intermediate_size, c.mlp_bias, device),
    }
}

impl Decoder {
    /// Final hidden states, after the last norm.
    ///
    /// # Shapes
    /// `ids`: `[B, S]`; result: `[B, S, D]`
    pub fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.model.forward(ids, &self.rope)
    }

    /// Whether [`Decoder::hidden_packed`] is faster than padding.
    pub fn packs(&self) -> bool {
        self.model.packs()
    }

    /// [`Decoder::hidden`] of concatenated sequences of these lengths, each at least 1.
    ///
    /// # Shapes
    /// `ids`: `[N]`, with `N` the sum of `lengths`; result: `[N, D]`
    pub fn hidden_packed(&self, ids: Tensor<1, Int>, lengths: &[usize]) -> Tensor<2> {
        if self.model.can_pack() {
            self.model.packed(ids, lengths, &self.rope)
        } else {
            padded_hidden(ids, lengths, |ids| self.hidden(ids))
        }
    }

    /// Weight of the output head, `[V, D]`: the embedding if the decoder is tied.
    pub fn head(&self) -> Tensor<2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.model.embed_tokens.weight.val(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::rope::RopeScaling;
    use crate::parameters::{named_parameters, visit_parameters};

    fn config() -> DecoderConfig {
        DecoderConfig {
            vocab_size: 100,
            hidden_size: 32,
            intermediate_size: 48,
            layers: 2,
            heads: Heads {
                query: 4,
                key_value: 2,
                dim: 6,
            },
            max_tokens: 64,
            norm_epsilon: 1e-6,
            rope: RopeConfig {
                theta: 10_000.0,
                scaling: RopeScaling::Default,
            },
            qkv_bias: true,
            output_bias: false,
            mlp_bias: false,
            qk_norm: true,
            tied_head: false,
            initializer_range: 0.5,
        }
    }

    #[test]
    fn parameters_are_named_as_in_checkpoints() {
        let decoder = Decoder::lazy(config(), &Device::flex());
        let names = named_parameters(&decoder);
        let lines: Vec<String> = names
            .iter()
            .filter(|(name, _)| !name.contains("layers.1"))
            .map(|(name, shape)| format!("{name} {shape:?}"))
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        model.embed_tokens.weight [100, 32]
        model.layers.0.input_layernorm.weight [32]
        model.layers.0.self_attn.q_proj.weight [24, 32]
        model.layers.0.self_attn.q_proj.bias [24]
        model.layers.0.self_attn.k_proj.weight [12, 32]
        model.layers.0.self_attn.k_proj.bias [12]
        model.layers.0.self_attn.v_proj.weight [12, 32]
        model.layers.0.self_attn.v_proj.bias [12]
        model.layers.0.self_attn.o_proj.weight [32, 24]
        model.layers.0.self_attn.q_norm.weight [6]
        model.layers.0.self_attn.k_norm.weight [6]
        model.layers.0.post_attention_layernorm.weight [32]
        model.layers.0.mlp.gate_proj.weight [48, 32]
        model.layers.0.mlp.up_proj.weight [48, 32]
        model.layers.0.mlp.down_proj.weight [32, 48]
        model.norm.weight [32]
        lm_head.weight [100, 32]
        ");
    }

    #[test]
    fn all_parameters_are_counted() {
        for tied_head in [false, true] {
            for [qkv_bias, output_bias, mlp_bias, qk_norm] in [
                [false, false, false, false],
                [true, false, false, false],
                [true, true, false, false],
                [true, true, true, false],
                [false, false, true, true],
            ] {
                let config = DecoderConfig {
                    qkv_bias,
                    output_bias,
                    mlp_bias,
                    qk_norm,
                    tied_head,
                    ..config()
                };
                let decoder = Decoder::lazy(config.clone(), &Device::flex());
                let shapes = named_parameters(&decoder)
                    .into_iter()
                    .map(|(_, shape)| shape);
                let counted: usize = shapes.map(|shape| shape.iter().product::<usize>()).sum();
                assert_eq!(config.num_parameters(), counted as u64, "{config:?}");
            }
        }
    }

    #[test]
    fn fresh_weights_follow_the_seed_and_the_initializer_range() {
        let device = Device::flex();
        let embedding = |seed| {
            let decoder = Decoder::random(config(), seed, &device);
            let data = decoder.model.embed_tokens.weight.val().into_data();
            data.as_slice::<f32>().unwrap().to_vec()
        };
        let values = embedding(7);
        assert_eq!(values, embedding(7));
        assert_ne!(values, embedding(8));
        // 3,200 draws: the deviation is known within 4 / √(2 · 3200) = 5 %.
        let square = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
        assert!(
            (square.sqrt() / 0.5 - 1.0).abs() < 0.05,
            "{}",
            square.sqrt()
        );
        visit_parameters(
            &Decoder::random(config(), 7, &device),
            |name, shape, read| {
                if shape.len() == 1 {
                    let constant = if name.ends_with("bias") { 0.0 } else { 1.0 };
                    let data = read();
                    let values = data.as_slice::<f32>().unwrap();
                    assert!(values.iter().all(|value| *value == constant), "{name}");
                }
            },
        );
    }

    #[test]
    fn packed_and_padded_sequences_have_the_same_states() {
        let device = Device::flex();
        let lengths = [3, 1, 7];
        for qk_norm in [false, true] {
            let config = DecoderConfig {
                qk_norm,
                ..config()
            };
            let decoder = Decoder::random(config, 7, &device);
            let ids: Vec<i32> = (0..11).map(|at| at * 37 % 100).collect();
            let ids = Tensor::from_data(TensorData::new(ids, [11]), &device);
            let packed = decoder.hidden_packed(ids.clone(), &lengths);
            let padded = padded_hidden(ids, &lengths, |ids| decoder.hidden(ids));
            let [packed, padded] = [packed, padded].map(Tensor::into_data);
            let pairs = packed.iter::<f32>().zip(padded.iter::<f32>());
            for (got, want) in pairs {
                assert!((got - want).abs() < 1e-4, "{got} is not {want}");
            }
        }
    }

    /// States have the same bits whether a prefix is computed once or per sequence, and whatever the other sequences
    /// are.
    #[test]
    fn sharing_prefixes_changes_no_bit_of_the_states() {
        let device = Device::flex();
        let prompt: Vec<i32> = (0..27).map(|at| at * 37 % 100).collect();
        let continued = |from: usize, own: i32| {
            let own = (0..own).map(|at| (at * 13 + 5) % 100);
            prompt[..from]
                .iter()
                .copied()
                .chain(own)
                .collect::<Vec<i32>>()
        };
        let sequences = [
            continued(27, 5),
            continued(27, 0),
            continued(27, 30),
            continued(11, 18),
            continued(2, 1),
            continued(27, 5),
        ];
        for qk_norm in [false, true] {
            let config = DecoderConfig {
                qk_norm,
                ..config()
            };
            let decoder = Decoder::random(config, 7, &device);
            let states = |sequences: &[Vec<i32>]| -> Vec<u32> {
                let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
                let hidden = decoder.hidden_packed(indices(sequences.concat(), &device), &lengths);
                hidden.into_data().iter::<f32>().map(f32::to_bits).collect()
            };
            let alone = sequences
                .iter()
                .flat_map(|one| states(std::slice::from_ref(one)));
            assert_eq!(states(&sequences), alone.collect::<Vec<u32>>());
        }
    }

    #[test]
    fn later_tokens_and_other_rows_change_nothing() {
        let device = Device::flex();
        let decoder = Decoder::random(config(), 7, &device);
        let hidden = |ids: Tensor<2, Int>| {
            let hidden = decoder.hidden(ids).narrow(0, 0, 1).narrow(1, 0, 3);
            hidden.into_data().as_slice::<f32>().unwrap().to_vec()
        };
        let alone = hidden(Tensor::from_data([[5, 6, 7]], &device));
        let among = hidden(Tensor::from_data([[5, 6, 7, 8], [1, 2, 3, 4]], &device));
        for (a, b) in alone.iter().zip(&among) {
            assert!((a - b).abs() < 1e-5, "{a} became {b}");
        }
    }
}
