//! A divergence from the teacher as a loss.

use burn::tensor::Tensor;

use super::batch::{DistillationBatch, DistillationMicroBatch};
use super::divergence::{Divergence, Tail};
use crate::aggregate::{Aggregation, token_weights};
use crate::error::{AlgoError, check_len};
use crate::functions::exp;
use crate::losses::{Metric, MetricId, Partial, Share};
use crate::tensor::{at_least_f32, constant_like};

/// Agg(D(p, q)): a divergence of the student q from the teacher p at each token, over the teacher's best K tokens.
///
/// The gradient is only that of the divergence: the author of the tokens is a constant. Reported: `distillation_loss`,
/// the
/// aggregated value; `distillation_divergence`, its mean over tokens; `teacher_mass` and `student_mass`, the mean
/// probability inside the best K.
///
/// Log-probs at a temperature T are those of logits over T, on both sides.
///
/// # Shapes
/// Log-probs of student and teacher at the teacher's best K: `[M, K]`; result `[M]`, one per token.
/// # Differences
/// GKD sums over the vocabulary; over the best K the [`Tail`] rule defines how the rest is treated. With K the size of
/// the
/// vocabulary both rules give GKD's numbers.
/// # Source
/// Agarwal et al. 2024 (GKD), arXiv:2306.13649, section 3 and algorithm 1; Gu et al. 2024 (MiniLLM), arXiv:2306.08543,
/// for the reverse KL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DistillationLoss {
    /// The divergence that is minimised at each token.
    pub divergence: Divergence,
    /// How the tokens outside the best K are treated.
    pub tail: Tail,
    /// How tokens are aggregated.
    pub aggregation: Aggregation,
}

impl DistillationLoss {
    /// Prepares the loss from the entire mini-batch, once, before any micro-batch.
    ///
    /// # Errors
    /// Settings out of range; columns that [`DistillationBatch::check`] rejects; a missing global count
    /// ([`token_weights`]).
    pub fn prepare<'a>(
        &self,
        batch: &'a DistillationBatch,
    ) -> Result<PreparedDistillation<'a>, AlgoError> {
        self.divergence.check()?;
        batch.check()?;
        Ok(PreparedDistillation {
            loss: *self,
            batch,
            weights: token_weights(self.aggregation, &batch.rows, &batch.counts)?,
        })
    }
}

/// The loss, prepared for its mini-batch.
#[derive(Debug, Clone)]
pub struct PreparedDistillation<'a> {
    loss: DistillationLoss,
    batch: &'a DistillationBatch,
    weights: Vec<f64>,
}

impl PreparedDistillation<'_> {
    /// The share of `micro` in the loss of the mini-batch; the shares of all micro-batches add up to it.
    ///
    /// # Errors
    /// Positions outside the mini-batch, a tensor of another shape.
    pub fn loss(&self, micro: &DistillationMicroBatch) -> Result<Partial, AlgoError> {
        let [tokens, top_k] = micro.log_probs.dims();
        check_len("log_probs", "tokens", tokens, micro.tokens.len())?;
        check_len("log_probs", "numbers per token", top_k, self.batch.top_k)?;
        let teacher = self
            .batch
            .gather(&self.batch.teacher_log_probs, &micro.tokens)?;
        let log_probs = at_least_f32(micro.log_probs.clone());
        if micro.tokens.is_empty() {
            // The sum over no tokens is 0, and a caller can run a backward pass through it.
            return Ok(Partial {
                loss: log_probs.sum(),
                metrics: Vec::new(),
            });
        }
        let teacher = constant_like(teacher, &log_probs).reshape([tokens, top_k]);
        let masses = [
            (MetricId::TEACHER_MASS, mass(teacher.clone())),
            (MetricId::STUDENT_MASS, mass(log_probs.clone())),
        ];
        let [teacher, student] = [teacher, log_probs].map(|l| self.loss.tail.distribution(l));
        let divergence = self.loss.divergence.tokens(teacher, student);
        let weights = micro.tokens.iter().map(|&t| self.weights[t]);
        let weights = constant_like(weights.collect(), &divergence);
        let loss = (divergence.clone() * weights).sum();
        let mut metrics = vec![Metric {
            id: MetricId::new("distillation_loss"),
            number: loss.clone().detach(),
            share: Share::Sum,
        }];
        let means = [(MetricId::DISTILLATION_DIVERGENCE, divergence)];
        metrics.extend(means.into_iter().chain(masses).map(|(id, values)| Metric {
            id,
            number: values.detach().sum(),
            share: Share::Mean { count: tokens },
        }));
        Ok(Partial { loss, metrics })
    }
}

/// Σ e^{log-prob}, `[M, K]` to `[M]`.
fn mass(log_probs: Tensor<2>) -> Tensor<1> {
    exp(log_probs).sum_dim(1).squeeze_dim(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Counts;
    use crate::tensor::test::{constant, gradient, read};

    const LN_2: f64 = std::f64::consts::LN_2;

    fn loss(divergence: Divergence, tail: Tail) -> DistillationLoss {
        DistillationLoss {
            divergence,
            tail,
            aggregation: Aggregation::SeqMeanTokenMean,
        }
    }

    /// Two rows of two tokens and one; teacher (½, ¼) everywhere.
    fn batch() -> DistillationBatch {
        let teacher = [-LN_2, -2.0 * LN_2].repeat(3);
        DistillationBatch::new(vec![0, 0, 1], 2, vec![4, 2, 4, 2, 2, 4], teacher)
    }

    #[test]
    fn by_hand() {
        let batch = batch();
        let prepared = loss(Divergence::Reverse, Tail::Bucket).prepare(&batch);
        let prepared = prepared.unwrap();
        // Equal to the teacher except for the last token, (¼, ¼) with a tail of ½: ¼ ln 2.
        let student = [-1.0, -2.0, -1.0, -2.0, -2.0, -2.0].map(|x| x * LN_2);
        let partial = prepared
            .loss(&DistillationMicroBatch {
                tokens: vec![0, 1, 2],
                log_probs: constant(&student).reshape([3, 2]),
            })
            .unwrap();
        let metrics = partial.read_metrics().unwrap();
        let expected = [
            ("distillation_loss", 0.25 * LN_2 / 2.0),
            ("distillation_divergence", 0.25 * LN_2 / 3.0),
            ("teacher_mass", 0.75),
            ("student_mass", (0.75 + 0.75 + 0.5) / 3.0),
        ];
        for (metric, (name, value)) in metrics.iter().zip(expected) {
            assert_eq!(metric.name(), name);
            assert!((metric.value() - value).abs() < 1e-12, "{metric:?}");
        }
        assert_eq!(metrics.len(), expected.len());
        assert!((read(partial.loss)[0] - 0.25 * LN_2 / 2.0).abs() < 1e-12);
    }

    #[test]
    fn gradients_by_hand() {
        // p = (½, ¼ | ¼): the forward KL is −½ ℓ₀ − ¼ ℓ₁ − ¼ log(1 − e^{ℓ₀} − e^{ℓ₁}) and a constant.
        let batch = DistillationBatch::new(vec![0], 2, vec![0, 1], vec![-LN_2, -2.0 * LN_2]);
        let prepared = loss(Divergence::Forward, Tail::Bucket).prepare(&batch);
        let prepared = prepared.unwrap();
        let grads = |student: [f64; 2]| {
            let (_, grads) = gradient(&student, |l| {
                let micro = DistillationMicroBatch {
                    tokens: vec![0],
                    log_probs: l.reshape([1, 2]),
                };
                prepared.loss(&micro).unwrap().loss
            });
            grads
        };
        let [a, b] = [0.25, 0.25];
        let got = grads([f64::ln(a), f64::ln(b)]);
        let left = 1.0 - a - b;
        let expected = [-0.5 + 0.25 * a / left, -0.25 + 0.25 * b / left];
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{got:?} differs from {expected:?}");
        }
        let got = grads([-LN_2, -2.0 * LN_2]);
        assert!(got.iter().all(|g| g.abs() < 1e-12), "{got:?}");
    }

    #[test]
    fn rejects_invalid_inputs() {
        let plain = loss(Divergence::Forward, Tail::Renormalize);
        let mut batch = batch();
        let prepared = plain.prepare(&batch).unwrap();
        let refusal = |tokens: Vec<usize>, shape: [usize; 2]| {
            let log_probs = constant(&vec![-2.0; shape[0] * shape[1]]).reshape(shape);
            let micro = DistillationMicroBatch { tokens, log_probs };
            prepared.loss(&micro).unwrap_err().to_string()
        };
        let text = refusal(vec![0], [2, 2]);
        assert_eq!(text, "`log_probs` has 2 tokens, expected 1");
        let text = refusal(vec![0], [1, 3]);
        assert_eq!(text, "`log_probs` has 3 numbers per token, expected 2");
        let text = refusal(vec![3], [1, 2]);
        assert!(text.contains("position 3 lies outside"), "{text}");
        let beta = Divergence::JensenShannon { beta: 1.5 };
        assert!(loss(beta, Tail::Bucket).prepare(&batch).is_err());
        batch.counts = Counts {
            dp_size: 2,
            ..Counts::LOCAL
        };
        let error = plain.prepare(&batch).unwrap_err();
        assert!(error.to_string().contains("sequences"), "{error}");
    }
}
