//! Recognises files that are not data sets by their first bytes, and finds out why a row is not JSON: the cause and the
//! fix, where a parser only reports an unexpected character.

/// The format of a file that cannot be used, and how to fix it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnusableFile {
    /// What it is, to follow the file's name: `is compressed with gzip`.
    pub what: String,
    /// How to fix it.
    pub help: String,
}

impl UnusableFile {
    fn new(what: impl Into<String>, help: impl Into<String>) -> Self {
        UnusableFile {
            what: what.into(),
            help: help.into(),
        }
    }
}

/// First bytes, the format that they indicate, and the fix.
const MARKS: &[(&[u8], &str, &str)] = &[
    (
        b"version https://git-lfs.github.com/spec/v1",
        "is a Git LFS pointer, not the data",
        "fetch the file with `git lfs pull`",
    ),
    (
        b"\x1f\x8b",
        "is compressed with gzip",
        "decompress it with `gunzip`",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "is compressed with Zstandard",
        "decompress it with `unzstd`",
    ),
    (
        b"\xfd7zXZ\x00",
        "is compressed with xz",
        "decompress it with `unxz`",
    ),
    (
        b"BZh",
        "is compressed with bzip2",
        "decompress it with `bunzip2`",
    ),
    (
        b"\x04\x22\x4d\x18",
        "is compressed with LZ4",
        "decompress it with `unlz4`",
    ),
    (
        b"PK\x03\x04",
        "is a ZIP archive (.zip, .xlsx, .npz)",
        "unpack it, and use the data file inside",
    ),
    (
        b"PARE",
        "is an encrypted Parquet file",
        "write it without encryption",
    ),
    (b"ARROW1", "is an Arrow IPC file", TO_PARQUET),
    (
        b"\xff\xff\xff\xff",
        "is an Arrow IPC stream, as in the cache of `datasets`",
        TO_PARQUET,
    ),
    (b"ORC", "is an ORC file", TO_PARQUET),
    (b"Obj\x01", "is an Avro file", TO_PARQUET),
    (b"SQLite format 3\x00", "is an SQLite database", TO_PARQUET),
    (b"\x89HDF", "is an HDF5 file", TO_PARQUET),
    (b"\x80\x02", "is a Python pickle", TO_PARQUET),
    (b"\x80\x03", "is a Python pickle", TO_PARQUET),
    (b"\x80\x04", "is a Python pickle", TO_PARQUET),
    (b"\x80\x05", "is a Python pickle", TO_PARQUET),
    (
        b"%PDF",
        "is a PDF document",
        "use a JSON Lines or Parquet file",
    ),
    // UTF-32 begins like UTF-16, so it comes first.
    (b"\xff\xfe\x00\x00", "is UTF-32 text", TO_UTF8),
    (b"\x00\x00\xfe\xff", "is UTF-32 text", TO_UTF8),
    (b"\xff\xfe", "is UTF-16 text", TO_UTF8),
    (b"\xfe\xff", "is UTF-16 text", TO_UTF8),
];

const TO_PARQUET: &str =
    "convert it to Parquet or JSON Lines, for example in Python with `pyarrow` or `datasets`";
const TO_UTF8: &str = "convert it to UTF-8: `iconv -f UTF-16 -t UTF-8 OLD > NEW`";

/// Characters that are checked to distinguish text from other formats.
const TEXT: usize = 1000;

/// The format of a file that begins with `start`, if it is known and cannot be read as a data set.
pub(crate) fn recognise(start: &[u8]) -> Option<UnusableFile> {
    let marked = MARKS.iter().find(|(mark, ..)| start.starts_with(mark));
    if let Some((_, what, help)) = marked {
        return Some(UnusableFile::new(*what, *help));
    }
    match start {
        [b'{' | b'[', 0, ..] | [0, b'{' | b'[', ..] => {
            return Some(UnusableFile::new("is UTF-16 text", TO_UTF8));
        }
        _ => {}
    }
    // Only text can be a page or a table; binary formats contain separators by chance.
    let text = String::from_utf8_lossy(start);
    let is_text =
        |character: char| !character.is_control() || matches!(character, '\n' | '\r' | '\t');
    if !text.chars().take(TEXT).all(is_text) {
        return None;
    }
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if text.starts_with('<') {
        let what = "is an HTML or XML page, not data";
        let help = "download the file itself; an error or login page is often saved under its name";
        return Some(UnusableFile::new(what, help));
    }
    table(text)
}

/// A table of separated values: the first two lines contain the separator, and the first does not begin with a bracket.
fn table(text: &str) -> Option<UnusableFile> {
    let mut lines = text.lines();
    let (header, row) = (lines.next()?, lines.next()?);
    let kinds = [
        (',', "comma", ","),
        ('\t', "tab", "\\t"),
        (';', "semicolon", ";"),
    ];
    let (_, name, separator) = kinds.into_iter().find(|(separator, ..)| {
        header.contains(*separator) && row.contains(*separator) && !header.starts_with(['{', '['])
    })?;
    Some(UnusableFile::new(
        format!("is a table of {name}-separated values"),
        format!(
            "convert it to JSON Lines, for example in Python: `import pandas as pd; pd.read_csv(\"OLD\", sep=\"{separator}\").to_json(\"NEW.jsonl\", orient=\"records\", lines=True, force_ascii=False)`"
        ),
    ))
}

/// The column (from 1) at which a text stops being JSON, and what is wrong there: the cause if it is known, otherwise the
/// parser's message without its position, which counts lines within the row.
pub(crate) fn json_fault(text: &str, error: &serde_json::Error) -> (usize, String) {
    let words = error.to_string();
    let words = words
        .rfind(" at line ")
        .map_or(words.as_str(), |at| &words[..at]);
    let expected = words.starts_with("expected") || words.starts_with("key must be");
    if let Some((column, half)) = lone_surrogate(text)
        .filter(|_| words.contains("hex escape") || words.contains("code point"))
    {
        let cause = "is half of a character (a lone surrogate), which Python's `json.dumps` writes for broken text; remove it, or write the complete character";
        return (column, format!("`{half}` {cause}"));
    }
    if let Some((column, word, instead)) = python_literal(text).filter(|_| expected) {
        return (
            column,
            format!("`{word}` is Python, not JSON; write {instead}"),
        );
    }
    let cause = if words.starts_with("trailing characters") {
        match text.trim_end().contains('\r') {
            true => {
                "a carriage return separates objects inside the line; end every line with a line feed"
            }
            false => "text after the object; JSON Lines has one object per line",
        }
    } else if error.is_eof() {
        "the object does not end in this line: the file is cut off, or the object is spread over several lines (JSON Lines has one object per line)"
    } else {
        words
    };
    (error.column(), cause.to_owned())
}

/// The first escape of half a surrogate pair, with its column (from 1, in characters).
fn lone_surrogate(text: &str) -> Option<(usize, &str)> {
    let mut at = 0;
    while let Some(next) = text[at..].find('\\') {
        let escape = at + next;
        let Some(unit) = unit_at(text, escape) else {
            // Another escape: the character after the backslash belongs to it.
            at = escape + 1 + text[escape + 1..].chars().next().map_or(0, char::len_utf8);
            continue;
        };
        at = escape + 6;
        match unit {
            0xd800..=0xdbff => match unit_at(text, at) {
                Some(0xdc00..=0xdfff) => at += 6,
                _ => return Some((column(text, escape), &text[escape..escape + 6])),
            },
            0xdc00..=0xdfff => return Some((column(text, escape), &text[escape..escape + 6])),
            _ => {}
        }
    }
    None
}

/// The number of the escape `\uXXXX` at a position.
fn unit_at(text: &str, at: usize) -> Option<u16> {
    let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
    let hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    hexadecimal
        .then(|| u16::from_str_radix(digits, 16).ok())
        .flatten()
}

/// Python literals that are not JSON, with what to write instead.
const PYTHON: &[(&str, &str)] = &[
    ("NaN", "a number or `null`"),
    ("-Infinity", "a number or `null`"),
    ("Infinity", "a number or `null`"),
    ("None", "`null`"),
    ("True", "`true`"),
    ("False", "`false`"),
    ("'", "strings in double quotes"),
];

/// The first Python literal outside strings: its column, the literal, what to write instead.
fn python_literal(text: &str) -> Option<(usize, &'static str, &'static str)> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ if quoted => {}
            _ => {
                let found = PYTHON.iter().find(|(word, _)| text[at..].starts_with(word));
                if let Some((word, instead)) = found {
                    return Some((column(text, at), word, instead));
                }
            }
        }
    }
    None
}

fn column(text: &str, at: usize) -> usize {
    text[..at].chars().count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(start: &[u8], words: Option<&str>) {
        let what = recognise(start).map(|found| found.what);
        assert_eq!(
            what.as_deref(),
            words,
            "{:?}",
            String::from_utf8_lossy(start)
        );
    }

    /// Rows #11, A9 and A17 of the lists of inputs.
    #[test]
    fn files_that_are_not_data_sets_are_recognised() {
        check(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            Some("is a Git LFS pointer, not the data"),
        );
        check(b"\x1f\x8b\x08\x00", Some("is compressed with gzip"));
        check(
            b"\x28\xb5\x2f\xfd\x04",
            Some("is compressed with Zstandard"),
        );
        check(
            "{\"a\": 1}"
                .encode_utf16()
                .flat_map(u16::to_le_bytes)
                .collect::<Vec<u8>>()
                .as_slice(),
            Some("is UTF-16 text"),
        );
        check(
            "\u{feff}{\"a\": 1}"
                .encode_utf16()
                .flat_map(u16::to_be_bytes)
                .collect::<Vec<u8>>()
                .as_slice(),
            Some("is UTF-16 text"),
        );
        check(
            b"<!DOCTYPE html>\n<html>",
            Some("is an HTML or XML page, not data"),
        );
        check(
            b"question,answer\n1+1,2\n",
            Some("is a table of comma-separated values"),
        );
        check(
            b"question\tanswer\n1+1\t2\n",
            Some("is a table of tab-separated values"),
        );
        check(
            b"PK\x03\x04\x14\x00",
            Some("is a ZIP archive (.zip, .xlsx, .npz)"),
        );
        check(b"{\"a\": 1, \"b\": 2}\n{\"a\": 1, \"b\": 2}\n", None);
        check("\u{feff}{\"a\": 1}\n".as_bytes(), None);
        check(b"[{\"a\": 1, \"b\": 1},\n{\"a\": 2, \"b\": 2}]", None);
        check(b"some words, and more\n", None);
        check(b"", None);
        check(b"PAR1\x15\x04\x15,\n\x00\x01,\n", None);
    }

    #[test]
    fn help_says_how_to_convert_a_table() {
        let help = recognise(b"a;b\n1;2\n").expect("a table").help;
        assert!(
            help.contains("sep=\";\"") && help.contains("lines=True"),
            "{help}"
        );
    }

    /// Row A12.
    #[test]
    fn halves_of_characters_are_found() {
        let half = |text: &str| lone_surrogate(text).map(|(at, half)| (at, half.to_owned()));
        assert_eq!(half(r#"{"é": "\ud83d"}"#), Some((8, r"\ud83d".to_owned())));
        assert_eq!(
            half(r#"{"a": "\ud83d\u0041"}"#),
            Some((8, r"\ud83d".to_owned()))
        );
        assert_eq!(half(r#"{"a": "x\uDE00"}"#), Some((9, r"\uDE00".to_owned())));
        assert_eq!(half(r#"{"a": "\ud83d\ude00 \\ud83d \u00e9"}"#), None);
        assert_eq!(half(r#"{"a": "\"#), None);
        assert_eq!(half(r#"{"a": "\u12"#), None);
    }

    #[test]
    fn python_literals_are_found_outside_strings() {
        let found = |text: &str| python_literal(text).map(|(column, word, _)| (column, word));
        assert_eq!(
            found(r#"{"a": "NaN \" None", "b": -Infinity}"#),
            Some((27, "-Infinity"))
        );
        assert_eq!(found(r#"{"a": "it's", "b": None}"#), Some((20, "None")));
        assert_eq!(found(r#"{"a": "NaN", "b": -1}"#), None);
        assert_eq!(found("{'a': 1}"), Some((2, "'")));
    }
}
