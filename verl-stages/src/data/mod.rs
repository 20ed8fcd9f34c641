//! Data sets: files of rows, and generators of prompts.
//!
//! | kind | what |
//! |---|---|
//! | [`mod@file`] | a file, its format told by name or content |
//! | [`jsonl`] | JSON Lines |
//! | [`parquet`] | Parquet |
//! | [`addition`] | sums of two numbers, in three disjoint splits |
//! | [`addition_episodes`] | right and wrong answers to them, with rewards |
//! | [`addition_pairs`] | the same, each with a right and a wrong answer |

pub mod addition;
pub mod addition_episodes;
pub mod addition_pairs;
pub mod file;
pub mod jsonl;
pub mod parquet;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use verl_pipe::data::DataError;
use verl_pipe::stage::ConfigError;

/// Hash of `bytes`, in hexadecimal.
fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The whole of a file that must not be empty.
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

/// Refuses a data file that is not there.
fn check_file(base: &Path, path: &Path) -> Result<(), Vec<ConfigError>> {
    let found = resolve(base, path);
    let reason = match std::fs::metadata(&found) {
        Ok(meta) if meta.is_file() => return Ok(()),
        Ok(_) => format!("cannot be read: `{}` is not a file", found.display()),
        Err(error) => format!("cannot be read: `{}`: {error}", found.display()),
    };
    let help = "give the path of a JSON Lines or Parquet file; a relative one is read from the folder of the pipeline file, or of the command line where it is given there";
    Err(vec![ConfigError::new("path", reason, help)])
}

/// Refuses a data file that is not there, or does not begin as a file of its format does; reads no more of it.
fn check_format(base: &Path, path: &Path, parquet: Option<bool>) -> Result<(), Vec<ConfigError>> {
    check_file(base, path)?;
    let found = resolve(base, path);
    let fault = |reason: String| {
        let help = "give a JSON Lines file, an object a line, or a Parquet file";
        Err(vec![ConfigError::new(
            "path",
            format!("cannot be used: `{}`: {reason}", found.display()),
            help,
        )])
    };
    let mut start = Vec::new();
    let read = File::open(&found).and_then(|file| file.take(1 << 16).read_to_end(&mut start));
    if let Err(error) = read {
        return fault(error.to_string());
    }
    let begins = start.starts_with(b"PAR1");
    if start.is_empty() {
        return fault("it holds no row".to_owned());
    }
    if parquet.unwrap_or(begins) {
        return match begins {
            true => Ok(()),
            false => fault("it does not begin as a Parquet file does".to_owned()),
        };
    }
    let text = String::from_utf8_lossy(&start);
    let text = text.trim_start_matches('\u{feff}').trim_start();
    match text.starts_with('{') {
        true => Ok(()),
        false => fault(format!(
            "its first line is no JSON object: {:?}",
            text.lines()
                .next()
                .unwrap_or_default()
                .chars()
                .take(40)
                .collect::<String>()
        )),
    }
}

/// `path` as seen from the pipeline file's folder.
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

    use verl_pipe::conformance::check_data;
    use verl_pipe::stage::{BuildContext, DataConfig};

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
    fn a_file_that_is_none_of_its_format_is_told_by_a_check() {
        let dir = tempfile::tempdir().unwrap();
        let context = BuildContext {
            base: dir.path().to_owned(),
            ..BuildContext::default()
        };
        let told = |name: &str, content: &[u8]| {
            std::fs::write(dir.path().join(name), content).unwrap();
            let file = DataFile { path: name.into() };
            let checked = file.check(&context).err();
            // What a check lets through may still be refused when it is read; the other way round it lied.
            assert!(checked.is_none() || file.open(&context).is_err(), "{name}");
            checked
                .map(|faults| faults[0].reason.clone())
                .unwrap_or_default()
        };
        assert!(told("users.jsonl", b"root:x:0:0\n").contains("no JSON object: \"root:x:0:0\""));
        assert!(told("users", b"root:x:0:0\n").contains("no JSON object"));
        assert!(told("list.json", b"[1, 2]\n").contains("no JSON object"));
        assert!(told("rows.parquet", b"{\"a\": 1}\n").contains("Parquet"));
        assert!(told("none.jsonl", b"").contains("no row"));
        assert_eq!(
            told("sound.jsonl", "\u{feff}\n {\"a\": 1}\n".as_bytes()),
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
