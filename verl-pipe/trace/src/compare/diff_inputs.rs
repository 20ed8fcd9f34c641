//! Inputs of a stage in two runs: rows, and the weights of its models. If these differ, a difference in the outputs
//! says nothing about the stage.

use std::fmt;

use serde::Serialize;
use verl_plan::PlannedStage;
use verl_words::resource::WeightsVersion;
use verl_words::stage::Access;

use crate::compare::difference::{Difference, DifferenceKind, Tolerance};
use crate::compare::rows::{ComparedKey, Pairing, Rows, compare_rows};
use crate::files::{RecordedStage, RecordedStep};

/// Whether two runs diverge in a stage or before it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The stage was given different rows or weights, from outside or from an earlier stage.
    InputsDiffer,
    /// Its rows come from outside the pipeline, from data.
    Source,
    /// It was given the same inputs, and its outputs differ.
    SameInputs,
    /// It was given the same rows; the weights of these models are not known for both runs.
    WeightsUnknown(Vec<String>),
    /// Its inputs are not recorded for both runs.
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::InputsDiffer => f.write_str("inputs differ"),
            Cause::Source => f.write_str("inputs differ: its rows come from outside"),
            Cause::SameInputs => f.write_str("same inputs, different outputs"),
            Cause::WeightsUnknown(models) => {
                let models: Vec<&str> = models.iter().map(String::as_str).collect();
                write!(
                    f,
                    "same input rows, different output rows; whether the weights of {} were the same is not recorded",
                    verl_words::diagnostic::quoted(models)
                )
            }
            Cause::Unknown => f.write_str("whether its inputs are the same is not recorded"),
        }
    }
}

/// Differences in the inputs of a stage in two runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct InputsDiff {
    /// Whether both runs recorded its rows.
    pub is_recorded: bool,
    /// Number of values and rows that differ, and of models whose weights do.
    pub differences: u64,
    /// Models whose weights before the stage are not known for both runs.
    pub weights_unknown: Vec<String>,
    /// The first difference: weights before rows.
    pub first: Option<Difference>,
}

impl InputsDiff {
    /// The cause of a difference in the stage's outputs.
    pub(crate) fn cause(&self, is_source: bool) -> Cause {
        match self {
            _ if self.first.is_some() => Cause::InputsDiffer,
            _ if is_source => Cause::Source,
            _ if !self.is_recorded => Cause::Unknown,
            _ if self.weights_unknown.is_empty() => Cause::SameInputs,
            _ => Cause::WeightsUnknown(self.weights_unknown.clone()),
        }
    }
}

/// Compares the inputs of a stage.
pub(crate) fn diff_inputs(
    planned: &PlannedStage,
    first: &RecordedStage,
    second: &RecordedStage,
) -> InputsDiff {
    let mut diff = InputsDiff {
        is_recorded: !first.inputs.is_empty() && !second.inputs.is_empty(),
        ..InputsDiff::default()
    };
    for (model, _) in &planned.spec().models {
        match hashes(first.weights.get(model), second.weights.get(model)) {
            None => diff.weights_unknown.push(model.clone()),
            Some((left, right)) if left != right => {
                diff.differences += 1;
                let weights = || weights(planned, model, "before", left, right);
                diff.first = diff.first.take().or_else(|| Some(weights()));
            }
            Some(_) => {}
        }
    }
    if !diff.is_recorded {
        return diff;
    }
    let left = Rows::new(first.inputs.iter().map(|input| &input.batch));
    let right = Rows::new(second.inputs.iter().map(|input| &input.batch));
    let keys: Vec<ComparedKey<'_>> = planned
        .inputs()
        .iter()
        .map(|edge| ComparedKey {
            left: &edge.local,
            right: &edge.local,
            tolerance: Tolerance::EXACT,
        })
        .collect();
    let mut found = compare_rows(
        &Pairing {
            stage: planned.name(),
            order: left.ids(),
            partner: &|id| id,
            absent_is_null: false,
            both_ways: Some(right.ids()),
        },
        &keys,
        &left,
        &right,
    );
    let fields = planned
        .spec()
        .reads
        .iter()
        .chain(&planned.spec().reads_optional);
    let mut identifiers = fields.filter(|field| field.is_identifier());
    if let Some(first) = &mut found.first
        && identifiers.any(|field| field.name == first.key)
    {
        first.absolute = None;
    }
    diff.differences += found.differences;
    diff.first = diff.first.or(found.first).map(Difference::of_input);
    diff
}

/// The first model whose weights after the stage differ in the two runs.
pub(crate) fn weights_after(
    planned: &PlannedStage,
    first: &RecordedStep,
    second: &RecordedStep,
) -> Option<Difference> {
    planned.spec().models.iter().find_map(|(model, access)| {
        let after = |step: &'_ RecordedStep| step.weights_after.get(model).cloned();
        let (left, right) = (after(first), after(second));
        let (left, right) = hashes(left.as_ref(), right.as_ref())?;
        let differs = *access == Access::Update && left != right;
        differs.then(|| weights(planned, model, "after", left, right))
    })
}

/// Two versions, if both hashes are known.
fn hashes<'a>(
    left: Option<&'a WeightsVersion>,
    right: Option<&'a WeightsVersion>,
) -> Option<(&'a WeightsVersion, &'a WeightsVersion)> {
    let both = left.zip(right)?;
    (!both.0.hash.is_empty() && !both.1.hash.is_empty()).then_some(both)
}

fn weights(
    planned: &PlannedStage,
    model: &str,
    moment: &str,
    left: &WeightsVersion,
    right: &WeightsVersion,
) -> Difference {
    let value = |version: &WeightsVersion| format!("{version} {moment} the stage");
    Difference::new(planned.name(), model, DifferenceKind::Weights)
        .values(value(left), value(right))
}
