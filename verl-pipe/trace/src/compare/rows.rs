//! Compares two versions of the same rows value by value: bit by bit, or within a tolerance.
//!
//! Rows are matched by identity, never by position, so the order in which a stage emitted them does not matter.

use std::collections::HashMap;

use arrow_array::Array;
use arrow_schema::DataType;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId, SAMPLE_ID};

use crate::compare::cell::{Cell, cell};
use crate::compare::difference::{Comparison, Difference, DifferenceKind, Tolerance};
use crate::files::RecordedStage;

/// Rows of several batches, found by identity.
pub(crate) struct Rows<'a> {
    batches: Vec<&'a Batch>,
    places: HashMap<u64, (usize, usize)>,
    /// Identities in order of arrival.
    ids: Vec<u64>,
    pub(crate) repeated: Vec<u64>,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(batches: impl IntoIterator<Item = &'a Batch>) -> Rows<'a> {
        let mut rows = Rows {
            batches: batches.into_iter().collect(),
            places: HashMap::new(),
            ids: Vec::new(),
            repeated: Vec::new(),
        };
        for (at, batch) in rows.batches.iter().enumerate() {
            for (row, id) in batch.ids().iter().enumerate() {
                match rows.places.insert(id.0, (at, row)) {
                    Some(_) => rows.repeated.push(id.0),
                    None => rows.ids.push(id.0),
                }
            }
        }
        rows
    }

    pub(crate) fn ids(&self) -> &[u64] {
        &self.ids
    }

    pub(crate) fn has(&self, id: u64) -> bool {
        self.places.contains_key(&id)
    }

    /// Whether some batch has the key; a stage without rows has none.
    pub(crate) fn has_key(&self, key: &str) -> bool {
        self.batches.iter().any(|batch| batch.has(key))
    }

    /// Whether the key has a list per row.
    fn is_list(&self, key: &str) -> bool {
        let column = self.batches.iter().find_map(|batch| batch.column(key));
        column.is_some_and(|column| matches!(column.data_type(), DataType::List(_)))
    }

    pub(crate) fn cell(&self, id: u64, key: &str) -> Option<Cell<'a>> {
        let (batch, row) = self.places.get(&id)?;
        let batch: &'a Batch = self.batches[*batch];
        cell(batch.column(key)?, *row)
    }

    /// Identities in declared order: by group in the order of the stage's input, then by sample.
    pub(crate) fn ordered(&self, input: &[u64]) -> Vec<u64> {
        let mut rank: HashMap<u64, usize> = HashMap::new();
        for (at, id) in input.iter().enumerate() {
            rank.entry(*id).or_insert(at);
        }
        let mut groups: HashMap<u64, usize> = HashMap::new();
        for (at, id) in input.iter().enumerate() {
            groups.entry(RowId(*id).group()).or_insert(at);
        }
        let place = |id: u64| {
            let exact = rank.get(&id);
            exact.or_else(|| groups.get(&RowId(id).group())).copied()
        };
        let mut ids = self.ids.clone();
        ids.sort_by_key(|id| (place(*id).unwrap_or(usize::MAX), place(*id).map(|_| *id)));
        ids
    }
}

/// The rows of a stage, in declared order: its output rows, or its input rows if it emits none.
pub(crate) fn rows_of(recorded: &RecordedStage) -> Vec<RowId> {
    let given = recorded.input_ids();
    let emitted = Rows::new(recorded.outputs.iter().map(|output| &output.batch));
    let ids = match emitted.ids().is_empty() {
        true => given,
        false => emitted.ordered(&given),
    };
    ids.into_iter().map(RowId).collect()
}

/// A key to compare: its name on the left, its name on the right, and the tolerance.
pub(crate) struct ComparedKey<'a> {
    /// Name on the left.
    pub left: &'a str,
    /// Name on the right.
    pub right: &'a str,
    /// How far apart floats may be.
    pub tolerance: Tolerance,
}

/// How rows of the two sides are paired.
pub(crate) struct Pairing<'a> {
    /// Name of the stage.
    pub stage: &'a str,
    /// Rows of the left side in declared order.
    pub order: &'a [u64],
    /// The row on the right that is paired with one on the left.
    pub partner: &'a dyn Fn(u64) -> u64,
    /// Whether a missing row counts as one with null values.
    pub absent_is_null: bool,
    /// Rows of the right side in declared order, if those without a partner are differences too.
    pub both_ways: Option<&'a [u64]>,
}

/// Compares `keys` of rows of two sides.
pub(crate) fn compare_rows(
    pairing: &Pairing<'_>,
    keys: &[ComparedKey<'_>],
    left: &Rows<'_>,
    right: &Rows<'_>,
) -> Comparison {
    let mut found = Comparison {
        rows: pairing.order.len(),
        ..Comparison::default()
    };
    let row_difference =
        |row, id, kind| Difference::new(pairing.stage, SAMPLE_ID, kind).at(row, id);
    let words = ["more than once", "once"];
    for (side, left_word, right_word) in [(left, words[0], words[1]), (right, words[1], words[0])] {
        for id in &side.repeated {
            let row = pairing.order.iter().position(|other| other == id);
            found.note(|| {
                row_difference(row.unwrap_or(0), *id, DifferenceKind::RepeatedRow)
                    .values(left_word, right_word)
            });
        }
    }
    if !pairing.absent_is_null {
        for (row, id) in pairing.order.iter().enumerate() {
            if !right.has((pairing.partner)(*id)) {
                found.note(|| {
                    row_difference(row, *id, DifferenceKind::Row).values("present", "missing")
                });
            }
        }
    }
    for (row, id) in pairing.both_ways.unwrap_or_default().iter().enumerate() {
        if !left.has(*id) && !pairing.absent_is_null {
            found.note(|| {
                row_difference(row, *id, DifferenceKind::Row).values("missing", "present")
            });
        }
    }
    for key in keys {
        compare_key(pairing, key, left, right, &mut found);
    }
    found
}

/// Joins `length 5` and `length 7` to `lengths 5 and 7`; likewise for types.
fn unlike(left: &str, right: &str) -> Option<String> {
    let ((what, left), (_, right)) = (left.split_once(' ')?, right.split_once(' ')?);
    Some(format!("{what}s {left} and {right}"))
}

fn compare_key(
    pairing: &Pairing<'_>,
    key: &ComparedKey<'_>,
    left: &Rows<'_>,
    right: &Rows<'_>,
    found: &mut Comparison,
) {
    let (in_left, in_right) = (left.has_key(key.left), right.has_key(key.right));
    if in_left != in_right && !pairing.order.is_empty() {
        let word = |has: bool| if has { "present" } else { "missing" };
        found.note(|| {
            Difference::new(pairing.stage, key.left, DifferenceKind::Key)
                .values(word(in_left), word(in_right))
        });
        return;
    }
    for (row, id) in pairing.order.iter().enumerate() {
        let partner = (pairing.partner)(*id);
        if !right.has(partner) && !pairing.absent_is_null {
            continue;
        }
        let a = left.cell(*id, key.left).unwrap_or(Cell::Null);
        let b = right.cell(partner, key.right).unwrap_or(Cell::Null);
        found.values += a.len() as u64;
        let result = a.differs(&b, key.tolerance);
        found.largest = found.largest.max(result.largest);
        found.total += result.total;
        found.numbers += result.numbers;
        let Some(first) = result.first else { continue };
        if let DifferenceKind::Length | DifferenceKind::Type = first.kind {
            let words = || unlike(&first.left, &first.right);
            found.unlike = found.unlike.take().or_else(words);
        }
        found.differences += result.count - 1;
        found.note(|| Difference {
            index: first.index.filter(|_| left.is_list(key.left)),
            ulps: first.ulps,
            absolute: first.absolute,
            ..Difference::new(pairing.stage, key.left, first.kind)
                .at(row, *id)
                .values(first.left, first.right)
        });
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RaggedColumn;
    use verl_words::keys::{ADVANTAGES, RESPONSES, REWARDS};

    use super::*;

    fn batch(advantages: &[Vec<f32>]) -> Batch {
        let ids: Vec<RowId> = (0..advantages.len() as u64)
            .map(|row| RowId::prompt(0, row).expect("fits"))
            .collect();
        let mut batch = Batch::with_rows(&ids);
        batch
            .put(&ADVANTAGES, RaggedColumn::from_rows(advantages))
            .expect("rows");
        batch
    }

    fn compare(a: &Batch, b: &Batch, tolerance: Tolerance) -> Comparison {
        let (left, right) = (Rows::new([a]), Rows::new([b]));
        let key = ComparedKey {
            left: "advantages",
            right: "advantages",
            tolerance,
        };
        let pairing = Pairing {
            stage: "s",
            order: left.ids(),
            partner: &|id| id,
            absent_is_null: false,
            both_ways: Some(right.ids()),
        };
        compare_rows(&pairing, &[key], &left, &right)
    }

    #[test]
    fn equal_bits_in_any_order_are_not_a_difference() {
        let a = batch(&[vec![1.0, f32::NAN], vec![], vec![-0.0]]);
        let b = a.take(&[2, 0, 1]).expect("rows");
        let found = compare(&a, &b, Tolerance::EXACT);
        assert_eq!((found.differences, found.rows, found.values), (0, 3, 3));
    }

    #[test]
    fn the_first_difference_is_reported_with_its_distance() {
        let a = batch(&[vec![1.0, 2.0], vec![3.0, 0.0]]);
        let next = f32::from_bits(3.0f32.to_bits() + 1);
        let b = batch(&[vec![1.0, 2.0], vec![next, -0.0]]);
        let found = compare(&a, &b, Tolerance::EXACT);
        assert_eq!(found.differences, 2);
        let first = found.first.expect("a difference");
        assert_eq!(
            (first.row, first.index, first.ulps),
            (Some(1), Some(0), Some(1))
        );
        insta::assert_snapshot!(
            format!("{}\n{}", first.place(), first.explain("recorded", "replayed")), @r"
        stage `s`, key `advantages`, sample 0.1#0 (row 1), index 0
          recorded  3.0
          replayed  3.0000002
          distance  1 ULP, 2.384185791015625e-7
        ");
        // Both are within this tolerance, and the largest distance is reported.
        let near = Tolerance {
            absolute: 0.0,
            relative: 1e-6,
        };
        let found = compare(&a, &b, near);
        assert_eq!(found.differences, 0);
        assert!(found.largest > 2e-7 && found.largest < 3e-7);
        // NaN is not within any tolerance.
        let b = batch(&[vec![1.0, 2.0], vec![f32::NAN, 0.0]]);
        assert_eq!(compare(&a, &b, near).differences, 1);
    }

    #[test]
    fn different_lengths_rows_and_keys_are_reported() {
        let a = batch(&[vec![1.0, 2.0], vec![3.0]]);
        let shorter = compare(&a, &batch(&[vec![1.0], vec![3.0]]), Tolerance::EXACT);
        let first = shorter.first.expect("a length");
        assert_eq!((first.kind, first.row), (DifferenceKind::Length, Some(0)));
        assert_eq!(
            (first.left.as_str(), first.right.as_str()),
            ("length 2", "length 1")
        );
        assert_eq!(shorter.unlike.as_deref(), Some("lengths 2 and 1"));
        assert_eq!(shorter.numbers, 2);
        let dropped = compare(&a, &a.slice(0..1).expect("a row"), Tolerance::EXACT);
        let first = dropped.first.expect("a row");
        assert_eq!(first.kind, DifferenceKind::Row);
        assert_eq!(
            (first.left.as_str(), first.right.as_str()),
            ("present", "missing")
        );
        let more = compare(&a.slice(0..1).expect("a row"), &a, Tolerance::EXACT);
        assert_eq!(more.first.expect("a row").sample, Some(a.ids()[1]));
        let twice = Batch::concat(&[a.clone(), a.slice(1..2).expect("a row")]).expect("rows");
        let first = compare(&a, &twice, Tolerance::EXACT).first.expect("a row");
        assert_eq!(
            (first.kind, first.row),
            (DifferenceKind::RepeatedRow, Some(1))
        );
        let without = compare(&a, &a.rows_only(), Tolerance::EXACT);
        assert_eq!(without.first.expect("a key").kind, DifferenceKind::Key);
        let mut other = a.rows_only();
        other
            .put_array(
                "advantages",
                std::sync::Arc::new(arrow_array::StringArray::from(vec!["1", "2"])),
            )
            .expect("rows");
        let typed = compare(&a, &other, Tolerance::EXACT);
        assert_eq!(typed.first.expect("a type").kind, DifferenceKind::Type);
        assert_eq!(typed.unlike.as_deref(), Some("types f32 and text"));
        assert_eq!(typed.numbers, 0);
    }

    #[test]
    fn rows_are_ordered_by_the_input_and_its_groups() {
        let prompts: Vec<RowId> = [9, 4]
            .map(|row| RowId::prompt(0, row).expect("fits"))
            .to_vec();
        let samples = Batch::with_rows(&prompts).repeat(2).expect("samples");
        let emitted = samples.take(&[3, 0, 2, 1]).expect("rows");
        let rows = Rows::new([&emitted]);
        let input: Vec<u64> = prompts.iter().map(|id| id.0).collect();
        let expected: Vec<u64> = samples.ids().iter().map(|id| id.0).collect();
        assert_eq!(rows.ordered(&input), expected);
        let _ = (RESPONSES, REWARDS);
    }
}
