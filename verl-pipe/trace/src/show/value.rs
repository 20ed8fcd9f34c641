//! Recorded values as JSON and as text.

use serde_json::{Value, json};
use verl_plan::schedule::placement::Schedule;
use verl_words::keys;

use crate::compare::Cell;
use crate::text::{count, short};

pub(super) fn is_ragged(schedule: &Schedule, key: &str) -> bool {
    let field = schedule.plan().fields().get(key);
    let shape = field.and_then(|field| field.parsed_shape().ok());
    shape.is_some_and(|shape| shape.ragged().is_some())
}

pub(super) fn as_json(values: &Cell<'_>, at: usize) -> Value {
    match values {
        Cell::Text(texts) => texts[at].into(),
        Cell::Bool(flags) => flags[at].into(),
        Cell::U64(numbers) => numbers[at].into(),
        Cell::I64(numbers) => numbers[at].into(),
        Cell::U8(_) | Cell::U32(_) => values.number(at).map_or(Value::Null, |v| json!(v as u64)),
        _ => match values.number(at) {
            Some(number) if number.is_finite() => json!(number),
            // JSON has no such number, so its name is used.
            Some(number) => number.to_string().into(),
            None => Value::Null,
        },
    }
}

pub(super) fn meaning(key: &str, value: &Value) -> Option<&'static str> {
    let code = u8::try_from(value.as_u64()?).ok()?;
    (key == keys::FINISH_REASONS.name()).then_some(match code {
        keys::finish::EOS => "end of sequence",
        keys::finish::STOP => "stop text",
        keys::finish::LENGTH => "length limit",
        keys::finish::CONTEXT => "end of the context",
        _ => "unknown",
    })
}

pub(super) fn mask_word(value: &Value) -> String {
    match value.as_u64().and_then(|kind| u8::try_from(kind).ok()) {
        Some(keys::mask::ACTION) => "action".to_owned(),
        Some(keys::mask::OBSERVATION) => "observation".to_owned(),
        _ => value.to_string(),
    }
}

pub(super) fn show(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_u64() {
            Some(whole) => whole.to_string(),
            None => short(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Array(values) => {
            let shown: Vec<String> = values.iter().take(8).map(show).collect();
            let more = if values.len() > 8 { ", …" } else { "" };
            format!(
                "[{}{more}] ({})",
                shown.join(", "),
                count(values.len() as u64, "value")
            )
        }
        other => other.to_string(),
    }
}
