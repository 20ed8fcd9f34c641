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
