//! One key of one row as a slice of plain values of any type.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int64Type, UInt8Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;

use crate::compare::difference::{DifferenceKind, Tolerance};

/// The values of one row; a scalar is a slice of one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell<'a> {
    Null,
    Bool(Vec<bool>),
    F32(&'a [f32]),
    F64(&'a [f64]),
    I64(&'a [i64]),
    U8(&'a [u8]),
    U32(&'a [u32]),
    U64(&'a [u64]),
    Text(Vec<&'a str>),
    /// A type that keys do not have.
    Other(String),
}

/// A difference within a cell.
pub(crate) struct CellDifference {
    pub kind: DifferenceKind,
    pub index: Option<usize>,
    pub left: String,
    pub right: String,
    pub ulps: Option<u64>,
    pub absolute: Option<f64>,
}

/// The result of comparing two cells.
#[derive(Default)]
pub(crate) struct CellComparison {
    pub count: u64,
    /// Largest and total finite distance between two numbers.
    pub largest: f64,
    pub total: f64,
    /// Pairs of numbers.
    pub numbers: u64,
    pub first: Option<CellDifference>,
}

/// The values of `row`; `None` only for a row past the end.
pub(crate) fn cell(array: &ArrayRef, row: usize) -> Option<Cell<'_>> {
    if row >= array.len() {
        return None;
    }
    if array.is_null(row) {
        return Some(Cell::Null);
    }
    let (values, start, end) = match array.as_list_opt::<i32>() {
        Some(list) => {
            let offsets = list.value_offsets();
            (
                list.values(),
                offsets[row] as usize,
                offsets[row + 1] as usize,
            )
        }
        None => (array, row, row + 1),
    };
    Some(match values.data_type() {
        DataType::Boolean => {
            let values = values.as_boolean();
            Cell::Bool((start..end).map(|at| values.value(at)).collect())
        }
        DataType::Float32 => Cell::F32(&slice::<Float32Type>(values)[start..end]),
        DataType::Float64 => Cell::F64(&slice::<Float64Type>(values)[start..end]),
        DataType::Int64 => Cell::I64(&slice::<Int64Type>(values)[start..end]),
        DataType::UInt8 => Cell::U8(&slice::<UInt8Type>(values)[start..end]),
        DataType::UInt32 => Cell::U32(&slice::<UInt32Type>(values)[start..end]),
        DataType::UInt64 => Cell::U64(&slice::<UInt64Type>(values)[start..end]),
        DataType::Utf8 => {
            let values = values.as_string::<i32>();
            Cell::Text((start..end).map(|at| values.value(at)).collect())
        }
        other => Cell::Other(other.to_string()),
    })
}

fn slice<T: ArrowPrimitiveType>(array: &ArrayRef) -> &[T::Native] {
    array.as_primitive::<T>().values()
}

impl Cell<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Cell::Null => 0,
            Cell::Bool(values) => values.len(),
            Cell::F32(values) => values.len(),
            Cell::F64(values) => values.len(),
            Cell::I64(values) => values.len(),
            Cell::U8(values) => values.len(),
            Cell::U32(values) => values.len(),
            Cell::U64(values) => values.len(),
            Cell::Text(values) => values.len(),
            Cell::Other(_) => 1,
        }
    }

    /// The value at `index` as text; values with different bits have different texts.
    pub(crate) fn show(&self, index: usize) -> String {
        match self {
            Cell::Null => "null".to_owned(),
            Cell::Bool(values) => values[index].to_string(),
            Cell::F32(values) => float(f64::from(values[index]), &format!("{:?}", values[index])),
            Cell::F64(values) => float(values[index], &format!("{:?}", values[index])),
            Cell::I64(values) => values[index].to_string(),
            Cell::U8(values) => values[index].to_string(),
            Cell::U32(values) => values[index].to_string(),
            Cell::U64(values) => values[index].to_string(),
            Cell::Text(values) => format!("{:?}", values[index]),
            Cell::Other(name) => format!("a value of type {name}"),
        }
    }

    /// The value at `index` as a number, if it is one.
    pub(crate) fn number(&self, index: usize) -> Option<f64> {
        match self {
            Cell::F32(values) => values.get(index).map(|v| f64::from(*v)),
            Cell::F64(values) => values.get(index).copied(),
            Cell::I64(values) => values.get(index).map(|v| *v as f64),
            Cell::U8(values) => values.get(index).map(|v| f64::from(*v)),
            Cell::U32(values) => values.get(index).map(|v| f64::from(*v)),
            Cell::U64(values) => values.get(index).map(|v| *v as f64),
            _ => None,
        }
    }

    /// Position of the first float that is not finite.
    pub(crate) fn first_non_finite(&self) -> Option<usize> {
        match self {
            Cell::F32(values) => values.iter().position(|v| !v.is_finite()),
            Cell::F64(values) => values.iter().position(|v| !v.is_finite()),
            _ => None,
        }
    }

    fn type_name(&self) -> &str {
        match self {
            Cell::Null => "null",
            Cell::Bool(_) => "bool",
            Cell::F32(_) => "f32",
            Cell::F64(_) => "f64",
            Cell::I64(_) => "i64",
            Cell::U8(_) => "u8",
            Cell::U32(_) => "u32",
            Cell::U64(_) => "u64",
            Cell::Text(_) => "text",
            Cell::Other(name) => name,
        }
    }

    /// Compares with another version of the same cell.
    pub(crate) fn differs(&self, other: &Cell<'_>, tolerance: Tolerance) -> CellComparison {
        let mut found = CellComparison::default();
        match (self, other) {
            (Cell::Null, Cell::Null) => {}
            (Cell::F32(a), Cell::F32(b)) => {
                self.floats(
                    other,
                    a,
                    b,
                    |v| f64::from(*v),
                    |a, b| a.to_bits() == b.to_bits(),
                    tolerance,
                    &mut found,
                );
            }
            (Cell::F64(a), Cell::F64(b)) => {
                self.floats(
                    other,
                    a,
                    b,
                    |v| *v,
                    |a, b| a.to_bits() == b.to_bits(),
                    tolerance,
                    &mut found,
                );
            }
            (Cell::Bool(a), Cell::Bool(b)) => self.exact(other, a, b, &mut found),
            (Cell::I64(a), Cell::I64(b)) => self.exact(other, a, b, &mut found),
            (Cell::U8(a), Cell::U8(b)) => self.exact(other, a, b, &mut found),
            (Cell::U32(a), Cell::U32(b)) => self.exact(other, a, b, &mut found),
            (Cell::U64(a), Cell::U64(b)) => self.exact(other, a, b, &mut found),
            (Cell::Text(a), Cell::Text(b)) => self.exact(other, a, b, &mut found),
            _ => {
                let kind = match (self, other) {
                    (Cell::Null, _) | (_, Cell::Null) => DifferenceKind::Value,
                    _ => DifferenceKind::Type,
                };
                let show = |cell: &Cell<'_>| match (kind, cell) {
                    (DifferenceKind::Type, cell) => format!("type {}", cell.type_name()),
                    (_, Cell::Null) => "null".to_owned(),
                    (_, cell) if cell.len() == 1 => cell.show(0),
                    (_, cell) => format!("{} values", cell.len()),
                };
                found.note(kind, None, show(self), show(other));
            }
        }
        found
    }

    fn exact<T: PartialEq>(&self, other: &Cell<'_>, a: &[T], b: &[T], found: &mut CellComparison) {
        found.lengths(a.len(), b.len());
        if self.number(0).is_some() {
            found.numbers += a.len().min(b.len()) as u64;
        }
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            if a != b {
                found.note(
                    DifferenceKind::Value,
                    Some(index),
                    self.show(index),
                    other.show(index),
                );
                let (x, y) = (self.number(index), other.number(index));
                if let (Some(x), Some(y)) = (x, y) {
                    found.measure(x, y);
                }
                found.distance(x, y, None);
            }
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one body for both widths of floats"
    )]
    fn floats<T>(
        &self,
        other: &Cell<'_>,
        a: &[T],
        b: &[T],
        wide: impl Fn(&T) -> f64,
        same: impl Fn(&T, &T) -> bool,
        tolerance: Tolerance,
        found: &mut CellComparison,
    ) {
        found.lengths(a.len(), b.len());
        found.numbers += a.len().min(b.len()) as u64;
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            if same(a, b) {
                continue;
            }
            let (x, y) = (wide(a), wide(b));
            found.measure(x, y);
            if tolerance.allows(x, y) {
                continue;
            }
            found.note(
                DifferenceKind::Value,
                Some(index),
                self.show(index),
                other.show(index),
            );
            let ulps = match self {
                Cell::F32(_) => ulps_f32(x as f32, y as f32),
                _ => ulps_f64(x, y),
            };
            found.distance(Some(x), Some(y), ulps);
        }
    }
}

impl CellComparison {
    fn note(&mut self, kind: DifferenceKind, index: Option<usize>, left: String, right: String) {
        self.count += 1;
        if self.first.is_none() {
            self.first = Some(CellDifference {
                kind,
                index,
                left,
                right,
                ulps: None,
                absolute: None,
            });
        }
    }

    fn lengths(&mut self, left: usize, right: usize) {
        if left != right {
            let show = |len: usize| format!("length {len}");
            self.note(DifferenceKind::Length, None, show(left), show(right));
        }
    }

    fn measure(&mut self, left: f64, right: f64) {
        let distance = (left - right).abs();
        if distance.is_finite() {
            self.largest = self.largest.max(distance);
            self.total += distance;
        }
    }

    /// Sets the distance of the difference noted last, if it is the first.
    fn distance(&mut self, left: Option<f64>, right: Option<f64>, ulps: Option<u64>) {
        let (Some(first), Some(left), Some(right)) = (&mut self.first, left, right) else {
            return;
        };
        if self.count == 1 {
            first.ulps = ulps;
            first.absolute = Some((left - right).abs()).filter(|distance| distance.is_finite());
        }
    }
}

/// The shortest text; for NaN with its bits, since there are many NaNs.
fn float(value: f64, shortest: &str) -> String {
    if value.is_nan() {
        format!("{shortest} ({:#x})", value.to_bits())
    } else {
        shortest.to_owned()
    }
}

/// Representable numbers between two floats; `None` if one is NaN.
pub(crate) fn ulps_f32(a: f32, b: f32) -> Option<u64> {
    let ordered = |v: f32| {
        let bits = i64::from(v.to_bits() as i32);
        if bits < 0 {
            i64::from(i32::MIN) - bits
        } else {
            bits
        }
    };
    (!a.is_nan() && !b.is_nan()).then(|| ordered(a).abs_diff(ordered(b)))
}

/// As [`ulps_f32`].
pub(crate) fn ulps_f64(a: f64, b: f64) -> Option<u64> {
    let ordered = |v: f64| {
        let bits = i128::from(v.to_bits() as i64);
        if bits < 0 {
            i128::from(i64::MIN) - bits
        } else {
            bits
        }
    };
    let distance = || ordered(a).abs_diff(ordered(b));
    (!a.is_nan() && !b.is_nan()).then(|| u64::try_from(distance()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_representable_numbers() {
        assert_eq!(ulps_f32(1.0, 1.0), Some(0));
        assert_eq!(ulps_f32(1.0, f32::from_bits(1.0f32.to_bits() + 3)), Some(3));
        // The two representations of zero have nothing in between.
        assert_eq!(ulps_f32(0.0, -0.0), Some(0));
        assert_eq!(ulps_f32(f32::from_bits(1), -f32::from_bits(1)), Some(2));
        assert_eq!(ulps_f32(1.0, f32::NAN), None);
        assert_eq!(
            ulps_f64(-1.0, f64::from_bits((-1.0f64).to_bits() + 2)),
            Some(2)
        );
        assert!(ulps_f64(f64::MAX, f64::MIN).is_some_and(|ulps| ulps > 1 << 62));
    }

    #[test]
    fn texts_differ_where_bits_differ() {
        let values = [0.1f32, f32::from_bits(0.1f32.to_bits() + 1)];
        let cell = Cell::F32(&values);
        assert_ne!(cell.show(0), cell.show(1));
        let nan = [f32::NAN];
        assert_eq!(Cell::F32(&nan).show(0), "NaN (0x7ff8000000000000)");
    }
}
