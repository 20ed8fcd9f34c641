//! `pipe debug diff`: where two runs diverge.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;
use verl_declare::registry::Registry;
use verl_trace::compare::{
    Change, Changes, RunDiff, changed, diff_settings, diff_stats, diff_step, shown,
};
use verl_trace::files::Conditions;
use verl_trace::replay::TracedRun;
use verl_trace::text::count;

use super::{DIFFERS, Failure, NOTHING, SAME, write, write_json};

/// Arguments of `pipe debug diff`.
#[derive(Debug, Clone, Args)]
pub struct DiffArgs {
    /// Folder of the first run.
    pub first: PathBuf,
    /// Folder of the second run.
    pub second: PathBuf,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn diff(
    args: &DiffArgs,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let first = TracedRun::open(&args.first, registry)?;
    let second = TracedRun::open(&args.second, registry)?;
    let [left, right]: [BTreeSet<u64>; 2] =
        [&first, &second].map(|run| run.trace().steps().into_iter().collect());
    let mut found = RunDiff {
        settings: diff_settings(&config(&args.first), &config(&args.second)),
        machine: changed(&machine(&args.first)?, &machine(&args.second)?).collect(),
        data: changed(
            &document(&args.first, "data.json"),
            &document(&args.second, "data.json"),
        )
        .collect(),
        ..RunDiff::default()
    };
    let plans = [&first, &second].map(|run| run.trace().format().plan_hash.as_str());
    found.notes.extend(other_plan(plans[0], plans[1]));
    let recorded = [
        Conditions::read(&args.first)?,
        Conditions::read(&args.second)?,
    ];
    if let [Some(left), Some(right)] = &recorded {
        found
            .notes
            .extend(equal_bits(&Changes::between(left, right)));
    }
    found.notes.extend(unmatched_steps(&left, &right));
    for step in left.intersection(&right) {
        let (a, b) = (first.step(*step)?, second.step(*step)?);
        for (side, recorded) in [("first", &a), ("second", &b)] {
            let damaged = recorded.damaged.iter();
            let notes = damaged.map(|file| format!("not compared, in the {side} run: {file}"));
            found.notes.extend(notes);
        }
        found.steps.push(diff_step(first.schedule(), &a, &b));
    }
    let [(left, unread), (right, unread_too)] =
        [&first, &second].map(|run| run.trace().stats_as_found(..));
    for (side, run, damaged) in [("first", &first, unread), ("second", &second, unread_too)] {
        let damaged = damaged.into_iter().chain(run.trace().damaged_steps());
        let notes = damaged.map(|file| format!("not compared, in the {side} run: {file}"));
        found.notes.extend(notes);
    }
    found.stats = diff_stats(first.schedule(), &left, &right);
    match args.json {
        true => write_json(out, &found)?,
        false => write(out, &found)?,
    }
    let compared = !found.steps.is_empty() || !found.stats.steps.is_empty();
    let differs = found.parting().is_some() || found.stats.parting.is_some();
    Ok(match (compared, differs) {
        (false, _) => NOTHING,
        (true, false) => SAME,
        (true, true) => DIFFERS,
    })
}

/// The hashes of two plans, if they differ.
fn other_plan(first: &str, second: &str) -> Option<String> {
    let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_owned();
    let (left, right) = (short(first), short(second));
    (first != second).then(|| format!("the plans differ: {left} | {right}"))
}

/// How a different machine affects the bits of two runs, if the machines differ.
fn equal_bits(changes: &Changes) -> Option<String> {
    let sides = |change: &Change| format!("{} | {}", shown(&change.recorded), shown(&change.now));
    let unclaimed = || {
        let why = changes.why_bits_may_differ()?;
        Some(format!("equal bits are not expected: {why}"))
    };
    changes.other_machine(sides).or_else(unclaimed)
}

/// Steps that only one of the runs recorded.
fn unmatched_steps(left: &BTreeSet<u64>, right: &BTreeSet<u64>) -> Option<String> {
    let unmatched = left.symmetric_difference(right).count();
    let verb = if unmatched == 1 { "is" } else { "are" };
    let steps = count(unmatched as u64, "step");
    (unmatched > 0).then(|| format!("{steps} {verb} recorded in one of the runs only"))
}

/// The resolved configuration of a run, which was read as a pipeline before.
fn config(dir: &Path) -> Value {
    let text = std::fs::read_to_string(dir.join("config.toml")).unwrap_or_default();
    toml::from_str(&text).unwrap_or_default()
}

/// The machine of a run, from its trace or otherwise from `versions.json`.
fn machine(dir: &Path) -> Result<Value, Failure> {
    Ok(match Conditions::read(dir)? {
        Some(conditions) => serde_json::to_value(conditions.machine).unwrap_or_default(),
        None => document(dir, "versions.json"),
    })
}

/// A JSON file of a run; null if there is none.
fn document(dir: &Path, name: &str) -> Value {
    let text = std::fs::read_to_string(dir.join(name)).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmatched_steps_are_counted() {
        let steps = |of: &[u64]| BTreeSet::from_iter(of.iter().copied());
        let note = |a: &[u64], b: &[u64]| unmatched_steps(&steps(a), &steps(b));
        assert_eq!(note(&[1, 2], &[1, 2]), None);
        let one = note(&[1, 2], &[1]).expect("a note");
        assert_eq!(one, "1 step is recorded in one of the runs only");
        let two = note(&[1, 2], &[3, 2]).expect("a note");
        assert_eq!(two, "2 steps are recorded in one of the runs only");
    }
}
