//! What a source draws from: rows of a data set in the order of [`prompts`](super), and a model's tokenizer and template.

use std::sync::Arc;

use verl_models::chat_template::ChatTemplate;
use verl_models::random;
use verl_models::tokenizer::Tokenizer;
use verl_pipe::data::DataLoaderInterface;
use verl_pipe::stage::{StageError, StartContext};

use super::{OnLong, PromptFormat, Template};
use crate::model::TextTools;

/// What is opened when the run starts.
pub(crate) struct Source {
    pub(crate) data: Arc<dyn DataLoaderInterface>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: Option<ChatTemplate>,
    /// Longest sequence of the model.
    pub(crate) context: usize,
    /// Rows that are drawn from.
    pub(crate) rows: Vec<usize>,
    /// The order that was drawn from last: of which seed and epoch, and the order itself. Only saves time.
    pub(crate) order: Option<((u64, u64), Vec<usize>)>,
}

/// How far wave `wave` lies ahead of the first in an epoch of `len` rows: 0, ½, ¼, ¾, ⅛, … of it.
fn ahead(wave: u64, len: u64) -> u64 {
    ((u128::from(wave.reverse_bits()) * u128::from(len)) >> 64) as u64
}

impl Source {
    /// Opens the data set `data` for prompts in `format` to the model `model`.
    ///
    /// # Errors
    /// When one of them is not there, or the model lacks what the format needs.
    pub(crate) fn open(
        context: &mut StartContext<'_>,
        data: &str,
        model: &str,
        format: &PromptFormat,
    ) -> Result<Source, StageError> {
        let data = context.data(data)?;
        let texts = TextTools::of(context.models, model)?;
        let missing = |what: &str| StageError::Model {
            name: model.to_owned(),
            reason: format!("has no {what}"),
        };
        let tokenizer = texts.tokenizer;
        let tokenizer = tokenizer.ok_or_else(|| missing("tokenizer, which prompts need"))?;
        let template = match format.template {
            Template::None => None,
            Template::Chat => {
                let what = "chat template; `template = \"none\"` uses the question as it is";
                let template = texts.template.as_deref().ok_or_else(|| missing(what))?;
                let variables = format.template_variables.clone();
                Some(template.clone().with_variables(variables))
            }
        };
        let mut source = Source {
            rows: (0..data.len()).collect(),
            data,
            tokenizer,
            template,
            context: texts.max_tokens,
            order: None,
        };
        if format.on_long == OnLong::Drop {
            source.drop_long(format)?;
        }
        Ok(source)
    }

    /// Data-set row of a draw in a wave, and its epoch.
    pub(crate) fn draw(&mut self, draw: u64, wave: u64, seed: u64, shuffle: bool) -> (u64, usize) {
        let len = self.rows.len() as u64;
        let (epoch, position) = (draw / len, draw % len + ahead(wave, len));
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

    /// The id that ends an answer of `model`: what the chat template writes after one if generation stops at it, else the
    /// tokenizer's first end-of-sequence id.
    ///
    /// # Errors
    /// When there is no such id.
    pub(crate) fn stop_id(&self, model: &str) -> Result<u32, StageError> {
        let terminator = match &self.template {
            Some(template) => template
                .terminator(&self.tokenizer)
                .map_err(StageError::failed)?,
            None => None,
        };
        if self.template.is_some() && terminator.is_none() {
            tracing::warn!(
                model,
                "the chat template does not end an answer with an end-of-sequence id; targets end with the tokenizer's"
            );
        }
        terminator
            .or(self.tokenizer.eos_id())
            .ok_or_else(|| StageError::Model {
                name: model.to_owned(),
                reason: "has no end-of-sequence id, so that targets cannot end".to_owned(),
            })
    }

    /// Leaves out rows whose prompt is too long.
    pub(super) fn drop_long(&mut self, format: &PromptFormat) -> Result<(), StageError> {
        let limit = format.limit(self.context);
        let mut rows = Vec::with_capacity(self.rows.len());
        for &row in &self.rows {
            let prompt = format.encode(
                self.data.as_ref(),
                row,
                &self.tokenizer,
                self.template.as_ref(),
            )?;
            if prompt.tokens.len() <= limit {
                rows.push(row);
            }
        }
        let dropped = self.rows.len() - rows.len();
        if rows.is_empty() {
            return Err(StageError::failed(format!(
                "every prompt of `{}` is longer than {limit} tokens, so that `on_long = \"drop\"` leaves none",
                self.data.origin()
            )));
        }
        if dropped > 0 {
            tracing::info!(
                dropped,
                kept = rows.len(),
                limit,
                "left out rows whose prompt is too long"
            );
        }
        self.rows = rows;
        Ok(())
    }
}
