//! The table of statistics on disk: Parquet parts of some dozen steps, and the newest steps in an Arrow stream beside.

use std::fs::{self, File};
use std::io::BufReader;
use std::ops::RangeBounds;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, PrimitiveBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Float64Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Schema};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;

use crate::trace::columns::{Of, STAT_COLUMNS};
use crate::trace::error::TraceError;
use crate::trace::format::{FORMAT, MANIFEST_KEY, Side};
use crate::trace::ratio::RatioStats;
use crate::trace::stats::StatRow;
use crate::trace::store::TraceDir;
use crate::trace::writer::{aside, make_dir, write_aside};

/// Names of the quantile columns.
const QUANTILE_COLUMNS: [&str; 7] = ["p01", "p05", "p25", "p50", "p75", "p95", "p99"];

/// Rows as a record batch with the columns of [`STAT_COLUMNS`].
pub(crate) fn to_record(rows: &[StatRow]) -> Result<RecordBatch, ArrowError> {
    let columns = STAT_COLUMNS.iter().map(|column| {
        let array: ArrayRef = match column.of {
            Of::Text(of) => Arc::new(StringArray::from_iter(rows.iter().map(of))),
            Of::Whole(of) => Arc::new(UInt64Array::from_iter(rows.iter().map(of))),
            Of::Real(of) => Arc::new(Float64Array::from_iter(rows.iter().map(of))),
            Of::Buckets => lists::<UInt16Type>(rows, |cell| cell.0),
            Of::Counts => lists::<UInt32Type>(rows, |cell| cell.1),
        };
        (column.name, array, true)
    });
    RecordBatch::try_from_iter_with_nullable(columns)
}

fn lists<T: ArrowPrimitiveType>(rows: &[StatRow], of: fn(&(u16, u32)) -> T::Native) -> ArrayRef {
    let mut builder = ListBuilder::new(PrimitiveBuilder::<T>::new());
    for row in rows {
        row.sketch
            .iter()
            .for_each(|cell| builder.values().append_value(of(cell)));
        builder.append(true);
    }
    Arc::new(builder.finish())
}

/// The rows of a record batch; `None` where a column is missing or of another type.
fn from_record(record: &RecordBatch) -> Option<Vec<StatRow>> {
    let text = |name: &str| record.column_by_name(name)?.as_string_opt::<i32>();
    let whole = |name: &str| {
        record
            .column_by_name(name)?
            .as_primitive_opt::<UInt64Type>()
    };
    let real = |name: &str| {
        record
            .column_by_name(name)?
            .as_primitive_opt::<Float64Type>()
    };
    let (stage, side, key, name) = (text("stage")?, text("side")?, text("key")?, text("name")?);
    let counterpart = text("counterpart")?;
    let buckets = record
        .column_by_name("sketch_buckets")?
        .as_list_opt::<i32>()?;
    let counts = record
        .column_by_name("sketch_counts")?
        .as_list_opt::<i32>()?;
    let row = |at: usize| -> Option<StatRow> {
        let u = |name: &str| whole(name).map(|a| a.value(at));
        let maybe_u = |name: &str| Some(whole(name)?).map(|a| a.is_valid(at).then(|| a.value(at)));
        let f = |name: &str| Some(real(name)?).map(|a| a.is_valid(at).then(|| a.value(at)));
        let mut quantiles = [None; 7];
        for (slot, column) in quantiles.iter_mut().zip(QUANTILE_COLUMNS) {
            *slot = f(column)?;
        }
        let (b, c) = (buckets.value(at), counts.value(at));
        let (b, c) = (
            b.as_primitive_opt::<UInt16Type>()?,
            c.as_primitive_opt::<UInt32Type>()?,
        );
        let ratio = match counterpart.is_valid(at) {
            true => Some(RatioStats {
                counterpart: counterpart.value(at).to_owned(),
                tokens: maybe_u("ratio_tokens")??,
                diff_mean: f("diff_mean")??,
                diff_max: f("diff_max")??,
                k1: f("k1")??,
                ratio_min: f("ratio_min")??,
                ratio_max: f("ratio_max")??,
                probability_diff: f("probability_diff")??,
                ess: f("ess")??,
            }),
            false => None,
        };
        Some(StatRow {
            step: u("step")?,
            stage: stage.value(at).to_owned(),
            side: match side.value(at) {
                "input" => Side::Input,
                _ => Side::Output,
            },
            key: key.value(at).to_owned(),
            name: name.value(at).to_owned(),
            rows: u("rows")?,
            nulls: u("nulls")?,
            count: u("count")?,
            tokens: u("tokens")?,
            zeros: u("zeros")?,
            non_finite: u("non_finite")?,
            min: f("min")?,
            max: f("max")?,
            mean: f("mean")?,
            std: f("std")?,
            quantiles,
            sketch: b
                .values()
                .iter()
                .copied()
                .zip(c.values().iter().copied())
                .collect(),
            hash: u("hash")?,
            length_min: maybe_u("length_min")?,
            length_mean: f("length_mean")?,
            length_max: maybe_u("length_max")?,
            truncated_share: f("truncated_share")?,
            ratio,
        })
    };
    (0..record.num_rows()).map(row).collect()
}

/// Writes the table as a run goes on.
pub(crate) struct StatsWriter {
    dir: PathBuf,
    part_steps: usize,
    live: Option<StreamWriter<File>>,
    /// Steps since the last part.
    waiting: Vec<RecordBatch>,
    first_step: u64,
}

impl StatsWriter {
    /// Makes the folder.
    pub(crate) fn create(dir: PathBuf, part_steps: usize) -> Result<StatsWriter, TraceError> {
        make_dir(&dir)?;
        Ok(StatsWriter {
            dir,
            part_steps: part_steps.max(1),
            live: None,
            waiting: Vec::new(),
            first_step: 0,
        })
    }

    /// Adds the rows of a step: into the stream, and with enough steps into a part of their own.
    pub(crate) fn step(&mut self, step: u64, rows: &[StatRow]) -> Result<(), TraceError> {
        if rows.is_empty() {
            return Ok(());
        }
        let path = self.live_path();
        let record = to_record(rows).map_err(|e| TraceError::file("write", &path, e))?;
        if self.waiting.is_empty() {
            self.first_step = step;
        }
        self.waiting.push(record.clone());
        let streamed = self.stream(&record);
        if self.waiting.len() >= self.part_steps {
            self.part()?;
        }
        streamed
    }

    /// What is waiting goes into a part; for the end of a run.
    pub(crate) fn part(&mut self) -> Result<(), TraceError> {
        let Some(first) = self.waiting.first() else {
            return Ok(());
        };
        let path = self
            .dir
            .join(format!("part-{:08}.parquet", self.first_step));
        let schema = first.schema();
        let waiting = std::mem::take(&mut self.waiting);
        let told = |e: parquet::errors::ParquetError| TraceError::file("write", &path, e);
        write_aside(&path, |file| {
            let properties = WriterProperties::builder()
                .set_compression(Compression::SNAPPY)
                .set_created_by(concat!("verl-pipe ", env!("CARGO_PKG_VERSION")).to_owned())
                .set_key_value_metadata(Some(vec![KeyValue::new(
                    MANIFEST_KEY.to_owned(),
                    format!("{{\"format\": {FORMAT}}}"),
                )]))
                .build();
            let mut writer = ArrowWriter::try_new(file, schema, Some(properties)).map_err(told)?;
            for record in &waiting {
                writer.write(record).map_err(told)?;
            }
            writer.close().map_err(told).map(drop)
        })?;
        // The next step begins a new stream; until then readers find these steps in both and take the part's.
        self.live = None;
        Ok(())
    }

    fn live_path(&self) -> PathBuf {
        self.dir.join("live.arrows")
    }

    fn stream(&mut self, record: &RecordBatch) -> Result<(), TraceError> {
        let path = self.live_path();
        let told = |e: ArrowError| TraceError::file("write", &path, e);
        let mut live = match self.live.take() {
            Some(live) => live,
            None => self.begin_stream(record.schema_ref())?,
        };
        live.write(record).map_err(told)?;
        live.flush().map_err(told)?;
        self.live = Some(live);
        Ok(())
    }

    fn begin_stream(&self, schema: &Schema) -> Result<StreamWriter<File>, TraceError> {
        let path = self.live_path();
        let partial = aside(&path);
        let file = File::create(&partial).map_err(|e| TraceError::file("create", &partial, e))?;
        let writer = StreamWriter::try_new(file, schema)
            .map_err(|e| TraceError::file("write", &partial, e))?;
        fs::rename(&partial, &path).map_err(|e| TraceError::file("rename", &partial, e))?;
        Ok(writer)
    }
}

impl TraceDir {
    /// Statistics of the steps in `range`, in the order of steps and stages; those of a run that still goes on too.
    ///
    /// # Errors
    /// A part that is damaged or in another format.
    pub fn stats(&self, range: impl RangeBounds<u64>) -> Result<Vec<StatRow>, TraceError> {
        let dir = self.layout().stats();
        let mut rows = Vec::new();
        // The stream first: should a part be written meanwhile, its steps are found in either.
        let live = read_live(&dir.join("live.arrows"));
        for path in parts(&dir) {
            rows.extend(read_part(&path)?);
        }
        let last = rows.iter().map(|row: &StatRow| row.step).max();
        rows.extend(live.into_iter().filter(|row| Some(row.step) > last));
        rows.retain(|row| range.contains(&row.step));
        Ok(rows)
    }
}

fn parts(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("part-") && name.ends_with(".parquet")
        })
        .collect();
    paths.sort();
    paths
}

fn read_part(path: &Path) -> Result<Vec<StatRow>, TraceError> {
    let file = File::open(path).map_err(|e| TraceError::file("open", path, e))?;
    let builder =
        ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| TraceError::damaged(path, e))?;
    let about = builder.metadata().file_metadata().key_value_metadata();
    let mut entries = about.into_iter().flatten();
    let told = entries.find(|entry| entry.key == MANIFEST_KEY);
    let text = told
        .and_then(|entry| entry.value.clone())
        .unwrap_or_default();
    let _: serde_json::Value = crate::trace::format::parse(path, &text)?;
    let reader = builder.build().map_err(|e| TraceError::damaged(path, e))?;
    let mut rows = Vec::new();
    for record in reader {
        let record = record.map_err(|e| TraceError::damaged(path, e))?;
        let read = from_record(&record);
        rows.extend(read.ok_or_else(|| TraceError::damaged(path, "a column is missing"))?);
    }
    Ok(rows)
}

/// What can be read of a stream whose writer may be in the middle of a message, or gone.
fn read_live(path: &Path) -> Vec<StatRow> {
    let Ok(file) = File::open(path) else {
        return Vec::new();
    };
    let Ok(reader) = StreamReader::try_new(BufReader::new(file), None) else {
        return Vec::new();
    };
    let whole = reader.map_while(Result::ok);
    whole
        .filter_map(|record| from_record(&record))
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::trace::format::TraceFormat;
    use crate::trace::stats::{KeyStats, Place};
    use crate::trace::writer::TraceWriter;

    fn rows(step: u64) -> Vec<StatRow> {
        let numbers: ArrayRef = Arc::new(arrow_array::Float32Array::from(vec![
            Some(step as f32),
            None,
            Some(0.25),
        ]));
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "bc", ""]));
        let place = |key| Place {
            step,
            stage: "reward",
            side: Side::Output,
            key,
            name: "pipeline_name",
            brief: false,
        };
        let ratio = RatioStats {
            counterpart: "rollout_log_probs".to_owned(),
            tokens: 3,
            diff_mean: 0.5,
            diff_max: 1.0,
            k1: -0.25,
            ratio_min: 0.5,
            ratio_max: 2.0,
            probability_diff: 0.125,
            ess: 1.0,
        };
        [("rewards", numbers), ("texts", texts)]
            .into_iter()
            .map(|(key, array)| {
                let mut stats = KeyStats::default();
                stats.add((0, 0), &array, &[1, 2, 3]);
                StatRow {
                    truncated_share: Some(0.5),
                    ratio: (key == "rewards").then(|| ratio.clone()),
                    ..stats.row(place(key))
                }
            })
            .collect()
    }

    fn trace() -> (tempfile::TempDir, TraceWriter) {
        let temp = tempfile::tempdir().expect("a folder");
        let format = TraceFormat {
            format: FORMAT,
            verl: String::new(),
            pipeline: String::new(),
            plan_hash: String::new(),
            seed: 0,
            steps: 9,
            stages: Vec::new(),
        };
        let writer = TraceWriter::create(temp.path(), &format).expect("creates");
        (temp, writer)
    }

    #[test]
    fn steps_are_there_at_once_and_once() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 3).expect("creates");
        let read = TraceDir::open(temp.path()).expect("opens");
        assert_eq!(read.stats(..).expect("reads"), []);
        let mut expected = Vec::new();
        for step in 1..=8 {
            writer.step(step, &rows(step)).expect("writes");
            expected.extend(rows(step));
            assert_eq!(read.stats(..).expect("reads"), expected);
        }
        assert_eq!(
            read.stats(4..6).expect("reads"),
            [rows(4), rows(5)].concat()
        );
        let names: Vec<String> = parts(&trace.layout().stats())
            .iter()
            .map(|path| {
                path.file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        assert_eq!(names, ["part-00000001.parquet", "part-00000004.parquet"]);
        writer.part().expect("writes");
        assert_eq!(read.stats(..).expect("reads"), expected);
    }

    #[test]
    fn columns_are_as_documented() {
        let record = to_record(&rows(1)).expect("a record");
        let schema = record.schema();
        let written = schema.fields().iter();
        let written: Vec<_> = written
            .map(|f| (f.name().as_str(), f.data_type()))
            .collect();
        let told = STAT_COLUMNS.map(|column| (column.name, column.column().holds.arrow()));
        let told: Vec<_> = told.iter().map(|(name, holds)| (*name, holds)).collect();
        assert_eq!(written, told);
    }

    #[test]
    fn the_page_explains_every_column() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/trace.md");
        let page = fs::read_to_string(path).expect("the page");
        let first_cells: String = page
            .lines()
            .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
            .collect();
        for column in STAT_COLUMNS {
            let name = format!("`{}`", column.name);
            assert!(first_cells.contains(&name), "docs/trace.md lacks {name}");
        }
    }

    #[test]
    fn a_torn_stream_is_read_up_to_its_last_whole_step() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 9).expect("creates");
        for step in 1..=3 {
            writer.step(step, &rows(step)).expect("writes");
        }
        drop(writer);
        let path = trace.layout().stats().join("live.arrows");
        let bytes = fs::read(&path).expect("reads");
        let read = TraceDir::open(temp.path()).expect("opens");
        let mut seen = std::collections::BTreeSet::new();
        let file = File::options().write(true).open(&path).expect("opens");
        for len in (0..bytes.len()).rev() {
            // Shortened in place: a file that is written anew each time would be flushed each time.
            file.set_len(len as u64).expect("shortens");
            let steps: Vec<u64> = read
                .stats(..)
                .expect("reads")
                .iter()
                .map(|r| r.step)
                .collect();
            let whole = steps.len() / 2;
            let expected: Vec<u64> = (1..=whole as u64).flat_map(|s| [s, s]).collect();
            assert_eq!(steps, expected, "at {len} of {} bytes", bytes.len());
            seen.insert(whole);
        }
        assert!(seen.len() >= 3, "{seen:?}");
    }
}
