use verl_algos::Aggregation;
use verl_algos::MicroBatch;
use verl_algos::losses::{Objective, ValueLoss};

use super::*;

const CUTS: Cuts = Cuts {
    mini_rows: 8,
    micro_rows: 3,
    samples: 4,
    epochs: 2,
};

#[test]
fn rows_are_cut_as_the_unit_allows() {
    let minis: Vec<_> = CUTS.mini_batches(12).collect();
    assert_eq!(minis, [0..8, 8..12, 0..8, 8..12]);
    for (unit, expected) in [
        (CutUnit::Row, vec![8..11, 11..14, 14..16]),
        (CutUnit::Pair, vec![8..10, 10..12, 12..14, 14..16]),
        (CutUnit::Group, vec![8..12, 12..16]),
        (CutUnit::MiniBatch, vec![8..16; 1]),
    ] {
        let micros: Vec<_> = CUTS.micro_batches(8..16, unit).collect();
        assert_eq!(micros, expected, "{unit:?}");
    }
    assert_eq!(CUTS.mini_batches(0).count(), 0);
    assert_eq!(CUTS.micro_batches(3..3, CutUnit::MiniBatch).count(), 0);
}

/// Shares of a mini-batch whose second micro-batch has no tokens.
fn shares(returns: Option<Vec<f64>>) -> (Result<Shares, StageError>, Vec<[Range<usize>; 2]>) {
    let objective = Objective::new(Aggregation::TokenMean).with(1.0, ValueLoss { clip: None });
    let mini = MiniBatch {
        returns,
        ..MiniBatch::new(vec![0, 0, 2, 6])
    };
    let prepared = objective.prepare(&mini).unwrap();
    let mut seen = Vec::new();
    let cut = (CUTS, CutUnit::Row);
    let shares = Shares::of(&mini, 8..16, cut, |micro, shares| {
        seen.push([micro.rows.clone(), micro.tokens.clone()]);
        let device = burn::tensor::Device::flex();
        let values = Tensor::<1>::ones([micro.tokens.len()], &device);
        let tokens = micro.tokens.clone().collect();
        let share = prepared.loss(&MicroBatch::of_values(tokens, values.clone()));
        Ok(shares.take(share, values).into_scalar::<f64>())
    });
    (shares, seen)
}

#[test]
fn shares_add_up_and_what_has_no_token_is_passed_over() {
    let (sum, seen) = shares(Some(vec![1.0, 2.0, 3.0, 5.0]));
    assert_eq!(seen, [[8..11, 0..3], [14..16, 3..4]]);
    let sum = sum.unwrap();
    // Half squares of 0, 1, 2 and 4.
    assert_eq!(sum.loss, (0.5 + 2.0 + 8.0) / 4.0);
    assert_eq!(sum.metrics[0].value(), sum.loss);
}

#[test]
fn what_the_maths_refuses_ends_the_step() {
    let (refused, seen) = shares(None);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("returns"), "{error}");
    assert_eq!(seen.len(), 1);
}
