//! Rows that fail in a stage: which of them end the step, and how they are reported.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use verl_declare::pipe::{DataPipe, StageDecl};
use verl_plan::Plannable;
use verl_run::error::RunError;
use verl_words::batch::Batch;
use verl_words::keys::{GROUP_MEANS, PROMPTS, REWARDS};
use verl_words::stage::{CancelToken, Cardinality, RowRule, StageContext, StageError, StageSpec};

use super::fakes::*;
use super::streaming::Count;
use super::trainer::{Page, lines, status, trainer};
use crate::console::Console;
use crate::trainer::{Trainer, TrainerOptions};

/// A run of `steps` steps in `dir` whose rewards are `reward`.
fn rewarded(dir: &Path, steps: u64, reward: StageDecl) -> DataPipe {
    let mut pipe = pipeline(vec![reward]);
    pipe.run.steps = steps;
    pipe.run.dir = dir.to_owned();
    // The rules would warn about the rewards of the fakes.
    pipe.trace.stats = false;
    pipe
}

type Fault = fn(Batch, &mut StageContext<'_>) -> Result<(), StageError>;

/// Typical mistakes in rewards, and how each is reported.
const FAULTS: [(&str, &str, Fault); 4] = [
    ("panicked", "a user's mistake (at ", |_, _| {
        panic!("a user's mistake")
    }),
    ("failed", "no answer from the judge", |_, _| {
        Err(StageError::failed("no answer from the judge"))
    }),
    (
        "wrong_length",
        "`rewards` has 0 rows in a batch of 1",
        |mut input, context| {
            input.put(&REWARDS, Vec::<f32>::new())?;
            context.emit(input)
        },
    ),
    (
        "missing_key",
        "the batch has no key `prompts`",
        |input, context| {
            input.get(&PROMPTS)?;
            score(input, context)
        },
    ),
];

#[test]
fn p3_2_a_reward_that_fails_in_every_row_fails_the_step() {
    let temp = tempfile::tempdir().unwrap();
    for (name, reason, fault) in FAULTS {
        let dir = temp.path().join(name);
        let reward = stage("reward", reward_spec(), fault);
        let (made, _) = trainer(&rewarded(&dir, 3, reward), CancelToken::default());
        let error = made.unwrap().train().unwrap_err();
        let RunError::RowsFailed(failed) = &error else {
            panic!("{name}: {error}");
        };
        assert_eq!((failed.failed, failed.rows), (18, 18), "{name}");
        assert_eq!(error.code(), "R019");
        let text = error.to_string();
        assert!(
            text.starts_with("step 1, stage `reward`: all 18 rows failed, so nothing is left to learn from\n  18 "),
            "{text}"
        );
        for words in [reason, "(first: sample 0.0#0, row 1 of the data)"] {
            assert!(text.contains(words), "{name}: {text}");
        }
        // Nothing was trained, and the folder says why.
        let end = status(&dir);
        assert_eq!(
            (&end["status"], &end["step"]),
            (&json!("failed"), &json!(0))
        );
        assert!(end["reason"].as_str().unwrap().contains(reason), "{end}");
        assert!(!dir.join("model").exists());
        let rows = lines(&dir, "row_errors.jsonl");
        assert_eq!(rows.len(), 18, "{name}");
        let first = &rows[0];
        assert_eq!(
            (
                &first["step"],
                &first["stage"],
                &first["sample"],
                &first["data_row"]
            ),
            (&json!(1), &json!("reward"), &json!("0.0#0"), &json!(1))
        );
        assert_eq!(first["status"], name);
        assert!(
            first["reason"].as_str().unwrap().contains(reason),
            "{first}"
        );
        assert!(first["seconds"].is_number());
    }
}

#[test]
fn a_reward_that_hangs_in_every_row_fails_the_step() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let spec = reward_spec().deadline(Duration::from_millis(30));
    let reward = stage("reward", spec, move |_, _| gate.reaches(1));
    let (made, _) = trainer(&rewarded(&dir, 3, reward), CancelToken::default());
    let error = made.unwrap().train().unwrap_err();
    release.add();
    let text = error.to_string();
    assert!(matches!(error, RunError::RowsFailed(_)), "{text}");
    assert!(
        text.contains("18 timed out: no answer within the deadline of 0.03 s (first: sample 0.0#0"),
        "{text}"
    );
    let rows = lines(&dir, "row_errors.jsonl");
    assert!(rows.iter().all(|row| row["status"] == "timed_out"));
    assert!(
        rows.iter()
            .all(|row| row["seconds"].as_f64().unwrap() >= 0.03)
    );
}

/// Fails in the first `failing` rows of a step, in the order of the data.
fn failing(failing: u64) -> StageDecl {
    stage(
        "reward",
        reward_spec().slice_rows(1),
        move |input, context| {
            let id = input.ids()[0];
            let at = id.row() % BATCH.prompts as u64 * SAMPLES as u64 + id.sample_index();
            if at < failing {
                return Err(StageError::failed(format!("reason {}", at % 2)));
            }
            score(input, context)
        },
    )
}

#[test]
fn how_many_rows_may_fail_is_a_setting() {
    // 18 rows with a limit of a third: one more is too many.
    for (rows, share, fails) in [
        (17, 1.0, false),
        (18, 1.0, true),
        (6, 1.0 / 3.0, false),
        (7, 1.0 / 3.0, true),
        (1, 0.0, true),
        (0, 0.0, false),
    ] {
        let mut pipe = pipeline(vec![failing(rows)]);
        pipe.run.max_failed_share = share;
        let mut run = start_with(&pipe, options());
        let before = weights(&mut run);
        match run.step() {
            Ok(output) => {
                assert!(!fails, "{rows} of 18 at {share}");
                assert_eq!(output.metrics.get("reward/row_errors"), Some(rows as f64));
            }
            Err(error) => {
                assert!(fails, "{rows} of 18 at {share}: {error}");
                assert_eq!(weights(&mut run), before);
                if rows == 7 {
                    let text = error.to_string();
                    assert!(
                        text.contains("7 of 18 rows failed, more than the allowed share of 0.333"),
                        "{text}"
                    );
                    assert!(
                        text.contains("4 failed: reason 0 (first: sample 0.0#0"),
                        "{text}"
                    );
                    assert!(
                        text.contains("3 failed: reason 1 (first: sample 0.0#1"),
                        "{text}"
                    );
                }
            }
        }
    }
    let mut pipe = pipeline(vec![]);
    for share in [-0.1, 1.5, f64::NAN] {
        pipe.run.max_failed_share = share;
        let findings = pipe.plan().err().expect("an invalid share");
        assert_eq!(findings[0].code, "C005");
        assert!(findings[0].to_string().contains("max_failed_share"));
    }
}

#[test]
fn failed_rows_are_reported_before_a_missing_signal() {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .writes(GROUP_MEANS)
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group)
        .refill(verl_words::stage::Refill {
            groups: BATCH.prompts,
            waves: 1,
            on_short: verl_words::stage::OnShort::Error,
        });
    let filter = stage("filter", spec, |input, context| {
        if input.get(&REWARDS)?.rows().all(|reward| reward.is_none()) {
            return Ok(());
        }
        let mut output = input.rows_only();
        output.put(&GROUP_MEANS, vec![0.5; input.num_rows()])?;
        context.emit(output)
    });
    let reward = stage("reward", reward_spec(), |_, _| {
        Err(StageError::failed("no judge"))
    });
    let error = start(vec![reward, filter]).step().unwrap_err();
    assert!(matches!(error, RunError::RowsFailed(_)), "{error}");
}

#[test]
fn p2_each_failed_row_is_reported_with_status_and_reason() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let reward = stage("reward", reward_spec().slice_rows(1), |input, context| {
        let id = input.ids()[0];
        match (id.row() % 6, id.sample_index()) {
            (2, 1) => panic!("row {} has no unit", id.row()),
            (3, 0) => Err(StageError::failed("no answer")),
            _ => score(input, context),
        }
    });
    let mut pipe = rewarded(&dir, 2, reward);
    pipe.run.samples_per_step = 18;
    let (made, page) = trainer(&pipe, CancelToken::default());
    made.unwrap().train().unwrap();
    let rows = lines(&dir, "row_errors.jsonl");
    let found: Vec<(u64, &str, &str)> = rows
        .iter()
        .map(|row| {
            let text = |name: &str| row[name].as_str().unwrap();
            (
                row["step"].as_u64().unwrap(),
                text("sample"),
                text("status"),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (1, "0.2#1", "panicked"),
            (1, "0.3#0", "failed"),
            (2, "0.8#1", "panicked"),
            (2, "0.9#0", "failed"),
        ]
    );
    let reason = rows[2]["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("row 8 has no unit (at ") && reason.contains("row_errors.rs:"),
        "{reason}"
    );
    // The failed samples of the step say so, and the others do not.
    let samples = lines(&dir, "samples.jsonl");
    let of = |id: &str| samples.iter().find(|sample| sample["id"] == id).unwrap();
    assert_eq!(of("0.2#1")["status"], "panicked");
    assert_eq!(of("0.2#1")["failed_in"], "reward");
    assert_eq!(of("0.2#1")["reward"], Value::Null);
    assert_eq!(of("0.2#0").get("status"), None);
    // There is one warning per step, on the console and in the folder.
    let warnings = lines(&dir, "warnings.jsonl");
    let of_rows: Vec<&Value> = warnings
        .iter()
        .filter(|line| line["message"].as_str().unwrap().contains("rows failed"))
        .collect();
    assert_eq!(of_rows.len(), 2, "{warnings:#?}");
    assert_eq!(
        (&of_rows[1]["step"], &of_rows[1]["level"]),
        (&json!(2), &json!("warning"))
    );
    let text = page.text();
    assert_eq!(text.matches("warning: step ").count(), 2, "{text}");
    assert!(
        text.contains("warning: step 1, stage `reward`: 2 of 18 rows failed and have no result: 1 panicked: row 2 has no unit (at "),
        "{text}"
    );
    assert!(
        text.contains("; and 1 other reason; `row_errors.jsonl` lists them"),
        "{text}"
    );
    assert_eq!(status(&dir)["warnings"], warnings.len());
}

#[test]
fn p2_slow_rows_are_listed_and_rows_are_timed() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let spec = reward_spec().deadline(Duration::from_secs(2));
    let reward = stage("reward", spec, |input, context| {
        if input.ids()[0].row() == 4 {
            std::thread::sleep(Duration::from_millis(1100));
        }
        score(input, context)
    });
    let (made, _) = trainer(&rewarded(&dir, 1, reward), CancelToken::default());
    made.unwrap().train().unwrap();
    let rows = lines(&dir, "row_errors.jsonl");
    assert_eq!(rows.len(), 3, "{rows:#?}");
    for row in &rows {
        assert_eq!(
            (&row["status"], &row["data_row"]),
            (&json!("slow"), &json!(5))
        );
        assert!(row["seconds"].as_f64().unwrap() >= 1.1);
    }
    let metrics = &lines(&dir, "metrics.jsonl")[0];
    let (median, longest) = (
        metrics["perf/stage/reward_row_s_p50"].as_f64().unwrap(),
        metrics["perf/stage/reward_row_s_max"].as_f64().unwrap(),
    );
    assert!(median < longest && longest >= 1.1, "{median} {longest}");
    // Slow rows alone cause no warning.
    assert!(!dir.join("warnings.jsonl").exists());
}

#[test]
fn the_list_of_rows_is_bounded_and_counts_the_rest() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let mut pipe = rewarded(
        &dir,
        1,
        stage("reward", reward_spec(), |_, _| panic!("always")),
    );
    pipe.batch.prompts = 60;
    pipe.stages[0] = stage(
        "prompts",
        StageSpec::new().rows(RowRule::Source).writes(PROMPTS),
        |_, context| {
            let ids = (0..60).map(|row| verl_words::batch::RowId::prompt(0, row));
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            let mut rows = Batch::with_rows(&ids);
            let tokens = verl_words::batch::RaggedColumn::from_rows(vec![[7u32]; 60]);
            rows.put(&PROMPTS, tokens)?;
            context.emit(rows)
        },
    );
    let (made, _) = trainer(&pipe, CancelToken::default());
    assert!(made.unwrap().train().is_err());
    let rows = lines(&dir, "row_errors.jsonl");
    assert_eq!(rows.len(), 101);
    assert_eq!(
        (&rows[100]["status"], &rows[100]["rows"]),
        (&json!("left_out"), &json!(80))
    );
    let sum: u64 = rows.iter().map(|row| row["rows"].as_u64().unwrap()).sum();
    assert_eq!(sum, 180);
}

#[test]
fn a_step_whose_update_receives_no_row_is_reported() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let spec = StageSpec::new()
        .reads(REWARDS)
        .writes(GROUP_MEANS)
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group);
    let filter = stage("filter", spec, |input, context| {
        if context.step == 2 {
            return Ok(());
        }
        let mut output = input.rows_only();
        output.put(&GROUP_MEANS, vec![0.5; input.num_rows()])?;
        context.emit(output)
    });
    let mut pipe = rewarded(&dir, 3, reward());
    pipe.stages.push(filter);
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let update = StageSpec::new()
        .reads(GROUP_MEANS)
        .rows(RowRule::Sink)
        .cardinality(Cardinality::Batch)
        .uses("actor", verl_words::stage::Access::Update);
    pipe.stages[4] = single("update", update, move |_, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok(())
    });
    let page = Page::default();
    let options = TrainerOptions {
        run: options(),
        console: Some(Console::to(Box::new(page.clone()), 3, 1)),
        ..TrainerOptions::default()
    };
    let plan = pipe
        .plan()
        .unwrap_or_else(|findings| panic!("{findings:#?}"));
    Trainer::with_options(plan, options)
        .unwrap()
        .train()
        .unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    let metrics = lines(&dir, "metrics.jsonl");
    let idle: Vec<f64> = metrics
        .iter()
        .map(|line| line["update/no_samples"].as_f64().unwrap())
        .collect();
    assert_eq!(idle, [0.0, 1.0, 0.0]);
    let text = page.text();
    assert!(
        text.contains(
            "warning: step 2, stage `update`: it received no rows, so the step did not train"
        ),
        "{text}"
    );
}

#[test]
fn a_reward_that_is_null_for_every_row_causes_a_warning() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let reward = stage(
        "reward",
        reward_spec().slice_rows(1),
        |mut input, context| {
            let id = input.ids()[0];
            // In the second step one row has a reward.
            let scored = context.step == 2 && id.row() == 7 && id.sample_index() == 0;
            input.put(&REWARDS, vec![scored.then_some(0.5f32)])?;
            context.emit(input)
        },
    );
    let (made, page) = trainer(&rewarded(&dir, 3, reward), CancelToken::default());
    made.unwrap().train().unwrap();
    let text = page.text();
    for step in [1, 3] {
        let warning =
            format!("warning: step {step}, stage `reward`: no row has a result: 18 of 18 are null");
        assert_eq!(text.matches(&warning).count(), 1, "{text}");
    }
    assert_eq!(text.matches("no row has a result").count(), 2, "{text}");
    assert!(!dir.join("row_errors.jsonl").exists());
}
