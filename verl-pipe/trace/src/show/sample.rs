//! One sample with everything that a step recorded about it, token by token.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value, json};
use verl_words::batch::RowId;
use verl_words::keys;
use verl_words::resource::TokenTexts;

use super::value::{as_json, is_ragged, mask_word, meaning, show};
use super::view::ShownStep;
use super::{TEXT_WIDTH, TOKEN_WIDTH};
use crate::text::{Align, Table, count, one_line};

/// A key's value for one row that is not a list over its tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowValue {
    /// The pipeline's name of the key.
    pub key: String,
    /// The value.
    pub value: Value,
    /// The value in words, if it is a code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meaning: Option<&'static str>,
}

/// One sample with everything that the step recorded about it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SampleView {
    /// The step.
    pub step: u64,
    /// The requested stage.
    pub stage: String,
    /// Identity, as `epoch.row#sample`.
    pub sample: String,
    /// Position among the stage's rows.
    pub row: usize,
    /// Prompt as rendered, if it was recorded.
    pub prompt_text: Option<String>,
    /// Prompt tokens: id and text.
    pub prompt: Vec<(u32, String)>,
    /// Response as text, if it was recorded.
    pub response_text: Option<String>,
    /// Response tokens: id and text.
    pub response: Vec<(u32, String)>,
    /// Keys with one value per response token, by the pipeline's names.
    pub per_token: Vec<(String, Vec<Value>)>,
    /// Keys with one value per row.
    pub per_row: Vec<RowValue>,
}

impl ShownStep<'_> {
    /// Everything that was recorded about row `id` of a stage (by its index in the plan); `words` converts token ids to
    /// text.
    pub fn sample(&self, stage: usize, id: RowId, words: Option<&dyn TokenTexts>) -> SampleView {
        let mut all = self.gather(stage, id);
        let prompt_text = all.take_text(keys::PROMPT_TEXTS.name());
        let response_text = all.take_text(keys::RESPONSE_TEXTS.name());
        let prompt = all.take_tokens(keys::PROMPTS.name(), words);
        let response = all.take_tokens(keys::RESPONSES.name(), words);
        let mut per_token = Vec::new();
        let mut per_row = Vec::new();
        for (key, values) in all.keys {
            let numbers: Vec<Value> = (0..values.len()).map(|at| as_json(&values, at)).collect();
            let is_list = is_ragged(self.schedule, &key);
            if is_list && !response.is_empty() && numbers.len() == response.len() {
                per_token.push((key, numbers));
                continue;
            }
            let value = match (is_list, numbers.len()) {
                (false, 0) => Value::Null,
                (false, 1) => numbers.into_iter().next().unwrap_or_default(),
                _ => Value::Array(numbers),
            };
            let meaning = meaning(&key, &value);
            per_row.push(RowValue {
                key,
                value,
                meaning,
            });
        }
        // The kind of each token comes before values computed for it.
        per_token.sort_by_key(|(key, _)| key != keys::MASK_KINDS.name());
        SampleView {
            step: self.step,
            stage: self.schedule.plan().stages()[stage].name().to_owned(),
            sample: id.to_string(),
            row: self.rows[stage]
                .iter()
                .position(|row| *row == id)
                .unwrap_or(0),
            prompt_text,
            prompt,
            response_text,
            response,
            per_token,
            per_row,
        }
    }
}

impl fmt::Display for SampleView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "step {}, stage `{}`, sample {} (row {})",
            self.step, self.stage, self.sample, self.row
        )?;
        let names = self.per_row.iter().map(|row| row.key.len());
        let wide = names.max().unwrap_or(0).max("response".len());
        for (name, text, tokens) in [
            ("prompt", &self.prompt_text, &self.prompt),
            ("response", &self.response_text, &self.response),
        ] {
            if text.is_some() || !tokens.is_empty() {
                let text = text
                    .as_ref()
                    .map_or("not recorded as text".to_owned(), |text| {
                        format!("\"{}\"", one_line(text, TEXT_WIDTH))
                    });
                writeln!(
                    f,
                    "{name:<wide$}  {text}, {}",
                    count(tokens.len() as u64, "token")
                )?;
            }
            if name == "prompt" {
                write_tokens(f, tokens)?;
            }
        }
        for RowValue {
            key,
            value,
            meaning,
        } in &self.per_row
        {
            let meaning = meaning.map_or_else(String::new, |meaning| format!(" ({meaning})"));
            let value = match value {
                Value::String(text) => format!("\"{}\"", one_line(text, TEXT_WIDTH)),
                other => show(other),
            };
            writeln!(f, "{key:<wide$}  {value}{meaning}")?;
        }
        if self.response.is_empty() {
            return Ok(());
        }
        let mut columns = vec![
            ("t", Align::Right),
            ("id", Align::Right),
            ("token", Align::Left),
        ];
        for (key, _) in &self.per_token {
            let is_mask = key == keys::MASK_KINDS.name();
            columns.push((key, if is_mask { Align::Left } else { Align::Right }));
        }
        let mut table = Table::new(&columns);
        for (t, (id, text)) in self.response.iter().enumerate() {
            let own = [t.to_string(), id.to_string(), marked(text)];
            let values =
                self.per_token
                    .iter()
                    .map(|(key, values)| match key == keys::MASK_KINDS.name() {
                        true => mask_word(&values[t]),
                        false => show(&values[t]),
                    });
            table.row(own.into_iter().chain(values));
        }
        write!(f, "{table}")
    }
}

/// A token's text between marks, so that its spaces are visible.
fn marked(text: &str) -> String {
    match text.is_empty() {
        true => String::new(),
        false => format!("‹{}›", one_line(text, TOKEN_WIDTH)),
    }
}

/// Tokens as `id‹text›`, as many on a line as fit.
fn write_tokens(f: &mut fmt::Formatter<'_>, tokens: &[(u32, String)]) -> fmt::Result {
    let mut line = String::new();
    for (id, text) in tokens {
        let shown = match text.is_empty() {
            true => id.to_string(),
            false => format!("{id}{}", marked(text)),
        };
        if !line.is_empty() && line.chars().count() + shown.chars().count() > TEXT_WIDTH {
            writeln!(f, "  {}", line.trim_end())?;
            line.clear();
        }
        line += &shown;
        line.push(' ');
    }
    match line.is_empty() {
        true => Ok(()),
        false => writeln!(f, "  {}", line.trim_end()),
    }
}

impl SampleView {
    /// As one JSON object: texts, row values by key, and a list of tokens with all values of each.
    pub fn to_json(&self) -> Value {
        let tokens = self.response.iter().enumerate().map(|(t, (id, text))| {
            let mut token = Map::new();
            token.insert("t".to_owned(), t.into());
            token.insert("id".to_owned(), (*id).into());
            token.insert("token".to_owned(), text.as_str().into());
            for (key, values) in &self.per_token {
                token.insert(key.clone(), values[t].clone());
            }
            Value::Object(token)
        });
        let prompt = self.prompt.iter();
        let prompt = prompt.map(|(id, text)| json!({"id": id, "token": text}));
        let rows: Map<String, Value> = self
            .per_row
            .iter()
            .map(|row| (row.key.clone(), row.value.clone()))
            .collect();
        json!({
            "step": self.step,
            "stage": self.stage,
            "sample": self.sample,
            "row": self.row,
            "prompt_text": self.prompt_text,
            "prompt": prompt.collect::<Vec<_>>(),
            "response_text": self.response_text,
            "tokens": tokens.collect::<Vec<_>>(),
            "row_values": rows,
        })
    }
}
