//! Rows of a data set in the order in which a run draws them, and what turns them into tokens.

use std::sync::Arc;

use verl_models::chat_template::ChatTemplate;
use verl_models::random;
use verl_models::tokenizer::Tokenizer;
use verl_pipe::batch::RowId;
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::{BuildContext, ConfigError, StageContext, StageError, StartContext};

use super::{PromptFormat, Row, target_tokens};
use crate::model::TextTools;
use crate::settings::undeclared;

/// What a source of rows opens when the run starts.
pub(crate) struct Source {
    /// The data set.
    pub(crate) data: Arc<dyn DataLoaderInterface>,
    /// Tokenizer of the model.
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Chat template of the model, where prompts are written by it.
    pub(crate) template: Option<ChatTemplate>,
    /// Longest sequence of the model.
    pub(crate) context: usize,
    /// Id that ends an answer; `None` where no answers are written.
    pub(crate) stop: Option<u32>,
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
    /// Opens the data set `data` with the tokenizer of `model`, and with its chat template where `format` says so.
    ///
    /// # Errors
    /// A data set or model that is not there; a model without what is needed, such as an id that `ends_answers`.
    pub(crate) fn open(
        context: &mut StartContext<'_>,
        data: &str,
        model: &str,
        format: &PromptFormat,
        ends_answers: bool,
    ) -> Result<Source, StageError> {
        let data = context.data(data)?;
        let texts = TextTools::of(context.models, model)?;
        let tokenizer = texts.tokenizer(model, "prompts need")?;
        let variables = &format.template_variables;
        let template = texts.chat_template(model, format.template, variables)?;
        let stop = ends_answers
            .then(|| stop_id(model, &tokenizer, template.as_ref()))
            .transpose()?;
        Ok(Source {
            rows: (0..data.len()).collect(),
            data,
            tokenizer,
            template,
            context: texts.max_tokens,
            stop,
            order: None,
        })
    }

    /// The rows that the step and wave at hand draw, `prompts` of them.
    ///
    /// # Errors
    /// A row or epoch that is past what an identity can tell.
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

    /// Data-set row of a draw in a wave, and its epoch.
    fn draw(&mut self, draw: u64, wave: u64, seed: u64, shuffle: bool) -> (u64, usize) {
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

    /// Leaves out rows whose prompt is too long, or whose answer is where answers are trained on.
    pub(super) fn drop_long(&mut self, format: &PromptFormat) -> Result<(), StageError> {
        let limit = format.limit(self.context);
        let what = format!(
            "every prompt of `{}` is longer than {limit} tokens",
            self.data.origin()
        );
        self.drop_rows(&what, |source, row| {
            let data = source.data.as_ref();
            let prompt = format.encode(data, row, &source.tokenizer, source.template.as_ref())?;
            let answer = match source.stop {
                Some(stop) => {
                    target_tokens(&prompt.answer, stop, data, row, &source.tokenizer)?.len()
                }
                None => 0,
            };
            Ok(prompt.tokens.len() <= limit && prompt.tokens.len() + answer <= source.context)
        })
    }

    /// Leaves out the rows that do not fit; `what` says of the data set that none does.
    ///
    /// # Errors
    /// What `fits` refuses; a data set of which nothing is left.
    pub(crate) fn drop_rows(
        &mut self,
        what: &str,
        fits: impl Fn(&Source, usize) -> Result<bool, DataError>,
    ) -> Result<(), StageError> {
        let mut rows = Vec::with_capacity(self.rows.len());
        for &row in &self.rows {
            if fits(self, row)? {
                rows.push(row);
            }
        }
        let dropped = self.rows.len() - rows.len();
        if rows.is_empty() {
            return Err(StageError::failed(format!(
                "{what}, so that `on_long = \"drop\"` leaves none"
            )));
        }
        if dropped > 0 {
            tracing::info!(
                dropped,
                kept = rows.len(),
                "left out rows that are too long"
            );
        }
        self.rows = rows;
        Ok(())
    }
}

/// Faults of rows that are told together.
const FAULTS: usize = 5;

/// Looks at every row of a data set before anything is drawn, so that a bad one does not end a run when its turn comes:
/// reads them, and tokenises none.
///
/// # Errors
/// The first few rows that `look` refuses, together.
pub(crate) fn look_at_rows(
    data: &dyn DataLoaderInterface,
    look: impl Fn(&Row<'_>) -> Result<(), DataError>,
) -> Result<(), StageError> {
    let mut faults = Vec::new();
    for index in 0..data.len() {
        let looked = Row::read(data, index).and_then(|row| look(&row));
        faults.extend(looked.err());
        if faults.len() > FAULTS {
            break;
        }
    }
    let more = faults.len() > FAULTS;
    faults.truncate(FAULTS);
    if faults.len() < 2 {
        return faults.pop().map_or(Ok(()), |fault| Err(fault.into()));
    }
    let told: Vec<String> = faults.iter().map(|fault| format!("\n  {fault}")).collect();
    Err(StageError::failed(format!(
        "`{}` has rows that cannot be used{}:{}",
        data.origin(),
        if more { ", the first of which are" } else { "" },
        told.concat()
    )))
}

/// Names of a data set and a model that the pipeline does not declare.
pub(crate) fn declared_faults(data: &str, model: &str, context: &BuildContext) -> Vec<ConfigError> {
    let data = undeclared("data", data, &context.data, "data set");
    let model = undeclared("model", model, &context.models, "model");
    data.into_iter().chain(model).collect()
}

/// The id that ends an answer: what the chat template writes after an answer if generation stops at it, else the
/// tokenizer's first end-of-sequence id.
pub(crate) fn stop_id(
    model: &str,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<u32, StageError> {
    let terminator = match template {
        Some(template) => template.terminator(tokenizer).map_err(StageError::failed)?,
        None => None,
    };
    if template.is_some() && terminator.is_none() {
        tracing::warn!(
            model,
            "the chat template does not end an answer with an end-of-sequence id; targets end with the tokenizer's"
        );
    }
    terminator
        .or(tokenizer.eos_id())
        .ok_or_else(|| StageError::Model {
            name: model.to_owned(),
            reason: "has no end-of-sequence id, so that targets cannot end".to_owned(),
        })
}
