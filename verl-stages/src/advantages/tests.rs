use std::collections::BTreeMap;

use verl_declare::registry::Registry;
use verl_pipe::config::parse_pipeline;
use verl_words::batch::RowId;
use verl_words::diagnostic::Findings;
use verl_words::field::{Key, Ragged, Scalar};
use verl_words::stage::{CancelToken, Models, StageSink};

use super::*;
use crate::estimators::{DrGrpo, Gae, Gdpo, GrpoTrl, Otb, ReMax, ReinforcePlusPlus, RlooTrl};

#[derive(Default)]
struct RecordingSink {
    batches: Vec<Batch>,
    metrics: BTreeMap<&'static str, Vec<f64>>,
}

impl StageSink for RecordingSink {
    fn emit(&mut self, batch: Batch) -> Result<(), StageError> {
        self.batches.push(batch);
        Ok(())
    }
    fn record(&mut self, metric: &Metric, value: f64, _weight: f64) {
        self.metrics.entry(metric.name).or_default().push(value);
    }
    fn record_named(&mut self, _name: &str, _value: f64, _weight: f64) {}
    fn sample(&mut self, _sample: serde_json::Value) {}
}

/// Two responses to each of two prompts; the first has an observation, the third no score.
fn input() -> Batch {
    let ids = [(1, 0), (1, 1), (2, 0), (2, 1)];
    let ids = ids.map(|(row, sample)| RowId::prompt(0, row).unwrap().sample(sample).unwrap());
    let ragged = |rows: [&[f32]; 4]| RaggedColumn::from_rows(rows);
    let kinds: [&[u8]; 4] = [&[1, 0, 1], &[1, 1], &[1], &[1, 1]];
    let mut batch = Batch::with_rows(&ids);
    batch
        .put(&MASK_KINDS, RaggedColumn::from_rows(kinds))
        .unwrap();
    let rewards = vec![Some(1.0), Some(0.0), None, Some(0.5)];
    batch.put(&REWARDS, rewards).unwrap();
    batch
        .put(&REWARD_BASELINES, vec![0.25, 0.25, 0.5, 0.5])
        .unwrap();
    let values = ragged([&[0.1, 9.0, 0.3], &[0.5, 0.0], &[7.0], &[0.5, 0.25]]);
    batch.put(&VALUES, values).unwrap();
    let old = ragged([&[-1.0, 9.0, -1.0], &[-1.0, -1.0], &[-1.0], &[-1.0, -1.0]]);
    batch.put(&OLD_LOG_PROBS, old).unwrap();
    let reference = ragged([&[-1.1, 0.0, -1.2], &[-1.0, -1.3], &[-2.0], &[-2.0, -2.0]]);
    batch.put(&REF_LOG_PROBS, reference).unwrap();
    let squares = ragged([&[0.5, 9.0, 0.5], &[0.5, 0.5], &[0.5], &[0.5, 0.5]]);
    batch.put(&SUM_PI_SQUARED, squares).unwrap();
    batch
        .put(&FORM, vec![Some(0.0), Some(4.0), None, Some(2.0)])
        .unwrap();
    batch
}

/// Rewards of a second function.
const FORM: Key<Scalar<f32>> = Key::new("form", "[B]", "reward", "rewards of the form").nullable();

fn context() -> BuildContext {
    let mut context = BuildContext::default();
    context.batch.samples = 2;
    context
}

fn run(stage: &mut dyn Stage) -> (Batch, RecordingSink) {
    run_on(stage, input())
}

fn run_on(stage: &mut dyn Stage, input: Batch) -> (Batch, RecordingSink) {
    let mut sink = RecordingSink::default();
    let mut context = StageContext {
        wave: 0,
        stage: "advantages",
        step: 1,
        steps: 1,
        seed: 1,
        cancel: &CancelToken::default(),
        models: &mut Models::new(),
        sink: &mut sink,
    };
    stage.run(input, &mut context).unwrap();
    (sink.batches[0].clone(), sink)
}

/// Advantages with a KL penalty of `kl_coef`; an observation's is 0.
#[track_caller]
fn check(estimator: impl Into<Part<Estimator>>, kl_coef: f64, expected: [&[f32]; 4]) -> Batch {
    let config = Advantages {
        estimator: estimator.into(),
        kl_coef,
        ..Advantages::default()
    };
    let (batch, _) = run(config.build(&context()).unwrap().as_mut());
    close(&batch, &ADVANTAGES, expected);
    batch
}

#[track_caller]
fn close(batch: &Batch, key: &Key<Ragged<f32>>, expected: [&[f32]; 4]) {
    for (got, expected) in batch.get(key).unwrap().rows().zip(expected) {
        let near = got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-5);
        assert!(
            near && got.len() == expected.len(),
            "{got:?}, not {expected:?}"
        );
    }
}

#[test]
fn outcomes_by_hand() {
    let half = 0.5f32.sqrt();
    check(
        Grpo::default(),
        0.0,
        [&[half, 0.0, half], &[-half, -half], &[0.0], &[0.5, 0.5]],
    );
    // Penalties 0.5 · (0.1 + 0.2), 0.5 · 0.3 and 0.5 · 2.
    check(
        DrGrpo {},
        0.5,
        [&[0.5, 0.0, 0.5], &[-0.5, -0.5], &[0.0], &[-0.5, -0.5]],
    );
}

#[test]
fn rewards_on_tokens_by_hand() {
    check(
        ReMax {},
        0.0,
        [&[0.75, 0.0, 0.75], &[-0.25, -0.25], &[0.0], &[0.0, 0.0]],
    );
    check(
        ReMax {},
        0.5,
        [&[0.6, 0.0, 0.65], &[-0.4, -0.4], &[0.0], &[-1.0, -0.5]],
    );
    let gae = Gae {
        whiten: false,
        ..Gae::default()
    };
    let batch = check(
        gae,
        0.0,
        [&[0.9, 0.0, 0.7], &[-0.5, 0.0], &[0.0], &[0.0, 0.25]],
    );
    // The return of the row without a score is its value.
    close(
        &batch,
        &RETURNS,
        [&[1.0, 0.0, 1.0], &[0.0, 0.0], &[7.0], &[0.5, 0.5]],
    );
    // Rewards −0.05 and 0.9, 0 and −0.15, −0.5 and 0.
    let gae = Gae {
        whiten: false,
        ..Gae::default()
    };
    let batch = check(
        gae,
        0.5,
        [&[0.75, 0.0, 0.6], &[-0.65, -0.15], &[0.0], &[-1.0, -0.25]],
    );
    close(
        &batch,
        &RETURNS,
        [&[0.85, 0.0, 0.9], &[-0.15, -0.15], &[7.0], &[-0.5, 0.0]],
    );
    // Returns 1, 1, 0, 0, 0.5, 0.5: mean 0.5, variance 0.2.
    let above = 0.5 / 0.2f32.sqrt();
    check(
        ReinforcePlusPlus::default(),
        0.0,
        [&[above, 0.0, above], &[-above, -above], &[0.0], &[0.0, 0.0]],
    );
}

/// A single scored response is compared with nothing: its advantage is 0, as in TRL.
#[test]
fn components_by_hand() {
    let both = || vec!["rewards".to_owned(), FORM.name().to_owned()];
    // Sums 1 and 0 + 0.5 · 4: the deviation over n − 1 is 1/√2.
    let trl = GrpoTrl {
        components: both(),
        weights: Some(vec![1.0, 0.5]),
        epsilon: 0.0,
        ..GrpoTrl::default()
    };
    let half = 0.5f32.sqrt();
    check(
        trl,
        0.0,
        [&[-half, 0.0, -half], &[half, half], &[0.0], &[0.0, 0.0]],
    );
    // The first group's advantages are equal and opposite and cancel; only the raw scores of the single row remain.
    let gdpo = Gdpo {
        components: both(),
        ..Gdpo::default()
    };
    let config = Advantages {
        estimator: gdpo.into(),
        ..Advantages::default()
    };
    let mut stage = config.build(&context()).unwrap();
    let spec = stage.spec();
    let reads: Vec<&str> = spec.reads.iter().map(|field| field.name.as_ref()).collect();
    assert_eq!(reads, ["rewards", "form", "mask_kinds"]);
    let (batch, kept) = run(stage.as_mut());
    let rows = batch.get(&ADVANTAGES).unwrap();
    assert!((rows.row(0)[0] - rows.row(1)[0]).abs() < 1e-4 && rows.row(3)[0] > 0.0);
    assert_eq!(kept.metrics["reward/mean"], [1.0, 4.0, 2.5]);
    assert_eq!(kept.metrics["reward/unscored"], [1.0]);
}

#[test]
fn log_probs_of_estimators_by_hand() {
    // KL 0.3 and 0.3, so the scores stay 1 apart; each is the other's baseline.
    let rloo = RlooTrl {
        beta: 0.5,
        ..RlooTrl::default()
    };
    check(
        rloo,
        0.0,
        [&[1.0, 0.0, 1.0], &[-1.0, -1.0], &[0.0], &[0.0, 0.0]],
    );
    // All tokens have the same variance, so the baseline of a position is the mean of the responses that reach it. Both
    // rows have two actions, so neither is the longest, and position 2 of the first is its own baseline.
    check(
        Otb::default(),
        0.0,
        [&[0.5, 0.0, 0.0], &[-0.5, 0.0], &[0.0], &[0.5, 0.5]],
    );
}

#[test]
fn a_response_whose_baseline_has_no_score_is_unscored() {
    let config = Advantages {
        estimator: ReMax {}.into(),
        ..Advantages::default()
    };
    let mut batch = input();
    let baselines = vec![None, None, Some(0.5), Some(0.25)];
    batch.put(&REWARD_BASELINES, baselines).unwrap();
    let (batch, kept) = run_on(config.build(&context()).unwrap().as_mut(), batch);
    let expected: [&[f32]; 4] = [&[0.0, 0.0, 0.0], &[0.0, 0.0], &[0.0], &[0.25, 0.25]];
    close(&batch, &ADVANTAGES, expected);
    assert_eq!(kept.metrics["reward/unscored"].len(), 3);
}

#[test]
fn a_penalty_that_the_estimator_cannot_use_is_refused() {
    for estimator in [Part::from(Gdpo::default()), Part::from(RlooTrl::default())] {
        let config = Advantages {
            estimator,
            kl_coef: 0.1,
            ..Advantages::default()
        };
        let faults = config.build(&context()).err().expect("refused");
        assert_eq!(faults[0].setting, "kl_coef", "{faults:?}");
    }
}

#[test]
fn metrics_are_reported() {
    let config = Advantages {
        kl_coef: 0.5,
        ..Advantages::default()
    };
    let (_, kept) = run(config.build(&context()).unwrap().as_mut());
    assert_eq!(kept.metrics["reward/mean"], [1.0, 0.0, 0.5]);
    assert_eq!(kept.metrics["reward/unscored"], [1.0]);
    assert_eq!(kept.metrics["reward/groups_without_signal"], [0.0, 0.0]);
    let kls = [0.15, 0.15, 1.0, 1.0];
    let near = |(got, kl): (&f64, f64)| (got - kl).abs() < 1e-6;
    assert!(kept.metrics["reward/kl"].iter().zip(kls).all(near));
    let without_groups = Advantages {
        estimator: ReMax {}.into(),
        ..Advantages::default()
    };
    let (_, kept) = run(without_groups.build(&context()).unwrap().as_mut());
    assert!(!kept.metrics.contains_key("reward/groups_without_signal"));
}

/// Every kind with its defaults emits the keys that its stage declares.
#[test]
fn every_estimator_runs() {
    let registry = crate::register(Registry::new());
    let kinds = registry.slot("estimator").unwrap();
    assert!(kinds.iter().count() > 3);
    for kind in kinds.iter() {
        let text = format!(
            "[[stages]]\nkind = \"advantages\"\nestimator = \"{}\"",
            kind.name
        );
        let pipe = parse_pipeline::<&str>(&text, "one.toml", &[], &registry);
        let pipe = pipe.map_err(Findings).unwrap();
        let mut stage = (pipe.stages[0].build)(&context()).unwrap();
        let (batch, _) = run(stage.as_mut());
        for field in stage.spec().writes {
            batch.check_field(&field).unwrap();
        }
        let rows = batch.get(&ADVANTAGES).unwrap();
        assert_eq!(
            (rows.row(0)[1], rows.row(2)[0]),
            (0.0, 0.0),
            "{}",
            kind.name
        );
    }
}

#[test]
fn an_adaptive_penalty_follows_the_kl_and_is_restored() {
    let config = Advantages {
        estimator: ReinforcePlusPlus::default().into(),
        kl_coef: 0.5,
        kl_control: KlControl {
            kind: Control::Adaptive,
            target: Some(1e-3),
            horizon: Some(40.0),
        },
        ..Advantages::default()
    };
    let mut stage = StageConfig::build(&config, &context()).unwrap();
    let at = |stage: &mut dyn Stage, step| {
        let mut sink = RecordingSink::default();
        let mut context = StageContext {
            wave: 0,
            stage: "advantages",
            step,
            steps: 9,
            seed: 1,
            cancel: &CancelToken::default(),
            models: &mut Models::new(),
            sink: &mut sink,
        };
        stage.run(input(), &mut context).unwrap();
        sink.metrics["reward/kl_coef"][0]
    };
    assert_eq!(at(stage.as_mut(), 1), 0.5);
    let kept = stage.snapshot().unwrap().expect("state");
    // The KL is far above the target: 20 % for 4 of 40 responses.
    let second = at(stage.as_mut(), 2);
    assert!((second - 0.5 * 1.02).abs() < 1e-12, "{second}");
    let third = at(stage.as_mut(), 3);
    assert!((third - 0.5 * 1.02 * 1.02).abs() < 1e-12, "{third}");
    stage.restore(&kept).unwrap();
    assert_eq!([2, 3].map(|step| at(stage.as_mut(), step)), [second, third]);

    let without_target = Advantages {
        kl_control: KlControl {
            kind: Control::Adaptive,
            ..KlControl::default()
        },
        ..config
    };
    let faults = StageConfig::build(&without_target, &context())
        .err()
        .unwrap();
    let settings: Vec<&str> = faults.iter().map(|fault| fault.setting.as_str()).collect();
    assert_eq!(settings, ["kl_control.target", "kl_control.horizon"]);
    let fixed = StageConfig::build(&Advantages::default(), &context())
        .unwrap()
        .snapshot();
    assert!(fixed.unwrap().is_none());
}
