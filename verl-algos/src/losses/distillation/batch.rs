//! Inputs of distillation: the teacher's best tokens in plain numbers, and the student's log-probs of the same tokens.

use burn::tensor::Tensor;

use crate::aggregate::Counts;
use crate::error::{AlgoError, check_finite, check_len};

/// Tolerance by which the teacher's mass may exceed 1: log-probs in half precision are that inaccurate.
const MASS_SLACK: f64 = 0.02;

/// The rows of one optimiser step on this rank, packed, with the teacher's distribution at each token.
///
/// Dims: `N` tokens, `K` tokens of the vocabulary per token.
#[derive(Debug, Clone, PartialEq)]
pub struct DistillationBatch {
    /// Row of each token, `[N]`. Rows without action tokens do not appear.
    pub rows: Vec<usize>,
    /// Sizes of the mini-batch over all ranks.
    pub counts: Counts,
    /// Number of tokens that the teacher lists, `K`.
    pub top_k: usize,
    /// The teacher's best tokens at each position, `[N, K]`, in any order.
    pub ids: Vec<u32>,
    /// The teacher's log-probs of them under its full softmax, `[N, K]`, nats.
    pub teacher_log_probs: Vec<f64>,
}

impl DistillationBatch {
    /// A mini-batch with counts taken from it.
    pub fn new(
        rows: Vec<usize>,
        top_k: usize,
        ids: Vec<u32>,
        teacher_log_probs: Vec<f64>,
    ) -> DistillationBatch {
        DistillationBatch {
            rows,
            counts: Counts::LOCAL,
            top_k,
            ids,
            teacher_log_probs,
        }
    }

    /// Number of action tokens, `N`.
    pub fn num_tokens(&self) -> usize {
        self.rows.len()
    }

    /// The tokens whose log-probs a micro-batch of `tokens` needs from the student, `[M, K]`.
    ///
    /// # Errors
    /// Positions outside the mini-batch.
    pub fn ids_of(&self, tokens: &[usize]) -> Result<Vec<u32>, AlgoError> {
        self.gather(&self.ids, tokens)
    }

    /// Rows of a column `[N, K]` of the mini-batch.
    pub(super) fn gather<T: Copy>(
        &self,
        column: &[T],
        tokens: &[usize],
    ) -> Result<Vec<T>, AlgoError> {
        let mut gathered = Vec::with_capacity(tokens.len() * self.top_k);
        for &position in tokens {
            let start = position * self.top_k;
            let each = column.get(start..start + self.top_k);
            gathered.extend(each.filter(|_| position < self.num_tokens()).ok_or(
                AlgoError::OutOfRange {
                    position,
                    tokens: self.num_tokens(),
                },
            )?);
        }
        Ok(gathered)
    }

    /// Rejects columns of the wrong length, and columns that are not part of one distribution over the vocabulary.
    ///
    /// # Errors
    /// No token listed; columns of the wrong length; log-probs that are not finite or add up to more than 1; an id that
    /// is listed twice.
    pub fn check(&self) -> Result<(), AlgoError> {
        if self.top_k == 0 {
            return Err(AlgoError::TooFew {
                algorithm: "distillation",
                unit: "tokens of the teacher",
                needed: 1,
                got: 0,
            });
        }
        let expected = self.num_tokens() * self.top_k;
        let argument = "teacher_log_probs";
        check_len("ids", "numbers", self.ids.len(), expected)?;
        check_len(argument, "numbers", self.teacher_log_probs.len(), expected)?;
        check_finite(argument, &self.teacher_log_probs)?;
        for (position, own) in self.teacher_log_probs.chunks(self.top_k).enumerate() {
            let mass: f64 = own.iter().map(|log_prob| libm::exp(*log_prob)).sum();
            if mass > 1.0 + MASS_SLACK {
                return Err(AlgoError::Mass {
                    argument,
                    position,
                    mass,
                });
            }
        }
        for (position, own) in self.ids.chunks(self.top_k).enumerate() {
            let mut own = own.to_vec();
            own.sort_unstable();
            if let Some(pair) = own.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(AlgoError::RepeatedId {
                    argument: "ids",
                    position,
                    id: pair[0],
                });
            }
        }
        Ok(())
    }
}

/// Some tokens of a mini-batch, with the student's log-probs at them.
#[derive(Debug, Clone)]
pub struct DistillationMicroBatch {
    /// Positions of its tokens in the mini-batch, `[M]`.
    pub tokens: Vec<usize>,
    /// The student's log-probs of [`DistillationBatch::ids_of`] those tokens under its full softmax, `[M, K]`, nats;
    /// differentiable and finite.
    pub log_probs: Tensor<2>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> DistillationBatch {
        DistillationBatch::new(
            vec![0, 2],
            2,
            vec![5, 3, 3, 9],
            vec![-1.0, -2.0, -0.5, -3.0],
        )
    }

    #[test]
    fn gathers_the_ids_of_tokens() {
        assert_eq!(batch().ids_of(&[1, 0]).unwrap(), [3, 9, 5, 3]);
        let error = batch().ids_of(&[2]).unwrap_err();
        let text = "token position 2 lies outside the mini-batch of 2 tokens";
        assert_eq!(error.to_string(), text);
        batch().check().unwrap();
    }

    #[test]
    fn rejects_invalid_distributions() {
        let refusal = |change: &dyn Fn(&mut DistillationBatch)| {
            let mut batch = batch();
            change(&mut batch);
            batch.check().unwrap_err().to_string()
        };
        let text = refusal(&|batch| batch.top_k = 0);
        assert!(text.contains("at least 1 tokens of the teacher"), "{text}");
        let text = refusal(&|batch| batch.top_k = 3);
        assert_eq!(text, "`ids` has 4 numbers, expected 6");
        let text = refusal(&|batch| batch.teacher_log_probs[2] = f64::NEG_INFINITY);
        assert_eq!(text, "`teacher_log_probs` is -inf at position 2");
        let text = refusal(&|batch| batch.teacher_log_probs[3] = -0.5);
        assert!(text.contains("at position 1 adds up to"), "{text}");
        let text = refusal(&|batch| batch.ids[3] = 3);
        assert!(text.contains("token id 3 twice at position 1"), "{text}");
    }
}
