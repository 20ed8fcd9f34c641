//! Loads safetensors into a module: a single file or shards, memory-mapped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use verl_text::files;

use super::config::read_object;
use super::report::{LoadReport, Mismatch, Unmatched};
use super::{LoadError, head};
use crate::parameters::{fill_parameters, named_parameters};

/// Fills a module with the weights of a folder, converted to `dtype`, and reports the outcome for each tensor.
///
/// Works for any module whose parameters' paths are the file's names, with or without the prefix `model.`.
///
/// # Errors
/// Files that are missing or damaged; weights that do not match, in which case nothing is filled and the error contains
/// the complete report; weights that are not finite, because nothing computed from them would be finite.
pub fn load<M: Module>(module: M, dir: &Path, dtype: DType) -> Result<(M, LoadReport), LoadError> {
    let checkpoint = Checkpoint::open(dir)?;
    let report = complete(&module, dir, &checkpoint)?;
    if !report.unused.is_empty() {
        tracing::warn!(dir = %dir.display(), "weights outside the decoder are not used:\n{report}");
    }
    let mut non_finite = None;
    let module = fill_parameters(module, dtype, |name, _| {
        let data = checkpoint.find(name)?.values()?;
        if non_finite.is_none() {
            non_finite = checkpoint.non_finite(name, &data);
        }
        Some(data)
    });
    match non_finite {
        Some(error) => Err(error),
        None => Ok((module, report)),
    }
}

/// Reports what the outcome for each tensor would be if the weights of a folder filled this module; reads only the
/// headers of the files.
///
/// # Errors
/// As [`load`].
pub fn check<M: Module>(module: &M, dir: &Path) -> Result<LoadReport, LoadError> {
    complete(module, dir, &Checkpoint::open(dir)?)
}

/// The report, or an error if the weights do not match.
fn complete<M: Module>(
    module: &M,
    dir: &Path,
    checkpoint: &Checkpoint,
) -> Result<LoadReport, LoadError> {
    let report = compare(&named_parameters(module), checkpoint);
    if report.is_complete() {
        return Ok(report);
    }
    Err(LoadError::Weights {
        dir: dir.to_path_buf(),
        report: Box::new(report),
    })
}

/// The tensors of a folder, by name. They are read only on request.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<(PathBuf, Mmap)>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: std::ops::Range<usize>,
}

/// A tensor of a [`Checkpoint`].
#[derive(Debug, Clone, Copy)]
pub struct StoredTensor<'a> {
    /// Type in the file.
    pub dtype: Dtype,
    /// Shape in the file.
    pub shape: &'a [usize],
    /// Values in the file, little-endian.
    pub bytes: &'a [u8],
}

impl Checkpoint {
    /// Maps the safetensors of a folder. If its config.json ties the head and the file has only the head, the head is
    /// used as the embedding.
    ///
    /// # Errors
    /// The folder or its safetensors do not exist, shards are missing, or files are damaged.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let mut checkpoint = Checkpoint {
            shards: Vec::new(),
            entries: BTreeMap::new(),
        };
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if single.exists() {
            checkpoint.add(&single, |_| true)?;
        } else if index.exists() {
            checkpoint.add_shards(dir, &index)?;
        } else {
            return Err(no_weights(dir));
        }
        if checkpoint.find(head::EMBEDDING).is_none()
            && checkpoint.entries.contains_key(head::HEAD)
            && head::is_tied_by_config(dir)?
            && let Some(entry) = checkpoint.entries.remove(head::HEAD)
        {
            checkpoint.entries.insert(head::EMBEDDING.to_owned(), entry);
        }
        Ok(checkpoint)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The tensor named `name`, with or without the prefix `model.`.
    pub fn find(&self, name: &str) -> Option<StoredTensor<'_>> {
        self.stored_name(name)
            .map(|stored| self.tensor(&self.entries[stored]))
    }

    fn stored_name(&self, name: &str) -> Option<&str> {
        let bare = name.strip_prefix("model.").unwrap_or(name);
        let entry = self.entries.get_key_value(name);
        let entry = entry.or_else(|| self.entries.get_key_value(bare));
        entry.map(|(stored, _)| stored.as_str())
    }

    fn tensor<'a>(&'a self, entry: &'a Entry) -> StoredTensor<'a> {
        StoredTensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.shards[entry.shard].1[entry.bytes.clone()],
        }
    }

    /// An error for the first value of a tensor that is not finite.
    fn non_finite(&self, name: &str, data: &TensorData) -> Option<LoadError> {
        const PIECE: usize = 4096;
        let values = data.as_slice::<f32>().ok()?;
        // Check complete pieces first: a search that may stop at any value is many times slower.
        let is_finite = |piece: &&[f32]| piece.iter().fold(true, |all, v| all & v.is_finite());
        let piece = values.chunks(PIECE).position(|piece| !is_finite(&piece))?;
        let start = piece * PIECE;
        let at = start
            + values[start..]
                .iter()
                .position(|value| !value.is_finite())?;
        let stored = self.stored_name(name)?;
        Some(LoadError::NonFinite {
            path: self.shards[self.entries[stored].shard].0.clone(),
            name: stored.to_owned(),
            value: values[at],
            index: at,
        })
    }

    fn add_shards(&mut self, dir: &Path, index: &Path) -> Result<(), LoadError> {
        let by_shard = tensors_of_shards(index)?;
        let absent: Vec<&str> = by_shard
            .keys()
            .filter(|shard| !dir.join(shard).exists())
            .map(String::as_str)
            .collect();
        if !absent.is_empty() {
            let reason = format!("it lists missing files: {}", absent.join(", "));
            return Err(LoadError::file(index, reason));
        }
        for (shard, names) in &by_shard {
            let path = dir.join(shard);
            self.add(&path, |name| names.iter().any(|n| n == name))?;
            if let Some(lost) = names.iter().find(|name| !self.entries.contains_key(*name)) {
                let reason = format!("it lacks `{lost}`, which the index places there");
                return Err(LoadError::file(&path, reason));
            }
        }
        Ok(())
    }

    fn add(&mut self, path: &Path, wanted: impl Fn(&str) -> bool) -> Result<(), LoadError> {
        let file = File::open(path).map_err(|error| LoadError::file(path, error))?;
        #[expect(
            unsafe_code,
            reason = "a read-only map, validated below; as with every memory-mapped file, another process that \
                      shortens it while it is mapped would end this one"
        )]
        // SAFETY: the map is only read, and lives as long as the slices taken from it.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| LoadError::file(path, error))?;
        if let Some(reason) = files::stand_in(&map) {
            return Err(LoadError::file(path, reason));
        }
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| LoadError::file(path, damage(&error, map.len())))?;
        // The file starts with the header's length in 8 bytes, then the header, then the data.
        let base = header + 8;
        for (name, info) in metadata.tensors() {
            if wanted(&name) {
                let (from, to) = info.data_offsets;
                let entry = Entry {
                    shard: self.shards.len(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    bytes: base + from..base + to,
                };
                self.entries.insert(name, entry);
            }
        }
        self.shards.push((path.to_path_buf(), map));
        Ok(())
    }
}

impl StoredTensor<'_> {
    /// Values in f32, or `None` for a type that cannot be converted.
    pub fn values(&self) -> Option<TensorData> {
        let values = self.piece(0..self.shape.iter().product())?;
        Some(TensorData::new(values, self.shape.to_vec()))
    }

    /// The values with these indices into the flattened tensor.
    pub(super) fn piece(&self, range: std::ops::Range<usize>) -> Option<Vec<f32>> {
        let width = self.dtype.bitsize() / 8;
        let bytes = &self.bytes[range.start * width..range.end * width];
        Some(match self.dtype {
            Dtype::F32 => numbers(bytes, f32::from_le_bytes),
            Dtype::BF16 => numbers(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Dtype::F16 => numbers(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
            _ => return None,
        })
    }
}

fn numbers<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|chunk| number(*chunk)).collect()
}

/// Types of weights that can be converted to f32.
const CONVERTIBLE: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

fn compare(parameters: &[(String, Vec<usize>)], checkpoint: &Checkpoint) -> LoadReport {
    let mut report = LoadReport::default();
    let mut used: Vec<&str> = Vec::new();
    for (name, shape) in parameters {
        let Some(stored) = checkpoint.stored_name(name) else {
            report.missing.push(unmatched(name));
            continue;
        };
        used.push(stored);
        match mismatch(&checkpoint.tensor(&checkpoint.entries[stored]), shape) {
            Some(reason) => report.mismatched.push(Mismatch {
                name: stored.to_string(),
                reason,
            }),
            None => report.applied.push(name.clone()),
        }
    }
    used.sort_unstable();
    for name in checkpoint.names() {
        if used.binary_search(&name).is_ok() {
        } else if is_redundant(name) {
            report.ignored.push(name.to_string());
        } else {
            report.unused.push(unmatched(name));
        }
    }
    report.suggest();
    report
}

fn unmatched(name: &str) -> Unmatched {
    Unmatched {
        name: name.to_string(),
        nearest: None,
    }
}

fn mismatch(tensor: &StoredTensor<'_>, shape: &[usize]) -> Option<String> {
    if tensor.shape != shape {
        let stored = tensor.shape;
        return Some(format!(
            "the file has {stored:?}, the model needs {shape:?}"
        ));
    }
    let convertible = CONVERTIBLE.contains(&tensor.dtype);
    (!convertible).then(|| {
        let dtype = tensor.dtype;
        format!("the file has {dtype:?} numbers; F32, BF16 and F16 can be read")
    })
}

/// Whether an unused tensor is redundant: rotary frequencies, which old checkpoints store but the config determines,
/// and the head of a tied model, which is its embedding.
fn is_redundant(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight"
}

fn tensors_of_shards(index: &Path) -> Result<BTreeMap<String, Vec<String>>, LoadError> {
    let object = read_object(index)?;
    let map = object.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| LoadError::file(index, "it has no `weight_map`"))?;
    let mut by_shard: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, shard) in map {
        match shard.as_str() {
            // Only files next to the index: a downloaded file must not point elsewhere.
            Some(shard) if PathBuf::from(shard).file_name() == Some(shard.as_ref()) => {
                by_shard
                    .entry(shard.to_string())
                    .or_default()
                    .push(name.clone());
            }
            _ => {
                let reason =
                    format!("`weight_map` places `{name}` in {shard}, which is not a file name");
                return Err(LoadError::file(index, reason));
            }
        }
    }
    Ok(by_shard)
}

fn damage(error: &SafeTensorError, length: usize) -> String {
    match error {
        SafeTensorError::MetadataIncompleteBuffer => format!(
            "its size of {length} bytes does not match its header: truncated, or still being written"
        ),
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            format!("it ends within its header after {length} bytes: truncated, or not safetensors")
        }
        other => format!("damaged safetensors: {other}"),
    }
}

fn no_weights(dir: &Path) -> LoadError {
    if !dir.is_dir() {
        return LoadError::Folder {
            dir: dir.to_path_buf(),
            reason: "does not exist",
        };
    }
    let found = other_weights(dir).or_else(|| {
        let names = names_in(dir);
        let name = names.iter().find(|name| name.ends_with(".safetensors"))?;
        Some(format!(
            "`{name}` is neither; its index is missing, or it was renamed"
        ))
    });
    LoadError::NoWeights {
        dir: dir.to_path_buf(),
        found: found.unwrap_or_else(|| "it contains no weights".to_string()),
    }
}

/// Names in a folder, sorted.
fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Describes weights of a folder in an unsupported format, and what to do about them.
pub(super) fn other_weights(dir: &Path) -> Option<String> {
    let names = names_in(dir);
    let starting = |prefix: &str| names.iter().find(|name| name.starts_with(prefix));
    let ending = |suffixes: &[&str]| {
        let ends = |name: &&String| suffixes.iter().any(|suffix| name.ends_with(suffix));
        names.iter().find(ends)
    };
    if let Some(name) = starting("consolidated.") {
        Some(format!(
            "`{name}` is in the format of the model's authors, not of Hugging Face; convert it, or download the folder with \
             config.json and model.safetensors"
        ))
    } else if let Some(name) = starting("adapter_model.") {
        Some(format!(
            "`{name}` is an adapter; merge it into its base model first"
        ))
    } else if let Some(name) = ending(&[".gguf"]) {
        Some(format!(
            "`{name}` must be imported first (`pipe import gguf`)"
        ))
    } else if let Some(name) = ending(&[".bin", ".pt", ".pth", ".ckpt"]) {
        Some(format!(
            "`{name}` is pickled, which can run code when opened and is never read; convert it to safetensors"
        ))
    } else {
        let name = ending(&[".npz", ".msgpack", ".h5", ".onnx"])?;
        Some(format!(
            "`{name}` has an unsupported format; convert it to safetensors"
        ))
    }
}
