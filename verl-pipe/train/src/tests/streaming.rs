use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use verl_run::runner::RunOptions;
use verl_run::tap::{Tap, TapPoint};
use verl_words::batch::Batch;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::field::{Key, Scalar};
use verl_words::keys::{PROMPTS, RESPONSES, REWARDS};
use verl_words::stage::{Cardinality, RowRule, StageError, StageSpec};

use super::fakes::*;

/// A counter; threads wait until it reaches a value, and fail after 20 seconds.
#[derive(Default)]
pub(super) struct Count(Mutex<usize>, Condvar);

impl Count {
    pub(super) fn add(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_all();
    }
    pub(super) fn reaches(&self, target: usize) -> Result<(), StageError> {
        let limit = Duration::from_secs(20);
        let (count, _) = self
            .1
            .wait_timeout_while(self.0.lock().unwrap(), limit, |c| *c < target)
            .unwrap();
        if *count >= target {
            Ok(())
        } else {
            Err(StageError::failed(format!("only {} of {target}", *count)))
        }
    }
    pub(super) fn get(&self) -> usize {
        *self.0.lock().unwrap()
    }
}

#[test]
fn rewards_run_while_the_only_worker_generates() {
    let scored = Arc::new(Count::default());
    let seen = scored.clone();
    let generate = single("generate", generate_spec(), move |input, context| {
        for (done, prompt) in input.split(1).iter().enumerate() {
            // All prompts before this one must be scored while this call is still running. A call of `reward` takes 8
            // rows, so the most recent groups may be incomplete.
            seen.reaches((done * SAMPLES) / 8)?;
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    });
    let reward = stage("reward", reward_spec(), move |input, context| {
        std::thread::sleep(Duration::from_millis(50));
        score(input, context)?;
        scored.add();
        Ok(())
    });
    start(vec![generate, reward]).step().unwrap();
}

/// All batches that passed the edges, by stage and rows.
#[derive(Default)]
pub(super) struct Recorder(pub Mutex<Vec<(String, usize, bool, Batch)>>);

impl Tap for Recorder {
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        self.note(point, false, batch);
    }
    fn output(&self, point: TapPoint<'_>, batch: &Batch) {
        self.note(point, true, batch);
    }
}

impl Recorder {
    fn note(&self, point: TapPoint<'_>, output: bool, batch: &Batch) {
        // Changes to the copy of a tap do not reach any stage.
        let mut copy = batch.rename(&[("rewards", "stolen")]);
        copy.put(
            &PROMPTS,
            verl_words::batch::RaggedColumn::from_rows(vec![vec![0u32]; copy.num_rows()]),
        )
        .unwrap();
        let place = (point.stage.to_owned(), point.slice, output, batch.clone());
        self.0.lock().unwrap().push(place);
    }

    /// The individual rows, in an order that does not depend on timing.
    pub(super) fn rows(&self) -> Vec<(String, bool, u64, String)> {
        let mut rows = Vec::new();
        for (stage, _, output, batch) in self.0.lock().unwrap().iter() {
            for row in batch.split(1) {
                let columns = format!("{:?}", row.record().columns());
                rows.push((stage.clone(), *output, row.ids()[0].0, columns));
            }
        }
        rows.sort();
        rows
    }
}

#[derive(Debug, PartialEq)]
struct Outcome {
    weights: String,
    metrics: Vec<(String, f64)>,
    rows: Vec<(String, bool, u64, String)>,
}

fn outcome(latency: Option<u64>, threads: usize, tap: bool) -> Outcome {
    let wait = jitter(latency);
    let [generate, reward] = scattered(generate_spec(), latency, &wait);
    let kept = Key::<Scalar<u64>>::new("kept", "[B]", "", "rows of the group");
    let filter_spec = StageSpec::new()
        .reads(REWARDS)
        .writes(kept)
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group);
    let filter = stage("filter", filter_spec, move |input, context| {
        wait();
        if input.groups()[0] % 3 == 1 {
            return Ok(());
        }
        let mut output = input.rows_only();
        output.put(&kept, vec![input.num_rows() as u64; input.num_rows()])?;
        context.emit(output)
    });
    let bonus = Key::<Scalar<u64>>::new("bonus", "[B]", "", "prompt's row plus length");
    let bonus_spec = StageSpec::new()
        .reads(kept)
        .reads(PROMPTS)
        .reads(RESPONSES)
        .writes(bonus)
        .slice_rows(4);
    let bonus = stage("bonus", bonus_spec, move |mut input, context| {
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&RESPONSES)?);
        let values: Vec<u64> = (0..input.num_rows())
            .map(|i| u64::from(prompts.row(i)[1]) + responses.row_len(i) as u64)
            .collect();
        for (id, prompt) in input.ids().iter().zip(prompts.rows()) {
            assert_eq!(id.row(), u64::from(prompt[1]));
            assert_ne!(id.group() % 3, 1);
        }
        input.put(&bonus, values)?;
        context.emit(input)
    });
    let recorder = Arc::new(Recorder::default());
    let mut options = RunOptions {
        host_threads: threads,
        ..RunOptions::default()
    };
    if tap {
        options.tap = recorder.clone();
    }
    let mut run = start_with(&pipeline(vec![generate, reward, filter, bonus]), options);
    let mut metrics = Vec::new();
    for _ in 0..4 {
        let step = run.step().unwrap().metrics;
        metrics.extend(
            step.values
                .into_iter()
                .filter(|(name, _)| !name.starts_with("perf/")),
        );
    }
    Outcome {
        weights: weights(&mut run),
        metrics,
        rows: recorder.rows(),
    }
}

#[test]
fn latencies_and_thread_counts_change_no_bit() {
    let calm = outcome(None, 2, true);
    assert!(
        calm.metrics
            .iter()
            .any(|(name, value)| name == "reward/mean" && *value > 0.0)
    );
    for latency in 1..4 {
        let other = outcome(Some(latency), 2 + latency as usize, true);
        assert_eq!(
            (&other.weights, &other.metrics),
            (&calm.weights, &calm.metrics)
        );
        assert_eq!(other.rows, calm.rows);
    }
}

#[test]
fn a_tap_sees_every_edge_and_alters_nothing() {
    let tapped = outcome(None, 2, true);
    let plain = outcome(None, 2, false);
    assert_eq!(
        (&tapped.weights, &tapped.metrics),
        (&plain.weights, &plain.metrics)
    );
    let rows = |stage: &str, output: bool| {
        tapped
            .rows
            .iter()
            .filter(|(s, o, ..)| s == stage && *o == output)
            .count()
    };
    let (p, b) = (BATCH.prompts * 4, BATCH.prompts * SAMPLES * 4);
    assert_eq!([rows("prompts", false), rows("prompts", true)], [0, p]);
    assert_eq!([rows("generate", false), rows("generate", true)], [p, b]);
    assert_eq!([rows("reward", false), rows("reward", true)], [b, b]);
    assert_eq!(
        [rows("advantages", false), rows("advantages", true)],
        [b, b]
    );
    let kept = (0..24).filter(|row| row % 3 != 1).count() * SAMPLES;
    assert_eq!([rows("filter", false), rows("filter", true)], [b, kept]);
    assert_eq!([rows("bonus", false), rows("bonus", true)], [kept, kept]);
    assert_eq!([rows("update", false), rows("update", true)], [b, 0]);
}

#[test]
fn emit_blocks_while_readers_lag() {
    let emitted = Arc::new(Count::default());
    let gate = Arc::new(Count::default());
    let (seen, opened) = (emitted.clone(), gate.clone());
    let mut pipe = pipeline(vec![
        single("generate", generate_spec(), move |input, context| {
            for prompt in &input.split(1) {
                let group = respond(prompt, context)?;
                for row in group.split(1) {
                    context.emit(row)?;
                    seen.add();
                }
            }
            Ok(())
        }),
        // No reward ends before the gate opens.
        stage(
            "reward",
            reward_spec().slice_rows(1),
            move |input, context| {
                opened.reaches(1)?;
                score(input, context)
            },
        ),
    ]);
    pipe.stages
        .retain(|stage| ["prompts", "generate", "reward"].contains(&stage.name.as_str()));
    let (backlog, threads) = (2, 2);
    let options = RunOptions {
        host_threads: threads,
        backlog,
        ..RunOptions::default()
    };
    let mut run = start_with(&pipe, options);
    let step = std::thread::spawn(move || run.step().map(|output| output.metrics));
    // Rows that can be pending: in the channel, waiting for a thread, assigned to threads, and one each in transit.
    let bound = backlog + backlog + 2 * threads + 2;
    assert!(bound < BATCH.prompts * SAMPLES);
    emitted.reaches(2 * threads).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let out = emitted.get();
    gate.add();
    assert_eq!(
        step.join().unwrap().unwrap().get("reward/row_errors"),
        Some(0.0)
    );
    assert!(
        out <= bound,
        "{out} rows were emitted, the limit is {bound}"
    );
}

#[test]
fn prompts_reach_their_samples_and_dtypes_are_widened() {
    let reader = verl_words::field::Key::<verl_words::field::Ragged<i64>>::new(
        "responses",
        "[B, T~]",
        "",
        "",
    );
    let check = Arc::new(Count::default());
    let seen = check.clone();
    let spec = StageSpec::new()
        .reads(PROMPTS)
        .reads(reader)
        .rows(RowRule::Sink)
        .slice_rows(4);
    let sink = stage("sink", spec, move |input, _| {
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&reader)?);
        for (row, id) in input.ids().iter().enumerate() {
            assert_eq!(prompts.row(row), &[7, id.row() as u32]);
            assert_eq!(
                responses.row_len(row),
                1 + (id.row() + id.sample_index()) as usize % 4
            );
            seen.add();
        }
        Ok(())
    });
    start(vec![sink]).step().unwrap();
    assert_eq!(check.get(), BATCH.prompts * SAMPLES);
    assert_eq!(RESPONSES.field().dtype, verl_words::field::DType::U32);
}
