//! What the trace costs: a step of many small rows with and without statistics, and how fast a large step goes to disk.
//!
//! Targets: statistics cost at most 2 % of a training step, which takes a hundred times as long as these stages; a large
//! step is written at a rate near the disk's, in memory of a few row groups beside the rows themselves.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use arrow_schema::Field as ArrowField;
use criterion::{Criterion, criterion_group, criterion_main};
use verl_pipe::batch::{Batch, RaggedColumn, RowId};
use verl_pipe::keys::{ADVANTAGES, MASK_KINDS, OLD_LOG_PROBS, RESPONSES, ROLLOUT_LOG_PROBS};
use verl_pipe::pipe::{DataPipe, stage_fn};
use verl_pipe::run::runner::RunOptions;
use verl_pipe::schedule::batching::BatchConfig;
use verl_pipe::stage::{RowRule, StageSpec};
use verl_pipe::trace::config::TraceConfig;
use verl_pipe::trace::format::{FORMAT, Side, StageManifest, TraceFormat};
use verl_pipe::trace::recorder::Recorder;
use verl_pipe::trace::writer::{SliceAt, TraceWriter};

const FLOATS: [verl_pipe::field::Key<verl_pipe::field::Ragged<f32>>; 3] =
    [ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES];

fn rows(count: usize, tokens: usize) -> Batch {
    let ids = (0..count as u64).map(|row| RowId::prompt(0, row));
    let ids = ids.collect::<Result<Vec<_>, _>>().expect("in range");
    let mut batch = Batch::with_rows(&ids);
    let words = (0..count).map(|row| {
        (0..tokens)
            .map(|t| ((row + t) * 2_654_435_761) as u32 >> 16)
            .collect::<Vec<_>>()
    });
    batch
        .put(&RESPONSES, RaggedColumn::from_rows(words))
        .expect("as many rows");
    let kinds = vec![vec![1u8; tokens]; count];
    batch
        .put(&MASK_KINDS, RaggedColumn::from_rows(kinds))
        .expect("as many rows");
    for (at, key) in FLOATS.iter().enumerate() {
        let number = |row: usize, t: usize| -((row * 31 + t * 17 + at) as f32).sin().abs();
        let rows = (0..count).map(|row| (0..tokens).map(|t| number(row, t)).collect::<Vec<_>>());
        batch
            .put(key, RaggedColumn::from_rows(rows))
            .expect("as many rows");
    }
    batch
}

/// A source and eight stages that read all keys of 256 rows of 12 tokens.
fn pipeline(trace: TraceConfig) -> DataPipe {
    let batch = rows(256, 12);
    let source = StageSpec::new().rows(RowRule::Source);
    let fields = FLOATS.iter().map(|key| key.field());
    let keys = [RESPONSES.field(), MASK_KINDS.field()]
        .into_iter()
        .chain(fields);
    let keys: Vec<_> = keys.collect();
    let source = keys.iter().cloned().fold(source, StageSpec::writes);
    let mut pipe = DataPipe::new("cost")
        .batch(BatchConfig {
            prompts: 256,
            ..BatchConfig::default()
        })
        .trace(trace)
        .add_stage(
            "source",
            stage_fn(source, move |_, context| context.emit(batch.clone())),
        );
    for index in 0..8 {
        let sink = StageSpec::new().rows(RowRule::Sink);
        let sink = keys.iter().cloned().fold(sink, StageSpec::reads);
        pipe = pipe.add_stage(format!("reader_{index}"), stage_fn(sink, |_, _| Ok(())));
    }
    pipe
}

fn statistics(criterion: &mut Criterion) {
    for (name, stats) in [("statistics off", false), ("statistics on", true)] {
        let folder = tempfile::tempdir().expect("a folder");
        let plan = pipeline(TraceConfig {
            stats,
            ..TraceConfig::default()
        });
        let schedule = plan.plan().and_then(|plan| plan.schedule()).expect("sound");
        let recorder = Recorder::start(folder.path(), &schedule, Vec::new()).expect("starts");
        let mut options = RunOptions::default();
        if let Some(recorder) = &recorder {
            options.tap = recorder.clone();
        }
        let mut run = schedule.start(options).expect("starts");
        criterion.bench_function(name, |bencher| {
            bencher.iter(|| black_box(run.step().expect("a step")));
        });
    }
}

/// 4,096 samples of 2,048 tokens with five keys, once: 134 MB of ids and log-probs a key of four bytes.
fn large_step(_: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let format = TraceFormat {
        format: FORMAT,
        verl: String::new(),
        pipeline: String::new(),
        plan_hash: String::new(),
        seed: 0,
        steps: 1,
        stages: Vec::new(),
    };
    let writer = TraceWriter::create(folder.path(), &format).expect("creates");
    let batch = rows(4096, 2048);
    let schema = batch.record().schema();
    let fields: Vec<ArrowField> = schema.fields().iter().map(|f| f.as_ref().clone()).collect();
    let header = StageManifest {
        format: FORMAT,
        step: 1,
        stage: "large".to_owned(),
        kind: "large".to_owned(),
        parameters: serde_json::Value::Null,
        rename: Default::default(),
        seed: 0,
        steps: 1,
        models: Default::default(),
        keys: Vec::new(),
        slices: Vec::new(),
        notes: Vec::new(),
    };
    let since = Instant::now();
    let mut stage = writer.stage(header, &[], &fields).expect("begins");
    let mut largest = 0;
    for (slice, part) in batch.split(256).into_iter().enumerate() {
        let at = SliceAt {
            side: Side::Output,
            wave: 0,
            slice,
            rows: slice * 256..(slice + 1) * 256,
        };
        stage.write(at, &part).expect("writes");
        largest = largest.max(stage.memory_size());
    }
    let file = stage.finish().expect("ends");
    let traced = since.elapsed().as_secs_f64();
    let bytes = Arc::new(vec![7u8; file.bytes as usize]);
    let since = Instant::now();
    std::fs::write(folder.path().join("plain"), bytes.as_slice()).expect("writes");
    let plain = since.elapsed().as_secs_f64();
    let mb = |bytes: f64| bytes / 1e6;
    #[expect(clippy::print_stdout, reason = "this is the report of the bench")]
    {
        println!(
            "large step: {:.0} MB of rows into {:.0} MB in {traced:.2} s ({:.0} MB/s of rows), plain write of the same file {plain:.2} s, memory beside the rows {:.0} MB",
            mb(batch.num_bytes() as f64),
            mb(file.bytes as f64),
            mb(batch.num_bytes() as f64) / traced,
            mb(largest as f64)
        );
    }
}

criterion_group!(benches, statistics, large_step);
criterion_main!(benches);
