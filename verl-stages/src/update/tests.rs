use verl_words::batch::{RaggedColumn, RowId};
use verl_words::keys::{RESPONSES, finish};
use verl_words::stage::Models;

use super::*;
use crate::sink::run_with;

#[test]
fn truncated_responses_are_excluded_from_the_loss_and_its_counts() {
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

    // `correct_rollout` excludes more tokens, and weights the others.
    let masks = RaggedColumn::from_rows([vec![1u8, 0], vec![1, 1, 1], vec![0]]);
    batch.put(&ROLLOUT_MASKS, masks).unwrap();
    let weights = RaggedColumn::from_rows([vec![0.5f32, 0.0], vec![1.0, 1.0, 1.0], vec![3.0]]);
    batch.put(&ROLLOUT_WEIGHTS, weights).unwrap();
    assert_eq!(rows(&batch), [0]);
    let columns = Columns::new(&batch, RESPONSES).unwrap();
    let mini = columns.mini_batch(0..3);
    assert_eq!(mini.rollout_weights, Some(vec![0.5]));
    // Rows without tokens are excluded from both denominators.
    assert_eq!(mini.counts, Counts::declared(1, 1));

    // The key is read only if the setting is on.
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
    // A batch without columns is refused only by a step that reads it.
    let is_idle = |step| {
        let batch = Batch::with_rows(&[RowId(0)]);
        run_with(stage(3, 9).as_mut(), step, batch, &mut Models::new()).is_ok()
    };
    assert_eq!([1, 2, 3, 4].map(is_idle), [true, true, true, false]);
    let warnings = |warmup_steps, steps| stage(warmup_steps, steps).spec().warnings;
    assert_eq!(warnings(8, 9), []);
    let warning = warnings(9, 9).remove(0);
    assert_eq!(warning.setting, "warmup_steps");
    assert!(warning.reason.contains("never trained"), "{warning}");
    assert_eq!(warnings(0, 0), []);
}

#[test]
fn several_optimiser_steps_per_step_need_old_log_probs() {
    let needs = |loss: Part<Loss>, steps| {
        let config = Update {
            loss,
            ..Update::default()
        };
        let mut context = BuildContext::default();
        context.batch.samples = 2;
        context.batch.optimizer_steps = steps;
        let spec = StageConfig::build(&config, &context).unwrap().spec();
        let has = |fields: &[verl_words::field::Field]| {
            fields
                .iter()
                .any(|field| field.name == OLD_LOG_PROBS.name())
        };
        (has(&spec.reads), has(&spec.reads_optional))
    };
    let ratio = || PolicyObjective::<Grpo>::default().into();
    assert_eq!(needs(ratio(), 1), (false, true));
    assert_eq!(needs(ratio(), 0), (false, true));
    assert_eq!(needs(ratio(), 2), (true, false));
    let none = crate::losses::Dpo::default;
    assert_eq!(needs(none().into(), 8), (false, false));
}

/// A model to train, and two pairs of answers with log-probs of a reference.
fn pairs() -> (Models, Batch) {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-base");
    let optimizer = verl_models::optim::OptimizerConfig {
        learning_rate: 1e-3,
        ..Default::default()
    };
    let model = crate::model::CausalLm::trained(folder, optimizer);
    let model =
        verl_words::stage::ModelFactory::load(&model, "actor", "cpu", &BuildContext::default());
    let models = Models::from([("actor".to_owned(), model.expect("a model"))]);
    let ids = [0, 1].map(|row| RowId::prompt(0, row).unwrap());
    let mut batch = Batch::with_rows(&ids).repeat(2).unwrap();
    let prompts = [[1u32, 5], [1, 5], [1, 9], [1, 9]];
    let tokens = [&[7u32, 8, 2][..], &[6, 2], &[10, 11, 12, 2], &[2]];
    let reference = tokens.map(|row| vec![-1.5f32; row.len()]);
    let kinds = tokens.map(|row| vec![1u8; row.len()]);
    batch
        .put(&PROMPTS, RaggedColumn::from_rows(prompts))
        .unwrap();
    batch
        .put(&RESPONSES, RaggedColumn::from_rows(tokens))
        .unwrap();
    batch
        .put(&MASK_KINDS, RaggedColumn::from_rows(kinds))
        .unwrap();
    batch
        .put(&REF_LOG_PROBS, RaggedColumn::from_rows(reference))
        .unwrap();
    batch
        .put(&verl_words::keys::DESIRABLE, vec![1u8, 0, 1, 0])
        .unwrap();
    (models, batch)
}

/// The values of `metric` in each of `steps`, of the stage with a loss on pairs.
fn losses_of(loss: crate::losses::Dpo, metric: &Metric, steps: &[u64]) -> Vec<f64> {
    let config = Update {
        loss: loss.into(),
        ..Update::default()
    };
    let mut context = BuildContext::default();
    context.batch.samples = 2;
    context.batch.mini_rows = 4;
    context.batch.micro_rows = 2;
    let mut stage = StageConfig::build(&config, &context).unwrap();
    let (mut models, batch) = pairs();
    let mut one = |stage: &mut dyn Stage, step| {
        let kept = run_with(stage, step, batch.clone(), &mut models).expect("a step");
        kept.mean(metric).expect("recorded")
    };
    let mut values = Vec::new();
    for step in steps {
        values.push(one(stage.as_mut(), *step));
    }
    values
}

#[test]
fn the_reward_shift_is_kept_between_steps_and_in_snapshots() {
    let bco = crate::losses::Dpo {
        variant: crate::losses::PreferenceLossName::BcoPair,
        reward_shift: true,
        ..Default::default()
    };
    let shifts = losses_of(bco.clone(), &REWARD_SHIFT, &[1, 2]);
    assert!(shifts[0] != 0.0 && shifts[0] != shifts[1], "{shifts:?}");
    // The first step has no mean yet, the second has.
    let plain = crate::losses::Dpo {
        reward_shift: false,
        ..bco.clone()
    };
    let (with, without) = (
        losses_of(bco.clone(), &LOSS, &[1, 2]),
        losses_of(plain, &LOSS, &[1, 2]),
    );
    assert_eq!(with[0], without[0]);
    assert!(with[1] != without[1], "{with:?}");

    let config = Update {
        loss: bco.into(),
        ..Update::default()
    };
    let mut context = BuildContext::default();
    context.batch.samples = 2;
    context.batch.mini_rows = 4;
    let mut stage = StageConfig::build(&config, &context).unwrap();
    let (mut models, batch) = pairs();
    let mut shift = |stage: &mut dyn Stage| {
        let kept = run_with(stage, 1, batch.clone(), &mut models).unwrap();
        kept.mean(&REWARD_SHIFT).unwrap()
    };
    shift(stage.as_mut());
    let kept = stage.snapshot().unwrap().expect("state");
    let state = kept
        .state
        .downcast_ref::<crate::losses::LossState>()
        .unwrap()
        .clone();
    shift(stage.as_mut());
    stage.restore(&kept).unwrap();
    let again = stage.snapshot().unwrap().expect("state");
    assert_eq!(
        again.state.downcast_ref::<crate::losses::LossState>(),
        Some(&state)
    );
    let none = StageConfig::build(&Update::default(), &context)
        .unwrap()
        .snapshot();
    assert!(none.unwrap().is_none());
}

#[test]
fn pairs_can_be_weighted_by_how_likely_the_policy_generates_them() {
    let dpo = crate::losses::Dpo::default;
    let weighed = crate::losses::Dpo { wpo: true, ..dpo() };
    let (with, without) = (
        losses_of(weighed, &LOSS, &[1]),
        losses_of(dpo(), &LOSS, &[1]),
    );
    // A weight is a product of geometric means of π / Σ π², positive and here not 1.
    assert!(
        with[0] > 0.0 && (with[0] - without[0]).abs() > 1e-6,
        "{with:?} {without:?}"
    );
    let sorted = crate::losses::Dpo {
        variant: crate::losses::PreferenceLossName::Aot,
        wpo: true,
        ..dpo()
    };
    let mut context = BuildContext::default();
    context.batch.samples = 2;
    let part: Part<Loss> = sorted.into();
    let faults = part.build("loss", &context).unwrap_err();
    assert!(format!("{faults:?}").contains("wpo"), "{faults:?}");
}

#[test]
fn the_loss_of_a_policy_gradient_is_shown_last() {
    let spec = |config: &Update| {
        StageConfig::build(config, &BuildContext::default())
            .unwrap()
            .spec()
    };
    let declared = spec(&Update::default()).metrics;
    let shown = spec(&Update::default()).shows;
    for shown in &shown {
        assert!(
            declared.iter().any(|metric| metric.name == shown.metric),
            "{shown:?}"
        );
    }
    let rank = |shows: &[Shown], label| shows.iter().find(|s| s.label == label).unwrap().rank;
    assert_eq!(rank(&shown, "loss"), Shown::DETAIL);
    let sft = Update {
        loss: crate::losses::Sft::default().into(),
        ..Update::default()
    };
    assert_eq!(rank(&spec(&sft).shows, "loss"), Shown::LOSS);
}
