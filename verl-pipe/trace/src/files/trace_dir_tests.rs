//! Written data is read back bit by bit for any slices; incomplete steps and unknown formats are reported.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use arrow_array::builder::{Float32Builder, ListBuilder};
use arrow_array::{
    ArrayRef, BooleanArray, Float32Array, Float64Array, Int64Array, ListArray, StringArray,
    UInt8Array, UInt32Array, UInt64Array,
};
use arrow_schema::Field;
use proptest::prelude::*;
use serde_json::json;
use verl_rules::format::FORMAT;
use verl_run::atomic_file::AtomicFile;
use verl_words::batch::RowId;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::resource::WeightsVersion;

use super::*;
use crate::files::documents::{Reason, StageFile, StageInfo, StepManifest};
use crate::files::stage_reader::read_stage;
use crate::files::trace_writer::{SliceAt, TraceWriter};

pub(crate) fn format() -> TraceFormat {
    TraceFormat {
        format: FORMAT,
        verl: "0.1.0".to_owned(),
        pipeline: "test".to_owned(),
        plan_hash: "00".to_owned(),
        seed: 17,
        steps: 9,
        stages: vec![StageInfo {
            name: "reward".to_owned(),
            kind: "reward".to_owned(),
        }],
    }
}

pub(crate) fn header(step: u64) -> StageManifest {
    let version = WeightsVersion {
        step: 4,
        hash: "ab".to_owned(),
    };
    StageManifest {
        format: FORMAT,
        step,
        stage: "reward".to_owned(),
        kind: "reward".to_owned(),
        parameters: json!({"scale": 0.5}),
        rename: BTreeMap::from([("rewards".to_owned(), "mine".to_owned())]),
        seed: 17,
        steps: 9,
        models: BTreeMap::from([("actor".to_owned(), version)]),
        keys: Vec::new(),
        slices: Vec::new(),
        notes: Vec::new(),
    }
}

pub(crate) fn step_manifest(step: u64, stages: Vec<StageFile>) -> StepManifest {
    StepManifest {
        format: FORMAT,
        step,
        reason: Reason::Asked,
        ended: true,
        stages,
        models: BTreeMap::new(),
        stage_states: BTreeMap::new(),
        notes: vec!["hello".to_owned()],
    }
}

pub(crate) fn fields(batch: &Batch) -> Vec<Field> {
    let schema = batch.record().schema();
    schema.fields().iter().map(|f| f.as_ref().clone()).collect()
}

/// Writes `batch` cut at `cuts` as input, and its slices in reverse as output; reads both back.
fn through_disk(batch: &Batch, cuts: &[usize]) -> StageTrace {
    let temp = tempfile::tempdir().expect("a folder");
    let writer = TraceWriter::create(temp.path(), &format()).expect("creates");
    let mut stage = writer
        .stage(header(3), &fields(batch), &fields(batch))
        .expect("begins");
    let mut bounds: Vec<usize> = cuts
        .iter()
        .map(|cut| cut % (batch.num_rows() + 1))
        .collect();
    bounds.extend([0, batch.num_rows()]);
    bounds.sort_unstable();
    let slices: Vec<_> = bounds.windows(2).map(|w| w[0]..w[1]).enumerate().collect();
    let mut write = |side, slice: usize, rows: std::ops::Range<usize>| {
        let part = batch.slice(rows.clone()).expect("in range");
        let at = SliceAt {
            side,
            wave: 0,
            slice,
            rows,
        };
        stage.write(at, &part).expect("writes");
    };
    for (slice, rows) in &slices {
        write(Side::Input, *slice, rows.clone());
    }
    for (slice, rows) in slices.iter().rev() {
        write(Side::Output, *slice, rows.clone());
    }
    let file = stage.finish().expect("ends");
    writer
        .end_step(&step_manifest(3, vec![file]))
        .expect("ends");
    let trace = TraceDir::open(temp.path()).expect("opens");
    assert_eq!((trace.steps(), trace.notes().len()), (vec![3], 0));
    trace.step(3).expect("reads").stages.remove(0)
}

fn lists(rows: &[Option<Vec<u32>>]) -> ArrayRef {
    let mut builder = ListBuilder::new(Float32Builder::new());
    for row in rows {
        match row {
            Some(bits) => {
                let values = bits.iter().enumerate().map(|(at, bits)| {
                    // Nulls inside lists too.
                    (at % 7 != 6).then(|| f32::from_bits(*bits))
                });
                builder.append_value(values);
            }
            None => builder.append_null(),
        }
    }
    Arc::new(builder.finish())
}

/// Bits of a number, a list, a text.
type Row = (u32, Option<Vec<u32>>, Option<String>);

fn batch_of(rows: &[Row]) -> Batch {
    let ids: Vec<RowId> = (0..rows.len() as u64)
        .map(|row| RowId::prompt(1, row * 7 % 1000).and_then(|id| id.sample(row % 5)))
        .collect::<Result<_, _>>()
        .expect("in range");
    let mut batch = Batch::with_rows(&ids);
    let bits = || rows.iter().map(|row| row.0);
    let some = |bits: u32| !bits.is_multiple_of(3);
    let columns: Vec<(&str, ArrayRef)> = vec![
        (
            "f32",
            Arc::new(Float32Array::from_iter(
                bits().map(|b| some(b).then(|| f32::from_bits(b))),
            )),
        ),
        (
            "f64",
            Arc::new(Float64Array::from_iter_values(
                bits().map(|b| f64::from_bits((u64::from(b) << 32) | 1)),
            )),
        ),
        (
            "lists",
            lists(&rows.iter().map(|r| r.1.clone()).collect::<Vec<_>>()),
        ),
        (
            "ids",
            Arc::new(ListArray::from_iter_primitive::<
                arrow_array::types::UInt32Type,
                _,
                _,
            >(rows.iter().map(|r| {
                Some(r.1.clone().unwrap_or_default().into_iter().map(Some))
            }))),
        ),
        (
            "text",
            Arc::new(StringArray::from_iter(rows.iter().map(|r| r.2.as_deref()))),
        ),
        (
            "side",
            Arc::new(UInt8Array::from_iter_values(bits().map(|b| b as u8))),
        ),
        ("u32", Arc::new(UInt32Array::from_iter_values(bits()))),
        (
            "u64",
            Arc::new(UInt64Array::from_iter_values(
                bits().map(|b| u64::MAX - u64::from(b)),
            )),
        ),
        (
            "i64",
            Arc::new(Int64Array::from_iter_values(bits().map(|b| -i64::from(b)))),
        ),
        (
            "bool",
            Arc::new(BooleanArray::from_iter(bits().map(|b| Some(some(b))))),
        ),
    ];
    for (name, array) in columns {
        batch.put_array(name, array).expect("as many rows");
    }
    batch
}

/// Bits of the f32 column: Arrow's own equality may not distinguish NaNs.
fn f32_bits(batch: &Batch) -> Vec<u32> {
    let array = batch.column("f32").expect("is there");
    let array = array.as_any().downcast_ref::<Float32Array>().expect("f32");
    (0..array.len())
        .filter(|row| array.is_valid(*row))
        .map(|row| array.value(row).to_bits())
        .collect()
}

fn list_bits(batch: &Batch) -> Vec<u32> {
    let array = batch.column("lists").expect("is there");
    let list = array.as_any().downcast_ref::<ListArray>().expect("a list");
    (0..list.len())
        .filter(|row| list.is_valid(*row))
        .flat_map(|row| {
            let values = list.value(row);
            let values = values.as_any().downcast_ref::<Float32Array>().expect("f32");
            let some = (0..values.len()).filter(|at| values.is_valid(*at));
            some.map(|at| values.value(at).to_bits())
                .collect::<Vec<_>>()
        })
        .collect()
}

use arrow_array::Array;

#[track_caller]
fn check(batch: &Batch, cuts: &[usize]) {
    let stage = through_disk(batch, cuts);
    for side in [Side::Input, Side::Output] {
        let whole = stage.rows(side).expect("has slices");
        assert_eq!(&whole, batch);
        assert_eq!(f32_bits(&whole), f32_bits(batch));
        assert_eq!(list_bits(&whole), list_bits(batch));
        let slices = stage.side(side);
        assert!(slices.windows(2).all(|w| w[0].rows.end == w[1].rows.start));
        assert_eq!(slices.len(), cuts.len() + 1);
    }
    assert_eq!(stage.manifest.parameters, json!({"scale": 0.5}));
    assert_eq!(stage.manifest.models["actor"].step, 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_batch_in_any_slices_comes_back_bit_by_bit(
        rows in prop::collection::vec(
            (any::<u32>(), prop::option::of(prop::collection::vec(any::<u32>(), 0..9)), prop::option::of("[a-zé\\n\"]{0,9}")),
            0..24,
        ),
        cuts in prop::collection::vec(0usize..24, 0..5),
    ) {
        check(&batch_of(&rows), &cuts);
    }
}

#[test]
fn special_floats_and_several_row_groups_come_back() {
    let special = [
        0x7fc0_0001, // a NaN with a payload
        0xffa0_0002, // a signalling NaN with a sign
        0x8000_0001, // a negative subnormal
        0x7f80_0000, // infinity
        0x8000_0000, // negative zero
        0x0000_0000,
    ];
    let rows: Vec<_> = (0..1300)
        .map(|at| {
            let bits = special[at % special.len()];
            (bits, Some(vec![bits; at % 5]), Some(format!("row {at}")))
        })
        .collect();
    check(&batch_of(&rows), &[700, 3]);
}

#[test]
fn a_source_has_no_input_rows() {
    let temp = tempfile::tempdir().expect("a folder");
    let writer = TraceWriter::create(temp.path(), &format()).expect("creates");
    let batch = batch_of(&[(1, None, None)]);
    let mut stage = writer
        .stage(header(1), &[], &fields(&batch))
        .expect("begins");
    for (side, wave, batch) in [
        (Side::Input, 0, Batch::with_rows(&[])),
        (Side::Input, 1, Batch::with_rows(&[])),
        (Side::Output, 1, batch.clone()),
    ] {
        let at = SliceAt {
            side,
            wave,
            slice: wave as usize,
            rows: 0..0,
        };
        stage.write(at, &batch).expect("writes");
    }
    let file = stage.finish().expect("ends");
    writer
        .end_step(&step_manifest(1, vec![file]))
        .expect("ends");
    let read = TraceDir::open(temp.path()).expect("opens");
    let stage = read.stage(1, "reward").expect("reads");
    assert_eq!(stage.inputs.len(), 2);
    assert_eq!(
        (stage.inputs[1].wave, stage.inputs[1].batch.num_rows()),
        (1, 0)
    );
    assert_eq!(stage.outputs[0].batch, batch);
    let error = read.stage(1, "rewards").expect_err("not there").to_string();
    assert!(
        error.contains("`rewards`") && error.contains("`reward`"),
        "{error}"
    );
    let error = read.step(4).expect_err("not there");
    assert!(error.to_string().contains("steps 1"), "{error}");
    assert_eq!(error.code(), "T004");
}

#[test]
fn keys_of_one_name_and_two_types_have_two_columns() {
    let temp = tempfile::tempdir().expect("a folder");
    let writer = TraceWriter::create(temp.path(), &format()).expect("creates");
    let ids = [RowId(1), RowId(2)];
    let (mut input, mut output) = (Batch::with_rows(&ids), Batch::with_rows(&ids));
    let numbers: ArrayRef = Arc::new(UInt32Array::from(vec![1, 2]));
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    input.put_array("x", numbers).expect("two rows");
    output.put_array("x", texts).expect("two rows");
    let mut stage = writer
        .stage(header(1), &fields(&input), &fields(&output))
        .expect("begins");
    for (side, batch) in [(Side::Input, &input), (Side::Output, &output)] {
        let at = SliceAt {
            side,
            wave: 0,
            slice: 0,
            rows: 0..2,
        };
        stage.write(at, batch).expect("writes");
    }
    let file = stage.finish().expect("ends");
    let read =
        read_stage(&temp.path().join("trace/steps/00000001").join(file.file)).expect("reads");
    assert_eq!(read.inputs[0].batch, input);
    assert_eq!(read.outputs[0].batch, output);
    assert_eq!(read.manifest.keys[1].column, "x@output");
}

#[test]
fn an_incomplete_step_is_skipped_with_a_note() {
    let temp = tempfile::tempdir().expect("a folder");
    let writer = TraceWriter::create(temp.path(), &format()).expect("creates");
    writer
        .end_step(&step_manifest(1, Vec::new()))
        .expect("ends");
    let batch = batch_of(&[(1, None, None)]);
    // As if the process had been killed while writing step 2, and before renaming the manifest of step 3.
    let begun = writer
        .stage(header(2), &[], &fields(&batch))
        .expect("begins");
    let whole = writer
        .stage(header(3), &[], &fields(&batch))
        .expect("begins");
    whole.finish().expect("ends");
    std::mem::forget(begun);
    fs::write(
        AtomicFile::aside(&writer.layout().manifest(3)),
        "{\"format\": 1, \"st",
    )
    .expect("writes");
    let read = TraceDir::open(temp.path()).expect("opens");
    assert_eq!(read.steps(), [1]);
    assert!(read.notes()[0].contains("step 2") && read.notes()[1].contains("step 3"));
}

#[test]
fn another_format_is_refused_in_every_file() {
    let temp = tempfile::tempdir().expect("a folder");
    let error = TraceDir::open(temp.path()).expect_err("nothing there");
    assert_eq!(error.code(), "T001");
    let writer = TraceWriter::create(temp.path(), &format()).expect("creates");
    writer
        .end_step(&step_manifest(1, Vec::new()))
        .expect("ends");
    let path = writer.layout().manifest(1);
    let text = fs::read_to_string(&path).expect("reads");
    fs::write(&path, text.replace("\"format\": 1", "\"format\": 0")).expect("writes");
    let read = TraceDir::open(temp.path()).expect("opens");
    assert_eq!(read.steps(), [0u64; 0]);
    let error = read.manifest(1).expect_err("older");
    assert_eq!(error.code(), "T002");
    assert!(error.to_string().contains("trace format 0"), "{error}");
    fs::write(writer.layout().format(), "{\"verl\": \"9\"}").expect("writes");
    let error = TraceDir::open(temp.path()).expect_err("no format");
    assert!(error.to_string().contains("format unknown"), "{error}");

    let batch = batch_of(&[(1, None, None)]);
    let later = StageManifest {
        format: FORMAT + 1,
        ..header(5)
    };
    let stage = writer.stage(later, &[], &fields(&batch)).expect("begins");
    let file = stage.finish().expect("ends");
    let path = writer.layout().step(5).join(file.file);
    assert_eq!(read_stage(&path).expect_err("newer").code(), "T002");
    fs::write(&path, "PAR1 and no more").expect("writes");
    assert_eq!(read_stage(&path).expect_err("damaged").code(), "T003");
}

#[test]
fn steps_are_printed_as_ranges() {
    assert_eq!(ranges([1, 2, 3, 7, 9, 10].into_iter()), "1–3, 7, 9–10");
}
