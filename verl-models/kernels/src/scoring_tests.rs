use super::*;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, TensorData};

const N: usize = 7;
const D: usize = 5;
const V: usize = 13;

/// Rounding of f64 sums of a few dozen terms of size 1.
const EXACT: f64 = 1e-11;
/// Error of central differences with step 1e-6 in f64.
const DIFFERENCES: f64 = 1e-7;

/// Pseudo-random numbers in [−1, 1), from a multiplicative hash.
fn numbers(count: usize, salt: u64) -> Vec<f64> {
    (0..count as u64)
        .map(|i| {
            let x = (i + 1 + salt * 1_000).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            ((x >> 11) as f64) / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

fn matrix(rows: usize, columns: usize, salt: u64, scale: f64) -> Tensor<2> {
    let values = numbers(rows * columns, salt)
        .iter()
        .map(|x| x * scale)
        .collect();
    let data = TensorData::new::<f64, _>(values, [rows, columns]);
    Tensor::from_data(data, (&Device::flex(), DType::F64))
}

fn targets() -> Tensor<1, Int> {
    Tensor::from_data([0, 12, 3, 3, 7, 11, 1], &Device::flex())
}

fn plain(hidden: Tensor<2>, head: Tensor<2>, temperature: f64) -> (Tensor<1>, Tensor<1>) {
    // Division by a tensor: burn's gradient of a division by a scalar rounds it to f32.
    let divisor = Tensor::full([1, 1], temperature, (&hidden.device(), DType::F64));
    let log_p = log_softmax(hidden.matmul(head.transpose()) / divisor, 1);
    let n = log_p.dims()[0];
    let picked = log_p
        .clone()
        .gather(1, targets().reshape([n, 1]))
        .reshape([n]);
    let entropies = -(log_p.clone().exp() * log_p).sum_dim(1).reshape([n]);
    (picked, entropies)
}

fn values<const R: usize>(tensor: Tensor<R>) -> Vec<f64> {
    tensor
        .into_data()
        .convert::<f64>()
        .try_to_vec()
        .expect("f64 data")
}

#[track_caller]
fn close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance, "{i}: {g} is not {e}");
    }
}

/// Weights of the tokens in the differentiated loss.
fn weights(salt: u64) -> Tensor<1> {
    matrix(1, N, salt, 1.0).reshape([N])
}

type Scored = (Tensor<1>, Option<Tensor<1>>);

fn scored(scores: TokenScores) -> Scored {
    (scores.log_probs, scores.entropies)
}

fn extras(entropies: bool) -> Extras {
    Extras {
        entropies,
        ..Extras::NONE
    }
}

/// Log-probs, entropies and both gradients of Σ w_n log π_n + u_n H_n.
fn run(
    entropies: bool,
    score: impl Fn(Tensor<2>, Tensor<2>) -> Scored,
    scale: f64,
) -> [Vec<f64>; 4] {
    let hidden = matrix(N, D, 1, scale).autodiff().require_grad();
    let head = matrix(V, D, 2, 1.0).autodiff().require_grad();
    let (log_probs, found) = score(hidden.clone(), head.clone());
    let mut loss = (log_probs.clone() * weights(3).autodiff()).sum();
    if entropies {
        let found = found.clone().expect("entropies were requested");
        loss = loss + (found * weights(4).autodiff()).sum();
    }
    let grads = loss.backward();
    [
        values(log_probs),
        found.map(values).unwrap_or_default(),
        values(hidden.grad(&grads).expect("gradient of hidden")),
        values(head.grad(&grads).expect("gradient of head")),
    ]
}

#[test]
fn equals_the_composed_log_softmax_and_its_gradients() {
    for temperature in [1.0, 0.7, 2.5] {
        for entropies in [false, true] {
            let expected = run(
                entropies,
                |hidden, head| {
                    let (log_probs, found) = plain(hidden, head, temperature);
                    (log_probs, entropies.then_some(found))
                },
                1.0,
            );
            for chunk in [1, 3, N, N + 1] {
                let got = run(
                    entropies,
                    |hidden, head| {
                        scored(linear_log_probs(
                            hidden,
                            head,
                            targets(),
                            temperature,
                            extras(entropies),
                            chunk,
                        ))
                    },
                    1.0,
                );
                for (got, expected) in got.iter().zip(&expected) {
                    close(got, expected, EXACT);
                }
            }
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let temperature = 0.8;
    let loss = |hidden: Vec<f64>, head: Vec<f64>| {
        let tensor = |values: Vec<f64>, rows: usize| {
            let data = TensorData::new(values, [rows, D]);
            Tensor::<2>::from_data(data, (&Device::flex(), DType::F64))
        };
        let (log_probs, entropies) = scored(linear_log_probs(
            tensor(hidden, N),
            tensor(head, V),
            targets(),
            temperature,
            Extras::ENTROPIES,
            2,
        ));
        let entropies = entropies.expect("entropies were requested");
        values((log_probs * weights(3)).sum() + (entropies * weights(4)).sum())[0]
    };
    let [_, _, d_hidden, d_head] = run(
        true,
        |hidden, head| {
            scored(linear_log_probs(
                hidden,
                head,
                targets(),
                temperature,
                Extras::ENTROPIES,
                2,
            ))
        },
        1.0,
    );
    let (hidden, head) = (numbers(N * D, 1), numbers(V * D, 2));
    let step = 1e-6;
    let moved = |values: &[f64], i: usize, by: f64| {
        let mut values = values.to_vec();
        values[i] += by;
        values
    };
    let along_hidden = (0..N * D).map(|i| {
        let plus = loss(moved(&hidden, i, step), head.clone());
        let minus = loss(moved(&hidden, i, -step), head.clone());
        (plus - minus) / (2.0 * step)
    });
    close(&d_hidden, &along_hidden.collect::<Vec<_>>(), DIFFERENCES);
    let along_head = (0..V * D).map(|i| {
        let plus = loss(hidden.clone(), moved(&head, i, step));
        let minus = loss(hidden.clone(), moved(&head, i, -step));
        (plus - minus) / (2.0 * step)
    });
    close(&d_head, &along_head.collect::<Vec<_>>(), DIFFERENCES);
}

#[test]
fn a_common_offset_of_the_logits_changes_nothing() {
    // The last hidden number is 1 and the head's last column is 10⁴, so all logits shift by 10⁴.
    let offset = |dtype: DType, by: f32| {
        let hidden = Tensor::cat(
            vec![
                matrix(N, D, 1, 1.0).cast(DType::F32),
                Tensor::ones([N, 1], (&Device::flex(), DType::F32)),
            ],
            1,
        );
        let head = Tensor::cat(
            vec![
                matrix(V, D, 2, 4.0).cast(DType::F32),
                Tensor::full([V, 1], by, (&Device::flex(), DType::F32)),
            ],
            1,
        );
        let (log_probs, entropies) = scored(linear_log_probs(
            hidden.cast(dtype),
            head.cast(dtype),
            targets(),
            1.0,
            Extras::ENTROPIES,
            4,
        ));
        [values(log_probs), values(entropies.expect("entropies"))]
    };
    let expected = offset(DType::F64, 0.0);
    for (got, expected) in offset(DType::F64, 1e4).iter().zip(&expected) {
        close(got, expected, 1e-10);
    }
    // f32 logits around 10⁴ are spaced 0.001 apart.
    for (got, expected) in offset(DType::F32, 1e4).iter().zip(&expected) {
        close(got, expected, 4e-3);
    }
}

#[test]
fn certain_tokens_have_finite_gradients() {
    let [log_probs, entropies, d_hidden, d_head] = run(
        true,
        |hidden, head| {
            scored(linear_log_probs(
                hidden,
                head,
                targets(),
                1.0,
                Extras::ENTROPIES,
                3,
            ))
        },
        1e4,
    );
    for values in [log_probs, entropies, d_hidden, d_head] {
        assert!(values.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn only_tracked_tensors_get_a_gradient() {
    let hidden = matrix(N, D, 1, 1.0).autodiff();
    let head = matrix(V, D, 2, 1.0).autodiff().require_grad();
    let found = linear_log_probs(
        hidden.clone(),
        head.clone(),
        targets(),
        1.0,
        Extras::NONE,
        3,
    );
    let grads = found.log_probs.sum().backward();
    assert!(hidden.grad(&grads).is_none());
    assert!(head.grad(&grads).is_some());
}

#[test]
fn a_token_scores_the_same_bits_at_every_place_in_a_chunk() {
    // Wider than one block of the product's inner dim, and a vocabulary that is not a multiple of a tile.
    let (n, d, v) = (32, 1100, 517);
    let hidden = matrix(n, d, 1, 0.1).cast(DType::F32);
    let head = matrix(v, d, 2, 1.0).cast(DType::F32);
    let score = |hidden: Tensor<2>| {
        let targets = Tensor::from_data([5; 32], &Device::flex());
        let (log_probs, entropies) = scored(linear_log_probs(
            hidden,
            head.clone(),
            targets,
            1.0,
            Extras::ENTROPIES,
            n,
        ));
        let entropies = entropies.expect("entropies were requested");
        let both = Tensor::cat(vec![log_probs, entropies], 0).into_data();
        both.iter::<f32>().map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected = score(hidden.clone());
    for by in 1..n {
        let rolled = Tensor::cat(
            vec![
                hidden.clone().slice([by..n, 0..d]),
                hidden.clone().slice([0..by, 0..d]),
            ],
            0,
        );
        let mut got = score(rolled);
        got[..n].rotate_right(by);
        got[n..].rotate_right(by);
        assert!(got == expected, "rolled by {by}");
    }
}

#[test]
fn sums_of_squares_match_the_softmax_and_have_no_gradient() {
    for (entropies, temperature) in [(false, 1.0), (true, 0.7)] {
        let hidden = matrix(N, D, 1, 1.0).autodiff().require_grad();
        let head = matrix(V, D, 2, 1.0);
        let extras = Extras {
            entropies,
            sum_pi_squared: true,
        };
        let scores = |chunk| {
            let (hidden, head) = (hidden.clone(), head.clone().autodiff());
            linear_log_probs(hidden, head, targets(), temperature, extras, chunk)
        };
        let logits = hidden.clone().inner().matmul(head.clone().transpose());
        let divisor = Tensor::full([1, 1], temperature, (&hidden.device(), DType::F64));
        let p = log_softmax(logits / divisor, 1).exp();
        let expected = values((p.clone() * p).sum_dim(1));
        for chunk in [1, 3, N] {
            let found = scores(chunk).sum_pi_squared.expect("requested");
            close(&values(found), &expected, EXACT);
        }
        // The other gradients are the same as without it.
        let gradient = |extras| {
            let (hidden, head) = (hidden.clone(), head.clone().autodiff());
            let scores = linear_log_probs(hidden.clone(), head, targets(), temperature, extras, 3);
            let loss = scores.log_probs.sum()
                + scores.entropies.map_or_else(
                    || Tensor::zeros([1], (&hidden.device(), DType::F64)),
                    |entropies| entropies.sum(),
                );
            let loss = match scores.sum_pi_squared {
                Some(squares) => loss + squares.sum(),
                None => loss,
            };
            values(hidden.grad(&loss.backward()).expect("a gradient"))
        };
        let without = Extras {
            sum_pi_squared: false,
            ..extras
        };
        close(&gradient(extras), &gradient(without), EXACT);
    }
}
