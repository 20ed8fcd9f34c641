//! The batches of one step in order of arrival, and how they are written to files: slices in order, rows in declared
//! order.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fs;
use std::ops::Range;

use arrow_array::{Array, ArrayRef};
use arrow_schema::Field;
use serde_json::Value;
use verl_plan::Plan;
use verl_plan::schedule::placement::Schedule;
use verl_rules::format::{FORMAT, Side};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, BatchError, RowId};
use verl_words::keys::RESPONSES;
use verl_words::stage::{Cadence, LengthLimit, RowRule, StageSpec};

use crate::files::{SliceAt, StageFile, StageManifest, StageWriter, TraceError, TraceWriter};

/// What the recorder knows about a stage.
#[derive(Debug, Clone)]
pub(crate) struct StageAbout {
    pub name: String,
    pub kind: String,
    pub parameters: Value,
    pub rename: BTreeMap<String, String>,
    pub rule: RowRule,
    /// Whether it is recorded in full in every step.
    pub debug: bool,
    /// Whether it runs within a step; stages between steps receive no rows.
    pub in_step: bool,
    pub inputs: Vec<Field>,
    pub outputs: Vec<Field>,
    /// Metrics that it declares, by name.
    pub metrics: Vec<&'static str>,
    /// The setting that limits its responses, and its value (tokens).
    pub longest: Option<(&'static str, usize)>,
}

impl StageAbout {
    /// The stages of a schedule, in the order of execution.
    pub(crate) fn all(schedule: &Schedule) -> Vec<StageAbout> {
        let plan: &Plan = schedule.plan();
        let stages = plan.stages().iter().zip(&schedule.wiring().stages);
        stages
            .map(|(stage, wires)| {
                let decl = plan.pipe().stages.iter().find(|d| d.name == stage.name());
                let inputs = wires.schema.fields().iter();
                let outputs = wires.outputs.iter();
                StageAbout {
                    name: stage.name().to_owned(),
                    kind: stage.kind().to_owned(),
                    parameters: decl.map_or(Value::Null, |decl| decl.config.clone()),
                    rename: stage.rename().clone(),
                    rule: stage.spec().rows,
                    debug: decl.is_some_and(|decl| decl.debug),
                    in_step: stage.spec().cadence == Cadence::Step,
                    inputs: inputs.map(|field| field.as_ref().clone()).collect(),
                    outputs: outputs
                        .map(|out| Field::new(&out.local, out.data_type.clone(), true))
                        .collect(),
                    metrics: stage.spec().metrics.iter().map(|m| m.name).collect(),
                    longest: longest_response(stage.spec()),
                }
            })
            .collect()
    }

    /// The pipeline's name of the stage's own key `local`.
    pub(crate) fn key<'a>(&'a self, local: &'a str) -> &'a str {
        self.rename.get(local).map_or(local, String::as_str)
    }

    /// The keys of `batch` that the stage writes, without those that it only passes on.
    pub(crate) fn written(&self, batch: &Batch) -> Batch {
        let own: Vec<&str> = self
            .outputs
            .iter()
            .map(|field| field.name().as_str())
            .filter(|name| batch.has(name))
            .collect();
        batch.select(&own).unwrap_or_else(|_| batch.rows_only())
    }
}

/// The setting that limits the responses of a stage, and its value (tokens).
fn longest_response(spec: &StageSpec) -> Option<(&'static str, usize)> {
    let bound = spec
        .lengths
        .iter()
        .find(|bound| bound.key == RESPONSES.name())?;
    match bound.limit {
        LengthLimit::Setting {
            name,
            tokens: Some(tokens),
        } => Some((name, tokens)),
        _ => None,
    }
}

/// A batch that entered or left a stage.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Position of the stage.
    pub stage: usize,
    pub side: Side,
    pub wave: u64,
    pub slice: usize,
    pub rows: Range<usize>,
    pub batch: Batch,
    /// Why the guards refused it.
    pub refused: Option<String>,
}

/// The recorded batches of one step.
#[derive(Debug, Default)]
pub(crate) struct StepData {
    pub step: u64,
    pub parts: Vec<Part>,
    /// Bytes of all buffers, each counted once.
    pub bytes: usize,
    buffers: HashSet<usize>,
    /// Whether parts were dropped for lack of memory, or are only on disk.
    pub dropped: bool,
    /// Whether rows that should be on disk could not be written and are no longer in memory.
    pub lost: bool,
    /// Stages with a finished file on disk.
    pub on_disk: BTreeSet<usize>,
    pub ended: bool,
}

impl StepData {
    pub(crate) fn new(step: u64) -> StepData {
        StepData {
            step,
            ..StepData::default()
        }
    }

    pub(crate) fn add(&mut self, part: Part) {
        for column in part.batch.record().columns() {
            self.count(column);
        }
        self.parts.push(part);
    }

    fn count(&mut self, column: &ArrayRef) {
        let mut left = vec![column.to_data()];
        while let Some(data) = left.pop() {
            for buffer in data.buffers() {
                if self.buffers.insert(buffer.data_ptr().as_ptr() as usize) {
                    self.bytes += buffer.capacity();
                }
            }
            left.extend(data.child_data().iter().cloned());
        }
    }

    /// Drops all parts from memory.
    pub(crate) fn forget(&mut self) {
        self.parts.clear();
        self.buffers.clear();
        self.bytes = 0;
    }

    /// The parts in the order of files: stage, input before output, slice, order of arrival.
    fn sorted(&self) -> Vec<&Part> {
        let mut parts: Vec<&Part> = self.parts.iter().collect();
        parts.sort_by_key(|part| (part.stage, part.side, part.slice));
        parts
    }
}

/// The last steps that have ended, in memory; the oldest is dropped first.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    pub steps: VecDeque<StepData>,
    pub max_steps: usize,
    pub max_bytes: usize,
}

impl Ring {
    /// Adds a step, and drops the oldest ones until the limits are met.
    pub(crate) fn push(&mut self, data: StepData) {
        self.steps.push_back(data);
        let bytes = |steps: &VecDeque<StepData>| steps.iter().map(|s| s.bytes).sum::<usize>();
        while self.steps.len() > self.max_steps || bytes(&self.steps) > self.max_bytes {
            if self.steps.pop_front().is_none() {
                break;
            }
        }
    }
}

/// What is the same for all files of a step.
pub(crate) struct StepHeader<'a> {
    pub stages: &'a [StageAbout],
    pub seed: u64,
    pub steps: u64,
    pub models: BTreeMap<String, verl_words::resource::WeightsVersion>,
}

/// The unfinished files of a step. Dropping them removes them.
#[derive(Default)]
pub(crate) struct StepFiles {
    open: BTreeMap<usize, StageWriter>,
}

impl StepFiles {
    /// Writes the parts of the stages selected by `chosen`: whenever a step exceeds the memory limit, and when it is
    /// written.
    pub(crate) fn spill(
        &mut self,
        writer: &TraceWriter,
        header: &StepHeader<'_>,
        data: &StepData,
        chosen: &dyn Fn(usize) -> bool,
    ) -> Result<(), TraceError> {
        let sorted = data.sorted();
        let stages = sorted.chunk_by(|a, b| a.stage == b.stage);
        for parts in stages.filter(|parts| chosen(parts[0].stage)) {
            let about = &header.stages[parts[0].stage];
            let mut stage = match self.open.remove(&parts[0].stage) {
                Some(stage) => stage,
                None => {
                    let header = stage_header(header, about, data.step);
                    writer.stage(header, &about.inputs, &about.outputs)?
                }
            };
            let written = write_parts(&mut stage, about, parts);
            self.open.insert(parts[0].stage, stage);
            written?;
        }
        Ok(())
    }

    /// Bytes on disk.
    pub(crate) fn bytes_written(&self) -> u64 {
        self.open.values().map(StageWriter::bytes_written).sum()
    }

    /// Finishes all files, in the order of execution; if one fails, all are removed.
    pub(crate) fn finish(self) -> Result<Vec<StageFile>, TraceError> {
        let mut ended = Vec::new();
        for stage in self.open.into_values() {
            let path = stage.path().to_owned();
            match stage.finish() {
                Ok(file) => ended.push((path, file)),
                Err(error) => {
                    for (path, _) in ended {
                        // The file may be what fills the disk. The first error is the one to report.
                        let _ = fs::remove_file(path);
                    }
                    return Err(error);
                }
            }
        }
        Ok(ended.into_iter().map(|(_, file)| file).collect())
    }
}

/// Writes the parts of one stage, so that none of its rows wait in memory.
fn write_parts(
    stage: &mut StageWriter,
    about: &StageAbout,
    parts: &[&Part],
) -> Result<(), TraceError> {
    for slice in parts.chunk_by(|a, b| (a.side, a.slice) == (b.side, b.slice)) {
        let first = slice[0];
        let of_slice = |part: &&&Part| (part.side, part.slice) == (Side::Input, first.slice);
        let input = parts.iter().find(of_slice).copied();
        for batch in declared_order(about.rule, input, slice) {
            let at = SliceAt {
                side: first.side,
                wave: first.wave,
                slice: first.slice,
                rows: first.rows.clone(),
            };
            stage.write(at, &with_declared_types(about, first.side, batch))?;
        }
        for reason in slice.iter().filter_map(|part| part.refused.clone()) {
            stage.note(format!("slice {}: refused: {reason}", first.slice));
        }
    }
    stage.flush()
}

fn stage_header(header: &StepHeader<'_>, about: &StageAbout, step: u64) -> StageManifest {
    StageManifest {
        format: FORMAT,
        step,
        stage: about.name.clone(),
        kind: about.kind.clone(),
        parameters: about.parameters.clone(),
        rename: about.rename.clone(),
        seed: header.seed,
        steps: header.steps,
        models: header.models.clone(),
        keys: Vec::new(),
        slices: Vec::new(),
        notes: Vec::new(),
    }
}

/// The batch without keys whose type differs from the declared one; only a refused batch has such keys.
fn with_declared_types(about: &StageAbout, side: Side, batch: Batch) -> Batch {
    let fields = match side {
        Side::Input => &about.inputs,
        Side::Output => &about.outputs,
    };
    let fits = |key: &String| {
        let declared = fields.iter().find(|field| field.name() == key);
        let found = batch.column(key).map(|array| array.data_type());
        declared.map(Field::data_type) == found
    };
    let keys: Vec<String> = batch.keys().into_iter().filter(fits).collect();
    batch.select(&keys).unwrap_or(batch)
}

/// Batches of one slice with their rows in declared order: the order of the input, and by index among the samples of a
/// row. Batches that arrived in this order are returned unchanged.
fn declared_order(rule: RowRule, input: Option<&Part>, parts: &[&Part]) -> Vec<Batch> {
    let batches = || parts.iter().map(|part| part.batch.clone()).collect();
    let (Some(input), Side::Output) = (input, parts[0].side) else {
        return batches();
    };
    if rule == RowRule::Source || parts.iter().any(|part| part.refused.is_some()) {
        return batches();
    }
    let expands = matches!(rule, RowRule::Expand(_));
    let of_input = |id: RowId| if expands { id.group() } else { id.0 };
    let places: HashMap<u64, usize> = input
        .batch
        .ids()
        .into_iter()
        .enumerate()
        .map(|(at, id)| (of_input(id), at))
        .collect();
    let place = |id: RowId| {
        let at = places.get(&of_input(id)).copied().unwrap_or(usize::MAX);
        (at, id.sample_index())
    };
    let order: Vec<(usize, u64)> = parts
        .iter()
        .flat_map(|part| part.batch.ids())
        .map(place)
        .collect();
    if order.is_sorted() {
        return batches();
    }
    let mut rows: Vec<usize> = (0..order.len()).collect();
    rows.sort_by_key(|row| order[*row]);
    let all: Vec<Batch> = batches();
    let sorted: Result<Batch, BatchError> = Batch::concat(&all).and_then(|all| all.take(&rows));
    sorted.map_or(all, |sorted| vec![sorted])
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RaggedColumn;
    use verl_words::keys::RESPONSES;

    use super::*;

    fn batch(ids: &[(u64, u64)]) -> Batch {
        let ids: Vec<RowId> = ids
            .iter()
            .map(|(row, sample)| RowId::prompt(0, *row).and_then(|id| id.sample(*sample)))
            .collect::<Result<_, _>>()
            .expect("in range");
        let mut batch = Batch::with_rows(&ids);
        let rows = RaggedColumn::from_rows(ids.iter().map(|id| vec![id.row() as u32]));
        batch.put(&RESPONSES, rows).expect("as many rows");
        batch
    }

    fn part(side: Side, batch: Batch) -> Part {
        Part {
            stage: 0,
            side,
            wave: 0,
            slice: 0,
            rows: 0..2,
            batch,
            refused: None,
        }
    }

    #[test]
    fn rows_of_a_slice_are_put_into_declared_order() {
        let input = part(Side::Input, batch(&[(9, 0), (4, 0)]));
        let late = part(Side::Output, batch(&[(4, 1), (4, 0)]));
        let early = part(Side::Output, batch(&[(9, 0), (9, 1)]));
        let order = |parts: &[&Part]| -> Vec<String> {
            let batches = declared_order(RowRule::Expand(2), Some(&input), parts);
            let ids = batches.iter().flat_map(Batch::ids);
            ids.map(|id| id.to_string()).collect()
        };
        let expected = ["0.9#0", "0.9#1", "0.4#0", "0.4#1"];
        assert_eq!(order(&[&late, &early]), expected);
        assert_eq!(order(&[&early, &late]), expected);
    }

    #[test]
    fn a_spilled_step_reads_like_any_other() {
        let temp = tempfile::tempdir().expect("a folder");
        let format = crate::files::TraceFormat {
            format: FORMAT,
            verl: String::new(),
            pipeline: String::new(),
            plan_hash: String::new(),
            seed: 0,
            steps: 1,
            stages: Vec::new(),
        };
        let writer = TraceWriter::create(temp.path(), &format).expect("creates");
        let whole = batch(&[(1, 0), (2, 0), (3, 0), (4, 0)]);
        let schema = whole.record().schema();
        let fields: Vec<Field> = schema.fields().iter().map(|f| f.as_ref().clone()).collect();
        let stages = [StageAbout {
            name: "s".to_owned(),
            kind: "s".to_owned(),
            parameters: Value::Null,
            rename: BTreeMap::new(),
            rule: RowRule::Same,
            debug: false,
            in_step: true,
            inputs: fields.clone(),
            outputs: fields,
            metrics: Vec::new(),
            longest: None,
        }];
        let header = StepHeader {
            stages: &stages,
            seed: 0,
            steps: 1,
            models: BTreeMap::new(),
        };
        let mut files = StepFiles::default();
        let mut data = StepData::new(1);
        for (slice, rows) in [(1, 2..4), (0, 0..2)] {
            for side in [Side::Output, Side::Input] {
                data.add(Part {
                    slice,
                    rows: rows.clone(),
                    ..part(side, whole.slice(rows.clone()).expect("in range"))
                });
            }
            files
                .spill(&writer, &header, &data, &|_| true)
                .expect("writes");
            data.forget();
            assert_eq!((data.bytes, data.parts.len()), (0, 0));
        }
        let file = &files.finish().expect("ends")[0];
        let path = writer.layout().step(1).join(&file.file);
        let read = crate::files::read_stage(&path).expect("reads");
        for side in [Side::Input, Side::Output] {
            assert_eq!(read.rows(side), Some(whole.clone()));
        }
    }

    #[test]
    fn buffers_are_counted_once_and_the_ring_respects_its_limits() {
        let mut data = StepData::new(1);
        let whole = batch(&[(1, 0), (2, 0), (3, 0)]);
        data.add(part(Side::Input, whole.clone()));
        let once = data.bytes;
        data.add(part(Side::Output, whole.slice(1..2).expect("in range")));
        assert_eq!(data.bytes, once);
        assert!(once > 0);

        let sized = |step, bytes| StepData {
            bytes,
            ..StepData::new(step)
        };
        let mut ring = Ring {
            max_steps: 3,
            max_bytes: 100,
            ..Ring::default()
        };
        let steps = |ring: &Ring| ring.steps.iter().map(|s| s.step).collect::<Vec<_>>();
        for step in 1..=4 {
            ring.push(sized(step, 10));
        }
        assert_eq!(steps(&ring), [2, 3, 4]);
        ring.push(sized(5, 95));
        assert_eq!(steps(&ring), [5]);
        ring.push(sized(6, 101));
        assert_eq!(steps(&ring), [0u64; 0]);
    }
}
