//! Operands of a product, and how the copy engine fetches their tiles.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use cubecl::ir::FloatKind;
use cubecl::prelude::{
    OobFill, TensorMapFormat, TensorMapInterleave, TensorMapPrefetch, TensorMapSwizzle, TiledArgs,
};
use cubecl::server::{KernelResource, TensorMapBinding, TensorMapMeta};
use cubecl::zspace::{Shape, metadata::Metadata};

use super::super::tensor::{CubeTensor, dense};
use super::divisions::JOINT;
use super::is_hopper;

/// The memory layout of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Summed {
    /// `[M, K]`.
    Last,
    /// `[K, M]`.
    First,
}

impl Summed {
    pub(super) fn flag(self) -> u8 {
        u8::from(self == Summed::First)
    }
}

/// A matrix of a product, and its layout.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(super) matrix: CubeTensor,
    pub(super) summed: Summed,
}

impl Operand {
    /// A matrix whose rows are multiplied: `[M, K]`.
    pub fn rows(matrix: CubeTensor) -> Self {
        let summed = Summed::Last;
        Operand { matrix, summed }
    }

    /// A matrix whose columns are multiplied: `[K, M]`.
    pub fn columns(matrix: CubeTensor) -> Self {
        let summed = Summed::First;
        Operand { matrix, summed }
    }

    /// Outer size and terms.
    pub(super) fn sizes(&self) -> (usize, usize) {
        let [rows, columns] = self.matrix.shape().dims();
        match self.summed {
            Summed::Last => (rows, columns),
            Summed::First => (columns, rows),
        }
    }

    /// In contiguous memory.
    pub(super) fn dense(self) -> Self {
        Operand {
            matrix: dense(self.matrix),
            ..self
        }
    }
}

/// A weight `[N, K]` that consists of the rows of up to three matrices, which are not copied if kernels can read them
/// in place.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    matrices: Vec<CubeTensor>,
}

impl Joined {
    /// A single matrix.
    pub fn one(matrix: CubeTensor) -> Self {
        Joined::of(vec![matrix], true)
    }

    /// Stacked matrices, such as queries, keys and values.
    pub fn stacked(matrices: Vec<CubeTensor>) -> Self {
        let whole = |matrix: &CubeTensor| matrix.shape()[0].is_multiple_of(JOINT);
        let apart = matrices.iter().all(whole);
        Joined::of(matrices, apart)
    }

    /// Gates and ups, for [`Into::Swiglu`](super::Into::Swiglu) in bf16.
    pub fn halves(gates: CubeTensor, ups: CubeTensor) -> Self {
        Joined::of(vec![gates, ups], true)
    }

    fn of(matrices: Vec<CubeTensor>, apart: bool) -> Self {
        let readable = |m: &CubeTensor| m.dtype() == DType::BF16 && is_hopper(m);
        let matrices = match matrices.as_slice() {
            [_] => matrices,
            _ if apart && matrices.iter().all(readable) => matrices,
            _ => vec![dense(Cube::float_cat(matrices, 0))],
        };
        Joined { matrices }
    }

    pub(super) fn matrices(&self) -> &[CubeTensor] {
        &self.matrices
    }

    /// Rows and terms.
    pub(super) fn sizes(&self) -> [usize; 2] {
        let rows = self.matrices.iter().map(|matrix| matrix.shape()[0]).sum();
        [rows, self.first().shape()[1]]
    }

    /// The first matrix, which is the complete weight if it is the only one.
    pub fn first(&self) -> &CubeTensor {
        &self.matrices[0]
    }

    /// The positions of the stacked matrices, which have `rows` rows each: the matrix that contains each, and the
    /// offset in it in elements.
    pub fn places<const N: usize>(&self, rows: [usize; N]) -> [(&CubeTensor, usize); N] {
        let [_, terms] = self.sizes();
        std::array::from_fn(|at| match self.matrices.as_slice() {
            [one] => (one, rows[..at].iter().sum::<usize>() * terms),
            several => (&several[at], 0),
        })
    }

    /// Rows before the second matrix and before the third, if there are several.
    pub(super) fn firsts(&self) -> Vec<u64> {
        let rows = |count: usize| -> u64 {
            let before = self.matrices.iter().take(count);
            before.map(|matrix| matrix.shape()[0] as u64).sum()
        };
        match self.matrices.len() {
            1 => vec![],
            _ => vec![rows(1), rows(2)],
        }
    }
}

/// The box of an operand that the copy engine fetches at once: `rows` rows of a stage's terms if the terms come last,
/// 64 columns of them if they come first.
pub(super) fn tensor_map(
    operand: &CubeTensor,
    summed: Summed,
    rows: usize,
    terms: usize,
) -> KernelResource {
    let (tile, swizzle) = match summed {
        Summed::Last if terms == 32 => ([rows, terms], TensorMapSwizzle::B64),
        Summed::Last => ([rows, terms], TensorMapSwizzle::B128),
        Summed::First => ([terms, 64], TensorMapSwizzle::B128),
    };
    boxes(operand, tile, swizzle)
}

/// Boxes of a dense matrix of bf16.
pub(crate) fn boxes(
    matrix: &CubeTensor,
    tile: [usize; 2],
    swizzle: TensorMapSwizzle,
) -> KernelResource {
    let [outer, inner] = matrix.shape().dims();
    KernelResource::TensorMap(TensorMapBinding {
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
    })
}

/// A buffer among a kernel's parameters.
pub(super) fn buffer(tensor: &CubeTensor) -> KernelResource {
    KernelResource::Buffer(tensor.handle.clone().binding())
}
