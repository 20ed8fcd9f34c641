//! Stage `pairs`: both responses of each preference pair as rows of their own.
//!
//! Rows of a pair are neighbours with one group id: row 2i is the chosen response, row 2i + 1 the rejected one. Whatever
//! trains on responses can train on them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_pipe::batch::{Batch, RaggedColumn};
use verl_pipe::keys::{CHOSEN_RESPONSES, MASK_KINDS, PROMPTS, REJECTED_RESPONSES, RESPONSES, mask};
use verl_pipe::stage::{
    BuildContext, ConfigError, RowRule, Stage, StageConfig, StageContext, StageError, StageSpec,
};

/// Rows of a pair.
const SIDES: usize = 2;

/// Settings of stage `pairs`; there are none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Pairs {}

impl StageConfig for Pairs {
    const KIND: &'static str = "pairs";
    const SUMMARY: &'static str = "both responses of each preference pair as rows of their own";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(PairsStage))
    }
}

/// The running stage.
#[derive(Clone)]
struct PairsStage;

impl Stage for PairsStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS.field().shaped("[P, S~]"))
            .reads(CHOSEN_RESPONSES.field().shaped("[P, C~]"))
            .reads(REJECTED_RESPONSES.field().shaped("[P, R~]"))
            .writes(RESPONSES)
            .writes(MASK_KINDS)
            .rows(RowRule::Expand(SIDES))
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let chosen = input.get(&CHOSEN_RESPONSES)?;
        let rejected = input.get(&REJECTED_RESPONSES)?;
        let (mut responses, mut kinds) = (RaggedColumn::new(), RaggedColumn::new());
        for pair in chosen.rows().zip(rejected.rows()) {
            for response in [pair.0, pair.1] {
                responses.push(response);
                kinds.push(&vec![mask::ACTION; response.len()]);
            }
        }
        let mut output = input.rows_only().repeat(SIDES)?;
        output.put(&RESPONSES, responses)?;
        output.put(&MASK_KINDS, kinds)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::run;
    use verl_pipe::batch::RowId;

    #[test]
    fn the_sides_of_a_pair_are_neighbours_of_one_group() {
        let ids = [7, 3].map(|row| RowId::prompt(0, row).unwrap());
        let mut batch = Batch::with_rows(&ids);
        batch
            .put(
                &CHOSEN_RESPONSES,
                RaggedColumn::from_rows([&[1u32, 2][..], &[3]]),
            )
            .unwrap();
        batch
            .put(
                &REJECTED_RESPONSES,
                RaggedColumn::from_rows([&[4u32][..], &[5, 6, 7]]),
            )
            .unwrap();
        let kept = run(&mut PairsStage, 1, batch);
        let [made] = kept.batches.as_slice() else {
            panic!("one batch");
        };
        let responses = made.get(&RESPONSES).unwrap();
        let rows: Vec<&[u32]> = responses.rows().collect();
        assert_eq!(rows, [&[1, 2][..], &[4], &[3], &[5, 6, 7]]);
        let kinds = made.get(&MASK_KINDS).unwrap();
        assert!(
            kinds
                .rows()
                .zip(rows)
                .all(|(kinds, row)| kinds == vec![mask::ACTION; row.len()])
        );
        let groups = made.groups();
        assert!(groups[0] == groups[1] && groups[2] == groups[3] && groups[1] != groups[2]);
    }
}
