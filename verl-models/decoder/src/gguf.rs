//! Converts GGUF files to Hugging Face folders: dequantises and renames the weights, and rebuilds configuration and
//! tokenizer from the metadata.
//!
//! Supports the architectures `llama` (Llama, SmolLM2, Mistral-like), `qwen2` and `qwen3`, and every tensor type that
//! `candle_core::quantized` reads (F32, F16, BF16, Q4_0 to Q8_1, the K-quants). llama.cpp stores the query and key rows
//! of `llama` in a different order than the checkpoints (rotary pairs as neighbours instead of halves); the import
//! restores the checkpoint order.

mod alignment;
mod config;
mod rope;
mod tokenizer;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_text::chat_template::{ChatTemplate, ChatTemplateError};
use verl_text::files;
use verl_text::tokenizer::{Tokenizer, TokenizerError};

use crate::families;
use crate::hf::LoadError;
use crate::hf::config::Settings;

/// Errors of importing a GGUF file; a failed import leaves no files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// A file that is missing, truncated or not GGUF.
    #[error("cannot read `{path}`: {reason}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Metadata that is missing or has an unexpected type.
    #[error("metadata `{key}` {reason}")]
    Metadata {
        /// Its key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// A feature that the import does not support.
    #[error("{what} `{found}` is not supported; supported: {known}")]
    Unsupported {
        /// Architecture, pre-tokenizer, rope scaling.
        what: &'static str,
        /// What the file has.
        found: String,
        /// What is supported.
        known: String,
    },
    /// Tensors that the model does not have.
    #[error("the file contains tensors that `{architecture}` does not have: {names}")]
    UnknownTensors {
        /// Architecture of the file.
        architecture: String,
        /// Their names.
        names: String,
    },
    /// Tensors that the model needs and the file lacks.
    #[error("the file lacks tensors of `{architecture}`: {names}")]
    MissingTensors {
        /// Architecture of the file.
        architecture: String,
        /// Their names.
        names: String,
    },
    /// A tensor whose shape does not agree with the metadata.
    #[error("tensor `{name}` has shape {found:?}, but the metadata require {wanted:?}")]
    Shape {
        /// The tensor's name in the file.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that follows from the metadata.
        wanted: Vec<usize>,
    },
    /// A value that is not finite or that the requested type cannot represent.
    #[error("tensor `{name}` contains {value} at index {index}, which {dtype} cannot represent")]
    Value {
        /// The tensor's name in the file.
        name: String,
        /// The value.
        value: f32,
        /// Its position.
        index: usize,
        /// The requested type.
        dtype: WeightType,
    },
    /// A folder that already exists.
    #[error("`{folder}` already exists; an import never overwrites a folder")]
    Exists {
        /// The folder.
        folder: String,
    },
    /// A folder that cannot be written.
    #[error("cannot write `{path}`: {reason}")]
    Write {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Metadata from which no loadable config.json can be made.
    #[error("the metadata describe a model that does not load: {0}")]
    Config(#[from] LoadError),
    /// The rebuilt tokenizer does not load.
    #[error("the rebuilt tokenizer does not load: {0}")]
    Tokenizer(#[from] TokenizerError),
}

/// Number format of imported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightType {
    /// bfloat16: 8 bits of mantissa, the range of f32.
    #[default]
    Bf16,
    /// IEEE half precision: 11 bits of mantissa, up to 65504.
    F16,
    /// Single precision.
    F32,
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightType::Bf16 => "bf16",
            WeightType::F16 => "f16",
            WeightType::F32 => "f32",
        })
    }
}

/// What an import wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// The folder.
    pub folder: PathBuf,
    /// `model_type` of the configuration.
    pub model_type: String,
    /// Tensors written.
    pub num_tensors: usize,
    /// Numbers in them.
    pub num_parameters: u64,
    /// Tensors of each type in the file, for example `Q4_1: 210`.
    pub stored_types: BTreeMap<String, usize>,
    /// Format of the written weights.
    pub weight_type: WeightType,
    /// Size of the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Ids that end a sequence.
    pub eos_ids: Vec<u32>,
    /// The chat template: `None` if the file has none, otherwise whether it compiles.
    pub chat_template: Option<Result<(), String>>,
}

impl fmt::Display for ImportReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types: Vec<String> = self
            .stored_types
            .iter()
            .map(|(dtype, count)| format!("{count} {dtype}"))
            .collect();
        writeln!(f, "{}: {}", self.folder.display(), self.model_type)?;
        writeln!(
            f,
            "  weights    {} tensors, {} parameters in {} (stored as {})",
            self.num_tensors,
            self.num_parameters,
            self.weight_type,
            types.join(", ")
        )?;
        writeln!(
            f,
            "  tokenizer  {} tokens, end of sequence {:?}",
            self.vocab_size, self.eos_ids
        )?;
        match &self.chat_template {
            None => write!(f, "  template   none in the file"),
            Some(Ok(())) => write!(f, "  template   in tokenizer_config.json"),
            Some(Err(reason)) => write!(f, "  template   does not compile: {reason}"),
        }
    }
}

/// Writes the model in `file` as a Hugging Face folder: `config.json`, `generation_config.json`,
/// `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`.
///
/// The folder is written under a temporary name, its tokenizer is loaded once as a check, and it is renamed. Meanwhile
/// the weights stay in memory in their output format.
///
/// # Errors
/// [`GgufError`]; `folder` exists only after success.
pub fn import(
    file: &Path,
    folder: &Path,
    weight_type: WeightType,
) -> Result<ImportReport, GgufError> {
    let read_error = |reason: String| GgufError::Read {
        path: file.display().to_string(),
        reason,
    };
    if folder.exists() {
        return Err(GgufError::Exists {
            folder: folder.display().to_string(),
        });
    }
    if let Some(reason) = files::stand_in_at(file) {
        return Err(read_error(reason.to_owned()));
    }
    let mut reader = BufReader::new(File::open(file).map_err(|e| read_error(e.to_string()))?);
    if alignment::is_zero(&mut reader) {
        return Err(GgufError::Metadata {
            key: "general.alignment".to_owned(),
            reason: "is 0, but tensors start at multiples of it; the file is damaged".to_owned(),
        });
    }
    reader.rewind().map_err(|e| read_error(e.to_string()))?;
    let content = Content::read(&mut reader).map_err(|e| read_error(e.to_string()))?;
    let metadata = Metadata(&content);
    let model = config::read(&metadata)?;
    let files = tokenizer::files(&metadata)?;
    let rope_factors = weights::rope_factors(&content, &mut reader, file, &model)?;
    let tensors = weights::read(&content, &mut reader, file, &model, weight_type)?;
    let config = config::to_json(&model, &files.special, weight_type, rope_factors.as_deref())?;
    families::decoder_config(&Settings {
        path: "config.json".into(),
        map: &config,
    })?;
    let mut stored_types = BTreeMap::new();
    for info in content.tensor_infos.values() {
        *stored_types
            .entry(format!("{:?}", info.ggml_dtype))
            .or_insert(0) += 1;
    }

    let staged = staged_name(folder);
    let written = (|| {
        let write_error = |path: &Path, e: String| GgufError::Write {
            path: path.display().to_string(),
            reason: e,
        };
        std::fs::create_dir_all(&staged).map_err(|e| write_error(&staged, e.to_string()))?;
        for (name, value) in [
            ("config.json", Value::Object(config)),
            ("generation_config.json", files.generation.clone()),
            ("tokenizer_config.json", files.tokenizer_config.clone()),
            ("tokenizer.json", files.tokenizer.clone()),
        ] {
            let path = staged.join(name);
            std::fs::write(&path, format!("{value:#}\n"))
                .map_err(|e| write_error(&path, e.to_string()))?;
        }
        let path = staged.join("model.safetensors");
        weights::write(&tensors, &path).map_err(|reason| write_error(&path, reason))?;
        let tokenizer = Tokenizer::load(&staged)?;
        if tokenizer.vocab_size() > model.vocab_size {
            return Err(GgufError::Metadata {
                key: "tokenizer.ggml.tokens".to_owned(),
                reason: format!(
                    "has {} tokens, but the embedding has {} rows",
                    tokenizer.vocab_size(),
                    model.vocab_size
                ),
            });
        }
        let chat_template = match ChatTemplate::load(&staged) {
            Ok(_) => Some(Ok(())),
            Err(ChatTemplateError::Missing { .. }) => None,
            Err(e) => Some(Err(e.to_string())),
        };
        std::fs::rename(&staged, folder).map_err(|e| write_error(folder, e.to_string()))?;
        Ok(ImportReport {
            folder: folder.to_owned(),
            model_type: model.architecture.clone(),
            num_tensors: tensors.len(),
            num_parameters: tensors.iter().map(weights::Tensor::num_elements).sum(),
            stored_types,
            weight_type,
            vocab_size: tokenizer.vocab_size(),
            eos_ids: tokenizer.eos_ids().to_vec(),
            chat_template,
        })
    })();
    if written.is_err()
        && let Err(e) = std::fs::remove_dir_all(&staged)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(folder = %staged.display(), error = %e, "cannot remove the unfinished import");
    }
    written
}

/// A temporary name next to `folder`, on the same file system.
fn staged_name(folder: &Path) -> PathBuf {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    folder.with_file_name(format!(".{name}.unfinished-{}", std::process::id()))
}

/// Typed access to the metadata of a GGUF file.
struct Metadata<'a>(&'a Content);

impl Metadata<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        self.0.metadata.get(key)
    }

    fn wrong(key: &str, value: &GgufValue, wanted: &str) -> GgufError {
        GgufError::Metadata {
            key: key.to_owned(),
            reason: format!("is a {:?}, not {wanted}", value.value_type()),
        }
    }

    fn missing(key: &str) -> GgufError {
        GgufError::Metadata {
            key: key.to_owned(),
            reason: "is missing".to_owned(),
        }
    }

    fn zero(key: &str) -> GgufError {
        GgufError::Metadata {
            key: key.to_owned(),
            reason: "is 0".to_owned(),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::String(text)) => Ok(Some(text)),
            Some(other) => Err(Self::wrong(key, other, "a string")),
        }
    }

    fn count(&self, key: &str) -> Result<Option<usize>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        integer(value)
            .and_then(|n| usize::try_from(n).ok())
            .map(Some)
            .ok_or_else(|| Self::wrong(key, value, "a count"))
    }

    /// A count of at most `largest`, from which memory is allocated.
    fn size(&self, key: &str, largest: usize) -> Result<Option<usize>, GgufError> {
        let size = self.count(key)?;
        if let Some(size) = size {
            refuse_above(key, size, largest)?;
        }
        Ok(size)
    }

    fn needed_size(&self, key: &str, largest: usize) -> Result<usize, GgufError> {
        match self.size(key, largest)? {
            None => Err(Self::missing(key)),
            Some(0) => Err(Self::zero(key)),
            Some(size) => Ok(size),
        }
    }

    /// A token id; as in llama.cpp, −1 means none, also as an unsigned 32-bit number.
    fn token_id(&self, key: &str) -> Result<Option<u32>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value) {
            Some(id) if id < 0 || id == i128::from(u32::MAX) => Ok(None),
            id => id
                .and_then(|id| u32::try_from(id).ok())
                .map(Some)
                .ok_or_else(|| Self::wrong(key, value, "a token id")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(Self::wrong(key, other, "a flag")),
        }
    }

    /// A float; f32 values become their shortest decimal (`1e-5`, not `9.999999747e-6`).
    fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::F32(x)) if x.is_finite() => Ok(Some(shortest(*x))),
            Some(GgufValue::F64(x)) if x.is_finite() => Ok(Some(*x)),
            Some(other) => Err(Self::wrong(key, other, "a finite float")),
        }
    }

    fn list<T>(
        &self,
        key: &str,
        item: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(items)) => items
                .iter()
                .map(|value| {
                    item(value)
                        .ok_or_else(|| Self::wrong(key, value, "the element type of the list"))
                })
                .collect::<Result<Vec<T>, _>>()
                .map(Some),
            Some(other) => Err(Self::wrong(key, other, "a list")),
        }
    }
}

/// Refuses a size that no model has.
fn refuse_above(key: &str, size: usize, largest: usize) -> Result<(), GgufError> {
    if size <= largest {
        return Ok(());
    }
    Err(GgufError::Metadata {
        key: key.to_owned(),
        reason: format!(
            "is {size}, but the limit is {largest}: no model is that large, so the file is probably damaged"
        ),
    })
}

fn integer(value: &GgufValue) -> Option<i128> {
    match *value {
        GgufValue::U8(n) => Some(n.into()),
        GgufValue::I8(n) => Some(n.into()),
        GgufValue::U16(n) => Some(n.into()),
        GgufValue::I16(n) => Some(n.into()),
        GgufValue::U32(n) => Some(n.into()),
        GgufValue::I32(n) => Some(n.into()),
        GgufValue::U64(n) => Some(n.into()),
        GgufValue::I64(n) => Some(n.into()),
        _ => None,
    }
}

fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// An object of the entries that have a value.
fn object<const N: usize>(entries: [(&str, Option<Value>); N]) -> Map<String, Value> {
    entries
        .into_iter()
        .filter_map(|(key, value)| Some((key.to_owned(), value?)))
        .collect()
}

#[cfg(test)]
mod tests;
