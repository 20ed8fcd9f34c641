//! Parquet files: columns of text, numbers and booleans, dictionaries of them (categories), and lists and structs of these.
//!
//! All row groups are decoded when the file is opened and stay in memory as Arrow arrays; a row becomes JSON when it
//! is asked for. A number that JSON cannot hold (NaN, infinity) becomes null.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use ::parquet::basic::Compression;
use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch, downcast_dictionary_array};
use arrow_schema::DataType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::{BuildContext, ConfigError, DataConfig};

/// A Parquet file, uncompressed or compressed with Snappy, LZ4 or gzip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parquet {
    /// The file; relative to the folder of the pipeline file.
    pub path: PathBuf,
}

impl DataConfig for Parquet {
    const KIND: &'static str = "parquet";
    const SUMMARY: &'static str = "rows of a Parquet file";

    fn check(&self, context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        super::check_format(&context.base, &self.path, Some(true))
    }

    fn open(&self, context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        let path = super::resolve(&context.base, &self.path);
        Ok(Arc::new(ParquetRows::open(&path)?))
    }
}

/// The rows of a Parquet file.
#[derive(Debug)]
pub struct ParquetRows {
    origin: String,
    batches: Vec<RecordBatch>,
    /// Rows in the batches up to and with each one.
    ends: Vec<usize>,
    fingerprint: String,
}

impl ParquetRows {
    /// Reads a file.
    ///
    /// # Errors
    /// [`DataError::Unreadable`] when it is missing, truncated, damaged, compressed with a codec that is not
    /// supported, or has a column of an unsupported type; [`DataError::Empty`].
    pub fn open(path: &Path) -> Result<ParquetRows, DataError> {
        let origin = path.display().to_string();
        let unreadable = |reason: String| DataError::Unreadable {
            path: origin.clone(),
            reason,
        };
        let fingerprint = super::sha256_hex(&super::read_file(path)?);
        let file = File::open(path).map_err(|e| unreadable(e.to_string()))?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file)
            .map_err(|e| unreadable(e.to_string()))?;
        for group in builder.metadata().row_groups() {
            for column in group.columns() {
                if let codec @ (Compression::ZSTD(_) | Compression::BROTLI(_) | Compression::LZO) =
                    column.compression()
                {
                    return Err(unreadable(format!(
                        "column `{}` is compressed with {codec}; known are none, snappy, lz4 and gzip. Write the file anew, \
                         for example in Python: `import pyarrow.parquet as pq; \
                         pq.write_table(pq.read_table(\"OLD\"), \"NEW\", compression=\"snappy\")`",
                        column.column_path().string()
                    )));
                }
            }
        }
        for field in builder.schema().fields() {
            if let Some(unknown) = unsupported(field.data_type()) {
                return Err(unreadable(format!(
                    "column `{}` holds {unknown}; known are text, numbers, booleans, dictionaries of them, and lists and structs of these",
                    field.name()
                )));
            }
        }
        let batches = builder
            .build()
            .and_then(|reader| {
                reader
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(::parquet::errors::ParquetError::from)
            })
            .map_err(|e| unreadable(e.to_string()))?;
        let mut rows = 0;
        let ends: Vec<usize> = batches
            .iter()
            .map(|batch| {
                rows += batch.num_rows();
                rows
            })
            .collect();
        if rows == 0 {
            return Err(DataError::Empty { path: origin });
        }
        Ok(ParquetRows {
            origin,
            batches,
            ends,
            fingerprint,
        })
    }
}

impl DataLoaderInterface for ParquetRows {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        let part = self.ends.partition_point(|&end| end <= index);
        let Some(batch) = self.batches.get(part) else {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        };
        let row = index + batch.num_rows() - self.ends[part];
        Ok(batch
            .schema()
            .fields()
            .iter()
            .zip(batch.columns())
            .map(|(field, column)| (field.name().clone(), json(column, row)))
            .collect())
    }

    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

/// The first type inside `data_type` that [`json`] does not know.
fn unsupported(data_type: &DataType) -> Option<&DataType> {
    use DataType::*;
    match data_type {
        Null | Boolean | Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64
        | Float32 | Float64 | Utf8 | LargeUtf8 | Utf8View => None,
        List(item) | LargeList(item) | FixedSizeList(item, _) => unsupported(item.data_type()),
        Struct(fields) => fields.iter().find_map(|f| unsupported(f.data_type())),
        Dictionary(_, values) => unsupported(values),
        other => Some(other),
    }
}

/// The value of `array` at `row`.
fn json(array: &ArrayRef, row: usize) -> Value {
    if array.is_null(row) {
        return Value::Null;
    }
    let list = |items: ArrayRef| (0..items.len()).map(|i| json(&items, i)).collect::<Value>();
    match array.data_type() {
        DataType::Boolean => array.as_boolean().value(row).into(),
        DataType::Int8 => array.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => array.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => array.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => array.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => array.as_primitive::<UInt64Type>().value(row).into(),
        DataType::Float32 => array.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row).into(),
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Utf8View => array.as_string_view().value(row).into(),
        DataType::List(_) => list(array.as_list::<i32>().value(row)),
        DataType::LargeList(_) => list(array.as_list::<i64>().value(row)),
        DataType::FixedSizeList(..) => list(array.as_fixed_size_list().value(row)),
        DataType::Struct(fields) => fields
            .iter()
            .zip(array.as_struct().columns())
            .map(|(field, column)| (field.name().clone(), json(column, row)))
            .collect::<Map<_, _>>()
            .into(),
        DataType::Dictionary(..) => downcast_dictionary_array!(
            array => array.key(row).map_or(Value::Null, |key| json(array.values(), key)),
            _ => Value::Null
        ),
        _ => Value::Null,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ::parquet::arrow::ArrowWriter;
    use ::parquet::file::properties::WriterProperties;
    use arrow_array::builder::{Int32Builder, ListBuilder};
    use arrow_array::{
        BinaryArray, BooleanArray, DictionaryArray, Float32Array, Int64Array, StringArray,
        StructArray, UInt8Array,
    };
    use arrow_schema::Field;
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

    /// As writers store columns with few different texts.
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
    fn damaged_and_unknown_files_are_told() {
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

        let binary: ArrayRef = Arc::new(BinaryArray::from(vec![&b"x"[..]]));
        let batch = RecordBatch::try_from_iter([("image", binary)]).unwrap();
        write(&path, &batch, Compression::SNAPPY, 2);
        let error = ParquetRows::open(&path).unwrap_err().to_string();
        assert!(error.contains("column `image` holds Binary"), "{error}");
    }

    /// The codec byte of an uncompressed column chunk's metadata is set to Zstandard's, as a file of another writer
    /// would have it: this build cannot write such a file itself.
    #[test]
    fn unknown_codecs_are_told() {
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
        let error = ParquetRows::open(&path).unwrap_err().to_string();
        assert!(
            error.contains("column `question` is compressed with ZSTD"),
            "{error}"
        );
        assert!(error.contains("compression=\"snappy\""), "{error}");
    }
}
