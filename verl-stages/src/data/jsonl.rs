//! JSON Lines: one object a line.
//!
//! The file is read and checked once, when it is opened. Its bytes stay in memory (not the parsed values, which take
//! several times as much) with the position of each row, and a row is parsed when it is asked for, which costs a few
//! microseconds. So rows cannot change during a run even if the file does.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::{BuildContext, ConfigError, DataConfig};

/// A JSON Lines file. Blank lines are skipped; a byte-order mark and Windows line ends are passed over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Jsonl {
    /// The file; relative to the folder of the pipeline file.
    pub path: PathBuf,
}

impl DataConfig for Jsonl {
    const KIND: &'static str = "jsonl";
    const SUMMARY: &'static str = "rows of a JSON Lines file";

    fn check(&self, context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        super::check_format(&context.base, &self.path, Some(false))
    }

    fn open(&self, context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        let path = super::resolve(&context.base, &self.path);
        Ok(Arc::new(JsonlRows::open(&path)?))
    }
}

/// The rows of a JSON Lines file.
#[derive(Debug)]
pub struct JsonlRows {
    origin: String,
    text: String,
    rows: Vec<Range<usize>>,
    lines: Vec<usize>,
    fingerprint: String,
}

impl JsonlRows {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`DataError::Unreadable`]; [`DataError::Empty`]; [`DataError::Row`] with the line of the first row that is no
    /// JSON object or not UTF-8.
    pub fn open(path: &Path) -> Result<JsonlRows, DataError> {
        JsonlRows::from_bytes(path.display().to_string(), super::read_file(path)?)
    }

    fn from_bytes(origin: String, bytes: Vec<u8>) -> Result<JsonlRows, DataError> {
        let fingerprint = super::sha256_hex(&bytes);
        let text = String::from_utf8(bytes).map_err(|e| {
            let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
            DataError::Row {
                path: origin.clone(),
                row: valid.iter().filter(|&&byte| byte == b'\n').count() + 1,
                reason: "the line is not UTF-8".to_owned(),
            }
        })?;
        let mut rows = Vec::new();
        let mut lines = Vec::new();
        let mut start = if text.starts_with('\u{feff}') { 3 } else { 0 };
        for (index, line) in text[start..].split('\n').enumerate() {
            let range = start..start + line.len();
            start = range.end + 1;
            if line.trim().is_empty() {
                continue;
            }
            parse(&origin, index + 1, line)?;
            rows.push(range);
            lines.push(index + 1);
        }
        if rows.is_empty() {
            return Err(DataError::Empty { path: origin });
        }
        Ok(JsonlRows {
            origin,
            text,
            rows,
            lines,
            fingerprint,
        })
    }
}

fn parse(origin: &str, line: usize, text: &str) -> Result<Map<String, Value>, DataError> {
    let fail = |reason: String| DataError::Row {
        path: origin.to_owned(),
        row: line,
        reason,
    };
    match serde_json::from_str(text) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(other) => Err(fail(format!(
            "the line holds {}, not an object",
            kind_of(&other)
        ))),
        Err(e) => Err(fail(format!(
            "malformed JSON at column {}: {}",
            e.column(),
            reason_of(&e)
        ))),
    }
}

/// The parser's words without its position, which counts lines within the row.
fn reason_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl DataLoaderInterface for JsonlRows {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        let Some(range) = self.rows.get(index) else {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        };
        parse(&self.origin, self.lines[index], &self.text[range.clone()])
    }

    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(bytes: &[u8]) -> Result<JsonlRows, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, bytes).unwrap();
        JsonlRows::open(&path)
    }

    fn told(bytes: &[u8]) -> (usize, String) {
        match open(bytes) {
            Err(DataError::Row { row, reason, .. }) => (row, reason),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn rows_survive_marks_blank_lines_and_line_ends() {
        let data =
            open("\u{feff}{\"q\": \"é\"}\r\n\n  \r\n{\"q\": 2}\n{\"q\": [1]}".as_bytes()).unwrap();
        assert_eq!(data.len(), 3);
        assert_eq!(data.row(0).unwrap()["q"], "é");
        assert_eq!(data.row(1).unwrap()["q"], 2);
        assert_eq!(data.row(2).unwrap()["q"][0], 1);
        assert!(matches!(data.row(3), Err(DataError::Row { row: 4, .. })));
    }

    #[test]
    fn faults_are_told_with_their_line() {
        assert!(matches!(open(b""), Err(DataError::Empty { .. })));
        assert!(matches!(open(b"\n \r\n"), Err(DataError::Empty { .. })));
        let (row, reason) = told(b"{\"a\": 1}\n\n{\"a\": 1,}\n{");
        assert_eq!(
            (row, reason.as_str()),
            (3, "malformed JSON at column 9: trailing comma")
        );
        let (row, reason) = told(b"{\"a\": 1}\n[1]\n");
        assert_eq!(
            (row, reason.as_str()),
            (2, "the line holds a list, not an object")
        );
        let (row, reason) = told(b"{\"a\": 1}\n{\"a\": \"\xff\"}\n");
        assert_eq!((row, reason.as_str()), (2, "the line is not UTF-8"));
        assert_eq!(told(b"{} {}").0, 1);
        assert!(matches!(
            JsonlRows::open(Path::new("no/such.jsonl")),
            Err(DataError::Unreadable { .. })
        ));
    }

    #[test]
    fn the_fingerprint_is_that_of_the_content() {
        let data = open(b"{}\n").unwrap();
        assert_eq!(
            data.fingerprint(),
            "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
        );
    }

    #[test]
    fn paths_are_relative_to_the_pipeline_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("rows.jsonl"), "{}\n").unwrap();
        let context = BuildContext {
            base: dir.path().to_owned(),
            ..BuildContext::default()
        };
        let config = Jsonl {
            path: "rows.jsonl".into(),
        };
        let data = config.open(&context).unwrap();
        assert_eq!(data.len(), 1);
        assert_eq!(
            data.origin(),
            dir.path().join("rows.jsonl").display().to_string()
        );
    }

    /// The questions of GSM8K, where they lie beside the workspace.
    #[test]
    fn gsm8k_reads_whole() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/gsm8k");
        if !folder.exists() {
            return;
        }
        for (name, count) in [("train.jsonl", 7473), ("test.jsonl", 1319)] {
            let data = JsonlRows::open(&folder.join(name)).unwrap();
            assert_eq!(data.len(), count);
            for index in 0..count {
                let row = data.row(index).unwrap();
                assert!(row["question"].is_string());
                assert!(row["answer"].as_str().unwrap().contains("\n#### "));
            }
        }
    }
}
