//! JSON Lines: one object per line; and files that are one JSON list of objects.
//!
//! The file is read and checked once, when it is opened. Its bytes stay in memory (not the parsed values, which take
//! several times as much) with the position of each row, and a row is parsed on demand, which costs a few microseconds. So
//! rows cannot change during a run even if the file does.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_words::data::{DataError, DataLoaderInterface, OpenedData};
use verl_words::stage::{BuildContext, ConfigError, DataConfig};

use super::json_numbers;
use super::recognise::{json_fault, recognise};

/// A JSON Lines file, or a file that is one JSON list of objects. Blank lines and a byte-order mark are skipped, and the
/// line ends of Windows and of old Macs are accepted.
///
/// Numbers keep all their digits: integers beyond 64 bits, and decimals of more than 17 digits within lists and objects,
/// become texts as written in the file, and a number that is read as a text (an answer, a question) is the file's text.
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

    fn open_start(&self, context: &BuildContext) -> Result<OpenedData, DataError> {
        JsonlRows::open_start(&super::resolve(&context.base, &self.path))
    }
}

/// The rows of a JSON Lines file.
#[derive(Debug)]
pub struct JsonlRows {
    origin: String,
    text: String,
    rows: Vec<Range<usize>>,
    /// The number of each row in errors: its line, or its position in a list, from 1.
    numbers: Vec<usize>,
    fingerprint: String,
}

impl JsonlRows {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`DataError::Unreadable`], also for a file of another format; [`DataError::Empty`]; [`DataError::Row`] with the
    /// line of the first row that is not a JSON object or not UTF-8.
    pub fn open(path: &Path) -> Result<JsonlRows, DataError> {
        let origin = path.display().to_string();
        JsonlRows::from_bytes(origin, super::read_file(path)?, Extent::Whole)
    }

    /// Reads and checks the beginning of a large file, or all of a small one.
    ///
    /// # Errors
    /// Those of [`JsonlRows::open`].
    pub fn open_start(path: &Path) -> Result<OpenedData, DataError> {
        let length = std::fs::metadata(path).map_or(0, |file| file.len());
        if length > super::START_BYTES {
            let origin = path.display().to_string();
            let mut bytes = Vec::new();
            let read = File::open(path)
                .and_then(|file| file.take(super::START_BYTES).read_to_end(&mut bytes));
            read.map_err(|error| DataError::Unreadable {
                path: origin.clone(),
                reason: error.to_string(),
            })?;
            match JsonlRows::from_bytes(origin, bytes, Extent::Start) {
                // No row ends within what was read.
                Err(DataError::Empty { .. }) => {}
                rows => {
                    return Ok(OpenedData {
                        rows: Arc::new(rows?),
                        is_complete: false,
                    });
                }
            }
        }
        Ok(OpenedData::complete(Arc::new(JsonlRows::open(path)?)))
    }

    fn from_bytes(origin: String, bytes: Vec<u8>, extent: Extent) -> Result<JsonlRows, DataError> {
        if let Some(other) = recognise(&bytes[..bytes.len().min(super::MARK_BYTES as usize)]) {
            let reason = format!("it {}; {}", other.what, other.help);
            return Err(DataError::Unreadable {
                path: origin,
                reason,
            });
        }
        let fingerprint = super::sha256_hex(&bytes);
        let text = decode(&origin, bytes, extent)?;
        let start = if text.starts_with('\u{feff}') { 3 } else { 0 };
        let is_list = text[start..].trim_start().starts_with('[');
        let found = match is_list {
            true => list_rows(&origin, &text, start, extent)?,
            false => line_rows(&origin, &text, start, extent)?,
        };
        let (numbers, rows): (Vec<usize>, Vec<Range<usize>>) = found.into_iter().unzip();
        if rows.is_empty() {
            return Err(DataError::Empty { path: origin });
        }
        Ok(JsonlRows {
            origin,
            text,
            rows,
            numbers,
            fingerprint,
        })
    }
}

/// How much of a file was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    Whole,
    /// The beginning, cut off anywhere.
    Start,
}

fn decode(origin: &str, bytes: Vec<u8>, extent: Extent) -> Result<String, DataError> {
    String::from_utf8(bytes).or_else(|error| {
        let at = error.utf8_error().valid_up_to();
        let cut = extent == Extent::Start && error.utf8_error().error_len().is_none();
        let mut bytes = error.into_bytes();
        let byte = bytes.get(at).copied().unwrap_or_default();
        bytes.truncate(at);
        // The remaining bytes are valid.
        let valid = String::from_utf8(bytes).unwrap_or_default();
        if cut {
            return Ok(valid);
        }
        let line = valid.rfind(['\n', '\r']).map_or(0, |end| end + 1);
        Err(DataError::Row {
            path: origin.to_owned(),
            row: valid.matches('\n').count() + 1,
            reason: format!(
                "invalid UTF-8 at byte 0x{byte:02x} (column {}); convert the file to UTF-8, for example with `iconv`",
                valid[line..].chars().count() + 1
            ),
        })
    })
}

/// A row's number and its range in the text.
type Numbered = (usize, Range<usize>);

/// The rows of a text with one object per line. Lines end with a line feed, or with a carriage return if the text has no
/// line feed: JSON text on one line contains neither.
fn line_rows(
    origin: &str,
    text: &str,
    mut start: usize,
    extent: Extent,
) -> Result<Vec<Numbered>, DataError> {
    let ends_line = match text.contains('\n') {
        true => '\n',
        false => '\r',
    };
    let end = match extent {
        Extent::Whole => text.len(),
        Extent::Start => text.rfind(ends_line).unwrap_or(0).max(start),
    };
    let (mut rows, mut faults) = (Vec::new(), Vec::new());
    for (index, line) in text[start..end].split(ends_line).enumerate() {
        let range = start..start + line.len();
        start = range.end + 1;
        if line.trim().is_empty() {
            continue;
        }
        match parse(origin, index + 1, line) {
            Ok(_) => rows.push((index + 1, range)),
            Err(error) => faults.push((index + 1, error)),
        }
    }
    let mut faults = faults.into_iter();
    match faults.next() {
        Some((_, first)) => Err(with_others(first, faults.map(|(line, _)| line))),
        None => Ok(rows),
    }
}

/// Number of lines that are listed when several are malformed.
const NAMED: usize = 5;

/// The error of the first malformed line, with the numbers of the other malformed lines.
fn with_others(first: DataError, others: impl Iterator<Item = usize>) -> DataError {
    let others: Vec<String> = others.map(|line| line.to_string()).collect();
    let also = match others.len() {
        0 => String::new(),
        1 => format!("; row {} is malformed too", others[0]),
        2..=NAMED => format!("; rows {} are malformed too", others.join(", ")),
        all => format!(
            "; rows {} and {} more are malformed too",
            others[..NAMED].join(", "),
            all - NAMED
        ),
    };
    match first {
        DataError::Row { path, row, reason } => DataError::Row {
            path,
            row,
            reason: reason + &also,
        },
        other => other,
    }
}

/// The rows of a text that is a JSON list of objects.
fn list_rows(
    origin: &str,
    text: &str,
    start: usize,
    extent: Extent,
) -> Result<Vec<Numbered>, DataError> {
    let mut rows: Vec<Numbered> = Vec::new();
    let fault = |number: usize, at: usize, reason: &str| DataError::Row {
        path: origin.to_owned(),
        row: number,
        reason: format!("malformed JSON at {}: {reason}", place(text, at)),
    };
    let past_blanks = |at: usize| text.len() - text[at..].trim_start().len();
    let mut at = past_blanks(start) + 1;
    loop {
        at = past_blanks(at);
        let number = rows.len() + 1;
        if rows.is_empty() && text[at..].starts_with(']') {
            at += 1;
            break;
        }
        let mut items = serde_json::Deserializer::from_str(&text[at..]).into_iter::<IgnoredAny>();
        match items.next() {
            Some(Ok(_)) => {}
            None if extent == Extent::Start => return Ok(rows),
            None => {
                return Err(fault(
                    number,
                    at,
                    "the list does not end; the file is cut off",
                ));
            }
            Some(Err(error)) if error.is_eof() && extent == Extent::Start => return Ok(rows),
            Some(Err(error)) => {
                let item = &text[at..];
                let ends = item.match_indices('\n').map(|(end, _)| end + 1);
                let starts: Vec<usize> = std::iter::once(0).chain(ends).collect();
                let line_start = starts
                    .get(error.line().saturating_sub(1))
                    .copied()
                    .unwrap_or(0);
                let found = (at + line_start + error.column().saturating_sub(1)).min(text.len());
                return Err(fault(number, found, &json_fault(item, &error).1));
            }
        }
        let range = at..at + items.byte_offset();
        at = past_blanks(range.end);
        parse(origin, number, &text[range.clone()])?;
        rows.push((number, range));
        match text[at..].chars().next() {
            Some(',') => at += 1,
            Some(']') => {
                at += 1;
                break;
            }
            None if extent == Extent::Start => return Ok(rows),
            None => {
                return Err(fault(
                    number,
                    at,
                    "the list does not end; the file is cut off",
                ));
            }
            Some(_) => return Err(fault(number, at, "expected `,` or `]` after the object")),
        }
    }
    at = past_blanks(at);
    match at < text.len() {
        true => Err(fault(
            rows.len(),
            at,
            "the list has ended, but the file continues",
        )),
        false => Ok(rows),
    }
}

/// Line and column of a position in a text.
fn place(text: &str, at: usize) -> String {
    // An error of the parser may point inside a character.
    let at = (0..=at)
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0);
    let before = &text[..at];
    let line = before.rfind('\n').map_or(0, |end| end + 1);
    format!(
        "line {}, column {}",
        before.matches('\n').count() + 1,
        before[line..].chars().count() + 1
    )
}

fn parse(origin: &str, number: usize, text: &str) -> Result<Map<String, Value>, DataError> {
    let fail = |reason: String| DataError::Row {
        path: origin.to_owned(),
        row: number,
        reason,
    };
    match json_numbers::parse(text) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(other) => Err(fail(format!("found {}, not an object", kind_of(&other)))),
        Err(error) => {
            let (column, reason) = json_fault(text, &error);
            Err(fail(format!("malformed JSON at column {column}: {reason}")))
        }
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
        parse(&self.origin, self.numbers[index], &self.text[range.clone()])
    }

    fn written(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        match self
            .rows
            .get(index)
            .map(|range| json_numbers::written(&self.text[range.clone()]))
        {
            Some(Ok(row)) => Ok(row),
            // The parser reports what is wrong with it.
            _ => self.row(index),
        }
    }

    fn origin(&self) -> String {
        self.origin.clone()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

#[cfg(test)]
mod tests;
