//! Comparison of a replayed stage: every value that it emitted, and the weights of its models before and after it.

use std::collections::BTreeMap;

use verl_plan::PlannedStage;
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::Batch;
use verl_words::field::{DType, Field};
use verl_words::resource::WeightsVersion;
use verl_words::stage::Access;

use crate::compare::{
    Changes, ComparedKey, Difference, DifferenceKind, Pairing, Rows, Tolerance, compare_rows,
};
use crate::files::{RecordedStage, RecordedStep};
use crate::replay::report::ReplayedStage;
use crate::replay::scope::changed_models;

/// Allowed distance of a key from the recorded value if equal bits are not expected: on a device other than the CPU,
/// whose kernels may add in another order from call to call, and on a machine that differs from the recording's in a
/// way that affects bits ([`Changes`]); then it also applies to host stages. Floats repeat up to about their rounding;
/// what is chosen from them (tokens, masks, reasons) must be equal.
///
/// | unit | allowed |
/// |---|---|
/// | nats, probability | 1e-3 |
/// | any other float | 1e-4 + 1e-4 · value |
/// | anything else | equal |
pub fn device_tolerance(field: &Field) -> Tolerance {
    let float = matches!(field.dtype, DType::F32 | DType::F64);
    match field.unit.as_ref() {
        _ if !float => Tolerance::EXACT,
        "nats" | "probability" => Tolerance {
            absolute: 1e-3,
            relative: 0.0,
        },
        _ => Tolerance {
            absolute: 1e-4,
            relative: 1e-4,
        },
    }
}

/// Whether a stage's numbers are expected to have the same bits.
pub(super) fn repeats_bits(schedule: &Schedule, stage: usize, changes: &Changes) -> bool {
    match schedule.places()[stage] {
        Place::Host => changes.repeats_host_bits(),
        Place::Group(group) => schedule.groups()[group].is_on_cpu() && changes.repeats_model_bits(),
    }
}

/// Compares the recorded outputs of a stage with those of the replay.
pub(super) fn compare_stage(
    schedule: &Schedule,
    index: usize,
    changes: &Changes,
    recorded: &RecordedStage,
    again: &[Batch],
) -> ReplayedStage {
    let planned = &schedule.plan().stages()[index];
    let left = Rows::new(recorded.outputs.iter().map(|output| &output.batch));
    let right = Rows::new(again);
    let exact = repeats_bits(schedule, index, changes);
    let tolerance = |field: &Field| match exact {
        true => Tolerance::EXACT,
        false => device_tolerance(field),
    };
    let writes = planned.spec().writes.iter();
    let keys: Vec<(String, Tolerance)> = writes
        .map(|field| (field.name.to_string(), tolerance(field)))
        .collect();
    let compared: Vec<ComparedKey<'_>> = keys
        .iter()
        .map(|(key, tolerance)| ComparedKey {
            left: key,
            right: key,
            tolerance: *tolerance,
        })
        .collect();
    let input = recorded.input_ids();
    let order = left.ordered(&input);
    let order_again = right.ordered(&input);
    let pairing = Pairing {
        stage: planned.name(),
        order: &order,
        partner: &|id| id,
        absent_is_null: schedule.tolerates_row_errors(index),
        both_ways: Some(&order_again),
    };
    ReplayedStage {
        stage: planned.name().to_owned(),
        kind: planned.kind().to_owned(),
        rows: match input.is_empty() {
            true => order.len(),
            false => input.len(),
        },
        compared: compare_rows(&pairing, &compared, &left, &right),
        keys,
        weights: Vec::new(),
        failed: None,
    }
}

pub(super) type Versions = BTreeMap<String, WeightsVersion>;

/// Versions of all models around one stage.
pub(super) struct Around<'a> {
    /// In the replay, before the stage.
    pub before: &'a Versions,
    /// As recorded and in the replay, after the stage; if it changes a model.
    pub after: Option<(&'a Versions, &'a Versions)>,
}

/// Compares the weights of a stage's models before it and, if it changes them, after it. Returns notes on what is not
/// compared.
pub(super) fn compare_weights(
    schedule: &Schedule,
    index: usize,
    changes: &Changes,
    recorded: &RecordedStep,
    around: &Around<'_>,
    replayed: &mut ReplayedStage,
) -> Vec<String> {
    let planned = &schedule.plan().stages()[index];
    let mut notes = Vec::new();
    for (model, access) in &planned.spec().models {
        let stage = &recorded.stages[planned.name()];
        let (then, now) = (stage.weights.get(model), around.before.get(model));
        // The recorded version is that at the start of the step.
        let begins = !changes_model(&schedule.plan().stages()[..index], model);
        if let Ok(sides) = hashes(then, now)
            && begins
        {
            weights_differ(sides, "before", model, replayed);
        }
        let later = &schedule.plan().stages()[index + 1..];
        let last = *access == Access::Update && !changes_model(later, model);
        let Some((then, now)) = around.after.filter(|_| last) else {
            continue;
        };
        let compared = match repeats_bits(schedule, index, changes) {
            true => hashes(then.get(model), now.get(model)),
            // Hashes cannot be compared within a tolerance.
            false => Err("on another device, C library or build they repeat only up to rounding"),
        };
        match compared {
            Ok(sides) => weights_differ(sides, "after", model, replayed),
            Err(why) => {
                let next = recorded.step + 1;
                let why = match (why, then.contains_key(model)) {
                    (NOT_RECORDED, false) => format!("step {next} is not recorded"),
                    (NOT_RECORDED, true) => {
                        format!("step {next} has neither their hash nor the weights")
                    }
                    (why, _) => why.to_owned(),
                };
                notes.push(format!(
                    "the weights of `{model}` after `{}` are not compared: {why}",
                    planned.name()
                ));
            }
        }
    }
    notes
}

const NOT_RECORDED: &str = "the trace does not record them";

/// Two versions with known hashes, or why a hash is unknown.
fn hashes<'a>(
    recorded: Option<&'a WeightsVersion>,
    now: Option<&'a WeightsVersion>,
) -> Result<Hashed<'a>, &'static str> {
    let has_hash = |version: &&WeightsVersion| !version.hash.is_empty();
    let recorded = recorded.filter(has_hash).ok_or(NOT_RECORDED)?;
    let now = now.filter(has_hash);
    let now = now.ok_or("this kind of model has no hash of them")?;
    Ok(Hashed { recorded, now })
}

/// Whether one of `stages` changes a model.
fn changes_model(stages: &[PlannedStage], model: &str) -> bool {
    let mut changed = stages.iter().flat_map(changed_models);
    changed.any(|other| other == model)
}

/// Versions of a model's weights that both have a hash.
struct Hashed<'a> {
    recorded: &'a WeightsVersion,
    now: &'a WeightsVersion,
}

fn weights_differ(
    Hashed { recorded, now }: Hashed<'_>,
    moment: &str,
    model: &String,
    replayed: &mut ReplayedStage,
) {
    if !replayed.weights.contains(model) {
        replayed.weights.push(model.clone());
    }
    if recorded == now {
        return;
    }
    let difference = Difference::new(&replayed.stage, model, DifferenceKind::Weights).values(
        format!("{recorded} {moment} the stage"),
        format!("{now} {moment} the stage"),
    );
    replayed.compared.differences += 1;
    // The weights that a stage was given come before its results.
    if moment == "before" || replayed.compared.first.is_none() {
        replayed.compared.first = Some(difference);
    }
}
