use std::sync::Arc;

use verl_run::runner::RunOptions;
use verl_words::resource::{Snapshot, WeightsVersion};
use verl_words::stage::{Metric, Reduce, RowRule, Stage, StageContext, StageError, StageSpec};

use super::fakes::*;
use super::streaming::Recorder;

/// Counts all rows that it has seen.
struct Counter {
    rows: u64,
}

const SEEN: Metric = Metric {
    name: "counter/seen",
    unit: "rows",
    meaning: "rows seen so far",
    reduce: Reduce::Last,
    role: None,
};

impl Stage for Counter {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(verl_words::keys::REWARDS)
            .rows(RowRule::Sink)
            .metrics(&[SEEN])
    }
    fn run(
        &mut self,
        input: verl_words::batch::Batch,
        context: &mut StageContext<'_>,
    ) -> Result<(), StageError> {
        self.rows += input.num_rows() as u64;
        context.record(&SEEN, self.rows as f64);
        Ok(())
    }
    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        let version = WeightsVersion {
            step: 0,
            hash: String::new(),
        };
        Ok(Some(Snapshot {
            version,
            state: Arc::new(self.rows),
        }))
    }
    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), StageError> {
        self.rows = *snapshot
            .state
            .downcast_ref()
            .ok_or_else(|| StageError::failed("not a snapshot of a counter"))?;
        Ok(())
    }
}

#[test]
fn a_restored_step_repeats_bit_by_bit() {
    let recorder = Arc::new(Recorder::default());
    let pipe = pipeline(vec![declare("counter", |_| {
        Ok(Box::new(Counter { rows: 0 }))
    })]);
    let mut run = start_with(
        &pipe,
        RunOptions {
            tap: recorder.clone(),
            ..options()
        },
    );
    for _ in 0..2 {
        run.step().unwrap();
    }
    let snapshot = run.snapshot().unwrap();
    assert_eq!(snapshot.stages.keys().collect::<Vec<_>>(), ["counter"]);
    let repeat = |run: &mut verl_run::runner::Run| {
        recorder.0.lock().unwrap().clear();
        let mut metrics = run.step().unwrap().metrics;
        metrics.values.retain(|name, _| !name.starts_with("perf/"));
        (metrics.step, metrics.values, recorder.rows(), weights(run))
    };
    let first = repeat(&mut run);
    assert_eq!(first.1["counter/seen"], 3.0 * 18.0);
    let further = repeat(&mut run);
    assert_ne!(first.3, further.3);
    run.restore(&snapshot).unwrap();
    assert_eq!(run.steps_done(), 2);
    assert_eq!(repeat(&mut run), first);
    assert_eq!(repeat(&mut run), further);
    run.restore(&snapshot).unwrap();
    run.step_at(4).unwrap();
    assert_eq!(run.steps_done(), 4);
}

#[test]
fn observers_run_before_between_and_after_steps() {
    const WEIGHT: Metric = Metric {
        name: "eval/weight",
        unit: "",
        meaning: "first weight",
        reduce: Reduce::Last,
        role: None,
    };
    let spec = StageSpec::new()
        .observer(2)
        .uses("actor", verl_words::stage::Access::Read)
        .metrics(&[WEIGHT]);
    let observer = single("eval", spec, |input, context| {
        assert_eq!(input.num_rows(), 0);
        let weight = context.model::<Numbers>("actor")?.weights[0];
        context.record(&WEIGHT, f64::from(weight));
        context.sink.sample(serde_json::json!({"phase": "eval"}));
        Ok(())
    });
    let mut pipe = pipeline(vec![observer]);
    pipe.run.steps = 5;
    let mut run = start_with(&pipe, options());
    let due: Vec<u64> = (0..=5).filter(|step| run.observes(*step)).collect();
    assert_eq!(due, [0, 2, 4, 5]);
    let before = run.observe(0).unwrap();
    assert_eq!(before.metrics.get("eval/weight"), Some(1.0));
    assert_eq!(before.samples.len(), 1);
    let step = run.step().unwrap();
    assert_eq!(step.metrics.get("eval/weight"), None);
    assert_ne!(
        run.observe(2).unwrap().metrics.get("eval/weight"),
        Some(1.0)
    );
}

#[test]
fn the_engine_records_its_metrics() {
    let mut run = start(vec![]);
    let metrics = run.step().unwrap().metrics;
    for name in [
        "perf/step_s",
        "perf/tokens_per_s",
        "perf/stage/generate_s",
        "actor/loss",
        "reward/mean",
    ] {
        assert!(metrics.get(name).is_some_and(f64::is_finite), "{name}");
    }
    let rate = metrics.get("perf/tokens").unwrap() / metrics.get("perf/step_s").unwrap();
    assert_eq!(metrics.get("perf/tokens_per_s"), Some(rate));
    assert_eq!((metrics.step, metrics.epoch), (1, 0));
}

#[test]
fn an_observer_that_hangs_or_emits_rows_is_an_error() {
    let release = Arc::new(super::streaming::Count::default());
    let gate = release.clone();
    let hangs = single(
        "eval",
        StageSpec::new().observer(1),
        move |_, context| match context.step {
            0 => gate.reaches(1),
            _ => context.emit(verl_words::batch::Batch::with_rows(&[
                verl_words::batch::RowId(5),
            ])),
        },
    );
    let mut pipe = pipeline(vec![hangs]);
    pipe.run.stage_deadline_s = 0.2;
    let mut run = start_with(&pipe, options());
    let error = run.observe(0).unwrap_err().to_string();
    assert!(
        error.contains("stage `eval`, without rows: no answer after"),
        "{error}"
    );
    assert_eq!(run.num_host_threads(), 3 + 1);
    release.add();
    let error = run.observe(1).unwrap_err().to_string();
    assert!(
        error.contains("stage `eval` emitted 1 rows, but it is declared to emit none"),
        "{error}"
    );
}
