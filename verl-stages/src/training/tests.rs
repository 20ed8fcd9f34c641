use std::path::Path;

use verl_algos::losses::{Objective, ValueLoss};
use verl_algos::{Aggregation, MicroBatch};
use verl_models::model::ModelError;

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
fn shares(
    returns: Option<Vec<f64>>,
    round_len: usize,
) -> (Result<Shares, StageError>, Vec<[Range<usize>; 2]>) {
    let objective = Objective::new(Aggregation::TokenMean).with(1.0, ValueLoss { clip: None });
    let mini = MiniBatch {
        returns,
        ..MiniBatch::new(vec![0, 0, 2, 6])
    };
    let prepared = objective.prepare(&mini).unwrap();
    let mut seen = Vec::new();
    let cuts = (CUTS, CutUnit::Row);
    let shares = Shares::of(&mini, &[], 8..16, cuts, round_len, |round, reports| {
        let losses = round.iter().enumerate().map(|(index, micro)| {
            seen.push([micro.rows.clone(), micro.tokens.clone()]);
            let device = burn::tensor::Device::flex();
            let values = Tensor::<1>::ones([micro.tokens.len()], &device);
            let share = prepared.loss(&MicroBatch::of_values(
                micro.tokens.clone().collect(),
                values.clone(),
            ));
            reports.take(index, share, values).into_scalar::<f64>()
        });
        Ok(losses.collect())
    });
    (shares, seen)
}

#[test]
fn shares_add_up_and_micro_batches_without_tokens_are_skipped() {
    for round_len in [1, 2, 5] {
        let (sum, seen) = shares(Some(vec![1.0, 2.0, 3.0, 5.0]), round_len);
        assert_eq!(seen, [[8..11, 0..3], [14..16, 3..4]]);
        let sum = sum.unwrap();
        // Half squares of 0, 1, 2 and 4.
        assert_eq!(sum.loss, (0.5 + 2.0 + 8.0) / 4.0);
        assert_eq!(sum.metrics[0].value(), sum.loss);
    }
}

#[test]
fn an_error_of_the_maths_ends_the_step() {
    for round_len in [1, 2] {
        let (refused, seen) = shares(None, round_len);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("returns"), "{error}");
        assert_eq!(seen.len(), round_len);
    }
}

#[test]
fn the_first_error_of_a_round_names_its_sample() {
    let objective = Objective::new(Aggregation::TokenMean).with(1.0, ValueLoss { clip: None });
    let mini = MiniBatch {
        returns: Some(vec![1.0; 4]),
        ..MiniBatch::new(vec![0, 0, 2, 6])
    };
    assert!(objective.prepare(&mini).is_ok());
    let ids: Vec<RowId> = (0..16).map(|row| RowId::prompt(0, row).unwrap()).collect();
    let message = |refuse: Option<usize>, micro| {
        let cuts = (CUTS, CutUnit::Row);
        let refused = Shares::of(&mini, &ids, 8..16, cuts, 2, |_, reports| {
            if let Some(micro) = refuse {
                let error = AlgoError::Missing {
                    algorithm: "test",
                    argument: "numbers",
                };
                let device = burn::tensor::Device::flex();
                reports.take(micro, Err(error), Tensor::<1>::ones([1], &device));
            }
            let error = ModelError::EmptyPrompt { row: 1 };
            Err(RoundError { micro, error })
        });
        refused.unwrap_err().to_string()
    };
    // Row 1 of the second micro-batch is row 15 of the step.
    assert!(message(None, 1).contains("0.15"), "{}", message(None, 1));
    assert!(message(None, 0).contains("0.9"), "{}", message(None, 0));
    assert!(message(Some(0), 1).contains("numbers"));
    assert!(message(Some(1), 0).contains("0.9"));
}
