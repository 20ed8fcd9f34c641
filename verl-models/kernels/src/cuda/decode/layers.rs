//! All layers of a step in one kernel, for decoders that it supports.
//!
//! The kernel finds the layers' tensors through a table of their addresses. cubecl moves live memory when it makes room
//! and before it records a graph, but never memory that is bound: the bindings live as long as the table. The kernel's
//! blocks wait for one another between the phases of a layer, so all of them have to run at once.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::DType;
use cubecl::prelude::TensorMapSwizzle;
use cubecl::server::{BufferBinding, Handle, KernelResource};

use super::super::launch::{CudaKernel, Source};
use super::super::probe::supports_large;
use super::super::product::{boxes, is_hopper};
use super::super::tensor::{CubeTensor, integers, short_element};
use super::{Buffers, DeviceDecoder, Layer};
use crate::layer_units::{LayerSizes, LayerUnits, MAX_ROWS, attention_parts};

static LAYERS: Source = Source::with_prefixes(
    [
        include_str!("../gemm_tile.cuh"),
        include_str!("../attention_decode.cu"),
        include_str!("../philox.cuh"),
    ],
    include_str!("../decode_layers.cu"),
);
static ADDRESSES: Source = Source::new(include_str!("../addresses.cu"));

/// Addresses of a layer in the table.
const ADDRESSES_OF_LAYER: usize = 16;
/// Block counts, before the counts of the rows.
const COUNTS: usize = 32;

/// Smallest number of rows in a tile for which the kernel makes shortlists.
const SHORTLISTED_ROWS: usize = 64;

/// Data of the kernel of all layers, besides a step's buffers.
pub(super) struct LayersKernel {
    sizes: LayerSizes,
    /// Blocks of a launch, one per multiprocessor.
    blocks: usize,
    /// Addresses of the layers' tensors.
    addresses: Handle,
    /// Bindings of these tensors: bound memory is not moved.
    _bound: Vec<BufferBinding>,
    _exclusive: Exclusive,
    /// Pieces of sums.
    pieces: Handle,
    /// Results of the groups that share a row's tokens.
    parts: Handle,
    /// Counts of blocks and groups that have arrived; zeros between launches.
    counts: Handle,
}

/// Ensures that only one decoder of the process has the kernel: if two ran at once on a GPU, their blocks could wait
/// for one another forever.
struct Exclusive;

static IN_USE: AtomicBool = AtomicBool::new(false);

impl Exclusive {
    fn take() -> Option<Self> {
        (!IN_USE.swap(true, Ordering::AcqRel)).then_some(Exclusive)
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        IN_USE.store(false, Ordering::Release);
    }
}

impl LayersKernel {
    /// Writes the table of addresses; `None` if the kernel does not support the decoder or another decoder has it.
    pub fn of(decoder: &DeviceDecoder) -> Option<Self> {
        let like = &decoder.embedding;
        let (client, shape) = (&like.client, &decoder.shape);
        let processors = client.properties().hardware.num_streaming_multiprocessors?;
        // Pairs of blocks share activations.
        let blocks = processors as usize / 2 * 2;
        let sizes = LayerSizes {
            width: shape.width,
            inner: shape.inner,
            heads: shape.heads,
        };
        let counts = [16, 32, 64, MAX_ROWS].map(|rows| rows.min(decoder.sizes.rows));
        let pieces = counts.into_iter().filter_map(|rows| {
            let units = LayerUnits::of(&sizes, rows, blocks)?;
            Some(rows * units.pieces(&sizes))
        });
        let pieces = pieces.max()?;
        if decoder.dtype != DType::BF16
            || decoder.layers.is_empty()
            || !is_hopper(like)
            || !supports_large(client)
        {
            return None;
        }
        let only = Exclusive::take()?;
        let tiles = MAX_ROWS.min(decoder.sizes.rows) * decoder.tiles_of_row();
        let part = decoder.tile_heads() * (shape.heads.dim + 2);
        let addresses = client.empty(decoder.layers.len() * ADDRESSES_OF_LAYER * 8);
        let mut bound = Vec::new();
        for (index, layer) in decoder.layers.iter().enumerate() {
            bound.extend(write_addresses(&addresses, index, layer, decoder));
        }
        Some(LayersKernel {
            sizes,
            blocks,
            addresses,
            _bound: bound,
            _exclusive: only,
            pieces: client.empty(pieces * 4),
            parts: client.empty(tiles.max(2 * blocks) * part * 4),
            counts: integers(like, &vec![0; COUNTS + tiles]),
        })
    }

    /// The kernel for this decoder's rows.
    fn kernel(&self, units: &LayerUnits, decoder: &DeviceDecoder) -> CudaKernel {
        let heads = self.sizes.heads;
        let tiles = decoder.rows * decoder.tiles_of_row();
        let first = &decoder.layers[0];
        let mut kernel = CudaKernel::new(&LAYERS, "decode_layers", 384)
            .define("BK", 64)
            .define("GROUPS", 1)
            .define("ELEMENT", short_element(decoder.dtype))
            .define("HEAD_DIM", heads.dim)
            .define("QUERY_HEADS", heads.query)
            .define("KEY_HEADS", heads.key_value)
            .define("QKV_BIAS", u8::from(first.bias.is_some()))
            .define("QK_NORM", u8::from(first.head_norms.is_some()))
            .define("LAYERS", decoder.layers.len())
            .define("WIDTH", self.sizes.width)
            .define("INNER", self.sizes.inner)
            .define("ROWS", units.rows)
            .define("BLOCKS", self.blocks)
            .define("QKV_TILE", units.qkv.tile)
            .define("QKV_PIECES", units.qkv.pieces)
            .define("OUT_TILE", units.output.tile)
            .define("OUT_PIECES", units.output.pieces)
            .define("MLP_TILE", units.mlp.tile)
            .define("DOWN_TILE", units.down.tile)
            .define("DOWN_PIECES", units.down.pieces)
            .define("ATTENTION_PARTS", attention_parts(tiles, self.blocks));
        if units.rows <= 64 {
            // All warps of a block attend to the same part of a row.
            kernel = kernel.define("WARPS", 8);
        }
        kernel
    }
}

/// Writes the addresses of a layer's tensors into the table; returns the bindings that keep them in place.
fn write_addresses(
    addresses: &Handle,
    index: usize,
    layer: &Layer,
    decoder: &DeviceDecoder,
) -> Vec<BufferBinding> {
    let (heads, inner) = (decoder.shape.heads, decoder.shape.inner);
    let keys = heads.key_width();
    let [(q, q_offset), (k, k_offset), (v, v_offset)] =
        layer.qkv.places([heads.query_width(), keys, keys]);
    let [(gate, gate_offset), (up, up_offset)] = layer.gate_up.places([inner, inner]);
    let [bias, q_norm, k_norm] = layer.optional(&decoder.embedding);
    let [cached_keys, cached_values] = &layer.cache;
    let tensors = [
        q,
        k,
        v,
        bias,
        q_norm,
        k_norm,
        &layer.input_norm,
        layer.output.first(),
        &layer.mlp_norm,
        gate,
        up,
        layer.down.first(),
        cached_keys,
        cached_values,
    ];
    // Bound before their addresses are read.
    let bound = tensors.map(|tensor| tensor.handle.clone().binding());
    let mut buffers = tensors.map(|tensor| &tensor.handle).to_vec();
    buffers.push(addresses);
    let scalars = [index, q_offset, k_offset, v_offset, gate_offset, up_offset];
    // SAFETY: the table has a row for each layer, and the offsets lie in the tensors; only their addresses are
    // taken.
    unsafe {
        CudaKernel::new(&ADDRESSES, "note_layer", 1).launch(
            &decoder.embedding.client,
            [1, 1, 1],
            &buffers,
            scalars.map(|number| number as u64).into(),
        );
    }
    bound.into()
}

impl DeviceDecoder {
    /// How the kernel divides a layer; `None` if it does not support this number of rows.
    fn layer_units(&self) -> Option<(&LayersKernel, LayerUnits)> {
        let layers = self.layers_kernel.as_ref()?;
        let units = LayerUnits::of(&layers.sizes, self.rows, layers.blocks)?;
        Some((layers, units))
    }

    /// Whether [`Self::launch_layers`] makes shortlists for the draw.
    pub(super) fn makes_shortlists(&self) -> bool {
        let units = self.layer_units();
        units.is_some_and(|(_, units)| units.rows >= SHORTLISTED_ROWS)
    }

    /// Computes all rows from their tokens to the norm after the last layer; false if the kernel does not support the
    /// step.
    pub(super) fn launch_layers(&self) -> bool {
        let Some((layers, units)) = self.layer_units() else {
            return false;
        };
        let Buffers {
            x,
            normed,
            mixed,
            inner,
            shortlist,
            shortlisted,
            ..
        } = &self.buffers;
        let map = |tensor: &CubeTensor| boxes(tensor, [units.rows / 2, 64], TensorMapSwizzle::B128);
        let buffers = [
            &layers.addresses,
            &self.embedding.handle,
            &self.book.token,
            &self.last_norm.handle,
            &self.cos.handle,
            &self.sin.handle,
            &self.book.table,
            &self.book.positions,
            &x.handle,
            &normed.handle,
            &mixed.handle,
            &inner.handle,
            &layers.pieces,
            &layers.parts,
            &layers.counts,
            &self.book.streams,
            &self.book.lengths,
            &self.book.states,
            shortlist,
            shortlisted,
        ];
        let mut resources = [normed, mixed, inner].map(map).to_vec();
        let buffers = buffers.map(|handle| KernelResource::Buffer(handle.clone().binding()));
        resources.extend(buffers);
        let mut scalars = vec![
            self.rows as u64,
            self.shape.vocab as u64,
            self.shortlist_limit(),
        ];
        scalars.extend(self.attention_scalars());
        // SAFETY: the buffers are those that `DeviceDecoder::new` and `LayersKernel::of` allocated for this decoder
        // and at least as many rows; the table's tensors stay where they are while `_bound` exists. As many blocks
        // as multiprocessors run at once, and no other decoder of the process launches the kernel.
        unsafe {
            layers.kernel(&units, self).launch_resources(
                &x.client,
                [layers.blocks as u32, 1, 1],
                resources,
                scalars,
            );
        }
        true
    }
}
