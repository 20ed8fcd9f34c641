//! A row of a data set into tokens of a prompt and of what is imitated. Pure: the same row gives the same tokens.

use serde_json::{Map, Value};
use verl_models::chat_template::{ChatTemplate, message};
use verl_models::targets::{Lesson, Note, Target, TargetError, Writer};
use verl_models::tokenizer::Tokenizer;
use verl_pipe::data::{DataError, DataLoaderInterface};

use super::format::{Asked, OnLong, PromptFormat, Row, Template, TrainOn, role};
use super::notes::RowNote;
use super::preview::text_bytes;
use super::source::Source;

/// A prompt with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// The prompt as text; of a truncated one too the whole text.
    pub text: String,
    /// Its token ids, at least one.
    pub tokens: Vec<u32>,
    /// The reference answer as the data set has it; empty where the format names no column.
    pub answer: String,
}

/// A prompt with what is imitated behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedExample {
    /// The prompt.
    pub prompt: EncodedPrompt,
    /// Tokens behind it, and which of them are trained.
    pub target: Target,
    /// What should be told of them.
    pub notes: Vec<Note>,
}

/// Something that is too long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Long {
    /// Its tokens.
    pub tokens: usize,
    /// What is too long, and for what.
    pub reason: String,
    /// What makes it fit, as an imperative.
    pub help: &'static str,
}

impl Long {
    /// The message for a row that may not be cut.
    pub fn refusal(&self) -> String {
        let Long { reason, help, .. } = self;
        format!("{reason}; {help}, or set `on_long` to \"drop\" or \"truncate\"")
    }
}

/// What is asked and what is to be said, before anything became tokens.
enum Finished {
    /// A text and its answer.
    Plain(String, String),
    /// A conversation that ends with the assistant's message, and the answer to tell.
    Conversation(Vec<Value>, String),
}

impl PromptFormat {
    /// Prompt and answer of a row; `template` is the model's, with the variables of this format already in.
    ///
    /// The result may be longer than `max_prompt_tokens`; see [`PromptFormat::fit`].
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, the template or the tokenizer refuses, the
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
            (Template::None, Asked::Text(text)) => {
                writer.plain_prompt(&text).map(|tokens| (text, tokens))
            }
            (Template::None, Asked::Messages(_)) => return Err(messages_without_template(&row)),
            (Template::Chat, asked) => writer.prompt(&self.conversation(&row, asked)?),
        };
        let (text, tokens) = written.map_err(|error| refused(&row, &error))?;
        Ok(EncodedPrompt {
            text,
            tokens,
            answer,
        })
    }

    /// Prompt of a row and what is imitated behind it: the answer of its column, or the last messages of a conversation
    /// that ends with the assistant's.
    ///
    /// # Errors
    /// As [`encode`](Self::encode); a row without an answer.
    pub fn encode_example(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        train_on: TrainOn,
    ) -> Result<EncodedExample, DataError> {
        self.imitated(
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

    /// The same of a response that is judged, all of whose tokens count.
    ///
    /// # Errors
    /// As [`encode_example`](Self::encode_example).
    pub(crate) fn encode_response(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<EncodedExample, DataError> {
        self.imitated(data, index, tokenizer, template, |writer, messages| {
            let (before, answer) = messages.split_at(messages.len().saturating_sub(1));
            writer.answers(before, answer)
        })
    }

    fn imitated(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        written: impl Fn(&Writer<'_>, &[Value]) -> Result<Lesson, TargetError>,
    ) -> Result<EncodedExample, DataError> {
        let row = Row::read(data, index)?;
        let writer = self.writer(&row, tokenizer, template)?;
        let (lesson, answer) = match self.finished(&row)? {
            Finished::Plain(question, answer) => {
                (writer.plain(&question, &[answer.as_str()]), answer)
            }
            Finished::Conversation(messages, answer) => (written(&writer, &messages), answer),
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

    /// What writes the conversations of a row.
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

    /// Variables of the template for one row: its tools, and what else it names.
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
                    "column `{}` holds neither a list of objects nor its JSON text; name another column in `tools`, or set it to \"\" to read none",
                    self.tools
                )));
            }
            variables.insert("tools".to_owned(), tools);
        }
        Ok(variables)
    }

    /// Variables of the template that a column of the row holds.
    fn row_variables(&self, row: &Row<'_>) -> Result<Map<String, Value>, DataError> {
        match row.optional_json(&self.row_variables)? {
            None => Ok(Map::new()),
            Some(Value::Object(variables)) => Ok(variables),
            Some(_) => Err(row.fault(format!(
                "column `{}` holds neither an object nor its JSON text; name another column in `row_variables`, or set it to \"\" to read none",
                self.row_variables
            ))),
        }
    }

    /// What is to be told of a row that names tools where the template of `source` writes none.
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
        let is_told =
            tools.is_some_and(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
        Ok(is_told.then_some(RowNote::ToolsUnread))
    }

    /// What a row asks, and its answer.
    fn read(&self, row: &Row<'_>) -> Result<(Asked, String), DataError> {
        let asked = match &self.messages {
            Some(column) => Asked::Messages(row.messages(column)?),
            None => Asked::Text(row.text(&self.question)?),
        };
        let answer = if self.answer.is_empty() {
            String::new()
        } else {
            row.text(&self.answer)?
        };
        Ok((asked, answer))
    }

    /// What a row asks together with what is to be said to it.
    fn finished(&self, row: &Row<'_>) -> Result<Finished, DataError> {
        let Some(column) = &self.messages else {
            let (question, answer) = (row.text(&self.question)?, row.text(&self.answer)?);
            if self.template == Template::None {
                return Ok(Finished::Plain(question, answer));
            }
            let asked = Asked::Text(question);
            let mut messages = self.conversation(row, asked)?;
            messages.push(message("assistant", &answer));
            return Ok(Finished::Conversation(messages, answer));
        };
        if self.template == Template::None {
            return Err(messages_without_template(row));
        }
        let mut messages = row.messages(column)?;
        let said = messages.pop_if(|last| role(last) == Some("assistant"));
        let Some(said) = said else {
            if self.answer.is_empty() {
                return Err(row.fault(format!(
                    "the conversation of column `{column}` does not end with the assistant's message, so that there is nothing to imitate; end it with the answer, or name the answer's column in `answer`"
                )));
            }
            let answer = row.text(&self.answer)?;
            let mut messages = self.conversation(row, Asked::Messages(messages))?;
            messages.push(message("assistant", &answer));
            return Ok(Finished::Conversation(messages, answer));
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
                "the conversation of column `{column}` is an answer alone, without a question"
            )));
        }
        let mut messages = self.with_system(row, messages)?;
        messages.push(said);
        Ok(Finished::Conversation(messages, answer))
    }

    /// Reads what a row is made of, with the answer where it `has_answers`, and renders nothing; gives the bytes of its
    /// texts.
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, the conversation ends with the wrong message.
    pub(crate) fn glance(
        &self,
        row: &Row<'_>,
        template: Option<&ChatTemplate>,
        has_answers: bool,
    ) -> Result<usize, DataError> {
        if let Some(template) = template {
            self.variables(row, template)?;
        }
        if has_answers {
            return Ok(match self.finished(row)? {
                Finished::Plain(question, answer) => question.len() + answer.len(),
                Finished::Conversation(messages, _) => messages.iter().map(text_bytes).sum(),
            });
        }
        let (asked, _) = self.read(row)?;
        match (self.template, asked) {
            (Template::Chat, asked) => {
                let messages = self.conversation(row, asked)?;
                Ok(messages.iter().map(text_bytes).sum())
            }
            (Template::None, Asked::Text(text)) => Ok(text.len()),
            (Template::None, Asked::Messages(_)) => Err(messages_without_template(row)),
        }
    }

    /// Applies the limit to the prompt of row `index`: `max_prompt_tokens`, else what `context` leaves beside a token of
    /// an answer.
    ///
    /// # Errors
    /// [`DataError::Row`] when it is longer, unless it is to be truncated.
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

    /// Most tokens of a prompt for a model of this context, in which there must be room for a token of an answer.
    pub fn limit(&self, context: usize) -> usize {
        let room = context.saturating_sub(1).max(1);
        self.max_prompt_tokens.map_or(room, |most| most.min(room))
    }

    /// What is wrong with a prompt of so many tokens.
    pub(crate) fn long_prompt(&self, tokens: usize, context: usize) -> Option<Long> {
        let limit = self.limit(context);
        let (room, help) = if self.max_prompt_tokens == Some(limit) {
            (format!("`max_prompt_tokens` is {limit}"), "raise it")
        } else {
            let room =
                format!("the model's context is {context}, which an answer has to fit in too");
            (room, "shorten it")
        };
        (tokens > limit).then(|| Long {
            tokens,
            reason: format!("the prompt has {tokens} tokens, but {room}"),
            help,
        })
    }

    /// What is wrong with the length of a row that is imitated.
    pub(crate) fn long_example(&self, example: &EncodedExample, context: usize) -> Option<Long> {
        let (prompt, tokens) = (example.prompt.tokens.len(), example.target.tokens.len());
        let room = context.saturating_sub(prompt);
        let answer = || Long {
            tokens,
            reason: format!(
                "the answer has {tokens} tokens, but behind a prompt of {prompt} the model's context of {context} has room for {room}"
            ),
            help: "shorten it",
        };
        let of_prompt = self.long_prompt(prompt, context);
        of_prompt.or_else(|| (tokens > room).then(answer))
    }

    /// Applies the limits to row `index` and what is imitated of it.
    ///
    /// # Errors
    /// [`DataError::Row`] when it is longer, unless it is to be truncated.
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
        asked: Asked,
    ) -> Result<Vec<Value>, DataError> {
        let messages = match asked {
            Asked::Text(text) => vec![message("user", &text)],
            Asked::Messages(messages) => messages,
        };
        if messages.last().and_then(role) == Some("assistant") {
            return Err(row.fault(
                "the conversation ends with the assistant's message, which the model is to write; leave it out, or train on it with `with_targets = true` in stage `prompts`"
                    .to_owned(),
            ));
        }
        self.with_system(row, messages)
    }

    /// A conversation behind the system message of the settings.
    fn with_system(
        &self,
        row: &Row<'_>,
        mut messages: Vec<Value>,
    ) -> Result<Vec<Value>, DataError> {
        if let Some(system) = &self.system {
            if messages.first().and_then(role) == Some("system") {
                return Err(row.fault(
                    "the conversation has a system message, and `system` is set too".to_owned(),
                ));
            }
            messages.insert(0, message("system", system));
        }
        Ok(messages)
    }
}

/// The error that a row cannot be written.
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
        "the prompt is a list of messages, which become text through a chat template alone; set `template = \"chat\"`"
            .to_owned(),
    )
}
