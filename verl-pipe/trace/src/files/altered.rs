//! Rows that were altered after the recording: the statistics of a step contain a hash of every key's content, which
//! reveals a file of rows that was changed or corrupted later.

use std::collections::BTreeMap;

use serde::Serialize;
use verl_rules::format::Side;
use verl_rules::stats::{KeyStats, Place, StatRow};
use verl_words::batch::arrow::ArrowBatch;

use crate::files::documents::ROWS_MISSING;
use crate::files::trace_dir::{SliceTrace, StepTrace};

/// A key whose rows differ from those in the statistics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AlteredKey {
    /// Name of the stage.
    pub stage: String,
    /// Side of the stage.
    pub side: Side,
    /// The stage's own name of the key.
    pub key: String,
    /// Number of rows recorded and found.
    pub rows: (u64, u64),
    /// Hash of the content recorded and found.
    pub hashes: (u64, u64),
}

/// The keys of a step whose content differs from the statistics `stats`, in the order of its files. Keys that the
/// statistics cannot check, because a guard refused rows or the flight recorder dropped some, are skipped.
pub(crate) fn altered_keys(step: &StepTrace, stats: &[StatRow]) -> Vec<AlteredKey> {
    if step.manifest.notes.iter().any(|note| note == ROWS_MISSING) {
        return Vec::new();
    }
    let number = step.manifest.step;
    let known: BTreeMap<(&str, Side, &str), &StatRow> = stats
        .iter()
        .filter(|row| row.step == number)
        .map(|row| ((row.stage.as_str(), row.side, row.key.as_str()), row))
        .collect();
    let mut found = Vec::new();
    for stage in &step.stages {
        for key in &stage.manifest.keys {
            // Refused rows are in the file but not in the statistics; a note marks such a file.
            if key.side == Side::Output && !stage.manifest.notes.is_empty() {
                continue;
            }
            let name = stage.manifest.stage.as_str();
            let Some(recorded) = known.get(&(name, key.side, key.key.as_str())) else {
                continue;
            };
            let (rows, hash) = content(stage.side(key.side), &key.key);
            if (rows, hash) != (recorded.rows, recorded.hash) {
                found.push(AlteredKey {
                    stage: name.to_owned(),
                    side: key.side,
                    key: key.key.clone(),
                    rows: (recorded.rows, rows),
                    hashes: (recorded.hash, hash),
                });
            }
        }
    }
    found
}

/// Number of rows of a key, and the hash of their content as in the statistics.
fn content(slices: &[SliceTrace], key: &str) -> (u64, u64) {
    let mut stats = KeyStats::default();
    for (at, slice) in slices.iter().enumerate() {
        let ids: Vec<u64> = slice.batch.ids().iter().map(|id| id.0).collect();
        if let Some(array) = slice.batch.column(key) {
            stats.add((at, 0), array, &ids);
        }
    }
    let row = stats.row(Place {
        step: 0,
        stage: "",
        side: Side::Input,
        key,
        name: key,
        brief: true,
    });
    (row.rows, row.hash)
}

impl AlteredKey {
    /// What is wrong, in a sentence.
    pub fn what(&self, step: u64) -> String {
        format!(
            "rows of `{}` differ from what the statistics recorded at step {step}",
            self.key
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, Float32Array};
    use verl_words::batch::{Batch, RowId};

    use super::*;
    use crate::files::documents::KeyColumn;
    use crate::files::trace_dir::StageTrace;
    use crate::files::trace_dir::tests::{header, step_manifest};

    fn batch(values: &[f32]) -> Batch {
        let ids = (0..values.len() as u64).map(|row| RowId::prompt(0, row).expect("in range"));
        let mut batch = Batch::with_rows(&ids.collect::<Vec<_>>());
        let array: ArrayRef = Arc::new(Float32Array::from(values.to_vec()));
        batch.put_array("rewards", array).expect("as many rows");
        batch
    }

    /// A step whose stage `reward` emitted `values`, in slices of two rows.
    fn step(values: &[f32]) -> StepTrace {
        let whole = batch(values);
        let slices = (0..values.len()).step_by(2).map(|first| {
            let rows = first..values.len().min(first + 2);
            SliceTrace {
                wave: 0,
                slice: first / 2,
                rows: rows.clone(),
                batch: whole.slice(rows).expect("in range"),
            }
        });
        let mut manifest = header(3);
        manifest.keys = vec![KeyColumn {
            side: Side::Output,
            key: "rewards".to_owned(),
            column: "rewards".to_owned(),
            data_type: "Float32".to_owned(),
            nullable: true,
        }];
        StepTrace {
            manifest: step_manifest(3, Vec::new()),
            stages: vec![StageTrace {
                manifest,
                inputs: Vec::new(),
                outputs: slices.collect(),
            }],
            damaged: Vec::new(),
        }
    }

    fn recorded(values: &[f32]) -> Vec<StatRow> {
        let mut stats = KeyStats::default();
        let batch = batch(values);
        let ids: Vec<u64> = batch.ids().iter().map(|id| id.0).collect();
        stats.add((0, 0), batch.column("rewards").expect("there"), &ids);
        let row = stats.row(Place {
            step: 3,
            stage: "reward",
            side: Side::Output,
            key: "rewards",
            name: "mine",
            brief: false,
        });
        vec![row]
    }

    #[test]
    fn a_changed_bit_or_lost_row_is_found_for_any_slices() {
        let stats = recorded(&[0.0, 1.0, 2.0]);
        assert_eq!(altered_keys(&step(&[0.0, 1.0, 2.0]), &stats), []);
        for values in [&[-0.0, 1.0, 2.0][..], &[0.0, 1.0], &[1.0, 0.0, 2.0]] {
            let found = altered_keys(&step(values), &stats);
            assert_eq!(
                (found[0].stage.as_str(), found[0].side),
                ("reward", Side::Output)
            );
            assert_eq!(found[0].rows, (3, values.len() as u64));
            assert_ne!(found[0].hashes.0, found[0].hashes.1);
            assert_eq!(
                found[0].what(3),
                "rows of `rewards` differ from what the statistics recorded at step 3"
            );
        }
    }

    #[test]
    fn keys_that_the_statistics_cannot_check_are_skipped() {
        let changed = step(&[9.0]);
        let stats = recorded(&[0.0]);
        assert_eq!(altered_keys(&changed, &stats).len(), 1);
        assert_eq!(altered_keys(&changed, &[]), []);
        let mut other_step = stats.clone();
        other_step[0].step = 4;
        assert_eq!(altered_keys(&changed, &other_step), []);
        let mut dropped = changed.clone();
        dropped.manifest.notes.push(ROWS_MISSING.to_owned());
        assert_eq!(altered_keys(&dropped, &stats), []);
        let mut refused = changed;
        refused.stages[0]
            .manifest
            .notes
            .push("slice 0: refused".to_owned());
        assert_eq!(altered_keys(&refused, &stats), []);
    }
}
