//! Log-probabilities of tokens and entropies, from logits.

use burn::tensor::{Int, Tensor};

use crate::error::{AlgoError, check_len, check_setting};
use crate::functions::{exp, log, log_sum_exp};

/// Log-probs of the targets: z_y − log Σ_v e^{z_v} with z = logits / temperature.
///
/// The largest logit is subtracted first, so that large logits cost no digits. A logit of −∞ excludes a token.
///
/// # Shapes
/// `logits`: `[N, V]`; `targets`, result: `[N]`, nats
/// # Errors
/// Different numbers of targets and rows; a temperature that is not positive.
/// # Differences
/// verl in f32 takes the logit minus the log of the sum of exponentials, which costs digits for large logits.
/// # Source
/// verl `logprobs_from_logits`, TRL `selective_log_softmax`.
pub fn log_probs_from_logits(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    temperature: f64,
) -> Result<Tensor<1>, AlgoError> {
    check_len("targets", "tokens", targets.dims()[0], logits.dims()[0])?;
    let shifted = shift(logits, temperature)?;
    let log_sum = log_sum_exp(shifted.clone());
    let chosen = shifted.gather(1, targets.unsqueeze_dim(1));
    Ok((chosen - log_sum).squeeze_dim(1))
}

/// Entropies: log Σ e^z − Σ softmax(z)·z with z = logits / temperature, and 0·log 0 = 0.
///
/// # Shapes
/// `logits`: `[N, V]`; result: `[N]`, nats
/// # Errors
/// A temperature that is not positive.
/// # Differences
/// verl and TRL return NaN for a logit of −∞.
/// # Source
/// verl `entropy_from_logits`.
pub fn entropy_from_logits(logits: Tensor<2>, temperature: f64) -> Result<Tensor<1>, AlgoError> {
    let shifted = shift(logits, temperature)?;
    let exp = exp(shifted.clone());
    let sum = exp.clone().sum_dim(1);
    let shut_out = shifted.clone().equal_scalar(f64::NEG_INFINITY);
    let finite = shifted.mask_fill(shut_out, 0.0);
    let mean = (exp * finite).sum_dim(1) / sum.clone();
    Ok((log(sum) - mean).squeeze_dim(1))
}

/// Logits over the temperature, minus their largest; the shift has no gradient, because it cancels.
fn shift(logits: Tensor<2>, temperature: f64) -> Result<Tensor<2>, AlgoError> {
    let valid = temperature > 0.0 && temperature.is_finite();
    check_setting("temperature", temperature, valid, "it must be positive")?;
    let scaled = logits / temperature;
    let largest = scaled.clone().detach().max_dim(1);
    Ok(scaled - largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, read};

    fn row(logits: &[f64]) -> Tensor<2> {
        constant(logits).unsqueeze_dim(0)
    }

    #[track_caller]
    fn check(logits: &[f64], target: i64, temperature: f64, log_prob: f64, entropy: f64) {
        let logits = row(logits);
        let target = Tensor::<1, Int>::from_data([target], &logits.device());
        let got = log_probs_from_logits(logits.clone(), target, temperature).unwrap();
        assert!((read(got)[0] - log_prob).abs() < 1e-12);
        let got = entropy_from_logits(logits, temperature).unwrap();
        assert!((read(got)[0] - entropy).abs() < 1e-12);
    }

    #[test]
    fn by_hand() {
        let ln = f64::ln;
        check(&[3.0, 3.0], 1, 1.0, -ln(2.0), ln(2.0));
        check(&[1e6, 1e6, 1e6], 0, 1.0, -ln(3.0), ln(3.0));
        // e^{z/T} = 3 : 1
        let entropy = ln(4.0) - 0.75 * ln(3.0);
        check(&[2.0 * ln(3.0), 0.0], 0, 2.0, ln(0.75), entropy);
    }

    #[test]
    fn an_excluded_token_has_no_weight() {
        let ln2 = 2f64.ln();
        check(&[0.0, f64::NEG_INFINITY, 0.0], 2, 1.0, -ln2, ln2);
    }

    #[test]
    fn rejects_a_temperature_of_zero() {
        assert!(entropy_from_logits(row(&[0.0]), 0.0).is_err());
        assert!(entropy_from_logits(row(&[0.0]), f64::NAN).is_err());
    }
}
