//! Saves a decoder as a Hugging Face folder that other programs can load.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use safetensors::{Dtype, View};
use serde_json::{Map, Value};
use verl_text::{files, tokenizer};

use super::config::Origin;
use crate::decoder::{Decoder, DecoderConfig};
use crate::error::ModelError;
use crate::families;
use crate::parameters::visit_parameters;

/// Type of saved weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SaveDType {
    /// Lossless.
    #[default]
    F32,
    /// Half the size, 8 bits of precision.
    BF16,
}

impl SaveDType {
    /// Its name in config.json.
    pub fn name(self) -> &'static str {
        match self {
            SaveDType::F32 => "float32",
            SaveDType::BF16 => "bfloat16",
        }
    }

    fn burn(self) -> DType {
        match self {
            SaveDType::F32 => DType::F32,
            SaveDType::BF16 => DType::BF16,
        }
    }

    fn stored(self) -> Dtype {
        match self {
            SaveDType::F32 => Dtype::F32,
            SaveDType::BF16 => Dtype::BF16,
        }
    }
}

/// Writes weights, config.json (as loaded, with the new dtype) and the companion files to `dir`.
///
/// Everything is written to a temporary folder next to `dir`, which is then renamed, so `dir` is either complete or
/// does not exist.
///
/// # Errors
/// The folder exists and is not empty, or files cannot be written.
pub fn save(decoder: &Decoder, dir: &Path, dtype: SaveDType) -> Result<(), ModelError> {
    let origin = decoder.origin.as_deref();
    let config = config_of(origin, &decoder.config, dtype);
    write(decoder, config, origin, dir, dtype)
}

/// [`save`] for any module whose parameters are named as in checkpoints, with the given config.json.
///
/// # Errors
/// As [`save`].
pub fn write<M: Module>(
    module: &M,
    config: Map<String, Value>,
    origin: Option<&Origin>,
    dir: &Path,
    dtype: SaveDType,
) -> Result<(), ModelError> {
    if fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(failed("write", dir, "it exists and is not empty"));
    }
    let staged = staged_path(dir)?;
    let written = write_folder(module, config, origin, &staged, dtype)
        .and_then(|()| fs::rename(&staged, dir).map_err(|error| failed("write", dir, error)));
    if written.is_err() {
        // Only the first error matters; a folder that cannot be removed keeps its temporary name.
        let _ = fs::remove_dir_all(&staged);
    }
    written
}

/// The config.json of a decoder: the loaded one with the dtype and `tie_word_embeddings` corrected, or a new one.
pub fn config_of(
    origin: Option<&Origin>,
    config: &DecoderConfig,
    dtype: SaveDType,
) -> Map<String, Value> {
    match origin {
        Some(origin) => with_head(with_dtype(origin.config.clone(), dtype), config.tied_head),
        None => families::config_json(config, dtype),
    }
}

fn staged_path(dir: &Path) -> Result<PathBuf, ModelError> {
    let name = dir
        .file_name()
        .ok_or_else(|| failed("write", dir, "it is not a folder name"))?;
    let mut staged = OsString::from(".");
    staged.push(name);
    staged.push(format!(".partial-{}", std::process::id()));
    Ok(dir.with_file_name(staged))
}

fn write_folder<M: Module>(
    module: &M,
    config: Map<String, Value>,
    origin: Option<&Origin>,
    dir: &Path,
    dtype: SaveDType,
) -> Result<(), ModelError> {
    // Left by a run that was killed while writing.
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(|error| failed("write", dir, error))?;
    }
    fs::create_dir_all(dir).map_err(|error| failed("write", dir, error))?;
    write_weights(module, &dir.join("model.safetensors"), dtype)?;
    write_config(config, &dir.join("config.json"))?;
    if let Some(origin) = origin {
        copy_companions(&origin.dir, dir)?;
    }
    Ok(())
}

fn write_weights<M: Module>(module: &M, path: &Path, dtype: SaveDType) -> Result<(), ModelError> {
    let mut tensors = Vec::new();
    visit_parameters(module, |name, shape, read| {
        let saved = SavedTensor {
            dtype: dtype.stored(),
            shape: shape.to_vec(),
            data: read().convert_dtype(dtype.burn()),
        };
        tensors.push((name.to_string(), saved));
    });
    // `transformers` refuses files that do not declare their format.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    files::write_safetensors(tensors, metadata, path)
        .map_err(|error| failed("write", path, error))?;
    sync(path)
}

struct SavedTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: TensorData,
}

impl View for SavedTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.data.as_bytes().into()
    }

    fn data_len(&self) -> usize {
        self.data.as_bytes().len()
    }
}

fn write_config(config: Map<String, Value>, path: &Path) -> Result<(), ModelError> {
    let text = serde_json::to_string_pretty(&Value::Object(config))
        .map_err(|error| failed("write", path, error))?;
    fs::write(path, text + "\n").map_err(|error| failed("write", path, error))?;
    sync(path)
}

/// The object with its dtype replaced under the name that it uses; under `torch_dtype`, which every version reads, if
/// it has none.
fn with_dtype(mut config: Map<String, Value>, dtype: SaveDType) -> Map<String, Value> {
    let names = ["dtype", "torch_dtype"];
    let used: Vec<&str> = names
        .into_iter()
        .filter(|name| config.contains_key(*name))
        .collect();
    let used = if used.is_empty() {
        vec!["torch_dtype"]
    } else {
        used
    };
    for name in used {
        config.insert(name.to_string(), dtype.name().into());
    }
    config
}

/// The object with `tie_word_embeddings` corrected where it is wrong.
fn with_head(mut config: Map<String, Value>, tied: bool) -> Map<String, Value> {
    const NAME: &str = "tie_word_embeddings";
    if config.get(NAME).and_then(Value::as_bool).unwrap_or(false) != tied {
        config.insert(NAME.to_string(), tied.into());
    }
    config
}

/// Bytes of the companion files that a model saved from folder `dir` gets besides its weights.
pub fn companion_bytes(dir: &Path) -> u64 {
    let fixed = tokenizer::FILES.iter().map(|name| (*name).to_owned());
    let files = fixed.chain(tokenizer::templates(dir));
    let files = files.chain(["config.json".to_owned()]);
    let sizes = files.filter_map(|name| fs::metadata(dir.join(name)).ok());
    sizes.map(|file| file.len()).sum()
}

/// Copies the companion files: those that a complete folder has besides weights and config.json.
fn copy_companions(from: &Path, to: &Path) -> Result<(), ModelError> {
    let fixed = tokenizer::FILES.iter().map(|name| (*name).to_owned());
    for name in fixed.chain(tokenizer::templates(from)) {
        let (source, target) = (from.join(&name), to.join(&name));
        if !source.exists() || files::stand_in_at(&source).is_some() {
            continue;
        }
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(|error| failed("write", parent, error))?;
        }
        files::copy_content(&source, &target).map_err(|error| failed("read", &source, error))?;
    }
    Ok(())
}

fn sync(path: &Path) -> Result<(), ModelError> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|error| failed("write", path, error))
}

fn failed(action: &'static str, path: &Path, reason: impl ToString) -> ModelError {
    ModelError::File {
        action,
        path: path.display().to_string(),
        reason: reason.to_string(),
    }
}
