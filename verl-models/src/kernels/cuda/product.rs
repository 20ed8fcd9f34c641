//! Matrix products: launches of `gemm_dyn.cu` and `gemm.cu` in bf16 on Hopper, of `product_f32.cu` in f32.
//!
//! burn's own products of f32 round their operands to TF32 on tensor cores; these do not.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use cubecl::ir::FloatKind;
use cubecl::prelude::{
    OobFill, TensorMapFormat, TensorMapInterleave, TensorMapPrefetch, TensorMapSwizzle, TiledArgs,
};
use cubecl::server::{KernelResource, TensorMapBinding, TensorMapMeta};
use cubecl::zspace::{Shape, metadata::Metadata};

use super::launch::{CudaKernel, Source};
use super::probe::{LARGE, takes_large};
use super::tensor::{CubeTensor, cast, dense, empty};

static GEMM: Source = Source::with_prefix(include_str!("gemm_tile.cuh"), include_str!("gemm.cu"));
static DEEP: Source =
    Source::with_prefix(include_str!("gemm_tile.cuh"), include_str!("gemm_dyn.cu"));
static SKINNY: Source = Source::new(include_str!("gemm_skinny.cu"));
static PLAIN: Source = Source::new(include_str!("product_f32.cu"));

/// How `gemm.cu` divides a product.
#[derive(Debug, Clone, Copy)]
struct Tile {
    rows: usize,
    columns: usize,
    /// Terms of a stage, and stages.
    terms: usize,
    stages: usize,
    /// Blocks of a cluster that share a tile of B.
    cluster: usize,
    /// Blocks of a cluster that share a sum.
    sharing: usize,
    blocks_per_processor: usize,
}

impl Tile {
    /// For the rows of a decoding step, within 48 KiB.
    fn of_few(m: usize, [n, k]: [usize; 2], swiglu: bool) -> Self {
        let mut tile = if m <= 64 { FEW } else { SOME };
        let columns = if swiglu {
            tile.columns / 2
        } else {
            tile.columns
        };
        let blocks = m.div_ceil(tile.rows) * n.div_ceil(tile.columns);
        let sharing = |share: &usize| {
            blocks * share <= 2 * PROCESSORS
                && columns.is_multiple_of(8 * share)
                && k / share >= 128
        };
        tile.sharing = [8, 4, 2].into_iter().find(sharing).unwrap_or(1);
        tile
    }

    /// For the rows of a decoding step, with rings as deep as were measured best.
    fn of_some(m: usize, [n, k]: [usize; 2], swiglu: bool) -> Self {
        let rows = if m <= 64 { 64 } else { 128 };
        let deep = |columns, stages, sharing, blocks_per_processor| Tile {
            rows,
            columns,
            terms: 64,
            stages,
            cluster: 1,
            sharing,
            blocks_per_processor,
        };
        match (n, k, rows) {
            (4096.., _, 64) => deep(64, 6, 1, 2),
            (4096.., _, _) => deep(64, 4, 1, 2),
            // Half of the columns are ups, too few to be shared.
            _ if swiglu => deep(64, 4, 1, 2),
            (_, 2049.., 64) => deep(64, 10, 8, 1),
            (_, 2049.., _) => deep(64, 8, 8, 1),
            _ => deep(32, 4, if k >= 512 { 4 } else { 1 }, 1),
        }
    }
}

/// For many rows.
const WIDE: Tile = Tile {
    rows: 128,
    columns: 128,
    terms: 32,
    stages: 2,
    cluster: 1,
    sharing: 1,
    blocks_per_processor: 3,
};

/// For up to 64 rows.
const FEW: Tile = Tile {
    rows: 64,
    columns: 64,
    terms: 64,
    stages: 2,
    cluster: 1,
    sharing: 1,
    blocks_per_processor: 4,
};

/// For up to some hundred rows.
const SOME: Tile = Tile {
    rows: 128,
    columns: 64,
    terms: 32,
    stages: 3,
    cluster: 1,
    sharing: 1,
    blocks_per_processor: 4,
};

/// Multiprocessors of a Hopper GPU.
const PROCESSORS: usize = 132;
/// Blocks that run at once.
const FULL: usize = 3 * PROCESSORS;
/// Rows and columns of a tile of `product_f32.cu`.
const PLAIN_TILE: usize = 64;

/// How an operand lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Summed {
    /// `[M, K]`.
    Last,
    /// `[K, M]`.
    First,
}

impl Summed {
    /// Outer size and terms of an operand.
    fn sizes(self, operand: &CubeTensor) -> (usize, usize) {
        let [rows, columns] = operand.shape().dims();
        match self {
            Summed::Last => (rows, columns),
            Summed::First => (columns, rows),
        }
    }

    fn flag(self) -> u8 {
        u8::from(self == Summed::First)
    }
}

/// C\[m, n\] = Σ_k A\[m, k\] B\[n, k\], in `out`: the dtype of A, or f32.
pub(crate) fn product(
    a: CubeTensor,
    a_summed: Summed,
    b: CubeTensor,
    b_summed: Summed,
    out: DType,
) -> CubeTensor {
    added(None, [(a, a_summed), (b, b_summed)], out, Split::Idle)
}

/// x Wᵀ as [`product`], without splitting sums: the bits of a row do not depend on the number of rows.
pub(crate) fn product_of_each_row(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let dtype = x.dtype();
    let operands = [(x, Summed::Last), (weight, Summed::Last)];
    added(None, operands, dtype, Split::Never)
}

/// `sum` (or zeros) plus [`product`], in f32. The buffer of `sum` is written to.
pub(crate) fn product_into(
    sum: Option<CubeTensor>,
    a: CubeTensor,
    a_summed: Summed,
    b: CubeTensor,
    b_summed: Summed,
) -> CubeTensor {
    let operands = [(a, a_summed), (b, b_summed)];
    added(sum, operands, DType::F32, Split::Idle)
}

/// When sums are split into pieces, which are added up by a second kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    Never,
    /// Where tiles leave most of the GPU idle, and where each piece is long.
    Idle,
}

fn added(
    sum: Option<CubeTensor>,
    [(a, a_summed), (b, b_summed)]: [(CubeTensor, Summed); 2],
    out: DType,
    split: Split,
) -> CubeTensor {
    let dtype = a.dtype();
    let b = cast(b, dtype);
    let ((m, k), (n, other)) = (a_summed.sizes(&a), b_summed.sizes(&b));
    debug_assert_eq!(k, other, "operands differ in what is summed");
    let fits = m > 0 && n > 0 && k > 0;
    let inner = |tensor: &CubeTensor| tensor.shape().dims::<2>()[1];
    let aligned = [inner(&a), inner(&b), n].iter().all(|size| size % 8 == 0);
    if fits && dtype == DType::BF16 && aligned && is_hopper(&a) {
        let operands = [(dense(a), a_summed), (dense(b), b_summed)];
        return tiled(sum, operands, [m, n, k], out, split);
    }
    let c = if fits && dtype == DType::F32 {
        plain((dense(a), a_summed), (dense(b), b_summed), [m, n, k])
    } else {
        let a = match a_summed {
            Summed::Last => a,
            Summed::First => Cube::float_transpose(a),
        };
        let b = match b_summed {
            Summed::Last => Cube::float_transpose(b),
            Summed::First => b,
        };
        dense(cast(Cube::float_matmul(a, b), out))
    };
    match sum {
        Some(sum) => dense(Cube::float_add(sum, c)),
        None => c,
    }
}

fn is_hopper(tensor: &CubeTensor) -> bool {
    let identity = &tensor.client.properties().identity;
    identity.fingerprint.contains("sm90")
}

fn plain(
    (a, a_summed): (CubeTensor, Summed),
    (b, b_summed): (CubeTensor, Summed),
    [m, n, k]: [usize; 3],
) -> CubeTensor {
    let c = empty(&a, [m, n], DType::F32);
    plain_into((&a, a_summed), (&b, b_summed), &c, false, [m, n, k]);
    c
}

fn plain_into(
    (a, a_summed): (&CubeTensor, Summed),
    (b, b_summed): (&CubeTensor, Summed),
    c: &CubeTensor,
    adds: bool,
    [m, n, k]: [usize; 3],
) {
    // Distance of rows and of terms.
    let strides = |summed: Summed, size: usize| match summed {
        Summed::Last => [k as u64, 1],
        Summed::First => [1, size as u64],
    };
    let [a_row, a_term] = strides(a_summed, m);
    let [b_row, b_term] = strides(b_summed, n);
    let tiles = |size: usize| size.div_ceil(PLAIN_TILE) as u32;
    CudaKernel::new(&PLAIN, "product_f32", 256)
        .define("ADD", u8::from(adds))
        .launch(
            &a.client,
            [tiles(n), tiles(m), 1],
            &[&a.handle, &b.handle, &c.handle],
            vec![m as u64, n as u64, k as u64, a_row, a_term, b_row, b_term],
        );
}

fn tiled(
    sum: Option<CubeTensor>,
    [(a, a_summed), (b, b_summed)]: [(CubeTensor, Summed); 2],
    [m, n, k]: [usize; 3],
    out: DType,
    split: Split,
) -> CubeTensor {
    let adds = sum.is_some();
    let c = sum.unwrap_or_else(|| empty(&a, [m, n], out));
    if m >= DEEP_ROWS && takes_large(&a.client) {
        let summed = [a_summed, b_summed];
        let after = After {
            sum: adds.then_some(&c),
            ..After::default()
        };
        deep((&a, &b, &c), summed, after, [m, n, k], split);
        return c;
    }
    let layout = Layout {
        tile: WIDE,
        summed: [a_summed, b_summed],
        swiglu: false,
    };
    let pieces = match split {
        Split::Never => 1,
        Split::Idle => (FULL / layout.blocks(m, n)).clamp(1, (k / (16 * WIDE.terms)).max(1)),
    };
    let part = k.div_ceil(pieces).next_multiple_of(WIDE.terms);
    let pieces = k.div_ceil(part);
    if pieces == 1 {
        layout.launch(&a, &b, &c, adds, [m, n, k, k]);
        return c;
    }
    let partial = empty(&a, [pieces, m, n], DType::F32);
    layout.launch(&a, &b, &partial, false, [m, n, k, part]);
    reduce(&partial, &c, adds, out == DType::F32, [pieces, m * n]);
    c
}

/// Rows from which `gemm_dyn.cu` is faster.
const DEEP_ROWS: usize = 256;

/// What is done to a product before it is stored.
#[derive(Debug, Clone, Copy, Default)]
struct After<'a> {
    /// Added to each row: `[N]` in bf16. Not with a sum in pieces.
    bias: Option<&'a CubeTensor>,
    /// Added, in the dtype and shape of the result; the result itself where a sum is in pieces.
    sum: Option<&'a CubeTensor>,
    /// The result is silu(gate) · up of a product with gates and ups.
    swiglu: bool,
}

/// x Wᵀ, plus `bias` in each row and plus `sum`, in bf16; none where this takes more than one kernel.
///
/// # Shapes
/// `x`: `[M, K]`; `weight`: `[N, K]`; `bias`: `[N]`; `sum` and result: `[M, N]`
pub(crate) fn product_and(
    x: &CubeTensor,
    weight: &CubeTensor,
    bias: Option<&CubeTensor>,
    sum: Option<&CubeTensor>,
) -> Option<CubeTensor> {
    let ([m, k], [n, _]) = (x.shape().dims::<2>(), weight.shape().dims::<2>());
    let operands = [Some(x), Some(weight), bias, sum];
    let takes = m >= DEEP_ROWS
        && [n, k].iter().all(|size| size.is_multiple_of(8))
        && operands
            .into_iter()
            .flatten()
            .all(|operand| operand.dtype() == DType::BF16)
        && is_hopper(x)
        && takes_large(&x.client);
    takes.then(|| {
        let c = empty(x, [m, n], DType::BF16);
        let after = After {
            bias,
            sum,
            swiglu: false,
        };
        deep(
            (x, weight, &c),
            [Summed::Last; 2],
            after,
            [m, n, k],
            Split::Never,
        );
        c
    })
}

/// C becomes the product of A and B and what comes after it, by `gemm_dyn.cu`.
fn deep(
    (a, b, c): (&CubeTensor, &CubeTensor, &CubeTensor),
    summed: [Summed; 2],
    after: After<'_>,
    [m, n, k]: [usize; 3],
    split: Split,
) {
    let (adds, halves) = (after.sum.is_some(), 1 + usize::from(after.swiglu));
    let wide = c.dtype() == DType::F32;
    // Columns of a tile: those for which the last wave of tiles wastes least.
    let waves = |columns: usize| (m.div_ceil(128) * n.div_ceil(columns)).div_ceil(PROCESSORS);
    let few = (halves == 1 && n.is_multiple_of(224)).then_some(224);
    let columns = [256, 192, 128]
        .into_iter()
        .chain(few)
        .min_by_key(|&columns| waves(columns) * (columns + 32))
        .unwrap_or(256);
    let tiles = m.div_ceil(128) * n.div_ceil(columns);
    let pieces = match split {
        Split::Never => 1,
        Split::Idle => (PROCESSORS / tiles).clamp(1, (k / 512).max(1)),
    };
    let part = k.div_ceil(pieces).next_multiple_of(64);
    let pieces = k.div_ceil(part);
    let partial = (pieces > 1).then(|| empty(a, [pieces, m, n], DType::F32));
    let target = partial.as_ref().unwrap_or(c);
    let adds_here = adds && pieces == 1;
    let stored = target.dtype() == DType::BF16 && !adds_here;
    let kept = LARGE - 1024 - if stored { 256 * columns / halves } else { 0 };
    let held = match summed[1] {
        Summed::Last => columns,
        Summed::First => columns.next_multiple_of(64),
    };
    let stages = kept / (16_384 + 128 * held);
    let mut resources: Vec<KernelResource> = vec![
        KernelResource::TensorMap(tensor_map(a, summed[0], 128, 64)),
        KernelResource::TensorMap(tensor_map(b, summed[1], columns / halves, 64)),
    ];
    let buffer = || KernelResource::Buffer(target.handle.clone().binding());
    if stored {
        resources.push(KernelResource::TensorMap(boxes(
            c,
            [64, 32],
            TensorMapSwizzle::B64,
        )));
    } else {
        resources.push(buffer());
    }
    let operand = |of: &CubeTensor| KernelResource::Buffer(of.handle.clone().binding());
    resources.extend(after.bias.map(operand));
    resources.extend(after.sum.filter(|_| adds_here).map(operand));
    CudaKernel::new(&DEEP, "gemm", 384)
        .define("BM", 128)
        .define("BN", columns)
        .define("BK", 64)
        .define("STAGES", stages)
        .define("CM", 1)
        .define("SWIGLU", halves - 1)
        .define("A_MN", summed[0].flag())
        .define("B_MN", summed[1].flag())
        .define("BIAS", u8::from(after.bias.is_some()))
        .define("ADD", u8::from(adds_here))
        .define("OUT_F32", u8::from(target.dtype() == DType::F32))
        .launch_resources(
            &a.client,
            [(tiles * pieces).min(PROCESSORS) as u32, 1, 1],
            resources,
            [m, n, k, part].map(|size| size as u64).into(),
        );
    if let Some(partial) = partial {
        reduce(&partial, c, adds, wide, [pieces, m * n]);
    }
}

/// C (+)= the sum of the pieces.
fn reduce(
    partial: &CubeTensor,
    c: &CubeTensor,
    adds: bool,
    wide: bool,
    [pieces, size]: [usize; 2],
) {
    let mut buffers = vec![&partial.handle, &c.handle];
    if adds {
        buffers.push(&c.handle);
    }
    CudaKernel::new(&GEMM, "gemm_reduce", 256)
        .define("ADD", u8::from(adds))
        .define("OUT_F32", u8::from(wide))
        .launch(
            &partial.client,
            [size.div_ceil(1024).min(1 << 14) as u32, 1, 1],
            &buffers,
            vec![size as u64, pieces as u64],
        );
}

/// A configuration of `gemm.cu`.
struct Layout {
    tile: Tile,
    /// Of A and of B.
    summed: [Summed; 2],
    /// B is gate and up, and C is silu(gate) · up.
    swiglu: bool,
}

impl Layout {
    /// Blocks for one piece of the sum.
    fn blocks(&self, m: usize, n: usize) -> usize {
        let Tile {
            rows,
            columns,
            cluster,
            sharing,
            ..
        } = self.tile;
        cluster * sharing * m.div_ceil(cluster * rows) * n.div_ceil(columns)
    }

    fn kernel(&self, entry: &'static str, block: u32, adds: bool, out: DType) -> CudaKernel {
        let tile = self.tile;
        CudaKernel::new(&GEMM, entry, block)
            .define("BM", tile.rows)
            .define("BN", tile.columns)
            .define("BK", tile.terms)
            .define("STAGES", tile.stages)
            .define("CM", tile.cluster)
            .define("CS", tile.sharing)
            .define("BLOCKS_PER_SM", tile.blocks_per_processor)
            .define("A_MN", self.summed[0].flag())
            .define("B_MN", self.summed[1].flag())
            .define("SWIGLU", u8::from(self.swiglu))
            .define("ADD", u8::from(adds))
            .define("OUT_F32", u8::from(out == DType::F32))
    }

    /// C (+)= the product, in the dtype of `c`; `part` is the terms of a piece.
    fn launch(
        &self,
        a: &CubeTensor,
        b: &CubeTensor,
        c: &CubeTensor,
        adds: bool,
        [m, n, k, part]: [usize; 4],
    ) {
        let tile = self.tile;
        let shares = tile.cluster.max(1 + usize::from(self.swiglu));
        let maps = [
            tensor_map(a, self.summed[0], tile.rows, tile.terms),
            tensor_map(b, self.summed[1], tile.columns / shares, tile.terms),
        ];
        let mut resources: Vec<KernelResource> = maps.map(KernelResource::TensorMap).into();
        let buffer = || KernelResource::Buffer(c.handle.clone().binding());
        resources.push(buffer());
        if adds {
            resources.push(buffer());
        }
        let pieces = k.div_ceil(part);
        self.kernel("gemm", 128, adds, c.dtype()).launch_resources(
            &a.client,
            [self.blocks(m, n) as u32, pieces as u32, 1],
            resources,
            [m, n, k, part].map(|size| size as u64).into(),
        );
    }
}

/// What the copy engine brings of an operand at once: `rows` rows of a stage's terms where the terms come last, 64 columns
/// of them where they come first.
fn tensor_map(operand: &CubeTensor, summed: Summed, rows: usize, terms: usize) -> TensorMapBinding {
    let (tile, swizzle) = match summed {
        Summed::Last if terms == 32 => ([rows, terms], TensorMapSwizzle::B64),
        Summed::Last => ([rows, terms], TensorMapSwizzle::B128),
        Summed::First => ([terms, 64], TensorMapSwizzle::B128),
    };
    boxes(operand, tile, swizzle)
}

/// Boxes of a dense matrix of bf16.
fn boxes(matrix: &CubeTensor, tile: [usize; 2], swizzle: TensorMapSwizzle) -> TensorMapBinding {
    let [outer, inner] = matrix.shape().dims();
    TensorMapBinding {
        binding: matrix.handle.clone().binding(),
        map: TensorMapMeta {
            format: TensorMapFormat::Tiled(TiledArgs {
                tile_size: Shape::new(tile),
            }),
            metadata: Metadata::new([outer, inner], [inner, 1]),
            elem_stride: [1, 1].into(),
            interleave: TensorMapInterleave::None,
            swizzle,
            prefetch: TensorMapPrefetch::B128,
            oob_fill: OobFill::Zero,
            elem_ty: FloatKind::BF16.into(),
        },
    }
}

/// Whether [`project`] takes operands of this dtype with rows of these widths.
pub(crate) fn projects(like: &CubeTensor, widths: &[usize]) -> bool {
    let aligned = widths.iter().all(|width| width.is_multiple_of(8));
    like.dtype() == DType::F32 || like.dtype() == DType::BF16 && aligned && is_hopper(like)
}

/// What [`project`] makes of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Into {
    /// The product.
    Product,
    /// What is there, plus the product.
    Sum,
    /// silu(gate) · up of a product with gates and ups.
    Swiglu,
}

/// How `gemm_skinny.cu` divides a product.
#[derive(Debug, Clone, Copy)]
struct Skinny {
    /// Tiles of 16 rows of the weight in a block.
    tiles: usize,
    /// Warps that share a tile's sum.
    warps: usize,
    /// Loads of a warp under way.
    ahead: usize,
    /// Blocks of a cluster that share a sum.
    sharing: usize,
    blocks_per_processor: usize,
    /// Blocks at most; without a limit each takes one group of tiles.
    most: Option<usize>,
}

/// Rows of a product that `gemm_skinny.cu` takes.
const SKINNY_ROWS: usize = 16;

impl Skinny {
    /// The configuration that was measured best for a weight of about this size; none where its parts do not fit.
    fn of(rows: usize, [n, k]: [usize; 2], into: Into) -> Option<Self> {
        if rows > SKINNY_ROWS || into == Into::Swiglu && !n.is_multiple_of(16) {
            return None;
        }
        let skinny = |tiles, warps, ahead, sharing, blocks_per_processor, most| Skinny {
            tiles,
            warps,
            ahead,
            sharing,
            blocks_per_processor,
            most,
        };
        let found = if n >= 1 << 16 {
            skinny(2, 4, 4, 1, 3, Some(3 * PROCESSORS))
        } else if n >= 4096 || into == Into::Swiglu {
            skinny(5, 4, 7, 1, 1, None)
        } else if k > 2048 {
            skinny(1, 5, 4, 8, 4, None)
        } else {
            skinny(1, 7, 4, 1, 1, None)
        };
        // Rows of X wait in shared memory where a block has several tiles.
        let slices = k.div_ceil(32).div_ceil(found.sharing);
        let staged = if found.tiles > 1 {
            SKINNY_ROWS * (slices | 1) * 64
        } else {
            16
        };
        let partial = (found.warps - 1) * found.tiles * (SKINNY_ROWS / 8) * 512;
        (staged + partial <= 44 << 10).then_some(found)
    }

    fn launch(
        self,
        (x, norm): (&CubeTensor, Option<(&CubeTensor, f64)>),
        weight: &CubeTensor,
        to: &CubeTensor,
        into: Into,
    ) {
        let ([m, k], [n, _]) = (x.shape().dims::<2>(), weight.shape().dims::<2>());
        let groups = n.div_ceil(16 * self.tiles);
        let blocks = self.sharing * self.most.map_or(groups, |most| groups.min(most));
        let kernel = CudaKernel::new(
            &SKINNY,
            "gemm_skinny",
            (32 * self.tiles * self.warps) as u32,
        )
        .define("K_DIM", k)
        .define("TOKENS", SKINNY_ROWS)
        .define("ROW_TILES", self.tiles)
        .define("K_WARPS", self.warps)
        .define("AHEAD", self.ahead)
        .define("CS", self.sharing)
        .define("BLOCKS_PER_SM", self.blocks_per_processor)
        .define("ONCE", u8::from(self.most.is_none()))
        .define("NORM", u8::from(norm.is_some()))
        .define("ADD", u8::from(into == Into::Sum))
        .define("SWIGLU", u8::from(into == Into::Swiglu));
        let mut buffers = vec![&x.handle, &weight.handle, &to.handle];
        let mut scalars = vec![m as u64, n as u64];
        if let Some((gain, epsilon)) = norm {
            buffers.push(&gain.handle);
            scalars.push(epsilon.to_bits());
        }
        if into == Into::Sum {
            buffers.push(&to.handle);
        }
        kernel.launch(&x.client, [blocks as u32, 1, 1], &buffers, scalars);
    }
}

/// [`project`] of the norm of `x`, in one kernel; false where there is none.
pub(crate) fn project_normed(
    x: &CubeTensor,
    (gain, epsilon): (&CubeTensor, f64),
    weight: &CubeTensor,
    to: &CubeTensor,
    into: Into,
) -> bool {
    if x.dtype() != DType::BF16 {
        return false;
    }
    let skinny = Skinny::of(x.shape()[0], weight.shape().dims(), into);
    if let Some(skinny) = skinny {
        skinny.launch((x, Some((gain, epsilon))), weight, to, into);
    }
    skinny.is_some()
}

/// A product of the few rows of a decoding step with a weight, `[N, K]`, into a buffer that is there: nothing is allocated,
/// so that it can be captured. The bits of a row do not depend on what the other rows hold.
pub(crate) fn project(x: &CubeTensor, weight: &CubeTensor, to: &CubeTensor, into: Into) {
    let ([m, k], [n, _]) = (x.shape().dims::<2>(), weight.shape().dims::<2>());
    if x.dtype() == DType::BF16
        && let Some(skinny) = Skinny::of(m, [n, k], into)
    {
        skinny.launch((x, None), weight, to, into);
        return;
    }
    if x.dtype() == DType::F32 {
        debug_assert_ne!(
            into,
            Into::Swiglu,
            "a kernel of its own takes gates and ups in f32"
        );
        plain_into(
            (x, Summed::Last),
            (weight, Summed::Last),
            to,
            into == Into::Sum,
            [m, n, k],
        );
        return;
    }
    let swiglu = into == Into::Swiglu;
    let large = takes_large(&x.client);
    if large && m > 128 {
        let after = After {
            sum: (into == Into::Sum).then_some(to),
            swiglu,
            ..After::default()
        };
        let summed = [Summed::Last; 2];
        deep((x, weight, to), summed, after, [m, n, k], Split::Never);
        return;
    }
    let tile = if large {
        Tile::of_some(m, [n, k], swiglu)
    } else {
        Tile::of_few(m, [n, k], swiglu)
    };
    let layout = Layout {
        tile,
        summed: [Summed::Last; 2],
        swiglu,
    };
    layout.launch(x, weight, to, into == Into::Sum, [m, n, k, k]);
}
