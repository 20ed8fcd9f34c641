//! Why a folder cannot be loaded.

use std::path::{Path, PathBuf};

use super::report::LoadReport;
use crate::error::ModelError;

/// Why a folder cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The folder does not exist or is a file.
    #[error("model folder `{}` {reason}", dir.display())]
    Folder {
        /// The folder.
        dir: PathBuf,
        /// Why: it does not exist or is a file.
        reason: &'static str,
    },
    /// A folder without a config.json, but with weights in some form.
    #[error("model folder `{}` has no config.json: {found}", dir.display())]
    NoConfig {
        /// The folder.
        dir: PathBuf,
        /// What it contains, and what to do.
        found: String,
    },
    /// The folder of an adapter.
    #[error(
        "model folder `{}` contains an adapter ({kind}) of {base}; merge it into that model first \
         (`merge_and_unload` of PEFT, then `save_pretrained`), and use the merged folder",
        dir.display()
    )]
    Adapter {
        /// The folder.
        dir: PathBuf,
        /// The kind of adapter, such as LORA.
        kind: String,
        /// The model that it changes.
        base: String,
    },
    /// A weight that is not a finite number.
    #[error("`{}`: weight `{name}` contains {value} at position {index}", path.display())]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The value.
        value: f32,
        /// Its position in the tensor.
        index: usize,
    },
    /// A folder without readable weights.
    #[error("model folder `{}` has no model.safetensors and no model.safetensors.index.json: {found}", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// What it contains instead, and what to do.
        found: String,
    },
    /// A file that cannot be opened or is damaged.
    #[error("cannot read `{}`: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A setting of config.json that is missing or invalid.
    #[error("`{}`: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Which setting, and what is wrong.
        reason: String,
    },
    /// A family that is not supported.
    #[error("`{}`: model_type `{found}` is not supported; supported: {}", path.display(), known.join(", "))]
    Family {
        /// The file.
        path: PathBuf,
        /// The model type there.
        found: String,
        /// Model types that are supported.
        known: Vec<&'static str>,
    },
    /// Weights that do not match the model.
    #[error("weights in `{}` do not match the model:\n{report}", dir.display())]
    Weights {
        /// The folder.
        dir: PathBuf,
        /// Everything that was found.
        report: Box<LoadReport>,
    },
    /// A model folder without a value head, where a new head is not allowed.
    #[error(
        "model folder `{}` has no value head (`score.weight`): a critic can start with a new one, but a reward model \
         must be trained first",
        dir.display()
    )]
    NoHead {
        /// The folder.
        dir: PathBuf,
    },
    /// A tokenizer with more ids than the embedding has rows.
    #[error(
        "the tokenizer has {tokens} ids, but the embedding has {rows} rows: ids from {rows} on have no embedding"
    )]
    Vocabulary {
        /// Ids of the tokenizer.
        tokens: usize,
        /// Rows of the embedding.
        rows: usize,
    },
}

impl LoadError {
    pub(crate) fn file(path: &Path, reason: impl ToString) -> Self {
        LoadError::File {
            path: path.to_path_buf(),
            reason: reason.to_string(),
        }
    }
}

impl From<LoadError> for ModelError {
    fn from(error: LoadError) -> Self {
        ModelError::Load(error.to_string())
    }
}
