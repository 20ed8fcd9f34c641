//! Encodes a row of a data set as the tokens of a prompt and a target. Pure: the same row yields the same tokens.

use serde_json::{Map, Value};
use verl_models::chat_template::{ChatTemplate, message};
use verl_models::targets::{Lesson, Note, Target, TargetError, Writer};
use verl_models::tokenizer::Tokenizer;
use verl_words::data::{DataError, DataLoaderInterface};

use super::format::{OnLong, PromptFormat, PromptInput, Row, Template, TrainOn, role};
use super::notes::RowNote;
use super::preview::text_bytes;
use super::source::Source;

/// A prompt with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// The prompt as text; complete even if the tokens are truncated.
    pub text: String,
    /// Its token ids, at least one.
    pub tokens: Vec<u32>,
    /// The reference answer as in the data set; empty if the format has no column of answers.
    pub answer: String,
}

/// A prompt with the target that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedExample {
    /// The prompt.
    pub prompt: EncodedPrompt,
    /// The tokens after it, and which of them are trained.
    pub target: Target,
    /// What to report about them.
    pub notes: Vec<Note>,
}

/// A prompt or answer that is too long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TooLong {
    /// Its length (tokens).
    pub tokens: usize,
    /// What is too long, and which limit it exceeds.
    pub reason: String,
    /// How to make it fit, as an imperative.
    pub help: &'static str,
}

impl TooLong {
    /// The error message for a row that may not be truncated.
    pub fn refusal(&self) -> String {
        let TooLong { reason, help, .. } = self;
        format!("{reason}; {help}, or set `on_long` to \"drop\" or \"truncate\"")
    }
}

/// A question and its answer, before tokenisation.
enum RawExample {
    /// A text and its answer.
    Plain(String, String),
    /// A conversation that ends with the assistant's message, and the reference answer.
    Conversation(Vec<Value>, String),
}

impl PromptFormat {
    /// Prompt and answer of a row; `template` is the model's, with the variables of this format already set.
    ///
    /// The result may be longer than `max_prompt_tokens`; see [`PromptFormat::fit`].
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, the template or the tokenizer fails, the
    /// prompt has no token.
    pub fn encode(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<EncodedPrompt, DataError> {
        let row = Row::read(data, index)?;
        let (asked, answer) = self.read(&row)?;
        let writer = self.writer(&row, tokenizer, template)?;
        let written = match (self.template, asked) {
            (Template::None, PromptInput::Text(text)) => {
                writer.plain_prompt(&text).map(|tokens| (text, tokens))
            }
            (Template::None, PromptInput::Messages(_)) => {
                return Err(messages_without_template(&row));
            }
            (Template::Chat, asked) => writer.prompt(&self.conversation(&row, asked)?),
        };
        let (text, tokens) = written.map_err(|error| refused(&row, &error))?;
        Ok(EncodedPrompt {
            text,
            tokens,
            answer,
        })
    }

    /// Prompt and target of a row. The target is the answer of its column, or the last messages of a conversation that ends
    /// with the assistant's.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode); a row without an answer.
    pub fn encode_example(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        train_on: TrainOn,
    ) -> Result<EncodedExample, DataError> {
        self.encode_target(
            data,
            index,
            tokenizer,
            template,
            |writer, messages| match train_on {
                TrainOn::Last => writer.last_turn(messages),
                TrainOn::All => writer.all_turns(messages),
            },
        )
    }

    /// Prompt and target of a row whose answer is a judged response, of which all tokens count.
    ///
    /// # Errors
    /// Those of [`encode_example`](Self::encode_example).
    pub(crate) fn encode_response(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<EncodedExample, DataError> {
        self.encode_target(data, index, tokenizer, template, |writer, messages| {
            let (before, answer) = messages.split_at(messages.len().saturating_sub(1));
            writer.answers(before, answer)
        })
    }

    fn encode_target(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        written: impl Fn(&Writer<'_>, &[Value]) -> Result<Lesson, TargetError>,
    ) -> Result<EncodedExample, DataError> {
        let row = Row::read(data, index)?;
        let writer = self.writer(&row, tokenizer, template)?;
        let (lesson, answer) = match self.raw_example(&row)? {
            RawExample::Plain(question, answer) => {
                (writer.plain(&question, &[answer.as_str()]), answer)
            }
            RawExample::Conversation(messages, answer) => (written(&writer, &messages), answer),
        };
        let Lesson {
            text,
            prompt,
            mut targets,
            notes,
        } = lesson.map_err(|error| refused(&row, &error))?;
        Ok(EncodedExample {
            prompt: EncodedPrompt {
                text,
                tokens: prompt,
                answer,
            },
            target: targets.pop().unwrap_or_default(),
            notes,
        })
    }

    /// The writer of a row's conversations.
    pub(crate) fn writer<'a>(
        &self,
        row: &Row<'_>,
        tokenizer: &'a Tokenizer,
        template: Option<&'a ChatTemplate>,
    ) -> Result<Writer<'a>, DataError> {
        let variables = match template {
            Some(template) => self.variables(row, template)?,
            None => Map::new(),
        };
        Ok(Writer::new(tokenizer, template, variables))
    }

    /// Template variables of one row: its tools, and those of the column `row_variables`.
    fn variables(
        &self,
        row: &Row<'_>,
        template: &ChatTemplate,
    ) -> Result<Map<String, Value>, DataError> {
        let mut variables = self.row_variables(row)?;
        if template.reads_tools()
            && let Some(tools) = row.optional_json(&self.tools)?
        {
            let is_list = |list: &Vec<Value>| list.iter().all(Value::is_object);
            if !tools.as_array().is_some_and(is_list) {
                return Err(row.fault(format!(
                    "column `{}` contains neither a list of objects nor its JSON text; set `tools` to another column, or to \"\" to read none",
                    self.tools
                )));
            }
            variables.insert("tools".to_owned(), tools);
        }
        Ok(variables)
    }

    /// Template variables in the row's column `row_variables`.
    fn row_variables(&self, row: &Row<'_>) -> Result<Map<String, Value>, DataError> {
        match row.optional_json(&self.row_variables)? {
            None => Ok(Map::new()),
            Some(Value::Object(variables)) => Ok(variables),
            Some(_) => Err(row.fault(format!(
                "column `{}` contains neither an object nor its JSON text; set `row_variables` to another column, or to \"\" to read none",
                self.row_variables
            ))),
        }
    }

    /// The note about a row that has tools although the template of `source` writes none.
    pub(crate) fn tools_note(
        &self,
        source: &Source,
        row: usize,
    ) -> Result<Option<RowNote>, DataError> {
        let template = source.template.as_ref();
        if template.is_some_and(ChatTemplate::reads_tools) {
            return Ok(None);
        }
        let tools = Row::read(source.data.as_ref(), row)?.optional_json(&self.tools)?;
        let has_tools =
            tools.is_some_and(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
        Ok(has_tools.then_some(RowNote::ToolsUnread))
    }

    /// What a row's prompt is made of, and its reference answer.
    fn read(&self, row: &Row<'_>) -> Result<(PromptInput, String), DataError> {
        let asked = match &self.messages {
            Some(column) => PromptInput::Messages(row.messages(column)?),
            None => PromptInput::Text(row.text(&self.question)?),
        };
        let answer = if self.answer.is_empty() {
            String::new()
        } else {
            row.text(&self.answer)?
        };
        Ok((asked, answer))
    }

    /// The question of a row together with its answer.
    fn raw_example(&self, row: &Row<'_>) -> Result<RawExample, DataError> {
        let Some(column) = &self.messages else {
            let (question, answer) = (row.text(&self.question)?, row.text(&self.answer)?);
            if self.template == Template::None {
                return Ok(RawExample::Plain(question, answer));
            }
            let asked = PromptInput::Text(question);
            let mut messages = self.conversation(row, asked)?;
            messages.push(message("assistant", &answer));
            return Ok(RawExample::Conversation(messages, answer));
        };
        if self.template == Template::None {
            return Err(messages_without_template(row));
        }
        let mut messages = row.messages(column)?;
        let said = messages.pop_if(|last| role(last) == Some("assistant"));
        let Some(said) = said else {
            if self.answer.is_empty() {
                return Err(row.fault(format!(
                    "the conversation in column `{column}` does not end with the assistant's message, so there is nothing to imitate; end it with the answer, or set `answer` to the column of the answer"
                )));
            }
            let answer = row.text(&self.answer)?;
            let mut messages = self.conversation(row, PromptInput::Messages(messages))?;
            messages.push(message("assistant", &answer));
            return Ok(RawExample::Conversation(messages, answer));
        };
        let answer = match row.optional(&self.answer)? {
            Some(_) => row.text(&self.answer)?,
            None => said
                .get("content")
                .and_then(Value::as_str)
                .unwrap_or("")
                .to_owned(),
        };
        if messages.is_empty() {
            return Err(row.fault(format!(
                "the conversation in column `{column}` has an answer but no question"
            )));
        }
        let mut messages = self.with_system(row, messages)?;
        messages.push(said);
        Ok(RawExample::Conversation(messages, answer))
    }

    /// Reads the columns of a row, including the answer if it `has_answers`, without rendering it; returns the number of
    /// bytes of its texts.
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, the conversation ends with the wrong message.
    pub(crate) fn measure(
        &self,
        row: &Row<'_>,
        template: Option<&ChatTemplate>,
        has_answers: bool,
    ) -> Result<usize, DataError> {
        if let Some(template) = template {
            self.variables(row, template)?;
        }
        if has_answers {
            return Ok(match self.raw_example(row)? {
                RawExample::Plain(question, answer) => question.len() + answer.len(),
                RawExample::Conversation(messages, _) => messages.iter().map(text_bytes).sum(),
            });
        }
        let (asked, _) = self.read(row)?;
        match (self.template, asked) {
            (Template::Chat, asked) => {
                let messages = self.conversation(row, asked)?;
                Ok(messages.iter().map(text_bytes).sum())
            }
            (Template::None, PromptInput::Text(text)) => Ok(text.len()),
            (Template::None, PromptInput::Messages(_)) => Err(messages_without_template(row)),
        }
    }

    /// Applies the limit to the prompt of row `index`: `max_prompt_tokens`, or else `context` less one token for an answer.
    ///
    /// # Errors
    /// [`DataError::Row`] when it is longer and may not be truncated.
    pub fn fit(
        &self,
        mut prompt: EncodedPrompt,
        context: usize,
        data: &dyn DataLoaderInterface,
        index: usize,
    ) -> Result<EncodedPrompt, DataError> {
        if let Some(long) = self.long_prompt(prompt.tokens.len(), context) {
            if self.on_long != OnLong::Truncate {
                return Err(DataError::Row {
                    path: data.origin(),
                    row: index + 1,
                    reason: long.refusal(),
                });
            }
            prompt.tokens.drain(..long.tokens - self.limit(context));
        }
        Ok(prompt)
    }

    /// Maximum number of prompt tokens for a model of this context, which must also fit one token of an answer.
    pub fn limit(&self, context: usize) -> usize {
        let room = context.saturating_sub(1).max(1);
        self.max_prompt_tokens.map_or(room, |most| most.min(room))
    }

    /// Whether a prompt of `tokens` tokens is too long.
    pub(crate) fn long_prompt(&self, tokens: usize, context: usize) -> Option<TooLong> {
        let limit = self.limit(context);
        let (room, help) = if self.max_prompt_tokens == Some(limit) {
            (format!("`max_prompt_tokens` is {limit}"), "raise it")
        } else {
            let room = format!("the model's context is {context}, which must also fit an answer");
            (room, "shorten it")
        };
        (tokens > limit).then(|| TooLong {
            tokens,
            reason: format!("the prompt has {tokens} tokens, but {room}"),
            help,
        })
    }

    /// Whether the prompt or the target of an example is too long.
    pub(crate) fn long_example(&self, example: &EncodedExample, context: usize) -> Option<TooLong> {
        let (prompt, tokens) = (example.prompt.tokens.len(), example.target.tokens.len());
        let room = context.saturating_sub(prompt);
        let answer = || TooLong {
            tokens,
            reason: format!(
                "the answer has {tokens} tokens, but only {room} fit after a prompt of {prompt} in the model's context of {context}"
            ),
            help: "shorten it",
        };
        let of_prompt = self.long_prompt(prompt, context);
        of_prompt.or_else(|| (tokens > room).then(answer))
    }

    /// Applies the limits to the prompt and the target of row `index`.
    ///
    /// # Errors
    /// [`DataError::Row`] when one of them is longer and may not be truncated.
    pub(crate) fn fit_example(
        &self,
        mut example: EncodedExample,
        context: usize,
        data: &dyn DataLoaderInterface,
        index: usize,
    ) -> Result<EncodedExample, DataError> {
        example.prompt = self.fit(example.prompt, context, data, index)?;
        match self.long_example(&example, context) {
            Some(long) if self.on_long != OnLong::Truncate => Err(DataError::Row {
                path: data.origin(),
                row: index + 1,
                reason: long.refusal(),
            }),
            _ => {
                let room = context.saturating_sub(example.prompt.tokens.len());
                example.target.tokens.truncate(room);
                example.target.trained.truncate(room);
                Ok(example)
            }
        }
    }

    /// The messages before the answer.
    pub(crate) fn conversation(
        &self,
        row: &Row<'_>,
        asked: PromptInput,
    ) -> Result<Vec<Value>, DataError> {
        let messages = match asked {
            PromptInput::Text(text) => vec![message("user", &text)],
            PromptInput::Messages(messages) => messages,
        };
        if messages.last().and_then(role) == Some("assistant") {
            return Err(row.fault(
                "the conversation ends with the assistant's message, which the model should write; remove it, or train on it with `with_targets = true` in stage `prompts`"
                    .to_owned(),
            ));
        }
        self.with_system(row, messages)
    }

    /// A conversation after the system message of the settings.
    fn with_system(
        &self,
        row: &Row<'_>,
        mut messages: Vec<Value>,
    ) -> Result<Vec<Value>, DataError> {
        if let Some(system) = &self.system {
            if messages.first().and_then(role) == Some("system") {
                return Err(row.fault(
                    "the conversation has a system message, but `system` is set too".to_owned(),
                ));
            }
            messages.insert(0, message("system", system));
        }
        Ok(messages)
    }
}

/// The error of a row that cannot be written.
pub(crate) fn refused(row: &Row<'_>, error: &TargetError) -> DataError {
    row.fault(match error {
        TargetError::NoTemplate => {
            "the model has no chat template; set `template = \"none\"` to use the question as it is"
                .to_owned()
        }
        error => error.to_string(),
    })
}

pub(crate) fn messages_without_template(row: &Row<'_>) -> DataError {
    row.fault(
        "the prompt is a list of messages, which requires a chat template; set `template = \"chat\"`"
            .to_owned(),
    )
}
