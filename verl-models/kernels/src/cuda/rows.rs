//! Launches of `embed.cu`.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use cubecl::server::Handle;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, access, cast, dense, element, empty};

static SOURCE: Source = Source::with_prefix(include_str!("rowwise.cuh"), include_str!("embed.cu"));

const THREADS: usize = 256;
const EMBED_THREADS: u32 = 128;
const MAX_BLOCKS: usize = 1 << 15;

fn kernel(entry: &'static str, dtype: DType, width: usize, block: u32) -> CudaKernel {
    CudaKernel::new(&SOURCE, entry, block)
        .define("ELEMENT", element(dtype))
        .define("WIDTH", width)
}

fn grid(dtype: DType, rows: usize, width: usize) -> [u32; 3] {
    let pieces = rows * width / access(dtype, width);
    [pieces.div_ceil(THREADS).clamp(1, MAX_BLOCKS) as u32, 1, 1]
}

/// Rows of `table` selected by `index`.
pub(crate) fn take(table: CubeTensor, index: CubeTensor) -> CubeTensor {
    let dtype = table.dtype();
    let (table, index) = (dense(table), dense(index));
    let [rows, width] = table.shape().dims();
    let [count] = index.shape().dims();
    debug_assert!(rows > 0, "a table without rows");
    let y = empty(&table, [count, width], dtype);
    take_into(&table, &index.handle, &y, [count, width]);
    y
}

/// Rows of a dense `table` selected by `count` integers, into an existing buffer.
pub(crate) fn take_into(
    table: &CubeTensor,
    index: &Handle,
    y: &CubeTensor,
    [count, width]: [usize; 2],
) {
    let dtype = table.dtype();
    // SAFETY: `table` is dense, and `index` has `count` numbers and `y` as many rows, as the callers state; the
    // kernel reads no row that the table lacks.
    unsafe {
        kernel("take_rows", dtype, width, THREADS as u32).launch(
            &table.client,
            grid(dtype, count, width),
            &[&table.handle, index, &y.handle],
            vec![table.shape()[0] as u64, count as u64],
        );
    }
}

/// The gradient of a table of `rows` rows: in the gradient's dtype with `ascending`, which says that the index ascends,
/// else in f32.
pub(crate) fn take_backward(
    rows: usize,
    index: CubeTensor,
    ascending: bool,
    gradient: CubeTensor,
    dtype: DType,
) -> CubeTensor {
    let (gradient, index) = (dense(cast(gradient, dtype)), dense(index));
    let [count, width] = gradient.shape().dims();
    let scalars = vec![rows as u64, count as u64];
    if ascending {
        let dx = empty(&gradient, [rows, width], dtype);
        // SAFETY: the index has a number for each row of the gradient, and `dx` has `rows` rows; the kernel ignores
        // indices that are not among them.
        unsafe {
            kernel("take_rows_backward", dtype, width, THREADS as u32).launch(
                &gradient.client,
                grid(dtype, rows, width),
                &[&gradient.handle, &index.handle, &dx.handle],
                scalars,
            );
        }
        return dx;
    }
    // One dim, so that rows have no padding.
    let flat = Shape::new([rows * width]);
    let dw = Cube::float_zeros(flat, &gradient.device, FloatDType::F32);
    let dw = Cube::float_reshape(dw, Shape::new([rows, width]));
    // SAFETY: as above; the grid has a block for each number of the index.
    unsafe {
        kernel("embed_backward", dtype, width, EMBED_THREADS).launch(
            &gradient.client,
            [count as u32, 1, 1],
            &[&gradient.handle, &index.handle, &dw.handle],
            scalars,
        );
    }
    dw
}
