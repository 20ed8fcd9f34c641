//! Stage `preferences`: the source of a pipeline that learns from judged answers. A row of a data set becomes a prompt
//! with a chosen and a rejected answer, or a prompt with one answer that is good or bad.
//!
//! | form | columns | writes | next |
//! |---|---|---|---|
//! | pairs | `prompt`, `chosen`, `rejected` | both answers, one row per pair | [`pairs`](crate::pairs), `batch.samples = 2` |
//! | single answers, if `labels` is set | `prompt`, `response`, `labels` | `responses`, `desirable` | any stage on responses, `batch.samples = 1` |
//!
//! A source emits one row per prompt; later stages have `batch.samples` rows per prompt. So this stage reads and checks
//! the data, and [`pairs`](crate::pairs) expands each row into two samples, as `generate` expands a prompt into several.
//! After that, a pair is two responses to one prompt, which every stage on responses can handle.
//!
//! Prompts are written as [`prompts`](crate::prompts) does, and drawn in the same order. An answer is a text, or a
//! conversation whose last message is the assistant's; the messages before it must be the prompt, so an answer is one
//! turn. Its tokens are what the chat template writes after the prompt, up to the token that ends the turn, as `prompts`
//! writes targets. All of them count, whatever the template marks with `{% generation %}`. If the tokens of the prompt are
//! not a prefix of a finished conversation, the row's prompt is what its finished conversations share before their answers,
//! and a warning reports this once.

mod judged;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_models::targets::Target;
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::data::DataError;
use verl_words::keys::{
    CHOSEN_RESPONSES, DATA_ROWS, DESIRABLE, MARGINS, MASK_KINDS, PROMPT_TEXTS, PROMPTS,
    REJECTED_RESPONSES, RESPONSES, mask,
};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, PreviewContext, RowPreviews, RowRule, Stage,
    StageConfig, StageContext, StageError, StageSpec, StartContext,
};

use crate::generate::{RESPONSE_LENGTH, TOKENS};
use crate::model::template_config_fault;
use crate::prompts::{
    OnLong, PROMPT_LENGTH, PromptFormat, RowPreviewer, Shown, Source, Template, declared_faults,
    preview,
};
use crate::settings::metrics;
pub(crate) use judged::JudgedRow;

metrics! {
    CHOSEN_LENGTH: "preference/chosen_length", "tokens", "mean number of tokens of a chosen answer, end-of-sequence included";
    REJECTED_LENGTH: "preference/rejected_length", "tokens", "mean number of tokens of a rejected answer, end-of-sequence included";
    DESIRABLE_SHARE: "preference/desirable_share", "share", "share of single answers that are labelled as good";
}

/// What to do with a pair whose two answers have the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnEqual {
    /// The run stops and reports the row.
    #[default]
    Error,
    /// The row is reported in a warning, and the pair is kept, although it teaches nothing.
    Warn,
}

/// How a row of a data set becomes a prompt with judged answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PreferenceFormat {
    /// Column with the prompt: a text, used as a single user message, or a conversation (a list of objects with `role` and
    /// `content`). Empty: the answers are complete conversations that contain it.
    pub prompt: String,
    /// Column with the answer that is preferred.
    pub chosen: String,
    /// Column with the other answer.
    pub rejected: String,
    /// Column that says by how much the chosen answer is better (reward), for losses with a margin; absent: none.
    pub margins: Option<String>,
    /// Column that says whether an answer is good: true or false, 1 or 0. If set, rows have single answers.
    pub labels: Option<String>,
    /// Column with the answer, if `labels` is set.
    pub response: String,
    /// System message before the conversation.
    pub system: Option<String>,
    /// How messages become text.
    pub template: Template,
    /// Additional variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Column with the tools of a row's conversation, a list of objects or its JSON text, passed to the template as `tools`.
    /// They take precedence over those of `template_variables`. Empty: no column is read.
    pub tools: String,
    /// Column with template variables of the row, an object or its JSON text; they take precedence over
    /// `template_variables`. Empty: no column is read.
    pub row_variables: String,
    /// Longest prompt (tokens); one less than the model's context when absent.
    pub max_prompt_tokens: Option<usize>,
    /// Longest answer, end-of-sequence included (tokens); the rest of the model's context after the prompt when absent.
    pub max_response_tokens: Option<usize>,
    /// What to do with rows whose prompt or answer is too long.
    pub on_long: OnLong,
    /// What to do with a pair whose answers are the same.
    pub on_equal: OnEqual,
}

impl Default for PreferenceFormat {
    fn default() -> Self {
        let format = PromptFormat::default();
        PreferenceFormat {
            prompt: "prompt".to_owned(),
            chosen: "chosen".to_owned(),
            rejected: "rejected".to_owned(),
            margins: None,
            labels: None,
            response: "completion".to_owned(),
            system: format.system,
            template: format.template,
            template_variables: format.template_variables,
            tools: format.tools,
            row_variables: format.row_variables,
            max_prompt_tokens: format.max_prompt_tokens,
            max_response_tokens: None,
            on_long: format.on_long,
            on_equal: OnEqual::Error,
        }
    }
}

impl PreferenceFormat {
    /// How prompts are written; their columns are settings of this format.
    fn prompts(&self) -> PromptFormat {
        PromptFormat {
            answer: String::new(),
            system: self.system.clone(),
            template: self.template,
            template_variables: self.template_variables.clone(),
            tools: self.tools.clone(),
            row_variables: self.row_variables.clone(),
            max_prompt_tokens: self.max_prompt_tokens,
            on_long: self.on_long,
            ..PromptFormat::default()
        }
    }

    /// Name and column of each answer.
    fn answers(&self) -> Vec<(&'static str, &str)> {
        match self.labels {
            Some(_) => vec![("response", &self.response)],
            None => vec![("chosen", &self.chosen), ("rejected", &self.rejected)],
        }
    }

    /// Settings that are missing or contradict each other.
    pub(crate) fn faults(&self) -> Vec<ConfigError> {
        let mut faults = self.prompts().faults();
        let more = [("labels", &self.labels), ("margins", &self.margins)];
        let more = more.into_iter();
        let more = more.filter_map(|(setting, column)| Some((setting, column.as_deref()?)));
        for (setting, column) in self.answers().into_iter().chain(more) {
            if column.is_empty() {
                let help = "set it to a column of the data set";
                faults.push(ConfigError::new(setting, "is empty", help));
            }
        }
        if self.labels.is_some() && self.margins.is_some() {
            faults.push(ConfigError::new(
                "margins",
                "is set together with `labels`, but a single answer has no margin",
                "remove one of them",
            ));
        }
        if self.labels.is_none() && self.chosen == self.rejected {
            faults.push(ConfigError::new(
                "rejected",
                format!("is `{}`, the same column as `chosen`", self.rejected),
                "set it to the column of the answer that is not preferred",
            ));
        }
        if self.max_response_tokens == Some(0) {
            faults.push(ConfigError::new(
                "max_response_tokens",
                "is 0, but an answer has at least one token",
                "set it to the longest answer, or leave it out",
            ));
        }
        faults
    }

    /// Opens `data` with the tokenizer and chat template of `model`, and drops the rows that are too long if `on_long` says
    /// so.
    ///
    /// # Errors
    /// Those of [`Source::open`]; rows that cannot be used; a data set with no rows left.
    pub(crate) fn open(
        &self,
        context: &mut StartContext<'_>,
        data: &str,
        model: &str,
    ) -> Result<Source, StageError> {
        let prompts = self.prompts();
        let mut source = Source::open(context, data, model, &prompts, true)?;
        source.survey(self.on_long, |source, row| {
            Ok(self.show(source, row)?.surveyed())
        })?;
        Ok(source)
    }

    /// Encodes a row before the first step, with what is too long in it and its notes.
    fn show(&self, source: &Source, row: usize) -> Result<Shown, DataError> {
        let prompts = self.prompts();
        let judged = JudgedRow::encode(self, &prompts, source, row)?;
        let long = judged.long(self, &prompts, source.context);
        let names = self.answers().into_iter().map(|(name, _)| name);
        let targets = names.zip(judged.answers.iter().map(|tokens| Target {
            tokens: tokens.clone(),
            trained: vec![true; tokens.len()],
        }));
        let mut shown = Shown {
            text: judged.text.clone(),
            prompt: judged.prompt.clone(),
            answer: None,
            targets: targets.collect(),
            notes: judged.notes.clone(),
            long,
        };
        // The answers of a row that is dropped need not differ; those of a truncated row must differ after truncation.
        if shown.long.is_none() || self.on_long == OnLong::Truncate {
            shown.notes = judged.fit(self, &prompts, source, row)?.notes;
        }
        shown.notes.extend(prompts.tools_note(source, row)?);
        Ok(shown)
    }

    /// Previews of the rows of `data`, before a run.
    pub(crate) fn preview(
        &self,
        context: PreviewContext<'_>,
        data: &str,
        model: &str,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let (read, format) = (self.clone(), self.clone());
        let looks = RowPreviewer::new(
            move |_, row| JudgedRow::measure(&read, row),
            move |source, row| format.show(source, row),
        );
        preview(context, data, model, &self.prompts(), true, looks)
    }

    /// Row `row` within the limits.
    ///
    /// # Errors
    /// [`DataError`] with the row, see [`JudgedRow::encode`] and [`JudgedRow::fit`].
    pub(crate) fn read(&self, source: &Source, row: usize) -> Result<JudgedRow, DataError> {
        let prompts = self.prompts();
        JudgedRow::encode(self, &prompts, source, row)?.fit(self, &prompts, source, row)
    }
}

/// Settings of stage `preferences`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Preferences {
    /// Data set to draw from.
    pub data: String,
    /// Model whose tokenizer and chat template are used.
    pub model: String,
    /// Whether rows are shuffled anew in each epoch; otherwise they keep the order of the data set.
    pub shuffle: bool,
    /// How a row becomes a prompt with judged answers; in a pipeline file its settings are next to the others.
    #[serde(flatten)]
    pub format: PreferenceFormat,
}

impl Default for Preferences {
    fn default() -> Self {
        Preferences {
            data: "train".to_owned(),
            model: "actor".to_owned(),
            shuffle: true,
            format: PreferenceFormat::default(),
        }
    }
}

impl StageConfig for Preferences {
    const KIND: &'static str = "preferences";
    const SUMMARY: &'static str =
        "rows of a data set as prompts with a chosen and a rejected answer, or with a labelled one";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = self.format.faults();
        faults.extend(declared_faults(&self.data, &self.model, context));
        let template = self.format.template;
        faults.extend(template_config_fault(
            "template",
            template,
            &self.model,
            context,
        ));
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(PreferenceStage {
            config: self.clone(),
            prompts: context.batch.prompts.max(1),
            source: None,
        }))
    }
}

/// The running stage.
struct PreferenceStage {
    config: Preferences,
    prompts: usize,
    source: Option<Source>,
}

impl PreferenceStage {
    fn write_answers(
        &self,
        batch: &mut Batch,
        rows: &[JudgedRow],
        context: &mut StageContext<'_>,
    ) -> Result<(), StageError> {
        let column =
            |answer: usize| RaggedColumn::from_rows(rows.iter().map(|row| &row.answers[answer]));
        if self.config.format.labels.is_none() {
            batch.put(&CHOSEN_RESPONSES, column(0))?;
            batch.put(&REJECTED_RESPONSES, column(1))?;
            if self.config.format.margins.is_some() {
                let margins = rows.iter().map(|row| row.margin);
                batch.put(&MARGINS, margins.collect::<Vec<f32>>())?;
            }
        } else {
            batch.put(&RESPONSES, column(0))?;
            let kinds = rows
                .iter()
                .map(|row| vec![mask::ACTION; row.answers[0].len()]);
            batch.put(&MASK_KINDS, RaggedColumn::from_rows(kinds))?;
            let labels = rows.iter().map(|row| u8::from(row.is_desirable));
            batch.put(&DESIRABLE, labels.collect::<Vec<u8>>())?;
        }
        for row in rows {
            context.record(&PROMPT_LENGTH, row.prompt.len() as f64);
            let lengths: Vec<usize> = row.answers.iter().map(Vec::len).collect();
            let tokens = lengths.iter().map(|length| row.prompt.len() + length);
            context.record(&TOKENS, tokens.sum::<usize>() as f64);
            match lengths[..] {
                [chosen, rejected] => {
                    context.record(&CHOSEN_LENGTH, chosen as f64);
                    context.record(&REJECTED_LENGTH, rejected as f64);
                }
                _ => {
                    context.record(&RESPONSE_LENGTH, lengths[0] as f64);
                    context.record(&DESIRABLE_SHARE, f64::from(u8::from(row.is_desirable)));
                }
            }
        }
        Ok(())
    }
}

impl Stage for PreferenceStage {
    fn spec(&self) -> StageSpec {
        let spec = StageSpec::new()
            .writes(PROMPTS.field().shaped("[P, S~]"))
            .writes(PROMPT_TEXTS.field().shaped("[P]"))
            .writes(DATA_ROWS.field().shaped("[P]"));
        let spec = if self.config.format.labels.is_none() {
            let spec = spec.writes(CHOSEN_RESPONSES).writes(REJECTED_RESPONSES);
            let spec = match self.config.format.margins {
                Some(_) => spec.writes(MARGINS.field().shaped("[P]")),
                None => spec,
            };
            spec.metrics(&[CHOSEN_LENGTH, REJECTED_LENGTH])
        } else {
            spec.writes(RESPONSES.field().shaped("[P, T~]"))
                .writes(MASK_KINDS.field().shaped("[P, T~]"))
                .writes(DESIRABLE.field().shaped("[P]"))
                .metrics(&[RESPONSE_LENGTH, DESIRABLE_SHARE])
        };
        let most = self.config.format.max_response_tokens;
        let answers = [&CHOSEN_RESPONSES, &REJECTED_RESPONSES, &RESPONSES];
        let written = answers.map(|key| key.name());
        let written = written
            .into_iter()
            .filter(|name| spec.writes.iter().any(|field| field.name == *name));
        let written: Vec<&str> = written.collect();
        let spec = written.into_iter().fold(spec, |spec, name| {
            spec.bounds(name, "max_response_tokens", most)
        });
        spec.bounds(
            PROMPTS.name(),
            "max_prompt_tokens",
            self.config.format.max_prompt_tokens,
        )
        .rows(RowRule::Source)
        .draws_waves()
        .cardinality(Cardinality::Batch)
        .uses(&self.config.model, Access::Read)
        .metrics(&[PROMPT_LENGTH, TOKENS])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        let Preferences { data, model, .. } = &self.config;
        let source = self.config.format.open(context, data, model)?;
        self.source = Some(source);
        Ok(())
    }

    fn preview(
        &self,
        context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let Preferences {
            data,
            model,
            format,
            ..
        } = &self.config;
        format.preview(context, data, model)
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(source) = &mut self.source else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let ids = source.drawn(context, self.prompts, self.config.shuffle)?;
        let rows = ids.iter().map(|id| {
            let row = id.row() as usize;
            self.config.format.read(source, row)
        });
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let mut batch = Batch::with_rows(&ids);
        batch.put(
            &PROMPTS,
            RaggedColumn::from_rows(rows.iter().map(|row| &row.prompt)),
        )?;
        let texts = rows.iter().map(|row| row.text.clone());
        batch.put(&PROMPT_TEXTS, texts.collect::<Vec<String>>())?;
        batch.put(
            &DATA_ROWS,
            ids.iter().map(|id| id.row()).collect::<Vec<u64>>(),
        )?;
        self.write_answers(&mut batch, &rows, context)?;
        context.emit(batch)
    }
}

#[cfg(test)]
mod tests;
