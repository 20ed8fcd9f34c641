//! Stage `episodes`: a source of logged responses with their rewards, for training without sampling.
//!
//! A row of the data set is a prompt, a response and a reward. Rows are drawn as in [`prompts`](crate::prompts): an
//! endless sequence of epochs, each a permutation that depends only on the run's seed and the epoch's number.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_algos::ilql::standardize_returns;
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::keys::{DATA_ROWS, MASK_KINDS, PROMPT_TEXTS, PROMPTS, RESPONSES, REWARDS, mask};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, PreviewContext, RowPreviews, RowRule, Stage,
    StageConfig, StageContext, StageError, StageSpec, StartContext,
};

use crate::generate::TOKENS;
use crate::model::template_config_fault;
use crate::prompts::{
    EncodedExample, OnLong, PromptFormat, Row, RowPreviewer, Shown, Source, Template, preview,
};
use crate::settings::metrics;

metrics! {
    REWARD: "episodes/reward_mean", "reward", "mean reward of the logged responses, before standardisation";
    RESPONSE_LENGTH: "episodes/response_length_mean", "tokens", "mean number of tokens of a logged response, end-of-sequence included";
}

/// Settings of stage `episodes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Episodes {
    /// Data set to draw from.
    pub data: String,
    /// Model whose tokenizer and chat template are used.
    pub model: String,
    /// Column with the question, a text: the only user message.
    pub prompt: String,
    /// Column with the response, a text. Its tokens are what the chat template renders of it after the prompt, up to
    /// the token that ends the turn.
    pub response: String,
    /// Column with the reward of the response, a number.
    pub reward: String,
    /// System message before the question.
    pub system: Option<String>,
    /// How the question becomes text.
    pub template: Template,
    /// Additional variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Column with the tools of a row's conversation, a list of objects or its JSON text, passed to the template as
    /// `tools`; empty: none is read. They take precedence over those of `template_variables`.
    pub tools: String,
    /// Column with additional template variables for that row only, an object or its JSON text; they take precedence
    /// over `template_variables`. Empty: none is read.
    pub row_variables: String,
    /// What happens to rows that do not fit the model's context.
    pub on_long: OnLong,
    /// Whether rewards are standardised to mean 0 and standard deviation 1 over the data set; this reads all rows at
    /// the start.
    pub standardize: bool,
    /// Whether rows are in a new order in each epoch; otherwise they are in the order of the data set.
    pub shuffle: bool,
}

impl Default for Episodes {
    fn default() -> Self {
        Episodes {
            data: "train".to_owned(),
            model: "actor".to_owned(),
            prompt: "prompt".to_owned(),
            response: "response".to_owned(),
            reward: "reward".to_owned(),
            system: None,
            template: Template::default(),
            template_variables: Map::new(),
            tools: PromptFormat::default().tools,
            row_variables: PromptFormat::default().row_variables,
            on_long: OnLong::default(),
            standardize: true,
            shuffle: true,
        }
    }
}

impl Episodes {
    fn format(&self) -> PromptFormat {
        PromptFormat {
            question: self.prompt.clone(),
            answer: self.response.clone(),
            system: self.system.clone(),
            template: self.template,
            template_variables: self.template_variables.clone(),
            tools: self.tools.clone(),
            row_variables: self.row_variables.clone(),
            on_long: self.on_long,
            ..PromptFormat::default()
        }
    }

    /// The reward of row `index`.
    fn reward(&self, data: &dyn DataLoaderInterface, index: usize) -> Result<f64, DataError> {
        self.reward_of(&Row::read(data, index)?)
    }

    /// A logged response to its prompt.
    fn encode(
        &self,
        format: &PromptFormat,
        source: &Source,
        row: usize,
    ) -> Result<EncodedExample, DataError> {
        let (data, template) = (source.data.as_ref(), source.template.as_ref());
        format.encode_response(data, row, &source.tokenizer, template)
    }

    /// A row as a preview shows it.
    fn show(&self, format: &PromptFormat, source: &Source, row: usize) -> Result<Shown, DataError> {
        let example = self.encode(format, source, row)?;
        self.reward(source.data.as_ref(), row)?;
        Shown::example(format, source, row, example, None, Some("response"))
    }

    fn reward_of(&self, row: &Row<'_>) -> Result<f64, DataError> {
        let (column, value) = (&self.reward, row.value(&self.reward)?);
        let number = value.as_f64().filter(|number| number.is_finite());
        number.ok_or_else(|| row.fault(format!("column `{column}` contains {value}, not a number")))
    }
}

impl StageConfig for Episodes {
    const KIND: &'static str = "episodes";
    const SUMMARY: &'static str = "logged responses with rewards, for training without sampling";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let format = self.format();
        let mut faults = format.faults();
        for (setting, name, known, kind) in [
            ("data", &self.data, &context.data, "data set"),
            ("model", &self.model, &context.models, "model"),
        ] {
            if !known.contains(name) {
                faults.push(ConfigError::new(
                    setting,
                    format!("is `{name}`, but the pipeline declares no {kind} with this name"),
                    format!("use a declared {kind}: {}", known.join(", ")),
                ));
            }
        }
        let template = self.template;
        faults.extend(template_config_fault(
            "template",
            template,
            &self.model,
            context,
        ));
        for (setting, column) in [("response", &self.response), ("reward", &self.reward)] {
            if column.is_empty() {
                faults.push(ConfigError::new(
                    setting,
                    "is empty",
                    format!("set it to the column that contains the {setting}"),
                ));
            }
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(EpisodeStage {
            config: self.clone(),
            format,
            rows: context.batch.prompts.max(1),
            opened: None,
        }))
    }
}

/// The running stage.
struct EpisodeStage {
    config: Episodes,
    format: PromptFormat,
    rows: usize,
    opened: Option<Opened>,
}

/// What the stage opens when the run starts.
struct Opened {
    source: Source,
    /// Standardised rewards by row, if `standardize` is set.
    rewards: Option<HashMap<usize, f64>>,
}

impl EpisodeStage {
    fn open(&self, context: &mut StartContext<'_>) -> Result<Opened, StageError> {
        let Episodes { data, model, .. } = &self.config;
        let mut source = Source::open(context, data, model, &self.format, true)?;
        let (config, format) = (&self.config, &self.format);
        source.survey(format.on_long, |source, row| {
            Ok(config.show(format, source, row)?.surveyed())
        })?;
        let rewards = match self.config.standardize {
            true => {
                let data = source.data.as_ref();
                let rewards = source.rows.iter().map(|row| self.config.reward(data, *row));
                let rewards = rewards.collect::<Result<Vec<f64>, _>>()?;
                let rewards = standardize_returns(&rewards).map_err(StageError::failed)?;
                Some(source.rows.iter().copied().zip(rewards).collect())
            }
            false => None,
        };
        Ok(Opened { source, rewards })
    }
}

impl Stage for EpisodeStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .writes(PROMPTS.field().shaped("[P, S~]"))
            .writes(PROMPT_TEXTS.field().shaped("[P]"))
            .writes(DATA_ROWS.field().shaped("[P]"))
            .writes(RESPONSES.field().shaped("[P, T~]"))
            .writes(MASK_KINDS.field().shaped("[P, T~]"))
            .writes(REWARDS.field().shaped("[P]"))
            .rows(RowRule::Source)
            .cardinality(Cardinality::Batch)
            .uses(&self.config.model, Access::Read)
            .metrics(&[REWARD, RESPONSE_LENGTH, TOKENS])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        self.opened = Some(self.open(context)?);
        Ok(())
    }

    fn preview(
        &self,
        context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let (config, format) = (self.config.clone(), self.format.clone());
        let Episodes { data, model, .. } = &self.config;
        let (read, asked) = (self.config.clone(), self.format.clone());
        let looks = RowPreviewer::new(
            move |source, row| {
                read.reward_of(row)?;
                asked.measure(row, source.template.as_ref(), true)
            },
            move |source, row| config.show(&format, source, row),
        );
        preview(context, data, model, &self.format, true, looks)
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(mut opened) = self.opened.take() else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let written = self.write(&mut opened, context);
        self.opened = Some(opened);
        context.emit(written?)
    }
}

impl EpisodeStage {
    /// The episodes of the current step.
    fn write(
        &self,
        opened: &mut Opened,
        context: &mut StageContext<'_>,
    ) -> Result<Batch, StageError> {
        let source = &mut opened.source;
        let ids = source.drawn(context, self.rows, self.config.shuffle)?;
        let (mut texts, mut rewards) = (Vec::new(), Vec::new());
        let (mut prompts, mut responses) = (RaggedColumn::new(), RaggedColumn::new());
        let mut kinds = RaggedColumn::new();
        for id in &ids {
            let row = id.row() as usize;
            let example = self.config.encode(&self.format, source, row)?;
            let data = source.data.as_ref();
            let example = self
                .format
                .fit_example(example, source.context, data, row)?;
            let (prompt, response) = (example.prompt, example.target.tokens);
            let raw = self.config.reward(data, row)?;
            let standardised = opened.rewards.as_ref().map(|rewards| rewards.get(&row));
            let reward = standardised.map_or(raw, |reward| reward.copied().unwrap_or(raw));
            context.record(&REWARD, raw);
            context.record(&RESPONSE_LENGTH, response.len() as f64);
            context.record(&TOKENS, (prompt.tokens.len() + response.len()) as f64);
            prompts.push(&prompt.tokens);
            texts.push(prompt.text);
            kinds.push(&vec![mask::ACTION; response.len()]);
            responses.push(&response);
            rewards.push(Some(reward as f32));
        }
        let rows: Vec<u64> = ids.iter().map(|id| id.row()).collect();
        let mut batch = Batch::with_rows(&ids);
        batch.put(&PROMPTS, prompts)?;
        batch.put(&PROMPT_TEXTS, texts)?;
        batch.put(&DATA_ROWS, rows)?;
        batch.put(&RESPONSES, responses)?;
        batch.put(&MASK_KINDS, kinds)?;
        batch.put(&REWARDS, rewards)?;
        Ok(batch)
    }
}
