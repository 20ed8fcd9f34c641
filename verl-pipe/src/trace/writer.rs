//! Writes a trace: documents and stage files, each aside and then renamed.

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

use crate::batch::{Batch, GROUP_ID, SAMPLE_ID};
use crate::run::space::Room;
use crate::trace::columns::STEP_COLUMNS;
use crate::trace::error::TraceError;
use crate::trace::format::{
    KeyColumn, Layout, MANIFEST_KEY, Side, SliceSpan, StageFile, StageManifest, StepManifest,
    TraceFormat, stage_file,
};
use crate::trace::partial::{Partial, make_dir, write_json};
use crate::trace::row_groups::RowGroups;

pub use crate::trace::row_groups::ROW_GROUP_BYTES;

/// Values that the encoder takes at once; its own 1,024 are fewer than a response has tokens.
const WRITE_VALUES: usize = 8192;

/// Writes the `trace` folder of a run.
#[derive(Debug, Clone)]
pub struct TraceWriter {
    layout: Layout,
    threads: usize,
    /// Room on the disk, where something is kept of it.
    room: Option<Room>,
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
        Ok(TraceWriter {
            layout,
            threads: thread::available_parallelism().map_or(1, usize::from),
            room: None,
        })
    }

    /// Has it write as long as there is room beside what is kept.
    pub(crate) fn in_room(self, room: Room) -> TraceWriter {
        TraceWriter {
            room: Some(room),
            ..self
        }
    }

    pub(crate) fn room(&self) -> Option<&Room> {
        self.room.as_ref()
    }

    /// Whether so many bytes of rows may be written.
    pub(crate) fn take_room(&self, size: u64) -> Result<(), TraceError> {
        let taken = self
            .room
            .as_ref()
            .map_or(Ok(()), |room| room.take_beside_lines(size));
        taken.map_err(|e| TraceError::file("write", &self.layout.dir, e))
    }

    /// Has `threads` threads encode the columns of a large step, as many as there are cores otherwise. Its files are the
    /// same, byte by byte.
    pub fn with_threads(self, threads: usize) -> TraceWriter {
        TraceWriter { threads, ..self }
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
        StageWriter::create(&dir, header, inputs, outputs, self.threads)
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

/// Writes one stage's file of one step, in row groups of bounded size. Nothing is left of one that is not ended.
pub struct StageWriter {
    groups: RowGroups,
    partial: Partial,
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
        threads: usize,
    ) -> Result<StageWriter, TraceError> {
        let (schema, keys) = columns(inputs, outputs);
        header.keys = keys;
        header.slices = Vec::new();
        let (partial, file) = Partial::create(dir.join(stage_file(&header.stage)))?;
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

    /// Adds the rows of a slice; a slice may come in several parts, and its parts are read as one batch in the order
    /// in which they came. Keys that the batch lacks are null.
    ///
    /// # Errors
    /// A disk that refuses; a column of another type than was announced.
    pub fn write(&mut self, at: SliceAt, batch: &Batch) -> Result<(), TraceError> {
        let record = self.record(&at, batch)?;
        let added = self.groups.add(&record);
        added.map_err(|e| self.refused(e))?;
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
        let flushed = self.groups.flush();
        flushed.map_err(|e| self.refused(e))
    }

    /// Bytes that are on disk.
    pub fn bytes_written(&self) -> u64 {
        self.groups.bytes_written() as u64
    }

    /// The name that the file is to have.
    pub fn path(&self) -> &Path {
        self.partial.path()
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
        partial.name()?;
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

    fn refused(&self, error: ParquetError) -> TraceError {
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
                        "`{}` of stage `{}` holds {}, announced was {}",
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
        .set_write_batch_size(WRITE_VALUES)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_column_statistics_enabled(ColumnPath::from(SAMPLE_ID), EnabledStatistics::Chunk)
        .set_created_by(concat!("verl-pipe ", env!("CARGO_PKG_VERSION")).to_owned())
        .build()
}
