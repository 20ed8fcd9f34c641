//! The kernels of a step, in order.
//!
//! If no kernel computes all layers ([`DeviceDecoder::launch_layers`]), a layer is five kernels for up to 16 rows,
//! where a product norms its input, and seven for more.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::super::launch::{CudaKernel, Source};
use super::super::product::{Input, Into, Joined, Projection};
use super::super::tensor::{CubeTensor, short_element};
use super::super::{mlp, norm, rows};
use super::{Buffers, DeviceDecoder, Layer};

static ATTENTION: Source = Source::new(include_str!("../attention_decode.cu"));

/// Blocks of attention, with the kernel's default tiles, that run at once.
const RESIDENT_BLOCKS: usize = 6 * 132;

impl DeviceDecoder {
    pub(super) fn launch_step(&self) {
        let Buffers { normed, logits, .. } = &self.buffers;
        if self.launch_layers() {
            let projection = Projection {
                input: Input::Plain(normed),
                weight: &self.head,
                to: logits,
                into: Into::Product,
            };
            projection.launch();
        } else {
            self.embed();
            for layer in &self.layers {
                self.launch_layer(layer);
            }
            self.multiply(&self.last_norm, &self.head, logits, Into::Product);
        }
        self.draw();
        self.advance();
    }

    fn launch_layer(&self, layer: &Layer) {
        let Buffers {
            qkv, mixed, inner, ..
        } = &self.buffers;
        self.multiply(&layer.input_norm, &layer.qkv, qkv, Into::Product);
        self.attend(layer);
        self.add(mixed, &layer.output);
        match &self.buffers.wide {
            Some(wide) => {
                self.multiply(&layer.mlp_norm, &layer.gate_up, wide, Into::Product);
                mlp::joined_into(wide, inner);
            }
            None => self.multiply(&layer.mlp_norm, &layer.gate_up, inner, Into::Swiglu),
        }
        self.add(inner, &layer.down);
    }

    fn embed(&self) {
        let [_, width] = self.embedding.shape().dims();
        rows::take_into(
            &self.embedding,
            &self.book.token,
            &self.buffers.x,
            [self.rows, width],
        );
    }

    /// The product of the normed residual stream with a weight.
    fn multiply(&self, gain: &CubeTensor, weight: &Joined, to: &CubeTensor, into: Into) {
        let Buffers {
            x, normed, scale, ..
        } = &self.buffers;
        let epsilon = self.epsilon();
        let launch = |input: Input<'_>| {
            let projection = Projection {
                input,
                weight,
                to,
                into,
            };
            projection.launch()
        };
        if !launch(Input::Normed { x, gain, epsilon }) {
            norm::forward_into(x, gain, epsilon, [normed, scale]);
            launch(Input::Plain(normed));
        }
    }

    /// Adds a product to the residual stream.
    fn add(&self, x: &CubeTensor, weight: &Joined) {
        let projection = Projection {
            input: Input::Plain(x),
            weight,
            to: &self.buffers.x,
            into: Into::Sum,
        };
        projection.launch();
    }

    /// Query heads that share a tile, in accordance with the kernel's division.
    pub(super) fn tile_heads(&self) -> usize {
        let heads = self.shape.heads;
        let plain = self.dtype == DType::F32 || !heads.dim.is_multiple_of(16) || heads.dim > 128;
        let group = heads.group();
        group.min(if plain { 8 } else { 16 })
    }

    /// Tiles of heads of a row.
    pub(super) fn tiles_of_row(&self) -> usize {
        let heads = self.shape.heads;
        let group = heads.group();
        heads.key_value * group.div_ceil(self.tile_heads())
    }

    /// Blocks that share the tokens of a row: a function of the number of rows only.
    fn cluster(&self) -> usize {
        match self.rows * self.tiles_of_row() {
            0..=31 => 8,
            32..=128 => 4,
            _ => 1,
        }
    }

    /// Tokens of a warp's tile, if different from the kernel's default: smaller tiles let more blocks run at once.
    fn tile_tokens(&self) -> Option<usize> {
        let heads = self.shape.heads;
        let blocks = self.rows * heads.key_value;
        let group = heads.group();
        let narrow = self.dtype == DType::BF16 && heads.dim.is_multiple_of(16) && heads.dim <= 64;
        (narrow && group <= 8 && blocks > RESIDENT_BLOCKS).then_some(16)
    }

    /// Appends keys and values of the new tokens and attends.
    fn attend(&self, layer: &Layer) {
        let cluster = self.cluster();
        let [bias, q_norm, k_norm] = layer.optional(&self.embedding);
        let [keys, values] = &layer.cache;
        let Buffers { qkv, mixed, .. } = &self.buffers;
        let buffers = [
            &qkv.handle,
            &bias.handle,
            &q_norm.handle,
            &k_norm.handle,
            &self.cos.handle,
            &self.sin.handle,
            &keys.handle,
            &values.handle,
            &self.book.table,
            &self.book.positions,
            &mixed.handle,
        ];
        let mut kernel = self.attention_kernel("attention_decode_step", 128);
        if let Some(tokens) = self.tile_tokens() {
            kernel = kernel.define("WARP_TOKENS", tokens);
        }
        kernel = kernel
            .define("QKV_BIAS", u8::from(layer.bias.is_some()))
            .define("QK_NORM", u8::from(layer.head_norms.is_some()))
            .define("CLUSTER", cluster);
        // SAFETY: `Buffers::new` and `Book::new` allocated the buffers for at least as many rows; the table
        // contains blocks of the pool, for which the caches have room, and rotations exist for all positions of a
        // table.
        unsafe {
            kernel.launch(
                &qkv.client,
                [self.tiles_of_row(), self.rows, cluster].map(|size| size as u32),
                &buffers,
                self.attention_scalars().into(),
            );
        }
    }

    /// Scale of the scores, epsilon of the norms, columns of the table of blocks.
    pub(super) fn attention_scalars(&self) -> [u64; 3] {
        let scale = 1.0 / (self.shape.heads.dim as f64).sqrt();
        let epsilon = self.epsilon();
        [scale.to_bits(), epsilon.to_bits(), self.blocks as u64]
    }

    /// A kernel of `attention_decode.cu` for this decoder.
    pub(super) fn attention_kernel(&self, entry: &'static str, block: u32) -> CudaKernel {
        let heads = self.shape.heads;
        CudaKernel::new(&ATTENTION, entry, block)
            .define("ELEMENT", short_element(self.dtype))
            .define("HEAD_DIM", heads.dim)
            .define("QUERY_HEADS", heads.query)
            .define("KEY_HEADS", heads.key_value)
    }
}
