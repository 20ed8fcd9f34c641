//! The table of statistics on disk: Parquet parts of a few dozen steps, and an Arrow stream with the newest steps.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, PrimitiveBuilder};
use arrow_array::types::{ArrowPrimitiveType, UInt16Type, UInt32Type};
use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use verl_rules::format::FORMAT;
use verl_rules::stats::StatRow;
use verl_run::atomic_file::AtomicFile;
use verl_run::space::Room;

use crate::files::atomic::make_dir;
use crate::files::columns::{Of, STAT_COLUMNS};
use crate::files::documents::MANIFEST_KEY;
use crate::files::error::TraceError;

/// Names of the quantile columns.
pub(super) const QUANTILE_COLUMNS: [&str; 7] = ["p01", "p05", "p25", "p50", "p75", "p95", "p99"];

/// Rows as a record batch with the columns of [`STAT_COLUMNS`].
pub(crate) fn to_record(rows: &[StatRow]) -> Result<RecordBatch, ArrowError> {
    let columns = STAT_COLUMNS.iter().map(|column| {
        let array: ArrayRef = match column.of {
            Of::Text(of) => Arc::new(StringArray::from_iter(rows.iter().map(of))),
            Of::Integer(of) => Arc::new(UInt64Array::from_iter(rows.iter().map(of))),
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

/// Writes the table during a run.
pub struct StatsWriter {
    dir: PathBuf,
    part_steps: usize,
    /// The stream; `None` if the next step begins a new one.
    live: Option<StreamWriter<File>>,
    /// Steps since the last part, which are in no part. A new stream begins with all of them, so a reader finds every step
    /// in the stream or in a part, even if writing a step or a part has failed.
    waiting: Vec<RecordBatch>,
    first_step: u64,
    /// Disk space, if part of it is reserved.
    room: Option<Room>,
}

impl StatsWriter {
    /// Creates the folder; each part has `part_steps` steps.
    ///
    /// # Errors
    /// An I/O error.
    pub fn create(dir: PathBuf, part_steps: usize) -> Result<StatsWriter, TraceError> {
        make_dir(&dir)?;
        Ok(StatsWriter {
            dir,
            part_steps: part_steps.max(1),
            live: None,
            waiting: Vec::new(),
            first_step: 0,
            room: None,
        })
    }

    /// Writes only while there is room beyond the reserved space.
    pub(crate) fn with_room(self, room: Option<Room>) -> StatsWriter {
        StatsWriter { room, ..self }
    }

    fn take_room(&self, path: &Path, size: usize) -> Result<(), TraceError> {
        let taken = self
            .room
            .as_ref()
            .map_or(Ok(()), |room| room.ensure_free_beside_lines(size as u64));
        taken.map_err(|e| TraceError::file("write", path, e))
    }

    /// Adds the rows of a step to the stream, and writes a part once there are enough steps.
    ///
    /// # Errors
    /// An I/O error.
    pub fn step(&mut self, step: u64, rows: &[StatRow]) -> Result<(), TraceError> {
        if rows.is_empty() {
            return Ok(());
        }
        let path = self.live_path();
        let record = to_record(rows).map_err(|e| TraceError::file("write", &path, e))?;
        if self.waiting.is_empty() {
            self.first_step = step;
        }
        self.waiting.push(record);
        let streamed = self.stream();
        // After a failed part the next one has its steps too.
        if self.waiting.len().is_multiple_of(self.part_steps) {
            self.part()?;
        }
        streamed
    }

    /// Writes the waiting steps as a part; also at the end of a run.
    ///
    /// # Errors
    /// An I/O error.
    pub fn part(&mut self) -> Result<(), TraceError> {
        let Some(first) = self.waiting.first() else {
            return Ok(());
        };
        let path = self
            .dir
            .join(format!("part-{:08}.parquet", self.first_step));
        let schema = first.schema();
        // An upper bound: compressed it takes less. Until it is written, readers find the steps in the stream.
        self.take_room(&path, size_of(&self.waiting))?;
        let failed = |e: parquet::errors::ParquetError| TraceError::file("write", &path, e);
        let (part, file) = AtomicFile::create(path.as_path())?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_created_by(concat!("verl-pipe ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(vec![KeyValue::new(
                MANIFEST_KEY.to_owned(),
                format!("{{\"format\": {FORMAT}}}"),
            )]))
            .build();
        let mut writer = ArrowWriter::try_new(file, schema, Some(properties)).map_err(failed)?;
        for record in &self.waiting {
            writer.write(record).map_err(failed)?;
        }
        writer.close().map_err(failed)?;
        // The next stream replaces the one that has these steps, so the part must be on disk before.
        part.durable()?;
        self.waiting.clear();
        // The next step begins a new stream. Until then readers find these steps in both and use the part.
        self.live = None;
        Ok(())
    }

    fn live_path(&self) -> PathBuf {
        self.dir.join("live.arrows")
    }

    /// Adds the last of the waiting steps to the stream. After an error the next step begins a new stream.
    fn stream(&mut self) -> Result<(), TraceError> {
        let path = self.live_path();
        let failed = |e: ArrowError| TraceError::file("write", &path, e);
        let Some(mut live) = self.live.take() else {
            self.live = self.begin_stream()?;
            return Ok(());
        };
        if let Some(record) = self.waiting.last() {
            self.take_room(&path, record.get_array_memory_size())?;
            live.write(record).map_err(failed)?;
        }
        live.flush().map_err(failed)?;
        self.live = Some(live);
        Ok(())
    }

    /// A stream with all waiting steps, which replaces the one before.
    fn begin_stream(&self) -> Result<Option<StreamWriter<File>>, TraceError> {
        let Some(first) = self.waiting.first() else {
            return Ok(None);
        };
        let path = self.live_path();
        self.take_room(&path, size_of(&self.waiting))?;
        let failed = |e: ArrowError| TraceError::file("write", &path, e);
        let (stream, file) = AtomicFile::create(path.as_path())?;
        let mut live = StreamWriter::try_new(file, first.schema_ref()).map_err(failed)?;
        for record in &self.waiting {
            live.write(record).map_err(failed)?;
        }
        live.flush().map_err(failed)?;
        stream.replace()?;
        Ok(Some(live))
    }
}

/// Bytes of records in memory.
fn size_of(records: &[RecordBatch]) -> usize {
    records.iter().map(RecordBatch::get_array_memory_size).sum()
}

#[cfg(test)]
mod tests {
    use verl_rules::format::Side;
    use verl_rules::stats::{KeyStats, Place, RatioStats};

    use super::*;
    use crate::files::documents::TraceFormat;
    use crate::files::stats_reader::{from_record, parts};
    use crate::files::trace_dir::TraceDir;
    use crate::files::trace_writer::TraceWriter;
    use std::fs;

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
            k1_error: Some(0.125),
            rows: 2,
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
    fn each_step_is_readable_at_once_and_only_once() {
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
            .map(|(_, path)| {
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

    #[track_caller]
    fn check_readable(trace: &TraceDir, steps: std::ops::RangeInclusive<u64>) {
        let expected: Vec<StatRow> = steps.flat_map(rows).collect();
        assert_eq!(trace.stats(..).expect("reads"), expected);
    }

    #[test]
    fn all_steps_are_readable_again_after_a_failed_write_of_the_stream() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 9).expect("creates");
        let read = TraceDir::open(temp.path()).expect("opens");
        for step in 1..=2 {
            writer.step(step, &rows(step)).expect("writes");
        }
        // As on a full disk, the file cannot be written.
        let path = trace.layout().stats().join("live.arrows");
        let live = writer.live.as_mut().expect("a stream");
        *live.get_mut() = File::open(&path).expect("opens");
        writer.step(3, &rows(3)).expect_err("read-only");
        check_readable(&read, 1..=2);
        // Nor can a new one be created.
        let aside = AtomicFile::aside(&path);
        fs::create_dir(&aside).expect("a folder");
        writer.step(4, &rows(4)).expect_err("a folder in its place");
        check_readable(&read, 1..=2);
        fs::remove_dir(&aside).expect("removes");
        for step in 5..=6 {
            writer.step(step, &rows(step)).expect("writes");
            check_readable(&read, 1..=step);
        }
    }

    #[test]
    fn no_step_is_lost_if_a_part_cannot_be_written() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 2).expect("creates");
        let read = TraceDir::open(temp.path()).expect("opens");
        let aside = AtomicFile::aside(&trace.layout().stats().join("part-00000001.parquet"));
        fs::create_dir(&aside).expect("a folder");
        writer.step(1, &rows(1)).expect("writes");
        writer.step(2, &rows(2)).expect_err("a folder in its place");
        check_readable(&read, 1..=2);
        fs::remove_dir(&aside).expect("removes");
        for step in 3..=5 {
            writer.step(step, &rows(step)).expect("writes");
            check_readable(&read, 1..=step);
        }
        assert_eq!(parts(&trace.layout().stats()).len(), 1);
    }

    #[test]
    fn columns_are_as_documented() {
        let record = to_record(&rows(1)).expect("a record");
        let schema = record.schema();
        let written = schema.fields().iter();
        let written: Vec<_> = written
            .map(|f| (f.name().as_str(), f.data_type()))
            .collect();
        let documented = STAT_COLUMNS.map(|column| (column.name, column.column().holds.arrow()));
        let documented: Vec<_> = documented
            .iter()
            .map(|(name, holds)| (*name, holds))
            .collect();
        assert_eq!(written, documented);
    }

    #[test]
    fn the_other_parts_are_read_if_one_is_damaged() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 2).expect("creates");
        for step in 1..=7 {
            writer.step(step, &rows(step)).expect("writes");
        }
        let path = trace.layout().stats().join("part-00000003.parquet");
        fs::write(&path, "PAR1 and no more").expect("writes");
        let read = TraceDir::open(temp.path()).expect("opens");
        let (found, damaged) = read.stats_as_found(..);
        let expected = [1, 2, 5, 6, 7].map(rows).concat();
        assert_eq!(found, expected);
        let message = damaged[0].to_string();
        assert!(
            message.starts_with("step 3: `")
                && message.contains("part-00000003.parquet` is damaged"),
            "{message}"
        );
        assert_eq!(read.stats(..).expect_err("damaged").code(), "T003");
        // Steps of other parts are read without it.
        for range in [1..3, 5..6, 6..9] {
            let expected: Vec<StatRow> = range
                .clone()
                .take_while(|s| *s < 8)
                .flat_map(rows)
                .collect();
            assert_eq!(read.stats(range).expect("another part"), expected);
        }
        assert_eq!(read.stats(4..=4).expect_err("damaged").code(), "T003");
    }

    #[test]
    fn an_invalid_side_is_reported() {
        let record = to_record(&rows(1)).expect("a record");
        let at = record.schema().index_of("side").expect("there");
        let mut columns = record.columns().to_vec();
        columns[at] = Arc::new(StringArray::from(vec!["output", "parameter"]));
        let record = RecordBatch::try_new(record.schema(), columns).expect("a record");
        let reason = from_record(&record).expect_err("no side");
        assert_eq!(
            reason,
            "a row has side `parameter` instead of `input` or `output`"
        );
    }

    #[test]
    fn the_page_explains_every_column() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/trace.md");
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
    fn a_truncated_stream_is_read_up_to_its_last_complete_step() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 9).expect("creates");
        for step in 1..=3 {
            writer.step(step, &rows(step)).expect("writes");
        }
        drop(writer);
        let path = trace.layout().stats().join("live.arrows");
        let bytes = fs::read(&path).expect("reads");
        let read = TraceDir::open(temp.path()).expect("opens");
        let head = head_of(&bytes);
        let mut seen = std::collections::BTreeSet::new();
        let file = File::options().write(true).open(&path).expect("opens");
        for len in (head..bytes.len()).rev() {
            // Shortened in place: rewriting the file each time would flush it each time.
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

    /// Bytes of a stream's head: mark, length, and the schema.
    fn head_of(bytes: &[u8]) -> usize {
        let length: [u8; 4] = bytes[4..8].try_into().expect("four bytes");
        8 + u32::from_le_bytes(length) as usize
    }

    #[test]
    fn a_damaged_stream_is_reported_and_not_read_as_empty() {
        let (temp, trace) = trace();
        let mut writer = StatsWriter::create(trace.layout().stats(), 3).expect("creates");
        for step in 1..=5 {
            writer.step(step, &rows(step)).expect("writes");
        }
        drop(writer);
        let path = trace.layout().stats().join("live.arrows");
        let bytes = fs::read(&path).expect("reads");
        let read = TraceDir::open(temp.path()).expect("opens");
        let parts = [1, 2, 3].map(rows).concat();
        let check = |bytes: &[u8], found: &[StatRow], step: u64, reason: &str| {
            fs::write(&path, bytes).expect("writes");
            let (rows, damaged) = read.stats_as_found(..);
            assert_eq!(rows, found);
            let messages: Vec<String> = damaged.iter().map(ToString::to_string).collect();
            let [message] = messages.as_slice() else {
                panic!("{messages:?}");
            };
            assert!(
                message.starts_with(&format!("step {step}: `"))
                    && message.contains("live.arrows` is damaged")
                    && message.contains(reason),
                "{message}"
            );
            assert_eq!(read.stats(..).expect_err("damaged").code(), "T003");
            // Steps in the parts are all readable.
            assert_eq!(read.stats(..=3).expect("in a part"), parts);
        };
        let head = head_of(&bytes);
        for cut in [0, 3, 7, head / 2, head - 1] {
            check(&bytes[..cut], &parts, 4, "its head");
        }
        // The length, and the offset of the schema.
        for (at, new) in [(5, &[0x7F][..]), (8, &[0xFF; 4])] {
            let mut torn = bytes.clone();
            torn[at..at + new.len()].copy_from_slice(new);
            check(&torn, &parts, 4, "its head");
        }
        check(b"PAR1 and no more", &parts, 4, "its head");
        // Garbage where a step should be.
        let mut torn = bytes.clone();
        torn.truncate(head);
        torn.extend(&bytes[..head]);
        check(&torn, &parts, 4, "the data after its last complete step");
        fs::remove_file(&path).expect("removes");
        assert_eq!(read.stats(..).expect("reads"), parts);
    }
}
