//! Chat templates: messages into the text that a model was trained to continue.
//!
//! Templates are Jinja as `transformers` runs it: block tags swallow their line, strings have Python's methods, and
//! `raise_exception`, `strftime_now`, `tojson` are there. `{% generation %}` marks are passed over.
//!
//! ```
//! use verl_models::chat_template::{ChatTemplate, message};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
//! let template = ChatTemplate::new(source)?;
//! assert_eq!(template.render(&[message("user", "12+34")], true)?, "<user>12+34<assistant>");
//! # Ok::<(), verl_models::chat_template::ChatTemplateError>(())
//! ```

mod python;

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use crate::tokenizer::{Tokenizer, TokenizerError, read_json, special_token};

/// What can go wrong with a chat template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    /// A folder without a template.
    #[error(
        "`{folder}` has no chat template (neither chat_template.jinja nor `chat_template` in tokenizer_config.json); with `template = \"none\"` prompts are plain text"
    )]
    Missing {
        /// The folder.
        folder: String,
    },
    /// Several named templates, none of which is the default.
    #[error("`{folder}` names the chat templates {names}, but none is called `default`")]
    NoDefault {
        /// The folder.
        folder: String,
        /// Names that are there.
        names: String,
    },
    /// A template that is not valid Jinja.
    #[error("the chat template is malformed: {reason}")]
    Syntax {
        /// What and where.
        reason: String,
    },
    /// The template refused the messages, or failed on them.
    #[error("the chat template refuses the messages: {reason}")]
    Render {
        /// What it said.
        reason: String,
    },
    /// The folder's files cannot be read.
    #[error(transparent)]
    Folder(#[from] TokenizerError),
}

const NAME: &str = "chat_template";

/// Names of the special tokens that a template may use as variables.
const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
];

/// A message of `role` (`system`, `user`, `assistant`) as templates expect it.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// A chat template with its variables.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    variables: Map<String, Value>,
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
        environment
            .add_template_owned(NAME, without_generation_marks(source))
            .map_err(syntax)?;
        let mut template = ChatTemplate {
            environment,
            variables: Map::new(),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        template.set_time(now.map_or(0, |t| t.as_secs()));
        Ok(template)
    }

    /// The template of a Hugging Face folder: `chat_template.jinja`, else `chat_template` of
    /// `tokenizer_config.json` (a text, or a list of named ones of which `default` is taken). Special tokens named in
    /// `tokenizer_config.json` become variables (`bos_token`, `eos_token`, …).
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] when there is none; malformed files or Jinja.
    pub fn load(folder: &Path) -> Result<ChatTemplate, ChatTemplateError> {
        let config = read_json(folder, "tokenizer_config.json")?.unwrap_or_default();
        let file = folder.join("chat_template.jinja");
        let source = match std::fs::read_to_string(&file) {
            Ok(source) => source,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => named_template(folder, &config)?,
            Err(e) => {
                return Err(TokenizerError::Malformed {
                    path: file.display().to_string(),
                    reason: e.to_string(),
                }
                .into());
            }
        };
        let mut template = ChatTemplate::new(&source)?;
        for role in SPECIAL_TOKENS {
            if let Some(token) = special_token(&config, role) {
                template.variables.insert(role.to_owned(), token.into());
            }
        }
        Ok(template)
    }

    /// Adds variables that the template may use, such as `enable_thinking`.
    pub fn with_variables(mut self, variables: Map<String, Value>) -> ChatTemplate {
        self.variables.extend(variables);
        self
    }

    /// Fixes what `strftime_now` calls now, in seconds since 1970 UTC; by default the time of loading. Templates that
    /// print the date (Llama 3.x) make prompts differ from day to day, so a replay fixes it.
    pub fn set_time(&mut self, unix_seconds: u64) {
        self.environment
            .add_function("strftime_now", move |format: &str| {
                python::strftime(format, unix_seconds)
            });
    }

    /// Text of `messages` (objects with `role` and `content`); with `add_generation_prompt` followed by what opens
    /// the assistant's answer.
    ///
    /// # Errors
    /// [`ChatTemplateError::Render`] when the template raises an exception or fails.
    pub fn render(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatTemplateError> {
        let mut variables = Map::new();
        variables.insert("tools".to_owned(), Value::Null);
        variables.insert("documents".to_owned(), Value::Null);
        variables.extend(self.variables.clone());
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
            .get_template(NAME)
            .and_then(|template| template.render(Serde(&variables)))
            .map_err(failed)
    }

    /// What the template writes after an assistant's answer, up to the next message: usually the token that ends a
    /// turn. `None` where the template cannot tell (it refuses two messages, or does not hold the answer's text).
    pub fn after_answer(&self) -> Option<String> {
        const ANSWER: &str = "the-answer-itself";
        let messages = [message("user", "question"), message("assistant", ANSWER)];
        let text = self.render(&messages, false).ok()?;
        let at = text.rfind(ANSWER)? + ANSWER.len();
        Some(text[at..].to_owned())
    }

    /// The id that ends an assistant's answer: the first token after it, if that is one of the tokenizer's
    /// end-of-sequence ids. `None` means that a model which follows the template never ends by an id that generation
    /// stops at, or that the template cannot tell.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
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

fn named_template(folder: &Path, config: &Map<String, Value>) -> Result<String, ChatTemplateError> {
    let folder = folder.display().to_string();
    match config.get("chat_template") {
        Some(Value::String(source)) => Ok(source.clone()),
        Some(Value::Array(list)) => {
            let part = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
            list.iter()
                .find(|entry| part(entry, "name").as_deref() == Some("default"))
                .and_then(|entry| part(entry, "template"))
                .ok_or_else(|| ChatTemplateError::NoDefault {
                    folder,
                    names: list
                        .iter()
                        .filter_map(|entry| part(entry, "name"))
                        .collect::<Vec<_>>()
                        .join(", "),
                })
        }
        _ => Err(ChatTemplateError::Missing { folder }),
    }
}

/// `{% generation %}` … `{% endgeneration %}` mark the assistant's tokens for `transformers`; they print nothing, so
/// they become a condition that always holds, with their whitespace marks kept.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = &tag[2..tag.len() - 2];
        match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
