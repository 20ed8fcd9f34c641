//! A file whose format is recognised by its name or content.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::data::{DataError, DataLoaderInterface, OpenedData};
use verl_words::stage::{BuildContext, ConfigError, DataConfig};

use super::jsonl::JsonlRows;
use super::parquet::ParquetRows;

/// A data file: Parquet if its name ends in `.parquet` or it begins like a Parquet file, otherwise JSON Lines or a JSON
/// list.
///
/// This is the kind of a data set that is declared by just a path: `train = "train.jsonl"`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// The file; relative to the folder of the pipeline file.
    pub path: PathBuf,
}

impl DataConfig for DataFile {
    const KIND: &'static str = "file";
    const SUMMARY: &'static str = "rows of a JSON Lines or Parquet file";

    fn check(&self, context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        super::check_format(&context.base, &self.path, by_name(&self.path))
    }

    fn open(&self, context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        open(&super::resolve(&context.base, &self.path))
    }

    fn open_start(&self, context: &BuildContext) -> Result<OpenedData, DataError> {
        let path = super::resolve(&context.base, &self.path);
        match is_parquet(&path)? {
            true => ParquetRows::open_start(&path),
            false => JsonlRows::open_start(&path),
        }
    }
}

/// Opens a data file.
///
/// # Errors
/// Those of [`JsonlRows::open`] and [`ParquetRows::open`].
pub fn open(path: &Path) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
    if is_parquet(path)? {
        Ok(Arc::new(ParquetRows::open(path)?))
    } else {
        Ok(Arc::new(JsonlRows::open(path)?))
    }
}

fn is_parquet(path: &Path) -> Result<bool, DataError> {
    if let Some(parquet) = by_name(path) {
        return Ok(parquet);
    }
    let start = super::read_mark(path).map_err(|error| DataError::Unreadable {
        path: path.display().to_string(),
        reason: error.to_string(),
    })?;
    Ok(start.starts_with(b"PAR1"))
}

/// Whether the name says that it is a Parquet file; `None` if the name does not decide it.
fn by_name(path: &Path) -> Option<bool> {
    let extension = path.extension().map(|e| e.to_ascii_lowercase());
    match extension.as_deref().and_then(|e| e.to_str()) {
        Some("parquet" | "pq") => Some(true),
        Some("jsonl" | "ndjson") => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::parquet::tests::write_example;

    #[test]
    fn formats_are_recognised_by_name_then_by_content() {
        let dir = tempfile::tempdir().unwrap();
        let lines = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "{\"text\": \"from lines\"}\n").unwrap();
            path
        };
        let table = |name: &str| {
            let path = dir.path().join(name);
            write_example(&path, ::parquet::basic::Compression::SNAPPY);
            path
        };
        for path in [lines("a.jsonl"), lines("b.json"), lines("c")] {
            assert_eq!(open(&path).unwrap().row(0).unwrap()["text"], "from lines");
        }
        for path in [table("a.parquet"), table("b.PQ"), table("d")] {
            assert_eq!(open(&path).unwrap().row(0).unwrap()["text"], "one");
        }
        let error = ParquetRows::open(&lines("e.parquet"))
            .unwrap_err()
            .to_string();
        assert!(open(&dir.path().join("e.parquet")).is_err());
        assert!(error.contains("e.parquet`: "), "{error}");
        assert!(open(&dir.path().join("missing")).is_err());
    }

    /// #11: a Git LFS pointer in place of the file, whatever its name.
    #[test]
    fn a_pointer_is_not_read_as_rows() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.jsonl", "a.parquet", "a"] {
            let path = dir.path().join(name);
            std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\n").unwrap();
            let error = open(&path).err().expect("no rows").to_string();
            assert!(
                error.contains(name) && error.contains("git lfs pull"),
                "{error}"
            );
            let context = BuildContext::default();
            let faults = DataFile { path }.check(&context).unwrap_err();
            assert!(faults[0].help.contains("git lfs pull"), "{faults:?}");
        }
    }
}
