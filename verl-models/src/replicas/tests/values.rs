//! Value models with replicas.

use burn::module::Param;
use burn::tensor::{Int, TensorData};

use super::*;
use crate::critic::Critic;
use crate::model::{PackedValues, ValueInterface, ValueModel};
use crate::toy::numbers;

/// A value model in which a row uses one parameter or the other, so that a micro-batch may have no gradient of one.
#[derive(Module, Debug)]
struct Branches {
    odd: Param<Tensor<1>>,
    even: Param<Tensor<1>>,
    never: Param<Tensor<1>>,
}

impl Branches {
    fn new() -> Self {
        let weights = |count: usize, salt| {
            let data = TensorData::new(numbers(count, salt), [count]);
            Param::from_tensor(Tensor::from_data(data, &Device::flex()))
        };
        Branches {
            odd: weights(40_000, 5),
            even: weights(90, 6),
            never: weights(7, 7),
        }
    }
}

impl ValueInterface for Branches {
    fn vocab_size(&self) -> usize {
        90
    }
    fn max_tokens(&self) -> usize {
        64
    }
    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let [b, s] = ids.dims();
        let flat = ids.reshape([b * s]);
        let first = flat.clone().into_data().iter::<i64>().next();
        let weights = match first.is_some_and(|id| id % 2 == 1) {
            true => self.odd.val(),
            false => self.even.val(),
        };
        // The sign of a zero gradient is part of its bits.
        (weights * -1.0).select(0, flat).reshape([b, s])
    }
    fn save(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }
}

#[test]
fn parameters_without_a_gradient_are_left_alone_as_by_a_single_critic() {
    // First ids of the micro-batches of each step.
    let steps: [&[u32]; 5] = [
        &[1, 2, 3, 4],
        &[2, 4, 6],
        &[1, 1, 1, 8],
        &[5],
        &[2, 3, 2, 3, 2],
    ];
    let train = |critic: &mut dyn ValueModel, length: usize| {
        let mut numbers = Vec::new();
        for firsts in steps {
            let rows: Vec<Vec<u32>> = firsts.iter().map(|first| vec![*first, first + 7]).collect();
            let micros: Vec<Vec<ScoreRow<'_>>> = rows
                .iter()
                .map(|prompt| {
                    vec![ScoreRow {
                        prompt,
                        response: &[9, 11, 80],
                    }]
                })
                .collect();
            for round in micros.chunks(length) {
                let loss = |_: usize, packed: PackedValues| {
                    (packed.values.clone() * packed.values * 0.3).sum()
                };
                let losses = critic
                    .accumulate_round(round, &|_, _, _| true, &loss)
                    .unwrap();
                numbers.extend(losses);
                let loss = |_: usize, scores: Tensor<1>| (scores - 2.0).sum();
                numbers.extend(critic.accumulate_scores_round(round, &loss).unwrap());
            }
            numbers.push(critic.optimizer_step().unwrap().grad_norm);
        }
        let numbers: Vec<u64> = numbers.into_iter().map(f64::to_bits).collect();
        (numbers, critic.weights_hash(), stored(critic))
    };
    for settings in cases() {
        let mut many = ReplicatedCritic::new(Branches::new(), optimizer(), &settings).unwrap();
        // Losses of values and of scores take turns in each round, so its length matters here.
        let length = settings.replicas;
        let mut single = Critic::new(Branches::new(), optimizer()).unwrap();
        let expected = train(&mut single, length);
        assert!(train(&mut many, length) == expected, "{settings:?}");
        let rows = [[1, 5], [7, 8], [3, 9]];
        let rows = rows.each_ref().map(|prompt| ScoreRow {
            prompt,
            response: &[4, 6],
        });
        let single = Critic::new(many.module().clone(), None).unwrap();
        assert_eq!(many.values(&rows).unwrap(), single.values(&rows).unwrap());
        assert_eq!(many.scores(&rows).unwrap(), single.scores(&rows).unwrap());
    }
}

#[test]
fn sums_of_gradients_have_the_bits_of_a_single_critic() {
    // Zero gradients have a negative sign here, and each parameter has no gradient in some micro-batch.
    let prompts = [[2u32, 5], [1, 5], [4, 5]];
    let round = prompts.each_ref().map(|prompt| {
        vec![ScoreRow {
            prompt,
            response: &[9, 11],
        }]
    });
    let loss = |_: usize, packed: PackedValues| (packed.values * 0.3).sum();
    let mut single = Critic::new(Branches::new(), optimizer()).unwrap();
    single
        .accumulate_round(&round, &|_, _, _| true, &loss)
        .unwrap();
    let training = single.trained.training.as_ref().unwrap();
    let expected = training.accumulator.sums().iter().map(|sum| {
        let sum = sum.clone()?;
        Some(bits(&sum.into_data().iter::<f32>().collect::<Vec<f32>>()))
    });
    let expected: Vec<Option<Vec<u32>>> = expected.collect();
    let zero = (-0.0f32).to_bits();
    assert!(
        expected[..2]
            .iter()
            .flatten()
            .all(|sum| sum.contains(&zero))
    );
    assert_eq!(expected[2], None);
    for settings in cases() {
        let mut many = ReplicatedCritic::new(Branches::new(), optimizer(), &settings).unwrap();
        many.accumulate_round(&round, &|_, _, _| true, &loss)
            .unwrap();
        let Replicas {
            replicas,
            layout,
            present,
            ..
        } = &many.replicas;
        assert_eq!(present[..], [true, true, false]);
        let sums: Vec<f32> = match settings.sharding {
            Sharding::Optimizer => replicas[replicas.len() - 1].state.sums.clone(),
            Sharding::Gradients => replicas
                .iter()
                .flat_map(|own| own.state.sums.clone())
                .collect(),
        };
        for (position, expected) in expected.iter().enumerate() {
            let found = bits(&sums[layout.place(position)]);
            assert!(expected.as_ref().is_none_or(|expected| found == *expected));
        }
    }
}
