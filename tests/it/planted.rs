//! Errors planted into recorded steps: the right stage, key and row is reported.

use std::collections::BTreeMap;

use verl::pipe::batch::ArrowElement;
use verl::pipe::schedule::placement::Schedule;
use verl::pipe::trace::files::{RecordedBatch, RecordedStep};
use verl::pipe::trace::replay::{Fault, FirstBad, Replayer, first_bad};
use verl::prelude::*;

use crate::kit::{Place, root};
use crate::replayed::record;

/// Where an error is planted.
#[derive(Clone, Copy)]
enum At {
    /// In the output of the stage and in the inputs of its readers, as if the stage had computed it.
    Computed(&'static str),
    /// Only in the output of the stage.
    Emitted(&'static str),
    /// Only in the input of the stage.
    Given(&'static str),
}

/// The recorded batches that contain `key` at a place.
fn batches<'a>(
    step: &'a mut RecordedStep,
    at: At,
    key: &'a str,
) -> impl Iterator<Item = &'a mut RecordedBatch> {
    let (outputs_of, inputs_of): (Option<&str>, Option<Option<&str>>) = match at {
        At::Computed(stage) => (Some(stage), Some(None)),
        At::Emitted(stage) => (Some(stage), None),
        At::Given(stage) => (None, Some(Some(stage))),
    };
    let stages = step.stages.iter_mut();
    let both = stages.flat_map(move |(name, stage)| {
        let gives = outputs_of == Some(name.as_str());
        let takes = inputs_of.is_some_and(|of| of.is_none_or(|of| of == name));
        let outputs = stage.outputs.iter_mut().filter(move |_| gives);
        outputs.chain(stage.inputs.iter_mut().filter(move |_| takes))
    });
    both.filter(move |recorded| key.is_empty() || recorded.batch.has(key))
}

/// Changes the list of one row.
fn list<T: ArrowElement>(
    step: &mut RecordedStep,
    at: At,
    key: &Key<Ragged<T>>,
    id: RowId,
    change: impl Fn(&mut Vec<T>),
) {
    for recorded in batches(step, at, key.name()) {
        let ids = recorded.batch.ids();
        let view = recorded.batch.get(key).expect("the column");
        let rows = view.rows().zip(&ids).map(|(row, own)| {
            let mut row = row.to_vec();
            if *own == id {
                change(&mut row);
            }
            row
        });
        let column = RaggedColumn::from_rows(rows);
        recorded.batch.put(key, column).expect("as many rows");
    }
}

/// Changes the rows of batches.
fn rows(step: &mut RecordedStep, at: At, change: impl Fn(&Batch) -> Batch) {
    for recorded in batches(step, at, "") {
        recorded.batch = change(&recorded.batch);
    }
}

/// The rows without `id`.
fn without(batch: &Batch, id: RowId) -> Batch {
    let ids = batch.ids();
    let kept: Vec<usize> = (0..ids.len()).filter(|row| ids[*row] != id).collect();
    batch.take(&kept).expect("rows")
}

/// The expected report of a planted error.
struct Expected {
    fault: Fault,
    stage: &'static str,
    key: &'static str,
    row: Option<usize>,
    index: Option<usize>,
}

fn expect(
    fault: Fault,
    stage: &'static str,
    key: &'static str,
    row: impl Into<Option<usize>>,
    index: impl Into<Option<usize>>,
) -> Expected {
    Expected {
        fault,
        stage,
        key,
        row: row.into(),
        index: index.into(),
    }
}

type Plant = Box<dyn Fn(&mut Vec<RecordedStep>)>;

/// The rewards of a step's samples.
fn rewards_of(step: &RecordedStep) -> BTreeMap<u64, Option<f32>> {
    let outputs = step.stages["reward"].outputs.iter();
    let rewards = outputs.flat_map(|output| {
        let rewards = output.batch.get(&keys::REWARDS).expect("the column");
        let ids = output.batch.ids();
        ids.into_iter()
            .map(|id| id.0)
            .zip(rewards.rows().collect::<Vec<_>>())
    });
    rewards.collect()
}

/// A row to change, not among the first: its group has different rewards, and so has a later row.
fn victim(step: &RecordedStep) -> (usize, RowId, RowId) {
    let rewards = rewards_of(step);
    let ids: Vec<RowId> = step.stages["reward"]
        .input_ids()
        .into_iter()
        .map(RowId)
        .collect();
    let differs = |a: RowId, b: RowId| rewards[&a.0] != rewards[&b.0];
    let chosen = ids.iter().enumerate().skip(4).find_map(|(row, id)| {
        let of_group = ids.iter().filter(|other| other.group() == id.group());
        let has_signal = of_group.into_iter().any(|other| differs(*id, *other));
        let other = ids[row + 1..].iter().find(|other| differs(*id, **other))?;
        has_signal.then_some((row, *id, *other))
    });
    chosen.expect("rewards that differ")
}

/// Each error in words, how it is planted into the second step, and the expected report.
fn faults(clean: &[RecordedStep]) -> Vec<(&'static str, Plant, Expected)> {
    let (row, id, other) = victim(&clean[1]);
    let rewards = rewards_of(&clean[1]);
    let prompt = id.sample(0).expect("a prompt");
    fn on(change: impl Fn(&mut RecordedStep) + 'static) -> Plant {
        Box::new(move |steps| change(&mut steps[1]))
    }
    use Fault::{Edge, Invariant, NonFinite, Replay, Settings, Weights};
    let next = |v: f32| f32::from_bits(v.to_bits() + 1);
    vec![
        (
            "the sign of a row's advantages flipped",
            on(move |step| {
                list(
                    step,
                    At::Computed("advantages"),
                    &keys::ADVANTAGES,
                    id,
                    |row| {
                        row.iter_mut().for_each(|v| *v = -*v);
                    },
                );
            }),
            expect(Replay, "advantages", "advantages", row, 0),
        ),
        (
            "one token id changed",
            on(move |step| {
                list(
                    step,
                    At::Computed("generate"),
                    &keys::RESPONSES,
                    id,
                    |row| row[1] ^= 1,
                );
            }),
            expect(Replay, "generate", "responses", row, 1),
        ),
        (
            "one token id changed on its way to `update`",
            on(move |step| {
                list(step, At::Given("update"), &keys::RESPONSES, id, |row| {
                    row[1] ^= 1
                });
            }),
            expect(Edge, "update", "responses", row, 1),
        ),
        (
            "a mask shifted by one",
            on(move |step| {
                list(
                    step,
                    At::Computed("generate"),
                    &keys::MASK_KINDS,
                    id,
                    |row| {
                        row.rotate_right(1);
                        row[0] = 0;
                    },
                );
            }),
            expect(Replay, "generate", "mask_kinds", row, 0),
        ),
        (
            "log-probs as at another temperature",
            on(move |step| {
                list(
                    step,
                    At::Computed("old_log_probs"),
                    &keys::OLD_LOG_PROBS,
                    id,
                    |row| {
                        row.iter_mut().for_each(|v| *v /= 0.8);
                    },
                );
            }),
            expect(Replay, "old_log_probs", "old_log_probs", row, 0),
        ),
        (
            "the rewards of two rows swapped",
            on(move |step| {
                for recorded in batches(step, At::Computed("reward"), "rewards") {
                    let swapped = recorded.batch.ids().into_iter().map(|own| match own {
                        own if own == id => rewards[&other.0],
                        own if own == other => rewards[&id.0],
                        own => rewards[&own.0],
                    });
                    let swapped: Vec<Option<f32>> = swapped.collect();
                    recorded
                        .batch
                        .put(&keys::REWARDS, swapped)
                        .expect("as many rows");
                }
            }),
            expect(Replay, "reward", "rewards", row, None),
        ),
        (
            "a row dropped by `advantages`",
            on(move |step| {
                rows(step, At::Emitted("advantages"), |batch| without(batch, id));
                rows(step, At::Given("update"), |batch| without(batch, id));
            }),
            expect(Invariant, "advantages", "sample_id", row, None),
        ),
        (
            "a row dropped on its way to `update`",
            on(move |step| rows(step, At::Given("update"), |batch| without(batch, id))),
            expect(Edge, "update", "sample_id", row, None),
        ),
        (
            "a row emitted twice",
            on(move |step| {
                let twice = |batch: &Batch| {
                    let ids = batch.ids();
                    let again = (0..ids.len()).filter(|row| ids[*row] == id);
                    let all: Vec<usize> = (0..ids.len()).chain(again).collect();
                    batch.take(&all).expect("rows")
                };
                rows(step, At::Emitted("reward"), twice);
            }),
            expect(Invariant, "reward", "sample_id", row, None),
        ),
        (
            "a NaN among the advantages",
            on(move |step| {
                list(
                    step,
                    At::Computed("advantages"),
                    &keys::ADVANTAGES,
                    id,
                    |row| {
                        row[1] = f32::NAN;
                    },
                );
            }),
            expect(NonFinite, "advantages", "advantages", row, 1),
        ),
        (
            "reference log-probs off by one ULP",
            on(move |step| {
                list(
                    step,
                    At::Computed("ref_log_probs"),
                    &keys::REF_LOG_PROBS,
                    id,
                    |row| {
                        row[1] = next(row[1]);
                    },
                );
            }),
            expect(Replay, "ref_log_probs", "ref_log_probs", row, 1),
        ),
        (
            "a log-prob above 0",
            on(move |step| {
                list(
                    step,
                    At::Computed("generate"),
                    &keys::ROLLOUT_LOG_PROBS,
                    id,
                    |row| {
                        row[0] = 0.5;
                    },
                );
            }),
            expect(Invariant, "generate", "rollout_log_probs", row, 0),
        ),
        (
            "a response one token shorter than its mask",
            on(move |step| {
                list(
                    step,
                    At::Computed("generate"),
                    &keys::RESPONSES,
                    id,
                    |row| {
                        row.pop();
                    },
                );
            }),
            expect(Invariant, "generate", "mask_kinds", row, None),
        ),
        (
            "a prompt token changed",
            on(move |step| {
                list(
                    step,
                    At::Computed("prompts"),
                    &keys::PROMPTS,
                    prompt,
                    |row| row[2] ^= 1,
                );
            }),
            expect(Replay, "prompts", "prompts", row / 4, 2),
        ),
        (
            "the state of the step before",
            Box::new(|steps| steps[1].state = steps[0].state.clone()),
            expect(Weights, "prompts", "actor", None, None),
        ),
        (
            "an update that made other weights",
            Box::new(|steps| steps[1].weights_after = steps[0].weights_after.clone()),
            expect(Weights, "update", "actor", None, None),
        ),
        (
            "another seed",
            on(|step| step.seed = Some(6)),
            expect(Settings, "prompts", "seed", None, None),
        ),
        (
            "a setting changed afterwards",
            on(|step| {
                let stage = step.stages.get_mut("generate").expect("the stage");
                stage.parameters.as_mut().expect("settings")["temperature"] = 0.7.into();
            }),
            expect(Settings, "generate", "temperature", None, None),
        ),
    ]
}

fn schedule(pipe: &DataPipe) -> Schedule {
    let plan = pipe.plan().map_err(Findings).expect("a plan");
    plan.schedule().expect("one device group")
}

#[track_caller]
fn find(
    schedule: &Schedule,
    steps: &[RecordedStep],
    replayer: &mut Replayer<'_>,
) -> Option<FirstBad> {
    steps
        .iter()
        .find_map(|step| first_bad(schedule, step, Some(replayer)).expect("a replay"))
}

#[test]
fn every_planted_fault_is_named() {
    let place = Place::new();
    let pipe = place.grpo("none", &[]);
    let (clean, mut run) = record(&pipe, 3);
    let schedule = schedule(&pipe);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    assert_eq!(find(&schedule, &clean, &mut replayer), None);

    let mut table = String::from("| planted | reported |\n|---|---|\n");
    for (what, plant, expected) in faults(&clean) {
        let mut steps = clean.clone();
        plant(&mut steps);
        let bad = find(&schedule, &steps, &mut replayer);
        let bad = bad.unwrap_or_else(|| panic!("nothing is said of: {what}"));
        let said = (
            bad.step,
            bad.fault,
            bad.stage.as_str(),
            bad.key.as_str(),
            bad.row,
            bad.index,
        );
        let Expected {
            fault,
            stage,
            key,
            row,
            index,
        } = expected;
        assert_eq!(said, (2, fault, stage, key, row, index), "{what}: {bad}");
        let why = bad.what.lines().next().unwrap_or_default();
        table += &format!("| {what} | {}: {why} |\n", bad.place());
    }
    insta::assert_snapshot!(table);
    let page = std::fs::read_to_string(root().join("docs/replay.md")).expect("the page");
    assert!(
        page.contains(&table),
        "docs/replay.md has a different table of planted errors"
    );
}

/// The text with `#` for the digits of floats: computed values may have other last bits on another processor.
pub fn without_floats(text: &str) -> String {
    let is_float = |word: &str| word.contains('.') && word.parse::<f64>().is_ok();
    let lines = text.lines().map(|line| {
        let words = line.split(' ').map(|word| match is_float(word) {
            true => "#".repeat(word.len()),
            false => word.to_owned(),
        });
        words.collect::<Vec<_>>().join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_report_says_where_what_and_who_reads_it() {
    let place = Place::new();
    let pipe = place.grpo("none", &[]);
    let (mut steps, mut run) = record(&pipe, 2);
    let (_, id, _) = victim(&steps[1]);
    list(
        &mut steps[1],
        At::Computed("ref_log_probs"),
        &keys::REF_LOG_PROBS,
        id,
        |row| {
            row[1] = f32::from_bits(row[1].to_bits() + 1);
        },
    );
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let bad = find(&schedule(&pipe), &steps, &mut replayer).expect("a fault");
    insta::assert_snapshot!("first_bad", without_floats(&bad.to_string()));
    let report = replayer
        .replay(&steps[1], &Default::default())
        .expect("a replay");
    assert_eq!(report.differences(), 1);
    insta::assert_snapshot!(
        "replay_with_a_difference",
        without_floats(&report.to_string())
    );
}
