//! Stage `episodes`: a source of logged responses with their rewards, for training without sampling.
//!
//! A row of the data set is a prompt, a response and a reward. Rows are drawn as by [`prompts`](crate::prompts): an endless
//! sequence of epochs, each a permutation that depends on the run's seed and the epoch's number alone.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::ilql::standardize_returns;
use verl_models::chat_template::ChatTemplate;
use verl_models::random;
use verl_models::tokenizer::Tokenizer;
use verl_pipe::batch::{Batch, RaggedColumn, RowId};
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::keys::{DATA_ROWS, MASK_KINDS, PROMPT_TEXTS, PROMPTS, RESPONSES, REWARDS, mask};
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, RowRule, Stage, StageConfig, StageContext,
    StageError, StageSpec, StartContext,
};

use crate::generate::TOKENS;
use crate::model::{TextTools, template_config_fault};
use crate::prompts::source::stop_id;
use crate::prompts::{PromptFormat, Row, Template, look_at_rows, target_tokens};
use crate::settings::metrics;

metrics! {
    REWARD: "episodes/reward_mean", "reward", "mean reward of the logged responses, before it is standardised";
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
    /// Column with the question, a text: the only message of the user.
    pub prompt: String,
    /// Column with the response, a text; it ends with the end-of-sequence id.
    pub response: String,
    /// Column with the reward of the response, a number.
    pub reward: String,
    /// System message before the question.
    pub system: Option<String>,
    /// How the question becomes text.
    pub template: Template,
    /// Whether rewards get mean 0 and deviation 1 over the data set; all rows are read at the start for that.
    pub standardize: bool,
    /// Whether rows come in a new order in each epoch; otherwise as the data set has them.
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
            ..PromptFormat::default()
        }
    }

    /// The reward of row `index`.
    fn reward(&self, data: &dyn DataLoaderInterface, index: usize) -> Result<f64, DataError> {
        self.reward_of(&Row::read(data, index)?)
    }

    fn reward_of(&self, row: &Row<'_>) -> Result<f64, DataError> {
        let (column, value) = (&self.reward, row.value(&self.reward)?);
        let number = value.as_f64().filter(|number| number.is_finite());
        number.ok_or_else(|| row.fault(format!("column `{column}` holds {value}, not a number")))
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
                    format!("names `{name}`, but the pipeline declares no such {kind}"),
                    format!("declared are: {}", known.join(", ")),
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
                    format!("name the column that holds the {setting}"),
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
            source: None,
        }))
    }
}

/// The running stage.
struct EpisodeStage {
    config: Episodes,
    format: PromptFormat,
    rows: usize,
    source: Option<Source>,
}

/// What is opened when the run starts.
struct Source {
    data: Arc<dyn DataLoaderInterface>,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// Longest sequence of the model.
    context: usize,
    /// Id that ends a response.
    stop: u32,
    /// Standardised rewards of all rows, where they are wanted.
    rewards: Option<Vec<f64>>,
    /// The order that was drawn from last: of which seed and epoch, and the order itself. Only saves time.
    order: Option<((u64, u64), Vec<usize>)>,
}

impl Source {
    /// Data-set row of a draw, and its epoch.
    fn draw(&mut self, draw: u64, seed: u64, shuffle: bool) -> (u64, usize) {
        let len = self.data.len();
        let (epoch, position) = (draw / len as u64, (draw % len as u64) as usize);
        if !shuffle {
            return (epoch, position);
        }
        let order = match self.order.take() {
            Some((key, order)) if key == (seed, epoch) => order,
            _ => random::shuffle(seed, epoch, len),
        };
        let row = order[position];
        self.order = Some(((seed, epoch), order));
        (epoch, row)
    }
}

impl EpisodeStage {
    fn open(&self, context: &mut StartContext<'_>) -> Result<Source, StageError> {
        let data = context.data(&self.config.data)?;
        let model = &self.config.model;
        let texts = TextTools::of(context.models, model)?;
        let tokenizer = texts.tokenizer(model, "episodes need")?;
        let variables = &self.format.template_variables;
        let template = texts.chat_template(model, self.format.template, variables)?;
        look_at_rows(data.as_ref(), |row| {
            self.format.look(row)?;
            self.config.reward_of(row).map(drop)
        })?;
        let rewards = match self.config.standardize {
            true => {
                let rewards = (0..data.len()).map(|row| self.config.reward(data.as_ref(), row));
                let rewards = rewards.collect::<Result<Vec<f64>, _>>()?;
                Some(standardize_returns(&rewards).map_err(StageError::failed)?)
            }
            false => None,
        };
        Ok(Source {
            stop: stop_id(model, &tokenizer, template.as_ref())?,
            context: texts.max_tokens,
            data,
            tokenizer,
            template,
            rewards,
            order: None,
        })
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
        self.source = Some(self.open(context)?);
        Ok(())
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(source) = &mut self.source else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let first = context.step.saturating_sub(1) * self.rows as u64;
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        let (mut texts, mut rewards) = (Vec::new(), Vec::new());
        let (mut prompts, mut responses) = (RaggedColumn::new(), RaggedColumn::new());
        let mut kinds = RaggedColumn::new();
        for draw in first..first + self.rows as u64 {
            let (epoch, row) = source.draw(draw, context.seed, self.config.shuffle);
            let data = source.data.as_ref();
            let template = source.template.as_ref();
            let prompt = self.format.encode(data, row, &source.tokenizer, template)?;
            let response =
                target_tokens(&prompt.answer, source.stop, data, row, &source.tokenizer)?;
            let tokens = prompt.tokens.len() + response.len();
            if tokens > source.context {
                let context = source.context;
                return Err(StageError::Data(DataError::Row {
                    path: data.origin(),
                    row: row + 1,
                    reason: format!(
                        "prompt and response have {tokens} tokens, but the model's context is {context}"
                    ),
                }));
            }
            let raw = self.config.reward(data, row)?;
            let reward = source.rewards.as_ref().map_or(raw, |rewards| rewards[row]);
            context.record(&REWARD, raw);
            context.record(&RESPONSE_LENGTH, response.len() as f64);
            context.record(&TOKENS, tokens as f64);
            ids.push(RowId::prompt(epoch, row as u64)?);
            rows.push(row as u64);
            prompts.push(&prompt.tokens);
            texts.push(prompt.text);
            kinds.push(&vec![mask::ACTION; response.len()]);
            responses.push(&response);
            rewards.push(Some(reward as f32));
        }
        let mut batch = Batch::with_rows(&ids);
        batch.put(&PROMPTS, prompts)?;
        batch.put(&PROMPT_TEXTS, texts)?;
        batch.put(&DATA_ROWS, rows)?;
        batch.put(&RESPONSES, responses)?;
        batch.put(&MASK_KINDS, kinds)?;
        batch.put(&REWARDS, rewards)?;
        context.emit(batch)
    }
}
