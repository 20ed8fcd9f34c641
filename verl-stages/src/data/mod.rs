//! Data sets: files of rows, and generators of prompts.
//!
//! | kind | what |
//! |---|---|
//! | [`mod@file`] | a file, its format recognised by name or content |
//! | [`jsonl`] | JSON Lines |
//! | [`parquet`] | Parquet |
//! | [`addition`] | sums of two numbers, in three disjoint splits |
//! | [`addition_episodes`] | sums with logged answers, right and wrong, and their rewards |
//! | [`addition_pairs`] | sums, each with a right and a wrong answer |

pub mod addition;
pub mod addition_episodes;
pub mod addition_pairs;
pub mod file;
mod json_numbers;
pub mod jsonl;
pub mod parquet;
mod recognise;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use recognise::{UnusableFile, recognise};
use sha2::{Digest, Sha256};
use verl_words::data::DataError;
use verl_words::stage::ConfigError;

/// Hash of `bytes`, in hexadecimal.
fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a complete file, which must not be empty.
fn read_file(path: &Path) -> Result<Vec<u8>, DataError> {
    let bytes = std::fs::read(path).map_err(|e| DataError::Unreadable {
        path: path.display().to_string(),
        reason: e.to_string(),
    })?;
    if bytes.is_empty() {
        return Err(DataError::Empty {
            path: path.display().to_string(),
        });
    }
    Ok(bytes)
}

/// Refuses a data file that does not exist.
fn check_file(base: &Path, path: &Path) -> Result<(), Vec<ConfigError>> {
    let found = resolve(base, path);
    let reason = match std::fs::metadata(&found) {
        Ok(meta) if meta.is_file() => return Ok(()),
        Ok(_) => format!("cannot be read: `{}` is not a file", found.display()),
        Err(error) => format!("cannot be read: `{}`: {error}", found.display()),
    };
    let help = "set it to the path of a JSON Lines or Parquet file; a relative path starts at the folder of the pipeline file, or at the current folder if it is given on the command line";
    Err(vec![ConfigError::new("path", reason, help)])
}

/// A check reads files up to this size completely, and larger ones in part (bytes).
const START_BYTES: u64 = 64 << 20;

/// Bytes at the beginning of a file by which its format is recognised.
const MARK_BYTES: u64 = 1 << 16;

/// The beginning of a file.
fn read_mark(path: &Path) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    File::open(path)?.take(MARK_BYTES).read_to_end(&mut start)?;
    Ok(start)
}

/// The format of a file, if it is known and cannot be used as a data set.
fn recognise_file(path: &Path) -> Option<UnusableFile> {
    recognise(&read_mark(path).ok()?)
}

/// Hash of a file, which is read in chunks.
fn sha256_of_file(path: &Path) -> Result<String, DataError> {
    hash(path).map_err(|error| DataError::Unreadable {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

fn hash(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let (mut hasher, mut part) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut part)? {
            0 => return Ok(hex(&hasher.finalize())),
            read => hasher.update(&part[..read]),
        }
    }
}

/// Refuses a data file that does not exist, or does not begin like a file of its format; reads only its beginning.
fn check_format(base: &Path, path: &Path, parquet: Option<bool>) -> Result<(), Vec<ConfigError>> {
    check_file(base, path)?;
    let found = resolve(base, path);
    let fault = |reason: &str, help: &str| {
        let reason = format!("cannot be used: `{}` {reason}", found.display());
        Err(vec![ConfigError::new("path", reason, help)])
    };
    let start = match read_mark(&found) {
        Ok(start) => start,
        Err(error) => return fault(&format!("cannot be read: {error}"), GIVE_DATA),
    };
    if start.is_empty() {
        return fault("contains no rows", GIVE_DATA);
    }
    if let Some(other) = recognise(&start) {
        return fault(&other.what, &other.help);
    }
    match (parquet, start.starts_with(b"PAR1")) {
        (Some(true) | None, true) => Ok(()),
        (Some(true), false) => fault("does not begin like a Parquet file", GIVE_DATA),
        (Some(false), true) => fault(
            "is a Parquet file",
            "rename it to `.parquet`, or declare it with `kind = \"parquet\"`",
        ),
        (Some(false) | None, false) => match first_line_without_object(&start) {
            None => Ok(()),
            Some(line) => fault(
                &format!("does not begin with a JSON object: {line:?}"),
                GIVE_DATA,
            ),
        },
    }
}

const GIVE_DATA: &str =
    "use a JSON Lines file (one object per line), a JSON list of objects, or a Parquet file";

/// The beginning of a file that begins neither with an object nor with a list of objects.
fn first_line_without_object(start: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(start);
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let item = text.strip_prefix('[').map(str::trim_start);
    if text.starts_with('{')
        || item.is_some_and(|item| item.is_empty() || item.starts_with(['{', ']']))
    {
        return None;
    }
    let line = text.lines().next().unwrap_or_default();
    Some(line.chars().take(40).collect())
}

/// `path` relative to the pipeline file's folder.
fn resolve(base: &Path, path: &Path) -> PathBuf {
    if base.as_os_str().is_empty() {
        path.to_owned()
    } else {
        base.join(path)
    }
}

/// The error of a row index past the end.
fn past_the_end(origin: String, index: usize, len: usize) -> DataError {
    DataError::Row {
        path: origin,
        row: index.saturating_add(1),
        reason: format!("the data set has only {len} rows"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use verl_words::conformance::check_data;
    use verl_words::stage::{BuildContext, DataConfig};

    use super::addition::{Addition, Split};
    use super::addition_pairs::AdditionPairs;
    use super::{file::DataFile, jsonl::Jsonl, parquet::Parquet};

    #[track_caller]
    fn check(config: &impl DataConfig, base: &Path) {
        let context = BuildContext {
            base: base.to_owned(),
            ..BuildContext::default()
        };
        assert_eq!(check_data(|| config.open(&context)), []);
    }

    #[test]
    fn a_check_reports_a_file_that_is_not_of_its_format() {
        let dir = tempfile::tempdir().unwrap();
        let context = BuildContext {
            base: dir.path().to_owned(),
            ..BuildContext::default()
        };
        let reason = |name: &str, content: &[u8]| {
            std::fs::write(dir.path().join(name), content).unwrap();
            let file = DataFile { path: name.into() };
            let checked = file.check(&context).err();
            // Opening may refuse a file that the check accepts, but not the other way round.
            assert!(checked.is_none() || file.open(&context).is_err(), "{name}");
            checked
                .map(|faults| faults[0].reason.clone())
                .unwrap_or_default()
        };
        assert!(
            reason("users.jsonl", b"root:x:0:0\n")
                .contains("not begin with a JSON object: \"root:x:0:0\"")
        );
        assert!(reason("users", b"root:x:0:0\n").contains("JSON object"));
        assert!(reason("numbers.json", b"[1, 2]\n").contains("JSON object"));
        assert!(reason("rows.parquet", b"{\"a\": 1}\n").contains("Parquet"));
        assert!(reason("table.csv", b"question,answer\n1+1,2\n").contains("comma-separated"));
        assert!(
            reason(
                "rows.parquet",
                b"version https://git-lfs.github.com/spec/v1\n"
            )
            .contains("Git LFS")
        );
        assert!(reason("lines.jsonl", b"PAR1").contains("is a Parquet file"));
        assert_eq!(reason("list.json", b" [\n {\"a\": 1}\n]\n"), "");
        assert!(reason("none.jsonl", b"").contains("no rows"));
        assert_eq!(
            reason("sound.jsonl", "\u{feff}\n {\"a\": 1}\n".as_bytes()),
            ""
        );
    }

    #[test]
    fn every_data_set_conforms() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path();
        std::fs::write(base.join("rows.jsonl"), "{\"q\": 1}\n\n{\"q\": \"é\"}\n").unwrap();
        let snappy = ::parquet::basic::Compression::SNAPPY;
        super::parquet::tests::write_example(&base.join("rows.parquet"), snappy);
        let path = |name: &str| name.into();
        let jsonl = path("rows.jsonl");
        check(&Jsonl { path: jsonl }, base);
        let parquet = path("rows.parquet");
        check(&Parquet { path: parquet }, base);
        for name in ["rows.jsonl", "rows.parquet"] {
            check(&DataFile { path: path(name) }, base);
        }
        for split in [Split::Sft, Split::Train, Split::HeldOut] {
            let addition = Addition {
                split,
                ..Addition::default()
            };
            check(&addition, base);
            let pairs = AdditionPairs {
                sums: addition,
                ..AdditionPairs::default()
            };
            check(&pairs, base);
        }
    }
}
