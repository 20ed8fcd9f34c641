//! Launches of `update.cu`: the optimiser on several parameters at once.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use cubecl::server::Handle;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, dense, empty, integers};
use crate::optimizer::AdamWScalars;

static SOURCE: Source = Source::new(include_str!("update.cu"));

const THREADS: u32 = 256;
/// Elements of a block.
const TASK: usize = 1 << 14;
/// Tensors of a launch.
const MAX_TENSORS: usize = 16;

/// An update of one parameter.
pub(crate) struct Update {
    /// Parameter, first and second moment: f32, of equal length.
    pub tensors: [CubeTensor; 3],
    pub gradient: CubeTensor,
    pub scalars: AdamWScalars,
}

/// The result of an update.
pub(crate) struct Updated {
    /// Parameter, first and second moment, updated in place if nothing else uses the buffers.
    pub tensors: [CubeTensor; 3],
    /// The parameter in bf16, if requested.
    pub weight: Option<CubeTensor>,
}

/// First tasks of some tensors, and the number of tasks.
fn tasks(lengths: impl Iterator<Item = usize>) -> (Vec<u64>, u64) {
    let mut end = 0;
    let starts = lengths.map(|length| {
        let start = end;
        end += length.div_ceil(TASK).max(1) as u64;
        start
    });
    (starts.collect(), end)
}

/// Updates parameters; those of one call share their rates of decay, ε and the factor on the gradient.
pub(crate) fn adamw(updates: Vec<Update>, cast: bool) -> Vec<Updated> {
    let mut updated = Vec::with_capacity(updates.len());
    let mut updates = updates.into_iter().peekable();
    while updates.peek().is_some() {
        updated.extend(launch(updates.by_ref().take(MAX_TENSORS).collect(), cast));
    }
    updated
}

fn launch(updates: Vec<Update>, cast: bool) -> Vec<Updated> {
    let updates: Vec<Update> = updates
        .into_iter()
        .map(|update| Update {
            tensors: update.tensors.map(dense),
            gradient: dense(update.gradient),
            scalars: update.scalars,
        })
        .collect();
    let length = |update: &Update| update.gradient.shape().num_elements();
    let results: Vec<Updated> = updates
        .iter()
        .map(|update| Updated {
            tensors: update.tensors.each_ref().map(|tensor| {
                if tensor.handle.can_mut() {
                    tensor.clone()
                } else {
                    empty(tensor, tensor.shape(), DType::F32)
                }
            }),
            weight: cast.then(|| {
                let shape = update.gradient.shape();
                empty(&update.gradient, shape, DType::BF16)
            }),
        })
        .collect();
    let buffers: Vec<&Handle> = updates
        .iter()
        .zip(&results)
        .flat_map(|(from, to)| {
            let operands = from.tensors.iter().chain([&from.gradient]);
            operands.chain(&to.tensors).chain(&to.weight)
        })
        .map(|tensor| &tensor.handle)
        .collect();
    let (starts, blocks) = tasks(updates.iter().map(length));
    let common = updates[0].scalars;
    let each = |of: fn(&AdamWScalars) -> f64| updates.iter().map(move |u| of(&u.scalars).to_bits());
    let scalars = [
        common.gradient_scale,
        common.beta1,
        common.beta2,
        common.epsilon,
    ]
    .map(f64::to_bits)
    .into_iter()
    .chain(starts)
    .chain(updates.iter().map(|update| length(update) as u64))
    .chain(each(|scalars| scalars.decay))
    .chain(each(|scalars| scalars.step_size))
    .chain(each(|scalars| scalars.second_correction));
    // SAFETY: COUNT updates follow one another, each with dense f32 tensors of its length and the same number of
    // results; a result is its operand or new, and the blocks are those of `tasks`.
    unsafe {
        CudaKernel::new(&SOURCE, "update", THREADS)
            .define("CAST", u8::from(cast))
            .define("COUNT", updates.len())
            .launch(
                &updates[0].gradient.client,
                [blocks as u32, 1, 1],
                &buffers,
                scalars.collect(),
            );
    }
    results
}

/// Σ x² of each of some f32 tensors, at least one, `[tensors]`.
pub(crate) fn sums_of_squares(tensors: Vec<CubeTensor>) -> CubeTensor {
    let tensors: Vec<CubeTensor> = tensors.into_iter().map(dense).collect();
    let length = |tensor: &CubeTensor| tensor.shape().num_elements();
    let (starts, all) = tasks(tensors.iter().map(length));
    let like = &tensors[0];
    let partial = like.client.empty(all as usize * size_of::<f64>());
    for (group, first) in tensors
        .chunks(MAX_TENSORS)
        .zip(starts.iter().step_by(MAX_TENSORS))
    {
        let (own, blocks) = tasks(group.iter().map(length));
        let buffers: Vec<&Handle> = group
            .iter()
            .map(|tensor| &tensor.handle)
            .chain([&partial])
            .collect();
        let scalars = [*first].into_iter().chain(own);
        let scalars = scalars.chain(group.iter().map(|tensor| length(tensor) as u64));
        // SAFETY: COUNT dense f32 tensors of the stated lengths; `partial` has a number for each block of all
        // groups, and this group's begin at `first`.
        unsafe {
            CudaKernel::new(&SOURCE, "squares", THREADS)
                .define("COUNT", group.len())
                .launch(
                    &like.client,
                    [blocks as u32, 1, 1],
                    &buffers,
                    scalars.collect(),
                );
        }
    }
    let ends: Vec<i32> = starts
        .into_iter()
        .chain([all])
        .map(|at| at as i32)
        .collect();
    let y = empty(like, [tensors.len()], DType::F32);
    // SAFETY: `ends` divides the numbers of `partial` among the tensors, and `y` has one for each.
    unsafe {
        CudaKernel::new(&SOURCE, "sums", THREADS).launch(
            &like.client,
            [tensors.len() as u32, 1, 1],
            &[&partial, &integers(like, &ends), &y.handle],
            vec![],
        );
    }
    y
}
