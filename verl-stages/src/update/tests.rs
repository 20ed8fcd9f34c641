use verl_pipe::batch::{RaggedColumn, RowId};
use verl_pipe::keys::{RESPONSES, finish};
use verl_pipe::stage::Models;

use super::*;
use crate::sink::run_with;
use verl_algos::Counts;

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

    // A correction of the rollout thins them out further, and weighs what is left.
    let masks = RaggedColumn::from_rows([vec![1u8, 0], vec![1, 1, 1], vec![0]]);
    batch.put(&ROLLOUT_MASKS, masks).unwrap();
    let weights = RaggedColumn::from_rows([vec![0.5f32, 0.0], vec![1.0, 1.0, 1.0], vec![3.0]]);
    batch.put(&ROLLOUT_WEIGHTS, weights).unwrap();
    assert_eq!(rows(&batch), [0]);
    let columns = Columns::new(&batch, RESPONSES).unwrap();
    let mini = columns.mini_batch(0..3);
    assert_eq!(mini.rollout_weights, Some(vec![0.5]));
    assert_eq!(mini.counts, Counts::declared(1, 3));

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

#[test]
fn the_first_steps_can_be_left_to_the_critic() {
    let stage = |warmup_steps, steps| {
        let config = Update {
            warmup_steps,
            ..Update::default()
        };
        let context = BuildContext {
            steps,
            ..BuildContext::default()
        };
        StageConfig::build(&config, &context).unwrap()
    };
    // A batch without columns is only refused by a step that looks at it.
    let rests = |step| {
        let batch = Batch::with_rows(&[RowId(0)]);
        run_with(stage(3, 9).as_mut(), step, batch, &mut Models::new()).is_ok()
    };
    assert_eq!([1, 2, 3, 4].map(rests), [true, true, true, false]);
    let doubts = |warmup_steps, steps| stage(warmup_steps, steps).spec().doubts;
    assert_eq!(doubts(8, 9), []);
    let doubt = doubts(9, 9).remove(0);
    assert_eq!(doubt.setting, "warmup_steps");
    assert!(doubt.reason.contains("never trained"), "{doubt}");
    assert_eq!(doubts(0, 0), []);
}
