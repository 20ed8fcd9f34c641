//! Any batch arrives as it was sent; a slice does not carry what it was cut from.

use std::sync::Arc;

use arrow_array::builder::{
    BooleanBuilder, Float32Builder, Float64Builder, Int64Builder, ListBuilder, StringBuilder,
    UInt8Builder, UInt32Builder, UInt64Builder,
};
use arrow_array::{Array, ArrayRef};
use proptest::prelude::*;
use verl_wire::frame::{self, FrameReader, Kind};
use verl_wire::message::{Message, Parts};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::keys::{PROMPTS, RESPONSES};
use verl_words::resource::StoredState;

/// The message as another process would receive it.
fn sent(message: &Message) -> Message {
    let mut bytes = Vec::new();
    frame::write(&mut bytes, (Kind::Event, 1, 1), message, || Ok(())).expect("written");
    let tick = std::time::Duration::from_secs(1);
    let frame = FrameReader::new(bytes.as_slice(), 1 << 40, tick, tick).read();
    frame.expect("a frame").message
}

fn received(batch: &Batch) -> Batch {
    let mut message = Message::default();
    message.push_batch(batch).expect("written");
    Parts::of(sent(&message)).batch().expect("read")
}

/// A value of a row: `None` is null.
type Cell = Option<u64>;
/// A row of lists.
type Row = Option<Vec<Cell>>;

/// Columns of all types that keys can have, with the same pattern of values.
fn columns(scalars: &[Cell], lists: &[Row]) -> Vec<ArrayRef> {
    macro_rules! columns {
        ($($builder:ty, $value:expr;)*) => { vec![$(
            {
                let mut scalar = <$builder>::new();
                scalars.iter().for_each(|cell| scalar.append_option(cell.map($value)));
                Arc::new(scalar.finish()) as ArrayRef
            },
            {
                let mut list = ListBuilder::new(<$builder>::new());
                for row in lists {
                    for cell in row.iter().flatten() {
                        list.values().append_option(cell.map($value));
                    }
                    list.append(row.is_some());
                }
                Arc::new(list.finish()) as ArrayRef
            },
        )*] };
    }
    columns! {
        BooleanBuilder, |v| v % 2 == 0;
        UInt8Builder, |v| v as u8;
        UInt32Builder, |v| v as u32;
        UInt64Builder, |v| v;
        Int64Builder, |v| v as i64;
        // All bits, NaN among them.
        Float32Builder, |v| f32::from_bits(v as u32);
        Float64Builder, f64::from_bits;
        StringBuilder, |v| "é".repeat((v % 5) as usize);
    }
}

fn batch(scalars: &[Cell], lists: &[Row]) -> Batch {
    let ids = (0..scalars.len() as u64).map(|row| RowId::prompt(1, row).expect("an id"));
    let mut batch = Batch::with_rows(&ids.collect::<Vec<_>>());
    for (at, column) in columns(scalars, lists).into_iter().enumerate() {
        batch
            .put_array(&format!("key{at}"), column)
            .expect("a column");
    }
    batch
}

fn rows() -> impl Strategy<Value = Vec<(Cell, Row)>> {
    let cell = || prop::option::weighted(0.8, any::<u64>());
    let row = prop::option::weighted(0.8, prop::collection::vec(cell(), 0..5));
    prop::collection::vec((cell(), row), 0..12)
}

proptest! {
    #[test]
    fn any_batch_arrives_equal(rows in rows(), cut in any::<(prop::sample::Index, prop::sample::Index)>()) {
        let (scalars, lists): (Vec<Cell>, Vec<Row>) = rows.into_iter().unzip();
        let whole = batch(&scalars, &lists);
        prop_assert_eq!(&received(&whole), &whole);
        let (a, b) = (cut.0.index(scalars.len() + 1), cut.1.index(scalars.len() + 1));
        let part = whole.slice(a.min(b)..a.max(b)).expect("in range");
        prop_assert_eq!(&received(&part), &part);
        // A second journey starts from the buffers of the first.
        let again = received(&received(&part));
        prop_assert_eq!(&again, &part);
        prop_assert_eq!(again.record().schema(), part.record().schema());
    }

    #[test]
    fn damaged_batches_do_not_panic(rows in rows(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let (scalars, lists): (Vec<Cell>, Vec<Row>) = rows.into_iter().unzip();
        let mut message = Message::default();
        message.push_batch(&batch(&scalars, &lists)).expect("written");
        let mut bytes = message.parts()[0].clone().into_buffer().to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = verl_wire::batch::decode(bytes.clone().into());
        bytes.truncate(at);
        prop_assert!(verl_wire::batch::decode(bytes.into()).is_err());
    }
}

#[test]
fn batches_without_rows_or_without_keys_arrive() {
    for rows in [0, 1, 3] {
        let whole = long_batch(rows);
        let some_keys = whole.select(&["prompts"]).expect("a key");
        for batch in [whole.rows_only(), some_keys, whole] {
            assert_eq!(received(&batch), batch);
        }
    }
}

fn long_batch(rows: u64) -> Batch {
    let ids: Vec<RowId> = (0..rows)
        .map(|row| RowId::prompt(0, row).expect("an id"))
        .collect();
    let mut batch = Batch::with_rows(&ids);
    let tokens = |row: u64| (0..50 + row as u32 % 7).collect::<Vec<u32>>();
    batch
        .put(&PROMPTS, RaggedColumn::from_rows((0..rows).map(tokens)))
        .expect("a column");
    batch
        .put(&RESPONSES, RaggedColumn::from_rows((0..rows).map(tokens)))
        .expect("a column");
    batch
}

#[test]
fn a_slice_is_sent_without_the_batch_that_it_was_cut_from() {
    let whole = long_batch(10_000);
    let part = whole.slice(5_000..5_001).expect("in range");
    let mut message = Message::default();
    message.push_batch(&part).expect("written");
    let bytes = message.parts()[0].len();
    assert!(bytes < 4096, "{bytes} bytes for one row");
    assert_eq!(received(&part), part);
}

#[test]
fn values_are_copied_neither_when_written_nor_when_read() {
    let batch = long_batch(100);
    let values = batch.get(&PROMPTS).expect("a column").values().as_ptr();
    let mut message = Message::default();
    message.push_batch(&batch).expect("written");
    let buffers = message.parts()[0].buffers();
    assert!(
        buffers
            .iter()
            .any(|buffer| buffer.as_ptr().cast() == values)
    );

    let message = sent(&message);
    let bytes = message.parts()[0].buffers()[0].as_ptr_range();
    let batch = Parts::of(message).batch().expect("read");
    for column in batch.record().columns() {
        for buffer in column.to_data().buffers() {
            assert!(buffer.is_empty() || bytes.contains(&buffer.as_ptr()));
        }
    }
    let values = batch.get(&PROMPTS).expect("a column").values().as_ptr();
    assert!(bytes.contains(&values.cast()));
}

#[test]
fn states_arrive_with_all_bits() {
    let state = StoredState {
        tensors: (0..=255).collect(),
        about: serde_json::json!({ "rate": 0.1, "tiny": 5e-324, "minus": -0.0, "large": u64::MAX, "none": null }),
    };
    let mut message = Message::new(&f64::NAN).expect("written");
    message.push_state(state.clone()).expect("written");
    message.push_state(StoredState::default()).expect("written");
    let message = sent(&message);
    assert!(message.head::<f64>().expect("read").is_nan());
    let mut parts = Parts::of(message);
    let arrived = parts.state().expect("read");
    assert_eq!(arrived, state);
    assert_eq!(arrived.about.to_string(), state.about.to_string());
    assert_eq!(parts.state().expect("read"), StoredState::default());
    assert!(parts.bytes().is_err());
    parts.end().expect("all parts were read");
}
