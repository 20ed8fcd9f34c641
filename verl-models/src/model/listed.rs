//! Several tokens of the vocabulary at the position of each response token, as used by distillation.

use burn::tensor::Tensor;

use super::{ModelError, ScoreRow};

/// The most probable tokens at the position of each response token of a row, most probable first.
///
/// Dims: `T` response tokens, `K` tokens of the vocabulary at each position.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopTokens {
    /// Ids, those of the first response token first, `[T · K]`.
    pub ids: Vec<u32>,
    /// Their log-probs under the full softmax of logits / temperature, nats, `[T · K]`.
    pub log_probs: Vec<f32>,
}

/// Tokens whose log-probs are requested.
#[derive(Debug, Clone, PartialEq)]
pub struct ListedTokens<'a> {
    /// Tokens at the position of each response token, `K`.
    pub top_k: usize,
    /// Ids of each row, laid out as in [`TopTokens`], `[T · K]`.
    pub rows: Vec<&'a [u32]>,
}

impl ListedTokens<'_> {
    /// The ids at the position of response token `token` of row `row`, `[K]`.
    pub(crate) fn of(&self, row: usize, token: usize) -> &[u32] {
        &self.rows[row][token * self.top_k..(token + 1) * self.top_k]
    }

    /// Refuses lists whose lengths do not match the rows, and ids outside the vocabulary.
    ///
    /// # Errors
    /// Names the first invalid row.
    pub(crate) fn check(&self, rows: &[ScoreRow<'_>], limit: usize) -> Result<(), ModelError> {
        let (top_k, given) = (self.top_k, self.rows.len());
        if top_k == 0 || top_k > limit {
            return Err(ModelError::TopK { top_k, limit });
        }
        for row in 0..rows.len().max(given) {
            let ids = self.rows.get(row).copied().unwrap_or(&[]);
            let tokens = rows.get(row).map_or(0, |row| row.response.len());
            let got = ids.len();
            if got != tokens * top_k {
                return Err(ModelError::Listed {
                    row,
                    got,
                    top_k,
                    tokens,
                });
            }
            if let Some(&id) = ids.iter().find(|id| **id as usize >= limit) {
                return Err(ModelError::TokenId { row, id, limit });
            }
        }
        Ok(())
    }
}

/// Differentiable log-probs of listed tokens, packed: the selected response tokens of all rows, concatenated.
pub struct PackedListed {
    /// `[N, K]` nats, under the full softmax.
    pub log_probs: Tensor<2>,
    /// Row of each token; `len = N`.
    pub rows: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_do_not_match_the_rows_are_refused() {
        let rows = [
            ScoreRow {
                prompt: &[1],
                response: &[2, 3],
            },
            ScoreRow {
                prompt: &[1],
                response: &[],
            },
        ];
        let refusal = |top_k: usize, lists: Vec<&[u32]>| {
            let listed = ListedTokens { top_k, rows: lists };
            match listed.check(&rows, 6) {
                Ok(()) => String::new(),
                Err(error) => error.to_string(),
            }
        };
        assert_eq!(refusal(2, vec![&[1, 2, 3, 4], &[]]), "");
        let text =
            "row 0 lists 3 tokens of the vocabulary, but needs 2 for each of its 2 response tokens";
        assert_eq!(refusal(2, vec![&[1, 2, 3], &[]]), text);
        assert!(refusal(2, vec![&[1, 2, 3, 4], &[1]]).contains("row 1 lists 1"));
        assert!(refusal(2, vec![]).contains("row 0 lists 0"));
        assert!(refusal(1, vec![&[1, 2], &[], &[3]]).contains("row 2 lists 1"));
        let text = "row 0 contains token id 6, but the vocabulary ends at 6";
        assert_eq!(refusal(1, vec![&[1, 6], &[]]), text);
        for top_k in [0, 7] {
            assert!(refusal(top_k, vec![]).contains("the vocabulary allows 1 to 6"));
        }
        let listed = ListedTokens {
            top_k: 2,
            rows: vec![&[1, 2, 3, 4], &[]],
        };
        assert_eq!(listed.of(0, 1), [3, 4]);
    }
}
