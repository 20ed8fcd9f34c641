//! Columns: ragged, scalar and text values into Arrow arrays and back.

use std::sync::Arc;

use arrow_array::builder::{ListBuilder, PrimitiveBuilder};
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int64Type, UInt8Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, ListArray, PrimitiveArray, StringArray};
use arrow_schema::{DataType, Field as ArrowField};

use super::BatchError;
use crate::field::{ColumnKind, DType, Element, Ragged, Scalar, Text};

/// Rust element type with its Arrow counterpart.
pub trait ArrowElement: Element + arrow_buffer::ArrowNativeType {
    /// Arrow's name of the type.
    type Arrow: ArrowPrimitiveType<Native = Self>;
}

macro_rules! arrow_element {
    ($($ty:ty => $arrow:ty),*) => {$( impl ArrowElement for $ty { type Arrow = $arrow; } )*};
}
arrow_element!(u8 => UInt8Type, u32 => UInt32Type, u64 => UInt64Type, i64 => Int64Type, f32 => Float32Type, f64 => Float64Type);

/// Arrow's data type of a dtype, as a scalar or a ragged column.
pub fn arrow_type(dtype: DType, ragged: bool) -> DataType {
    let item = match dtype {
        DType::Bool => DataType::Boolean,
        DType::U8 => DataType::UInt8,
        DType::U32 => DataType::UInt32,
        DType::U64 => DataType::UInt64,
        DType::I64 => DataType::Int64,
        DType::F32 => DataType::Float32,
        DType::F64 => DataType::Float64,
        DType::Text => DataType::Utf8,
    };
    if ragged {
        DataType::List(Arc::new(ArrowField::new("item", item, true)))
    } else {
        item
    }
}

/// A ragged column under construction: a list of numbers per row.
#[derive(Debug, Clone, PartialEq)]
pub struct RaggedColumn<T> {
    values: Vec<T>,
    ends: Vec<usize>,
}

impl<T: Copy> Default for RaggedColumn<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Copy> RaggedColumn<T> {
    /// An empty column.
    pub fn new() -> Self {
        RaggedColumn {
            values: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// A column of the given rows.
    pub fn from_rows<R: AsRef<[T]>>(rows: impl IntoIterator<Item = R>) -> Self {
        let mut column = Self::new();
        for row in rows {
            column.push(row.as_ref());
        }
        column
    }

    /// Appends a row.
    pub fn push(&mut self, row: &[T]) {
        self.values.extend_from_slice(row);
        self.ends.push(self.values.len());
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// A ragged column as read from a batch.
#[derive(Debug, Clone, Copy)]
pub struct RaggedView<'a, T> {
    values: &'a [T],
    offsets: &'a [i32],
}

impl<'a, T> RaggedView<'a, T> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values of row `index`.
    pub fn row(&self, index: usize) -> &'a [T] {
        &self.values[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// Length of row `index`.
    pub fn row_len(&self, index: usize) -> usize {
        (self.offsets[index + 1] - self.offsets[index]) as usize
    }

    /// The rows in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &'a [T]> + use<'a, '_, T> {
        (0..self.len()).map(|i| self.row(i))
    }

    /// All values of all rows, one after the other.
    pub fn values(&self) -> &'a [T] {
        &self.values[self.offsets[0] as usize..self.offsets[self.len()] as usize]
    }
}

/// A scalar column as read from a batch.
#[derive(Debug, Clone, Copy)]
pub struct ScalarView<'a, T: ArrowElement> {
    array: &'a PrimitiveArray<T::Arrow>,
}

impl<'a, T: ArrowElement> ScalarView<'a, T> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.array.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.array.is_empty()
    }

    /// The value of row `index`, `None` where it is null.
    pub fn row(&self, index: usize) -> Option<T> {
        self.array.is_valid(index).then(|| self.array.value(index))
    }

    /// All values; a null slot contains an arbitrary number.
    pub fn values(&self) -> &'a [T] {
        self.array.values()
    }

    /// The values in order, `None` where one is null.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Option<T>> + use<'a, '_, T> {
        (0..self.len()).map(|i| self.row(i))
    }
}

/// A text column as read from a batch.
#[derive(Debug, Clone, Copy)]
pub struct TextView<'a> {
    array: &'a StringArray,
}

impl<'a> TextView<'a> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.array.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.array.is_empty()
    }

    /// The text of row `index`; empty where it is null.
    pub fn row(&self, index: usize) -> &'a str {
        if self.array.is_valid(index) {
            self.array.value(index)
        } else {
            ""
        }
    }

    /// The texts in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &'a str> + use<'a, '_> {
        (0..self.len()).map(|i| self.row(i))
    }
}

/// A column kind that can be read from and written to a batch.
pub trait Column: ColumnKind {
    /// What [`Batch::put`](super::Batch::put) takes.
    type Data;
    /// What [`Batch::get`](super::Batch::get) returns.
    type View<'a>;
    /// Builds the Arrow array.
    fn build(data: Self::Data) -> Result<ArrayRef, BatchError>;
    /// Views the Arrow array; `None` if it has another type.
    fn view(array: &ArrayRef) -> Option<Self::View<'_>>;
}

/// Values for a scalar column: all present, or some null.
#[derive(Debug, Clone)]
pub struct ScalarColumn<T>(Vec<Option<T>>);

impl<T> From<Vec<T>> for ScalarColumn<T> {
    fn from(values: Vec<T>) -> Self {
        ScalarColumn(values.into_iter().map(Some).collect())
    }
}
impl<T> From<Vec<Option<T>>> for ScalarColumn<T> {
    fn from(values: Vec<Option<T>>) -> Self {
        ScalarColumn(values)
    }
}

impl<T: ArrowElement> Column for Scalar<T> {
    type Data = ScalarColumn<T>;
    type View<'a> = ScalarView<'a, T>;

    fn build(data: ScalarColumn<T>) -> Result<ArrayRef, BatchError> {
        Ok(Arc::new(
            data.0.into_iter().collect::<PrimitiveArray<T::Arrow>>(),
        ))
    }

    fn view(array: &ArrayRef) -> Option<ScalarView<'_, T>> {
        array
            .as_any()
            .downcast_ref()
            .map(|array| ScalarView { array })
    }
}

impl<T: ArrowElement> Column for Ragged<T> {
    type Data = RaggedColumn<T>;
    type View<'a> = RaggedView<'a, T>;

    fn build(data: RaggedColumn<T>) -> Result<ArrayRef, BatchError> {
        if data.values.len() > i32::MAX as usize {
            return Err(BatchError::Arrow(format!(
                "{} values in one column; split the batch",
                data.values.len()
            )));
        }
        let mut builder = ListBuilder::new(PrimitiveBuilder::<T::Arrow>::with_capacity(
            data.values.len(),
        ));
        let mut start = 0;
        for end in data.ends {
            builder.values().append_slice(&data.values[start..end]);
            builder.append(true);
            start = end;
        }
        Ok(Arc::new(builder.finish()))
    }

    fn view(array: &ArrayRef) -> Option<RaggedView<'_, T>> {
        let list = array.as_any().downcast_ref::<ListArray>()?;
        let values = list
            .values()
            .as_any()
            .downcast_ref::<PrimitiveArray<T::Arrow>>()?;
        Some(RaggedView {
            values: values.values(),
            offsets: list.value_offsets(),
        })
    }
}

impl Column for Text {
    type Data = Vec<String>;
    type View<'a> = TextView<'a>;

    fn build(data: Vec<String>) -> Result<ArrayRef, BatchError> {
        Ok(Arc::new(StringArray::from(data)))
    }

    fn view(array: &ArrayRef) -> Option<TextView<'_>> {
        array
            .as_any()
            .downcast_ref()
            .map(|array| TextView { array })
    }
}
