//! Inputs of the checks, and how results are compared.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use verl_decoder::parameters::visit_parameters;

use super::Violation;
use crate::model::ParameterGroup;
use crate::optim::{OptimizerConfig, Schedule};

/// Differences that count as rounding, relative to the largest value: matrix kernels add in a different order when the
/// sizes of a product change.
pub(super) const TOLERANCE: f32 = 1e-4;

/// Name and values of every parameter.
pub(super) fn weights<M: Module>(model: &M) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    visit_parameters(model, |name, _, read| {
        all.push((name.to_owned(), read().as_bytes().to_vec()));
    });
    all
}

/// `rows` sequences of `length` ids below `vocab` that differ from one another.
pub(super) fn sequences(rows: usize, length: usize, vocab: usize) -> Vec<Vec<u32>> {
    let id = |row: usize, at: usize| ((7 * row + 3 * at + at * at / 2 + 1) % vocab) as u32;
    (0..rows)
        .map(|row| (0..length).map(|at| id(row, at)).collect())
        .collect()
}

/// Sequences of one length as a tensor, `[B, S]`.
pub(super) fn ids(rows: &[Vec<u32>], device: &Device) -> Tensor<2, Int> {
    let flat: Vec<i32> = rows.iter().flatten().map(|&id| id as i32).collect();
    let shape = [rows.len(), rows.first().map_or(0, Vec::len)];
    Tensor::from_data(TensorData::new(flat, shape), device)
}

/// A violation of `rule` if the numbers differ by more than rounding.
pub(super) fn apart(
    rule: &'static str,
    what: &str,
    got: &[f32],
    want: &[f32],
) -> Option<Violation> {
    let largest = want.iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
    let apart = |(a, b): (&f32, &f32)| (a - b).abs() / largest;
    let difference = got.iter().zip(want).map(apart).fold(0.0, f32::max);
    let finite = got.iter().chain(want).all(|x| x.is_finite());
    let differ = got.len() != want.len() || !finite || difference > TOLERANCE;
    differ.then(|| Violation {
        rule,
        found: format!(
            "{what} differ by {difference:e} of the largest value {largest:e} (allowed: {TOLERANCE:e}), all finite: {finite}"
        ),
    })
}

/// Settings with which a single step changes every parameter that has a gradient.
pub(super) fn one_step() -> OptimizerConfig {
    OptimizerConfig {
        learning_rate: 1e-2,
        weight_decay: 0.0,
        max_grad_norm: None,
        schedule: Schedule::Constant { warmup_steps: 0 },
        ..OptimizerConfig::default()
    }
}

/// Trained parameters that a step did not change, and frozen ones that it did.
pub(super) fn unmoved<M: Module>(
    before: &M,
    after: &M,
    group: impl Fn(&str, usize) -> ParameterGroup,
) -> Vec<String> {
    let mut ranks = Vec::new();
    visit_parameters(before, |_, shape, _| ranks.push(shape.len()));
    let pairs = weights(before).into_iter().zip(weights(after));
    let each = pairs.zip(ranks);
    each.filter_map(|(((name, before), (_, after)), rank)| {
        let frozen = group(&name, rank).learning_rate_scale == 0.0;
        match (before == after, frozen) {
            (true, false) => Some(format!("a step did not change `{name}`")),
            (false, true) => Some(format!("`{name}` is frozen, but changed")),
            _ => None,
        }
    })
    .collect()
}
