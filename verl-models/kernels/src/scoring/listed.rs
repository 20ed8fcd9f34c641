//! Log-probs of several tokens at each position, and of the most probable ones.
//!
//! Dims besides those of [`scoring`](super): `K` tokens of the vocabulary per position.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Dispatch, Flex, backend_extension};
use burn::tensor::{DType, Int, Tensor, TensorData};
use rayon::prelude::*;

use crate::device::DeviceKind;
use crate::vector::exponentials;
use crate::{Products, linear_or_composed};

use super::{Extras, Inputs, Statistics, TokenWeights, backward};

/// Log-probs of the listed `ids` at each position, under softmax(hidden · headᵀ / temperature), in nats.
///
/// log π_{n,k} = z_{n,id_{n,k}} − log Σ_v exp z_{n,v},  z = hidden · headᵀ / temperature.
///
/// Differentiable in `hidden` and `head`, with the memory of [`linear_log_probs`](super::linear_log_probs): the forward
/// pass processes `chunk` tokens at a time and saves K + 2 numbers per token, the backward pass recomputes the logits,
/// a block of the vocabulary at a time:
///
/// ∂L/∂logits = (Σ_k g_k onehot(id_k) − p Σ_k g_k) / temperature.
///
/// # Shapes
/// `hidden`: `[N, D]`; `head`: `[V, D]`; `ids`: `[N, K]`, each below `V`; result: `[N, K]`
/// # Panics
/// If shapes disagree or `N` is 0, which is a caller's bug.
pub fn listed_log_probs(
    hidden: Tensor<2>,
    head: Tensor<2>,
    ids: Tensor<2, Int>,
    temperature: f64,
    chunk: usize,
) -> Tensor<2> {
    let [n, d] = hidden.dims();
    assert_eq!(d, head.dims()[1], "hidden and head differ in width");
    assert_eq!(n, ids.dims()[0], "hidden and ids differ in tokens");
    assert!(n > 0, "no token to score");
    Tensor::from_dispatch(<Dispatch as ListedScoringOps>::listed_scores(
        hidden.into_dispatch(),
        head.into_dispatch(),
        ids.into_dispatch(),
        temperature,
        chunk.max(1),
    ))
}

/// The `k` most probable tokens at each position under softmax(hidden · headᵀ / temperature), most probable first, and
/// their log-probs in nats. Logits of `chunk` tokens are in memory at a time. The backend chooses among equally
/// probable tokens.
///
/// The product is computed in the dtype of the weights; everything after it is f32, or f64 if the weights are f64.
///
/// # Shapes
/// `hidden`: `[N, D]`; `head`: `[V, D]`; results: `[N, K]`
/// # Panics
/// If shapes disagree, `N` is 0 or `k` is above `V`, which is a caller's bug.
pub fn top_log_probs(
    hidden: Tensor<2>,
    head: Tensor<2>,
    k: usize,
    temperature: f64,
    chunk: usize,
) -> (Tensor<2, Int>, Tensor<2>) {
    let [n, d] = hidden.dims();
    assert!(n > 0, "no token to score");
    let wide = match hidden.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let parts = (0..n).step_by(chunk.max(1)).map(|start| {
        let end = n.min(start + chunk.max(1));
        let rows = hidden.clone().slice([start..end, 0..d]);
        let logits = linear_or_composed(rows, head.clone())
            .cast(wide)
            .div_scalar(temperature);
        let below = logits.clone() - logits.max_dim(1);
        let log_sums = log_sums(below.clone());
        let (best, ids) = below.topk_with_indices(k, 1);
        (ids, best - log_sums)
    });
    let (ids, log_probs) = parts.unzip::<_, _, Vec<_>, Vec<_>>();
    (Tensor::cat(ids, 0), Tensor::cat(log_probs, 0))
}

/// log Σ_v e^(logit − largest) of each row, without a gradient. In f32 on the CPU the order of the sum depends only on
/// V, and exponentials and logarithm come from this crate and `libm` rather than from the C library.
///
/// # Shapes
/// `below`: `[N, V]`, logits minus the largest of their row; result: `[N, 1]`
pub fn log_sums(below: Tensor<2>) -> Tensor<2> {
    let device = below.device();
    let [n, v] = below.dims();
    if !DeviceKind::of(&device).is_host() || below.dtype() != DType::F32 {
        return below.exp().sum_dim(1).log();
    }
    let data = below.into_data();
    let Ok(rows) = data.as_slice::<f32>() else {
        unreachable!("dtype was checked")
    };
    let row = |out: &mut Vec<f32>, row: &[f32]| libm::log(exponentials(row, 0.0, 1.0, out)) as f32;
    let sums: Vec<f32> = rows.par_chunks(v).map_init(Vec::new, row).collect();
    Tensor::from_data(TensorData::new(sums, [n, 1]), &device)
}

/// Operations of a backend that score lists of tokens; every backend gets them from its primitive operations.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub trait ListedScoringOps: Products {
    /// The result of [`listed_log_probs`].
    ///
    /// # Shapes
    /// result: `[N, K]`
    fn listed_scores(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        ids: IntTensor<Self>,
        temperature: f64,
        chunk: usize,
    ) -> FloatTensor<Self> {
        let inputs = inputs::<Self>(hidden, head, ids, temperature, chunk);
        inputs.forward(Extras::NONE).log_probs
    }
}

impl ListedScoringOps for Flex {}

#[cfg(feature = "cuda")]
impl ListedScoringOps for burn::backend::Cube {}

impl<B: ListedScoringOps, C: CheckpointStrategy> ListedScoringOps for Autodiff<B, C> {
    fn listed_scores(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        ids: IntTensor<Self>,
        temperature: f64,
        chunk: usize,
    ) -> FloatTensor<Self> {
        let (hidden, hidden_node) = hidden.into_parts();
        let (head, head_node) = head.into_parts();
        let inputs = inputs::<B>(hidden, head, ids, temperature, chunk);
        let statistics = inputs.forward(Extras::NONE);
        let scores = statistics.log_probs.clone();
        match ListedScores
            .prepare::<C>([hidden_node, head_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((inputs, statistics), scores),
            OpsKind::UnTracked(prep) => prep.finish(scores),
        }
    }
}

fn inputs<B: Products>(
    hidden: FloatTensor<B>,
    head: FloatTensor<B>,
    targets: IntTensor<B>,
    temperature: f64,
    chunk: usize,
) -> Inputs<B> {
    Inputs {
        hidden,
        head,
        targets,
        temperature,
        chunk,
    }
}

/// The backward step of [`ListedScoringOps::listed_scores`].
#[derive(Debug)]
struct ListedScores;

impl<B: Products> Backward<B, 2> for ListedScores {
    type State = (Inputs<B>, Statistics<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        backward(ops, grads, |gradient, inputs, _| {
            let target = B::float_div_scalar(gradient, inputs.temperature.into());
            TokenWeights {
                constant: B::float_neg(B::float_sum_dim(target.clone(), 1)),
                target,
                log_prob_factor: None,
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use burn::tensor::activation::log_softmax;

    use super::*;
    use crate::numbers::numbers;

    const N: usize = 7;
    const D: usize = 5;
    const V: usize = 13;
    const K: usize = 3;

    /// f64 sums of a few dozen terms of size 1: rounding only.
    const EXACT: f64 = 1e-11;

    fn matrix(rows: usize, columns: usize, salt: u64) -> Tensor<2> {
        let values = numbers(rows * columns, salt);
        let values: Vec<f64> = values.into_iter().map(|x| 3.0 * f64::from(x)).collect();
        let data = TensorData::new(values, [rows, columns]);
        Tensor::from_data(data, (&Device::flex(), DType::F64))
    }

    /// Lists with adjacent ids, both ends of the vocabulary, and one id twice.
    fn ids() -> Tensor<2, Int> {
        let ids: Vec<i32> = (0..N * K).map(|i| ((i * 5) % V) as i32).collect();
        let mut ids = ids;
        (ids[3], ids[4], ids[5]) = (12, 12, 0);
        Tensor::from_data(TensorData::new(ids, [N, K]), &Device::flex())
    }

    fn plain(hidden: Tensor<2>, head: Tensor<2>, temperature: f64) -> Tensor<2> {
        // Division by a tensor: burn's gradient of a division by a scalar rounds it to f32.
        let divisor = Tensor::full([1, 1], temperature, (&hidden.device(), DType::F64));
        log_softmax(hidden.matmul(head.transpose()) / divisor, 1)
    }

    fn values(tensor: Tensor<2>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    #[track_caller]
    fn close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (i, (g, e)) in got.iter().zip(expected).enumerate() {
            assert!((g - e).abs() <= EXACT, "{i}: {g} differs from {e}");
        }
    }

    /// Log-probs and both gradients of a weighted sum of them.
    fn run(score: impl Fn(Tensor<2>, Tensor<2>) -> Tensor<2>) -> [Vec<f64>; 3] {
        let hidden = matrix(N, D, 1).autodiff().require_grad();
        let head = matrix(V, D, 2).autodiff().require_grad();
        let log_probs = score(hidden.clone(), head.clone());
        let weights = matrix(N, K, 3).autodiff();
        let grads = (log_probs.clone() * weights).sum().backward();
        [
            values(log_probs),
            values(hidden.grad(&grads).unwrap()),
            values(head.grad(&grads).unwrap()),
        ]
    }

    #[test]
    fn equals_the_composed_log_softmax_and_its_gradients() {
        for temperature in [1.0, 0.7] {
            let expected = run(|hidden, head| plain(hidden, head, temperature).gather(1, ids()));
            for chunk in [1, 3, N, N + 1] {
                let got =
                    run(|hidden, head| listed_log_probs(hidden, head, ids(), temperature, chunk));
                for (got, expected) in got.iter().zip(&expected) {
                    close(got, expected);
                }
            }
        }
    }

    #[test]
    fn one_listed_token_is_a_target() {
        let (hidden, head) = (matrix(N, D, 1), matrix(V, D, 2));
        let ids = ids().slice([0..N, 1..2]);
        let listed = listed_log_probs(hidden.clone(), head.clone(), ids.clone(), 0.9, 2);
        let ids = ids.reshape([N]);
        let direct = super::super::linear_log_probs(hidden, head, ids, 0.9, Extras::NONE, 2);
        close(&values(listed), &values(direct.log_probs.unsqueeze_dim(1)));
    }

    #[test]
    fn the_best_tokens_come_first_with_their_log_probs() {
        let (hidden, head) = (matrix(N, D, 1), matrix(V, D, 2));
        let all = plain(hidden.clone(), head.clone(), 0.7);
        let rows: Vec<Vec<f64>> = values(all).chunks(V).map(<[f64]>::to_vec).collect();
        for (k, chunk) in [(1, 2), (4, 3), (V, N)] {
            let (ids, log_probs) = top_log_probs(hidden.clone(), head.clone(), k, 0.7, chunk);
            let (ids, log_probs) = (ids.into_data(), values(log_probs));
            let ids: Vec<usize> = ids.iter::<i64>().map(|id| id as usize).collect();
            for (n, row) in rows.iter().enumerate() {
                let mut order: Vec<usize> = (0..V).collect();
                order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
                assert_eq!(ids[n * k..(n + 1) * k], order[..k]);
                let best: Vec<f64> = order[..k].iter().map(|id| row[*id]).collect();
                close(&log_probs[n * k..(n + 1) * k], &best);
            }
        }
    }

    #[test]
    fn only_tracked_inputs_get_a_gradient() {
        let hidden = matrix(N, D, 1).autodiff().require_grad();
        let head = matrix(V, D, 2).autodiff();
        let scores = listed_log_probs(hidden.clone(), head.clone(), ids(), 1.0, 3);
        let grads = scores.sum().backward();
        assert!(hidden.grad(&grads).is_some());
        assert!(head.grad(&grads).is_none());
    }
}
