use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use verl_declare::pipe::{IntoStage, StageDecl, stage_with};
use verl_plan::Plannable;
use verl_rules::config::{TraceConfig, TraceWeights};
use verl_rules::{Hit, Rule, RuleDecl, StepView};
use verl_run::error::RunError;
use verl_run::runner::RunOptions;
use verl_run::stall::StallReport;
use verl_words::batch::Batch;
use verl_words::resource::Snapshot;
use verl_words::stage::{Stage, StageContext, StageError, StageSpec};

use super::fakes::*;
use super::streaming::Count;
use crate::trainer::{Trainer, TrainerOptions};

/// Replaces times, which vary from run to run.
fn without_times(text: &str) -> String {
    let mut words = Vec::new();
    for word in text.split(' ') {
        let number = word.trim_end_matches(';').parse::<f64>().is_ok() && word.contains('.');
        words.push(if number { "TIME" } else { word });
    }
    words.join(" ")
}

#[test]
fn a_deadline_leaves_behind_what_was_pending() {
    let temp = tempfile::tempdir().unwrap();
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let generate = single("generate", generate_spec(), move |input, context| {
        let first = respond(&input.split(1)[0], context)?;
        context.emit(first)?;
        gate.reaches(1)
    });
    let mut pipe = pipeline(vec![generate]);
    pipe.run.stage_deadline_s = 0.4;
    let with_folder = RunOptions {
        run_dir: Some(temp.path().to_owned()),
        ..options()
    };
    let mut run = start_with(&pipe, with_folder);
    assert_eq!(StallReport::read(temp.path()).unwrap(), None);
    let error = run.step().unwrap_err();
    assert!(matches!(error, RunError::Deadline { .. }), "{error}");
    let report = StallReport::read(temp.path()).unwrap().expect("a file");
    assert!(report.running[0].waited_s >= 0.4);
    assert_eq!(report.running[0].deadline_s, Some(0.4));
    insta::assert_snapshot!(without_times(&report.to_string()));
    release.add();
}

#[test]
fn a_long_wait_is_reported_until_it_is_over() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().to_owned();
    let seen = Arc::new(std::sync::Mutex::new(None));
    let kept = seen.clone();
    let generate = single("generate", generate_spec(), move |input, context| {
        // The run reports the wait after half of the deadline.
        for _ in 0..1_500 {
            if let Ok(Some(report)) = StallReport::read(&dir) {
                *kept.lock().unwrap() = Some(report);
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        for prompt in input.split(1).iter().rev() {
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    });
    let mut pipe = pipeline(vec![generate]);
    pipe.run.stage_deadline_s = 4.0;
    let with_folder = RunOptions {
        run_dir: Some(temp.path().to_owned()),
        ..options()
    };
    let mut run = start_with(&pipe, with_folder);
    run.step().unwrap();
    let report = seen.lock().unwrap().take().expect("a report");
    assert_eq!(report.error, None);
    assert_eq!(report.running[0].stage, "generate");
    let waiting: Vec<&str> = report
        .waiting
        .iter()
        .map(|edge| edge.stage.as_str())
        .collect();
    assert_eq!(waiting, ["reward", "advantages", "update"]);
    assert_eq!(StallReport::read(temp.path()).unwrap(), None);
}

/// Waits until the run reports what it waits for, and returns the report.
fn wait_for_report(dir: &Path) -> Option<StallReport> {
    for _ in 0..3_000 {
        if let Ok(Some(report)) = StallReport::read(dir) {
            return Some(report);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

/// The report that a stage or rule saw while it was hanging.
type SeenReport = Arc<std::sync::Mutex<Option<StallReport>>>;

#[test]
fn a_slow_observer_is_reported_and_the_report_of_a_hung_one_stays() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, seen) = (temp.path().to_owned(), SeenReport::default());
    let kept = seen.clone();
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let spec = StageSpec::new().observer(1);
    let observer = single("eval", spec, move |_, context| match context.step {
        0 => {
            *kept.lock().unwrap() = wait_for_report(&dir);
            Ok(())
        }
        _ => gate.reaches(1),
    });
    let mut pipe = pipeline(vec![observer]);
    pipe.run.stage_deadline_s = 2.0;
    let with_folder = RunOptions {
        run_dir: Some(temp.path().to_owned()),
        ..options()
    };
    let mut run = start_with(&pipe, with_folder);
    run.observe(0).unwrap();
    let report = seen.lock().unwrap().take().expect("a report");
    assert_eq!((report.step, &report.error), (0, &None));
    assert_eq!(report.running[0].stage, "eval");
    assert_eq!(report.running[0].on, "the host pool");
    assert_eq!(report.running[0].deadline_s, Some(2.0));
    assert_eq!(StallReport::read(temp.path()).unwrap(), None);
    let error = run.observe(1).unwrap_err();
    assert!(matches!(error, RunError::Deadline { .. }), "{error}");
    let report = StallReport::read(temp.path()).unwrap().expect("it stays");
    insta::assert_snapshot!(without_times(&report.to_string()), @"
    step 1: no progress for TIME s
      `eval` has been running on the host pool for TIME s of TIME s; pending: what it observes of step 1
      the step ended: step 1, stage `eval`, without rows: no answer after TIME s (deadline 2 s); awaited: its end
    ");
    release.add();
}

/// Hangs until the run reports that it waits for this rule.
struct Hangs(PathBuf, SeenReport);

impl Rule for Hangs {
    fn name(&self) -> &str {
        "hangs"
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn before_update(&mut self, view: &StepView<'_>, _limit: f64) -> Vec<Hit> {
        if view.step == 2 {
            *self.1.lock().unwrap() = wait_for_report(&self.0);
        }
        Vec::new()
    }
}

/// A trainer of two steps in `dir`.
fn trainer_in(
    dir: &Path,
    others: Vec<StageDecl>,
    trace: TraceConfig,
    rules: Vec<RuleDecl>,
) -> Trainer {
    let mut pipe = pipeline(others).trace(trace);
    pipe.rules = rules;
    pipe.run.steps = 2;
    pipe.run.dir = dir.to_owned();
    pipe.run.stage_deadline_s = 4.0;
    let options = TrainerOptions {
        run: options(),
        ..Default::default()
    };
    let plan = pipe.plan().expect("a plan");
    Trainer::with_options(plan, options).expect("a folder")
}

#[test]
fn a_slow_rule_is_reported() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, seen) = (temp.path().join("run"), SeenReport::default());
    let (place, kept) = (dir.clone(), seen.clone());
    let rule = RuleDecl::new(move || Hangs(place.clone(), kept.clone()));
    let mut trainer = trainer_in(&dir, Vec::new(), Default::default(), vec![rule]);
    trainer.train().expect("it succeeds");
    let report = seen.lock().unwrap().take().expect("a report");
    assert_eq!(report.step, 2);
    insta::assert_snapshot!(without_times(&report.to_string()), @"
    step 2: no progress for TIME s
      `rule hangs` has been running on the thread of the trace for TIME s of TIME s; pending: its findings of step 2
    ");
    assert_eq!(StallReport::read(&dir).unwrap(), None);
}

/// Scores rows; reading its state is slow the second time (the first time is at the start).
struct Slow {
    dir: PathBuf,
    kept: SeenReport,
    asked: usize,
}

impl Stage for Slow {
    fn spec(&self) -> StageSpec {
        reward_spec()
    }
    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        score(input, context)
    }
    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        self.asked += 1;
        if self.asked == 2 {
            *self.kept.lock().unwrap() = wait_for_report(&self.dir);
        }
        Ok(None)
    }
}

#[test]
fn a_stage_whose_state_is_slow_to_read_is_reported() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, seen) = (temp.path().join("run"), SeenReport::default());
    let (at, kept) = (dir.clone(), seen.clone());
    let slow = stage_with(move |_| {
        Ok(Box::new(Slow {
            dir: at.clone(),
            kept: kept.clone(),
            asked: 0,
        }))
    });
    let slow = StageDecl {
        name: "reward".to_owned(),
        ..slow.declare()
    };
    let trace = TraceConfig {
        every: Some(1),
        weights: Some(TraceWeights::Full),
        ..Default::default()
    };
    let mut trainer = trainer_in(&dir, vec![slow], trace, Vec::new());
    trainer.train().expect("it succeeds");
    let report = seen.lock().unwrap().take().expect("a report");
    insta::assert_snapshot!(without_times(&report.to_string()), @"
    step 1: no progress for TIME s
      `reward` has been running on the run's own thread for TIME s of TIME s; pending: its state at the start of step 1
    ");
    assert_eq!(StallReport::read(&dir).unwrap(), None);
}
