//! Columns of an edge as JSON Schema: the schema of a row of a batch written as an object.

use serde_json::{Map, Value, json};
use verl_words::field::{DType, Field};
use verl_words::shape::{Dim, Shape};

use super::NOTE;

/// The schema of a row's value in a column; dtype, shape, unit and distribution are under [`NOTE`].
pub(crate) fn column(field: &Field) -> Value {
    let dims = field
        .parsed_shape()
        .map_or_else(|_| Vec::new(), |Shape(dims)| dims);
    // The first dim counts rows; this is the schema of one row.
    let inner = dims.iter().skip(1).rev();
    let mut schema = inner.fold(element(field.dtype), |items, dim| match dim {
        Dim::Fixed(size) => {
            json!({ "type": "array", "items": items, "minItems": size, "maxItems": size })
        }
        Dim::Symbol(_) | Dim::Ragged(_) => json!({ "type": "array", "items": items }),
    });
    if field.nullable {
        schema["type"] = json!([schema["type"], "null"]);
    }
    schema["description"] = field.meaning.as_ref().into();
    schema[NOTE] = note(field);
    schema
}

/// Properties that JSON Schema cannot express.
fn note(field: &Field) -> Value {
    let mut note = Map::new();
    note.insert("dtype".to_owned(), field.dtype.to_string().into());
    note.insert("shape".to_owned(), field.shape.as_ref().into());
    if !field.unit.is_empty() {
        note.insert("unit".to_owned(), field.unit.as_ref().into());
    }
    if field.finite {
        note.insert("finite".to_owned(), true.into());
    }
    if let Some(tag) = &field.tag {
        // An absent part is unspecified.
        let tag = serde_json::to_value(tag).unwrap_or_default();
        let known = tag.as_object().into_iter().flatten();
        let known = known.filter(|(_, value)| !value.is_null());
        let known: Map<String, Value> = known.map(|(k, v)| (k.clone(), v.clone())).collect();
        note.insert("distribution".to_owned(), Value::Object(known));
    }
    Value::Object(note)
}

fn element(dtype: DType) -> Value {
    match dtype {
        DType::Bool => json!({ "type": "boolean" }),
        DType::U8 => json!({ "type": "integer", "minimum": 0, "maximum": u8::MAX }),
        DType::U32 => json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        DType::U64 => json!({ "type": "integer", "minimum": 0 }),
        DType::I64 => json!({ "type": "integer" }),
        DType::F32 | DType::F64 => json!({ "type": "number" }),
        DType::Text => json!({ "type": "string" }),
    }
}

#[cfg(test)]
mod tests {
    use verl_words::field::{LogProbTag, Support};
    use verl_words::keys::{OLD_LOG_PROBS, PROMPT_TEXTS, REWARDS};

    use super::*;

    #[test]
    fn a_column_is_the_value_of_a_row() {
        let log_probs = OLD_LOG_PROBS.tagged(LogProbTag {
            temperature: Some(0.5),
            support: Some(Support::Full),
            ..LogProbTag::default()
        });
        assert_eq!(
            column(&log_probs),
            json!({
                "type": "array",
                "items": { "type": "number" },
                "description": "log-probs at the start of the update",
                "x-verl": {
                    "dtype": "f32", "shape": "[B, T~]", "unit": "nats", "finite": true,
                    "distribution": { "temperature": 0.5, "support": "full" }
                }
            })
        );
        assert_eq!(column(&REWARDS.field())["type"], json!(["number", "null"]));
        assert_eq!(column(&PROMPT_TEXTS.field())["type"], "string");
        let pairs = column(&OLD_LOG_PROBS.field().shaped("[B, T~, 2]"));
        assert_eq!(pairs["items"]["maxItems"], 2);
    }
}
