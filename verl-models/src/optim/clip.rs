//! Clipping by the global norm.

use burn::tensor::Tensor;

use super::kernels;

/// Guards the division by the norm, as in PyTorch's `clip_grad_norm_`.
const EPSILON: f64 = 1e-6;

/// Sum of squares of each tensor, in a single read from the device.
///
/// The result is not finite for a tensor that contains NaN or infinity, or whose sum of squares overflows f32.
pub fn sums_of_squares<'a>(tensors: impl IntoIterator<Item = &'a Tensor<1>>) -> Vec<f64> {
    let tensors: Vec<Tensor<1>> = tensors.into_iter().cloned().collect();
    if tensors.is_empty() {
        return Vec::new();
    }
    let values = kernels::sums_of_squares(tensors).into_data();
    values.iter::<f64>().collect()
}

/// Factor that scales the gradient to a norm of at most `max_norm`: min(1, max_norm / (norm + 10⁻⁶)).
pub fn clip_factor(norm: f64, max_norm: Option<f64>) -> f64 {
    match max_norm {
        Some(max_norm) => (max_norm / (norm + EPSILON)).min(1.0),
        None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(values, &Device::flex())
    }

    #[test]
    fn a_norm_spans_all_tensors() {
        let sums = sums_of_squares(&[tensor(&[3.0]), tensor(&[0.0, 4.0, 12.0])]);
        assert_eq!(sums, [9.0, 160.0]);
        assert_eq!(sums.iter().sum::<f64>().sqrt(), 13.0);
    }

    #[test]
    fn non_finite_values_give_a_non_finite_sum() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            let sums = sums_of_squares(&[tensor(&[1.0, value, 2.0]), tensor(&[1.0])]);
            assert!(!sums[0].is_finite(), "{value} gave {}", sums[0]);
            assert_eq!(sums[1], 1.0);
        }
    }

    #[test]
    fn only_larger_norms_are_scaled() {
        assert_eq!(clip_factor(0.5, Some(1.0)), 1.0);
        assert_eq!(clip_factor(10.0, None), 1.0);
        assert!((clip_factor(10.0, Some(1.0)) - 0.1).abs() < 1e-7);
        assert_eq!(clip_factor(0.0, Some(0.0)), 0.0);
    }
}
