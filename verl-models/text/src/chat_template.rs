//! Chat templates: turn messages into the text that a model was trained to continue.
//!
//! Templates are Jinja as `transformers` runs it: block tags consume their line, strings have Python's methods, and
//! `raise_exception`, `strftime_now` and `tojson` are available. `{% generation %}` marks print nothing;
//! [`render_marked`] returns the text between them.
//!
//! [`render_marked`]: ChatTemplate::render_marked
//!
//! ```
//! use verl_text::chat_template::{ChatTemplate, message};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
//! let template = ChatTemplate::new(source)?;
//! assert_eq!(template.render(&[message("user", "12+34")], true)?, "<user>12+34<assistant>");
//! # Ok::<(), verl_text::chat_template::ChatTemplateError>(())
//! ```

mod marks;
mod python;

use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use crate::files;
use crate::tokenizer::{Declared, TEMPLATES, Tokenizer, TokenizerError, read_json, templates};

/// Errors of a chat template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    /// A folder without a template.
    #[error(
        "`{folder}` has no chat template (neither chat_template.jinja nor `chat_template` in tokenizer_config.json{beside}); with `template = \"none\"` prompts are plain text"
    )]
    Missing {
        /// The folder.
        folder: String,
        /// A hint about a file that looks like a template but is not read.
        beside: &'static str,
    },
    /// Several named templates, none of which is the default.
    #[error("`{folder}` has the chat templates {names}, but none is named `default`")]
    NoDefault {
        /// The folder.
        folder: String,
        /// The names it has.
        names: String,
    },
    /// A template that is not valid Jinja.
    #[error("the chat template is malformed: {reason}")]
    Syntax {
        /// What is wrong, and where.
        reason: String,
    },
    /// The template rejected the messages or failed on them.
    #[error("the chat template refuses the messages: {reason}")]
    Render {
        /// The reason it gave.
        reason: String,
    },
    /// The folder's files cannot be read.
    #[error(transparent)]
    Folder(#[from] TokenizerError),
}

const NAME: &str = "chat_template";

/// The variant of the template whose `{% generation %}` blocks leave marks in the text.
const MARKED: &str = "chat_template_with_marks";

/// The template file of image and audio processors.
const PROCESSOR_TEMPLATE: &str = "chat_template.json";

/// A message of `role` (`system`, `user`, `assistant`) as templates expect it.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// A chat template and its variables.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    variables: Map<String, Value>,
    reads_tools: bool,
}

impl ChatTemplate {
    /// A template from its source, without special tokens.
    ///
    /// # Errors
    /// [`ChatTemplateError::Syntax`].
    pub fn new(source: &str) -> Result<ChatTemplate, ChatTemplateError> {
        let syntax = |e: minijinja::Error| ChatTemplateError::Syntax {
            reason: format!("{e:#}"),
        };
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(syntax)?,
        );
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(python::format);
        environment.add_filter("tojson", python::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter(marks::FILTER, |text: String| marks::mark(&text));
        let (marked, plain) = marks::without_generation_blocks(&lines_of(source));
        environment
            .add_template_owned(NAME, plain)
            .map_err(syntax)?;
        if let Some(marked) = marked {
            environment
                .add_template_owned(MARKED, marked)
                .map_err(syntax)?;
        }
        let plain = environment.get_template(NAME).map_err(syntax)?;
        let reads_tools = plain.undeclared_variables(false).contains("tools");
        let mut template = ChatTemplate {
            environment,
            variables: Map::new(),
            reads_tools,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        template.set_time(now.map_or(0, |t| t.as_secs()));
        Ok(template)
    }

    /// Loads the template of a Hugging Face folder, with the precedence of `transformers`: `chat_template.jinja` and
    /// `additional_chat_templates/NAME.jinja`, else `chat_template` in `tokenizer_config.json` (a string, or several
    /// named templates). Of several, `default` is used. Special tokens become variables (`bos_token`, `eos_token`, …),
    /// wherever [`Tokenizer::load`] finds them.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] if there is none; malformed files or Jinja.
    pub fn load(folder: &Path) -> Result<ChatTemplate, ChatTemplateError> {
        let source = match template_files(folder)? {
            Some(source) => source,
            None => {
                let config = read_json(folder, "tokenizer_config.json")?.unwrap_or_default();
                named_template(folder, &config)?
            }
        };
        let mut template = ChatTemplate::new(&source)?;
        template.variables = Declared::read(folder)?.variables();
        Ok(template)
    }

    /// Adds variables that the template may use, such as `enable_thinking`.
    pub fn with_variables(mut self, variables: Map<String, Value>) -> ChatTemplate {
        self.variables.extend(variables);
        self
    }

    /// Sets the time that `strftime_now` prints, in seconds since 1970 UTC; by default the time of loading. Templates
    /// that print the date (Llama 3.x) make prompts differ from day to day, so a replay sets it.
    pub fn set_time(&mut self, unix_seconds: u64) {
        self.environment
            .add_function("strftime_now", move |format: &str| {
                python::strftime(format, unix_seconds)
            });
    }

    /// Renders `messages` (objects with `role` and `content`); with `add_generation_prompt`, followed by the text that
    /// opens the assistant's answer.
    ///
    /// # Errors
    /// [`ChatTemplateError::Render`] when the template raises an exception or fails.
    pub fn render(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatTemplateError> {
        self.render_with(messages, add_generation_prompt, &Map::new())
    }

    /// [`render`](Self::render) with variables of one conversation, such as its `tools`; they override those of
    /// [`with_variables`](Self::with_variables).
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_with(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, ChatTemplateError> {
        self.render_named(NAME, messages, add_generation_prompt, variables)
    }

    /// The text of a finished conversation, and its byte ranges between `{% generation %}` and `{% endgeneration %}`;
    /// no ranges if the template has no such marks.
    ///
    /// # Errors
    /// As [`render`](Self::render); a conversation that contains the characters used to find the ranges.
    pub fn render_marked(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Result<(String, Vec<Range<usize>>), ChatTemplateError> {
        let plain = self.render_with(messages, false, variables)?;
        if !self.has_marks() {
            return Ok((plain, Vec::new()));
        }
        let (text, ranges) = marks::read(&self.render_named(MARKED, messages, false, variables)?);
        if text != plain {
            return Err(ChatTemplateError::Render {
                reason: "marking its `{% generation %}` blocks changes the text: it contains U+FDD0 or U+FDD1, or the template reads the output of a block".to_owned(),
            });
        }
        Ok((text, ranges))
    }

    /// Whether the template marks the assistant's text with `{% generation %}`.
    pub fn has_marks(&self) -> bool {
        self.environment.get_template(MARKED).is_ok()
    }

    /// Whether the template reads the variable `tools`.
    pub fn reads_tools(&self) -> bool {
        self.reads_tools
    }

    fn render_named(
        &self,
        name: &str,
        messages: &[Value],
        add_generation_prompt: bool,
        conversation: &Map<String, Value>,
    ) -> Result<String, ChatTemplateError> {
        let mut variables = Map::new();
        variables.insert("tools".to_owned(), Value::Null);
        variables.insert("documents".to_owned(), Value::Null);
        variables.extend(self.variables.clone());
        variables.extend(conversation.clone());
        variables.insert("messages".to_owned(), messages.into());
        variables.insert(
            "add_generation_prompt".to_owned(),
            add_generation_prompt.into(),
        );
        let failed = |e: minijinja::Error| ChatTemplateError::Render {
            reason: match e.detail() {
                Some(detail) if e.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
                _ => format!("{e:#}"),
            },
        };
        self.environment
            .get_template(name)
            .and_then(|template| template.render(Serde(&variables)))
            .map_err(failed)
    }

    /// The text that the template writes after an assistant's answer, up to the next message: usually the token that
    /// ends a turn. `None` if it cannot be determined (the template rejects two messages, or does not print the
    /// answer).
    pub fn after_answer(&self) -> Option<String> {
        const ANSWER: &str = "the-answer-itself";
        let messages = [message("user", "question"), message("assistant", ANSWER)];
        let text = self.render(&messages, false).ok()?;
        let at = text.rfind(ANSWER)? + ANSWER.len();
        Some(text[at..].to_owned())
    }

    /// The id that ends an assistant's answer: the first token after it, if that is one of the tokenizer's
    /// end-of-sequence ids. `None` means that a model which follows the template never emits an id at which generation
    /// stops, or that the text after the answer cannot be determined.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn terminator(&self, tokenizer: &Tokenizer) -> Result<Option<u32>, TokenizerError> {
        let Some(text) = self.after_answer() else {
            return Ok(None);
        };
        let ids = tokenizer.encode(text.trim_start(), false)?;
        Ok(ids
            .first()
            .copied()
            .filter(|id| tokenizer.eos_ids().contains(id)))
    }
}

fn raise_exception(text: String) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
}

/// The default template from a separate file, if there is one.
fn template_files(folder: &Path) -> Result<Option<String>, ChatTemplateError> {
    let further = templates(folder);
    let default = format!("{TEMPLATES}/default.jinja");
    let name = match further.contains(&default) {
        true => default.as_str(),
        false => "chat_template.jinja",
    };
    let path = folder.join(name);
    let malformed = |reason: String| TokenizerError::Malformed {
        path: path.display().to_string(),
        reason,
    };
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(files::text(&bytes).map_err(malformed)?.to_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && further.is_empty() => Ok(None),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(ChatTemplateError::NoDefault {
            folder: folder.display().to_string(),
            names: further.join(", "),
        }),
        Err(e) => Err(malformed(e.to_string()).into()),
    }
}

/// The template in `tokenizer_config.json`.
fn named_template(folder: &Path, config: &Map<String, Value>) -> Result<String, ChatTemplateError> {
    let part = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
    let named: Vec<(String, String)> = match config.get("chat_template") {
        Some(Value::String(source)) => return Ok(source.clone()),
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|entry| Some((part(entry, "name")?, part(entry, "template")?)))
            .collect(),
        Some(Value::Object(map)) => map
            .iter()
            .filter_map(|(name, source)| Some((name.clone(), source.as_str()?.to_owned())))
            .collect(),
        _ => {
            return Err(ChatTemplateError::Missing {
                folder: folder.display().to_string(),
                beside: match folder.join(PROCESSOR_TEMPLATE).exists() {
                    true => {
                        "; chat_template.json is only for processors, and `transformers` does not read it for tokenizers either: move its template to chat_template.jinja"
                    }
                    false => "",
                },
            });
        }
    };
    let names = named.iter().map(|(name, _)| name.as_str());
    let names = names.collect::<Vec<_>>().join(", ");
    let mut sources = named.into_iter();
    let default = sources.find(|(name, _)| name == "default");
    default
        .map(|(_, source)| source)
        .ok_or_else(|| ChatTemplateError::NoDefault {
            folder: folder.display().to_string(),
            names,
        })
}

/// The source with its line ends normalised to those of Jinja.
fn lines_of(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

#[cfg(test)]
mod tests;
