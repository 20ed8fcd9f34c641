//! Compares values and gradients with `transformers`, for every folder with a `reference.safetensors`.
//!
//! Folders are those in `tests/models` and in `../shared/models` if it exists, or, instead of both, those in
//! `VERL_MODELS_DIR`. All numbers are f32 on the CPU. A reference needs `input_ids`; other missing values are not
//! compared, and without `attention_mask` nothing is padding. Every folder is tried, even if others fail.

#![expect(
    clippy::print_stdout,
    reason = "the tests print what they could not compare"
)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::{env, fs};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use verl_models::Decoder;
use verl_models::model::ModelInterface;

/// Largest difference relative to the tensor's largest value. Sums in a different order differ by about 1e-6.
const TOLERANCE: f32 = 1e-4;

#[test]
fn parity_of_logits() {
    for_each_case(|case| {
        let logits = values(case.model.forward(case.ids()));
        let vocab = case.model.vocab_size();
        let kept = case.kept_positions(0);
        case.check("logits", &pick(&logits, &kept, vocab), vocab, &kept);
    });
}

#[test]
fn parity_of_log_probs_and_entropy() {
    for_each_case(|case| {
        let log_probs = log_softmax(case.model.forward(case.ids()), 2);
        let entropy = -(log_probs.clone().exp() * log_probs.clone()).sum_dim(2);
        let kept = case.kept_positions(0);
        case.check("entropy", &pick(&values(entropy), &kept, 1), 1, &kept);
        let kept = case.kept_positions(1);
        let chosen = values(next_log_probs(log_probs, case.ids()));
        case.check("logprobs", &pick(&chosen, &kept, 1), 1, &kept);
    });
}

#[test]
fn parity_of_loss_and_every_gradient() {
    for_each_case(|mut case| {
        case.model = case.model.train();
        let loss = case.loss();
        case.check("loss", &values(loss.clone()), 1, &[0]);
        let mut seen = Grads {
            path: Vec::new(),
            gradients: loss.backward(),
            found: HashMap::new(),
        };
        case.model.visit(&mut seen);
        let is_gradient = |name: &&String| name.starts_with("grad.");
        let mut wanted: Vec<&String> = case.reference.keys().filter(is_gradient).collect();
        wanted.sort();
        for name in &wanted {
            let own = name.trim_start_matches("grad.");
            let Some(got) = seen.found.get(own) else {
                // A tied head has no separate weight; the gradient of both uses is the embedding's.
                assert_eq!(own, "lm_head.weight", "a gradient without a parameter");
                continue;
            };
            let all: Vec<usize> = (0..got.len()).collect();
            case.check(name, got, 1, &all);
        }
        if wanted.len() < seen.found.len() {
            let (some, all) = (wanted.len(), seen.found.len());
            println!("{}: {some} of {all} gradients in the reference", case.name);
        }
    });
}

#[test]
fn parity_does_not_depend_on_the_pad_ids() {
    for_each_case(|case| {
        let kept = case.kept_positions(0);
        let vocab = case.model.vocab_size();
        let ids = &case.reference["input_ids"].values;
        let other_pads = ids
            .iter()
            .zip(&case.mask)
            .map(|(id, kept)| if *kept > 0.0 { *id } else { (vocab - 1) as f32 });
        let other = tensor_of_ids(other_pads, case.shape());
        let logits = pick(&values(case.model.forward(other)), &kept, vocab);
        let first = pick(&values(case.model.forward(case.ids())), &kept, vocab);
        assert_eq!(logits, first);
    });
}

#[test]
fn parity_reports_every_folder_that_fails() {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("parity");
    for name in ["empty", "garbage"] {
        let folder = parent.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("reference.safetensors"), name).unwrap();
    }
    let folders = folders_in(&parent);
    let failures = failures(&folders, |_| {});
    assert_eq!(failures.len(), 2);
    assert!(failures[0].contains("empty: ") && failures[1].contains("garbage: "));
    let missing = named_folder(Path::new("no/such/folder")).unwrap_err();
    assert!(missing.starts_with("VERL_MODELS_DIR is `no/such/folder`, which is not a folder"));
}

struct Case {
    name: String,
    model: Decoder,
    reference: HashMap<String, Reference>,
    /// 1 where a token is not padding, row by row.
    mask: Vec<f32>,
}

struct Reference {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Case {
    fn load(dir: &Path) -> Self {
        let device = Device::flex();
        let reference = read_reference(&dir.join("reference.safetensors"));
        let tokens = reference["input_ids"].values.len();
        let mask = reference.get("attention_mask");
        Case {
            name: dir.display().to_string(),
            model: Decoder::load(dir, &device).unwrap_or_else(|error| panic!("{error}")),
            mask: mask.map_or_else(|| vec![1.0; tokens], |mask| mask.values.clone()),
            reference,
        }
    }

    fn shape(&self) -> [usize; 2] {
        let shape = &self.reference["input_ids"].shape;
        [shape[0], shape[1]]
    }

    fn ids(&self) -> Tensor<2, Int> {
        tensor_of_ids(
            self.reference["input_ids"].values.iter().copied(),
            self.shape(),
        )
    }

    /// Indices, in rows of `S - skipped`, of positions whose token at `position + skipped` is not padding.
    fn kept_positions(&self, skipped: usize) -> Vec<usize> {
        let [_, s] = self.shape();
        let kept = self.mask.chunks(s).flat_map(|row| row[skipped..].to_vec());
        kept.enumerate()
            .filter(|(_, kept)| *kept > 0.0)
            .map(|(index, _)| index)
            .collect()
    }

    fn loss(&self) -> Tensor<1> {
        let kept: Vec<i32> = self.kept_positions(1).iter().map(|k| *k as i32).collect();
        let count = kept.len();
        let log_probs = log_softmax(self.model.forward(self.ids()), 2);
        let chosen = next_log_probs(log_probs, self.ids());
        let kept = Tensor::from_data(TensorData::new(kept, [count]), &Device::flex());
        let [b, s] = chosen.dims();
        -chosen.reshape([b * s]).select(0, kept).mean()
    }

    /// Compares with the positions `kept` of the reference, each of `width` values, if the reference has them.
    fn check(&self, what: &str, got: &[f32], width: usize, kept: &[usize]) {
        let Some(reference) = self.reference.get(what) else {
            println!("{}: no {what} in the reference", self.name);
            return;
        };
        let want = pick(&reference.values, kept, width);
        assert_eq!(got.len(), want.len(), "size of {what}");
        let largest = want.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        let apart = got
            .iter()
            .zip(&want)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0f32, |max, value| {
                if value.is_nan() {
                    value
                } else {
                    max.max(value)
                }
            });
        assert!(
            apart <= TOLERANCE * largest,
            "{what} differs by {apart}, of at most {largest}"
        );
    }
}

struct Grads {
    path: Vec<String>,
    gradients: Gradients,
    found: HashMap<String, Vec<f32>>,
}

impl ModuleVisitor for Grads {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad(&self.gradients) {
            self.found.insert(self.path.join("."), values(gradient));
        }
    }
}

/// Picks the log-probs of the next tokens: `[B, S, V]` log-probs and `[B, S]` ids to `[B, S − 1]`.
fn next_log_probs(log_probs: Tensor<3>, ids: Tensor<2, Int>) -> Tensor<2> {
    let [b, s, v] = log_probs.dims();
    let next = ids.slice([0..b, 1..s]).unsqueeze_dim::<3>(2);
    log_probs
        .slice([0..b, 0..s - 1, 0..v])
        .gather(2, next)
        .reshape([b, s - 1])
}

fn tensor_of_ids(ids: impl Iterator<Item = f32>, shape: [usize; 2]) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.map(|id| id as i32).collect();
    Tensor::from_data(TensorData::new(ids, shape), &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().as_slice::<f32>().unwrap().to_vec()
}

fn pick(values: &[f32], positions: &[usize], width: usize) -> Vec<f32> {
    positions
        .iter()
        .flat_map(|at| values[at * width..(at + 1) * width].to_vec())
        .collect()
}

/// Runs a check on every folder and reports all failures.
#[track_caller]
fn for_each_case(check: impl Fn(Case)) {
    let folders = folders();
    assert!(
        !folders.is_empty(),
        "no folder with a reference.safetensors"
    );
    let failures = failures(&folders, check);
    let (failed, all) = (failures.len(), folders.len());
    assert!(
        failed == 0,
        "{failed} of {all} folders\n{}",
        failures.join("\n")
    );
}

fn failures(folders: &[PathBuf], check: impl Fn(Case)) -> Vec<String> {
    let of_folder = |dir: &PathBuf| {
        let run = AssertUnwindSafe(|| check(Case::load(dir)));
        let panic = catch_unwind(run).err()?;
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
        Some(format!("{}: {}", dir.display(), text.unwrap_or_default()))
    };
    folders.iter().filter_map(of_folder).collect()
}

fn folders() -> Vec<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    match env::var_os("VERL_MODELS_DIR") {
        Some(dir) => match named_folder(Path::new(&dir)) {
            Ok(folder) => folders_in(&folder),
            Err(error) => panic!("{error}"),
        },
        None => {
            let own = folders_in(&here.join("tests/models"));
            own.into_iter()
                .chain(folders_in(&here.join("../../shared/models")))
                .collect()
        }
    }
}

/// A requested folder; a relative path may also start at the workspace.
fn named_folder(named: &Path) -> Result<PathBuf, String> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let places = [named.to_path_buf(), workspace.join(named)];
    places
        .into_iter()
        .find(|place| place.is_dir())
        .ok_or_else(|| {
            format!(
                "VERL_MODELS_DIR is `{}`, which is not a folder; set it to the folder that contains the model folders, or unset it",
                named.display()
            )
        })
}

/// The subfolders of a folder that have a reference, and the folder itself if it has one.
fn folders_in(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    folders.push(parent.to_path_buf());
    folders.retain(|path| path.join("reference.safetensors").exists());
    folders.sort();
    folders
}

fn read_reference(path: &Path) -> HashMap<String, Reference> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{error}"));
    let read = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let data = tensor.data();
        // Token ids and masks are far below 2^24.
        let values = match tensor.dtype() {
            Dtype::F32 => numbers(data, f32::from_le_bytes),
            Dtype::F64 => numbers(data, |bytes| f64::from_le_bytes(bytes) as f32),
            Dtype::F16 => numbers(data, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => numbers(data, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Dtype::I64 => numbers(data, |bytes| i64::from_le_bytes(bytes) as f32),
            Dtype::I32 => numbers(data, |bytes| i32::from_le_bytes(bytes) as f32),
            Dtype::BOOL | Dtype::U8 => numbers(data, |[byte]: [u8; 1]| f32::from(byte)),
            other => panic!("{name} is {other:?}"),
        };
        Reference {
            shape: tensor.shape().to_vec(),
            values,
        }
    };
    let names = file.names().into_iter();
    names.map(|name| (name.to_string(), read(name))).collect()
}

fn numbers<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|chunk| number(*chunk))
        .collect()
}
