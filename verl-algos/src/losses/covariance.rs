//! The covariance of advantage and log-prob, by which some losses select tokens.

use crate::batch::{MiniBatch, require};
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// (A − Ā)(ℓ − ℓ̄) of each token, means over the entire mini-batch of this rank, ℓ the current log-probs.
///
/// Cui et al. 2025, arXiv:2505.22617: tokens with a large covariance are those that make the entropy collapse.
pub(crate) fn covariances(
    batch: &MiniBatch,
    algorithm: &'static str,
) -> Result<Vec<f64>, AlgoError> {
    let advantages = require(algorithm, "advantages", &batch.advantages)?;
    let log_probs = require(algorithm, "current_log_probs", &batch.current_log_probs)?;
    let means = (mean(advantages), mean(log_probs));
    let each = advantages.iter().zip(log_probs);
    Ok(each.map(|(a, l)| (a - means.0) * (l - means.1)).collect())
}

/// The mean, summed in the order of size, so that its last bit does not depend on the order of rows, and neither does
/// the order of two nearly equal covariances.
fn mean(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    masked::mean(&sorted)
}

/// max(1, ⌊ratio·N⌋) tokens.
pub(crate) fn selected_count(ratio: f64, num_tokens: usize) -> usize {
    ((ratio * num_tokens as f64) as usize).max(1)
}

/// Rejects a share of tokens that is not in (0, 1].
pub(crate) fn check_share(setting: &'static str, share: f64) -> Result<(), AlgoError> {
    let valid = share > 0.0 && share <= 1.0;
    check_setting(setting, share, valid, "it must lie in (0, 1]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let mut batch = MiniBatch::new(vec![0, 0, 1]);
        batch.advantages = Some(vec![1.0, 2.0, 3.0]);
        batch.current_log_probs = Some(vec![-1.0, -2.0, -6.0]);
        assert_eq!(covariances(&batch, "test").unwrap(), [-2.0, 0.0, -3.0]);
        batch.current_log_probs = None;
        let error = covariances(&batch, "test").unwrap_err();
        assert!(error.to_string().contains("current_log_probs"), "{error}");
    }

    #[test]
    fn the_order_of_tokens_does_not_matter() {
        let values = [0.1, 1e16, -1e16, 0.7, 0.3];
        let reversed: Vec<f64> = values.iter().rev().copied().collect();
        assert_eq!(mean(&values), mean(&reversed));
    }

    #[test]
    fn at_least_one_token_is_selected() {
        assert_eq!(selected_count(0.0002, 10), 1);
        assert_eq!(selected_count(0.5, 5), 2);
        assert_eq!(selected_count(1.0, 5), 5);
        for share in [0.0, -0.1, 1.5, f64::NAN] {
            assert!(check_share("kl_cov_ratio", share).is_err());
        }
    }
}
