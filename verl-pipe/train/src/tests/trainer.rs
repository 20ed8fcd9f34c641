use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use verl_declare::pipe::DataPipe;
use verl_plan::Plannable;
use verl_run::error::RunError;
use verl_run::runner::RunOptions;
use verl_words::stage::{Access, CancelToken, Metric, Reduce, StageError, StageSpec};

use super::fakes::*;
use crate::console::Console;
use crate::trainer::{Trainer, TrainerOptions};

const MATCH: Metric = Metric {
    name: "eval/exact_match",
    unit: "",
    meaning: "share of right answers",
    reduce: Reduce::Mean,
    role: None,
};

/// Output of a console.
#[derive(Clone, Default)]
pub(crate) struct Page(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Page {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

pub(super) fn evaluated(dir: &Path, steps: u64) -> DataPipe {
    let spec = StageSpec::new()
        .observer(2)
        .uses("actor", Access::Read)
        .metrics(&[MATCH]);
    let eval = single("eval", spec, |_, context| {
        let weight = context.model::<Numbers>("actor")?.weights[0];
        context.record(&MATCH, f64::from(weight) / 4.0);
        context.sink.sample(
            serde_json::json!({"phase": "eval", "prompt": "1+1=", "response": format!("{weight}")}),
        );
        Ok(())
    });
    let reward = stage("reward", reward_spec(), |input, context| {
        for id in input.ids() {
            context
                .sink
                .sample(serde_json::json!({"id": id.to_string()}));
        }
        score(input, context)
    });
    let mut pipe = pipeline(vec![eval, reward]);
    pipe.run.steps = steps;
    pipe.run.dir = dir.to_owned();
    pipe.trace = super::trace::quiet();
    pipe
}

#[track_caller]
pub(super) fn trainer(pipe: &DataPipe, cancel: CancelToken) -> (Result<Trainer, RunError>, Page) {
    let page = Page::default();
    let console = Some(Console::to(Box::new(page.clone()), pipe.run.steps, 1));
    let run = RunOptions {
        cancel,
        ..options()
    };
    let plan = pipe.plan().expect("a plan");
    (
        Trainer::with_options(
            plan,
            TrainerOptions {
                run,
                console,
                versions: Vec::new(),
                schema: None,
                ..TrainerOptions::default()
            },
        ),
        page,
    )
}

pub(super) fn lines(dir: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join(name)).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

pub(super) fn status(dir: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir.join("status.json")).unwrap()).unwrap()
}

#[test]
fn a_complete_run_writes_its_folder() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("runs/a");
    let pipe = evaluated(&dir, 3);
    let (made, page) = trainer(&pipe, CancelToken::default());
    let mut trainer_ = made.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let steps = seen.clone();
    trainer_.on_step(move |metrics| steps.lock().unwrap().push(metrics.step));
    assert_eq!(status(&dir)["status"], "running");
    let summary = trainer_.train().unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 2, 3]);

    let metrics = lines(&dir, "metrics.jsonl");
    assert_eq!(
        metrics
            .iter()
            .map(|m| m["step"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [0, 1, 2, 3]
    );
    let evaluated: Vec<bool> = metrics
        .iter()
        .map(|m| m.get("eval/exact_match").is_some())
        .collect();
    assert_eq!(evaluated, [true, false, true, true]);
    assert_eq!(metrics[0]["eval/exact_match"], 0.25);
    for row in &metrics[1..] {
        for name in [
            "epoch",
            "timestamp",
            "actor/loss",
            "reward/mean",
            "perf/step_s",
            "perf/tokens_per_s",
        ] {
            assert!(row[name].is_number(), "{name}");
        }
    }
    let samples = lines(&dir, "samples.jsonl");
    // Three observations with one sample each, three steps with two each: the first rows of the step.
    assert_eq!(samples.len(), 3 + 3 * 2);
    assert_eq!(samples[1].to_string(), r#"{"step":1,"id":"0.5#0"}"#);
    for name in [
        "config.toml",
        "plan.txt",
        "versions.json",
        "data.json",
        "start.json",
        "model/actor/weights.txt",
    ] {
        assert!(dir.join(name).is_file(), "{name}");
    }
    assert_eq!(std::fs::read_dir(dir.join("model")).unwrap().count(), 1);
    assert_eq!(status(&dir)["status"], "finished");

    let text = page.text();
    assert!(
        text.starts_with("[eval] step 0/3 | exact_match 0.2500\n[start] load "),
        "{text}"
    );
    assert_eq!(text.matches("[start]").count(), 1);
    let next = text.lines().nth(2);
    assert!(
        next.is_some_and(|line| line.starts_with("step 1/3  loss ")),
        "{text}"
    );
    assert!(
        text.contains("samples before:\n  \"1+1=\" -> \"1\""),
        "{text}"
    );
    assert!(text.contains("eval/exact_match: 0.2500 -> "), "{text}");
    assert_eq!(summary.steps, 3);
    assert!(summary.stage_seconds.contains_key("generate"));

    let (again, _) = trainer(&pipe, CancelToken::default());
    let message = again.err().expect("an error").to_string();
    assert!(
        message.contains("already exists") && message.contains("run.dir"),
        "{message}"
    );
    assert_eq!(lines(&dir, "metrics.jsonl").len(), 4);
}

#[test]
fn a_run_that_cannot_start_leaves_no_folder() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("a");
    let mut pipe = evaluated(&dir, 3);
    struct Broken;
    impl verl_words::stage::Stage for Broken {
        fn spec(&self) -> StageSpec {
            reward_spec()
        }
        fn start(
            &mut self,
            context: &mut verl_words::stage::StartContext<'_>,
        ) -> Result<(), StageError> {
            context.data("train").map(drop)
        }
        fn run(
            &mut self,
            _: verl_words::batch::Batch,
            _: &mut verl_words::stage::StageContext<'_>,
        ) -> Result<(), StageError> {
            Ok(())
        }
    }
    pipe.stages[2] = declare("reward", |_| Ok(Box::new(Broken)));
    let (made, _) = trainer(&pipe, CancelToken::default());
    let message = made.err().expect("an error").to_string();
    assert!(
        message.contains("stage `reward` cannot start: there is no data set `train`"),
        "{message}"
    );
    assert!(!dir.exists());
}

#[test]
fn failed_and_cancelled_runs_record_their_status() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("failed");
    let mut pipe = evaluated(&dir, 5);
    pipe.stages[2] = stage("reward", reward_spec(), |mut input, context| {
        let value = if context.step == 3 { f32::NAN } else { 0.5 };
        input.put(&verl_words::keys::REWARDS, vec![value; input.num_rows()])?;
        context.emit(input)
    });
    let (made, _) = trainer(&pipe, CancelToken::default());
    assert!(matches!(
        made.unwrap().train(),
        Err(RunError::Guard { step: 3, .. })
    ));
    let status_ = status(&dir);
    assert_eq!(
        (&status_["status"], &status_["step"]),
        (&"failed".into(), &2.into())
    );
    assert!(
        status_["reason"]
            .as_str()
            .unwrap()
            .contains("stage `reward`, key `rewards`")
    );
    assert_eq!(status_["saved"], serde_json::json!(["actor"]));
    assert!(status_.get("partial").is_none());

    let dir = temp.path().join("cancelled");
    let cancel = CancelToken::default();
    let (made, _) = trainer(&evaluated(&dir, 5), cancel.clone());
    let mut trainer_ = made.unwrap();
    trainer_.on_step(move |metrics| {
        if metrics.step == 2 {
            cancel.cancel();
        }
    });
    assert!(matches!(
        trainer_.train(),
        Err(RunError::Cancelled { step: 3 })
    ));
    let status_ = status(&dir);
    assert_eq!(
        (&status_["status"], &status_["step"]),
        (&"cancelled".into(), &2.into())
    );
    assert!(dir.join("model/actor/weights.txt").is_file());
}

#[test]
fn a_run_without_signal_fails_and_saves_its_models() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("dull");
    let mut pipe = evaluated(&dir, 5);
    let spec = StageSpec::new()
        .reads(verl_words::keys::REWARDS)
        .writes(verl_words::keys::GROUP_MEANS)
        .rows(verl_words::stage::RowRule::Filter)
        .cardinality(verl_words::stage::Cardinality::Group)
        .refill(verl_words::stage::Refill {
            groups: BATCH.prompts,
            waves: 1,
            on_short: verl_words::stage::OnShort::Error,
        });
    pipe.stages.push(stage("filter", spec, |input, context| {
        if context.step == 3 {
            return Ok(());
        }
        let mut output = input.rows_only();
        output.put(&verl_words::keys::GROUP_MEANS, vec![0.5; input.num_rows()])?;
        context.emit(output)
    }));
    let (made, _) = trainer(&pipe, CancelToken::default());
    let error = made.unwrap().train().unwrap_err();
    assert!(matches!(error, RunError::NoSignal { step: 3, .. }));
    let status_ = status(&dir);
    assert_eq!(
        (&status_["status"], &status_["step"]),
        (&"failed".into(), &2.into())
    );
    let reason = status_["reason"].as_str().unwrap();
    assert!(reason.contains("0 of 6 groups in 1 wave had"), "{reason}");
    assert!(dir.join("model/actor/weights.txt").is_file());
}
