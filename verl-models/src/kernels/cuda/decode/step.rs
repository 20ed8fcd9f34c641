//! The kernels of a step, in their order.
//!
//! A layer is five kernels: the norms are parts of the products around them. Up to 16 rows a product norms what it reads;
//! with more, the product that adds to the residual stream leaves it weighed, with its squares, for the next one. While
//! memory would be idle, kernels bring the weights of later ones into the L2 cache.

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::super::launch::{CudaKernel, Source};
use super::super::product::{
    AHEAD_ROWS, Ahead, Input, Into, Joined, Projection, Weighed, hands_over, project,
    project_normed,
};
use super::super::tensor::{CubeTensor, short_element};
use super::super::{mlp, norm, rows};
use super::{Buffers, DeviceDecoder, Layer};
use crate::decoder::DecoderConfig;

static ATTENTION: Source = Source::new(include_str!("../attention_decode.cu"));

/// Blocks of attention with the kernel's own tiles that run at once.
const RESIDENT_BLOCKS: usize = 6 * 132;

/// A norm of the residual stream.
#[derive(Clone, Copy)]
struct Norm<'a> {
    gain: &'a CubeTensor,
    /// The kernel before may have left what it needs: not behind the embedding.
    follows_sum: bool,
}

impl DeviceDecoder {
    pub(super) fn launch_step(&self) {
        let Buffers {
            qkv, mixed, inner, ..
        } = &self.buffers;
        self.embed();
        for (at, layer) in self.layers.iter().enumerate() {
            let (gain, weight) = match self.layers.get(at + 1) {
                Some(next) => (&next.input_norm, next.qkv.first()),
                None => (&self.last_norm, self.head.first()),
            };
            let input_norm = Norm {
                gain: &layer.input_norm,
                follows_sum: at > 0,
            };
            let mlp_norm = Norm {
                gain: &layer.mlp_norm,
                follows_sum: true,
            };
            // Each kernel brings a weight that is read one, two or three kernels later, so that memory is never idle long.
            let [gates, ups] = [layer.gate_up.first(), layer.gate_up.last()];
            let output = layer.output.first();
            self.multiply(input_norm, &layer.qkv, (qkv, Into::Product), output);
            self.attend(layer, self.ahead(gates));
            self.add((mixed, &layer.output), &layer.mlp_norm, ups);
            let down = layer.down.first();
            match &self.buffers.wide {
                Some(wide) => {
                    self.multiply(mlp_norm, &layer.gate_up, (wide, Into::Product), down);
                    mlp::joined_into(wide, inner);
                }
                None => self.multiply(mlp_norm, &layer.gate_up, (inner, Into::Swiglu), down),
            }
            self.add((inner, &layer.down), gain, weight);
        }
        self.score();
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

    fn ahead<'a>(&self, weight: &'a CubeTensor) -> Option<Ahead<'a>> {
        (self.sizes.rows <= AHEAD_ROWS).then_some(Ahead { weight })
    }

    fn hands_over(&self) -> bool {
        hands_over(self.dtype, self.sizes.rows)
    }

    /// The norm of the residual stream, if the kernel before left what it takes.
    fn weighed_input(&self, follows_sum: bool) -> Option<Input<'_>> {
        let Buffers {
            normed, squares, ..
        } = &self.buffers;
        let input = Input::Weighed {
            x: normed,
            squares,
            epsilon: self.config.norm_epsilon,
        };
        (follows_sum && self.hands_over()).then_some(input)
    }

    /// The norm of the residual stream by itself.
    fn norm(&self, gain: &CubeTensor) {
        let Buffers {
            x, normed, scale, ..
        } = &self.buffers;
        norm::forward_into(x, gain, self.config.norm_epsilon, [normed, scale]);
    }

    /// The product of the normed residual stream with a weight.
    fn multiply(
        &self,
        Norm { gain, follows_sum }: Norm<'_>,
        weight: &Joined,
        (to, into): (&CubeTensor, Into),
        ahead: &CubeTensor,
    ) {
        let launch = |input: Input<'_>| {
            let plain = Projection::new(input, weight, to, into);
            let ahead = self.ahead(ahead);
            Projection { ahead, ..plain }.launch()
        };
        if let Some(input) = self.weighed_input(follows_sum) {
            launch(input);
            return;
        }
        let Buffers { x, normed, .. } = &self.buffers;
        let epsilon = self.config.norm_epsilon;
        if !launch(Input::Normed { x, gain, epsilon }) {
            self.norm(gain);
            launch(Input::Plain(normed));
        }
    }

    /// Adds a product to the residual stream, which `gain` is the next to norm.
    fn add(&self, (x, weight): (&CubeTensor, &Joined), gain: &CubeTensor, ahead: &CubeTensor) {
        let Buffers {
            x: stream,
            normed,
            squares,
            ..
        } = &self.buffers;
        if self.dtype == DType::F32 {
            project(x, weight.first(), stream, Into::Sum);
            return;
        }
        let weighed = Weighed {
            gain,
            to: normed,
            squares,
        };
        Projection {
            weighed: self.hands_over().then_some(weighed),
            ahead: self.ahead(ahead),
            ..Projection::new(Input::Plain(x), weight, stream, Into::Sum)
        }
        .launch();
    }

    /// The logits.
    fn score(&self) {
        let Buffers {
            x, normed, logits, ..
        } = &self.buffers;
        if let Some(input) = self.weighed_input(true) {
            Projection::new(input, &self.head, logits, Into::Product).launch();
            return;
        }
        let (head, norm) = (
            self.head.first(),
            (&self.last_norm, self.config.norm_epsilon),
        );
        if !project_normed(x, norm, head, logits, Into::Product) {
            self.norm(&self.last_norm);
            project(normed, head, logits, Into::Product);
        }
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

    /// Tokens of a warp's tile, where it is not what the kernel chooses: smaller ones let more blocks run at once.
    fn tile_tokens(&self) -> Option<usize> {
        let heads = self.config.heads;
        let blocks = self.sizes.rows * heads.key_value;
        let group = heads.query / heads.key_value;
        let narrow = self.dtype == DType::BF16 && heads.dim.is_multiple_of(16) && heads.dim <= 64;
        (narrow && group <= 8 && blocks > RESIDENT_BLOCKS).then_some(16)
    }

    /// Appends keys and values of the new tokens and attends.
    fn attend(&self, layer: &Layer, ahead: Option<Ahead<'_>>) {
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
        let mut buffers = vec![
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
        ];
        let mut scalars = vec![
            scale.to_bits(),
            self.config.norm_epsilon.to_bits(),
            self.blocks as u64,
        ];
        if let Some(ahead) = &ahead {
            buffers.push(&ahead.weight.handle);
            scalars.push(ahead.bytes());
        }
        let mut kernel = self.attention_kernel("attention_decode_step", 128);
        if let Some(tokens) = self.tile_tokens() {
            kernel = kernel.define("WARP_TOKENS", tokens);
        }
        kernel
            .define("QKV_BIAS", u8::from(layer.bias.is_some()))
            .define("QK_NORM", u8::from(layer.head_norms.is_some()))
            .define("CLUSTER", cluster)
            .define("PREFETCH", u8::from(ahead.is_some()))
            .launch(
                &qkv.client,
                [heads.key_value * tiles, self.sizes.rows, cluster].map(|size| size as u32),
                &buffers,
                scalars,
            );
    }

    /// A kernel of `attention_decode.cu` for this decoder.
    pub(super) fn attention_kernel(&self, entry: &'static str, block: u32) -> CudaKernel {
        let heads = self.config.heads;
        CudaKernel::new(&ATTENTION, entry, block)
            .define("ELEMENT", short_element(self.dtype))
            .define("HEAD_DIM", heads.dim)
            .define("QUERY_HEADS", heads.query)
            .define("KEY_HEADS", heads.key_value)
    }
}
