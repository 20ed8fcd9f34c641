use std::path::Path;

use verl_algos::losses::{Objective, ValueLoss};
use verl_algos::{Aggregation, MicroBatch};

use super::*;

/// A model whose optimiser reports `report` and moves the one weight by `moves`.
struct OneWeight {
    weight: i32,
    moves: i32,
    report: StepReport,
    hashes: std::cell::Cell<usize>,
}

impl TrainedModel for OneWeight {
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        self.weight += self.moves;
        Ok(self.report)
    }
    fn optimizer_steps(&self) -> u64 {
        0
    }
    fn weights_hash(&self) -> String {
        self.hashes.set(self.hashes.get() + 1);
        self.weight.to_string()
    }
    fn snapshot(&self) -> Box<dyn std::any::Any + Send + Sync> {
        Box::new(())
    }
    fn restore(&mut self, _: &(dyn std::any::Any + Send + Sync)) -> bool {
        true
    }
    fn save(&self, _: &Path) -> Result<(), ModelError> {
        Ok(())
    }
    fn vocab_size(&self) -> usize {
        1
    }
    fn max_tokens(&self) -> usize {
        1
    }
}

/// Three optimiser steps: whether they succeed, and how often the weights were hashed.
#[track_caller]
fn check(moves: i32, grad_norm: f64, learning_rate: f64, expected: (bool, usize)) {
    let mut steps = OptimizerSteps::default();
    let mut model = OneWeight {
        weight: 0,
        moves,
        report: StepReport {
            grad_norm,
            learning_rate,
            clipped: false,
        },
        hashes: std::cell::Cell::new(0),
    };
    let done = (0..3).all(|_| steps.step(&mut model, "actor").is_ok());
    assert_eq!((done, model.hashes.get()), expected);
}

#[test]
fn an_optimiser_that_changes_nothing_is_detected_at_its_first_step() {
    check(1, 0.5, 1e-3, (true, 2));
    check(0, 0.5, 1e-3, (false, 2));
    // No gradient, or no learning rate yet.
    check(0, 0.0, 1e-3, (true, 3));
    check(0, 0.5, 0.0, (true, 3));
}

const CUTS: Cuts = Cuts {
    mini_rows: 8,
    micro_rows: 3,
    samples: 4,
    epochs: 2,
};

#[test]
fn rows_are_split_as_the_unit_allows() {
    let minis: Vec<_> = CUTS.mini_batches(12).collect();
    assert_eq!(minis, [0..8, 8..12, 0..8, 8..12]);
    assert_eq!(CUTS.optimizer_steps(12), minis.len());
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
    let shares = Shares::of(&mini, &[], 8..16, CUTS, CutUnit::Row, |micro, shares| {
        seen.push([micro.rows.clone(), micro.tokens.clone()]);
        let device = burn::tensor::Device::flex();
        let values = Tensor::<1>::ones([micro.tokens.len()], &device);
        let share = prepared.loss(&MicroBatch::of_values(
            micro.tokens.clone().collect(),
            values.clone(),
        ));
        Ok(shares.take(share, values).into_scalar::<f64>())
    });
    (shares, seen)
}

#[test]
fn shares_add_up_and_micro_batches_without_tokens_are_skipped() {
    let (sum, seen) = shares(Some(vec![1.0, 2.0, 3.0, 5.0]));
    assert_eq!(seen, [[8..11, 0..3], [14..16, 3..4]]);
    let sum = sum.unwrap();
    // Half squares of 0, 1, 2 and 4.
    assert_eq!(sum.loss, (0.5 + 2.0 + 8.0) / 4.0);
    assert_eq!(sum.metrics[0].value(), sum.loss);
}

#[test]
fn an_error_of_the_maths_ends_the_step() {
    let (refused, seen) = shares(None);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("returns"), "{error}");
    assert_eq!(seen.len(), 1);
}
