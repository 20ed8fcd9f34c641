//! Messages to the user of a pipeline, from custom programs and from `pipe`: rows that fail, steps that learn nothing,
//! samples in errors.

use std::fs;
use std::io::Write;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Map, Value, json};
use verl::pipe::field::{LogProbTag, Support, Weights};
use verl::pipe::run::console::Console;
use verl::pipe::run::error::RunError;
use verl::pipe::run::runner::RunOptions;
use verl::pipe::trace::tap::{Tap, TapPoint};
use verl::prelude::*;

use crate::kit::{Finished, GRPO, Place};

/// Lines that a console wrote.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Page {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no panic").clone()).expect("a text")
    }
}

/// A trainer with a console, in a program without a subscriber.
fn with_console(pipe: &DataPipe) -> (Trainer, Page) {
    let page = Page::default();
    let plan = pipe
        .plan()
        .unwrap_or_else(|found| panic!("{}", Findings(found)));
    let options = TrainerOptions {
        console: Some(Console::to(Box::new(page.clone()), pipe.run.steps, 1)),
        ..TrainerOptions::default()
    };
    (
        Trainer::with_options(plan, options).expect("a trainer"),
        page,
    )
}

fn lines(run: &Finished, name: &str) -> Vec<Map<String, Value>> {
    let text = run.read(name);
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("an object a line")
}

/// The tiny pipeline with a custom reward.
fn own_reward(
    place: &Place,
    run: &str,
    judge: impl Fn(&Batch) -> Result<Vec<Option<f32>>, StageError> + Clone + Send + Sync + 'static,
) -> DataPipe {
    let mut pipe = place.grpo(run, &[]);
    let spec = StageSpec::new()
        .reads(keys::RESPONSES)
        .writes(keys::REWARDS)
        .slice_rows(1);
    let declared = DataPipe::new("own").add_stage(
        "reward",
        stage_fn(spec, move |input, context| {
            let rewards = judge(&input)?;
            let mut output = input.rows_only();
            output.put(&keys::REWARDS, rewards)?;
            context.emit(output)
        }),
    );
    let at = pipe.stages.iter().position(|stage| stage.name == "reward");
    pipe.stages[at.expect("the stage")] = declared.stages[0].clone();
    pipe
}

#[test]
fn p3_2_a_broken_reward_of_a_library_user_fails_and_is_reported_without_a_subscriber() {
    let place = Place::new();
    let pipe = own_reward(&place, "run", |input| {
        let tokens = input.get(&keys::RESPONSES)?;
        let answer: &[u32] = &[];
        Ok(vec![Some(answer[tokens.row_len(0)] as f32)])
    });
    let (mut trainer, _) = with_console(&pipe);
    let error = trainer.train().expect_err("a reward that panics");
    assert!(matches!(error, RunError::RowsFailed(_)), "{error}");
    let run = Finished {
        dir: place.path("run"),
    };
    let status = run.read("status.json");
    assert!(status.contains("index out of bounds"), "{status}");
    let rows = lines(&run, "row_errors.jsonl");
    assert_eq!(rows.len(), 16);
    assert!(rows.iter().all(|row| {
        row["reason"]
            .as_str()
            .is_some_and(|r| r.contains("user_messages.rs:"))
    }));

    // Only some rows fail: the run continues, and reports it at each step.
    let pipe = own_reward(&place, "some", |input| {
        let id = input.ids()[0];
        assert!(id.sample_index() != 1, "an answer without a unit");
        Ok(vec![
            Some(input.get(&keys::RESPONSES)?.row_len(0) as f32);
            input.num_rows()
        ])
    });
    let (mut trainer, page) = with_console(&pipe);
    trainer.train().expect("a run");
    let text = page.text();
    for step in 1..=3 {
        let expected = format!("warning: step {step}, stage `reward`: 4 of 16 rows failed");
        assert_eq!(text.matches(&expected).count(), 1, "{text}");
    }
    assert!(
        text.contains("4 panicked: an answer without a unit (at "),
        "{text}"
    );
}

#[test]
fn pipe_prints_each_warning_once_and_writes_it_to_the_run() {
    let place = Place::new();
    let file = place.path("grpo.toml");
    // A deadline that is too short for the reward: every row is late.
    let text = GRPO.replace(
        "target_tokens = 4\n",
        "target_tokens = 4\ndeadline_s = 1e-9\n",
    );
    fs::write(&file, text).expect("a file");
    let dir = place.path("run");
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["train", &file.display().to_string()])
        .args(["generate.top_k=3", &format!("run.dir={}", dir.display())])
        .output()
        .expect("the executable");
    let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(errors.matches("warning[C008]").count(), 1, "{errors}");
    let run = Finished { dir };
    let warnings = lines(&run, "warnings.jsonl");
    let of_plan = warnings.iter().filter(|line| line["source"] == "plan");
    assert_eq!(of_plan.count(), 1, "{warnings:#?}");
}

#[test]
fn p2_a_step_whose_responses_are_all_truncated_reports_that_it_learnt_nothing() {
    let place = Place::new();
    let pipe = place.grpo(
        "run",
        &[
            "generate.max_new_tokens=1",
            "update.mask_truncated=true",
            "steps=2",
        ],
    );
    let (mut trainer, page) = with_console(&pipe);
    trainer.train().expect("a run");
    let run = Finished {
        dir: place.path("run"),
    };
    for line in &run.metrics()[1..] {
        let truncated = line["response/truncated_share"].as_f64().expect("a share");
        let idle = f64::from(u8::from(truncated == 1.0));
        assert_eq!(line["update/no_samples"].as_f64(), Some(idle), "{line:?}");
    }
    let idle = run.metrics()[1..]
        .iter()
        .filter(|line| line["update/no_samples"] == 1.0)
        .count();
    assert!(idle > 0, "no step had only truncated responses");
    let expected =
        "nothing was left to train on, so no weights were updated: all 16 responses were cut off";
    assert_eq!(
        page.text().matches(expected).count(),
        idle,
        "{}",
        page.text()
    );
    assert!(run.read("warnings.jsonl").contains(expected));
    // A step that learns reports 0.
    let learns = place.train("learns", &["steps=1"]);
    assert_eq!(learns.metrics()[1]["update/no_samples"], 0.0);
}

#[test]
fn p3_14_warnings_of_a_run_are_in_its_status() {
    let place = Place::new();
    // All rewards are equal, and a rule warns about that.
    let pipe = own_reward(&place, "run", |input| Ok(vec![Some(1.0); input.num_rows()]));
    let (mut trainer, page) = with_console(&pipe);
    trainer.train().expect("a run");
    let run = Finished {
        dir: place.path("run"),
    };
    let status: Value = serde_json::from_str(&run.read("status.json")).expect("an object");
    assert_eq!(status["status"], "finished");
    assert_eq!(status["anomalies"]["constant_reward"], 1, "{status}");
    let warnings = lines(&run, "warnings.jsonl");
    assert_eq!(status["warnings"], json!(warnings.len()));
    assert!(page.text().contains("warning: "), "{}", page.text());
}

/// Only counts the rows that an update gets.
#[derive(Default)]
struct Updates(Mutex<Vec<usize>>);

impl Tap for Updates {
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        if point.stage == "update" {
            self.0.lock().expect("no panic").push(batch.num_rows());
        }
    }
}

#[test]
fn no_update_gets_rows_that_all_failed() {
    let place = Place::new();
    let pipe = own_reward(&place, "run", |_| Err(StageError::failed("no judge")));
    let seen = Arc::new(Updates::default());
    let options = TrainerOptions {
        run: RunOptions {
            tap: seen.clone(),
            ..RunOptions::default()
        },
        ..TrainerOptions::default()
    };
    let plan = pipe.plan().expect("a plan");
    let ended = Trainer::with_options(plan, options)
        .expect("a trainer")
        .train();
    assert!(matches!(ended, Err(RunError::RowsFailed(_))), "{ended:?}");
    assert!(seen.0.lock().expect("no panic").is_empty());
}

/// The tiny pipeline in which every second token is an observation, for which `old_log_probs` is `filler`.
fn observing(place: &Place, run: &str, filler: f32) -> DataPipe {
    let mut pipe = place.grpo(run, &["steps=2"]);
    let at = |pipe: &DataPipe, name: &str| {
        let found = pipe.stages.iter().position(|stage| stage.name == name);
        found.expect("the stage")
    };
    let generate = at(&pipe, "generate");
    let rename = &mut pipe.stages[generate].rename;
    rename.insert("mask_kinds".to_owned(), "raw_kinds".to_owned());
    let kinds = StageSpec::new()
        .reads(keys::RESPONSES)
        .writes(keys::MASK_KINDS);
    let tag = LogProbTag {
        policy: Some("actor".to_owned()),
        temperature: Some(1.0),
        support: Some(Support::Full),
        weights: Some(Weights::StepStart),
    };
    let old = StageSpec::new()
        .reads(keys::ROLLOUT_LOG_PROBS)
        .reads(keys::MASK_KINDS)
        .writes(keys::OLD_LOG_PROBS.tagged(tag));
    let own = DataPipe::new("own")
        .add_stage(
            "old_log_probs",
            stage_fn(old, move |input, context| {
                let (rollout, kinds) = (
                    input.get(&keys::ROLLOUT_LOG_PROBS)?,
                    input.get(&keys::MASK_KINDS)?,
                );
                let rows = rollout.rows().zip(kinds.rows()).map(|(row, kinds)| {
                    let tokens = row.iter().zip(kinds);
                    let tokens = tokens.map(|(value, kind)| match kind {
                        1 => *value,
                        _ => filler,
                    });
                    tokens.collect::<Vec<f32>>()
                });
                let rows = RaggedColumn::from_rows(rows.collect::<Vec<_>>());
                let mut output = input.rows_only();
                output.put(&keys::OLD_LOG_PROBS, rows)?;
                context.emit(output)
            }),
        )
        .add_stage(
            "kinds",
            stage_fn(kinds, |input, context| {
                let rows = input.get(&keys::RESPONSES)?;
                let rows = rows
                    .rows()
                    .map(|row| (0..row.len()).map(|at| u8::from(at % 2 == 0)).collect());
                let rows = RaggedColumn::from_rows(rows.collect::<Vec<Vec<u8>>>());
                let mut output = input.rows_only();
                output.put(&keys::MASK_KINDS, rows)?;
                context.emit(output)
            }),
        );
    let old = at(&pipe, "old_log_probs");
    pipe.stages[old] = own.stages[0].clone();
    pipe.stages.push(own.stages[1].clone());
    pipe
}

#[test]
fn p2_values_at_observation_tokens_change_no_bit() {
    let place = Place::new();
    let mut weights = Vec::new();
    for (run, filler) in [
        ("zero", 0.0),
        ("nan", f32::NAN),
        ("infinite", f32::NEG_INFINITY),
    ] {
        let (mut trainer, page) = with_console(&observing(&place, run, filler));
        trainer
            .train()
            .unwrap_or_else(|error| panic!("{run}: {error}"));
        let run = Finished {
            dir: place.path(run),
        };
        assert!(
            run.metrics()[2]["actor/grad_norm"]
                .as_f64()
                .is_some_and(|norm| norm > 0.0)
        );
        assert!(!page.text().contains("non_finite"), "{}", page.text());
        weights.push(run.weights());
    }
    assert!(weights.windows(2).all(|pair| pair[0] == pair[1]));
}
