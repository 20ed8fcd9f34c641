//! Stage `pairs`: each row with a chosen and a rejected answer becomes two neighbouring responses to one prompt.
//!
//! Row 2i is the chosen and row 2i + 1 the rejected answer of pair i, both in the group of their prompt, so that stages
//! that score responses work on them unchanged. The rows are also labelled, so that losses on single answers can learn
//! from pairs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::keys::{
    CHOSEN_RESPONSES, DESIRABLE, MASK_KINDS, REJECTED_RESPONSES, RESPONSES, mask,
};
use verl_words::stage::{
    BuildContext, ConfigError, RowRule, Stage, StageConfig, StageContext, StageError, StageSpec,
};

/// Settings of stage `pairs`; it has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Pairs {}

impl StageConfig for Pairs {
    const KIND: &'static str = "pairs";
    const SUMMARY: &'static str =
        "the chosen and the rejected answer of a prompt as two neighbouring responses";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(PairStage))
    }
}

/// The running stage.
#[derive(Clone)]
struct PairStage;

impl Stage for PairStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(CHOSEN_RESPONSES)
            .reads(REJECTED_RESPONSES)
            .writes(RESPONSES)
            .writes(MASK_KINDS)
            .writes(DESIRABLE)
            .rows(RowRule::Expand(2))
            .as_long_as(
                RESPONSES.name(),
                [CHOSEN_RESPONSES.name(), REJECTED_RESPONSES.name()],
            )
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (chosen, rejected) = (
            input.get(&CHOSEN_RESPONSES)?,
            input.get(&REJECTED_RESPONSES)?,
        );
        let mut batch = input.rows_only().repeat(2)?;
        let mut responses = RaggedColumn::new();
        let mut kinds = RaggedColumn::new();
        for sides in chosen.rows().zip(rejected.rows()) {
            for side in [sides.0, sides.1] {
                responses.push(side);
                kinds.push(&vec![mask::ACTION; side.len()]);
            }
        }
        batch.put(&RESPONSES, responses)?;
        batch.put(&MASK_KINDS, kinds)?;
        batch.put(&DESIRABLE, [1u8, 0].repeat(input.num_rows()))?;
        context.emit(batch)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RowId;

    use super::*;
    use crate::sink;

    #[test]
    fn sides_are_neighbours_of_one_group() {
        let ids = [4, 9].map(|row| RowId::prompt(1, row).unwrap());
        let mut input = Batch::with_rows(&ids);
        let chosen = [vec![1u32, 2], vec![3]];
        let rejected = [vec![4u32], vec![5, 6, 7]];
        input
            .put(&CHOSEN_RESPONSES, RaggedColumn::from_rows(&chosen))
            .unwrap();
        input
            .put(&REJECTED_RESPONSES, RaggedColumn::from_rows(&rejected))
            .unwrap();
        let mut stage = PairStage;
        let kept = sink::run(&mut stage, 1, input);
        let [output] = &kept.batches[..] else {
            panic!("{} batches", kept.batches.len());
        };
        for field in stage.spec().writes {
            output.check_field(&field).unwrap();
        }
        let responses: Vec<&[u32]> = output.get(&RESPONSES).unwrap().rows().collect();
        assert_eq!(responses, [&[1, 2][..], &[4], &[3], &[5, 6, 7]]);
        assert_eq!(output.get(&DESIRABLE).unwrap().values(), [1, 0, 1, 0]);
        let kinds = output.get(&MASK_KINDS).unwrap();
        assert_eq!(kinds.values(), [mask::ACTION; 7]);
        let written: Vec<String> = output.ids().iter().map(RowId::to_string).collect();
        assert_eq!(written, ["1.4#0", "1.4#1", "1.9#0", "1.9#1"]);
        assert_eq!(output.group_ranges(), [0..2, 2..4]);
    }
}
