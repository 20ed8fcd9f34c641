//! Launches of `norm.cu`.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, access, cast, dense, element, empty};

static SOURCE: Source = Source::with_prefix(include_str!("rowwise.cuh"), include_str!("norm.cu"));

const THREADS: usize = 256;

/// Rows of a block, in accordance with the kernel's division of threads.
fn rows_of_block(dtype: DType, width: usize) -> usize {
    let pieces = width / access(dtype, width);
    let mut lanes = 1;
    while lanes < 32 && lanes < pieces {
        lanes *= 2;
    }
    while lanes < THREADS && lanes * 32 < width {
        lanes *= 2;
    }
    THREADS / lanes
}

fn kernel(entry: &'static str, dtype: DType, width: usize, block: usize) -> CudaKernel {
    CudaKernel::new(&SOURCE, entry, block as u32)
        .define("ELEMENT", element(dtype))
        .define("WIDTH", width)
}

/// The norm and 1 / sqrt(mean(x²) + ε) of each row: `[N, D]`, `[N]` in f32.
pub(crate) fn forward(x: CubeTensor, weight: CubeTensor, epsilon: f64) -> (CubeTensor, CubeTensor) {
    let dtype = x.dtype();
    let (x, weight) = (dense(x), dense(cast(weight, dtype)));
    let [rows, width] = x.shape().dims();
    let y = empty(&x, [rows, width], dtype);
    let scale = empty(&x, [rows], DType::F32);
    forward_into(&x, &weight, epsilon, [&y, &scale]);
    (y, scale)
}

/// [`forward`] of dense tensors into existing buffers.
pub(crate) fn forward_into(
    x: &CubeTensor,
    weight: &CubeTensor,
    epsilon: f64,
    [y, scale]: [&CubeTensor; 2],
) {
    let dtype = x.dtype();
    let [rows, width] = x.shape().dims();
    let grid = rows.div_ceil(rows_of_block(dtype, width)).max(1);
    // SAFETY: `y` has the shape of `x`, `weight` a number for each column and `scale` one for each row, as the
    // callers state.
    unsafe {
        kernel("rms_norm", dtype, width, THREADS).launch(
            &x.client,
            [grid as u32, 1, 1],
            &[&x.handle, &weight.handle, &y.handle, &scale.handle],
            vec![rows as u64, epsilon.to_bits()],
        );
    }
}

/// Gradients for `x` in its dtype, and for `weight` in f32; `past` is a gradient that reaches `x` around the norm.
pub(crate) fn backward(
    x: CubeTensor,
    weight: CubeTensor,
    scale: CubeTensor,
    gradient: CubeTensor,
    past: Option<CubeTensor>,
) -> [CubeTensor; 2] {
    let dtype = x.dtype();
    let (x, weight) = (dense(x), dense(cast(weight, dtype)));
    let gradient = dense(cast(gradient, dtype));
    let [rows, width] = x.shape().dims();
    let processors = x.client.properties().hardware.num_streaming_multiprocessors;
    let most = 2 * processors.unwrap_or(64) as usize;
    let blocks = rows.div_ceil(rows_of_block(dtype, width)).clamp(1, most);
    let dx = empty(&x, [rows, width], dtype);
    let partial = empty(&x, [blocks, width], DType::F32);
    let dw = empty(&x, [width], DType::F32);
    let past = past.map(|past| dense(cast(past, dtype)));
    let mut buffers = vec![&x.handle, &weight.handle, &scale.handle, &gradient.handle];
    buffers.extend(past.iter().map(|past| &past.handle));
    buffers.extend([&dx.handle, &partial.handle]);
    let entry = match past {
        Some(_) => "rms_norm_backward_add",
        None => "rms_norm_backward",
    };
    // SAFETY: all matrices have the shape of `x`, `weight` has a number for each column, `scale` one for each row
    // and `partial` a row for each block; `past` is among the buffers if the entry reads it.
    unsafe {
        kernel(entry, dtype, width, THREADS).launch(
            &x.client,
            [blocks as u32, 1, 1],
            &buffers,
            // The scale already includes the epsilon.
            vec![rows as u64, 0],
        );
    }
    // SAFETY: `partial` has `blocks` rows of the width of `dw`.
    unsafe {
        kernel("rms_norm_weight_gradient", dtype, width, 1024).launch(
            &x.client,
            [width.div_ceil(32) as u32, 1, 1],
            &[&partial.handle, &dw.handle],
            vec![blocks as u64, 0],
        );
    }
    [dx, dw]
}
