use super::*;
use crate::prompts::{PromptFormat, Row};
use ::parquet::arrow::ArrowWriter;
use ::parquet::file::properties::WriterProperties;
use arrow_array::builder::{Int32Builder, ListBuilder, MapBuilder, StringBuilder, StructBuilder};
use arrow_array::types::{Float16Type, Int32Type};
use arrow_array::{
    BinaryArray, BooleanArray, Date32Array, Decimal128Array, DictionaryArray, Float16Array,
    Float32Array, Int64Array, PrimitiveArray, RecordBatch, StringArray, StructArray,
    Time64MicrosecondArray, TimestampMicrosecondArray, UInt8Array,
};
use arrow_schema::{DataType, Field};
use serde_json::json;

fn example() -> RecordBatch {
    let mut numbers = ListBuilder::new(Int32Builder::new());
    numbers.append_value([Some(1), None]);
    numbers.append_null();
    numbers.append_value([]);
    let inner: Vec<(Arc<Field>, ArrayRef)> = vec![
        (
            Arc::new(Field::new("role", DataType::Utf8, false)),
            Arc::new(StringArray::from(vec!["user", "tool", "user"])),
        ),
        (
            Arc::new(Field::new("n", DataType::Int64, true)),
            Arc::new(Int64Array::from(vec![Some(-7), None, Some(1 << 40)])),
        ),
    ];
    let columns: Vec<(&str, ArrayRef)> = vec![
        (
            "text",
            Arc::new(StringArray::from(vec![Some("one"), None, Some("drei")])),
        ),
        (
            "score",
            Arc::new(Float32Array::from(vec![0.5, f32::NAN, 2.0])),
        ),
        (
            "good",
            Arc::new(BooleanArray::from(vec![true, false, true])),
        ),
        ("numbers", Arc::new(numbers.finish())),
        ("message", Arc::new(StructArray::from(inner))),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, c)| (n, c, true)))
        .unwrap()
}

fn write(path: &Path, batch: &RecordBatch, compression: Compression, group: usize) {
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_max_row_group_row_count(Some(group))
        .build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

pub(crate) fn write_example(path: &Path, compression: Compression) {
    write(path, &example(), compression, 2);
}

#[test]
fn values_of_all_kinds_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::LZ4_RAW,
        Compression::GZIP(Default::default()),
    ] {
        write_example(&path, compression);
        let data = ParquetRows::open(&path).unwrap();
        assert_eq!(data.len(), 3);
        let rows: Vec<Value> = (0..3).map(|i| data.row(i).unwrap().into()).collect();
        assert_eq!(
            rows,
            [
                json!({"text": "one", "score": 0.5, "good": true, "numbers": [1, null],
                       "message": {"role": "user", "n": -7}}),
                json!({"text": null, "score": null, "good": false, "numbers": null,
                       "message": {"role": "tool", "n": null}}),
                json!({"text": "drei", "score": 2.0, "good": true, "numbers": [],
                       "message": {"role": "user", "n": 1_099_511_627_776i64}}),
            ]
        );
        assert!(matches!(data.row(3), Err(DataError::Row { row: 4, .. })));
    }
}

/// The encoding that writers use for columns with few distinct texts.
#[test]
fn dictionaries_are_read_as_their_values() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let levels: DictionaryArray<Int32Type> = [Some("easy"), None, Some("hard"), Some("easy")]
        .into_iter()
        .collect();
    let keys = UInt8Array::from(vec![Some(1), Some(0), None, Some(1)]);
    let points = DictionaryArray::new(keys, Arc::new(Int64Array::from(vec![5, 9])));
    let columns: Vec<(&str, ArrayRef)> =
        vec![("level", Arc::new(levels)), ("points", Arc::new(points))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    write(&path, &batch, Compression::SNAPPY, 3);
    let data = ParquetRows::open(&path).unwrap();
    let rows: Vec<Value> = (0..4).map(|i| data.row(i).unwrap().into()).collect();
    assert_eq!(
        rows,
        [
            json!({"level": "easy", "points": 9}),
            json!({"level": null, "points": 5}),
            json!({"level": "hard", "points": null}),
            json!({"level": "easy", "points": 9}),
        ]
    );
}

#[test]
fn damaged_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    write_example(&path, Compression::SNAPPY);
    let whole = std::fs::read(&path).unwrap();
    for bytes in [
        &whole[..whole.len() / 2],
        &whole[..whole.len() - 1],
        b"PAR1",
    ] {
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(
            ParquetRows::open(&path),
            Err(DataError::Unreadable { .. })
        ));
    }
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(
        ParquetRows::open(&path),
        Err(DataError::Empty { .. })
    ));
    write(&path, &example().slice(0, 0), Compression::SNAPPY, 2);
    assert!(matches!(
        ParquetRows::open(&path),
        Err(DataError::Empty { .. })
    ));
}

/// Row A10: an unused column may be of any type.
#[test]
fn only_requested_columns_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x", "y"]));
    let binary: ArrayRef = Arc::new(BinaryArray::from(vec![&b"x"[..], b"y"]));
    let inside = StructArray::from(vec![
        (
            Arc::new(Field::new("index", DataType::Utf8, false)),
            text.clone(),
        ),
        (
            Arc::new(Field::new("image", DataType::Binary, false)),
            binary.clone(),
        ),
    ]);
    let columns: [(&str, ArrayRef); 3] = [
        ("question", text),
        ("image", binary),
        ("extra", Arc::new(inside)),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    write(&path, &batch, Compression::SNAPPY, 2);
    let data = ParquetRows::open(&path).unwrap();
    assert_eq!(Value::from(data.row(1).unwrap()), json!({"question": "y"}));
    assert_eq!(data.value(0, "question").unwrap(), Some("x".into()));
    assert_eq!(data.value(1, "extra.index").unwrap(), Some("y".into()));
    assert_eq!(data.value(1, "extra.none").unwrap(), None);
    for column in ["image", "extra", "extra.image"] {
        let error = data.value(0, column).unwrap_err().to_string();
        let words = format!(
            "column `{column}` contains bytes that are not text (Binary); supported are text"
        );
        assert!(error.contains(&words), "{error}");
    }
    assert_eq!(
        data.names(0).unwrap(),
        ["question", "image", "extra", "extra.index", "extra.image"]
    );
}

/// 0.5 twice.
fn halves() -> Float16Array {
    let bits = arrow_array::UInt16Array::from(vec![0x3800; 2])
        .into_parts()
        .1;
    PrimitiveArray::<Float16Type>::new(bits.into_inner().into(), None)
}

#[test]
fn dates_times_and_decimals_are_texts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let moment = 1_706_702_400_500_000;
    let columns: Vec<(&str, ArrayRef)> = vec![
        (
            "price",
            Arc::new(
                Decimal128Array::from(vec![Some(1850), None])
                    .with_precision_and_scale(10, 2)
                    .unwrap(),
            ),
        ),
        ("day", Arc::new(Date32Array::from(vec![19_753, 0]))),
        (
            "at",
            Arc::new(TimestampMicrosecondArray::from(vec![moment, 0])),
        ),
        (
            "utc",
            Arc::new(TimestampMicrosecondArray::from(vec![moment, 0]).with_timezone("+02:00")),
        ),
        (
            "clock",
            Arc::new(Time64MicrosecondArray::from(vec![3_600_000_000, 0])),
        ),
        // 0.5, whose Rust type comes from another crate.
        ("half", Arc::new(halves())),
    ];
    write(
        &path,
        &RecordBatch::try_from_iter(columns).unwrap(),
        Compression::SNAPPY,
        2,
    );
    let data = ParquetRows::open(&path).unwrap();
    assert_eq!(
        Value::from(data.row(0).unwrap()),
        json!({"price": "18.50", "day": "2024-01-31", "at": "2024-01-31T12:00:00.500",
               "utc": "2024-01-31T12:00:00.500Z", "clock": "01:00:00", "half": 0.5})
    );
    assert_eq!(data.row(1).unwrap()["price"], Value::Null);
}

/// Row #24: rows of verl's own preprocessing.
#[test]
fn dots_reach_into_structs_lists_and_maps() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let answer: ArrayRef = Arc::new(StringArray::from(vec!["18", "3"]));
    let judge = StructArray::from(vec![(
        Arc::new(Field::new("ground_truth", DataType::Utf8, false)),
        answer.clone(),
    )]);
    let judge = StructArray::try_new(
        judge.fields().clone(),
        judge.columns().to_vec(),
        Some(vec![true, false].into()),
    )
    .unwrap();
    let mut choices = ListBuilder::new(Int32Builder::new());
    choices.append_value([Some(1), None]);
    choices.append_value([]);
    let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    map.keys().append_value("k");
    map.values().append_value(7);
    map.append(true).unwrap();
    map.append(true).unwrap();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("reward_model", Arc::new(judge)),
        ("choices", Arc::new(choices.finish())),
        ("map", Arc::new(map.finish())),
        ("a.b", answer),
    ];
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, c)| (n, c, true)))
            .unwrap();
    write(&path, &batch, Compression::SNAPPY, 1);
    let data = ParquetRows::open(&path).unwrap();
    for (row, column, value) in [
        (0, "reward_model.ground_truth", Some(json!("18"))),
        (1, "reward_model.ground_truth", Some(Value::Null)),
        (0, "choices.0", Some(json!(1))),
        (0, "choices.1", Some(Value::Null)),
        (0, "choices.2", None),
        (1, "choices.0", None),
        (0, "choices.+0", None),
        (0, "map.k", Some(json!(7))),
        (1, "map.k", None),
        (0, "a.b", Some(json!("18"))),
        (0, "a", None),
    ] {
        assert_eq!(data.value(row, column).unwrap(), value, "{column}");
    }
    assert_eq!(data.row(0).unwrap()["map"], json!({"k": 7}));
}

/// Row #24 again, as a stage reads such rows.
#[test]
fn rows_of_verl_are_prompts_with_answers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let texts = |name: &str| Field::new(name, DataType::Utf8, true);
    let message = StructBuilder::from_fields(vec![texts("role"), texts("content")], 1);
    let mut prompt = ListBuilder::new(message);
    for (column, text) in ["user", "1+1"].into_iter().enumerate() {
        let field = prompt.values().field_builder::<StringBuilder>(column);
        field.unwrap().append_value(text);
    }
    prompt.values().append(true);
    prompt.append(true);
    let answer: ArrayRef = Arc::new(StringArray::from(vec!["2"]));
    let judge = StructArray::from(vec![(Arc::new(texts("ground_truth")), answer)]);
    let image: ArrayRef = Arc::new(BinaryArray::from(vec![&b"x"[..]]));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("prompt", Arc::new(prompt.finish())),
        ("reward_model", Arc::new(judge)),
        ("image", image),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    write(&path, &batch, Compression::SNAPPY, 1);
    let data = ParquetRows::open(&path).unwrap();
    let mut format = PromptFormat {
        messages: Some("prompt".to_owned()),
        answer: "reward_model.ground_truth".to_owned(),
        ..PromptFormat::default()
    };
    let measure = |format: &PromptFormat| format.measure(&Row::read(&data, 0).unwrap(), None, true);
    // user, 1+1, assistant, 2
    assert_eq!(measure(&format).unwrap(), 4 + 3 + 9 + 1);
    format.answer = "ground_truth".to_owned();
    let error = measure(&format).unwrap_err().to_string();
    assert!(
        error.contains("did you mean `reward_model.ground_truth`? the row has `prompt`, `reward_model`, `image`"),
        "{error}"
    );
    format.answer = "image".to_owned();
    let error = measure(&format).unwrap_err().to_string();
    assert!(error.contains("column `image` contains bytes"), "{error}");
}

#[test]
fn a_file_that_changes_during_a_run_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    write_example(&path, Compression::SNAPPY);
    let data = ParquetRows::open(&path).unwrap();
    assert_eq!(data.value(0, "text").unwrap(), Some("one".into()));
    write(&path, &example().slice(0, 1), Compression::UNCOMPRESSED, 2);
    let error = data.value(0, "score").unwrap_err().to_string();
    assert!(error.contains("has changed since it was opened"), "{error}");
    // Columns that were read before stay available.
    assert_eq!(data.value(2, "text").unwrap(), Some("drei".into()));
}

#[test]
fn the_start_of_a_file_is_its_first_row_groups() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    write_example(&path, Compression::SNAPPY);
    let mut data = ParquetRows::open(&path).unwrap();
    data.first_groups(1);
    assert_eq!(data.len(), 2);
    assert_eq!(data.value(1, "text").unwrap(), Some(Value::Null));
    assert!(data.value(2, "text").is_err());
    assert!(ParquetRows::open_start(&path).unwrap().is_complete);
}

/// The codec byte of an uncompressed column chunk's metadata is set to Zstandard's, as another writer would set it: this
/// build cannot write such a file itself.
#[test]
fn unknown_codecs_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let batch = RecordBatch::try_from_iter([("question", text)]).unwrap();
    write(&path, &batch, Compression::UNCOMPRESSED, 2);
    let mut bytes = std::fs::read(&path).unwrap();
    // In Thrift's compact form: field 3 is a list of one text (the path), field 4 the codec as a zigzag number.
    let path_then_codec = [b"\x19\x18\x08question\x15".as_slice(), &[0]].concat();
    let at = bytes
        .windows(path_then_codec.len())
        .position(|window| window == path_then_codec)
        .unwrap();
    bytes[at + path_then_codec.len() - 1] = 6 << 1;
    std::fs::write(&path, bytes).unwrap();
    let data = ParquetRows::open(&path).unwrap();
    let error = data.value(0, "question").unwrap_err().to_string();
    assert!(
        error.contains("column `question` is compressed with ZSTD"),
        "{error}"
    );
    assert!(error.contains("compression=\"snappy\""), "{error}");
}
