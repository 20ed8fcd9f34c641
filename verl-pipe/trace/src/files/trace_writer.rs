//! Writes a trace: documents and stage files, each under a temporary name and then renamed.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use arrow_array::{ArrayRef, RecordBatch, StringArray, UInt32Array, new_null_array};
use arrow_schema::{Field, Schema};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use verl_rules::format::Side;
use verl_run::atomic_file::AtomicFile;
use verl_run::space::Room;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, GROUP_ID, SAMPLE_ID};

use crate::files::atomic::{make_dir, write_json};
use crate::files::columns::STEP_COLUMNS;
use crate::files::documents::{
    KeyColumn, Layout, MANIFEST_KEY, SliceSpan, StageFile, StageManifest, StepManifest,
    TraceFormat, stage_file,
};
use crate::files::error::TraceError;
use crate::files::row_groups::RowGroups;

/// Values that the encoder takes at once; its default of 1,024 is less than a response has tokens.
const WRITE_VALUES: usize = 8192;

/// Writes the `trace` folder of a run.
#[derive(Debug, Clone)]
pub struct TraceWriter {
    layout: Layout,
    threads: usize,
    /// Disk space, if part of it is reserved.
    room: Option<Room>,
}

impl TraceWriter {
    /// Creates `trace` in the run folder, with `format.json`.
    ///
    /// # Errors
    /// An I/O error.
    pub fn create(run_dir: &Path, format: &TraceFormat) -> Result<TraceWriter, TraceError> {
        let layout = Layout::of_run(run_dir);
        make_dir(&layout.dir)?;
        write_json(&layout.format(), format)?;
        Ok(TraceWriter {
            layout,
            threads: thread::available_parallelism().map_or(1, usize::from),
            room: None,
        })
    }

    /// Writes only while there is room beyond the reserved space.
    pub(crate) fn with_room(self, room: Room) -> TraceWriter {
        TraceWriter {
            room: Some(room),
            ..self
        }
    }

    pub(crate) fn room(&self) -> Option<&Room> {
        self.room.as_ref()
    }

    /// Checks that there is room for `size` bytes of rows.
    pub(crate) fn take_room(&self, size: u64) -> Result<(), TraceError> {
        let taken = self
            .room
            .as_ref()
            .map_or(Ok(()), |room| room.ensure_free_beside_lines(size));
        taken.map_err(|e| TraceError::file("write", &self.layout.dir, e))
    }

    /// Encodes the columns of a large step with `threads` threads; the default is one per core. The number does not
    /// change a byte of the files.
    pub fn with_threads(self, threads: usize) -> TraceWriter {
        TraceWriter { threads, ..self }
    }

    /// Paths of the trace.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Begins the file of a stage. `header` has step, stage and other metadata; its keys and slices are filled in here.
    /// `inputs` and `outputs` are the fields of the two sides' batches; identity columns among them are skipped.
    ///
    /// # Errors
    /// An I/O error.
    pub fn stage(
        &self,
        header: StageManifest,
        inputs: &[Field],
        outputs: &[Field],
    ) -> Result<StageWriter, TraceError> {
        let dir = self.layout.step(header.step);
        make_dir(&dir)?;
        StageWriter::create(&dir, header, inputs, outputs, self.threads)
    }

    /// Completes a step. Its stage files must be finished: a reader takes the step as complete once `step.json` is
    /// there.
    ///
    /// # Errors
    /// An I/O error.
    pub fn end_step(&self, manifest: &StepManifest) -> Result<(), TraceError> {
        make_dir(&self.layout.step(manifest.step))?;
        write_json(&self.layout.manifest(manifest.step), manifest)
    }
}

/// The slice of a stage that rows belong to.
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

/// Writes one stage's file of one step, in row groups of bounded size. Dropping it before [`StageWriter::finish`]
/// removes the file.
pub struct StageWriter {
    groups: RowGroups,
    partial: AtomicFile,
    schema: Arc<Schema>,
    /// Each span in `slices` starts where the span before it ends, and the last ends at `rows`. So every row belongs to
    /// exactly one span, and a reader detects lost or repeated rows.
    manifest: StageManifest,
    /// Rows added so far.
    rows: usize,
}

impl StageWriter {
    fn create(
        dir: &Path,
        mut header: StageManifest,
        inputs: &[Field],
        outputs: &[Field],
        threads: usize,
    ) -> Result<StageWriter, TraceError> {
        let (schema, keys) = columns(inputs, outputs);
        header.keys = keys;
        header.slices = Vec::new();
        let (partial, file) = AtomicFile::create(dir.join(stage_file(&header.stage)))?;
        let groups = RowGroups::new(file, schema.clone(), properties(), threads)
            .map_err(|e| TraceError::file("write", partial.path(), e))?;
        Ok(StageWriter {
            groups,
            partial,
            schema,
            manifest: header,
            rows: 0,
        })
    }

    /// Adds the rows of a slice. A slice may come in several parts; they are read as one batch, in the order of the
    /// calls. Keys that the batch lacks are null.
    ///
    /// # Errors
    /// An I/O error; a column of another type than declared.
    pub fn write(&mut self, at: SliceAt, batch: &Batch) -> Result<(), TraceError> {
        let record = self.record(&at, batch)?;
        let added = self.groups.add(&record);
        added.map_err(|e| self.write_error(e))?;
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

    /// Closes the row group, so that no rows wait in memory.
    ///
    /// # Errors
    /// An I/O error.
    pub fn flush(&mut self) -> Result<(), TraceError> {
        let flushed = self.groups.flush();
        flushed.map_err(|e| self.write_error(e))
    }

    /// Bytes on disk.
    pub fn bytes_written(&self) -> u64 {
        self.groups.bytes_written() as u64
    }

    /// The final path of the file.
    pub fn path(&self) -> &Path {
        self.partial.path()
    }

    /// Adds a note to the manifest.
    pub fn note(&mut self, note: String) {
        self.manifest.notes.push(note);
    }

    /// Completes the file and renames it to its final name.
    ///
    /// # Errors
    /// An I/O error; the file is removed then.
    pub fn finish(self) -> Result<StageFile, TraceError> {
        let StageWriter {
            groups,
            partial,
            manifest,
            rows,
            ..
        } = self;
        let path = partial.path().to_owned();
        let text =
            serde_json::to_string(&manifest).map_err(|e| TraceError::file("write", &path, e))?;
        let size = groups
            .close(KeyValue::new(MANIFEST_KEY.to_owned(), text))
            .map_err(|e| TraceError::file("write", &path, e))?;
        partial.replace()?;
        Ok(StageFile {
            stage: manifest.stage,
            file: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            rows,
            bytes: size as u64,
        })
    }

    fn write_error(&self, error: ParquetError) -> TraceError {
        TraceError::file("write", self.path(), error)
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
                        "column `{}` of stage `{}` has type {}, but {} was declared",
                        field.name(),
                        self.manifest.stage,
                        array.data_type(),
                        field.data_type()
                    );
                    return Err(TraceError::file("write", self.path(), reason));
                }
            });
        }
        RecordBatch::try_new(self.schema.clone(), columns)
            .map_err(|e| TraceError::file("write", self.path(), e))
    }
}

/// The file's columns, and the column of each key.
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
    // Every Parquet reader supports Snappy, and it costs little. Dictionaries cost time and do not help with log-probs.
    WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_dictionary_enabled(false)
        .set_column_dictionary_enabled(ColumnPath::from("side"), true)
        .set_write_batch_size(WRITE_VALUES)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_column_statistics_enabled(ColumnPath::from(SAMPLE_ID), EnabledStatistics::Chunk)
        .set_created_by(concat!("verl-pipe ", env!("CARGO_PKG_VERSION")).to_owned())
        .build()
}
