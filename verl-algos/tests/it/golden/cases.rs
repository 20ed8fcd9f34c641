//! Golden cases: reading them, and comparing answers.

use std::path::Path;

use serde_json::Value;
use verl_algos::Ragged;

/// One case of a golden file.
pub struct Case {
    pub file: String,
    pub name: String,
    pub function: String,
    pub inputs: Value,
    pub answer: Value,
    pub tolerance: f64,
}

/// The answer of a function: numbers by name, or an error.
pub type Answer = Result<Value, String>;

/// The cases of a folder, and the errors of those that could not be read.
pub struct Loaded {
    pub cases: Vec<Case>,
    pub faults: Vec<String>,
}

/// All cases of the JSON files in a folder, in order of file name.
pub fn load(folder: &Path) -> Loaded {
    let entries = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "json"));
    paths.sort();
    let (mut cases, mut faults) = (Vec::new(), Vec::new());
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        match read(&path) {
            Ok(values) => {
                for (i, value) in values.iter().enumerate() {
                    match Case::new(&name, value) {
                        Ok(case) => cases.push(case),
                        Err(why) => faults.push(format!("{name} case {i}: {why}")),
                    }
                }
            }
            Err(why) => faults.push(format!("{name}: {why}")),
        }
    }
    Loaded { cases, faults }
}

fn read(path: &Path) -> Result<Vec<Value>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let file: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let cases = file["cases"].as_array().or(file.as_array());
    cases
        .cloned()
        .ok_or_else(|| "`cases` is not a list".to_owned())
}

/// A number, or one of the words for numbers that JSON does not have.
pub fn number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("NaN") => Some(f64::NAN),
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        _ => value.as_f64().or(value.as_bool().map(f64::from)),
    }
}

/// JSON for a number.
pub fn json(value: f64) -> Value {
    if value.is_nan() {
        Value::from("NaN")
    } else if value == f64::INFINITY {
        Value::from("Infinity")
    } else if value == f64::NEG_INFINITY {
        Value::from("-Infinity")
    } else {
        Value::from(value)
    }
}

/// JSON for ragged rows.
pub fn json_rows(rows: &Ragged<f64>) -> Value {
    rows.rows()
        .map(|row| row.iter().map(|v| json(*v)).collect::<Value>())
        .collect()
}

impl Case {
    fn new(file: &str, value: &Value) -> Result<Case, String> {
        let given = |key: &str| value.get(key).filter(|value| !value.is_null());
        let text = |key: &str| given(key).and_then(Value::as_str).map(str::to_owned);
        let mut inputs = value["inputs"].clone();
        if let (Some(inputs), Some(dtype)) = (inputs.as_object_mut(), given("dtype")) {
            inputs.insert("dtype".to_owned(), dtype.clone());
        }
        let answer = given("wanted").or_else(|| given("expected"));
        Ok(Case {
            file: file.to_owned(),
            name: text("name").unwrap_or_default(),
            function: text("function").ok_or("`function` is not a text")?,
            inputs,
            answer: answer.ok_or("neither `wanted` nor `expected`")?.clone(),
            tolerance: given("tolerance").and_then(Value::as_f64).unwrap_or(1e-6),
        })
    }

    /// A case without inputs, to check whether its function is implemented.
    pub fn empty(function: &str) -> Case {
        Case {
            file: String::new(),
            name: String::new(),
            function: function.to_owned(),
            inputs: Value::Null,
            answer: Value::Null,
            tolerance: 0.0,
        }
    }

    /// An optional input.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.inputs.get(key).filter(|value| !value.is_null())
    }

    pub fn number(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(number)
    }

    /// A number, or the library's default if the case has none.
    pub fn number_or(&self, key: &str, default: f64) -> f64 {
        self.number(key).unwrap_or(default)
    }

    /// A switch: a boolean, or a number that is not 0.
    pub fn flag(&self, key: &str, default: bool) -> bool {
        self.number(key).map_or(default, |n| n != 0.0)
    }

    pub fn text_or<'a>(&'a self, key: &str, default: &'a str) -> &'a str {
        self.get(key).and_then(Value::as_str).unwrap_or(default)
    }

    /// The groups of rows: any integers or texts, compared only for equality.
    pub fn groups(&self) -> Option<Vec<u64>> {
        let ids = self.get("group_ids")?.as_array().expect("a list of ids");
        let mut known: Vec<String> = Vec::new();
        let mut number = |id: &Value| {
            let id = id.to_string().trim_end_matches(".0").to_owned();
            known.iter().position(|k| *k == id).unwrap_or_else(|| {
                known.push(id);
                known.len() - 1
            }) as u64
        };
        Some(ids.iter().map(&mut number).collect())
    }

    pub fn count(&self, key: &str) -> Option<usize> {
        self.number(key).map(|n| n as usize)
    }

    pub fn text(&self, key: &str) -> &str {
        let value = self.get(key).and_then(Value::as_str);
        value.unwrap_or_else(|| panic!("{}: no text `{key}`", self.name))
    }

    pub fn numbers(&self, key: &str) -> Vec<f64> {
        let values = self.get(key).and_then(Value::as_array);
        let values = values.unwrap_or_else(|| panic!("{}: no list `{key}`", self.name));
        values
            .iter()
            .map(|v| number(v).expect("a number"))
            .collect()
    }

    /// A padded `[B, T]` array.
    pub fn rows(&self, key: &str) -> Option<Ragged<f64>> {
        let rows = self.get(key)?.as_array()?.iter();
        Some(Ragged::from_rows(rows.map(|row| {
            let row = row.as_array().expect("a row").iter();
            row.map(|v| number(v).expect("a number"))
                .collect::<Vec<f64>>()
        })))
    }

    /// The response mask. Padding stays in as observations: neither is ever read.
    pub fn mask(&self) -> Ragged<bool> {
        let mask = self.rows("response_mask").expect("a mask");
        mask.map(|_, _, m| m != 0.0)
    }

    /// A padded array without its masked slots.
    pub fn packed(&self, key: &str) -> Option<Vec<f64>> {
        self.packed_under(key, &self.mask())
    }

    /// A padded array without the slots that another mask leaves out.
    pub fn packed_under(&self, key: &str, mask: &Ragged<bool>) -> Option<Vec<f64>> {
        let rows = self.rows(key)?.select("input", mask);
        Some(rows.expect("rows like the mask"))
    }
}

/// Compares an answer with that of the file.
pub fn compare(case: &Case, answer: Answer, tolerance: f64) -> Result<(), String> {
    let answer = match (case.answer.get("error"), answer) {
        (Some(_), Err(_)) => return Ok(()),
        (Some(error), Ok(got)) => return Err(format!("expected an error ({error}), got {got}")),
        (None, Err(error)) => return Err(format!("error: {error}")),
        (None, Ok(got)) => got,
    };
    let wanted = case
        .answer
        .as_object()
        .ok_or("the answer is not an object")?;
    for (key, expected) in wanted {
        let got = answer.get(key);
        let got = got.ok_or_else(|| format!("no `{key}` in the answer"))?;
        compare_values(key, got, expected, tolerance)?;
    }
    Ok(())
}

fn compare_values(at: &str, got: &Value, expected: &Value, tolerance: f64) -> Result<(), String> {
    if expected.is_null() {
        return Ok(());
    }
    if let (Some(got), Some(expected)) = (got.as_array(), expected.as_array()) {
        if got.len() != expected.len() {
            return Err(format!(
                "{at} has {} entries, not {}",
                got.len(),
                expected.len()
            ));
        }
        let mut each = got.iter().zip(expected).enumerate();
        return each
            .try_for_each(|(i, (g, e))| compare_values(&format!("{at}[{i}]"), g, e, tolerance));
    }
    if let (Some(got), Some(expected)) = (got.as_object(), expected.as_object()) {
        return expected.iter().try_for_each(|(key, e)| {
            let got = got.get(key).unwrap_or(&Value::Null);
            compare_values(&format!("{at}.{key}"), got, e, tolerance)
        });
    }
    let (Some(g), Some(e)) = (number(got), number(expected)) else {
        return Err(format!("{at}: {got} differs from {expected}"));
    };
    let same = g == e || (g.is_nan() && e.is_nan());
    if same || (g - e).abs() <= tolerance * e.abs().max(1.0) {
        return Ok(());
    }
    Err(format!("{at}: {g} differs from {e}"))
}
