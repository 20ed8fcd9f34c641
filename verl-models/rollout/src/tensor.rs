//! The decoder for a rollout on a device: tensor operations whose shapes do not change during the rollout.
//!
//! All slots are computed in every step, including free ones, and attention covers the entire cache, with absent tokens
//! masked: so the kernels are the same for any contents of the slots, and a step can be captured. Positions, cache rows
//! and ids go to the device, logits come back; nothing else is transferred in a step.

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use verl_decoder::blocks::attention::{HIDDEN, Projected, attend, causal_mask};
use verl_decoder::blocks::rope::Rotation;
use verl_decoder::decoder::Decoder;

use super::batched::{Prompt, StepModel};
use super::eager::read;
use super::engine::RolloutError;

/// The cache length is a multiple of this many tokens, so that there are few kernels.
const LENGTH_STEP: usize = 64;

/// A [`Decoder`] with a cache on its device.
pub(crate) struct TensorDecoder {
    decoder: Decoder,
    device: Device,
    dtype: DType,
    layers: Vec<LayerCache>,
    /// Tokens of each slot; a free slot has none.
    lengths: Vec<usize>,
    /// Tokens that fit in a slot, `T`.
    capacity: usize,
}

/// Keys and values of a layer, `[slots, K, T, Dh]` each.
struct LayerCache {
    keys: Tensor<4>,
    values: Tensor<4>,
}

/// Keys and values of a prompt in a layer, `[1, K, P, Dh]` each.
pub(crate) struct LayerKeys {
    keys: Tensor<4>,
    values: Tensor<4>,
}

impl TensorDecoder {
    /// A cache for `slots` rows of at most `tokens` tokens. The bits of a row depend on `slots`, because products of
    /// other sizes run in other kernels: it must not depend on the number of requests.
    pub fn new(decoder: Decoder, slots: usize, tokens: usize) -> Self {
        let embedding = decoder.model.embed_tokens.weight.val();
        let (device, dtype) = (embedding.device(), embedding.dtype());
        let heads = decoder.config.heads;
        let capacity = tokens.next_multiple_of(LENGTH_STEP);
        let shape = [slots, heads.key_value, capacity, heads.dim];
        let zeros = || Tensor::zeros(shape, (&device, dtype));
        let layers = (0..decoder.config.layers).map(|_| LayerCache {
            keys: zeros(),
            values: zeros(),
        });
        TensorDecoder {
            layers: layers.collect(),
            lengths: vec![0; slots],
            capacity,
            device,
            dtype,
            decoder,
        }
    }

    /// Computes one prompt through all layers: `[1, P]`, on its own, so that its bits do not depend on others.
    fn prompt(&self, ids: &[u32]) -> Result<Prompt<Vec<LayerKeys>>, RolloutError> {
        let tokens = ids.len();
        let mut x = self.embed(ids.iter().map(|&id| id as i32).collect());
        let rotation = self.decoder.rope.leading(tokens, &self.device, x.dtype());
        let mask = causal_mask(tokens, &self.device);
        let mut kept = Vec::with_capacity(self.layers.len());
        for layer in &self.decoder.model.layers {
            let normed = layer.input_layernorm.forward(x.clone());
            let Projected {
                queries,
                keys,
                values,
            } = layer.self_attn.project(normed, [1, tokens], &rotation);
            let mixed = attend(queries, keys.clone(), values.clone(), &mask);
            kept.push(LayerKeys { keys, values });
            x = layer.feed_forward(x + layer.self_attn.output(mixed));
        }
        let last = x.narrow(0, tokens - 1, 1);
        Ok(Prompt {
            keys: kept,
            logits: read(self.logits(last))?,
        })
    }

    /// `[N]` ids -> `[N, D]`.
    fn embed(&self, ids: Vec<i32>) -> Tensor<2> {
        let count = ids.len();
        let ids = TensorData::new(ids, [count]);
        let ids = Tensor::<1, Int>::from_data(ids, &self.device);
        self.decoder.model.embed_tokens.forward(ids)
    }

    /// `[N, D]` -> `[N, V]`.
    fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let head = match &self.decoder.lm_head {
            Some(head) => head.weight.val(),
            None => self.decoder.model.embed_tokens.weight.val(),
        };
        self.decoder.model.norm.forward(x).matmul(head.transpose())
    }

    /// Computes one token of every slot through all layers: `[slots, V]`.
    fn decode(&mut self, ids: Vec<i32>, places: &Places) -> Tensor<2> {
        let slots = self.lengths.len();
        let mut x = self.embed(ids);
        for (layer, cache) in self.decoder.model.layers.iter().zip(&mut self.layers) {
            let normed = layer.input_layernorm.forward(x.clone());
            let Projected {
                queries,
                keys,
                values,
            } = layer
                .self_attn
                .project(normed, [slots, 1], &places.rotation);
            write(&mut cache.keys, &places.rows, keys);
            write(&mut cache.values, &places.rows, values);
            let (keys, values) = (cache.keys.clone(), cache.values.clone());
            let mixed = attend(queries, keys, values, &places.mask);
            x = layer.feed_forward(x + layer.self_attn.output(mixed));
        }
        self.logits(x)
    }

    /// The positions of a step's tokens, as all layers need them.
    fn places(&self) -> Places {
        let (slots, capacity) = (self.lengths.len(), self.capacity);
        let heads = self.decoder.config.heads.key_value;
        let rows: Vec<i32> = (0..slots * heads)
            .map(|row| (row * capacity + self.lengths[row / heads]) as i32)
            .collect();
        let rows = TensorData::new(rows, [slots * heads]);
        let positions: Vec<i32> = self.lengths.iter().map(|&length| length as i32).collect();
        let positions = TensorData::new(positions, [slots, 1]);
        let positions = Tensor::<2, Int>::from_data(positions, &self.device);
        let all = Tensor::<1, Int>::arange(0..capacity as i64, &self.device);
        let later = all
            .reshape([1, 1, 1, capacity])
            .greater(positions.clone().reshape([slots, 1, 1, 1]));
        let mask = Tensor::zeros([slots, 1, 1, capacity], (&self.device, DType::F32));
        Places {
            rotation: self.decoder.rope.at(positions, capacity, self.dtype),
            rows: Tensor::from_data(rows, &self.device),
            mask: mask.mask_fill(later, HIDDEN),
        }
    }
}

/// The positions of a step's tokens.
struct Places {
    rotation: Rotation,
    /// Row of the flat cache `[slots·K·T, Dh]` that each head's new key takes: `[slots·K]`.
    rows: Tensor<1, Int>,
    /// `[slots, 1, 1, T]`.
    mask: Tensor<4>,
}

/// Writes one token of every slot and head into the cache, in place if the device can.
///
/// # Shapes
/// `cache`: `[slots, K, T, Dh]`; `new`: `[slots, K, 1, Dh]`
fn write(cache: &mut Tensor<4>, rows: &Tensor<1, Int>, new: Tensor<4>) {
    let shape = cache.dims();
    let [slots, heads, capacity, dim] = shape;
    cache.inplace(|cache| {
        cache
            .reshape([slots * heads * capacity, dim])
            .select_assign(
                0,
                rows.clone(),
                new.reshape([slots * heads, dim]),
                IndexingUpdateOp::Assign,
            )
            .reshape(shape)
    });
}

impl StepModel for TensorDecoder {
    type Keys = Vec<LayerKeys>;

    fn prefill(&mut self, prompts: &[&[u32]]) -> Result<Vec<Prompt<Self::Keys>>, RolloutError> {
        prompts.iter().map(|ids| self.prompt(ids)).collect()
    }

    fn occupy(&mut self, slot: usize, prompt: &Self::Keys) {
        for (cache, kept) in self.layers.iter_mut().zip(prompt) {
            for (cache, new) in [
                (&mut cache.keys, &kept.keys),
                (&mut cache.values, &kept.values),
            ] {
                let [_, heads, tokens, dim] = new.dims();
                let place = [slot..slot + 1, 0..heads, 0..tokens, 0..dim];
                cache.inplace(|cache| cache.slice_assign(place, new.clone()));
                self.lengths[slot] = tokens;
            }
        }
    }

    fn release(&mut self, slot: usize) {
        self.lengths[slot] = 0;
    }

    fn step(&mut self, ids: &[Option<u32>]) -> Result<Vec<f32>, RolloutError> {
        let id = |slot: usize| ids.get(slot).copied().flatten();
        let slots = self.lengths.len();
        let input = (0..slots).map(|slot| id(slot).unwrap_or(0) as i32);
        let places = self.places();
        let logits = read(self.decode(input.collect(), &places))?;
        let vocab = logits.len() / slots;
        let mut live = Vec::with_capacity(logits.len());
        for (slot, row) in logits.chunks_exact(vocab).enumerate() {
            if id(slot).is_some() {
                live.extend_from_slice(row);
                self.lengths[slot] += 1;
            }
        }
        Ok(live)
    }
}
