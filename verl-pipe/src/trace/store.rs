//! [`TraceDir`]: reads what a run traced. It never writes, and reads the folder of a run that is still going on.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::batch::{Batch, GROUP_ID, SAMPLE_ID};
use crate::trace::error::TraceError;
use crate::trace::format::{
    KeyColumn, Layout, MANIFEST_KEY, Side, SliceSpan, StageManifest, StepManifest, TraceFormat,
    parse,
};

/// Rows that are decoded at once.
const READ_ROWS: usize = 4096;

/// The trace of a run.
///
/// ```no_run
/// use verl_pipe::trace::store::TraceDir;
///
/// let trace = TraceDir::open("runs/run".as_ref())?;
/// for step in trace.steps() {
///     let reward = trace.stage(step, "reward")?;
///     println!("step {step}: {} slices", reward.outputs.len());
/// }
/// # Ok::<(), verl_pipe::trace::error::TraceError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TraceDir {
    layout: Layout,
    format: TraceFormat,
    steps: BTreeMap<u64, StepManifest>,
    notes: Vec<String>,
}

/// A recorded step.
#[derive(Debug, Clone)]
pub struct StepTrace {
    /// What `step.json` says.
    pub manifest: StepManifest,
    /// Stages in the order of execution.
    pub stages: Vec<StageTrace>,
}

/// A recorded stage of a step.
#[derive(Debug, Clone)]
pub struct StageTrace {
    /// What the file says about itself.
    pub manifest: StageManifest,
    /// What entered, by slice.
    pub inputs: Vec<SliceTrace>,
    /// What left, by slice, rows in declared order.
    pub outputs: Vec<SliceTrace>,
}

/// Rows of one slice.
#[derive(Debug, Clone, PartialEq)]
pub struct SliceTrace {
    /// Wave that a source's call drew; 0 for any other stage.
    pub wave: u64,
    /// Number of the slice.
    pub slice: usize,
    /// Its rows among the stage's input rows of the step.
    pub rows: std::ops::Range<usize>,
    /// The rows, in the stage's own names.
    pub batch: Batch,
}

impl TraceDir {
    /// Opens the trace in a run's folder. Steps that are not whole are left out; [`TraceDir::notes`] tells which.
    ///
    /// # Errors
    /// No trace there; a format that is not known.
    pub fn open(run_dir: &Path) -> Result<TraceDir, TraceError> {
        let layout = Layout::of_run(run_dir);
        let path = layout.format();
        let text = fs::read_to_string(&path).map_err(|e| TraceError::NoTrace {
            dir: run_dir.to_owned(),
            reason: format!("`trace/format.json` cannot be read ({e})"),
        })?;
        let format = parse(&path, &text)?;
        let mut trace = TraceDir {
            layout,
            format,
            steps: BTreeMap::new(),
            notes: Vec::new(),
        };
        trace.find_steps()?;
        Ok(trace)
    }

    fn find_steps(&mut self) -> Result<(), TraceError> {
        let Ok(entries) = fs::read_dir(self.layout.steps()) else {
            return Ok(());
        };
        let names = entries
            .flatten()
            .filter_map(|e| e.file_name().into_string().ok());
        let mut found: Vec<u64> = names.filter_map(|name| name.parse().ok()).collect();
        found.sort_unstable();
        for step in found {
            let path = self.layout.manifest(step);
            match fs::read_to_string(&path) {
                Ok(text) => drop(self.steps.insert(step, parse(&path, &text)?)),
                Err(_) => self.notes.push(format!(
                    "step {step} is not whole and is left out: the run ended, or is still, in the middle of it"
                )),
            }
        }
        Ok(())
    }

    /// What `format.json` says: pipeline, seed, stages in order.
    pub fn format(&self) -> &TraceFormat {
        &self.format
    }

    /// Where things lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What a reader should be told, such as steps that are not whole.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Steps that were recorded in full, rising.
    pub fn steps(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }

    /// What `step.json` of a recorded step says.
    ///
    /// # Errors
    /// [`TraceError::NoStep`].
    pub fn manifest(&self, step: u64) -> Result<&StepManifest, TraceError> {
        self.steps.get(&step).ok_or_else(|| TraceError::NoStep {
            dir: self.layout.dir.clone(),
            step,
            known: match self.steps.len() {
                0 => "no whole step".to_owned(),
                _ => format!("steps {}", ranges(self.steps.keys().copied())),
            },
        })
    }

    /// A recorded step, all stages of it.
    ///
    /// # Errors
    /// [`TraceError::NoStep`]; a file that is damaged.
    pub fn step(&self, step: u64) -> Result<StepTrace, TraceError> {
        let manifest = self.manifest(step)?.clone();
        let dir = self.layout.step(step);
        let files = manifest.stages.iter();
        let stages = files
            .map(|file| read_stage(&dir.join(&file.file)))
            .collect::<Result<_, _>>()?;
        Ok(StepTrace { manifest, stages })
    }

    /// One stage of a recorded step.
    ///
    /// # Errors
    /// A step or stage that was not recorded; a file that is damaged.
    pub fn stage(&self, step: u64, stage: &str) -> Result<StageTrace, TraceError> {
        let manifest = self.manifest(step)?;
        let file = manifest.stages.iter().find(|file| file.stage == stage);
        let file = file.ok_or_else(|| TraceError::NoStage {
            step,
            stage: stage.to_owned(),
            known: match manifest.stages.as_slice() {
                [] => "none".to_owned(),
                files => crate::diagnostic::quoted(files.iter().map(|f| f.stage.as_str())),
            },
        })?;
        read_stage(&self.layout.step(step).join(&file.file))
    }
}

impl StepTrace {
    /// The stage `name`, where it was recorded.
    pub fn stage(&self, name: &str) -> Option<&StageTrace> {
        self.stages
            .iter()
            .find(|stage| stage.manifest.stage == name)
    }
}

impl StageTrace {
    /// Slices of one side.
    pub fn side(&self, side: Side) -> &[SliceTrace] {
        match side {
            Side::Input => &self.inputs,
            Side::Output => &self.outputs,
        }
    }

    /// All rows of one side as one batch, in declared order; `None` where there is no slice.
    pub fn whole(&self, side: Side) -> Option<Batch> {
        let parts: Vec<Batch> = self.side(side).iter().map(|s| s.batch.clone()).collect();
        Batch::concat(&parts).ok()
    }
}

/// `1–3, 7`.
pub(crate) fn ranges(numbers: impl Iterator<Item = u64>) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == number => run.1 = number,
            _ => runs.push((number, number)),
        }
    }
    let told = runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}–{last}"),
    });
    told.collect::<Vec<_>>().join(", ")
}

/// Reads a stage's file.
///
/// # Errors
/// A file that is missing or damaged, or in another format.
pub fn read_stage(path: &Path) -> Result<StageTrace, TraceError> {
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
    let inputs = rows.slices(&manifest, Side::Input)?;
    let outputs = rows.slices(&manifest, Side::Output)?;
    Ok(StageTrace {
        manifest,
        inputs,
        outputs,
    })
}

/// The decoded rows of a file.
struct FileRows {
    path: PathBuf,
    schema: SchemaRef,
    pieces: Vec<RecordBatch>,
}

impl FileRows {
    /// The slices of one side; parts of a slice are put together.
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
                let record = RecordBatch::try_new(schema.clone(), columns)
                    .map_err(|e| TraceError::damaged(&self.path, e))?;
                let batch =
                    Batch::from_record(record).map_err(|e| TraceError::damaged(&self.path, e))?;
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
            let stored = self
                .schema
                .field_with_name(&key.column)
                .map_err(|e| TraceError::damaged(&self.path, e))?;
            fields.push(Field::new(
                &key.key,
                stored.data_type().clone(),
                key.nullable,
            ));
        }
        Ok(Arc::new(Schema::new(fields)))
    }

    fn column(&self, name: &str, parts: &[&SliceSpan]) -> Result<ArrayRef, TraceError> {
        let at = self
            .schema
            .index_of(name)
            .map_err(|e| TraceError::damaged(&self.path, e))?;
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
            if len > 0 {
                let reason = format!("slice {} needs {len} rows more than it has", part.slice);
                return Err(TraceError::damaged(&self.path, reason));
            }
        }
        match arrays.as_slice() {
            [] => Ok(arrow_array::new_empty_array(
                self.schema.field(at).data_type(),
            )),
            [one] => Ok(one.clone()),
            many => {
                let many: Vec<_> = many.iter().map(AsRef::as_ref).collect();
                arrow_select::concat::concat(&many).map_err(|e| TraceError::damaged(&self.path, e))
            }
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
