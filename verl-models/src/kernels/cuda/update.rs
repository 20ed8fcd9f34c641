//! Launches of `update.cu`: the optimiser on one parameter.

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, dense, empty, integers};
use crate::optim::kernels::AdamWScalars;

static SOURCE: Source = Source::new(include_str!("update.cu"));

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1 << 12;
const TASK: usize = 1 << 14;

/// Parameter, first and second moment after an update; in place where nobody else holds the buffers.
pub(crate) fn adamw(
    tensors: [CubeTensor; 3],
    gradient: CubeTensor,
    s: AdamWScalars,
) -> [CubeTensor; 3] {
    let tensors = tensors.map(dense);
    let gradient = dense(gradient);
    let n = gradient.shape().num_elements();
    let targets = tensors.each_ref().map(|tensor| {
        if tensor.handle.can_mut() {
            tensor.clone()
        } else {
            empty(tensor, tensor.shape(), DType::F32)
        }
    });
    let [p, m, v] = &tensors;
    let [p_out, m_out, v_out] = &targets;
    let scalars = [
        s.gradient_scale,
        s.beta1,
        s.beta2,
        s.decay,
        s.step_size,
        s.second_correction,
        s.epsilon,
    ];
    let scalars = [n as u64].into_iter().chain(scalars.map(f64::to_bits));
    let grid = n.div_ceil(THREADS).clamp(1, MOST_BLOCKS) as u32;
    CudaKernel::new(&SOURCE, "update", THREADS as u32).launch(
        &gradient.client,
        [grid, 1, 1],
        &[
            &p.handle,
            &m.handle,
            &v.handle,
            &gradient.handle,
            &p_out.handle,
            &m_out.handle,
            &v_out.handle,
        ],
        scalars.collect(),
    );
    targets
}

/// Σ x² of each of some f32 tensors, at least one, `[tensors]`.
pub(crate) fn sums_of_squares(tensors: Vec<CubeTensor>) -> CubeTensor {
    let tensors: Vec<CubeTensor> = tensors.into_iter().map(dense).collect();
    let mut starts = vec![0];
    for tensor in &tensors {
        let tasks = tensor.shape().num_elements().div_ceil(TASK).max(1);
        starts.push(starts[starts.len() - 1] + tasks as i32);
    }
    let like = &tensors[0];
    let all = starts[tensors.len()] as usize;
    let partial = like.client.empty(all * size_of::<f64>());
    for (tensor, tasks) in tensors.iter().zip(starts.windows(2)) {
        let n = tensor.shape().num_elements() as u64;
        CudaKernel::new(&SOURCE, "squares", THREADS as u32).launch(
            &like.client,
            [(tasks[1] - tasks[0]) as u32, 1, 1],
            &[&tensor.handle, &partial],
            vec![n, tasks[0] as u64],
        );
    }
    let y = empty(like, [tensors.len()], DType::F32);
    CudaKernel::new(&SOURCE, "sums", THREADS as u32).launch(
        &like.client,
        [tensors.len() as u32, 1, 1],
        &[&partial, &integers(like, &starts), &y.handle],
        vec![],
    );
    y
}
