//! The trace of a run: statistics that do not depend on timing, full steps, the flight recorder, rules, and disk
//! errors.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use verl_declare::pipe::{DataPipe, StageDecl};
use verl_plan::Plannable;
use verl_rules::config::{RuleSetting, TraceConfig};
use verl_rules::format::Side;
use verl_rules::{Anomaly, Hit, MetricsView, RULES, Rule, RuleSeverity, StepView};
use verl_run::error::RunError;
use verl_run::runner::RunOptions;
use verl_trace::files::{Reason, TraceDir};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::field::{Key, Ragged};
use verl_words::keys::{ADVANTAGES, MASK_KINDS, PROMPTS, RESPONSES};
use verl_words::stage::{Access, Cardinality, RowRule, StageSpec};

use super::fakes::*;
use crate::tests::streaming::Recorder as Seen;
use crate::trainer::{Trainer, TrainerOptions};

fn traced(dir: &Path, steps: u64, trace: TraceConfig, others: Vec<StageDecl>) -> DataPipe {
    let mut pipe = pipeline(others).trace(trace);
    pipe.run.steps = steps;
    pipe.run.dir = dir.to_owned();
    pipe
}

/// The default without the rules that the fakes would trigger: their rewards are equal within each group.
pub(super) fn quiet() -> TraceConfig {
    let off = RuleSetting {
        severity: Some(RuleSeverity::Off),
        limit: None,
    };
    // All rules that the artificial rows of these tests would trigger.
    let rules = RULES.iter().filter(|rule| rule.name != "non_finite");
    TraceConfig {
        rules: rules.map(|rule| (rule.name.to_owned(), off)).collect(),
        ..TraceConfig::default()
    }
}

fn every_step() -> TraceConfig {
    TraceConfig {
        every: Some(1),
        ..quiet()
    }
}

#[track_caller]
fn run_with(pipe: &DataPipe, run: RunOptions) -> Result<(), RunError> {
    let options = TrainerOptions {
        run,
        ..TrainerOptions::default()
    };
    let plan = pipe.plan().expect("a plan");
    let mut trainer = Trainer::with_options(plan, options).expect("a folder");
    trainer.train().map(drop)
}

#[track_caller]
fn run(pipe: &DataPipe) -> Result<(), RunError> {
    run_with(pipe, options())
}

/// Generation that emits its groups in an order and at times that vary from call to call.
fn hasty(salt: u64) -> StageDecl {
    let calls = Arc::new(AtomicU64::new(salt));
    single("generate", generate_spec(), move |input, context| {
        let mut prompts = input.split(1);
        let seed = calls
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_mul(0x9E37_79B9);
        prompts.sort_by_key(|prompt| prompt.ids()[0].row().wrapping_mul(seed | 1) % 17);
        for prompt in &prompts {
            std::thread::sleep(Duration::from_micros(seed % 700));
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    })
}

fn sleepy_reward(salt: u64) -> StageDecl {
    stage(
        "reward",
        reward_spec().slice_rows(4),
        move |input, context| {
            let row = input.ids()[0].row();
            std::thread::sleep(Duration::from_micros((row + salt) * 7919 % 900));
            score(input, context)
        },
    )
}

#[test]
fn statistics_of_every_edge_do_not_depend_on_timing() {
    let temp = tempfile::tempdir().expect("a folder");
    let stats = |name: &str, salt: u64, threads: usize| {
        let dir = temp.path().join(name);
        let stages = vec![hasty(salt), sleepy_reward(salt)];
        let pipe = traced(&dir, 5, quiet(), stages);
        let options = RunOptions {
            host_threads: threads,
            ..RunOptions::default()
        };
        run_with(&pipe, options).expect("runs");
        let trace = TraceDir::open(&dir).expect("opens");
        assert_eq!(trace.steps(), [0u64; 0]);
        trace.stats(..).expect("reads")
    };
    let one = stats("one", 3, 2);
    for (salt, threads) in [(11, 5), (40, 3)] {
        let other = stats(&format!("other{salt}"), salt, threads);
        let parts = |rows: &[verl_rules::stats::StatRow]| {
            let part = |row: &verl_rules::stats::StatRow| {
                (
                    row.step,
                    row.stage.clone(),
                    row.side,
                    row.key.clone(),
                    row.hash,
                    row.rows,
                )
            };
            rows.iter().map(part).collect::<Vec<_>>()
        };
        assert_eq!(parts(&one), parts(&other));
    }
    let places: Vec<String> = one
        .iter()
        .filter(|row| row.step == 5)
        .map(|row| {
            format!(
                "{} {} {} {}",
                row.stage,
                row.side.as_str(),
                row.key,
                row.rows
            )
        })
        .collect();
    assert_eq!(
        places,
        [
            "prompts output prompts 6",
            "generate input prompts 6",
            "generate output responses 18",
            "generate output mask_kinds 18",
            "reward input responses 18",
            "reward output rewards 18",
            "advantages input rewards 18",
            "advantages input responses 18",
            "advantages output advantages 18",
            "update input responses 18",
            "update input mask_kinds 18",
            "update input advantages 18",
        ]
    );
    // What one stage writes is what the next one reads.
    let hash = |stage: &str, key: &str| {
        let row = one.iter().find(|row| row.stage == stage && row.key == key);
        row.map(|row| row.hash)
    };
    assert_eq!(hash("generate", "responses"), hash("update", "responses"));
    assert_ne!(
        hash("generate", "responses"),
        hash("generate", "mask_kinds")
    );
}

#[test]
fn a_full_step_contains_the_rows_of_all_edges() {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("run");
    let pipe = traced(&dir, 3, every_step(), vec![hasty(5), sleepy_reward(2)]);
    let seen = Arc::new(Seen::default());
    let options = RunOptions {
        tap: seen.clone(),
        ..options()
    };
    run_with(&pipe, options).expect("runs");
    assert!(dir.join("schema.json").exists());
    let trace = TraceDir::open(&dir).expect("opens");
    assert_eq!((trace.steps(), trace.notes().len()), (vec![1, 2, 3], 0));
    let mut rows = Vec::new();
    for step in trace.steps() {
        let step = trace.step(step).expect("reads");
        assert_eq!(
            (step.manifest.reason, step.manifest.ended),
            (Reason::Asked, true)
        );
        assert_eq!(
            step.manifest.models["actor"].version.step,
            step.manifest.step - 1
        );
        let names: Vec<&str> = step
            .stages
            .iter()
            .map(|s| s.manifest.stage.as_str())
            .collect();
        assert_eq!(
            names,
            ["prompts", "generate", "reward", "advantages", "update"]
        );
        for stage in &step.stages {
            for (side, slices) in [(false, &stage.inputs), (true, &stage.outputs)] {
                for row in slices.iter().flat_map(|slice| slice.batch.split(1)) {
                    let columns = format!("{:?}", row.record().columns());
                    rows.push((stage.manifest.stage.clone(), side, row.ids()[0].0, columns));
                }
            }
        }
        // Rows are in declared order, regardless of the order in which they arrived.
        let responses = step.stage("generate").expect("recorded");
        let inputs = responses.rows(Side::Input).expect("rows").repeat(SAMPLES);
        let ids = responses.rows(Side::Output).expect("rows").ids();
        assert_eq!(ids, inputs.expect("in range").ids());
        assert_eq!(step.stage("update").expect("recorded").outputs, []);
        assert_eq!(step.stage("prompts").expect("recorded").inputs.len(), 1);
    }
    rows.sort();
    // Two fakes also emit the keys that they read, or emit keys in another order; their recorded outputs contain only
    // the declared keys, in declared order.
    let alike = |(stage, output, ..): &&(String, bool, u64, String)| {
        !*output || !["generate", "reward"].contains(&stage.as_str())
    };
    let seen = seen.rows();
    let seen: Vec<_> = seen.iter().filter(alike).collect();
    let rows: Vec<_> = rows.iter().filter(alike).collect();
    let strange = rows.iter().zip(&seen).find(|(row, seen)| row != seen);
    assert_eq!((rows.len(), strange), (seen.len(), None));
}

#[test]
fn stages_and_steps_are_chosen_and_the_budget_is_kept() {
    let temp = tempfile::tempdir().expect("a folder");
    let recorded = |name: &str, trace: TraceConfig, debug: bool| {
        let dir = temp.path().join(name);
        let mut pipe = traced(&dir, 4, trace, Vec::new());
        pipe.stages[2].debug = debug;
        run(&pipe).expect("runs");
        let trace = TraceDir::open(&dir).expect("opens");
        let step = |step: u64| {
            let files = &trace.manifest(step).expect("there").stages;
            format!(
                "{step} {}",
                files
                    .iter()
                    .map(|f| f.stage.as_str())
                    .collect::<Vec<_>>()
                    .join(" ")
            )
        };
        trace.steps().into_iter().map(step).collect::<Vec<_>>()
    };
    let some = TraceConfig {
        steps: vec![2],
        stages: vec!["generate".to_owned(), "update".to_owned()],
        ..quiet()
    };
    assert_eq!(recorded("some", some.clone(), false), ["2 generate update"]);
    let marked = [
        "1 reward",
        "2 generate reward update",
        "3 reward",
        "4 reward",
    ];
    assert_eq!(recorded("marked", some, true), marked);
    let bare = TraceConfig {
        stats: false,
        // More bytes than fit into the integer.
        budget_mb: 1 << 44,
        ..every_step()
    };
    assert_eq!(recorded("bare", bare, false).len(), 4);
    assert!(!temp.path().join("bare/trace/stats").exists());
    // Prompts of more than a megabyte, the smallest budget.
    let spec = StageSpec::new().rows(RowRule::Source).writes(PROMPTS);
    let large = stage("prompts", spec, |_, context| {
        let mut prompts = prompts_of(context.step)?;
        let rows = vec![vec![7u32; 60_000]; prompts.num_rows()];
        prompts.put(&PROMPTS, RaggedColumn::from_rows(rows))?;
        context.emit(prompts)
    });
    let smallest = TraceConfig {
        budget_mb: 1,
        ..every_step()
    };
    let dir = temp.path().join("none");
    run(&traced(&dir, 4, smallest, vec![large])).expect("runs");
    assert_eq!(TraceDir::open(&dir).expect("opens").steps(), [0u64; 0]);
    let off = TraceConfig {
        stats: false,
        ..quiet()
    };
    run(&traced(&temp.path().join("off"), 1, off, Vec::new())).expect("runs");
    assert!(!temp.path().join("off/trace").exists());
}

/// A change of a pipeline that requests a full step.
type Asks = fn(&mut DataPipe);

#[test]
fn requesting_a_full_step_writes_the_schema_of_its_keys() {
    let temp = tempfile::tempdir().expect("a folder");
    let ways: [(&str, bool, Asks); 5] = [
        ("nothing", false, |_| {}),
        ("steps", true, |pipe| pipe.trace.steps = vec![1]),
        ("every", true, |pipe| pipe.trace.every = Some(1)),
        ("debug of the file", true, |pipe| {
            pipe.stages[2].debug = true
        }),
        ("debug in Rust", true, |pipe| *pipe = pipe.clone().debug()),
    ];
    for (way, written, ask) in ways {
        let dir = temp.path().join(way);
        let mut pipe = traced(&dir, 1, quiet(), Vec::new());
        ask(&mut pipe);
        run(&pipe).expect("runs");
        assert_eq!(dir.join("schema.json").is_file(), written, "{way}");
        let steps = TraceDir::open(&dir).expect("opens").steps();
        assert_eq!(!steps.is_empty(), written, "{way}");
    }
}

#[test]
fn the_steps_before_an_error_are_recorded_without_being_requested() {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("run");
    let reward = stage("reward", reward_spec(), |mut input, context| {
        let mut rewards = vec![1.0f32; input.num_rows()];
        if context.step == 4 {
            rewards[5] = f32::NAN;
        }
        input.put(&verl_words::keys::REWARDS, rewards)?;
        context.emit(input)
    });
    let error = run(&traced(&dir, 9, quiet(), vec![reward])).expect_err("a NaN");
    assert_eq!(error.code(), "R007");
    let trace = TraceDir::open(&dir).expect("opens");
    assert_eq!(trace.steps(), [2, 3, 4]);
    let before = trace.step(3).expect("reads");
    assert!(before.manifest.ended && before.stages.len() == 5);
    let fault = trace.step(4).expect("reads");
    assert!(!fault.manifest.ended && fault.manifest.reason == Reason::Failed);
    let reward = fault.stage("reward").expect("recorded");
    assert!(
        reward.manifest.notes[0].contains("promises finite values"),
        "{:?}",
        reward.manifest.notes
    );
    let refused = reward.rows(Side::Output).expect("rows");
    let rewards: Vec<_> = refused
        .get(&verl_words::keys::REWARDS)
        .expect("there")
        .rows()
        .collect();
    assert_eq!(
        rewards
            .iter()
            .filter(|r| r.is_some_and(f32::is_nan))
            .count(),
        1
    );
    assert!(fault.stage("update").is_none());
    // Statistics of the failed step cover the stages that ran.
    let last = trace.stats(4..).expect("reads");
    assert!(last.iter().any(|row| row.key == "responses"));
    assert!(last.iter().all(|row| row.stage != "update"));
}

#[test]
fn a_step_that_was_cancelled_leaves_no_statistics() {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("run");
    let options = options();
    let cancel = options.cancel.clone();
    let reward = stage("reward", reward_spec(), move |mut input, context| {
        if context.step == 3 {
            cancel.cancel();
        }
        input.put(&verl_words::keys::REWARDS, vec![1.0f32; input.num_rows()])?;
        context.emit(input)
    });
    let pipe = traced(&dir, 9, every_step(), vec![reward]);
    let error = run_with(&pipe, options).expect_err("cancelled");
    assert!(matches!(error, RunError::Cancelled { .. }), "{error}");
    let trace = TraceDir::open(&dir).expect("opens");
    assert_eq!(trace.steps(), [1, 2]);
    let steps: std::collections::BTreeSet<u64> = trace
        .stats(..)
        .expect("reads")
        .iter()
        .map(|row| row.step)
        .collect();
    assert_eq!(Vec::from_iter(steps), [1, 2]);
}

/// Stops in one step.
struct StopAt(u64);

impl Rule for StopAt {
    fn name(&self) -> &str {
        "stop_at"
    }
    fn severity(&self) -> RuleSeverity {
        RuleSeverity::Stop
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn before_update(&mut self, view: &StepView<'_>, _limit: f64) -> Vec<Hit> {
        let Some(update) = view.update.filter(|_| view.step == self.0) else {
            return Vec::new();
        };
        assert!(view.stats.iter().any(|row| row.key == "rewards"));
        vec![Hit {
            stage: update.stage.to_owned(),
            key: "advantages".to_owned(),
            value: 1.0,
            samples: update.batch.ids()[..1].to_vec(),
            what: "it is that step".to_owned(),
        }]
    }
}

fn anomalies(dir: &Path) -> Vec<Anomaly> {
    let text = std::fs::read_to_string(dir.join("trace/anomalies.jsonl")).expect("a file");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("lines")
}

#[test]
fn a_stop_rule_ends_the_run_before_the_optimiser_step() {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("run");
    let pipe = traced(&dir, 9, quiet(), Vec::new());
    let error = run(&pipe.rule(|| StopAt(3))).expect_err("stops");
    assert_eq!(error.code(), "R017");
    let text = error.to_string();
    assert!(
        text.contains("stop_at: step 3, `update`, `advantages`") && text.contains("samples"),
        "{text}"
    );
    let found = anomalies(&dir);
    assert_eq!(
        (
            found[0].rule.as_str(),
            found[0].step,
            found[0].sample_ids.len()
        ),
        ("stop_at", 3, 1)
    );
    assert_eq!(TraceDir::open(&dir).expect("opens").steps(), [1, 2, 3]);
    // The weights are those after the second step.
    let mut same = start(Vec::new());
    (0..2).for_each(|_| drop(same.step().expect("runs")));
    let saved = std::fs::read_to_string(dir.join("model/actor/weights.txt")).expect("saved");
    let bits = |text: &str| -> Vec<u32> {
        let numbers = text.trim_matches(['[', ']']).split(", ");
        numbers
            .map(|n| n.parse::<f32>().expect("a number").to_bits())
            .collect()
    };
    let now: Vec<u32> = weights(&mut same)
        .trim_matches(['[', ']'])
        .split(", ")
        .map(|bits| bits.parse().expect("bits"))
        .collect();
    assert_eq!(bits(&saved), now);
}

/// Warns after one step, based on its metrics.
struct WarnAt(u64);

impl Rule for WarnAt {
    fn name(&self) -> &str {
        "warn_at"
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn after_step(&mut self, view: &MetricsView<'_>, _limit: f64) -> Vec<Hit> {
        let here = view.step == self.0 && view.metrics.contains_key("actor/loss");
        Vec::from_iter(here.then(Hit::default))
    }
}

#[test]
fn a_warning_records_the_step_before_it_and_does_not_end_the_run() {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("run");
    let pipe = traced(&dir, 9, quiet(), Vec::new());
    run(&pipe.rule(|| WarnAt(5))).expect("ends well");
    let trace = TraceDir::open(&dir).expect("opens");
    assert_eq!(trace.steps(), [4, 5]);
    let manifest = trace.manifest(4).expect("there");
    assert!(manifest.ended && manifest.reason == Reason::Anomaly);
    // This model cannot store its state on disk; only its version is recorded.
    assert_eq!(manifest.models["actor"].version.step, 3);
    assert_eq!((anomalies(&dir).len(), anomalies(&dir)[0].step), (1, 5));

    let once = TraceConfig {
        ring_writes: 0,
        ..quiet()
    };
    let dir = temp.path().join("once");
    run(&traced(&dir, 9, once, Vec::new()).rule(|| WarnAt(5))).expect("ends");
    assert_eq!(TraceDir::open(&dir).expect("opens").steps(), [0u64; 0]);
    assert_eq!(anomalies(&dir).len(), 1);
}

/// A key without any promises.
const LOOSE: Key<Ragged<f32>> = Key::new("loose", "[B, T~]", "", "may have any value");

#[test]
fn values_that_are_not_finite_stop_an_update_that_reads_them() {
    let temp = tempfile::tempdir().expect("a folder");
    let loose = |bad_token: usize| {
        let spec = StageSpec::new().reads(RESPONSES).writes(LOOSE);
        let write = stage("loose", spec, move |input, context| {
            let rows = input.get(&RESPONSES)?;
            let rows: Vec<Vec<f32>> = rows.rows().map(|row| vec![0.5; row.len()]).collect();
            let mut batch = input.rows_only();
            let at = rows.iter().position(|row| row.len() == 4);
            let mut rows = rows;
            if let Some(at) = at {
                rows[at][bad_token] = f32::INFINITY;
            }
            batch.put(&LOOSE, RaggedColumn::from_rows(rows))?;
            context.emit(batch)
        });
        let kinds = single("generate", generate_spec(), |input, context| {
            for prompt in input.split(1) {
                let mut group: Batch = respond(&prompt, context)?;
                let lengths: Vec<usize> = group.get(&RESPONSES)?.rows().map(<[u32]>::len).collect();
                // The last token of a response is an observation.
                let kinds = lengths.iter().map(|len| {
                    let mut kinds = vec![1u8; *len];
                    kinds[len - 1] = 0;
                    kinds
                });
                group.put(&MASK_KINDS, RaggedColumn::from_rows(kinds))?;
                context.emit(group)?;
            }
            Ok(())
        });
        let spec = StageSpec::new()
            .reads(ADVANTAGES)
            .reads(MASK_KINDS)
            .reads(LOOSE)
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses("actor", Access::Update);
        vec![write, kinds, single("update", spec, |_, _| Ok(()))]
    };
    let observed = temp.path().join("observed");
    run(&traced(&observed, 2, quiet(), loose(3))).expect("an observation");
    let acted = temp.path().join("acted");
    let error = run(&traced(&acted, 2, quiet(), loose(2))).expect_err("an action");
    let text = error.to_string();
    for part in [
        "non_finite",
        "step 1",
        "`update`",
        "`loose`",
        "worst samples",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn disk_errors_of_the_trace_do_not_end_the_run() {
    let temp = tempfile::tempdir().expect("a folder");
    let dir = temp.path().join("run");
    let pipe = traced(&dir, 3, every_step(), Vec::new());
    let options = TrainerOptions {
        run: options(),
        ..TrainerOptions::default()
    };
    let plan = pipe.plan().expect("a plan");
    let mut trainer = Trainer::with_options(plan, options).expect("a folder");
    let trace = dir.join("trace");
    // Nothing can be created if a file is in place of a folder.
    std::fs::write(trace.join("steps"), "").expect("writes");
    std::fs::remove_dir_all(trace.join("stats")).expect("removes");
    std::fs::write(trace.join("stats"), "").expect("writes");
    trainer.train().expect("ends well");
    let read = TraceDir::open(&dir).expect("opens");
    assert_eq!(read.steps(), [0u64; 0]);
    assert_eq!(read.stats(..).expect("nothing"), []);
}
