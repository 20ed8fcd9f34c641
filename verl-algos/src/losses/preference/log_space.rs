//! Functions of log-probs that are accurate, with their gradients, at both ends.

use burn::tensor::Tensor;

use crate::functions;
pub(super) use crate::functions::log_sigmoid;

/// Bound of an exponent; e^80 is finite in f32, and beyond there is no gradient.
const EXPONENT_BOUND: f64 = 80.0;
/// Bound near 0 of a log-prob whose 1 − p is needed; 1 − e^0 has no logarithm.
const LARGEST_LOG_PROB: f64 = -1e-30;

/// σ(x), computed from its logarithm: burn's own function goes through f32.
pub(super) fn sigmoid(x: Tensor<1>) -> Tensor<1> {
    functions::exp(log_sigmoid(x))
}

/// e^x − 1, x = clip(x, ±80), without cancellation near 0.
pub(super) fn exp_m1(x: Tensor<1>) -> Tensor<1> {
    functions::exp_m1(x.clamp(-EXPONENT_BOUND, EXPONENT_BOUND))
}

/// log(1 − e^x) for x ≤ 0.
pub(super) fn log1m_exp(x: Tensor<1>) -> Tensor<1> {
    functions::log1m_exp(x.clamp_max(LARGEST_LOG_PROB))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::gradient;

    #[track_caller]
    fn check(f: fn(Tensor<1>) -> Tensor<1>, x: f64, value: f64, slope: f64) {
        let (got, grad) = gradient(&[x], f);
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b.abs().max(1.0);
        assert!(near(got, value), "value {got} differs from {value}");
        assert!(
            near(grad[0], slope),
            "slope {} differs from {slope}",
            grad[0]
        );
    }

    #[test]
    fn sigmoid_and_its_logarithm() {
        check(log_sigmoid, 0.0, -(2f64.ln()), 0.5);
        check(log_sigmoid, -800.0, -800.0, 1.0);
        check(log_sigmoid, 800.0, 0.0, 0.0);
        check(sigmoid, 0.0, 0.5, 0.25);
        check(sigmoid, -800.0, 0.0, 0.0);
        let p = 1.0 / (1.0 + (-1.5f64).exp());
        check(sigmoid, 1.5, p, p * (1.0 - p));
    }

    #[test]
    fn exponential_minus_one() {
        for x in [-30.0f64, -1.0, -1e-9, 0.0, 1e-9, 2.0] {
            check(exp_m1, x, x.exp_m1(), x.exp());
        }
        check(exp_m1, -1e4, -1.0, 0.0);
        let (bound, grad) = gradient(&[1e4], exp_m1);
        assert!(bound.is_finite() && grad == [0.0]);
    }

    #[test]
    fn logarithm_of_one_minus_an_exponential() {
        for x in [-50.0f64, -3.0, -0.7, -1e-3, -1e-9] {
            let value = (-x.exp_m1()).ln();
            check(log1m_exp, x, value, x.exp() / x.exp_m1());
        }
        let (bound, grad) = gradient(&[0.0], log1m_exp);
        assert!(bound.is_finite() && grad[0].is_finite());
    }
}
