//! Functions of tensors whose bits on the CPU do not depend on the platform.
//!
//! burn takes exponentials and logarithms on the CPU from the C library, whose versions differ in the last bit. This
//! module uses those of the `libm` crate, in f64 and rounded to the tensor's dtype. On other devices it uses burn's.
//!
//! All are differentiable. A number that is not finite has no gradient, and a gradient beyond the dtype's range is
//! clamped to that range.

use burn::tensor::{DType, Device, Element, Tensor, TensorData, activation};
use rayon::prelude::*;

/// A function's value and slope at a point.
type Point = [f64; 2];

/// eˣ.
pub fn exp<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    mapped(x, Tensor::exp, |x| [libm::exp(x); 2])
}

/// eˣ − 1, without cancellation near 0.
pub fn exp_m1<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    // e^x − 1 = 2 e^{x/2} sinh(x/2)
    let composed = |x: Tensor<D>| {
        let half = x / 2.0;
        half.clone().exp() * half.sinh() * 2.0
    };
    mapped(x, composed, |x| [libm::expm1(x), libm::exp(x)])
}

/// ln(1 − eˣ) for x < 0, without cancellation at either end.
pub fn log1m_exp<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    // With t = tanh(x/2), 1 − e^x = −2t/(1 − t).
    let composed = |x: Tensor<D>| {
        let t = (x / 2.0).tanh();
        (t.clone() * -2.0).log() - (t * -1.0).log1p()
    };
    mapped(x, composed, |x| {
        let value = match x < -std::f64::consts::LN_2 {
            true => libm::log1p(-libm::exp(x)),
            false => libm::log(-libm::expm1(x)),
        };
        [value, -1.0 / libm::expm1(-x)]
    })
}

/// ln x.
pub fn log<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    mapped(x, Tensor::log, |x| [libm::log(x), 1.0 / x])
}

/// tanh x.
pub fn tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    mapped(x, Tensor::tanh, |x| {
        let y = libm::tanh(x);
        [y, 1.0 - y * y]
    })
}

/// ln σ(x), σ(x) = 1 / (1 + e⁻ˣ).
pub fn log_sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    mapped(x, activation::log_sigmoid, |x| {
        [
            x.min(0.0) - libm::log1p(libm::exp(-x.abs())),
            1.0 / (1.0 + libm::exp(x)),
        ]
    })
}

/// Log-softmax of each row.
///
/// # Shapes
/// `x`, result: `[N, K]`
pub fn log_softmax(x: Tensor<2>) -> Tensor<2> {
    if !is_cpu(&x) {
        return activation::log_softmax(x, 1);
    }
    let largest = x.clone().detach().max_dim(1);
    let below = x - largest;
    below.clone() - log_sum_exp(below)
}

/// ln Σ_k eˣ of each row, which must contain a finite number; −∞ adds nothing.
///
/// Sums are in f64, in ascending order. The largest number of a row should be near 0: the farther it is from 0, the
/// fewer digits after the point the result has.
///
/// # Shapes
/// `x`: `[N, K]`; result: `[N, 1]`
pub fn log_sum_exp(x: Tensor<2>) -> Tensor<2> {
    if !is_cpu(&x) {
        return x.exp().sum_dim(1).log();
    }
    match x.dtype() {
        DType::F32 => sums::<f32>(x, |share| share as f32),
        _ => sums::<f64>(x, |share| share),
    }
}

fn sums<E>(x: Tensor<2>, narrow: fn(f64) -> E) -> Tensor<2>
where
    E: Element + Into<f64>,
{
    let [n, k] = x.dims();
    let mut shares: Vec<E> = x.clone().into_data().iter::<E>().collect();
    let sums: Vec<f64> = shares
        .par_chunks_mut(k.max(1))
        .map(|row| {
            let numbers = row.iter().map(|x| (*x).into());
            let largest = numbers.fold(f64::NEG_INFINITY, f64::max);
            let power = |x: E| libm::exp(x.into() - largest);
            let sum: f64 = row.iter().map(|x| power(*x)).sum();
            for x in row {
                *x = narrow(power(*x) / sum);
            }
            largest + libm::log(sum)
        })
        .collect();
    let options = (&x.device(), x.dtype());
    let shares = Tensor::<2>::from_data(TensorData::new(shares, [n, k]), options);
    let sums = Tensor::<2>::from_data(TensorData::new(sums, [n, 1]), options);
    let x = x.clone().mask_fill(x.is_finite().bool_not(), 0.0);
    sums + (zeros_with_slope_one(x) * shares).sum_dim(1)
}

/// Maps each number with `of` on the CPU; uses `elsewhere` on other devices.
fn mapped<const D: usize>(
    x: Tensor<D>,
    elsewhere: fn(Tensor<D>) -> Tensor<D>,
    of: fn(f64) -> Point,
) -> Tensor<D> {
    if !is_cpu(&x) {
        return elsewhere(x);
    }
    let largest = match x.dtype() {
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    let (mut values, mut slopes) = (Vec::new(), Vec::new());
    let mut all_finite = true;
    for number in x.clone().into_data().iter::<f64>() {
        let [value, slope] = of(number);
        values.push(value);
        // 0 · ∞ would be NaN.
        slopes.push(slope.clamp(-largest, largest));
        all_finite &= number.is_finite();
    }
    let options = (&x.device(), x.dtype());
    let constant = |numbers| Tensor::<D>::from_data(TensorData::new(numbers, x.dims()), options);
    let (values, slopes) = (constant(values), constant(slopes));
    let x = match all_finite {
        true => x,
        false => x.clone().mask_fill(x.is_finite().bool_not(), 0.0),
    };
    values + zeros_with_slope_one(x) * slopes
}

/// x − x, with the gradient of x.
fn zeros_with_slope_one<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.clone() - x.detach()
}

fn is_cpu<const D: usize>(x: &Tensor<D>) -> bool {
    x.device().without_autodiff() == Device::flex()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, gradient, read};

    /// Name, tensor function, and expected value and slope at a number.
    type Case = (fn(Tensor<1>) -> Tensor<1>, fn(f64) -> Point);

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-13 * b.abs().max(1.0)
    }

    #[test]
    fn values_and_slopes() {
        let cases: [Case; 6] = [
            (exp, |x| [x.exp(), x.exp()]),
            (exp_m1, |x| [x.exp_m1(), x.exp()]),
            (log1m_exp, |x| {
                let x = -x.abs();
                [(-x.exp_m1()).ln(), -x.exp() / -x.exp_m1()]
            }),
            (tanh, |x| [x.tanh(), 1.0 / (x.cosh() * x.cosh())]),
            (log_sigmoid, |x| {
                let p = 1.0 / (1.0 + (-x).exp());
                [p.ln(), 1.0 - p]
            }),
            (log, |x| [x.abs().ln(), 1.0 / x.abs()]),
        ];
        for (at, (function, expected)) in cases.into_iter().enumerate() {
            for x in [-12.5f64, -1.0, -0.25, 1e-3, 0.7, 3.0] {
                let x = match at {
                    2 => -x.abs(),
                    5 => x.abs(),
                    _ => x,
                };
                let [value, slope] = expected(x);
                let (got, grad) = gradient(&[x], function);
                assert!(near(got, value), "{at} at {x}: {got} differs from {value}");
                assert!(
                    near(grad[0], slope),
                    "{at} at {x}: {grad:?} differs from {slope}"
                );
            }
        }
    }

    #[test]
    fn both_ends_are_accurate() {
        for (x, value) in [(-1e-9f64, 1e-9f64.ln()), (-50.0, -(-50f64).exp())] {
            let (got, _) = gradient(&[x], log1m_exp);
            assert!(
                (got / value - 1.0).abs() < 1e-9,
                "{got} differs from {value}"
            );
        }
        assert_eq!(gradient(&[1e-20], exp_m1), (1e-20, vec![1.0]));
        assert_eq!(gradient(&[-800.0], log_sigmoid), (-800.0, vec![1.0]));
        assert_eq!(gradient(&[800.0], log_sigmoid), (0.0, vec![0.0]));
    }

    #[test]
    fn non_finite_numbers_have_no_gradient() {
        let inf = f64::INFINITY;
        let slopes = |x: &[f64], function: fn(Tensor<1>) -> Tensor<1>| gradient(x, function).1;
        assert_eq!(read(exp(constant(&[-inf, inf]))), [0.0, inf]);
        assert!(read(exp(constant(&[f64::NAN])))[0].is_nan());
        assert_eq!(slopes(&[-inf, 0.0, inf], exp), [0.0, 1.0, 0.0]);
        // e^800 and the slope of ln x at 0 are beyond f64.
        assert_eq!(gradient(&[800.0], exp), (inf, vec![f64::MAX]));
        assert_eq!(gradient(&[0.0], log), (-inf, vec![f64::MAX]));
    }

    #[test]
    fn log_softmax_of_rows() {
        let weights = constant(&[1.0, -2.0, 0.5, 3.0, 0.25, -1.0]);
        let logits = [0.3, -1.2, 2.0, 900.0, 901.5, 899.0];
        let (value, grad) = gradient(&logits, |x| {
            let weights = weights.autodiff();
            log_softmax(x.reshape([2, 3])).reshape([6]) * weights
        });
        let (mut want, mut slopes) = (0.0, Vec::new());
        for (row, weights) in logits.chunks(3).zip([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]]) {
            let powers: Vec<f64> = row.iter().map(|x| (x - row[1]).exp()).collect();
            let sum: f64 = powers.iter().sum();
            let total: f64 = weights.iter().sum();
            for at in 0..3 {
                want += weights[at] * (powers[at] / sum).ln();
                slopes.push(weights[at] - total * powers[at] / sum);
            }
        }
        assert!((value - want).abs() < 1e-11, "{value} differs from {want}");
        for (got, want) in grad.iter().zip(&slopes) {
            assert!((got - want).abs() < 1e-12, "{got} differs from {want}");
        }
    }

    #[test]
    fn negative_infinity_adds_nothing_to_a_sum() {
        let row = [0.0, f64::NEG_INFINITY, 0.0];
        let (value, grad) = gradient(&row, |x| log_sum_exp(x.reshape([1, 3])).reshape([1]));
        assert!(near(value, std::f64::consts::LN_2));
        assert_eq!(grad, [0.5, 0.0, 0.5]);
    }
}
