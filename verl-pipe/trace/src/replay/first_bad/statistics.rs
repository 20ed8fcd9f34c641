//! Faults found with statistics only, for a step that was not recorded in full: the first wrong key, but not the row.

use verl_plan::schedule::placement::Schedule;
use verl_rules::format::Side;
use verl_rules::stats::StatRow;

use crate::replay::first_bad::{Fault, FirstBad, reaches, through};
use crate::text::count;

/// The first fault in the statistics of one step, in the order of the plan: a value that is not finite, or an input
/// whose hash differs from that of the written key.
pub fn first_fault_of_stats(schedule: &Schedule, step: u64, rows: &[StatRow]) -> Option<FirstBad> {
    let rows: Vec<&StatRow> = rows.iter().filter(|row| row.step == step).collect();
    (0..schedule.plan().stages().len()).find_map(|index| {
        let name = schedule.plan().stages()[index].name();
        let of = |side: Side| {
            let rows = rows.iter().copied();
            rows.filter(move |row| row.stage == *name && row.side == side)
        };
        let edge = of(Side::Input).find_map(|row| {
            let written = written_as(schedule, index, &rows, row)?;
            let same = written.hash == row.hash && written.rows == row.rows;
            (!same).then(|| {
                let what = format!(
                    "the hash of its {} is {:016x}, but `{}` wrote {} with hash {:016x}",
                    count(row.rows, "row"),
                    row.hash,
                    written.stage,
                    count(written.rows, "row"),
                    written.hash
                );
                fault(schedule, index, Fault::Edge, row, what)
            })
        });
        let non_finite = || {
            let mut both = of(Side::Input).chain(of(Side::Output));
            let row = both.find(|row| row.non_finite > 0)?;
            let verb = if row.non_finite == 1 { "is" } else { "are" };
            let values = count(row.count, "value");
            let what = format!("{} of {values} {verb} not finite", row.non_finite);
            Some(fault(schedule, index, Fault::NonFinite, row, what))
        };
        edge.or_else(non_finite)
    })
}

/// The statistics of the written key, if the reader gets exactly those rows: not repeated, not filtered, and of the
/// same type.
fn written_as<'a>(
    schedule: &Schedule,
    reader: usize,
    rows: &[&'a StatRow],
    input: &StatRow,
) -> Option<&'a StatRow> {
    let wires = &schedule.wiring().stages[reader];
    let column = wires
        .inputs
        .iter()
        .find(|column| column.local == input.key)?;
    let source = &wires.sources[column.source];
    if !source.path.is_empty() || column.convert.is_some() {
        return None;
    }
    let writer = schedule.plan().stages()[source.writer].name();
    let key = &schedule.wiring().stages[source.writer].outputs[column.column].local;
    let mut rows = rows.iter().copied();
    rows.find(|row| row.stage == *writer && row.side == Side::Output && row.key == *key)
}

fn fault(schedule: &Schedule, index: usize, fault: Fault, row: &StatRow, what: String) -> FirstBad {
    FirstBad {
        step: row.step,
        stage: row.stage.clone(),
        fault,
        side: row.side.as_str(),
        key: row.key.clone(),
        row: None,
        sample: None,
        index: None,
        what,
        through: through(schedule, index),
        reaches: reaches(schedule, index, row.side.as_str(), &row.key),
    }
}

#[cfg(test)]
mod tests {
    use verl_declare::pipe::{DataPipe, stage_fn};
    use verl_plan::Plannable;
    use verl_words::keys::{RESPONSES, REWARDS};
    use verl_words::stage::{RowRule, StageSpec};

    use super::*;

    fn schedule() -> Schedule {
        let source = StageSpec::new().rows(RowRule::Source).writes(RESPONSES);
        let score = StageSpec::new().reads(RESPONSES).writes(REWARDS);
        let sink = StageSpec::new().reads(REWARDS).rows(RowRule::Sink);
        let pipe = DataPipe::new("three")
            .add_stage("source", stage_fn(source, |batch, ctx| ctx.emit(batch)))
            .add_stage("score", stage_fn(score, |batch, ctx| ctx.emit(batch)))
            .add_stage("sink", stage_fn(sink, |_, _| Ok(())));
        pipe.plan().expect("a plan").schedule().expect("places")
    }

    fn row(stage: &str, side: Side, key: &str, hash: u64, non_finite: u64) -> StatRow {
        StatRow {
            step: 7,
            stage: stage.to_owned(),
            side,
            key: key.to_owned(),
            name: key.to_owned(),
            rows: 4,
            nulls: 0,
            count: 4,
            tokens: 0,
            zeros: 0,
            non_finite,
            min: None,
            max: None,
            mean: None,
            std: None,
            quantiles: [None; 7],
            sketch: Vec::new(),
            hash,
            length_min: None,
            length_mean: None,
            length_max: None,
            truncated_share: None,
            ratio: None,
        }
    }

    /// Rows of a correct step with one row changed: its position, its hash, its number of values that are not finite.
    fn check(change: (usize, u64, u64), expected: Option<(&str, &str, Fault)>) {
        let mut rows = vec![
            row("source", Side::Output, "responses", 1, 0),
            row("score", Side::Input, "responses", 1, 0),
            row("score", Side::Output, "rewards", 2, 0),
            row("sink", Side::Input, "rewards", 2, 0),
        ];
        (rows[change.0].hash, rows[change.0].non_finite) = (change.1, change.2);
        let found = first_fault_of_stats(&schedule(), 7, &rows);
        let found = found.map(|bad| (bad.stage, bad.key, bad.fault));
        let expected = expected.map(|(s, k, f)| (s.to_owned(), k.to_owned(), f));
        assert_eq!(found, expected);
        assert_eq!(first_fault_of_stats(&schedule(), 8, &rows), None);
    }

    #[test]
    fn hashes_and_non_finite_values_locate_stage_and_key() {
        check((0, 1, 0), None);
        check((3, 9, 0), Some(("sink", "rewards", Fault::Edge)));
        check((2, 2, 1), Some(("score", "rewards", Fault::NonFinite)));
        // Written and read rows disagree: found at the reader.
        check((0, 9, 0), Some(("score", "responses", Fault::Edge)));
    }
}
