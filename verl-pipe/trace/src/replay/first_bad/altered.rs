//! Rows that were altered after the recording, as the first fault.

use verl_plan::schedule::placement::Schedule;
use verl_rules::format::Side;

use crate::compare::{Difference, DifferenceKind, compare_inputs, rows_of};
use crate::files::{AlteredKey, RecordedStep};
use crate::replay::first_bad::{Fault, FirstBad, found};

/// The first key of a stage (by its index in the plan) whose rows were altered, as a fault; with the row if another
/// stage recorded the same rows unaltered.
pub(crate) fn altered_fault(
    schedule: &Schedule,
    recorded: &RecordedStep,
    index: usize,
) -> Option<FirstBad> {
    let planned = &schedule.plan().stages()[index];
    let mut of_stage = recorded.altered.iter();
    let key = of_stage.find(|key| key.stage == planned.name())?;
    let mut what = format!(
        "{}: {} rows with hash {:016x} were recorded, but the file has {} rows with hash {:016x}; it was changed after the run wrote it",
        key.what(recorded.step),
        key.rows.0,
        key.hashes.0,
        key.rows.1,
        key.hashes.1
    );
    let difference = match elsewhere(schedule, recorded, index, key) {
        Some(difference) => {
            what = format!("{what}\n{}", difference.explain("given", "written"));
            let stage = recorded.stages.get(planned.name());
            let mut rows = stage.map_or_else(Vec::new, rows_of).into_iter();
            Difference {
                key: key.key.clone(),
                row: rows.position(|row| Some(row) == difference.sample),
                ..difference
            }
        }
        None => Difference::new(planned.name(), &key.key, DifferenceKind::Value),
    };
    let side = key.side.as_str();
    Some(found(
        schedule,
        recorded,
        index,
        Fault::Altered,
        side,
        &difference,
        what,
    ))
}

/// The first difference between the altered key and the same rows as recorded by the stage that wrote them, or by a
/// stage that was given them; left is what was given, right what was written.
fn elsewhere(
    schedule: &Schedule,
    recorded: &RecordedStep,
    index: usize,
    key: &AlteredKey,
) -> Option<Difference> {
    let first = |reader: usize, local: &str, writer: Option<usize>| {
        let edges = compare_inputs(schedule, recorded, reader).into_iter();
        let mut first = edges
            .filter(|edges| writer.is_none_or(|writer| edges.writer == writer))
            .filter_map(|edges| edges.compared.first);
        first.find(|difference| difference.key == local)
    };
    let stages = schedule.plan().stages();
    match key.side {
        Side::Input => first(index, &key.key, None),
        Side::Output => (index + 1..stages.len()).find_map(|reader| {
            let name = stages[index].key(&key.key);
            let mut edges = stages[reader].inputs().iter();
            let edge = edges.find(|edge| edge.writer == index && edge.key == name)?;
            first(reader, &edge.local, Some(index))
        }),
    }
}

/// `bad`, with the row at which a replay of the same stage differs from the altered rows, if the row was unknown.
pub(crate) fn located(bad: FirstBad, replayed: &Difference) -> FirstBad {
    let fits = bad.fault == Fault::Altered
        && bad.row.is_none()
        && bad.side == Side::Output.as_str()
        && bad.key == replayed.key;
    if !fits {
        return bad;
    }
    FirstBad {
        row: replayed.row,
        sample: replayed.sample.map(|id| id.to_string()),
        index: replayed.index,
        what: format!(
            "{}\n{}",
            bad.what,
            replayed.explain("in the file", "replayed")
        ),
        ..bad
    }
}
