//! Rows of a data set in the order in which a run draws them, with the tokenizer and template that encode them.

use std::sync::Arc;

use verl_models::chat_template::ChatTemplate;
use verl_models::random;
use verl_models::tokenizer::Tokenizer;
use verl_words::batch::RowId;
use verl_words::data::DataLoaderInterface;
use verl_words::stage::{BuildContext, ConfigError, StageContext, StageError, StartContext};

use super::PromptFormat;
use crate::model::TextTools;
use crate::settings::undeclared;

/// What a source of rows opens when the run starts.
pub(crate) struct Source {
    /// The data set.
    pub(crate) data: Arc<dyn DataLoaderInterface>,
    /// Tokenizer of the model.
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Chat template of the model, if prompts are written with it.
    pub(crate) template: Option<ChatTemplate>,
    /// Longest sequence of the model.
    pub(crate) context: usize,
    /// Rows that are drawn from.
    pub(crate) rows: Vec<usize>,
    /// The last order that was drawn from, with its seed and epoch; only a cache.
    pub(crate) order: Option<((u64, u64), Vec<usize>)>,
}

/// Offset of wave `wave` from the first wave in an epoch of `len` rows: 0, ½, ¼, ¾, ⅛, … of it.
fn wave_offset(wave: u64, len: u64) -> u64 {
    ((u128::from(wave.reverse_bits()) * u128::from(len)) >> 64) as u64
}

impl Source {
    /// Opens the data set `data` with the tokenizer of `model`, and with its chat template if `format` uses it.
    ///
    /// # Errors
    /// A missing data set or model; a model without a required tokenizer or chat template, or without an end-of-sequence id
    /// if `has_answers`.
    pub(crate) fn open(
        context: &mut StartContext<'_>,
        data: &str,
        model: &str,
        format: &PromptFormat,
        has_answers: bool,
    ) -> Result<Source, StageError> {
        let data = context.data(data)?;
        let texts = TextTools::of(context.models, model)?;
        Source::new(data, &texts, model, format, has_answers)
    }

    /// Like [`open`](Self::open), for a data set and a model that are already open.
    ///
    /// # Errors
    /// A model without a required tokenizer, chat template or end-of-sequence id.
    pub(crate) fn new(
        data: Arc<dyn DataLoaderInterface>,
        texts: &TextTools,
        model: &str,
        format: &PromptFormat,
        has_answers: bool,
    ) -> Result<Source, StageError> {
        let tokenizer = texts.tokenizer(model, "prompts need")?;
        let variables = &format.template_variables;
        let template = texts.chat_template(model, format.template, variables)?;
        if has_answers && tokenizer.eos_id().is_none() {
            return Err(StageError::Model {
                name: model.to_owned(),
                reason: "has no end-of-sequence id, so targets cannot end".to_owned(),
            });
        }
        Ok(Source {
            rows: (0..data.len()).collect(),
            data,
            tokenizer,
            template,
            context: texts.max_tokens,
            order: None,
        })
    }

    /// The `prompts` rows that the current step and wave draw.
    ///
    /// # Errors
    /// A row or epoch that is too large for a row identity.
    pub(crate) fn drawn(
        &mut self,
        context: &StageContext<'_>,
        prompts: usize,
        shuffle: bool,
    ) -> Result<Vec<RowId>, StageError> {
        let first = context.step.saturating_sub(1) * prompts as u64;
        let drawn = (first..first + prompts as u64).map(|draw| {
            let (epoch, row) = self.draw(draw, context.wave, context.seed, shuffle);
            Ok(RowId::prompt(epoch, row as u64)?.in_wave(context.wave)?)
        });
        drawn.collect()
    }

    /// Epoch and data-set row of a draw in a wave.
    fn draw(&mut self, draw: u64, wave: u64, seed: u64, shuffle: bool) -> (u64, usize) {
        let len = self.rows.len() as u64;
        let (epoch, position) = (draw / len, draw % len + wave_offset(wave, len));
        let position = (position % len) as usize;
        if !shuffle {
            return (epoch, self.rows[position]);
        }
        let order = match self.order.take() {
            Some((key, order)) if key == (seed, epoch) => order,
            _ => random::shuffle(seed, epoch, self.rows.len()),
        };
        let row = self.rows[order[position]];
        self.order = Some(((seed, epoch), order));
        (epoch, row)
    }
}

/// Names of a data set and a model that the pipeline does not declare.
pub(crate) fn declared_faults(data: &str, model: &str, context: &BuildContext) -> Vec<ConfigError> {
    let data = undeclared("data", data, &context.data, "data set");
    let model = undeclared("model", model, &context.models, "model");
    data.into_iter().chain(model).collect()
}
