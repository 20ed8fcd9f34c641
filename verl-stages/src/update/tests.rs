use std::path::Path;

use verl_models::model::{ModelError, Scores, TrainedModel};
use verl_models::rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};

use verl_pipe::batch::{RaggedColumn, RowId};
use verl_pipe::keys::RESPONSES;

use super::*;

/// A model whose optimiser reports `report` and moves the one weight by `moves`.
struct OneWeight {
    weight: i32,
    moves: i32,
    report: StepReport,
    hashes: std::cell::Cell<usize>,
}

impl PolicyModel for OneWeight {
    fn generate(
        &self,
        _: &[RolloutRequest],
        _: &SamplingSettings,
        _: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        Ok(())
    }
    fn score(&self, _: &[ScoreRow<'_>], _: f64, _: bool) -> Result<Vec<Scores>, ModelError> {
        Ok(Vec::new())
    }
    fn accumulate(
        &mut self,
        _: &[ScoreRow<'_>],
        _: &dyn Fn(usize, usize) -> bool,
        _: f64,
        _: bool,
        _: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        Err(ModelError::Frozen)
    }
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
    let config = Update::default();
    let mut stage = UpdateStage {
        loss: config.loss.build("loss", &BuildContext::default()).unwrap(),
        config,
        mini_rows: 1,
        micro_rows: 1,
        epochs: 1,
        samples: 1,
        has_moved: false,
    };
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
    let done = (0..3).all(|_| stage.optimizer_step(&mut model).is_ok());
    assert_eq!((done, model.hashes.get()), expected);
}

#[test]
fn an_optimiser_that_moves_nothing_is_found_at_its_first_step() {
    check(1, 0.5, 1e-3, (true, 2));
    check(0, 0.5, 1e-3, (false, 2));
    // Nothing to move by, or not yet.
    check(0, 0.0, 1e-3, (true, 3));
    check(0, 0.5, 0.0, (true, 3));
}

#[test]
fn truncated_responses_leave_the_loss_and_its_counts() {
    let ids: Vec<RowId> = (0..3).map(RowId).collect();
    let mut batch = Batch::with_rows(&ids);
    let tokens = [vec![1u32, 2], vec![3, 4, 5], vec![6]];
    batch
        .put(&PROMPTS, RaggedColumn::from_rows([[9u32]; 3]))
        .unwrap();
    batch
        .put(&RESPONSES, RaggedColumn::from_rows(&tokens))
        .unwrap();
    let kinds = [vec![1u8, 0], vec![1, 1, 1], vec![1]];
    batch
        .put(&MASK_KINDS, RaggedColumn::from_rows(&kinds))
        .unwrap();
    let rows = |batch: &Batch| {
        let columns = Columns::new(batch, RESPONSES).unwrap();
        columns.mini_batch(0..3).rows
    };
    assert_eq!(rows(&batch), [0, 1, 1, 1, 2]);
    let reasons = vec![finish::EOS, finish::LENGTH, finish::STOP];
    batch.put(&FINISH_REASONS, reasons).unwrap();
    assert_eq!(rows(&batch), [0, 2]);

    // The key is only there where the setting asks for it.
    let reads = |mask_truncated| {
        let config = Update {
            mask_truncated,
            ..Update::default()
        };
        let stage = StageConfig::build(&config, &BuildContext::default()).unwrap();
        let spec = stage.spec();
        let mut fields = spec.reads.iter().chain(&spec.reads_optional);
        fields.any(|field| field.name == FINISH_REASONS.name())
    };
    assert!(reads(true) && !reads(false));
}
