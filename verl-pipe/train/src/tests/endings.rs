//! Runs that end before their target: what they save and report.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use verl_declare::pipe::{DataPipe, ModelDecl, StageDecl};
use verl_run::error::RunError;
use verl_words::stage::{
    Access, CancelToken, Cardinality, RowRule, StageContext, StageError, StageSpec,
};

use super::fakes::*;
use super::trainer::{evaluated, lines, status, trainer};

/// An update with two optimiser steps; `between` runs in between.
fn twice(
    between: impl Fn(&mut StageContext<'_>) -> Result<(), StageError> + Send + Sync + 'static,
) -> StageDecl {
    let spec = StageSpec::new()
        .reads(verl_words::keys::ADVANTAGES)
        .rows(RowRule::Sink)
        .cardinality(Cardinality::Batch)
        .uses("actor", Access::Update);
    single("update", spec, move |_, context| {
        move_actor(context)?;
        between(context)?;
        move_actor(context)
    })
}

fn move_actor(context: &mut StageContext<'_>) -> Result<(), StageError> {
    let actor = context.model::<Numbers>("actor")?;
    actor.weights[0] += 1.0;
    actor.steps += 1;
    Ok(())
}

fn with(dir: &Path, stage: StageDecl) -> DataPipe {
    let mut pipe = evaluated(dir, 5);
    let at = pipe
        .stages
        .iter()
        .position(|other| other.name == stage.name);
    pipe.stages[at.expect("a stage of this name")] = stage;
    pipe
}

#[track_caller]
fn fails(pipe: &DataPipe) -> (RunError, String) {
    let (made, page) = trainer(pipe, CancelToken::default());
    let error = made.unwrap().train().expect_err("a run that fails");
    (error, page.text())
}

fn weights_of(dir: &Path) -> String {
    fs::read_to_string(dir.join("model/actor/weights.txt")).unwrap_or_default()
}

#[test]
fn a_failed_run_saves_the_models_of_the_last_completed_step() {
    let temp = tempfile::tempdir().unwrap();
    let whole = temp.path().join("whole");
    let (made, _) = trainer(&evaluated(&whole, 2), CancelToken::default());
    made.unwrap().train().unwrap();

    // A row that cannot be scored, and rewards that the guards reject.
    type Fault = fn() -> Result<f32, StageError>;
    let faults: [(&str, Fault); 2] = [
        ("row", || Err(StageError::failed("row 401 has no answer"))),
        ("nan", || Ok(f32::NAN)),
    ];
    for (name, fault) in faults {
        let dir = temp.path().join(name);
        let reward = stage(
            "reward",
            reward_spec().on_row_error(verl_words::stage::OnRowError::Stop),
            move |mut input, context| {
                if context.step < 3 {
                    return score(input, context);
                }
                let rewards = vec![fault()?; input.num_rows()];
                input.put(&verl_words::keys::REWARDS, rewards)?;
                context.emit(input)
            },
        );
        let (_, text) = fails(&with(&dir, reward));
        assert_eq!(weights_of(&dir), weights_of(&whole), "{name}");
        let end = status(&dir);
        assert_eq!(
            (&end["status"], &end["step"]),
            (&"failed".into(), &2.into())
        );
        assert_eq!(end["saved"], json!(["actor"]));
        assert_eq!(end.get("partial"), None);
        assert!(text.contains("saved as of step 2: `actor`\n"), "{text}");
    }
}

#[test]
fn a_run_without_an_update_saves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let generate = single("generate", generate_spec(), |_, _| panic!("out of memory"));
    let (error, _) = fails(&with(&dir, generate));
    assert!(matches!(error, RunError::Panic { step: 1, .. }));
    assert!(!dir.join("model").exists());
    assert_eq!(status(&dir).get("saved"), None);
}

#[test]
fn a_partial_step_is_saved_and_reported() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let (_, text) = fails(&with(
        &dir,
        twice(|context| match context.step {
            3 => Err(StageError::failed("the gradient is not finite")),
            _ => Ok(()),
        }),
    ));
    assert_eq!(weights_of(&dir), "[6.0, 2.0, 3.0]");
    let end = status(&dir);
    assert_eq!(
        (&end["step"], &end["partial"]),
        (&2.into(), &json!(["actor"]))
    );
    assert!(
        text.contains("saved as of step 2: `actor`; including a part of step 3: `actor`"),
        "{text}"
    );
}

#[test]
fn a_failed_update_without_an_optimiser_step_leaves_the_model_unchanged() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let spec = StageSpec::new()
        .reads(verl_words::keys::ADVANTAGES)
        .rows(RowRule::Sink)
        .cardinality(Cardinality::Batch)
        .uses("actor", Access::Update);
    let update = single("update", spec, |_, context| {
        if context.step == 3 {
            return Err(StageError::failed("the gradient is not finite"));
        }
        move_actor(context)
    });
    fails(&with(&dir, update));
    assert_eq!(weights_of(&dir), "[3.0, 2.0, 3.0]");
    assert_eq!(status(&dir).get("partial"), None);
}

#[test]
fn a_model_whose_update_panicked_is_not_saved() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let update = twice(|context| {
        assert!(context.step < 3, "a tensor of another shape");
        Ok(())
    });
    let (error, _) = fails(&with(&dir, update));
    assert!(matches!(error, RunError::Panic { step: 3, .. }), "{error}");
    assert!(!dir.join("model").exists());
    assert_eq!(status(&dir).get("saved"), None);
}

#[test]
fn cancelling_during_an_update_ends_the_run_after_the_step() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let cancel = CancelToken::default();
    let asked = cancel.clone();
    let update = twice(move |context| {
        if context.step == 2 {
            asked.cancel();
            // Long enough for the engine to check the token.
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        assert!(!context.cancel.is_cancelled());
        Ok(())
    });
    let (made, _) = trainer(&with(&dir, update), cancel);
    let error = made.unwrap().train().unwrap_err();
    assert!(matches!(error, RunError::Cancelled { .. }), "{error}");
    // Two optimiser steps in each of two steps.
    assert_eq!(weights_of(&dir), "[5.0, 2.0, 3.0]");
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["step"]),
        (&"cancelled".into(), &2.into())
    );
    assert_eq!(end.get("partial"), None);
    let steps: Vec<Value> = lines(&dir, "metrics.jsonl")
        .iter()
        .map(|line| line["step"].clone())
        .collect();
    assert_eq!(steps, [0, 1, 2]);
}

#[test]
fn a_step_is_recorded_even_if_its_observer_fails() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let spec = StageSpec::new().observer(2).uses("actor", Access::Read);
    let eval = single("eval", spec, |_, context| match context.step {
        2 => Err(StageError::failed("no question left")),
        _ => Ok(()),
    });
    fails(&with(&dir, eval));
    // The first observation, and both steps.
    assert_eq!(lines(&dir, "metrics.jsonl").len(), 3);
    assert_eq!(status(&dir)["saved"], json!(["actor"]));
}

#[test]
fn if_a_model_cannot_be_saved_the_others_still_are() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let mut pipe = evaluated(&dir, 2);
    pipe.models.push(ModelDecl {
        name: "other".to_owned(),
        kind: "numbers".to_owned(),
        config: Value::Null,
        factory: Arc::new(NumbersFactory),
        unwritable: Vec::new(),
        group: None,
    });
    pipe.run.save = Some(["other", "actor", "actor"].map(str::to_owned).to_vec());
    let (made, _) = trainer(&pipe, CancelToken::default());
    let mut trainer_ = made.unwrap();
    let models = dir.join("model");
    trainer_.on_step(move |metrics| {
        if metrics.step == 1 {
            // A file in place of the temporary folder.
            fs::create_dir(&models).unwrap();
            fs::write(models.join(".other.partial"), "").unwrap();
        }
    });
    let error = trainer_.train().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot save model `other`"), "{text}");
    // That model is not lost either.
    let place = super::room::saved_path(&text);
    let other = fs::read_to_string(place.join("weights.txt")).unwrap();
    fs::remove_dir_all(place.parent().unwrap()).unwrap();
    assert!(other.starts_with('['), "{other}");
    assert!(weights_of(&dir).starts_with('['));
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["saved"]),
        (&"failed".into(), &json!(["actor"]))
    );
}

#[test]
fn a_failed_save_leaves_no_empty_folder() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let mut run = start(vec![]);
    let folder = crate::folder::RunFolder::create(&dir, 5).unwrap();
    assert!(folder.save_model(&mut run, "nobody").is_err());
    assert!(!dir.join("model").exists());
    folder.save_model(&mut run, "actor").unwrap();
    assert!(folder.save_model(&mut run, "nobody").is_err());
    assert!(weights_of(&dir).starts_with('['));
}
