//! Texts of `samples.jsonl`: responses before, during and after the run.

use std::collections::BTreeSet;

use serde_json::Value;
use verl_run::records::SampleLine;

use super::tables::{choose, evenly};

/// Most steps of each kind whose texts are on the page.
const STEPS: usize = 24;
/// Most lines of one step.
const LINES: usize = 40;

/// The lines of the page, and a note if lines were left out.
pub(crate) fn texts(lines: Vec<SampleLine>) -> (Vec<SampleLine>, Option<String>) {
    let all = lines.len();
    let kind =
        |line: &SampleLine| line.fields.get("kind").and_then(Value::as_str) == Some("evaluation");
    let (evaluations, training): (Vec<SampleLine>, Vec<SampleLine>) =
        lines.into_iter().partition(kind);
    let mut kept = some(evaluations);
    kept.extend(some(training));
    let left = all - kept.len();
    let note = (left > 0).then(|| {
        format!(
            "the page shows {} of {all} lines of samples.jsonl",
            kept.len()
        )
    });
    (kept, note)
}

fn some(lines: Vec<SampleLine>) -> Vec<SampleLine> {
    let steps: BTreeSet<u64> = lines.iter().map(|line| line.step).collect();
    let steps: Vec<u64> = steps.into_iter().collect();
    let chosen = choose(&steps, &[], STEPS);
    let mut kept = Vec::new();
    for step in chosen {
        let of_step: Vec<&SampleLine> = lines.iter().filter(|line| line.step == step).collect();
        kept.extend(evenly(of_step.len(), LINES).map(|at| of_step[at].clone()));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_step_stay() {
        let line = |step: u64, kind: &str| SampleLine {
            step,
            fields: std::iter::once(("kind".to_owned(), kind.into())).collect(),
        };
        let lines: Vec<SampleLine> = (0..=1_000)
            .flat_map(|step| [line(step, "evaluation"), line(step, "training")])
            .collect();
        let (kept, note) = texts(lines);
        assert_eq!(kept.len(), 2 * STEPS);
        let steps: Vec<u64> = kept.iter().map(|line| line.step).collect();
        assert_eq!((steps[0], steps[STEPS - 1], steps[STEPS]), (0, 1_000, 0));
        assert_eq!(
            note.as_deref(),
            Some("the page shows 48 of 2002 lines of samples.jsonl")
        );
        assert_eq!(texts(vec![line(0, "training")]).1, None);
    }
}
