//! Compares every fused operation with its composition of plain operations: results, all gradients, and bits with
//! different numbers of threads.

use burn::tensor::activation::{silu, softmax};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{
    AttentionParameters, AttentionShape, HalfSettings, Heads, Sequences, are_fused, attention,
    attention_block, indices, linear, mlp_block, rms_norm, swiglu,
};
use crate::numbers::numbers;
use crate::prefixes::Distinct;

/// Largest difference as a share of the largest value: sums of up to some hundred f32 terms in a different order.
const TOLERANCE: f32 = 1e-4;

/// Inputs of an operation as numbers, so that each run builds its own graph.
type Inputs = Vec<(Vec<f32>, [usize; 2])>;
type Operation<'a> = &'a (dyn Fn(&[Tensor<2>]) -> Tensor<2> + Sync);

fn input(rows: usize, columns: usize, salt: u64) -> (Vec<f32>, [usize; 2]) {
    let values = numbers(rows * columns, salt);
    (values.iter().map(|x| 3.0 * x).collect(), [rows, columns])
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32 values")
}

/// The result, followed by the gradients of its weighted sum (fixed weights) with respect to every input.
fn run(inputs: &Inputs, operation: Operation<'_>) -> Vec<Vec<f32>> {
    let device = Device::flex().autodiff();
    let tensors: Vec<Tensor<2>> = inputs
        .iter()
        .map(|(values, shape)| {
            Tensor::from_data(TensorData::new(values.clone(), *shape), &device).require_grad()
        })
        .collect();
    let result = operation(&tensors);
    let [rows, columns] = result.dims();
    let weights = TensorData::new(numbers(rows * columns, 99), [rows, columns]);
    let gradients = (result.clone() * Tensor::from_data(weights, &device))
        .sum()
        .backward();
    let mut all = vec![values(result.without_autodiff())];
    all.extend(
        tensors
            .iter()
            .map(|tensor| values(tensor.grad(&gradients).expect("every input has a gradient"))),
    );
    all
}

#[track_caller]
fn check(inputs: &Inputs, fused: Operation<'_>, composed: Operation<'_>) {
    let (got, want) = (run(inputs, fused), run(inputs, composed));
    assert_eq!(got.len(), want.len());
    for (which, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got.len(), want.len());
        let largest = want.iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
        for (at, (a, b)) in got.iter().zip(want).enumerate() {
            assert!(
                (a - b).abs() <= TOLERANCE * largest,
                "part {which} (0 result, then gradients) at {at}: {a} differs from {b}, largest {largest}"
            );
        }
    }
    // Bit for bit, with any number of threads.
    let with_threads = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        pool.install(|| run(inputs, fused))
    };
    let sequential = with_threads(1);
    assert_eq!(sequential, got);
    assert_eq!(sequential, with_threads(3));
}

#[test]
fn the_cpu_in_f32_is_fused_and_nothing_else() {
    assert!(are_fused(&Device::flex(), DType::F32));
    assert!(are_fused(&Device::flex().autodiff(), DType::F32));
    assert!(!are_fused(&Device::flex(), DType::F16));
    assert!(!are_fused(&Device::flex(), DType::F64));
}

#[test]
fn rms_norm_is_its_composition() {
    for (rows, width) in [(1, 4), (3, 5), (130, 32), (65, 48)] {
        let inputs = vec![input(rows, width, 1), input(1, width, 2)];
        check(
            &inputs,
            &|x| rms_norm(x[0].clone(), x[1].clone().reshape([width]), 1e-5),
            &|x| {
                let square = (x[0].clone() * x[0].clone()).mean_dim(1);
                x[0].clone() / (square + 1e-5).sqrt() * x[1].clone()
            },
        );
    }
}

#[test]
fn swiglu_is_its_composition() {
    // The last shape is longer than a task.
    for (rows, width) in [(1, 1), (3, 7), (200, 48)] {
        let inputs = vec![input(rows, width, 3), input(rows, width, 4)];
        check(&inputs, &|x| swiglu(x[0].clone(), x[1].clone()), &|x| {
            silu(x[0].clone()) * x[1].clone()
        });
    }
}

#[test]
fn linear_is_its_composition() {
    for (rows, width, out) in [(1, 1, 1), (5, 3, 7), (130, 64, 48), (300, 96, 200)] {
        let inputs = vec![input(rows, width, 5), input(out, width, 6)];
        check(&inputs, &|x| linear(x[0].clone(), x[1].clone()), &|x| {
            x[0].clone().matmul(x[1].clone().transpose())
        });
    }
}

/// [B·S, H·Dh] -> [B, H, S, Dh]
fn heads(x: Tensor<2>, shape: &AttentionShape, count: usize) -> Tensor<4> {
    x.reshape([shape.sequences, shape.tokens, count, shape.heads.dim])
        .swap_dims(1, 2)
}

/// Each key/value head repeated for its query heads.
fn repeated(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [b, k, s, dim] = x.dims();
    x.reshape([b, k, 1, s * dim])
        .repeat_dim(2, times)
        .reshape([b, k * times, s, dim])
}

/// Rotary positions of heads of this width.
struct Rotary {
    head_dim: usize,
}

impl Rotary {
    /// Cosines and signed sines of positions `0..length`, `[length, Dh]` each.
    fn tables(&self, length: usize, device: &Device) -> [Tensor<2>; 2] {
        let half = self.head_dim / 2;
        let angle = |at: usize| {
            let (position, element) = (at / self.head_dim, at % self.head_dim);
            let pair = (element % half) as f64 / half as f64;
            let sign = if element < half { -1.0 } else { 1.0 };
            (position as f64 * 100f64.powf(-pair), sign)
        };
        let table = |of: fn((f64, f64)) -> f64| {
            let values = (0..length * self.head_dim).map(|at| of(angle(at)) as f32);
            let data = TensorData::new(values.collect(), [length, self.head_dim]);
            Tensor::from_data(data, device)
        };
        [
            table(|(angle, _)| angle.cos()),
            table(|(angle, sign)| sign * angle.sin()),
        ]
    }

    /// Rotates `[B, H, S, Dh]`.
    fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let [_, _, length, dim] = x.dims();
        let tables = self.tables(length, &x.device().without_autodiff());
        let [cos, sin] = tables.map(|table| table.reshape([1, 1, length, dim]));
        let swapped = [dim / 2, 0].map(|from| x.clone().narrow(3, from, dim / 2));
        x * cos + Tensor::cat(swapped.into(), 3) * sin
    }
}

fn composed_attention(shape: &AttentionShape, x: &[Tensor<2>], rope: &Rotary) -> Tensor<2> {
    let (s, sizes) = (shape.tokens, shape.heads);
    let device = x[0].device();
    let queries = rope.apply(heads(x[0].clone(), shape, sizes.query));
    let keys = repeated(
        rope.apply(heads(x[1].clone(), shape, sizes.key_value)),
        sizes.group(),
    );
    let values = repeated(heads(x[2].clone(), shape, sizes.key_value), sizes.group());
    let scores = queries.matmul(keys.swap_dims(2, 3)) * (sizes.dim as f64).powf(-0.5);
    let later: Vec<f32> = (0..s * s)
        .map(|at| if at % s > at / s { -1e30 } else { 0.0 })
        .collect();
    let mask = Tensor::<4>::from_data(TensorData::new(later, [1, 1, s, s]), &device);
    // [B, H, S, Dh] -> [B·S, H·Dh]
    softmax(scores + mask, 3)
        .matmul(values)
        .swap_dims(1, 2)
        .reshape([shape.sequences * s, sizes.query_width()])
}

#[track_caller]
fn check_attention(sequences: usize, tokens: usize, [query, key_value, dim]: [usize; 3]) {
    let heads = Heads {
        query,
        key_value,
        dim,
    };
    let shape = AttentionShape {
        sequences,
        tokens,
        heads,
        segments: None,
    };
    let rope = Rotary { head_dim: dim };
    let rows = sequences * tokens;
    let inputs = vec![
        input(rows, heads.query_width(), 7),
        input(rows, heads.key_width(), 8),
        input(rows, heads.key_width(), 9),
    ];
    let fused = |x: &[Tensor<2>]| {
        let device = x[0].device().without_autodiff();
        let [cos, sin] = rope.tables(tokens, &device);
        attention(
            shape.clone(),
            x[0].clone(),
            x[1].clone(),
            x[2].clone(),
            cos,
            sin,
        )
    };
    check(&inputs, &fused, &|x| composed_attention(&shape, x, &rope));
}

#[test]
fn attention_is_its_composition_for_every_head_width() {
    for head_dim in [2, 4, 6, 16, 18, 64] {
        check_attention(2, 9, [2, 2, head_dim]);
    }
}

#[test]
fn attention_is_its_composition_for_grouped_heads() {
    check_attention(2, 7, [4, 2, 8]);
    check_attention(1, 7, [6, 1, 4]);
    check_attention(3, 5, [1, 1, 2]);
}

#[test]
fn attention_is_its_composition_for_short_and_long_sequences() {
    check_attention(1, 1, [2, 1, 8]);
    check_attention(5, 1, [2, 2, 4]);
    check_attention(1, 2, [2, 1, 4]);
    check_attention(7, 16, [2, 1, 8]);
    check_attention(2, 70, [2, 1, 8]);
}

/// Forward and backward, with sequences that share their beginnings, in one place and in several.
#[test]
fn attention_over_segments_is_that_of_each_sequence() {
    let heads = Heads {
        query: 4,
        key_value: 2,
        dim: 6,
    };
    let rope = Rotary {
        head_dim: heads.dim,
    };
    let prompt: Vec<i32> = (0..21).collect();
    let with = |shared: usize, own: std::ops::Range<i32>| {
        [&prompt[..shared], &own.collect::<Vec<_>>()].concat()
    };
    let trees = [
        vec![
            with(21, 100..105),
            with(21, 0..0),
            with(21, 200..240),
            with(21, 300..301),
        ],
        vec![
            with(5, 50..53),
            with(21, 60..70),
            with(12, 80..100),
            with(12, 110..112),
        ],
        vec![with(0, 7..8), with(21, 0..9), with(0, 40..60)],
    ];
    for sequences in trees {
        let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
        let distinct = Distinct::new(&sequences.concat(), &lengths);
        let rows = distinct.ids.len();
        let all: Vec<i32> = (0..lengths.iter().sum::<usize>() as i32).collect();
        let places = distinct.rows.unwrap_or(all);
        let inputs = vec![
            input(rows, heads.query_width(), 7),
            input(rows, heads.key_width(), 8),
            input(rows, heads.key_width(), 9),
        ];
        let shape = |sequences: usize, tokens: usize, segments| AttentionShape {
            sequences,
            tokens,
            heads,
            segments,
        };
        let fused = |x: &[Tensor<2>]| {
            let device = x[0].device().without_autodiff();
            let longest = lengths.iter().copied().max().unwrap();
            let [cos, sin] = rope.tables(longest, &device);
            let shape = shape(0, 0, Some(distinct.segments.clone()));
            let mixed = attention(shape, x[0].clone(), x[1].clone(), x[2].clone(), cos, sin);
            mixed.select(0, indices(places.clone(), &x[0].device()))
        };
        check(&inputs, &fused, &|x| {
            let mut start = 0;
            let mixed = lengths.iter().map(|&tokens| {
                let places = indices(places[start..start + tokens].to_vec(), &x[0].device());
                start += tokens;
                let own = [0, 1, 2].map(|at: usize| x[at].clone().select(0, places.clone()));
                composed_attention(&shape(1, tokens, None), &own, &rope)
            });
            Tensor::cat(mixed.collect(), 0)
        });
    }
}

fn norm(x: &Tensor<2>, gain: &Tensor<2>) -> Tensor<2> {
    rms_norm(x.clone(), gain.clone().reshape([x.dims()[1]]), EPSILON)
}

const EPSILON: f64 = 1e-5;

#[test]
fn the_second_half_of_a_layer_is_its_composition() {
    for (rows, width, inner) in [(1, 4, 6), (5, 8, 12), (130, 16, 40)] {
        let inputs = vec![
            input(rows, width, 1),
            input(1, width, 2),
            input(inner, width, 3),
            input(inner, width, 4),
            input(width, inner, 5),
        ];
        for recompute in [false, true] {
            let fused = |x: &[Tensor<2>]| {
                let gain = x[1].clone().reshape([width]);
                let weights = [&x[2], &x[3], &x[4]].map(Clone::clone);
                let settings = HalfSettings {
                    epsilon: EPSILON,
                    recompute,
                };
                mlp_block(x[0].clone(), gain, weights, settings)
            };
            check(&inputs, &fused, &|x| {
                let n = norm(&x[0], &x[1]);
                let inner = swiglu(linear(n.clone(), x[2].clone()), linear(n, x[3].clone()));
                x[0].clone() + linear(inner, x[4].clone())
            });
        }
    }
}

#[test]
fn the_first_half_of_a_layer_is_its_composition() {
    let width = 12;
    let heads = Heads {
        query: 4,
        key_value: 2,
        dim: 6,
    };
    let (query, key) = (heads.query_width(), heads.key_width());
    let rope = Rotary {
        head_dim: heads.dim,
    };
    for (lengths, biased) in [
        (vec![1], true),
        (vec![3, 17, 5], true),
        (vec![20, 20], false),
    ] {
        let rows = lengths.iter().sum();
        let mut inputs = vec![
            input(rows, width, 1),
            input(1, width, 2),
            input(query, width, 3),
            input(key, width, 4),
            input(key, width, 5),
            input(width, query, 6),
        ];
        if biased {
            inputs.push(input(1, query + 2 * key, 7));
        }
        let composed = |x: &[Tensor<2>]| {
            let n = norm(&x[0], &x[1]);
            let bias = |from: usize, count: usize| x[6].clone().narrow(1, from, count);
            let project = |weight: &Tensor<2>, from: usize, count: usize| {
                let y = linear(n.clone(), weight.clone());
                if biased { y + bias(from, count) } else { y }
            };
            let queries = project(&x[2], 0, query);
            let keys = project(&x[3], query, key);
            let values = project(&x[4], query + key, key);
            let mut start = 0;
            let mixed = lengths.iter().map(|&tokens| {
                let shape = AttentionShape {
                    sequences: 1,
                    tokens,
                    heads,
                    segments: None,
                };
                let own = [&queries, &keys, &values].map(|x| x.clone().narrow(0, start, tokens));
                start += tokens;
                composed_attention(&shape, &own, &rope)
            });
            x[0].clone() + linear(Tensor::cat(mixed.collect(), 0), x[5].clone())
        };
        for recompute in [false, true] {
            let fused = |x: &[Tensor<2>]| {
                let device = x[0].device().without_autodiff();
                let sequences = Sequences::new(&lengths, &device);
                let parameters = AttentionParameters {
                    gain: x[1].clone().reshape([width]),
                    projections: [&x[2], &x[3], &x[4]].map(Clone::clone),
                    bias: biased.then(|| x[6].clone().reshape([query + 2 * key])),
                    output: x[5].clone(),
                };
                let tables = rope.tables(sequences.longest(), &device);
                let settings = HalfSettings {
                    epsilon: EPSILON,
                    recompute,
                };
                attention_block(
                    x[0].clone(),
                    parameters,
                    tables,
                    &sequences,
                    heads,
                    settings,
                )
            };
            check(&inputs, &fused, &composed);
        }
    }
}

/// Gradients of the result's sum for those `inputs` that are `tracked`.
fn some_gradients(
    inputs: &Inputs,
    tracked: &[bool],
    operation: Operation<'_>,
) -> Vec<Option<Vec<f32>>> {
    let device = Device::flex().autodiff();
    let tensors: Vec<Tensor<2>> = inputs
        .iter()
        .zip(tracked)
        .map(|((values, shape), tracked)| {
            let data = TensorData::new(values.clone(), *shape);
            Tensor::from_data(data, &device).set_require_grad(*tracked)
        })
        .collect();
    let gradients = operation(&tensors).sum().backward();
    let gradient = |tensor: &Tensor<2>| tensor.grad(&gradients).map(values);
    tensors.iter().map(gradient).collect()
}

#[test]
fn frozen_parameters_of_a_half_change_no_other_gradient() {
    let [width, inner] = [8, 12];
    let inputs = vec![
        input(5, width, 1),
        input(1, width, 2),
        input(inner, width, 3),
        input(inner, width, 4),
        input(width, inner, 5),
    ];
    let half = |x: &[Tensor<2>]| {
        let gain = x[1].clone().reshape([width]);
        let weights = [&x[2], &x[3], &x[4]].map(Clone::clone);
        let settings = HalfSettings {
            epsilon: EPSILON,
            recompute: false,
        };
        mlp_block(x[0].clone(), gain, weights, settings)
    };
    let all = some_gradients(&inputs, &[true; 5], &half);
    assert!(all.iter().all(Option::is_some));
    for only in 0..5 {
        let mut tracked = [false; 5];
        tracked[only] = true;
        let found = some_gradients(&inputs, &tracked, &half);
        for (at, found) in found.iter().enumerate() {
            let expected = if at == only { &all[at] } else { &None };
            assert_eq!(found, expected, "gradient {at} if only {only} is tracked");
        }
    }
}
