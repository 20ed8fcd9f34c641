//! Compares two runs, aligned by step, stage and sample: where they diverge, and how far from there on.

use serde::Serialize;
use serde_json::Value;
use verl_plan::PlannedStage;
use verl_plan::schedule::placement::Schedule;
use verl_words::stage::RowRule;

use crate::compare::changes::{Change, changed};
use crate::compare::diff_inputs::{Cause, InputsDiff, diff_inputs, weights_after};
use crate::compare::diff_stats::StatsDiff;
use crate::compare::difference::{Difference, Tolerance};
use crate::compare::rows::{ComparedKey, Pairing, Rows, compare_rows};
use crate::files::{RecordedStage, RecordedStep};

/// One key that a stage emitted in both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KeyDiff {
    /// The stage's own name of the key.
    pub key: String,
    /// Values in rows that both runs have.
    pub values: u64,
    /// Values that differ.
    pub differences: u64,
    /// Whether the values are token ids, masks or similar, which have no distance.
    pub is_identifier: bool,
    /// Largest distance between two numbers; `None` if there is no pair of numbers.
    pub largest: Option<f64>,
    /// Mean distance over all pairs of numbers; `None` if there is none.
    pub mean: Option<f64>,
    /// The first pair without a distance, in words: `lengths 5 and 7`, `types f32 and i64`.
    pub unlike: Option<String>,
}

/// One stage of a step in both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageDiff {
    /// Its name.
    pub stage: String,
    /// Whether its rows come from outside the pipeline.
    pub is_source: bool,
    /// Its inputs.
    pub inputs: InputsDiff,
    /// Rows that both runs emitted.
    pub rows_of_both: usize,
    /// Rows that only the first run emitted.
    pub rows_of_first: usize,
    /// Rows that only the second run emitted.
    pub rows_of_second: usize,
    /// Keys in declared order.
    pub keys: Vec<KeyDiff>,
    /// The first difference in its outputs or in the weights after it; left is the first run.
    pub first: Option<Difference>,
}

/// One step of both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepDiff {
    /// The step.
    pub step: u64,
    /// Stages that both runs recorded, in the order of the first run's plan.
    pub stages: Vec<StageDiff>,
}

/// Where two runs diverge.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parting<'a> {
    /// The step.
    pub step: u64,
    /// The first difference: in a stage's input, else in its result.
    pub first: &'a Difference,
    /// Whether it comes from outside the stage.
    pub cause: Cause,
}

/// The comparison of two runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunDiff {
    /// Settings that differ: name, value in the first run, value in the second.
    pub settings: Vec<(String, Value, Value)>,
    /// Parts of the machine that differ; `recorded` is the first run.
    pub machine: Vec<Change>,
    /// Data sets that differ, by name and property; `recorded` is the first run.
    pub data: Vec<Change>,
    /// Steps that both runs recorded.
    pub steps: Vec<StepDiff>,
    /// All steps of both runs, by their statistics.
    pub stats: StatsDiff,
    /// What could not be compared.
    pub notes: Vec<String>,
}

/// Compares the inputs and outputs of the stages of one step in two runs. `schedule` is that of the first.
pub fn diff_step(schedule: &Schedule, first: &RecordedStep, second: &RecordedStep) -> StepDiff {
    let stages = schedule.plan().stages().iter().filter_map(|planned| {
        let left = first.stages.get(planned.name())?;
        let right = second.stages.get(planned.name())?;
        let mut diff = diff_stage(planned, left, right);
        diff.first = diff.first.or_else(|| weights_after(planned, first, second));
        Some(diff)
    });
    StepDiff {
        step: first.step,
        stages: stages.collect(),
    }
}

fn diff_stage(planned: &PlannedStage, first: &RecordedStage, second: &RecordedStage) -> StageDiff {
    let stage = planned.name();
    let left = Rows::new(first.outputs.iter().map(|output| &output.batch));
    let right = Rows::new(second.outputs.iter().map(|output| &output.batch));
    let order = left.ordered(&first.input_ids());
    let other_order = right.ordered(&second.input_ids());
    let both: Vec<u64> = order.iter().copied().filter(|id| right.has(*id)).collect();
    let pairing = |order| Pairing {
        stage,
        order,
        partner: &|id| id,
        absent_is_null: false,
        both_ways: None,
    };
    let rows = compare_rows(
        &Pairing {
            both_ways: Some(&other_order),
            ..pairing(&order)
        },
        &[],
        &left,
        &right,
    );
    let mut diff = StageDiff {
        stage: stage.to_owned(),
        is_source: planned.spec().rows == RowRule::Source,
        inputs: diff_inputs(planned, first, second),
        rows_of_both: both.len(),
        rows_of_first: order.len() - both.len(),
        rows_of_second: right.ids().len() - both.len(),
        keys: Vec::new(),
        first: None,
    };
    for field in &planned.spec().writes {
        let key = field.name.as_ref();
        let compared = ComparedKey {
            left: key,
            right: key,
            tolerance: Tolerance::EXACT,
        };
        let mut found = compare_rows(&pairing(&both), &[compared], &left, &right);
        let is_identifier = field.is_identifier();
        if let Some(first) = found.first.as_mut().filter(|_| is_identifier) {
            first.absolute = None;
        }
        let measured = |value: f64| (found.numbers > 0 && !is_identifier).then_some(value);
        diff.keys.push(KeyDiff {
            key: key.to_owned(),
            values: found.values,
            differences: found.differences,
            is_identifier,
            largest: measured(found.largest),
            mean: measured(found.total / found.numbers.max(1) as f64),
            unlike: found.unlike,
        });
        diff.first = diff.first.or(found.first);
    }
    // Values of rows that both runs have say more than rows that one of them lacks.
    diff.first = diff.first.or(rows.first);
    diff
}

impl StageDiff {
    /// Values and rows that differ.
    pub fn differences(&self) -> u64 {
        let rows = (self.rows_of_first + self.rows_of_second) as u64;
        rows + self.keys.iter().map(|key| key.differences).sum::<u64>()
    }
}

impl StepDiff {
    /// The first difference in the order of the plan; a stage's input comes before its output.
    pub fn first(&self) -> Option<&Difference> {
        self.parting().map(|parting| parting.first)
    }

    /// As [`StepDiff::first`], with its cause.
    pub fn parting(&self) -> Option<Parting<'_>> {
        self.stages.iter().find_map(|stage| {
            let given = stage.inputs.first.as_ref();
            let first = given.or(stage.first.as_ref())?;
            Some(Parting {
                step: self.step,
                first,
                cause: stage.inputs.cause(stage.is_source),
            })
        })
    }
}

impl RunDiff {
    /// Where the runs diverge, in the recorded rows.
    pub fn parting(&self) -> Option<Parting<'_>> {
        self.steps.iter().find_map(StepDiff::parting)
    }
}

/// Settings of two resolved configurations that differ, by dotted names; `run.dir` is ignored.
pub fn diff_settings(first: &Value, second: &Value) -> Vec<(String, Value, Value)> {
    changed(first, second)
        .filter(|change| change.name != "run.dir")
        .map(|change| (change.name, change.recorded, change.now))
        .collect()
}

#[cfg(test)]
mod tests {
    use verl_declare::pipe::{DataPipe, stage_fn};
    use verl_plan::Plannable;
    use verl_words::batch::{Batch, RaggedColumn, RowId};
    use verl_words::keys::{ADVANTAGES, PROMPTS};
    use verl_words::stage::StageSpec;

    use super::*;
    use crate::files::RecordedBatch;
    use serde_json::json;

    #[test]
    fn the_run_folder_is_not_compared() {
        let first = json!({"run": {"dir": "a", "seed": 1}});
        let second = json!({"run": {"dir": "b", "seed": 2}});
        let found = diff_settings(&first, &second);
        assert_eq!(found, [("run.seed".to_owned(), json!(1), json!(2))]);
    }

    fn recorded(rows: &[Vec<f32>]) -> RecordedStage {
        let ids: Vec<RowId> = (0..rows.len() as u64)
            .map(|row| RowId::prompt(0, row).expect("in range"))
            .collect();
        let mut batch = Batch::with_rows(&ids);
        batch
            .put(&ADVANTAGES, RaggedColumn::from_rows(rows))
            .expect("rows");
        let recorded = RecordedBatch {
            wave: 0,
            slice: 0,
            batch,
        };
        RecordedStage {
            inputs: vec![recorded.clone()],
            outputs: vec![recorded],
            ..RecordedStage::default()
        }
    }

    fn planned() -> PlannedStage {
        let source = StageSpec::new().rows(RowRule::Source).writes(PROMPTS);
        let spec = StageSpec::new().reads(PROMPTS).writes(ADVANTAGES);
        let plan = DataPipe::new("p")
            .add_stage("source", stage_fn(source, |batch, ctx| ctx.emit(batch)))
            .add_stage("s", stage_fn(spec, |batch, ctx| ctx.emit(batch)))
            .plan();
        plan.expect("a plan").stages()[1].clone()
    }

    #[track_caller]
    fn check(first: &[Vec<f32>], second: &[Vec<f32>], mean: Option<f64>, unlike: Option<&str>) {
        let diff = diff_stage(&planned(), &recorded(first), &recorded(second));
        let key = &diff.keys[0];
        assert_eq!((key.mean, key.unlike.as_deref()), (mean, unlike));
    }

    #[test]
    fn means_are_over_pairs_with_a_distance() {
        check(&[vec![1.0, 2.0]], &[vec![1.0, 4.0]], Some(1.0), None);
        // Three pairs, the first with distance 0.5; then lists of different lengths.
        check(
            &[vec![1.0], vec![1.0, 2.0, 3.0, 4.0, 5.0]],
            &[vec![1.5], vec![1.0, 2.0]],
            Some(0.5 / 3.0),
            Some("lengths 5 and 2"),
        );
        check(&[vec![]], &[vec![1.0]], None, Some("lengths 0 and 1"));
    }
}
