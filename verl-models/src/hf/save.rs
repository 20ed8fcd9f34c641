//! A decoder out into a Hugging Face folder that other programs can load.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use safetensors::{Dtype, View};
use serde_json::{Map, Value};

use super::config::Origin;
use crate::decoder::{Decoder, DecoderConfig};
use crate::families;
use crate::model::ModelError;
use crate::parameters::visit_parameters;

/// Type of saved weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SaveDType {
    /// Lossless for what was trained.
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

/// Files that make a folder complete beside weights and config.json; copied as they are.
const COMPANIONS: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Writes weights, config.json (as loaded, with the new dtype) and the files beside them into `dir`.
///
/// Everything is written into a folder beside `dir` that is then renamed, so `dir` is either complete or not there.
///
/// # Errors
/// A folder that exists and is not empty; files that cannot be written.
pub fn save(decoder: &Decoder, dir: &Path, dtype: SaveDType) -> Result<(), ModelError> {
    let origin = decoder.origin.as_deref();
    let config = config_of(origin, &decoder.config, dtype);
    write(decoder, config, origin, dir, dtype)
}

/// [`save`] for any module whose parameters are named as in checkpoints, with this config.json.
///
/// # Errors
/// As [`save`].
pub(crate) fn write<M: Module>(
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
        // The error is what matters; what cannot be removed is left under its temporary name.
        let _ = fs::remove_dir_all(&staged);
    }
    written
}

/// The config.json of a decoder: as it was loaded with the dtype replaced, else a new one.
pub(crate) fn config_of(
    origin: Option<&Origin>,
    config: &DecoderConfig,
    dtype: SaveDType,
) -> Map<String, Value> {
    match origin {
        Some(origin) => with_dtype(origin.config.clone(), dtype),
        None => families::config_json(config, dtype),
    }
}

fn staged_path(dir: &Path) -> Result<PathBuf, ModelError> {
    let name = dir
        .file_name()
        .ok_or_else(|| failed("write", dir, "it is no name of a folder"))?;
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
    // Left over from a run that was killed while it wrote.
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
    // `transformers` refuses files that do not say whose layout they have.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(tensors, Some(metadata), path)
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

/// The object with its dtype replaced in the spelling that it uses; `torch_dtype`, which every version reads, if none.
fn with_dtype(mut config: Map<String, Value>, dtype: SaveDType) -> Map<String, Value> {
    let spellings = ["dtype", "torch_dtype"];
    let used: Vec<&str> = spellings
        .into_iter()
        .filter(|spelling| config.contains_key(*spelling))
        .collect();
    let used = if used.is_empty() {
        vec!["torch_dtype"]
    } else {
        used
    };
    for spelling in used {
        config.insert(spelling.to_string(), dtype.name().into());
    }
    config
}

fn copy_companions(from: &Path, to: &Path) -> Result<(), ModelError> {
    for name in COMPANIONS {
        let source = from.join(name);
        if source.exists() {
            fs::copy(&source, to.join(name)).map_err(|error| failed("read", &source, error))?;
        }
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
