//! Log-probs, entropies and Σ π² of tokens from hidden states, without the `[N, V]` buffers of a composed log-softmax.
//!
//! Dims: `N` tokens, `D` width, `V` vocabulary, `C` tokens of a chunk.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension,
    get_or_init_device_settings,
};
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Shape, Slice, Tensor};

mod cpu;
mod listed;
mod on_cpu;
#[cfg(feature = "cuda")]
mod on_cuda;

use crate::Products;

pub use listed::{ListedScoringOps, listed_log_probs, log_sums, top_log_probs};

/// Results requested besides the log-probs of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Extras {
    /// Entropies.
    pub entropies: bool,
    /// Σ_v π(v)².
    pub sum_pi_squared: bool,
}

impl Extras {
    /// Only log-probs.
    pub const NONE: Extras = Extras {
        entropies: false,
        sum_pi_squared: false,
    };
    /// Also entropies.
    pub const ENTROPIES: Extras = Extras {
        entropies: true,
        sum_pi_squared: false,
    };
}

/// The result of [`linear_log_probs`], `[N]` each.
#[derive(Debug, Clone)]
pub struct TokenScores {
    /// Nats; differentiable.
    pub log_probs: Tensor<1>,
    /// Nats, if requested; differentiable.
    pub entropies: Option<Tensor<1>>,
    /// Σ_v π(v)², in (0, 1], if requested; a constant.
    pub sum_pi_squared: Option<Tensor<1>>,
}

/// Log-probs of `targets` and, if requested, entropies and Σ_v π(v)² under softmax(hidden · headᵀ / temperature).
///
/// log π_n = z_{n,y_n} − log Σ_v exp z_{n,v},  H_n = −Σ_v p_{n,v} log p_{n,v},  z = hidden · headᵀ / temperature.
///
/// Log-probs and entropies, in nats, are differentiable in `hidden` and `head`; Σ π² is a constant. The forward pass
/// processes some tokens at a time and saves a few numbers per token; the backward pass recomputes the logits, again
/// some at a time:
///
/// ∂L/∂logits = (g_π (onehot − p) − g_H p (log p + H)) / temperature.
///
/// Logits in memory at once:
///
/// - composed of a backend's primitive operations: `chunk · V`; in the backward pass, which processes columns of all
///   tokens, at least one column, `N`
/// - f32 on the CPU: at least 2²² if there are as many, because smaller pieces cost more than they save
/// - kernels of an NVIDIA GPU: up to 768 MiB, but at least those of `chunk` tokens; if all logits fit in 3 GiB, those of
///   all tokens, which are then kept for the backward pass instead of being recomputed
///
/// The product is computed in the dtype of the weights; everything after it is f32, or f64 if the weights are f64.
///
/// # Shapes
/// `hidden`: `[N, D]`; `head`: `[V, D]`; `targets`: `[N]`, each below `V`; results: `[N]`
/// # Panics
/// If shapes disagree or `N` is 0, which is a caller's bug.
pub fn linear_log_probs(
    hidden: Tensor<2>,
    head: Tensor<2>,
    targets: Tensor<1, Int>,
    temperature: f64,
    extras: Extras,
    chunk: usize,
) -> TokenScores {
    let [n, d] = hidden.dims();
    assert_eq!(d, head.dims()[1], "hidden and head differ in width");
    assert_eq!(n, targets.dims()[0], "hidden and targets differ in tokens");
    assert!(n > 0, "no token to score");
    let scores = Tensor::<2>::from_dispatch(<Dispatch as ScoringOps>::linear_scores(
        hidden.into_dispatch(),
        head.into_dispatch(),
        targets.into_dispatch(),
        temperature,
        extras,
        chunk.max(1),
    ));
    let row = |at: usize| scores.clone().slice([at..at + 1, 0..n]).reshape([n]);
    let last = 1 + usize::from(extras.entropies);
    TokenScores {
        log_probs: row(0),
        entropies: extras.entropies.then(|| row(1)),
        sum_pi_squared: extras.sum_pi_squared.then(|| row(last).detach()),
    }
}

/// Scoring operations of a backend; every backend gets them from its primitive operations.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub trait ScoringOps: Products {
    /// The results of [`linear_log_probs`] as rows of one tensor, in the order of the fields of [`TokenScores`].
    ///
    /// # Shapes
    /// result: `[1, N]` to `[3, N]`
    fn linear_scores(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        targets: IntTensor<Self>,
        temperature: f64,
        extras: Extras,
        chunk: usize,
    ) -> FloatTensor<Self> {
        let inputs = Inputs::<Self>::new(hidden, head, targets, temperature, chunk);
        inputs.forward(extras).scores()
    }
}

impl ScoringOps for Flex {
    fn linear_scores(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        targets: IntTensor<Self>,
        temperature: f64,
        extras: Extras,
        chunk: usize,
    ) -> FloatTensor<Self> {
        let inputs = Inputs::new(hidden, head, targets, temperature, chunk);
        Self::linear_scores_saving(&ScoringInputs(inputs), extras).0
    }
}

/// What the forward pass of [`linear_log_probs`] saves for the backward pass.
#[derive(Debug, Clone)]
pub struct SavedScores<B: Backend>(Saved<B>);

#[derive(Debug, Clone)]
enum Saved<B: Backend> {
    /// From composed operations.
    Statistics(Statistics<B>),
    /// From kernels.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the CPU composes operations")
    )]
    Rows {
        /// `[5, N]`
        scores: FloatTensor<B>,
        /// Whether entropies were requested.
        entropies: bool,
        /// The logits if they were kept, `[N, V]`.
        logits: Option<FloatTensor<B>>,
    },
}

impl<B: Products> SavedScores<B> {
    /// The saved statistics of composed operations, and the weights that turn the scores' gradient into that of the
    /// logits.
    fn weighted(
        &self,
        inputs: &Inputs<B>,
        gradient: FloatTensor<B>,
    ) -> (&Statistics<B>, TokenWeights<B>) {
        let Saved::Statistics(statistics) = &self.0 else {
            unreachable!("the forward pass saves statistics");
        };
        let weights = TokenWeights::new(gradient, statistics, inputs.tokens(), inputs.temperature);
        (statistics, weights)
    }
}

/// The backward pass of [`ScoringOps`]; every backend gets it from its primitive operations.
pub trait ScoringGradients: ScoringOps {
    /// The scores, and what their backward pass needs.
    fn linear_scores_saving(
        inputs: &ScoringInputs<Self>,
        extras: Extras,
    ) -> (FloatTensor<Self>, SavedScores<Self>) {
        let statistics = inputs.0.forward(extras);
        let scores = statistics.clone().scores();
        (scores, SavedScores(Saved::Statistics(statistics)))
    }

    /// Gradients of hidden states and head, each if requested.
    fn linear_scores_backward(
        inputs: &ScoringInputs<Self>,
        saved: SavedScores<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        let inputs = &inputs.0;
        let (statistics, weights) = saved.weighted(inputs, gradient);
        let (hidden, head) = inputs.backward(statistics, &weights, wanted[0], wanted[1]);
        [hidden, head]
    }
}

/// In f32 by the kernels of `scoring/cpu.rs`, in other dtypes composed.
impl ScoringGradients for Flex {
    fn linear_scores_saving(
        inputs: &ScoringInputs<Self>,
        extras: Extras,
    ) -> (FloatTensor<Self>, SavedScores<Self>) {
        let statistics = match on_cpu::forward(&inputs.0, extras) {
            Some(statistics) => statistics,
            None => inputs.0.forward(extras),
        };
        let scores = statistics.clone().scores();
        (scores, SavedScores(Saved::Statistics(statistics)))
    }

    fn linear_scores_backward(
        inputs: &ScoringInputs<Self>,
        saved: SavedScores<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        let inputs = &inputs.0;
        let (statistics, weights) = saved.weighted(inputs, gradient);
        on_cpu::backward(inputs, statistics, &weights, wanted).unwrap_or_else(|| {
            let (hidden, head) = inputs.backward(statistics, &weights, wanted[0], wanted[1]);
            [hidden, head]
        })
    }
}

impl<B: ScoringGradients, C: CheckpointStrategy> ScoringOps for Autodiff<B, C> {
    fn linear_scores(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        targets: IntTensor<Self>,
        temperature: f64,
        extras: Extras,
        chunk: usize,
    ) -> FloatTensor<Self> {
        let (hidden, hidden_node) = hidden.into_parts();
        let (head, head_node) = head.into_parts();
        let inputs = ScoringInputs(Inputs::<B>::new(hidden, head, targets, temperature, chunk));
        let (scores, saved) = B::linear_scores_saving(&inputs, extras);
        match LinearScores
            .prepare::<C>([hidden_node, head_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((inputs, saved), scores),
            OpsKind::UnTracked(prep) => prep.finish(scores),
        }
    }
}

/// The backward step of [`ScoringOps::linear_scores`].
#[derive(Debug)]
struct LinearScores;

impl<B: ScoringGradients> Backward<B, 2> for LinearScores {
    type State = (ScoringInputs<B>, SavedScores<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        let (inputs, saved) = ops.state;
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let parts = B::linear_scores_backward(&inputs, saved, gradient, wanted);
        for (node, part) in ops.parents.into_iter().zip(parts) {
            if let (Some(node), Some(part)) = (node, part) {
                grads.register::<B>(node.id, part);
            }
        }
    }
}

/// Registers gradients for hidden states and head, each if it is tracked; `weights` turn the scores' gradient into that
/// of the logits.
fn backward<B: Products>(
    ops: Ops<(Inputs<B>, Statistics<B>), 2>,
    grads: &mut Gradients,
    weights: impl FnOnce(FloatTensor<B>, &Inputs<B>, &Statistics<B>) -> TokenWeights<B>,
) {
    let gradient = grads.consume::<B>(&ops.node);
    let (inputs, statistics) = ops.state;
    let [hidden, head] = ops.parents;
    let weights = weights(gradient, &inputs, &statistics);
    let (d_hidden, d_head) =
        inputs.backward(&statistics, &weights, hidden.is_some(), head.is_some());
    if let (Some(node), Some(gradient)) = (hidden, d_hidden) {
        grads.register::<B>(node.id, gradient);
    }
    if let (Some(node), Some(gradient)) = (head, d_head) {
        grads.register::<B>(node.id, gradient);
    }
}

/// Operands of [`ScoringGradients`].
#[derive(Debug, Clone)]
pub struct ScoringInputs<B: Backend>(Inputs<B>);

/// Operands, saved for the backward pass (buffers are shared, not copied).
#[derive(Debug, Clone)]
struct Inputs<B: Backend> {
    /// `[N, D]`
    hidden: FloatTensor<B>,
    /// `[V, D]`
    head: FloatTensor<B>,
    /// `[N, K]`; one per token unless they are [`listed`]
    targets: IntTensor<B>,
    temperature: f64,
    chunk: usize,
}

/// Statistics of each token from the forward pass; all `[N, 1]`, but `log_probs` is `[N, K]`.
///
/// The largest logit and the log of the sum are kept apart: added up, a large logit would absorb the log's digits.
#[derive(Debug, Clone)]
struct Statistics<B: Backend> {
    log_probs: FloatTensor<B>,
    entropies: Option<FloatTensor<B>>,
    sum_pi_squared: Option<FloatTensor<B>>,
    /// max_v z_v
    largest: FloatTensor<B>,
    /// log Σ_v exp(z_v − max z)
    log_sum: FloatTensor<B>,
}

impl<B: Backend> Statistics<B> {
    fn cat(parts: Vec<Self>) -> Self {
        let column = |of: fn(&Self) -> FloatTensor<B>| cat::<B>(parts.iter().map(of).collect());
        let optional = |of: fn(&Self) -> Option<FloatTensor<B>>| {
            Option::<Vec<_>>::map(parts.iter().map(of).collect(), cat::<B>)
        };
        Statistics {
            log_probs: column(|part| part.log_probs.clone()),
            entropies: optional(|part| part.entropies.clone()),
            sum_pi_squared: optional(|part| part.sum_pi_squared.clone()),
            largest: column(|part| part.largest.clone()),
            log_sum: column(|part| part.log_sum.clone()),
        }
    }

    /// `[N, 1]` columns -> `[1, N]` to `[3, N]`
    fn scores(self) -> FloatTensor<B> {
        let n = self.log_probs.shape()[0];
        let row = |column| B::float_reshape(column, Shape::new([1, n]));
        let mut rows = vec![row(self.log_probs)];
        rows.extend(self.entropies.map(row));
        rows.extend(self.sum_pi_squared.map(row));
        cat::<B>(rows)
    }
}

impl<B: Products> Inputs<B> {
    fn new(
        hidden: FloatTensor<B>,
        head: FloatTensor<B>,
        targets: IntTensor<B>,
        temperature: f64,
        chunk: usize,
    ) -> Self {
        let n = hidden.shape()[0];
        Inputs {
            hidden,
            head,
            targets: B::int_reshape(targets, Shape::new([n, 1])),
            temperature,
            chunk,
        }
    }

    fn tokens(&self) -> usize {
        self.hidden.shape()[0]
    }

    /// Dtype of everything after the product.
    fn precision(&self) -> FloatDType {
        match self.hidden.dtype() {
            DType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        }
    }

    /// Logits divided by the temperature: `[rows, D] · [columns, D]ᵀ -> [rows, columns]`.
    fn logits(&self, hidden: FloatTensor<B>, head: FloatTensor<B>) -> FloatTensor<B> {
        let logits = cast::<B>(B::product_with_rows(hidden, head), self.precision());
        if self.temperature == 1.0 {
            logits
        } else {
            B::float_div_scalar(logits, self.temperature.into())
        }
    }

    fn forward(&self, extras: Extras) -> Statistics<B> {
        let n = self.tokens();
        let parts = (0..n)
            .step_by(self.chunk)
            .map(|start| {
                let end = n.min(start + self.chunk);
                let logits = self.logits(rows::<B>(&self.hidden, start, end), self.head.clone());
                let targets = B::int_slice(
                    self.targets.clone(),
                    &[Slice::from(start..end), Slice::full()],
                );
                statistics::<B>(logits, targets, extras)
            })
            .collect();
        Statistics::cat(parts)
    }

    /// Gradients of the hidden states and of the head, each if requested.
    fn backward(
        &self,
        statistics: &Statistics<B>,
        weights: &TokenWeights<B>,
        want_hidden: bool,
        want_head: bool,
    ) -> (Option<FloatTensor<B>>, Option<FloatTensor<B>>) {
        let (n, v) = (self.tokens(), self.head.shape()[0]);
        let columns = (self.chunk * v).div_ceil(n).clamp(1, v);
        let mut d_hidden: Option<FloatTensor<B>> = None;
        let mut d_head = Vec::new();
        for start in (0..v).step_by(columns) {
            let end = v.min(start + columns);
            let head = rows::<B>(&self.head, start, end);
            let d_logits = self.d_logits(statistics, weights, head.clone(), start, end);
            if want_head {
                // [columns, N] · [N, D] -> [columns, D]
                d_head.push(B::product_of_columns(d_logits.clone(), self.hidden.clone()));
            }
            if want_hidden {
                let part = B::product_with_columns(d_logits, head); // [N, D]
                d_hidden = Some(match d_hidden {
                    Some(sum) => B::float_add(sum, part),
                    None => part,
                });
            }
        }
        (d_hidden, want_head.then(|| cat::<B>(d_head)))
    }

    /// Gradient of the logits `start..end` of all tokens, in the dtype of the weights: `[N, end − start]`.
    fn d_logits(
        &self,
        statistics: &Statistics<B>,
        weights: &TokenWeights<B>,
        head: FloatTensor<B>,
        start: usize,
        end: usize,
    ) -> FloatTensor<B> {
        let logits = self.logits(self.hidden.clone(), head);
        let shifted = B::float_sub(logits, statistics.largest.clone());
        let log_p = B::float_sub(shifted, statistics.log_sum.clone());
        let d_logits = match &weights.log_prob_factor {
            None => B::float_mul(B::float_exp(log_p), weights.constant.clone()),
            Some(factor) => {
                let p = B::float_exp(log_p.clone());
                let slope = B::float_mul(log_p, factor.clone());
                B::float_mul(p, B::float_add(slope, weights.constant.clone()))
            }
        };
        // A target outside of the block is clamped to its edge, with weight 0.
        let wanted = B::int_sub_scalar(self.targets.clone(), (start as i64).into());
        let clamped = B::int_clamp(wanted.clone(), 0.into(), ((end - start - 1) as i64).into());
        let device = self.hidden.device();
        let bool_dtype = get_or_init_device_settings::<B>(&device).bool_dtype;
        let inside = B::bool_into_float(
            B::int_equal(wanted, clamped.clone(), bool_dtype),
            self.precision(),
        );
        let value = B::float_mul(inside, weights.target.clone());
        let d_logits = B::float_scatter(1, d_logits, clamped, value, IndexingUpdateOp::Add);
        cast::<B>(d_logits, float_dtype(self.hidden.dtype()))
    }
}

/// Coefficients of ∂L/∂logits = Σ target · onehot + p · (constant + log_prob_factor · log p); all `[N, 1]`, but `target` is
/// `[N, K]`.
struct TokenWeights<B: Backend> {
    /// g_π / T
    target: FloatTensor<B>,
    /// −(g_π + g_H H) / T
    constant: FloatTensor<B>,
    /// −g_H / T, if entropies were requested
    log_prob_factor: Option<FloatTensor<B>>,
}

impl<B: Backend> TokenWeights<B> {
    /// `gradient` is `[1, N]` to `[3, N]`, like the scores; that of Σ π², a constant, is ignored.
    fn new(
        gradient: FloatTensor<B>,
        statistics: &Statistics<B>,
        n: usize,
        temperature: f64,
    ) -> Self {
        let gradient = B::float_div_scalar(gradient, temperature.into());
        let column =
            |row: usize| B::float_reshape(rows::<B>(&gradient, row, row + 1), Shape::new([n, 1]));
        let target = column(0);
        match &statistics.entropies {
            None => TokenWeights {
                constant: B::float_neg(target.clone()),
                target,
                log_prob_factor: None,
            },
            Some(entropies) => {
                let g = column(1);
                let both = B::float_add(target.clone(), B::float_mul(g.clone(), entropies.clone()));
                TokenWeights {
                    target,
                    constant: B::float_neg(both),
                    log_prob_factor: Some(B::float_neg(g)),
                }
            }
        }
    }
}

/// `logits`: `[C, V]`, `targets`: `[C, K]`.
fn statistics<B: Backend>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
    extras: Extras,
) -> Statistics<B> {
    let largest = B::float_max_dim(logits.clone(), 1);
    let shifted = B::float_sub(logits, largest.clone());
    let target = B::float_gather(1, shifted.clone(), targets);
    let exp = B::float_exp(shifted.clone());
    let sum = B::float_sum_dim(exp.clone(), 1);
    // Σ π² = Σ e² / (Σ e)²; the largest e is 1, so neither sum can vanish or overflow.
    let sum_pi_squared = extras.sum_pi_squared.then(|| {
        let squares = B::float_sum_dim(B::float_mul(exp.clone(), exp.clone()), 1);
        B::float_div(squares, B::float_mul(sum.clone(), sum.clone()))
    });
    let weighted = extras
        .entropies
        .then(|| B::float_sum_dim(B::float_mul(exp, shifted), 1));
    let log_sum = B::float_log(sum.clone());
    Statistics {
        log_probs: B::float_sub(target, log_sum.clone()),
        // H = log Σ e − (Σ e s) / Σ e, with s the shifted logits and e their exponentials.
        entropies: weighted
            .map(|weighted| B::float_sub(log_sum.clone(), B::float_div(weighted, sum))),
        sum_pi_squared,
        largest,
        log_sum,
    }
}

fn rows<B: Backend>(tensor: &FloatTensor<B>, start: usize, end: usize) -> FloatTensor<B> {
    if start == 0 && end == tensor.shape()[0] {
        return tensor.clone();
    }
    B::float_slice(tensor.clone(), &[Slice::from(start..end), Slice::full()])
}

fn cat<B: Backend>(mut parts: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    if parts.len() == 1 {
        return parts.remove(0);
    }
    B::float_cat(parts, 0)
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if tensor.dtype() == DType::from(dtype) {
        return tensor;
    }
    B::float_cast(tensor, dtype)
}

fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

#[cfg(test)]
#[path = "scoring_tests.rs"]
mod tests;
