//! Several device groups in one run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use verl_declare::pipe::{DataPipe, ModelDecl, StageDecl};
use verl_declare::sizes::GroupConfig;
use verl_plan::Plannable;
use verl_words::keys::RESPONSES;
use verl_words::stage::{Access, RowRule, StageError, StageSpec};

use super::fakes::{Numbers, NumbersFactory, options, pipeline, single, start_with};

/// Longest wait for another group.
const PATIENCE: Duration = Duration::from_secs(20);

/// The pipeline of the fakes in group `train`, with a model `judge` in group `score`.
fn two_groups(others: Vec<StageDecl>) -> DataPipe {
    let cpu = || GroupConfig::new("cpu");
    let mut pipe = pipeline(others).group("train", cpu()).group("score", cpu());
    pipe.devices.group = "train".to_owned();
    pipe.models.push(ModelDecl {
        name: "judge".to_owned(),
        kind: "numbers".to_owned(),
        config: serde_json::Value::Null,
        factory: Arc::new(NumbersFactory),
        unwritable: Vec::new(),
        group: Some("score".to_owned()),
    });
    pipe
}

/// A stage that reads `model` and whose call ends only once both flags are up.
fn meets(
    name: &str,
    model: &'static str,
    (own, other): (&Arc<AtomicBool>, &Arc<AtomicBool>),
) -> StageDecl {
    let spec = StageSpec::new()
        .reads(RESPONSES)
        .rows(RowRule::Sink)
        .uses(model, Access::Read);
    let (own, other) = (own.clone(), other.clone());
    single(name, spec, move |_, context| {
        context.model::<Numbers>(model)?;
        own.store(true, Ordering::Release);
        let since = Instant::now();
        while !other.load(Ordering::Acquire) {
            if since.elapsed() > PATIENCE {
                return Err(StageError::failed("the other group does not work"));
            }
            std::thread::yield_now();
        }
        Ok(())
    })
}

#[test]
fn groups_work_at_the_same_time() {
    let (train, score) = (Arc::default(), Arc::default());
    let pipe = two_groups(vec![
        meets("first", "actor", (&train, &score)),
        meets("second", "judge", (&score, &train)),
    ]);
    let schedule = pipe.plan().unwrap().schedule().unwrap();
    let loaded = |group| {
        let models = schedule.models_at(group);
        models
            .map(|(decl, _)| decl.name.as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!((loaded(0), loaded(1)), (vec!["actor"], vec!["judge"]));
    assert_eq!(schedule.home("judge"), Some(1));
    let mut run = start_with(&pipe, options());
    run.step().unwrap();
}

#[test]
fn snapshots_cover_all_groups() {
    let moves = || {
        let spec = StageSpec::new()
            .reads(RESPONSES)
            .rows(RowRule::Sink)
            .uses("judge", Access::Update);
        single("moves", spec, |_, context| {
            let judge = context.model::<Numbers>("judge")?;
            judge.weights[0] += 1.0;
            judge.steps += 1;
            Ok(())
        })
    };
    let mut run = start_with(&two_groups(vec![moves()]), options());
    run.step().unwrap();
    let before = run.snapshot().unwrap();
    let versions = run.versions().unwrap();
    assert_eq!(before.models, versions);
    assert_eq!(versions.keys().collect::<Vec<_>>(), ["actor", "judge"]);
    run.step().unwrap();
    let after = run.versions().unwrap();
    assert_ne!(after["actor"], versions["actor"]);
    assert_eq!(after["judge"].step, 2);
    run.restore(&before).unwrap();
    assert_eq!(run.versions().unwrap(), versions);
    run.step().unwrap();
    assert_eq!(run.versions().unwrap(), after);

    // Only the run that made a snapshot has it.
    let mut other = start_with(&two_groups(vec![moves()]), options());
    let error = other.restore(&before).unwrap_err().to_string();
    assert!(
        error.contains("train") && error.contains("another run"),
        "{error}"
    );
}
