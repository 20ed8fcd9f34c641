//! All layers of a step in one kernel, where it takes the decoder.
//!
//! The kernel finds the layers' tensors through a table of their addresses. cubecl moves live memory when it makes room and
//! before it records a graph, but nothing that is bound: bindings are held for as long as the table is. The kernel's blocks
//! wait for one another between the phases of a layer, so all of them have to run at once.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::DType;
use cubecl::prelude::TensorMapSwizzle;
use cubecl::server::{BufferBinding, Handle, KernelResource};

use super::super::launch::{CudaKernel, Source};
use super::super::probe::takes_large;
use super::super::product::{boxes, is_hopper};
use super::super::tensor::{CubeTensor, integers, short_element};
use super::{Buffers, DeviceDecoder, Layer};
use crate::kernels::layer_units::{LayerSizes, LayerUnits, MOST_ROWS, attention_parts};

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
/// Counts of blocks, before those of the rows.
const COUNTS: usize = 32;

/// Rows of a tile from which on the kernel makes shortlists.
const SHORTLISTED_ROWS: usize = 64;

/// What the kernel of all layers needs besides a step's buffers.
pub(super) struct LayersKernel {
    sizes: LayerSizes,
    /// Blocks of a launch, one a multiprocessor.
    blocks: usize,
    /// Where the layers' tensors lie.
    addresses: Handle,
    /// Of these tensors: what is bound is not moved.
    _bound: Vec<BufferBinding>,
    _only: Only,
    /// Pieces of sums.
    pieces: Handle,
    /// What groups have that share a row's tokens.
    parts: Handle,
    /// Of blocks and groups that have come; zeros between launches.
    counts: Handle,
}

/// That no other decoder of the process has the kernel: blocks of two at once on a card could wait for one another for good.
struct Only;

static TAKEN: AtomicBool = AtomicBool::new(false);

impl Only {
    fn take() -> Option<Self> {
        (!TAKEN.swap(true, Ordering::AcqRel)).then_some(Only)
    }
}

impl Drop for Only {
    fn drop(&mut self) {
        TAKEN.store(false, Ordering::Release);
    }
}

impl LayersKernel {
    /// Notes where the layers lie; none where the kernel takes no step of this decoder or is another's.
    pub fn of(decoder: &DeviceDecoder) -> Option<Self> {
        let like = &decoder.embedding;
        let (client, config) = (&like.client, &decoder.config);
        let processors = client.properties().hardware.num_streaming_multiprocessors?;
        // Pairs of blocks share activations.
        let blocks = processors as usize / 2 * 2;
        let sizes = LayerSizes {
            width: config.hidden_size,
            inner: config.intermediate_size,
            heads: config.heads,
        };
        let counts = [16, 32, 64, MOST_ROWS].map(|rows| rows.min(decoder.sizes.rows));
        let pieces = counts.into_iter().filter_map(|rows| {
            let units = LayerUnits::of(&sizes, rows, blocks)?;
            Some(rows * units.pieces(&sizes))
        });
        let pieces = pieces.max()?;
        if decoder.dtype != DType::BF16
            || decoder.layers.is_empty()
            || !is_hopper(like)
            || !takes_large(client)
        {
            return None;
        }
        let only = Only::take()?;
        let tiles = MOST_ROWS.min(decoder.sizes.rows) * decoder.tiles_of_row();
        let part = decoder.tile_heads() * (config.heads.dim + 2);
        let addresses = client.empty(decoder.layers.len() * ADDRESSES_OF_LAYER * 8);
        let mut bound = Vec::new();
        for (index, layer) in decoder.layers.iter().enumerate() {
            bound.extend(note(&addresses, index, layer, decoder));
        }
        Some(LayersKernel {
            sizes,
            blocks,
            addresses,
            _bound: bound,
            _only: only,
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

/// Writes the addresses of a layer's tensors into the table; with what holds them in place.
fn note(
    addresses: &Handle,
    index: usize,
    layer: &Layer,
    decoder: &DeviceDecoder,
) -> Vec<BufferBinding> {
    let (heads, inner) = (decoder.config.heads, decoder.config.intermediate_size);
    let keys = heads.key_value * heads.dim;
    let [(q, q_offset), (k, k_offset), (v, v_offset)] =
        layer.qkv.places([heads.query * heads.dim, keys, keys]);
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
    // Bound before their addresses are taken.
    let bound = tensors.map(|tensor| tensor.handle.clone().binding());
    let mut buffers = tensors.map(|tensor| &tensor.handle).to_vec();
    buffers.push(addresses);
    let scalars = [index, q_offset, k_offset, v_offset, gate_offset, up_offset];
    CudaKernel::new(&ADDRESSES, "note_layer", 1).launch(
        &decoder.embedding.client,
        [1, 1, 1],
        &buffers,
        scalars.map(|number| number as u64).into(),
    );
    bound.into()
}

impl DeviceDecoder {
    /// How the kernel divides a layer; none where it takes no step of so many rows.
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

    /// Takes all rows from their tokens to the norm behind the last layer; false where the kernel takes no such step.
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
            self.config.vocab_size as u64,
            self.shortlist_limit(),
        ];
        scalars.extend(self.attention_scalars());
        layers.kernel(&units, self).launch_resources(
            &x.client,
            [layers.blocks as u32, 1, 1],
            resources,
            scalars,
        );
        true
    }
}
