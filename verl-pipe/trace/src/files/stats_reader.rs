//! Reads the table of statistics: parts, and the stream of the newest steps, of a run that may be in progress.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::{self, BufReader, Read};
use std::ops::{Bound, RangeBounds};
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::StreamReader;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use verl_rules::format::Side;
use verl_rules::stats::{RatioStats, StatRow};

use crate::files::documents::MANIFEST_KEY;
use crate::files::error::TraceError;
use crate::files::stage_reader::check_codecs;
use crate::files::stats_writer::QUANTILE_COLUMNS;
use crate::files::trace_dir::{DamagedFile, TraceDir};

impl TraceDir {
    /// Statistics of the steps in `range`, in the order of steps and stages; the run may be in progress.
    ///
    /// # Errors
    /// A part that is damaged or in another format; a stream of the newest steps that is damaged.
    pub fn stats(&self, range: impl RangeBounds<u64>) -> Result<Vec<StatRow>, TraceError> {
        let (rows, mut damaged) = self.stats_as_found(range);
        match damaged.is_empty() {
            true => Ok(rows),
            false => Err(damaged.swap_remove(0).error),
        }
    }

    /// As [`TraceDir::stats`], but skips unreadable files and returns what is wrong with them.
    pub fn stats_as_found(&self, range: impl RangeBounds<u64>) -> (Vec<StatRow>, Vec<DamagedFile>) {
        let mut rows = Vec::new();
        let damaged = self.each_stats(range, |part| rows.extend(part));
        (rows, damaged)
    }

    /// Passes the statistics of the steps in `range` to `take`, a few dozen complete steps at a time, so that those of
    /// a long run need not be in memory at once. Returns what is wrong with unreadable files.
    pub fn each_stats(
        &self,
        range: impl RangeBounds<u64>,
        mut take: impl FnMut(Vec<StatRow>),
    ) -> Vec<DamagedFile> {
        let dir = self.layout().stats();
        let mut damaged = Vec::new();
        // The stream first: a part that is written in the meantime has the steps of the stream, so none is missed.
        let live = read_live(&dir.join("live.arrows"));
        let parts = parts(&dir);
        let mut known = BTreeSet::new();
        let wanted = |mut rows: Vec<StatRow>| {
            rows.retain(|row| range.contains(&row.step));
            rows
        };
        for (at, (first, path)) in parts.iter().enumerate() {
            let next = parts.get(at + 1).map(|(next, _)| *next);
            if !overlaps(&range, *first, next) {
                continue;
            }
            match read_part(path) {
                Ok(read) => {
                    known.extend(read.iter().map(|row| row.step));
                    take(wanted(read));
                }
                Err(error) => damaged.push(DamagedFile {
                    step: *first,
                    stage: None,
                    error,
                }),
            }
        }
        // The stream has the steps after the last part.
        let last = known.last().copied();
        let last = last.max(parts.last().map(|(first, _)| *first));
        let last = last.max(live.rows.last().map(|row| row.step));
        let next = last.map_or(1, |last| last + 1);
        let newest = live
            .rows
            .into_iter()
            .filter(|row| !known.contains(&row.step));
        take(wanted(newest.collect()));
        if let Some(error) = live.error.filter(|_| overlaps(&range, next, None)) {
            damaged.push(DamagedFile {
                step: next,
                stage: None,
                error,
            });
        }
        damaged
    }
}

/// Whether a step from `first` up to but excluding `next` may be in `range`.
fn overlaps(range: &impl RangeBounds<u64>, first: u64, next: Option<u64>) -> bool {
    let begins = match range.start_bound() {
        Bound::Unbounded => true,
        Bound::Included(start) => next.is_none_or(|next| *start < next),
        Bound::Excluded(start) => next.is_none_or(|next| *start < next.saturating_sub(1)),
    };
    let ends = match range.end_bound() {
        Bound::Unbounded => true,
        Bound::Included(end) => *end >= first,
        Bound::Excluded(end) => *end > first,
    };
    begins && ends
}

/// The parts, each with its first step.
pub(super) fn parts(dir: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut parts: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.path();
            let name = path.file_name()?.to_str()?;
            let first = name.strip_prefix("part-")?.strip_suffix(".parquet")?;
            Some((first.parse().ok()?, path))
        })
        .collect();
    parts.sort();
    parts
}

fn read_part(path: &Path) -> Result<Vec<StatRow>, TraceError> {
    let file = File::open(path).map_err(|e| TraceError::file("open", path, e))?;
    let builder =
        ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| TraceError::damaged(path, e))?;
    let about = builder.metadata().file_metadata().key_value_metadata();
    let mut entries = about.into_iter().flatten();
    let entry = entries.find(|entry| entry.key == MANIFEST_KEY);
    let text = entry
        .and_then(|entry| entry.value.clone())
        .unwrap_or_default();
    let _: serde_json::Value = crate::files::documents::parse(path, &text)?;
    check_codecs(path, builder.metadata())?;
    let reader = builder.build().map_err(|e| TraceError::damaged(path, e))?;
    let mut rows = Vec::new();
    for record in reader {
        let record = record.map_err(|e| TraceError::damaged(path, e))?;
        rows.extend(from_record(&record).map_err(|e| TraceError::damaged(path, e))?);
    }
    Ok(rows)
}

/// The rows of a stream, and what is wrong with it.
#[derive(Default)]
struct Live {
    rows: Vec<StatRow>,
    error: Option<TraceError>,
}

/// Reads a stream whose writer may be in the middle of a message, or gone. A truncated last message is not an error;
/// the head was complete when the file was renamed.
fn read_live(path: &Path) -> Live {
    let mut live = Live::default();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if [NotFound, NotADirectory].contains(&error.kind()) => return live,
        Err(error) => {
            live.error = Some(TraceError::file("open", path, error));
            return live;
        }
    };
    let mut damaged = |reason: String| live.error = Some(TraceError::damaged(path, reason));
    let file = EndAware {
        file: BufReader::new(file),
        ended: false,
    };
    let mut reader = match StreamReader::try_new(file, None) {
        Ok(reader) => reader,
        Err(error) => {
            damaged(format!(
                "its head is not that of an Arrow stream ({error}), so none of its steps can be read"
            ));
            return live;
        }
    };
    while let Some(record) = reader.next() {
        match record {
            Ok(record) => match from_record(&record) {
                Ok(rows) => live.rows.extend(rows),
                Err(reason) => {
                    damaged(reason);
                    break;
                }
            },
            Err(_) if reader.get_ref().ended => break,
            Err(error) => {
                damaged(format!(
                    "the data after its last complete step is not a step: {error}"
                ));
                break;
            }
        }
    }
    live
}

/// A file that records whether its end was reached: an incomplete message at the end is truncated, not damaged.
struct EndAware {
    file: BufReader<File>,
    ended: bool,
}

impl Read for EndAware {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.ended |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

/// The rows of a record batch.
///
/// # Errors
/// An invalid side, or a column that is missing or of another type; as a fragment.
pub(super) fn from_record(record: &RecordBatch) -> Result<Vec<StatRow>, String> {
    let sides = record.column_by_name("side");
    if let Some(sides) = sides.and_then(|array| array.as_string_opt::<i32>()) {
        let invalid = |side: &Option<&str>| !matches!(side, Some("input" | "output"));
        if let Some(side) = sides.iter().find(invalid) {
            let side = side.unwrap_or("null");
            return Err(format!(
                "a row has side `{side}` instead of `input` or `output`"
            ));
        }
    }
    rows_of(record).ok_or_else(|| "a column is missing or of another type".to_owned())
}

/// The rows of a record batch with valid sides; `None` if a column is missing or of another type.
fn rows_of(record: &RecordBatch) -> Option<Vec<StatRow>> {
    let text = |name: &str| record.column_by_name(name)?.as_string_opt::<i32>();
    let integers = |name: &str| {
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
        let u = |name: &str| integers(name).map(|a| a.value(at));
        let maybe_u =
            |name: &str| Some(integers(name)?).map(|a| a.is_valid(at).then(|| a.value(at)));
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
                // Traces of older versions do not have these two.
                k1_error: f("k1_error").flatten(),
                rows: maybe_u("ratio_rows").flatten().unwrap_or_default(),
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
