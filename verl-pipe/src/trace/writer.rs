//! Writes a trace: documents and stage files, each aside and then renamed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray, UInt32Array, new_null_array};
use arrow_schema::{Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use serde::Serialize;

use crate::batch::{Batch, GROUP_ID, SAMPLE_ID};
use crate::trace::columns::STEP_COLUMNS;
use crate::trace::error::TraceError;
use crate::trace::format::{
    KeyColumn, Layout, MANIFEST_KEY, Side, SliceSpan, StageFile, StageManifest, StepManifest,
    TraceFormat, stage_file,
};

/// Rows handed to the encoder at once.
const CHUNK_ROWS: usize = 512;

/// Encoded bytes that may wait in memory before a row group is closed.
pub const ROW_GROUP_BYTES: usize = 32 << 20;

/// Where a partly written file lies until it is whole.
pub(crate) fn aside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.partial"))
}

/// Has `write` fill a file aside, then gives it its name. What is left of a failure is removed.
pub(crate) fn write_aside<T>(
    path: &Path,
    write: impl FnOnce(File) -> Result<T, TraceError>,
) -> Result<T, TraceError> {
    let partial = aside(path);
    let made = File::create(&partial)
        .map_err(|e| TraceError::file("create", &partial, e))
        .and_then(write)
        .and_then(|value| {
            fs::rename(&partial, path).map_err(|e| TraceError::file("rename", &partial, e))?;
            Ok(value)
        });
    if made.is_err() {
        // It may be what fills the disk; the first error is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    made
}

/// Writes a JSON document.
pub(crate) fn write_json<T: Serialize>(path: &Path, document: &T) -> Result<(), TraceError> {
    write_aside(path, |file| {
        serde_json::to_writer_pretty(&file, document)
            .map_err(|e| TraceError::file("write", path, e))
    })
}

/// Makes a folder and those above it.
pub(crate) fn make_dir(dir: &Path) -> Result<(), TraceError> {
    fs::create_dir_all(dir).map_err(|e| TraceError::file("create", dir, e))
}

/// Writes the `trace` folder of a run.
#[derive(Debug, Clone)]
pub struct TraceWriter {
    layout: Layout,
}

impl TraceWriter {
    /// Makes `trace` in the run's folder, with `format.json`.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn create(run_dir: &Path, format: &TraceFormat) -> Result<TraceWriter, TraceError> {
        let layout = Layout::of_run(run_dir);
        make_dir(&layout.dir)?;
        write_json(&layout.format(), format)?;
        Ok(TraceWriter { layout })
    }

    /// Where things lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Begins the file of a stage. `header` tells step, stage and the like; its keys and slices are filled in here.
    /// `inputs` and `outputs` are the fields of the two sides' batches; identity columns among them are passed over.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn stage(
        &self,
        header: StageManifest,
        inputs: &[Field],
        outputs: &[Field],
    ) -> Result<StageWriter, TraceError> {
        let dir = self.layout.step(header.step);
        make_dir(&dir)?;
        StageWriter::create(&dir, header, inputs, outputs)
    }

    /// Ends a step: from here on it is whole.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn end_step(&self, manifest: &StepManifest) -> Result<(), TraceError> {
        make_dir(&self.layout.step(manifest.step))?;
        write_json(&self.layout.manifest(manifest.step), manifest)
    }
}

/// Which slice of a stage rows belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceAt {
    /// Input or output.
    pub side: Side,
    /// Wave of a source's call, else 0.
    pub wave: u64,
    /// Number of the slice.
    pub slice: usize,
    /// Its rows among the stage's input rows.
    pub rows: Range<usize>,
}

/// Writes one stage's file of one step, in row groups of bounded size.
pub struct StageWriter {
    path: PathBuf,
    writer: ArrowWriter<File>,
    schema: Arc<Schema>,
    manifest: StageManifest,
    rows: usize,
}

impl StageWriter {
    fn create(
        dir: &Path,
        mut header: StageManifest,
        inputs: &[Field],
        outputs: &[Field],
    ) -> Result<StageWriter, TraceError> {
        let (schema, keys) = columns(inputs, outputs);
        header.keys = keys;
        header.slices = Vec::new();
        let path = dir.join(stage_file(&header.stage));
        let partial = aside(&path);
        let file = File::create(&partial).map_err(|e| TraceError::file("create", &partial, e))?;
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties()))
            .map_err(|e| TraceError::file("write", &partial, e))?;
        Ok(StageWriter {
            path,
            writer,
            schema,
            manifest: header,
            rows: 0,
        })
    }

    /// Adds the rows of a slice; a slice may come in several parts, and its parts are read as one batch in the order
    /// in which they came. Keys that the batch lacks are null.
    ///
    /// # Errors
    /// A disk that refuses; a column of another type than was announced.
    pub fn write(&mut self, at: SliceAt, batch: &Batch) -> Result<(), TraceError> {
        let record = self.record(&at, batch)?;
        for start in (0..record.num_rows()).step_by(CHUNK_ROWS) {
            let len = CHUNK_ROWS.min(record.num_rows() - start);
            let wrote = self.writer.write(&record.slice(start, len));
            wrote.map_err(|e| TraceError::file("write", &self.path, e))?;
            if self.writer.in_progress_size() > ROW_GROUP_BYTES {
                let wrote = self.writer.flush();
                wrote.map_err(|e| TraceError::file("write", &self.path, e))?;
            }
        }
        self.manifest.slices.push(SliceSpan {
            side: at.side,
            wave: at.wave,
            slice: at.slice,
            rows: at.rows,
            first: self.rows,
            len: batch.num_rows(),
        });
        self.rows += batch.num_rows();
        Ok(())
    }

    /// Closes the row group, so that nothing waits in memory.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn flush(&mut self) -> Result<(), TraceError> {
        let flushed = self.writer.flush();
        flushed.map_err(|e| TraceError::file("write", &self.path, e))
    }

    /// Bytes that wait in memory.
    pub fn memory_size(&self) -> usize {
        self.writer.memory_size()
    }

    /// Adds a note for readers.
    pub fn note(&mut self, note: String) {
        self.manifest.notes.push(note);
    }

    /// Ends the file and gives it its name.
    ///
    /// # Errors
    /// A disk that refuses; nothing is left then.
    pub fn finish(self) -> Result<StageFile, TraceError> {
        let StageWriter {
            path,
            mut writer,
            manifest,
            rows,
            ..
        } = self;
        let partial = aside(&path);
        let ended = serde_json::to_string(&manifest)
            .map_err(|e| TraceError::file("write", &path, e))
            .and_then(|text| {
                writer.append_key_value_metadata(KeyValue::new(MANIFEST_KEY.to_owned(), text));
                writer
                    .close()
                    .map_err(|e| TraceError::file("write", &path, e))
            })
            .and_then(|_| {
                fs::rename(&partial, &path).map_err(|e| TraceError::file("rename", &partial, e))?;
                fs::metadata(&path).map_err(|e| TraceError::file("read", &path, e))
            });
        if ended.is_err() {
            let _ = fs::remove_file(&partial);
        }
        ended.map(|about| StageFile {
            stage: manifest.stage,
            file: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            rows,
            bytes: about.len(),
        })
    }

    /// Gives up the file; nothing is left of it.
    pub fn discard(self) {
        drop(self.writer);
        let _ = fs::remove_file(aside(&self.path));
    }

    fn record(&self, at: &SliceAt, batch: &Batch) -> Result<RecordBatch, TraceError> {
        let n = batch.num_rows();
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from_iter_values(std::iter::repeat_n(
                at.side.as_str(),
                n,
            ))),
            Arc::new(UInt32Array::from_value(at.wave as u32, n)),
            Arc::new(UInt32Array::from_value(at.slice as u32, n)),
            batch.record().column(0).clone(),
            batch.record().column(1).clone(),
        ];
        for field in self.schema.fields().iter().skip(STEP_COLUMNS.len()) {
            let mut keys = self.manifest.keys.iter();
            let key = keys.find(|key| key.side == at.side && &key.column == field.name());
            let array = key.and_then(|key| batch.column(&key.key));
            columns.push(match array {
                Some(array) if array.data_type() == field.data_type() => array.clone(),
                None => new_null_array(field.data_type(), n),
                Some(array) => {
                    let reason = format!(
                        "`{}` of stage `{}` holds {}, announced was {}",
                        field.name(),
                        self.manifest.stage,
                        array.data_type(),
                        field.data_type()
                    );
                    return Err(TraceError::file("write", &self.path, reason));
                }
            });
        }
        RecordBatch::try_new(self.schema.clone(), columns)
            .map_err(|e| TraceError::file("write", &self.path, e))
    }
}

/// The file's columns, and which key of which side each holds.
fn columns(inputs: &[Field], outputs: &[Field]) -> (Arc<Schema>, Vec<KeyColumn>) {
    let own = STEP_COLUMNS.map(|own| Field::new(own.name, own.holds.arrow(), own.nullable));
    let mut fields = Vec::from(own);
    let mut taken: BTreeSet<String> = STEP_COLUMNS.map(|own| own.name.to_owned()).into();
    let mut keys: Vec<KeyColumn> = Vec::new();
    let sides = [(Side::Input, inputs), (Side::Output, outputs)];
    for (side, field) in sides.into_iter().flat_map(|(side, own)| {
        let keys = own
            .iter()
            .filter(|field| ![SAMPLE_ID, GROUP_ID].contains(&field.name().as_str()));
        keys.map(move |field| (side, field))
    }) {
        let same = |other: &&Field| {
            other.name() == field.name()
                && other.data_type() == field.data_type()
                && STEP_COLUMNS.iter().all(|own| own.name != field.name())
        };
        let column = match fields.iter().find(same) {
            Some(shared) => shared.name().clone(),
            None => {
                let mut name = field.name().clone();
                while !taken.insert(name.clone()) {
                    name = format!("{name}@{}", side.as_str());
                }
                fields.push(Field::new(&name, field.data_type().clone(), true));
                name
            }
        };
        keys.push(KeyColumn {
            side,
            key: field.name().clone(),
            column,
            data_type: field.data_type().to_string(),
            nullable: field.is_nullable(),
        });
    }
    (Arc::new(Schema::new(fields)), keys)
}

fn properties() -> WriterProperties {
    // Snappy is read by every reader of Parquet and costs little. Dictionaries cost time and find nothing in log-probs.
    WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_dictionary_enabled(false)
        .set_column_dictionary_enabled(ColumnPath::from("side"), true)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_column_statistics_enabled(ColumnPath::from(SAMPLE_ID), EnabledStatistics::Chunk)
        .set_created_by(concat!("verl-pipe ", env!("CARGO_PKG_VERSION")).to_owned())
        .build()
}
