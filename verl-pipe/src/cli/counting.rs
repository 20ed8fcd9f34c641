//! A stage for tests of commands.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::{Batch, RowId};
use verl_words::keys::DATA_ROWS;
use verl_words::stage::{
    BuildContext, ConfigError, RowRule, Stage, StageConfig, StageContext, StageError, StageSpec,
};

/// Numbers the rows of a step; fails in step `fail_at`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Count {
    fail_at: u64,
}

struct Counting {
    rows: u64,
    fail_at: u64,
}

impl StageConfig for Count {
    const KIND: &'static str = "count";
    const SUMMARY: &'static str = "numbers rows";
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(Counting {
            rows: context.batch.prompts as u64,
            fail_at: self.fail_at,
        }))
    }
}

impl Stage for Counting {
    fn spec(&self) -> StageSpec {
        StageSpec::new().rows(RowRule::Source).writes(DATA_ROWS)
    }
    fn run(&mut self, _: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        if context.step == self.fail_at {
            return Err(StageError::failed("no rows left"));
        }
        let ids = (0..self.rows)
            .map(|row| RowId::prompt(0, row))
            .collect::<Result<Vec<_>, _>>()?;
        let mut batch = Batch::with_rows(&ids);
        batch.put(&DATA_ROWS, (0..self.rows).collect::<Vec<_>>())?;
        context.emit(batch)
    }
}
