//! Checks a value of a file against the schema of its configuration: which value is invalid, and what is expected.
//!
//! The deserialiser finds a fault first, but it names Rust types, and it loses the path inside what it buffers (tables
//! with a `kind`, flattened settings). The schema, which is generated from the same types, has both.

use serde_json::{Map, Value};

/// The schema of a configuration with the definitions that it refers to.
#[derive(Clone, Copy)]
pub(super) struct Shape<'s> {
    schema: &'s Value,
    root: &'s Value,
}

/// A value that does not match the schema.
pub(super) struct Mismatch {
    /// Its path, relative to the checked value.
    pub path: Vec<String>,
    /// What is wrong with it; `None` if the type is right but the value is out of range.
    pub reason: Option<String>,
    /// The valid values, if there are only a few.
    pub known: Vec<String>,
}

impl<'s> Shape<'s> {
    /// The shape of a root schema.
    pub fn of(root: &'s Value) -> Self {
        Shape { schema: root, root }.resolved()
    }

    /// Follows references and drops the alternative `null`, which files do not have.
    fn resolved(self) -> Self {
        let mut schema = self.schema;
        // Deeper than any chain of references between the types.
        for _ in 0..16 {
            if let Some(name) = schema.get("$ref").and_then(Value::as_str) {
                let name = name.trim_start_matches("#/$defs/");
                schema = &self.root["$defs"][name];
                continue;
            }
            let choices = ["anyOf", "oneOf", "allOf"];
            let mut choices = choices.iter().filter_map(|key| schema.get(key)?.as_array());
            let Some(choices) = choices.next() else { break };
            let mut some = choices.iter().filter(|choice| choice["type"] != "null");
            match (some.next(), some.next()) {
                (Some(only), None) => schema = only,
                _ => break,
            }
        }
        Shape { schema, ..self }
    }

    fn at(self, schema: &'s Value) -> Self {
        Shape { schema, ..self }.resolved()
    }

    /// The alternatives of a table that `kind` selects, each with the name of its kind.
    fn kinds(self) -> Vec<(&'s str, Shape<'s>)> {
        let tables = self.schema["oneOf"].as_array().into_iter().flatten();
        let kinds = tables.filter_map(|table| {
            let kind = table["properties"]["kind"]["const"].as_str()?;
            Some((kind, self.at(table)))
        });
        kinds.collect()
    }

    /// The valid strings, if the schema lists them.
    fn words(self) -> Vec<&'s str> {
        let of_enum = self.schema["enum"].as_array().into_iter().flatten();
        let one_of = self.schema["oneOf"].as_array().into_iter().flatten();
        let of_consts = one_of.flat_map(|choice| {
            let several = choice["enum"].as_array().into_iter().flatten();
            several.chain(choice.get("const"))
        });
        let own = self.schema.get("const");
        let all = of_enum.chain(of_consts).chain(own);
        all.filter_map(Value::as_str).collect()
    }

    /// The valid values of a table's `kind`.
    fn kind_names(self) -> Vec<&'s str> {
        let of_choice: Vec<&str> = self.kinds().into_iter().map(|(kind, _)| kind).collect();
        if !of_choice.is_empty() {
            return of_choice;
        }
        let kind = self.schema["properties"].get("kind");
        kind.map_or_else(Vec::new, |kind| self.at(kind).words())
    }

    fn is_table(self) -> bool {
        self.schema["type"] == "object" || !self.kinds().is_empty()
    }

    /// The shape of `key` in `table`, whose shape this is; `None` if the schema does not say.
    fn member(self, table: &Map<String, Value>, key: &str) -> Option<Shape<'s>> {
        let kind = table.get("kind").and_then(Value::as_str);
        let of_kind = self.kinds().into_iter();
        let of_kind = of_kind.filter(|(name, _)| Some(*name) == kind);
        let schema = of_kind.map(|(_, shape)| shape.schema).next();
        let schema = schema.unwrap_or(self.schema);
        let own = schema["properties"].get(key);
        let own = own.or_else(|| schema.get("additionalProperties"))?;
        own.is_object().then(|| self.at(own))
    }

    fn element(self, index: usize) -> Option<Shape<'s>> {
        let of_place = self.schema["prefixItems"].get(index);
        let schema = of_place.or_else(|| self.schema.get("items"))?;
        schema.is_object().then(|| self.at(schema))
    }

    /// Replaces each string that stands for a table by that table: just the name of a kind means the kind with its
    /// defaults.
    pub fn expand_kinds(self, value: &mut Value) {
        let names_kind = self.is_table() && !self.kind_names().is_empty();
        match value {
            Value::String(kind) if names_kind => {
                let kind = Value::String(std::mem::take(kind));
                *value = Value::Object(Map::from_iter([("kind".to_owned(), kind)]));
            }
            Value::Object(table) => {
                let keys: Vec<String> = table.keys().cloned().collect();
                for key in keys {
                    if let (Some(shape), true) = (self.member(table, &key), key != "kind")
                        && let Some(value) = table.get_mut(&key)
                    {
                        shape.expand_kinds(value);
                    }
                }
            }
            Value::Array(list) => {
                for (index, value) in list.iter_mut().enumerate() {
                    if let Some(shape) = self.element(index) {
                        shape.expand_kinds(value);
                    }
                }
            }
            _ => {}
        }
    }

    /// The value at `path` in `value`, with its shape.
    pub fn follow<'v>(self, value: &'v Value, path: &[String]) -> Option<(Shape<'s>, &'v Value)> {
        let Some((first, rest)) = path.split_first() else {
            return Some((self, value));
        };
        let (shape, value) = match value {
            Value::Object(table) => (self.member(table, first)?, table.get(first)?),
            Value::Array(list) => {
                let index = first.parse().ok()?;
                (self.element(index)?, list.get(index)?)
            }
            _ => return None,
        };
        shape.follow(value, rest)
    }

    /// The first mismatch; `None` if everything that the schema describes is valid.
    pub fn mismatch(self, value: &Value) -> Option<Mismatch> {
        let wrong = |known: &[&str]| {
            let reason = format!("{}, expected {}", found(value), self.expected()?);
            Some(Mismatch {
                path: Vec::new(),
                reason: Some(reason),
                known: known.iter().map(|word| (*word).to_owned()).collect(),
            })
        };
        let words = self.words();
        if !words.is_empty() && self.kinds().is_empty() {
            return match value {
                Value::String(text) if words.contains(&text.as_str()) => None,
                Value::String(text) => Some(Mismatch {
                    path: Vec::new(),
                    reason: Some(format!("`{text}` is not a valid value")),
                    known: words.iter().map(|word| (*word).to_owned()).collect(),
                }),
                _ => wrong(&words),
            };
        }
        let types = self.types();
        let fits = types.is_empty() || types.iter().any(|name| has_type(value, name));
        match value {
            _ if !fits && !self.is_table() => wrong(&[]),
            Value::Object(table) if self.is_table() => {
                let inner = table.iter().find_map(|(key, value)| {
                    let mismatch = self.member(table, key)?.mismatch(value)?;
                    Some(mismatch.below(key))
                });
                inner.or_else(|| self.unknown_kind(table))
            }
            _ if self.is_table() => wrong(&[]),
            Value::Array(list) => {
                let inner = list.iter().enumerate().find_map(|(index, value)| {
                    let mismatch = self.element(index)?.mismatch(value)?;
                    Some(mismatch.below(&index.to_string()))
                });
                inner.or_else(|| self.length_mismatch(list.len()))
            }
            Value::Number(number) if types == ["integer"] => {
                (!self.in_range(number)).then(|| Mismatch {
                    path: Vec::new(),
                    reason: None,
                    known: Vec::new(),
                })
            }
            _ => None,
        }
    }

    /// The mismatch of a table with an unknown `kind`.
    fn unknown_kind(self, table: &Map<String, Value>) -> Option<Mismatch> {
        let names = self.kind_names();
        let kind = table.get("kind")?;
        if names.is_empty() || kind.as_str().is_some_and(|kind| names.contains(&kind)) {
            return None;
        }
        let reason = match kind {
            Value::String(kind) => format!("`{kind}` is not a valid value"),
            other => format!("{}, expected the name of a kind", found(other)),
        };
        Some(Mismatch {
            path: vec!["kind".to_owned()],
            reason: Some(reason),
            known: names.into_iter().map(str::to_owned).collect(),
        })
    }

    /// The mismatch of a list with too many or too few values.
    fn length_mismatch(self, len: usize) -> Option<Mismatch> {
        let limit = |key: &str| self.schema[key].as_u64();
        let (least, most) = (limit("minItems"), limit("maxItems"));
        let len = len as u64;
        let fits = least.is_none_or(|least| len >= least) && most.is_none_or(|most| len <= most);
        let expected = self.expected().filter(|_| !fits)?;
        Some(Mismatch {
            path: Vec::new(),
            reason: Some(format!("found a list of length {len}, expected {expected}")),
            known: Vec::new(),
        })
    }

    fn in_range(self, number: &serde_json::Number) -> bool {
        let least = self.schema["minimum"].as_f64().unwrap_or(f64::MIN);
        let most = match self.schema["format"].as_str() {
            Some("uint8") => f64::from(u8::MAX),
            Some("uint32") => f64::from(u32::MAX),
            _ => f64::MAX,
        };
        let whole = number.is_u64() || number.is_i64();
        let value = number.as_f64().unwrap_or(f64::NAN);
        whole && value >= least && value <= most
    }

    fn types(self) -> Vec<&'s str> {
        let types = match &self.schema["type"] {
            Value::String(name) => vec![name.as_str()],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let some = types.into_iter().filter(|name| *name != "null");
        some.collect()
    }

    /// What the schema expects, in words.
    fn expected(self) -> Option<String> {
        let words = self.words();
        let kinds = self.kind_names();
        if self.is_table() && !kinds.is_empty() {
            return Some(format!("a table such as `{{ kind = \"{}\" }}`", kinds[0]));
        }
        if self.is_table() {
            return Some("a table".to_owned());
        }
        if !words.is_empty() {
            let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
            return Some(format!("one of {}", words.join(", ")));
        }
        let each: Vec<String> = self
            .types()
            .into_iter()
            .map(|name| match name {
                "string" => "a string".to_owned(),
                "boolean" => "`true` or `false`".to_owned(),
                "number" => "a number".to_owned(),
                "integer" if self.schema["minimum"].as_f64() == Some(0.0) => {
                    "a non-negative integer".to_owned()
                }
                "integer" => "an integer".to_owned(),
                "array" => self.expected_list(),
                _ => "a table".to_owned(),
            })
            .collect();
        (!each.is_empty()).then(|| each.join(" or "))
    }

    fn expected_list(self) -> String {
        let of = self.element(0).and_then(|element| {
            let word = match element.types().as_slice() {
                ["string"] => "strings",
                ["number"] => "numbers",
                ["integer"] => "integers",
                ["object"] => "tables",
                _ => return None,
            };
            Some(word)
        });
        let (least, most) = (&self.schema["minItems"], &self.schema["maxItems"]);
        match (of, least.as_u64().filter(|_| least == most)) {
            (Some(of), Some(count)) => format!("a list of {count} {of}"),
            (Some(of), None) => format!("a list of {of}"),
            (None, _) => "a list".to_owned(),
        }
    }
}

impl Mismatch {
    fn below(mut self, key: &str) -> Self {
        self.path.insert(0, key.to_owned());
        self
    }
}

/// Whether a value has a JSON Schema type. Every number counts as an integer: `in_range` checks it separately.
fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "number" | "integer" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => true,
    }
}

/// What a value is, in words.
fn found(value: &Value) -> String {
    match value {
        Value::String(text) => format!("found the string {text:?}"),
        Value::Number(number) => format!("found the number `{number}`"),
        Value::Bool(truth) => format!("found `{truth}`"),
        Value::Array(_) => "found a list".to_owned(),
        Value::Object(_) => "found a table".to_owned(),
        Value::Null => "found null".to_owned(),
    }
}
