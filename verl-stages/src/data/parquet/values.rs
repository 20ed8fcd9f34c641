//! Converts Arrow values to JSON.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Date64Type, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type,
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    Time32MillisecondType, Time32SecondType, Time64MicrosecondType, Time64NanosecondType,
    TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType,
    TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, downcast_dictionary_array};
use arrow_schema::{DataType, TimeUnit};
use serde_json::{Map, Value};

/// The first type inside `data_type` that [`json`] does not support, in words.
pub(super) fn unsupported(data_type: &DataType) -> Option<String> {
    use DataType::*;
    match data_type {
        Null | Boolean | Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64
        | Float16 | Float32 | Float64 | Utf8 | LargeUtf8 | Utf8View | Date32 | Date64
        | Time32(_) | Time64(_) | Timestamp(..) | Decimal32(..) | Decimal64(..)
        | Decimal128(..) | Decimal256(..) => None,
        List(item) | LargeList(item) | FixedSizeList(item, _) => unsupported(item.data_type()),
        Struct(fields) => fields.iter().find_map(|f| unsupported(f.data_type())),
        Dictionary(_, values) => unsupported(values),
        Map(entries, _) => match entries.data_type() {
            Struct(fields)
                if matches!(
                    fields.first().map(|key| key.data_type()),
                    Some(Utf8 | LargeUtf8)
                ) =>
            {
                unsupported(entries.data_type())
            }
            other => Some(format!("a map without text keys ({other})")),
        },
        Binary | LargeBinary | BinaryView | FixedSizeBinary(_) => {
            Some(format!("bytes that are not text ({data_type})"))
        }
        other => Some(other.to_string()),
    }
}

/// The value of `array` at `row`.
pub(super) fn json(array: &ArrayRef, row: usize) -> Value {
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
        DataType::Float16 => f32::from(array.as_primitive::<Float16Type>().value(row)).into(),
        DataType::Float32 => array.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row).into(),
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Utf8View => array.as_string_view().value(row).into(),
        DataType::Decimal32(..) => array
            .as_primitive::<Decimal32Type>()
            .value_as_string(row)
            .into(),
        DataType::Decimal64(..) => array
            .as_primitive::<Decimal64Type>()
            .value_as_string(row)
            .into(),
        DataType::Decimal128(..) => array
            .as_primitive::<Decimal128Type>()
            .value_as_string(row)
            .into(),
        DataType::Decimal256(..) => array
            .as_primitive::<Decimal256Type>()
            .value_as_string(row)
            .into(),
        DataType::Date32
        | DataType::Date64
        | DataType::Time32(_)
        | DataType::Time64(_)
        | DataType::Timestamp(..) => moment(array, row).map_or(Value::Null, Value::String),
        DataType::List(_) => list(array.as_list::<i32>().value(row)),
        DataType::LargeList(_) => list(array.as_list::<i64>().value(row)),
        DataType::FixedSizeList(..) => list(array.as_fixed_size_list().value(row)),
        DataType::Struct(fields) => fields
            .iter()
            .zip(array.as_struct().columns())
            .map(|(field, column)| (field.name().clone(), json(column, row)))
            .collect::<Map<_, _>>()
            .into(),
        DataType::Map(..) => map(array, row),
        DataType::Dictionary(..) => downcast_dictionary_array!(
            array => array.key(row).map_or(Value::Null, |key| json(array.values(), key)),
            _ => Value::Null
        ),
        _ => Value::Null,
    }
}

fn map(array: &ArrayRef, row: usize) -> Value {
    let entries = array.as_map().value(row);
    let [keys, values] = entries.columns() else {
        return Value::Null;
    };
    let pairs = (0..entries.len()).filter_map(|entry| match json(keys, entry) {
        Value::String(key) => Some((key, json(values, entry))),
        _ => None,
    });
    pairs.collect::<Map<_, _>>().into()
}

/// A date or time in ISO 8601; a timestamp with a time zone in UTC, with a `Z`.
fn moment(array: &ArrayRef, row: usize) -> Option<String> {
    macro_rules! written {
        ($type:ty, $value:ident) => {
            array
                .as_primitive::<$type>()
                .$value(row)
                .map(|value| format!("{value:?}"))
        };
    }
    match array.data_type() {
        DataType::Date32 => written!(Date32Type, value_as_date),
        DataType::Date64 => written!(Date64Type, value_as_date),
        DataType::Time32(TimeUnit::Second) => written!(Time32SecondType, value_as_time),
        DataType::Time32(_) => written!(Time32MillisecondType, value_as_time),
        DataType::Time64(TimeUnit::Nanosecond) => written!(Time64NanosecondType, value_as_time),
        DataType::Time64(_) => written!(Time64MicrosecondType, value_as_time),
        DataType::Timestamp(unit, zone) => {
            let text = match unit {
                TimeUnit::Second => written!(TimestampSecondType, value_as_datetime),
                TimeUnit::Millisecond => written!(TimestampMillisecondType, value_as_datetime),
                TimeUnit::Microsecond => written!(TimestampMicrosecondType, value_as_datetime),
                TimeUnit::Nanosecond => written!(TimestampNanosecondType, value_as_datetime),
            };
            text.map(|text| if zone.is_some() { text + "Z" } else { text })
        }
        _ => None,
    }
}
