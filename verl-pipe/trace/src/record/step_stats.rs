//! Statistics of all edges of one step, built up batch by batch.

use std::collections::{BTreeMap, HashMap};

use arrow_array::cast::AsArray;
use arrow_array::types::UInt8Type;
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use verl_rules::format::Side;
use verl_rules::stats::{COUNTERPARTS, KeyStats, Parts, Place, StatRow, compare_log_probs};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId};
use verl_words::keys::{FINISH_REASONS, MASK_KINDS, RESPONSES, finish};

use crate::record::step_data::{Part, StageAbout};

/// Largest distance of each row from its counterpart, by key.
pub(crate) type Distances = BTreeMap<String, Vec<(RowId, f64)>>;

#[derive(Default)]
struct SideStats {
    keys: Vec<(String, KeyStats)>,
    /// Parts of each slice so far.
    parts: HashMap<usize, usize>,
    /// Rows with a finish reason, and those of them that reached the token limit.
    finished: (u64, u64),
}

/// A log-prob or mask column that is compared at the end.
struct ComparedColumn {
    key: String,
    stage: usize,
    at: (usize, usize),
    ids: Vec<u64>,
    array: ArrayRef,
}

/// Statistics of a step under construction.
#[derive(Default)]
pub(crate) struct StepStats {
    sides: BTreeMap<(usize, Side), SideStats>,
    compared: Vec<ComparedColumn>,
}

impl StepStats {
    /// Adds a batch.
    pub(crate) fn add(&mut self, part: &Part) {
        let side = self.sides.entry((part.stage, part.side)).or_default();
        let count = side.parts.entry(part.slice).or_default();
        let at = (part.slice, *count);
        *count += 1;
        let record = part.batch.record();
        let ids = identities(&part.batch);
        let fields = record.schema_ref().fields().iter().zip(record.columns());
        for (position, (field, array)) in fields.skip(2).enumerate() {
            let known = side.keys.get(position);
            let position = match known.is_some_and(|(key, _)| key == field.name()) {
                true => position,
                false => side.position(field.name()),
            };
            side.keys[position].1.add(at, array, ids);
            if field.name() == FINISH_REASONS.name() {
                side.finish(array);
            }
            if part.side == Side::Output && is_compared(field.name()) {
                self.compared.push(ComparedColumn {
                    key: field.name().clone(),
                    stage: part.stage,
                    at,
                    ids: ids.to_vec(),
                    array: array.clone(),
                });
            }
        }
    }

    /// The rows of the table so far, and the distances of log-prob keys from their counterparts.
    pub(crate) fn rows(
        &mut self,
        step: u64,
        stages: &[StageAbout],
        brief: bool,
    ) -> (Vec<StatRow>, Distances) {
        let mut rows = Vec::new();
        let seen = self
            .sides
            .iter_mut()
            .filter(|(_, stats)| !stats.parts.is_empty());
        for ((stage, side), stats) in seen {
            let about = &stages[*stage];
            let truncated = stats.truncated();
            for (key, stats) in stats.keys.iter_mut().filter(|(_, stats)| stats.has_parts()) {
                let mut row = stats.row(Place {
                    step,
                    stage: &about.name,
                    side: *side,
                    key,
                    name: about.key(key),
                    brief,
                });
                let of_response = row.length_max.is_some() && row.tokens == 0
                    || key == RESPONSES.name()
                    || key == FINISH_REASONS.name();
                row.truncated_share = truncated.filter(|_| of_response);
                rows.push(row);
            }
        }
        let distances = self.compare(stages, &mut rows);
        (rows, distances)
    }

    fn compare(&mut self, stages: &[StageAbout], rows: &mut [StatRow]) -> Distances {
        self.compared
            .sort_by_key(|column| (column.stage, column.at));
        let parts = |key: &str| -> Parts<'_> {
            let of_key = self.compared.iter().filter(|column| column.key == key);
            of_key
                .map(|column| (column.ids.as_slice(), &column.array))
                .collect()
        };
        let masks = parts(MASK_KINDS.name());
        let mut distances = Distances::new();
        for (key, counterparts) in COUNTERPARTS {
            let own = parts(key);
            let other = counterparts
                .iter()
                .map(|name| (*name, parts(name)))
                .find(|(_, other)| !other.is_empty());
            let Some((name, other)) = other.filter(|_| !own.is_empty()) else {
                continue;
            };
            let Some((ratio, farthest)) = compare_log_probs(name, &own, &other, &masks) else {
                continue;
            };
            let writers: Vec<&str> = self
                .compared
                .iter()
                .filter(|column| column.key == key)
                .map(|column| stages[column.stage].name.as_str())
                .collect();
            for row in rows.iter_mut().filter(|row| {
                row.side == Side::Output && row.key == key && writers.contains(&row.stage.as_str())
            }) {
                row.ratio = Some(ratio.clone());
            }
            let farthest = farthest.into_iter().map(|f| (RowId(f.id), f.distance));
            distances.insert(key.to_owned(), farthest.collect());
        }
        distances
    }

    /// Resets for the next step.
    pub(crate) fn clear(&mut self) {
        self.compared.clear();
        for side in self.sides.values_mut() {
            side.parts.clear();
            side.finished = (0, 0);
            side.keys.iter_mut().for_each(|(_, stats)| stats.clear());
        }
    }
}

impl SideStats {
    fn position(&mut self, key: &str) -> usize {
        match self.keys.iter().position(|(own, _)| own == key) {
            Some(position) => position,
            None => {
                self.keys.push((key.to_owned(), KeyStats::default()));
                self.keys.len() - 1
            }
        }
    }

    fn finish(&mut self, array: &ArrayRef) {
        let Some(reasons) = array.as_primitive_opt::<UInt8Type>() else {
            return;
        };
        self.finished.0 += (reasons.len() - reasons.null_count()) as u64;
        let cut = reasons.iter().flatten().filter(|r| finish::is_cut(*r));
        self.finished.1 += cut.count() as u64;
    }

    fn truncated(&self) -> Option<f64> {
        let (rows, cut) = self.finished;
        (rows > 0).then(|| cut as f64 / rows as f64)
    }
}

fn is_compared(key: &str) -> bool {
    let of = |(own, others): &(&str, &[&str])| *own == key || others.contains(&key);
    key == MASK_KINDS.name() || COUNTERPARTS.iter().any(of)
}

fn identities(batch: &Batch) -> &[u64] {
    use arrow_array::types::UInt64Type;
    debug_assert_eq!(batch.record().column(0).data_type(), &DataType::UInt64);
    batch
        .record()
        .column(0)
        .as_primitive::<UInt64Type>()
        .values()
}
