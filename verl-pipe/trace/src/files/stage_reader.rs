//! Reads the file of one stage of a recorded step: its metadata, and its rows by slice.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::UInt32Type;
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::file::metadata::ParquetMetaData;
use verl_rules::format::Side;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, GROUP_ID, RowId, SAMPLE_ID};

use crate::files::documents::{KeyColumn, MANIFEST_KEY, SliceSpan, StageManifest, parse};
use crate::files::error::TraceError;
use crate::files::trace_dir::{SliceTrace, StageTrace};

/// Rows decoded at once.
const READ_ROWS: usize = 4096;

/// Reads a stage's file at any path and under any name.
///
/// # Errors
/// A file that is missing or damaged, in another format, or compressed with an unsupported codec.
pub fn read_stage(path: &Path) -> Result<StageTrace, TraceError> {
    read_stage_if(path, |_| Ok(()))
}

/// As [`read_stage`], after `fits` has accepted the file's metadata.
pub(crate) fn read_stage_if(
    path: &Path,
    fits: impl FnOnce(&StageManifest) -> Result<(), TraceError>,
) -> Result<StageTrace, TraceError> {
    let damaged = |reason: String| TraceError::damaged(path, reason);
    let file = File::open(path).map_err(|e| TraceError::file("open", path, e))?;
    let builder =
        ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| damaged(e.to_string()))?;
    let about = builder.metadata().file_metadata().key_value_metadata();
    let text = about
        .into_iter()
        .flatten()
        .find(|entry| entry.key == MANIFEST_KEY)
        .and_then(|entry| entry.value.clone())
        .ok_or_else(|| damaged(format!("it has no `{MANIFEST_KEY}` in its metadata")))?;
    let manifest: StageManifest = parse(path, &text)?;
    fits(&manifest)?;
    check_codecs(path, builder.metadata())?;
    let schema = builder.schema().clone();
    let reader = builder
        .with_batch_size(READ_ROWS)
        .build()
        .map_err(|e| damaged(e.to_string()))?;
    let pieces = reader
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| damaged(e.to_string()))?;
    let rows = FileRows {
        path: path.to_owned(),
        schema,
        pieces,
    };
    rows.check_places(&manifest)?;
    let inputs = rows.slices(&manifest, Side::Input)?;
    let outputs = rows.slices(&manifest, Side::Output)?;
    Ok(StageTrace {
        manifest,
        inputs,
        outputs,
    })
}

/// Checks that this build can decode all columns of a file. It writes Snappy, but other writers may use other codecs.
pub(crate) fn check_codecs(path: &Path, about: &ParquetMetaData) -> Result<(), TraceError> {
    let columns = about.row_groups().iter().flat_map(|group| group.columns());
    let unsupported = columns.map(|column| column.compression()).find(|codec| {
        matches!(
            codec,
            Compression::ZSTD(_) | Compression::BROTLI(_) | Compression::LZO
        )
    });
    match unsupported {
        None => Ok(()),
        Some(codec) => Err(TraceError::UnknownCodec {
            path: path.to_owned(),
            codec: codec
                .to_string()
                .split('(')
                .next()
                .unwrap_or_default()
                .to_owned(),
        }),
    }
}

/// The decoded rows of a file.
struct FileRows {
    path: PathBuf,
    schema: SchemaRef,
    pieces: Vec<RecordBatch>,
}

impl FileRows {
    fn damaged(&self, reason: impl std::fmt::Display) -> TraceError {
        TraceError::damaged(&self.path, reason)
    }

    /// Checks that every row belongs to one slice, and that its own columns agree with the file's metadata about it.
    fn check_places(&self, manifest: &StageManifest) -> Result<(), TraceError> {
        let mut spans: Vec<&SliceSpan> = manifest.slices.iter().collect();
        spans.sort_by_key(|span| (span.first, span.len));
        let mut next = 0;
        for span in &spans {
            if span.first != next {
                return Err(self.damaged(format!(
                    "slice {} of the {} begins at row {}, but the previous slice ends at row {next}",
                    span.slice,
                    span.side.as_str(),
                    span.first
                )));
            }
            next += span.len;
        }
        let rows: usize = self.pieces.iter().map(RecordBatch::num_rows).sum();
        if rows != next {
            return Err(self.damaged(format!(
                "it contains {rows} rows, but its slices have {next}"
            )));
        }
        let [sides, waves, slices, samples, groups] =
            ["side", "wave", "slice", SAMPLE_ID, GROUP_ID].map(|name| self.all_rows(name));
        let (sides, waves, slices) = (sides?, waves?, slices?);
        let (samples, groups) = (samples?, groups?);
        let of_type = |name: &str, array: &ArrayRef| {
            self.damaged(format!("column `{name}` has type {}", array.data_type()))
        };
        let text = sides.as_string_opt::<i32>();
        let text = text.ok_or_else(|| of_type("side", &sides))?;
        let wave = waves.as_primitive_opt::<UInt32Type>();
        let wave = wave.ok_or_else(|| of_type("wave", &waves))?;
        let slice = slices.as_primitive_opt::<UInt32Type>();
        let slice = slice.ok_or_else(|| of_type("slice", &slices))?;
        let ids = |name: &str, array: &ArrayRef| {
            let ids = array.as_primitive_opt::<arrow_array::types::UInt64Type>();
            ids.cloned().ok_or_else(|| of_type(name, array))
        };
        let (samples, groups) = (ids(SAMPLE_ID, &samples)?, ids(GROUP_ID, &groups)?);
        for span in spans {
            for row in span.first..span.first + span.len {
                let side = if text.is_valid(row) {
                    text.value(row)
                } else {
                    "null"
                };
                if ![Side::Input, Side::Output]
                    .map(Side::as_str)
                    .contains(&side)
                {
                    return Err(self.damaged(format!(
                        "row {row} has side `{side}` instead of `input` or `output`"
                    )));
                }
                let says = (
                    side,
                    u64::from(wave.value(row)),
                    u64::from(slice.value(row)),
                );
                let (own, number) = (span.side.as_str(), span.slice as u64);
                if says != (own, span.wave, number) {
                    return Err(self.damaged(format!(
                        "row {row} has side {}, wave {}, slice {}, but the file's metadata says {own}, wave {}, slice {number}",
                        says.0, says.1, says.2, span.wave
                    )));
                }
                // Input rows have the groups of their samples; output rows may have any.
                let (sample, group) = (RowId(samples.value(row)), groups.value(row));
                if span.side == Side::Input && sample.group() != group {
                    return Err(self.damaged(format!(
                        "row {row} is sample {sample} of group {}, but its `{GROUP_ID}` is {group}",
                        sample.group()
                    )));
                }
            }
        }
        Ok(())
    }

    /// A column of all rows.
    fn all_rows(&self, name: &str) -> Result<ArrayRef, TraceError> {
        let at = self.schema.index_of(name).map_err(|e| self.damaged(e))?;
        let arrays: Vec<&ArrayRef> = self.pieces.iter().map(|piece| piece.column(at)).collect();
        self.joined(at, &arrays)
    }

    fn joined(&self, at: usize, arrays: &[&ArrayRef]) -> Result<ArrayRef, TraceError> {
        match arrays {
            [] => Ok(arrow_array::new_empty_array(
                self.schema.field(at).data_type(),
            )),
            [one] => Ok((*one).clone()),
            many => {
                let many: Vec<&dyn Array> = many.iter().map(|array| array.as_ref()).collect();
                arrow_select::concat::concat(&many).map_err(|e| self.damaged(e))
            }
        }
    }

    /// The slices of one side; the parts of a slice are joined.
    fn slices(&self, manifest: &StageManifest, side: Side) -> Result<Vec<SliceTrace>, TraceError> {
        let keys: Vec<&KeyColumn> = manifest.keys.iter().filter(|k| k.side == side).collect();
        let schema = self.batch_schema(&keys)?;
        let mut spans: Vec<&SliceSpan> =
            manifest.slices.iter().filter(|s| s.side == side).collect();
        spans.sort_by_key(|span| (span.slice, span.first));
        spans
            .chunk_by(|a, b| a.slice == b.slice)
            .map(|parts| {
                let columns = [SAMPLE_ID, GROUP_ID]
                    .into_iter()
                    .chain(keys.iter().map(|key| key.column.as_str()))
                    .map(|column| self.column(column, parts))
                    .collect::<Result<Vec<ArrayRef>, _>>()?;
                let record = RecordBatch::try_new(schema.clone(), columns);
                let record = record.map_err(|e| self.damaged(e))?;
                let batch = Batch::from_record(record).map_err(|e| self.damaged(e))?;
                Ok(SliceTrace {
                    wave: parts[0].wave,
                    slice: parts[0].slice,
                    rows: parts[0].rows.clone(),
                    batch,
                })
            })
            .collect()
    }

    fn batch_schema(&self, keys: &[&KeyColumn]) -> Result<SchemaRef, TraceError> {
        let mut fields = vec![
            Field::new(SAMPLE_ID, DataType::UInt64, false),
            Field::new(GROUP_ID, DataType::UInt64, false),
        ];
        for key in keys {
            let stored = self.schema.field_with_name(&key.column);
            let stored = stored.map_err(|e| self.damaged(e))?;
            fields.push(Field::new(
                &key.key,
                stored.data_type().clone(),
                key.nullable,
            ));
        }
        Ok(Arc::new(Schema::new(fields)))
    }

    /// A column of the rows of a slice's parts, which [`FileRows::check_places`] has checked.
    fn column(&self, name: &str, parts: &[&SliceSpan]) -> Result<ArrayRef, TraceError> {
        let at = self.schema.index_of(name).map_err(|e| self.damaged(e))?;
        let mut arrays: Vec<ArrayRef> = Vec::new();
        for part in parts {
            let (mut first, mut len) = (part.first, part.len);
            for piece in &self.pieces {
                if first >= piece.num_rows() {
                    first -= piece.num_rows();
                    continue;
                }
                let here = len.min(piece.num_rows() - first);
                if here > 0 {
                    arrays.push(piece.column(at).slice(first, here));
                }
                (first, len) = (0, len - here);
            }
        }
        self.joined(at, &arrays.iter().collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::files::trace_dir::tests::{fields, format, header};
    use crate::files::trace_writer::{SliceAt, TraceWriter};

    /// A stage's file with two rows of input and two of output.
    fn written() -> (tempfile::TempDir, PathBuf) {
        let temp = tempfile::tempdir().expect("a folder");
        let writer = TraceWriter::create(temp.path(), &format()).expect("creates");
        let ids = [7, 9].map(|row| RowId::prompt(0, row).expect("in range"));
        let batch = Batch::with_rows(&ids);
        let mut stage = writer
            .stage(header(3), &fields(&batch), &fields(&batch))
            .expect("begins");
        for side in [Side::Input, Side::Output] {
            let at = SliceAt {
                side,
                wave: 0,
                slice: 0,
                rows: 0..2,
            };
            stage.write(at, &batch).expect("writes");
        }
        let file = stage.finish().expect("ends");
        let path = writer.layout().step(3).join(file.file);
        (temp, path)
    }

    /// The error after `column` is set to `array` in all rows and the metadata is left unchanged.
    fn with_column(path: &Path, column: &str, array: ArrayRef) -> String {
        let file = File::open(path).expect("opens");
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).expect("a file");
        let about = builder.metadata().file_metadata().key_value_metadata();
        let about = about.expect("some").clone();
        let record = builder.build().expect("a reader").next();
        let record = record.expect("rows").expect("decodes");
        let mut columns = record.columns().to_vec();
        let at = record.schema().index_of(column).expect("there");
        let mut fields: Vec<Field> = record
            .schema()
            .fields()
            .iter()
            .map(|field| field.as_ref().clone())
            .collect();
        fields[at] = Field::new(column, array.data_type().clone(), true);
        columns[at] = array;
        let schema = Arc::new(Schema::new(fields));
        let record = RecordBatch::try_new(schema.clone(), columns).expect("a record");
        let file = File::create(path).expect("creates");
        let mut writer =
            parquet::arrow::ArrowWriter::try_new(file, schema, None).expect("a writer");
        for entry in about.into_iter().filter(|entry| entry.key == MANIFEST_KEY) {
            writer.append_key_value_metadata(entry);
        }
        writer.write(&record).expect("writes");
        writer.close().expect("ends");
        let error = read_stage(path).expect_err("changed");
        assert_eq!(error.code(), "T003");
        let message = error.to_string();
        let reason = message.split_once("` is damaged: ").expect("damaged").1;
        reason.to_owned()
    }

    #[test]
    fn columns_that_disagree_with_the_metadata_are_reported() {
        let check = |column: &str, array: ArrayRef, expected: &str| {
            let (_temp, path) = written();
            assert_eq!(with_column(&path, column, array), expected);
        };
        let sides = |sides: [Option<&str>; 4]| -> ArrayRef {
            Arc::new(arrow_array::StringArray::from(sides.to_vec()))
        };
        let (input, output) = (Some("input"), Some("output"));
        check(
            "side",
            sides([input, Some("parameter"), output, output]),
            "row 1 has side `parameter` instead of `input` or `output`",
        );
        check(
            "side",
            sides([input, input, None, output]),
            "row 2 has side `null` instead of `input` or `output`",
        );
        check(
            "side",
            sides([input, input, input, output]),
            "row 2 has side input, wave 0, slice 0, but the file's metadata says output, wave 0, slice 0",
        );
        let numbers = |numbers: [u32; 4]| -> ArrayRef {
            Arc::new(arrow_array::UInt32Array::from(numbers.to_vec()))
        };
        check("side", numbers([0; 4]), "column `side` has type UInt32");
        check(
            "slice",
            numbers([0, 0, 0, 1]),
            "row 3 has side output, wave 0, slice 1, but the file's metadata says output, wave 0, slice 0",
        );
        let id = RowId::prompt(0, 7).expect("in range");
        let ids: ArrayRef = Arc::new(arrow_array::UInt64Array::from(vec![id.group(); 4]));
        let reason = {
            let (_temp, path) = written();
            with_column(&path, GROUP_ID, ids)
        };
        assert!(
            reason.starts_with("row 1 is sample 0.9#0 of group"),
            "{reason}"
        );
    }

    #[test]
    fn rows_without_a_slice_are_reported() {
        let (_temp, path) = written();
        let read = read_stage(&path).expect("reads");
        let check = |change: fn(&mut Vec<SliceSpan>), expected: &str| {
            let mut manifest = read.manifest.clone();
            change(&mut manifest.slices);
            let file = File::open(&path).expect("opens");
            let builder = ParquetRecordBatchReaderBuilder::try_new(file).expect("a file");
            let rows = FileRows {
                path: path.clone(),
                schema: builder.schema().clone(),
                pieces: builder
                    .build()
                    .expect("a reader")
                    .collect::<Result<_, _>>()
                    .expect("decodes"),
            };
            let error = rows.check_places(&manifest).expect_err("changed");
            assert!(error.to_string().contains(expected), "{error}");
        };
        check(
            |slices| slices.truncate(1),
            "it contains 4 rows, but its slices have 2",
        );
        check(
            |slices| slices[1].first = 1,
            "slice 0 of the output begins at row 1, but the previous slice ends at row 2",
        );
    }

    #[test]
    fn an_unsupported_codec_is_not_reported_as_damage() {
        let (_temp, path) = written();
        let mut bytes = fs::read(&path).expect("reads");
        // In the footer a column's path is followed by its codec: field 4, a 32-bit number. Snappy becomes Zstandard.
        for name in ["side", "wave", "slice", SAMPLE_ID, GROUP_ID] {
            let snappy = [name.as_bytes(), &[0x15, 0x02]].concat();
            let places: Vec<usize> = (0..bytes.len() - snappy.len())
                .filter(|at| bytes[*at..].starts_with(&snappy))
                .collect();
            assert_eq!(places.len(), 1, "{name}");
            bytes[places[0] + snappy.len() - 1] = 0x0C;
        }
        fs::write(&path, bytes).expect("writes");
        let error = read_stage(&path).expect_err("another codec");
        assert_eq!(error.code(), "T002");
        let message = error.to_string();
        assert!(
            message.contains("is compressed with ZSTD") && message.contains("Snappy, LZ4 or Gzip"),
            "{message}"
        );
        assert!(!message.contains("damaged"), "{message}");
    }
}
