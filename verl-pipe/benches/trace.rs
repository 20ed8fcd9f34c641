//! The cost of the trace: a step of many small rows with and without statistics, and the speed and memory of writing a
//! large step to disk.
//!
//! Targets: statistics cost at most 2 % of a training step, which takes a hundred times as long as these stages; a large
//! step is written at a rate near that of a plain write of the same bytes to the same disk, and recording it takes no
//! more memory than the recorder's budget.
//!
//! ```text
//! cargo bench -p verl-pipe --bench trace
//! ```
//!
//! Peaks of memory are those that Linux reports (`VmHWM`, reset before each part).

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use arrow_schema::Field as ArrowField;
use criterion::{Criterion, criterion_group, criterion_main};
use verl_pipe::batch::arrow::ArrowBatch;
use verl_pipe::batch::{Batch, RaggedColumn, RowId};
use verl_pipe::field::Field;
use verl_pipe::keys::{ADVANTAGES, MASK_KINDS, OLD_LOG_PROBS, RESPONSES, ROLLOUT_LOG_PROBS};
use verl_pipe::pipe::{DataPipe, stage_fn};
use verl_pipe::plan::Plannable;
use verl_pipe::run::runner::{Run, RunOptions};
use verl_pipe::schedule::batching::BatchConfig;
use verl_pipe::stage::{RowRule, StageContext, StageSpec};
use verl_pipe::trace::config::TraceConfig;
use verl_pipe::trace::files::{ROW_GROUP_BYTES, SliceAt, StageManifest, TraceFormat, TraceWriter};
use verl_pipe::trace::format::{FORMAT, Side};
use verl_pipe::trace::record::{MEMORY_BUDGET, Recorder};

const FLOATS: [verl_pipe::field::Key<verl_pipe::field::Ragged<f32>>; 3] =
    [ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES];

/// Rows of equal length with numbers that, like log-probs, are hardly ever equal.
fn rows(count: usize, tokens: usize) -> Batch {
    let ids = (0..count as u64).map(|row| RowId::prompt(0, row));
    let ids = ids.collect::<Result<Vec<_>, _>>().expect("in range");
    let mut batch = Batch::with_rows(&ids);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as u32
    };
    let words = (0..count).map(|_| (0..tokens).map(|_| draw() % 50_000).collect::<Vec<_>>());
    let words: RaggedColumn<u32> = RaggedColumn::from_rows(words);
    batch.put(&RESPONSES, words).expect("as many rows");
    let kinds = (0..count).map(|_| vec![1u8; tokens]);
    batch
        .put(&MASK_KINDS, RaggedColumn::from_rows(kinds))
        .expect("as many rows");
    for key in &FLOATS {
        // 24 bits each, as many as the mantissa of an f32.
        let mut number = || -(draw() as f32 / 16_777_216.0);
        let rows = (0..count).map(|_| (0..tokens).map(|_| number()).collect::<Vec<_>>());
        batch
            .put(key, RaggedColumn::from_rows(rows))
            .expect("as many rows");
    }
    batch
}

/// All keys of the rows.
fn all_keys() -> Vec<Field> {
    let floats = FLOATS.iter().map(|key| key.field());
    let keys = [RESPONSES.field(), MASK_KINDS.field()];
    keys.into_iter().chain(floats).collect()
}

/// A source and eight stages that read all keys of 256 rows of 12 tokens.
fn pipeline(trace: TraceConfig) -> DataPipe {
    let batch = rows(256, 12);
    let source = StageSpec::new().rows(RowRule::Source);
    let keys = all_keys();
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
        let schedule = plan
            .plan()
            .and_then(|plan| plan.schedule())
            .expect("a valid plan");
        let recorder = Recorder::start(folder.path(), &schedule).expect("starts");
        let mut options = RunOptions::default();
        if let Some(recorder) = &recorder {
            options.tap = recorder.clone();
        }
        let mut run = Run::start(schedule, options).expect("starts");
        criterion.bench_function(name, |bencher| {
            bencher.iter(|| black_box(run.step().expect("a step")));
        });
    }
}

/// Samples and tokens of each in a large step.
const LARGE: (usize, usize) = (4096, 2048);
/// Rows of a slice of it.
const SLICE: usize = 256;
/// Rounds of which the fastest is reported: other processes can only slow one down.
const ROUNDS: usize = 7;

/// A large step to disk: its speed compared with a plain write of the same bytes to the same disk, both synced, with
/// the number of threads, the CPU seconds and the memory.
fn large_step(_: &mut Criterion) {
    // The target folder is on a disk; the folder for temporary files may not be.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(target).expect("a folder");
    let folder = tempfile::tempdir_in(target).expect("a folder");
    let batch = rows(LARGE.0, LARGE.1);
    print(&format!(
        "large step: {} samples of {} tokens, {} keys, {:.0} MB of rows; in {}",
        LARGE.0,
        LARGE.1,
        batch.keys().len(),
        mb(batch.num_bytes() as u64),
        folder.path().display()
    ));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut threads = vec![1, 2, cores];
    threads.sort_unstable();
    threads.dedup();
    let mut written: Vec<Vec<Took>> = vec![Vec::new(); threads.len()];
    let mut plain = Vec::new();
    let mut size = 0;
    let resets = reset_peak();
    let before = memory("VmRSS");
    let mut peak = None;
    for round in 0..ROUNDS {
        let mut bytes = Vec::new();
        for (threads, written) in threads.iter().zip(&mut written) {
            let dir = folder.path().join(format!("round_{round}_{threads}"));
            drop(bytes);
            reset_peak();
            let (took, file) = timed(|| {
                let file = write_step(&dir, &batch, *threads);
                sync(&file);
                file
            });
            written.push(took);
            // Before the file is read back for the plain write.
            peak = peak.max(memory("VmHWM"));
            bytes = std::fs::read(&file).expect("reads");
            std::fs::remove_dir_all(&dir).expect("removes");
        }
        size = bytes.len();
        let file = folder.path().join("plain");
        let (took, ()) = timed(|| {
            std::fs::write(&file, &bytes).expect("writes");
            sync(&file);
        });
        plain.push(took);
        std::fs::remove_file(&file).expect("removes");
    }
    let mega = mb(size as u64);
    let fastest = |all: &[Took]| all.iter().map(|took| took.wall).fold(f64::MAX, f64::min);
    let describe = |all: &[Took]| {
        let spent: Option<Vec<f64>> = all.iter().map(|took| took.cpu).collect();
        let cpu = spent.map_or("not reported by this system".to_owned(), |spent| {
            let mean = spent.iter().sum::<f64>() / spent.len() as f64;
            format!("{:.2} CPU seconds per GB", mean / mega * 1e3)
        });
        let wall = fastest(all);
        format!("{wall:.3} s, {:.0} MB/s, {cpu}", mega / wall)
    };
    print(&format!(
        "  plain write and sync of the same {mega:.0} MB: {} (fastest of {ROUNDS} rounds)",
        describe(&plain)
    ));
    for (threads, written) in threads.iter().zip(&written) {
        print(&format!(
            "  trace write and sync, {threads} encoding: {}; {:.2} of the plain rate",
            describe(written),
            fastest(&plain) / fastest(written)
        ));
    }
    let above = |peak: Option<u64>, base: Option<u64>| match (resets, peak, base) {
        (true, Some(peak), Some(base)) => format!("{:.0} MB", mb(peak.saturating_sub(base))),
        _ => "not reported by this system".to_owned(),
    };
    print(&format!(
        "  memory of the writer: peak {} above the rows; a row group has {:.0} MB of them",
        above(peak, before),
        mb(ROW_GROUP_BYTES as u64)
    ));
    recorded_step(folder.path(), &batch, &above);
}

/// Seconds of a piece of work.
#[derive(Debug, Clone)]
struct Took {
    wall: f64,
    /// Of all threads of the process.
    cpu: Option<f64>,
}

fn timed<T>(work: impl FnOnce() -> T) -> (Took, T) {
    let (since, before) = (Instant::now(), cpu_seconds());
    let value = work();
    let wall = since.elapsed().as_secs_f64();
    let cpu = cpu_seconds().zip(before).map(|(now, before)| now - before);
    (Took { wall, cpu }, value)
}

/// CPU seconds of the process, in user and system mode, as Linux reports them: in hundredths.
fn cpu_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    let mut ticks = fields.split_whitespace().skip(11).map(str::parse::<f64>);
    let (own, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some((own + system) / 100.0)
}

/// The same through a run with its recorder, compared with a run without: the additional cost of the recorder.
fn recorded_step(folder: &Path, batch: &Batch, above: &dyn Fn(Option<u64>, Option<u64>) -> String) {
    let step = |name: &str, trace: TraceConfig| {
        let plan = large_pipeline(batch.clone(), trace).plan();
        let schedule = plan.and_then(|plan| plan.schedule()).expect("a valid plan");
        let dir = folder.join(name);
        std::fs::create_dir(&dir).expect("a folder");
        let recorder = Recorder::start(&dir, &schedule).expect("starts");
        let mut options = RunOptions::default();
        if let Some(recorder) = &recorder {
            options.tap = recorder.clone();
        }
        let mut run = Run::start(schedule, options).expect("starts");
        reset_peak();
        let since = Instant::now();
        run.step().expect("a step");
        let took = since.elapsed().as_secs_f64();
        (took, memory("VmHWM"), folder_bytes(&dir))
    };
    let nothing = TraceConfig {
        stats: false,
        ..TraceConfig::default()
    };
    let full = TraceConfig {
        every: Some(1),
        ..TraceConfig::default()
    };
    let (without, base, _) = step("without", nothing);
    let (with, peak, bytes) = step("with", full);
    print(&format!(
        "  recorded in a run (a source and a reader, with statistics): {with:.2} s with {:.0} MB on disk, {without:.2} s without recording",
        mb(bytes)
    ));
    print(&format!(
        "  memory of the recorder: peak {} above a run without recording; its budget is {:.0} MB",
        above(peak, base),
        mb(MEMORY_BUDGET as u64)
    ));
}

/// A source that emits the batch in slices, and a stage that reads all of it.
fn large_pipeline(batch: Batch, trace: TraceConfig) -> DataPipe {
    let source = StageSpec::new().rows(RowRule::Source);
    let sink = StageSpec::new().rows(RowRule::Sink);
    let (source, sink) = all_keys().into_iter().fold((source, sink), |(s, r), key| {
        (s.writes(key.clone()), r.reads(key))
    });
    let emit = move |_: Batch, context: &mut StageContext<'_>| {
        let mut parts = batch.split(SLICE).into_iter();
        parts.try_for_each(|part| context.emit(part))
    };
    DataPipe::new("large")
        .batch(BatchConfig {
            prompts: LARGE.0,
            ..BatchConfig::default()
        })
        .trace(trace)
        .add_stage("source", stage_fn(source, emit))
        .add_stage("reader", stage_fn(sink, |_, _| Ok(())))
}

/// Writes the batch as the output of a stage of step 1; returns the file.
fn write_step(run: &Path, batch: &Batch, threads: usize) -> PathBuf {
    let format = TraceFormat {
        format: FORMAT,
        verl: String::new(),
        pipeline: String::new(),
        plan_hash: String::new(),
        seed: 0,
        steps: 1,
        stages: Vec::new(),
    };
    let writer = TraceWriter::create(run, &format)
        .expect("creates")
        .with_threads(threads);
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
    let mut stage = writer.stage(header, &[], &fields).expect("begins");
    for (slice, part) in batch.split(SLICE).into_iter().enumerate() {
        let at = SliceAt {
            side: Side::Output,
            wave: 0,
            slice,
            rows: slice * SLICE..(slice + 1) * SLICE,
        };
        stage.write(at, &part).expect("writes");
    }
    let file = stage.finish().expect("ends");
    writer.layout().step(1).join(file.file)
}

/// Waits until a file is on its disk.
fn sync(path: &Path) {
    let file = std::fs::File::open(path).expect("opens");
    file.sync_all().expect("syncs");
}

/// Bytes of all files below a folder.
fn folder_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).expect("a folder").flatten();
    let sizes = entries.map(|entry| match entry.path() {
        path if path.is_dir() => folder_bytes(&path),
        path => std::fs::metadata(path).map_or(0, |about| about.len()),
    });
    sizes.sum()
}

/// Resets the peak memory of the process in the system; returns whether that worked.
fn reset_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// A line of `/proc/self/status` in bytes.
fn memory(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kilobytes = line.split_whitespace().nth(1)?.parse::<u64>().ok()?;
    Some(kilobytes * 1024)
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[expect(clippy::print_stdout, reason = "this is the report of the bench")]
fn print(line: &str) {
    println!("{line}");
}

criterion_group!(benches, statistics, large_step);
criterion_main!(benches);
