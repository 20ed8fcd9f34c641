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

/// What a function here says: numbers by name, or a refusal.
pub type Answer = Result<Value, String>;

/// All cases of the JSON files in a folder, in the order of their names.
pub fn load(folder: &Path) -> Vec<Case> {
    let entries = std::fs::read_dir(folder).expect("the folder can be read");
    let mut paths: Vec<_> = entries.map(|e| e.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "json"));
    paths.sort();
    let mut cases = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).expect("the file can be read");
        let file: Value = serde_json::from_str(&text).expect("the file is JSON");
        let name = path.file_stem().expect("a name").to_string_lossy();
        for case in file["cases"].as_array().expect("cases") {
            cases.push(Case {
                file: name.to_string(),
                name: text_of(&case["name"]),
                function: text_of(&case["function"]),
                inputs: case["inputs"].clone(),
                answer: case.get("wanted").unwrap_or(&case["expected"]).clone(),
                tolerance: case["tolerance"].as_f64().expect("a tolerance"),
            });
        }
    }
    cases
}

fn text_of(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

/// A number, or one of the words for those that JSON lacks.
pub fn number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("NaN") => Some(f64::NAN),
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        _ => value.as_f64(),
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
    /// An optional input.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.inputs.get(key).filter(|value| !value.is_null())
    }

    pub fn number(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(number)
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
        mask.map(|_, _, m| m == 1.0)
    }

    /// A padded array without its masked slots.
    pub fn packed(&self, key: &str) -> Option<Vec<f64>> {
        Some(
            self.rows(key)?
                .select("input", &self.mask())
                .expect("rows like the mask"),
        )
    }
}

/// Compares an answer with that of the file.
pub fn compare(case: &Case, answer: Answer, tolerance: f64) -> Result<(), String> {
    let answer = match (case.answer.get("error"), answer) {
        (Some(_), Err(_)) => return Ok(()),
        (Some(error), Ok(got)) => return Err(format!("should refuse ({error}), gave {got}")),
        (None, Err(error)) => return Err(format!("refused: {error}")),
        (None, Ok(got)) => got,
    };
    for (key, expected) in case.answer.as_object().expect("an answer") {
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
        return Err(format!("{at}: {got} against {expected}"));
    };
    let same = g == e || (g.is_nan() && e.is_nan());
    if same || (g - e).abs() <= tolerance * e.abs().max(1.0) {
        return Ok(());
    }
    Err(format!("{at}: {g} against {e}"))
}
