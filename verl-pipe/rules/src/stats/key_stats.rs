//! Computes the statistics of a key: one pass over each column, straight from Arrow's buffers.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int64Type, UInt8Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, PrimitiveArray};
use arrow_schema::DataType;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::format::Side;
use crate::stats::row::{QUANTILES, StatRow};
use crate::stats::sketch::{Sketch, quantile};

/// Statistics of one part of one slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Partial {
    rows: u64,
    nulls: u64,
    count: u64,
    tokens: u64,
    zeros: u64,
    non_finite: u64,
    finite: u64,
    min: f64,
    max: f64,
    sum: f64,
    /// Mean of this part; the table's mean comes from the sum, which is exact for small whole numbers.
    mean: f64,
    /// Sum of squared distances from the mean.
    m2: f64,
    lengths: u64,
    length_sum: u64,
    length_min: u64,
    length_max: u64,
}

impl Default for Partial {
    fn default() -> Self {
        Partial {
            rows: 0,
            nulls: 0,
            count: 0,
            tokens: 0,
            zeros: 0,
            non_finite: 0,
            finite: 0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            sum: 0.0,
            mean: 0.0,
            m2: 0.0,
            lengths: 0,
            length_sum: 0,
            length_min: u64::MAX,
            length_max: 0,
        }
    }
}

impl Partial {
    fn length(&mut self, length: usize) {
        let length = length as u64;
        self.lengths += 1;
        self.length_sum += length;
        self.length_min = self.length_min.min(length);
        self.length_max = self.length_max.max(length);
    }

    /// Merges means and squared distances of two sets (Chan et al. 1983).
    fn merge(&mut self, other: &Partial) {
        let finite = self.finite + other.finite;
        if other.finite > 0 {
            let (own, new) = (self.finite as f64, other.finite as f64);
            let distance = other.mean - self.mean;
            self.mean += distance * new / finite as f64;
            self.m2 += other.m2 + distance * distance * own * new / finite as f64;
        }
        self.finite = finite;
        self.sum += other.sum;
        self.rows += other.rows;
        self.nulls += other.nulls;
        self.count += other.count;
        self.tokens += other.tokens;
        self.zeros += other.zeros;
        self.non_finite += other.non_finite;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.lengths += other.lengths;
        self.length_sum += other.length_sum;
        self.length_min = self.length_min.min(other.length_min);
        self.length_max = self.length_max.max(other.length_max);
    }
}

/// Statistics of one key on one side of one stage, under construction.
#[derive(Debug, Default)]
pub struct KeyStats {
    sketch: Sketch,
    hash: u64,
    /// By slice and part.
    partials: Vec<((usize, usize), Partial)>,
}

impl KeyStats {
    /// Adds part `at` (slice, part) of the column; `ids` are the rows' identities.
    pub fn add(&mut self, at: (usize, usize), array: &ArrayRef, ids: &[u64]) {
        let mut adder = Adder {
            sketch: &mut self.sketch,
            hash: self.hash,
            partial: Partial {
                rows: array.len() as u64,
                nulls: array.null_count() as u64,
                ..Partial::default()
            },
        };
        adder.column(array, ids);
        self.hash = adder.hash;
        self.partials.push((at, adder.partial));
    }

    /// The row of the table so far; `place` says which key it is.
    pub fn row(&mut self, place: Place<'_>) -> StatRow {
        self.partials.sort_by_key(|(at, _)| *at);
        let mut all = Partial::default();
        for (_, partial) in &self.partials {
            all.merge(partial);
        }
        let sketch = match place.brief {
            true => Vec::new(),
            false => self.sketch.buckets(),
        };
        let some = |value: f64| (all.finite > 0).then_some(value);
        let long = all.lengths > 0;
        StatRow {
            step: place.step,
            stage: place.stage.to_owned(),
            side: place.side,
            key: place.key.to_owned(),
            name: place.name.to_owned(),
            rows: all.rows,
            nulls: all.nulls,
            count: all.count,
            tokens: all.tokens,
            zeros: all.zeros,
            non_finite: all.non_finite,
            min: some(all.min),
            max: some(all.max),
            mean: some(all.sum / all.finite.max(1) as f64),
            std: some((all.m2 / all.finite.max(1) as f64).max(0.0).sqrt()),
            quantiles: QUANTILES.map(|q| quantile(&sketch, q)),
            sketch,
            hash: self.hash,
            length_min: long.then_some(all.length_min),
            length_mean: long.then(|| all.length_sum as f64 / all.lengths as f64),
            length_max: long.then_some(all.length_max),
            truncated_share: None,
            ratio: None,
        }
    }

    /// Whether anything was added.
    pub fn has_parts(&self) -> bool {
        !self.partials.is_empty()
    }

    /// Resets for the next step.
    pub fn clear(&mut self) {
        self.sketch.clear();
        self.hash = 0;
        self.partials.clear();
    }
}

/// Step, stage, side and names of a key.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Step of the run.
    pub step: u64,
    /// Name of the stage.
    pub stage: &'a str,
    /// Side of the stage.
    pub side: Side,
    /// The stage's own name of the key.
    pub key: &'a str,
    /// The pipeline's name of the key.
    pub name: &'a str,
    /// Whether to leave out sketch and quantiles, which cost most.
    pub brief: bool,
}

/// A numeric type of a column.
trait Number: Copy {
    fn number(self) -> f64;
}

macro_rules! number {
    ($($ty:ty),*) => {$( impl Number for $ty {
        #[inline]
        fn number(self) -> f64 {
            self as f64
        }
    } )*};
}
number!(u8, u32, u64, i64, f32, f64);

struct Adder<'a> {
    sketch: &'a mut Sketch,
    hash: u64,
    partial: Partial,
}

/// Seed of rows that are null, so that they differ from empty ones.
const NULL: u64 = 0x9e37_79b9_7f4a_7c15;

impl Adder<'_> {
    fn column(&mut self, array: &ArrayRef, ids: &[u64]) {
        match array.data_type() {
            DataType::Float32 => self.scalars::<Float32Type>(array, ids),
            DataType::Float64 => self.scalars::<Float64Type>(array, ids),
            DataType::Int64 => self.scalars::<Int64Type>(array, ids),
            DataType::UInt8 => self.scalars::<UInt8Type>(array, ids),
            DataType::UInt32 => self.scalars::<UInt32Type>(array, ids),
            DataType::UInt64 => self.scalars::<UInt64Type>(array, ids),
            DataType::Utf8 => self.texts(array, ids),
            DataType::List(item) => match item.data_type() {
                DataType::Float32 => self.lists::<Float32Type>(array, ids),
                DataType::Float64 => self.lists::<Float64Type>(array, ids),
                DataType::Int64 => self.lists::<Int64Type>(array, ids),
                DataType::UInt8 => self.lists::<UInt8Type>(array, ids),
                DataType::UInt32 => self.lists::<UInt32Type>(array, ids),
                DataType::UInt64 => self.lists::<UInt64Type>(array, ids),
                _ => self.others(array, ids),
            },
            _ => self.others(array, ids),
        }
    }

    fn row_hash(&mut self, bytes: &[u8], id: u64) {
        self.hash = self.hash.wrapping_add(xxh3_64_with_seed(bytes, id));
    }

    fn null_hash(&mut self, id: u64) {
        self.row_hash(&[], id ^ NULL);
    }

    fn scalars<T: ArrowPrimitiveType<Native: Number>>(&mut self, array: &ArrayRef, ids: &[u64]) {
        let array: &PrimitiveArray<T> = array.as_primitive();
        let (values, bytes) = (array.values(), array.values().inner().as_slice());
        let width = size_of::<T::Native>();
        self.partial.count += (array.len() - array.null_count()) as u64;
        if array.null_count() == 0 {
            self.numbers(values);
        } else {
            let valid: Vec<T::Native> = array.iter().flatten().collect();
            self.numbers(&valid);
        }
        for (row, (id, value)) in ids.iter().zip(bytes.chunks_exact(width)).enumerate() {
            match array.is_valid(row) {
                true => self.row_hash(value, *id),
                false => self.null_hash(*id),
            }
        }
    }

    fn lists<T: ArrowPrimitiveType<Native: Number>>(&mut self, array: &ArrayRef, ids: &[u64]) {
        let list = array.as_list::<i32>();
        let items: &PrimitiveArray<T> = list.values().as_primitive();
        if items.null_count() > 0 {
            return self.others(array, ids);
        }
        let (values, bytes) = (items.values(), items.values().inner().as_slice());
        let width = size_of::<T::Native>();
        let offsets = list.value_offsets();
        if list.null_count() == 0 {
            self.numbers(&values[offsets[0] as usize..offsets[list.len()] as usize]);
        }
        for (row, id) in ids.iter().enumerate() {
            if list.is_null(row) {
                self.null_hash(*id);
                continue;
            }
            let (start, end) = (offsets[row] as usize, offsets[row + 1] as usize);
            self.partial.length(end - start);
            self.partial.count += (end - start) as u64;
            self.partial.tokens += (end - start) as u64;
            if list.null_count() > 0 {
                self.numbers(&values[start..end]);
            }
            self.row_hash(&bytes[start * width..end * width], *id);
        }
    }

    fn texts(&mut self, array: &ArrayRef, ids: &[u64]) {
        let texts = array.as_string::<i32>();
        self.partial.count += (texts.len() - texts.null_count()) as u64;
        for (row, id) in ids.iter().enumerate() {
            if texts.is_null(row) {
                self.null_hash(*id);
                continue;
            }
            let text = texts.value(row);
            self.partial.length(text.chars().count());
            self.row_hash(text.as_bytes(), *id);
        }
    }

    /// Columns of other types, and lists with nulls inside: rows and hash only.
    fn others(&mut self, array: &ArrayRef, ids: &[u64]) {
        self.partial.count += (array.len() - array.null_count()) as u64;
        for (row, id) in ids.iter().enumerate() {
            match array.is_valid(row) {
                true => self.row_hash(format!("{:?}", array.slice(row, 1)).as_bytes(), *id),
                false => self.null_hash(*id),
            }
        }
    }

    #[inline]
    fn numbers<T: Number>(&mut self, values: &[T]) {
        let finite = |value: &T| value.number().is_finite();
        // Distances from a value of the column, so that large numbers that are close together do not lose digits.
        let Some(origin) = values.iter().find(|v| finite(v)).map(|v| v.number()) else {
            self.partial.non_finite += values.len() as u64;
            return;
        };
        let mut part = Partial::default();
        let (mut sum, mut squares) = (0.0, 0.0);
        for value in values {
            let value = value.number();
            if !value.is_finite() {
                part.non_finite += 1;
                continue;
            }
            part.finite += 1;
            part.zeros += u64::from(value == 0.0);
            part.min = part.min.min(value);
            part.max = part.max.max(value);
            part.sum += value;
            let distance = value - origin;
            sum += distance;
            squares += distance * distance;
            self.sketch.add(value as f32);
        }
        let n = part.finite as f64;
        part.mean = origin + sum / n;
        part.m2 = (squares - sum * sum / n).max(0.0);
        self.partial.merge(&part);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{Float32Array, ListArray, StringArray};
    use proptest::prelude::*;

    use super::*;

    const PLACE: Place<'_> = Place {
        step: 1,
        stage: "s",
        side: Side::Output,
        key: "k",
        name: "k",
        brief: false,
    };

    fn of(parts: &[(ArrayRef, Vec<u64>)]) -> StatRow {
        let mut stats = KeyStats::default();
        for (slice, (array, ids)) in parts.iter().enumerate() {
            stats.add((slice, 0), array, ids);
        }
        stats.row(PLACE)
    }

    fn lists(rows: &[Option<Vec<f32>>]) -> ArrayRef {
        let rows = rows
            .iter()
            .map(|row| row.as_ref().map(|row| row.iter().map(|v| Some(*v))));
        Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows))
    }

    #[test]
    fn numbers_by_hand() {
        let rows = [
            Some(vec![1.0, 2.0, f32::NAN]),
            None,
            Some(vec![]),
            Some(vec![0.0, -3.0]),
        ];
        let row = of(&[(lists(&rows), vec![5, 6, 7, 8])]);
        assert_eq!((row.rows, row.nulls, row.count, row.tokens), (4, 1, 5, 5));
        assert_eq!((row.zeros, row.non_finite), (1, 1));
        assert_eq!(
            (row.min, row.max, row.mean),
            (Some(-3.0), Some(2.0), Some(0.0))
        );
        // (1 + 4 + 0 + 9) / 4
        assert_eq!(row.std, Some(3.5f64.sqrt()));
        assert_eq!((row.length_min, row.length_max), (Some(0), Some(3)));
        assert_eq!(row.length_mean, Some(5.0 / 3.0));
        assert_eq!(row.quantiles[3], Some(1.0));
    }

    #[test]
    fn texts_have_lengths_in_characters() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("née"), None, Some("")]));
        let row = of(&[(texts, vec![1, 2, 3])]);
        assert_eq!((row.count, row.nulls, row.mean), (2, 1, None));
        assert_eq!((row.length_min, row.length_max), (Some(0), Some(3)));
    }

    #[test]
    fn large_numbers_close_together_have_an_exact_deviation() {
        let numbers: ArrayRef =
            Arc::new(arrow_array::UInt64Array::from(vec![1 << 40, (1 << 40) + 2]));
        assert_eq!(of(&[(numbers, vec![1, 2])]).std, Some(1.0));
        let infinite: ArrayRef = Arc::new(Float32Array::from(vec![f32::INFINITY; 2]));
        let row = of(&[(infinite, vec![1, 2])]);
        assert_eq!((row.non_finite, row.mean, row.std), (2, None, None));
    }

    #[test]
    fn nulls_empty_lists_and_single_bits_change_the_hash() {
        let hash = |row: Option<Vec<f32>>| of(&[(lists(&[row]), vec![9])]).hash;
        let all = [
            hash(None),
            hash(Some(vec![])),
            hash(Some(vec![0.0])),
            hash(Some(vec![-0.0])),
            hash(Some(vec![f32::from_bits(0x7fc0_0000)])),
            hash(Some(vec![f32::from_bits(0x7fc0_0001)])),
        ];
        let distinct: std::collections::BTreeSet<u64> = all.into();
        assert_eq!(distinct.len(), all.len());
    }

    proptest! {
        #[test]
        fn the_row_does_not_depend_on_slices_or_their_order(
            rows in prop::collection::vec(prop::option::of(prop::collection::vec(-9f32..9.0, 0..5)), 1..20),
            cut in 0usize..20,
        ) {
            let ids: Vec<u64> = (0..rows.len() as u64).map(|id| id * 4096).collect();
            let array = lists(&rows);
            let whole = of(&[(array.clone(), ids.clone())]);
            let cut = cut % rows.len();
            let (head, tail) = (array.slice(0, cut), array.slice(cut, rows.len() - cut));
            let cut_row = of(&[(head.clone(), ids[..cut].to_vec()), (tail.clone(), ids[cut..].to_vec())]);
            let mut reversed = KeyStats::default();
            reversed.add((1, 0), &tail, &ids[cut..]);
            reversed.add((0, 0), &head, &ids[..cut]);
            // The bits are the same in any order of arrival.
            prop_assert_eq!(&reversed.row(PLACE), &cut_row);
            let exact = |row: &StatRow| (row.rows, row.nulls, row.count, row.zeros, row.hash, row.min.map(f64::to_bits), row.sketch.clone());
            prop_assert_eq!(exact(&whole), exact(&cut_row));
            let near = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => (a - b).abs() < 1e-9,
                (a, b) => a == b,
            };
            prop_assert!(near(whole.mean, cut_row.mean) && near(whole.std, cut_row.std));
        }
    }
}
