//! Tables of steps: the statistics of every stage and key, for all steps or the most important ones.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;
use verl_rules::stats::StatRow;

use super::thin::rounded;

/// Names of the columns, in the order of the cells of a row.
const COLUMNS: [&str; 14] = [
    "rows",
    "nulls",
    "count",
    "zeros",
    "non_finite",
    "min",
    "p05",
    "p50",
    "p95",
    "max",
    "mean",
    "std",
    "length_mean",
    "length_max",
];

/// The tables; a row starts with the number of its key.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tables {
    columns: Vec<&'static str>,
    /// Stage, side, the stage's own name of the key.
    keys: Vec<(String, &'static str, String)>,
    /// Rows by step.
    steps: BTreeMap<u64, Vec<Vec<Option<f64>>>>,
    #[serde(skip)]
    numbers: HashMap<(String, &'static str, String), usize>,
    #[serde(skip)]
    wanted: BTreeSet<u64>,
}

impl Tables {
    /// Tables of the steps in `wanted` that have statistics.
    pub(crate) fn of(wanted: BTreeSet<u64>) -> Tables {
        Tables {
            columns: COLUMNS.to_vec(),
            wanted,
            ..Tables::default()
        }
    }

    /// Adds statistics.
    pub(crate) fn add(&mut self, stats: &[StatRow]) {
        for row in stats.iter().filter(|row| self.wanted.contains(&row.step)) {
            let id = (row.stage.clone(), row.side.as_str(), row.key.clone());
            let next = self.keys.len();
            let number = *self.numbers.entry(id.clone()).or_insert(next);
            if number == next {
                self.keys.push(id);
            }
            let cells = std::iter::once(Some(number as f64)).chain(cells(row));
            self.steps
                .entry(row.step)
                .or_default()
                .push(cells.collect());
        }
    }

    /// Number of steps with a table.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Steps with a table.
    pub(crate) fn steps(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }
}

fn cells(row: &StatRow) -> [Option<f64>; 14] {
    let integer = |n: u64| Some(n as f64);
    let [_, p05, _, p50, _, p95, _] = row.quantiles;
    let reals = [
        row.min,
        p05,
        p50,
        p95,
        row.max,
        row.mean,
        row.std,
        row.length_mean,
        row.length_max.map(|n| n as f64),
    ]
    .map(rounded);
    let [min, p05, p50, p95, max, mean, std, length_mean, length_max] = reals;
    [
        integer(row.rows),
        integer(row.nulls),
        integer(row.count),
        integer(row.zeros),
        integer(row.non_finite),
        min,
        p05,
        p50,
        p95,
        max,
        mean,
        std,
        length_mean,
        length_max,
    ]
}

/// At most `most` of `all` steps: first those of `wanted` in its order, then steps that are spread evenly, including
/// the first and the last.
pub(crate) fn choose(all: &[u64], wanted: &[u64], most: usize) -> BTreeSet<u64> {
    let known: BTreeSet<u64> = all.iter().copied().collect();
    if known.len() <= most {
        return known;
    }
    let mut chosen = BTreeSet::new();
    for step in wanted.iter().filter(|step| known.contains(step)) {
        if chosen.len() < most {
            chosen.insert(*step);
        }
    }
    let left: Vec<u64> = known.difference(&chosen).copied().collect();
    let room = most - chosen.len();
    chosen.extend(evenly(left.len(), room).map(|at| left[at]));
    chosen
}

/// `count` positions below `len`, spread evenly from the first to the last; all if there are no more.
pub(crate) fn evenly(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(len);
    (0..count).map(move |at| match count {
        1 => len - 1,
        _ => at * (len - 1) / (count - 1),
    })
}

#[cfg(test)]
mod tests {
    use verl_rules::format::Side;
    use verl_rules::stats::{KeyStats, Place};

    use super::*;

    #[test]
    fn wanted_steps_come_first_and_the_others_are_spread() {
        let all: Vec<u64> = (1..=100).collect();
        let chosen = |wanted: &[u64], most| Vec::from_iter(choose(&all, wanted, most));
        assert_eq!(chosen(&[], 3), [1, 50, 100]);
        assert_eq!(chosen(&[42, 700], 3), [1, 42, 100]);
        assert_eq!(chosen(&[9, 8, 7], 2), [8, 9]);
        assert_eq!(chosen(&[], 200).len(), 100);
        assert_eq!(choose(&[], &[3], 5).len(), 0);
        assert_eq!(Vec::from_iter(evenly(10, 1)), [9]);
        assert_eq!(Vec::from_iter(evenly(2, 7)), [0, 1]);
        assert_eq!(evenly(0, 7).count(), 0);
    }

    #[test]
    fn a_row_has_its_key_and_one_cell_per_column() {
        let stat = |step, key| {
            let array: arrow_array::ArrayRef =
                std::sync::Arc::new(arrow_array::Float32Array::from(vec![1.0, 0.0, f32::NAN]));
            let mut stats = KeyStats::default();
            stats.add((0, 0), &array, &[1, 2, 3]);
            stats.row(Place {
                step,
                stage: "reward",
                side: Side::Output,
                key,
                name: key,
                brief: false,
            })
        };
        let stats = [
            stat(1, "rewards"),
            stat(2, "rewards"),
            stat(2, "scores"),
            stat(3, "scores"),
        ];
        let mut tables = Tables::of(BTreeSet::from([1, 2, 99]));
        tables.add(&stats[..1]);
        tables.add(&stats[1..]);
        assert_eq!(tables.len(), 2);
        assert_eq!(tables.keys.len(), 2);
        let row = &tables.steps[&2][1];
        assert_eq!(row.len(), 1 + COLUMNS.len());
        assert_eq!(row[0], Some(1.0));
        let cell = |name: &str| row[1 + COLUMNS.iter().position(|c| *c == name).expect("a column")];
        assert_eq!((cell("count"), cell("non_finite")), (Some(3.0), Some(1.0)));
        assert_eq!((cell("mean"), cell("length_mean")), (Some(0.5), None));
    }
}
