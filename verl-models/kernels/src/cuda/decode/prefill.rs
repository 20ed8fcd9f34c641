//! Prompts: keys and values of all but the last token of each, before its rows take part in steps.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::Shape;
use cubecl::server::Handle;

use super::super::attention::Call;
use super::super::product::{gated_product, product_with_joined};
use super::super::tensor::{CubeTensor, dense, empty, integers};
use super::super::{norm, rows};
use super::{DeviceDecoder, Layer};
use crate::AttentionShape;
use crate::pool::BLOCK;

/// Prompt tokens that pass through the layers at once.
const PREFILL: usize = 16_384;

impl DeviceDecoder {
    /// Writes keys and values of prompts into the caches of the rows that begin with them.
    ///
    /// A prompt passes through the layers once, regardless of the number of its rows. Its last token is left to the
    /// first step.
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
        let heads = self.shape.heads;
        let (mut ids, mut slots, mut lengths, mut pairs) = (vec![], vec![], vec![], vec![]);
        for (prompt, rows) in prompts {
            let Some((&first, others)) = rows.split_first() else {
                continue;
            };
            let tokens = prompt.len() - 1;
            ids.extend(prompt[..tokens].iter().map(|&id| id as i32));
            slots.extend((0..tokens).map(|at| self.pool.slot(first, at)));
            lengths.push(tokens);
            for &row in others {
                let own = self
                    .pool
                    .row_blocks(first)
                    .iter()
                    .zip(self.pool.row_blocks(row));
                let filled = own.take(tokens.div_ceil(BLOCK));
                pairs.extend(filled.flat_map(|(&from, &to)| [from, to]));
            }
        }
        if ids.is_empty() {
            return;
        }
        let shape = AttentionShape {
            sequences: lengths.len(),
            tokens: lengths.iter().copied().max().unwrap_or(0),
            heads,
            segments: None,
        };
        let like = &self.embedding;
        let call = Call::packed(shape, &lengths, like);
        let (ids_handle, slots) = (integers(like, &ids), integers(like, &slots));
        let pairs_handle = integers(like, &pairs);
        let width = self.shape.width;
        let mut x = empty(like, [ids.len(), width], self.dtype);
        rows::take_into(like, &ids_handle, &x, [ids.len(), width]);
        let last = self.layers.len() - 1;
        for (at, layer) in self.layers.iter().enumerate() {
            let normed = norm::forward(x.clone(), layer.input_norm.clone(), self.epsilon()).0;
            let mut joined = product_with_joined(normed, &layer.qkv);
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
            x = Cube::float_add(x, product_with_joined(mixed, &layer.output));
            let normed = norm::forward(x.clone(), layer.mlp_norm.clone(), self.epsilon()).0;
            let inner = gated_product(normed, &layer.gate_up);
            x = Cube::float_add(x, product_with_joined(inner, &layer.down));
        }
    }

    /// Norms the query and key heads of a joined projection.
    fn norm_heads(&self, joined: CubeTensor, [q, k]: &[CubeTensor; 2]) -> CubeTensor {
        let heads = self.shape.heads;
        let [tokens, width] = joined.shape().dims();
        let (queries, keys) = (heads.query_width(), heads.key_width());
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
        let heads = self.shape.heads;
        let wide = 16 / self.dtype.size();
        let chunk = if heads.dim.is_multiple_of(wide) {
            wide
        } else {
            1
        };
        let pieces = tokens * heads.key_width() / chunk;
        let [keys, values] = &layer.cache;
        // SAFETY: keys and values have a row for each token, `slots` a number, and the slots are those of blocks of
        // the pool, for which the caches have room.
        unsafe {
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
    }

    fn copy(&self, layer: &Layer, pairs: &Handle, count: usize) {
        let [keys, values] = &layer.cache;
        // SAFETY: the pairs are blocks of the pool, for which the caches have room.
        unsafe {
            self.attention_kernel("kv_copy_blocks", 256).launch(
                &keys.client,
                [count as u32, 2, 1],
                &[pairs, &keys.handle, &values.handle],
                vec![],
            );
        }
    }
}
