//! Stage `preferences`: the source of a pipeline that learns from pairs; a prompt with a chosen and a rejected response.
//!
//! Rows are drawn as [`prompts`](crate::prompts) draws them. Stage [`pairs`](crate::pairs) makes the two responses rows of
//! their own.

mod format;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_pipe::batch::{Batch, RaggedColumn, RowId};
use verl_pipe::keys::{
    CHOSEN_RESPONSES, DATA_ROWS, MARGINS, PROMPT_TEXTS, PROMPTS, REJECTED_RESPONSES,
};
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, RowRule, Stage, StageConfig, StageContext,
    StageError, StageSpec, StartContext,
};

pub use format::PairFormat;
pub(crate) use format::{EncodedPair, PairSource};

use crate::prompts::PROMPT_LENGTH;
use crate::settings::undeclared;

/// Settings of stage `preferences`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Preferences {
    /// Data set to draw from.
    pub data: String,
    /// Model whose tokenizer and chat template are used.
    pub model: String,
    /// How a row becomes a pair.
    pub format: PairFormat,
    /// Whether rows come in a new order in each epoch; otherwise as the data set has them.
    pub shuffle: bool,
}

impl Default for Preferences {
    fn default() -> Self {
        Preferences {
            data: "train".to_owned(),
            model: "actor".to_owned(),
            format: PairFormat::default(),
            shuffle: true,
        }
    }
}

impl StageConfig for Preferences {
    const KIND: &'static str = "preferences";
    const SUMMARY: &'static str =
        "rows of a data set as prompts with a chosen and a rejected response";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = self.format.faults();
        faults.extend(undeclared("data", &self.data, &context.data, "data set"));
        faults.extend(undeclared("model", &self.model, &context.models, "model"));
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(PreferenceStage {
            config: self.clone(),
            prompts: context.batch.prompts.max(1),
            pairs: None,
        }))
    }
}

/// The running stage.
struct PreferenceStage {
    config: Preferences,
    prompts: usize,
    pairs: Option<PairSource>,
}

impl Stage for PreferenceStage {
    fn spec(&self) -> StageSpec {
        let mut spec = StageSpec::new()
            .writes(PROMPTS.field().shaped("[P, S~]"))
            .writes(PROMPT_TEXTS.field().shaped("[P]"))
            .writes(DATA_ROWS.field().shaped("[P]"))
            .writes(CHOSEN_RESPONSES.field().shaped("[P, C~]"))
            .writes(REJECTED_RESPONSES.field().shaped("[P, R~]"));
        if self.config.format.margin.is_some() {
            spec = spec.writes(MARGINS.field().shaped("[P]"));
        }
        spec.rows(RowRule::Source)
            .draws_waves()
            .cardinality(Cardinality::Batch)
            .uses(&self.config.model, Access::Read)
            .metrics(&[PROMPT_LENGTH])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        let (data, model) = (&self.config.data, &self.config.model);
        self.pairs = Some(PairSource::open(context, data, model, &self.config.format)?);
        Ok(())
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(pairs) = &mut self.pairs else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let first = context.step.saturating_sub(1) * self.prompts as u64;
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        let (mut texts, mut margins) = (Vec::new(), Vec::new());
        let (mut prompts, mut chosen, mut rejected) = (
            RaggedColumn::new(),
            RaggedColumn::new(),
            RaggedColumn::new(),
        );
        for draw in first..first + self.prompts as u64 {
            let (wave, seed, shuffle) = (context.wave, context.seed, self.config.shuffle);
            let (epoch, row) = pairs.source.draw(draw, wave, seed, shuffle);
            let pair = pairs.pair(row)?;
            context.record(&PROMPT_LENGTH, pair.prompt.tokens.len() as f64);
            ids.push(RowId::prompt(epoch, row as u64)?.in_wave(wave)?);
            rows.push(row as u64);
            prompts.push(&pair.prompt.tokens);
            texts.push(pair.prompt.text);
            chosen.push(&pair.chosen);
            rejected.push(&pair.rejected);
            margins.extend(pair.margin);
        }
        let mut batch = Batch::with_rows(&ids);
        batch.put(&PROMPTS, prompts)?;
        batch.put(&PROMPT_TEXTS, texts)?;
        batch.put(&DATA_ROWS, rows)?;
        batch.put(&CHOSEN_RESPONSES, chosen)?;
        batch.put(&REJECTED_RESPONSES, rejected)?;
        if self.config.format.margin.is_some() {
            batch.put(&MARGINS, margins)?;
        }
        context.emit(batch)
    }
}

#[cfg(test)]
mod tests;
