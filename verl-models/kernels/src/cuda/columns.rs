//! Launches of `columns.cu`.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, access, dense, element, empty};

static SOURCE: Source =
    Source::with_prefix(include_str!("rowwise.cuh"), include_str!("columns.cu"));

const THREADS: usize = 256;
/// Most stripes of rows.
const MAX_STRIPES: usize = 64;
/// Rows that a block reads in parallel.
const LINES: usize = THREADS / 32;

/// Sums of the columns in f32: `[N, W]` -> `[W]`.
pub(crate) fn sums(x: CubeTensor) -> CubeTensor {
    let x = dense(x);
    let dtype = x.dtype();
    let [rows, width] = x.shape().dims();
    let stripes = rows.div_ceil(4 * LINES).clamp(1, MAX_STRIPES);
    let parts = empty(&x, [stripes, width], DType::F32);
    let y = empty(&x, [width], DType::F32);
    let kernel = |entry| {
        CudaKernel::new(&SOURCE, entry, THREADS as u32)
            .define("ELEMENT", element(dtype))
            .define("WIDTH", width)
    };
    let groups = width.div_ceil(32 * access(dtype, width));
    // SAFETY: `x` is dense, `parts` has a row for each stripe, and WIDTH and the grid are those of these shapes.
    unsafe {
        kernel("column_parts").launch(
            &x.client,
            [groups as u32, stripes as u32, 1],
            &[&x.handle, &parts.handle],
            vec![rows as u64],
        );
    }
    // SAFETY: `parts` has `stripes` rows of WIDTH numbers, and `y` one.
    unsafe {
        kernel("column_sums").launch(
            &x.client,
            [width.div_ceil(THREADS) as u32, 1, 1],
            &[&parts.handle, &y.handle],
            vec![stripes as u64],
        );
    }
    y
}
