//! Lossless conversions from the dtype that a stage writes to the dtype that another stage reads.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int64Type, UInt8Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, ListArray, PrimitiveArray};
use verl_words::batch::{BatchError, arrow_type};
use verl_words::field::DType;

/// `array`, scalar or ragged, with elements of dtype `to`. Every value is preserved exactly.
///
/// # Errors
/// [`BatchError::Type`] if there is no exact conversion between the two dtypes.
pub fn convert(
    array: &ArrayRef,
    key: &str,
    from: DType,
    to: DType,
) -> Result<ArrayRef, BatchError> {
    let Some(list) = array.as_list_opt::<i32>() else {
        return elements(array, key, from, to);
    };
    let values = elements(list.values(), key, from, to)?;
    let arrow_schema::DataType::List(item) = arrow_type(to, true) else {
        unreachable!("a ragged type is a list")
    };
    let list = ListArray::try_new(item, list.offsets().clone(), values, list.nulls().cloned())?;
    Ok(Arc::new(list))
}

fn elements(array: &ArrayRef, key: &str, from: DType, to: DType) -> Result<ArrayRef, BatchError> {
    let converted = match (from, to) {
        _ if from == to => Some(array.clone()),
        (DType::U8, DType::U32) => cast::<UInt8Type, UInt32Type>(array, u32::from),
        (DType::U8, DType::U64) => cast::<UInt8Type, UInt64Type>(array, u64::from),
        (DType::U8, DType::I64) => cast::<UInt8Type, Int64Type>(array, i64::from),
        (DType::U8, DType::F32) => cast::<UInt8Type, Float32Type>(array, f32::from),
        (DType::U8, DType::F64) => cast::<UInt8Type, Float64Type>(array, f64::from),
        (DType::U32, DType::U64) => cast::<UInt32Type, UInt64Type>(array, u64::from),
        (DType::U32, DType::I64) => cast::<UInt32Type, Int64Type>(array, i64::from),
        (DType::U32, DType::F64) => cast::<UInt32Type, Float64Type>(array, f64::from),
        (DType::F32, DType::F64) => cast::<Float32Type, Float64Type>(array, f64::from),
        _ => None,
    };
    converted.ok_or_else(|| BatchError::Type {
        key: key.to_owned(),
        wanted: to.to_string(),
        found: from.to_string(),
    })
}

fn cast<A: ArrowPrimitiveType, B: ArrowPrimitiveType>(
    array: &ArrayRef,
    exact: impl Fn(A::Native) -> B::Native,
) -> Option<ArrayRef> {
    let source = array.as_primitive_opt::<A>()?;
    let converted: PrimitiveArray<B> = source.unary(exact);
    Some(Arc::new(converted))
}

#[cfg(test)]
mod tests {
    use verl_words::batch::{Column, RaggedColumn};
    use verl_words::field::{Ragged, Scalar};

    use super::*;

    #[test]
    fn conversion_keeps_values_and_nulls() {
        let masks = Ragged::<u8>::build(RaggedColumn::from_rows([vec![1u8, 255], vec![], vec![7]]))
            .unwrap();
        let floats = convert(&masks.slice(1, 2), "m", DType::U8, DType::F32).unwrap();
        let view = Ragged::<f32>::view(&floats).unwrap();
        assert_eq!(
            view.rows().map(<[f32]>::to_vec).collect::<Vec<_>>(),
            vec![vec![], vec![7.0]]
        );

        let scores = Scalar::<f32>::build(vec![Some(0.1f32), None].into()).unwrap();
        let wide = convert(&scores, "s", DType::F32, DType::F64).unwrap();
        let view = Scalar::<f64>::view(&wide).unwrap();
        assert_eq!(
            view.rows().collect::<Vec<_>>(),
            vec![Some(f64::from(0.1f32)), None]
        );
    }

    #[test]
    fn lossy_conversions_are_rejected() {
        let ids = Scalar::<u64>::build(vec![1u64 << 60].into()).unwrap();
        assert!(matches!(
            convert(&ids, "ids", DType::U64, DType::F64),
            Err(BatchError::Type { .. })
        ));
    }
}
