//! Data sets: files of rows, and generators of prompts.
//!
//! | kind | what |
//! |---|---|
//! | [`mod@file`] | a file, its format told by name or content |
//! | [`jsonl`] | JSON Lines |
//! | [`parquet`] | Parquet |
//! | [`addition`] | sums of two numbers, in three disjoint splits |

pub mod addition;
pub mod file;
pub mod jsonl;
pub mod parquet;

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use verl_pipe::data::DataError;

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
        row: index + 1,
        reason: format!("the data set has only {len} rows"),
    }
}
