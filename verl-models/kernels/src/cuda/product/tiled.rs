//! Launches of `gemm.cu` and `gemm_dyn.cu`.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use cubecl::prelude::TensorMapSwizzle;
use cubecl::server::KernelResource;

use super::super::launch::{CudaKernel, Source};
use super::super::probe::LARGE;
use super::super::tensor::{CubeTensor, empty};
use super::Into;
use super::divisions::{Deep, PROCESSORS, Tile};
use super::operands::{Joined, Summed, boxes, buffer, tensor_map};

static GEMM: Source =
    Source::with_prefix(include_str!("../gemm_tile.cuh"), include_str!("../gemm.cu"));
static DEEP: Source = Source::with_prefix(
    include_str!("../gemm_tile.cuh"),
    include_str!("../gemm_dyn.cu"),
);

/// A product that one launch computes: C (+)= A Bᵀ, and the kernels' additional operations.
pub(super) struct Tiled<'a> {
    pub a: &'a CubeTensor,
    pub b: &'a Joined,
    pub c: &'a CubeTensor,
    /// Layouts of A and of B.
    pub summed: [Summed; 2],
    pub into: Into,
    /// Rows and columns of C before gates and ups are combined, and terms.
    pub sizes: [usize; 3],
    /// Added to each row of C, `[N]` in bf16. Unsupported if the sum is in pieces.
    pub bias: Option<&'a CubeTensor>,
    /// The tensor to which [`Into::Sum`] adds the product, if that is not C. Unsupported if the sum is in pieces.
    pub sum: Option<&'a CubeTensor>,
}

impl<'a> Tiled<'a> {
    pub fn new(
        [a, c]: [&'a CubeTensor; 2],
        b: &'a Joined,
        summed: [Summed; 2],
        into: Into,
        sizes: [usize; 3],
    ) -> Self {
        Tiled {
            a,
            b,
            c,
            summed,
            into,
            sizes,
            bias: None,
            sum: None,
        }
    }

    fn halves(&self) -> usize {
        1 + usize::from(self.into == Into::Swiglu)
    }

    fn maps(&self, rows: usize, columns: usize, terms: usize) -> Vec<KernelResource> {
        let [a, b] = self.summed;
        let parts = self.b.matrices().iter();
        let parts = parts.map(|part| tensor_map(part, b, columns / self.halves(), terms));
        [tensor_map(self.a, a, rows, terms)]
            .into_iter()
            .chain(parts)
            .collect()
    }

    fn define(&self, kernel: CudaKernel, c: &CubeTensor, adds: bool) -> CudaKernel {
        kernel
            .define("CM", 1)
            .define("A_MN", self.summed[0].flag())
            .define("B_MN", self.summed[1].flag())
            .define("PARTS", self.b.matrices().len())
            .define("SWIGLU", self.halves() - 1)
            .define("BIAS", u8::from(self.bias.is_some()))
            .define("ADD", u8::from(adds))
            .define("OUT_F32", u8::from(c.dtype() == DType::F32))
    }

    /// Buffers after C, and scalars.
    fn remaining_arguments(
        &self,
        c: &CubeTensor,
        adds: bool,
        part: usize,
    ) -> (Vec<KernelResource>, Vec<u64>) {
        let [m, n, k] = self.sizes;
        let mut scalars: Vec<u64> = [m, n, k, part].map(|size| size as u64).into();
        scalars.extend(self.b.firsts());
        let mut buffers: Vec<KernelResource> = self.bias.map(buffer).into_iter().collect();
        if adds {
            buffers.push(buffer(self.sum.unwrap_or(c)));
        }
        (buffers, scalars)
    }

    /// Launches `gemm.cu` in pieces of `part` terms; several pieces go into a `c` of as many matrices.
    pub fn launch(&self, tile: Tile, part: usize) {
        let [m, n, k] = self.sizes;
        let adds = self.into == Into::Sum;
        let mut resources = self.maps(tile.rows, tile.columns, tile.terms);
        resources.push(buffer(self.c));
        let (buffers, scalars) = self.remaining_arguments(self.c, adds, part);
        resources.extend(buffers);
        let kernel = CudaKernel::new(&GEMM, "gemm", 128)
            .define("BM", tile.rows)
            .define("BN", tile.columns)
            .define("BK", tile.terms)
            .define("STAGES", tile.stages)
            .define("CS", tile.sharing)
            .define("BLOCKS_PER_SM", tile.blocks_per_processor);
        let blocks = tile.sharing * m.div_ceil(tile.rows) * n.div_ceil(tile.columns);
        let kernel = self.define(kernel, self.c, adds);
        // SAFETY: A, B and C are dense matrices of the sizes of this product, and C has a matrix for each piece;
        // boxes that leave an operand are zeros. The list of resources follows PARTS, BIAS and ADD.
        unsafe {
            kernel.launch_resources(
                &self.a.client,
                [blocks as u32, k.div_ceil(part) as u32, 1],
                resources,
                scalars,
            );
        }
    }

    /// Launches `gemm_dyn.cu`.
    pub fn launch_deep(&self, deep: Deep) {
        let [m, n, k] = self.sizes;
        let Deep {
            columns,
            sharing,
            part,
        } = deep;
        let pieces = k.div_ceil(part);
        let partial = (pieces > 1).then(|| empty(self.a, [pieces, m, n], DType::F32));
        let target = partial.as_ref().unwrap_or(self.c);
        let adds = self.into == Into::Sum && pieces == 1;
        let stored = target.dtype() == DType::BF16 && !adds && sharing == 1;
        let halves = self.halves();
        let kept = LARGE - 1024 - if stored { 256 * columns / halves } else { 0 };
        let b_columns = match self.summed[1] {
            Summed::Last => columns,
            Summed::First => columns.next_multiple_of(64),
        };
        let mut resources = self.maps(128, columns, 64);
        resources.push(if stored {
            boxes(target, [64, 32], TensorMapSwizzle::B64)
        } else {
            buffer(target)
        });
        let (buffers, scalars) = self.remaining_arguments(target, adds, part);
        resources.extend(buffers);
        let kernel = CudaKernel::new(&DEEP, "gemm", 384)
            .define("BM", 128)
            .define("BN", columns)
            .define("BK", 64)
            .define("STAGES", kept / (16_384 + 128 * b_columns))
            .define("CS", sharing)
            .define("STORE", u8::from(stored));
        let tiles = m.div_ceil(128) * n.div_ceil(columns) * pieces;
        let blocks = sharing * tiles.min(PROCESSORS / sharing);
        let kernel = self.define(kernel, target, adds);
        // SAFETY: as in `launch`; the pieces are in `partial` if there are several, and C is a tensor map if STORE
        // is 1.
        unsafe {
            kernel.launch_resources(&self.a.client, [blocks as u32, 1, 1], resources, scalars);
        }
        if let Some(partial) = partial {
            reduce(&partial, self.c, self.into == Into::Sum, [pieces, m * n]);
        }
    }
}

/// Writes the sum of the pieces to `c`, or with `adds` adds it.
pub(super) fn reduce(partial: &CubeTensor, c: &CubeTensor, adds: bool, [pieces, size]: [usize; 2]) {
    let mut buffers = vec![&partial.handle, &c.handle];
    if adds {
        buffers.push(&c.handle);
    }
    // SAFETY: `partial` has `pieces` matrices of `size` numbers, and `c` has `size`.
    unsafe {
        CudaKernel::new(&GEMM, "gemm_reduce", 256)
            .define("ADD", u8::from(adds))
            .define("OUT_F32", u8::from(c.dtype() == DType::F32))
            .launch(
                &partial.client,
                [size.div_ceil(1024).min(1 << 14) as u32, 1, 1],
                &buffers,
                vec![size as u64, pieces as u64],
            );
    }
}
