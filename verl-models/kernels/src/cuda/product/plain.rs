//! Launches of `product_f32.cu`.
//!
//! burn's own products of f32 round their operands to TF32 on tensor cores; these do not.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::tensor::DType;

use super::super::launch::{CudaKernel, Source};
use super::super::tensor::{CubeTensor, empty};
use super::operands::{Operand, Summed};

static PLAIN: Source = Source::new(include_str!("../product_f32.cu"));

/// Rows and columns of a tile.
const TILE: usize = 64;

/// The product of dense matrices with `[m, n, k]` rows, columns and terms.
pub(super) fn plain(a: &Operand, b: &Operand, [m, n, k]: [usize; 3]) -> CubeTensor {
    let c = empty(&a.matrix, [m, n], DType::F32);
    plain_into(a, b, &c, false, [m, n, k]);
    c
}

/// Writes the product of [`plain`] to `c`, or with `adds` adds it.
pub(super) fn plain_into(
    a: &Operand,
    b: &Operand,
    c: &CubeTensor,
    adds: bool,
    [m, n, k]: [usize; 3],
) {
    // Strides of rows and of terms.
    let strides = |summed: Summed, size: usize| match summed {
        Summed::Last => [k as u64, 1],
        Summed::First => [1, size as u64],
    };
    let [a_row, a_term] = strides(a.summed, m);
    let [b_row, b_term] = strides(b.summed, n);
    let tiles = |size: usize| size.div_ceil(TILE) as u32;
    // SAFETY: the operands are dense f32 matrices of these sizes, and `c` is one of `[m, n]`; the grid covers it in
    // tiles.
    unsafe {
        CudaKernel::new(&PLAIN, "product_f32", 256)
            .define("ADD", u8::from(adds))
            .launch(
                &a.matrix.client,
                [tiles(n), tiles(m), 1],
                &[&a.matrix.handle, &b.matrix.handle, &c.handle],
                vec![m as u64, n as u64, k as u64, a_row, a_term, b_row, b_term],
            );
    }
}
