//! Values and gradients against `transformers`, over every folder with a `reference.safetensors`.
//!
//! Folders are those beside this file, those of `../shared/models` where it exists, or, instead of both, those of
//! `VERL_MODELS_DIR`. All numbers are f32 on the CPU.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors};
use verl_models::Decoder;
use verl_models::model::ModelInterface;

/// Largest difference as a share of the tensor's largest value. Sums in another order differ by about 1e-6.
const TOLERANCE: f32 = 1e-4;

#[test]
fn parity_of_logits() {
    for case in cases() {
        let logits = values(case.model.forward(case.ids()));
        let vocab = case.model.vocab_size();
        let kept = case.kept_positions(0);
        case.check("logits", &pick(&logits, &kept, vocab), vocab, &kept);
    }
}

#[test]
fn parity_of_log_probs_and_entropy() {
    for case in cases() {
        let log_probs = log_softmax(case.model.forward(case.ids()), 2);
        let entropy = -(log_probs.clone().exp() * log_probs.clone()).sum_dim(2);
        let kept = case.kept_positions(0);
        case.check("entropy", &pick(&values(entropy), &kept, 1), 1, &kept);
        let kept = case.kept_positions(1);
        let chosen = values(next_log_probs(log_probs, case.ids()));
        case.check("logprobs", &pick(&chosen, &kept, 1), 1, &kept);
    }
}

#[test]
fn parity_of_loss_and_every_gradient() {
    for mut case in cases() {
        case.model = case.model.train();
        let loss = case.loss();
        case.check("loss", &values(loss.clone()), 1, &[0]);
        let mut seen = Grads {
            path: Vec::new(),
            gradients: loss.backward(),
            found: HashMap::new(),
        };
        case.model.visit(&mut seen);
        let mut wanted: Vec<&String> = case
            .reference
            .keys()
            .filter(|name| name.starts_with("grad."))
            .collect();
        wanted.sort();
        assert_eq!(wanted.len(), seen.found.len(), "{}: gradients", case.name);
        for name in wanted {
            let got = &seen.found[name.trim_start_matches("grad.")];
            let all: Vec<usize> = (0..got.len()).collect();
            case.check(name, got, 1, &all);
        }
    }
}

#[test]
fn parity_does_not_depend_on_what_pads_a_row() {
    for case in cases() {
        let kept = case.kept_positions(0);
        let vocab = case.model.vocab_size();
        let mask = &case.reference["attention_mask"].values;
        let ids = &case.reference["input_ids"].values;
        let other_pads = ids
            .iter()
            .zip(mask)
            .map(|(id, kept)| if *kept > 0.0 { *id } else { (vocab - 1) as f32 });
        let other = tensor_of_ids(other_pads, case.shape());
        let logits = pick(&values(case.model.forward(other)), &kept, vocab);
        let first = pick(&values(case.model.forward(case.ids())), &kept, vocab);
        assert_eq!(logits, first, "{}", case.name);
    }
}

struct Case {
    name: String,
    model: Decoder,
    reference: HashMap<String, Reference>,
}

struct Reference {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Case {
    fn load(dir: &Path) -> Self {
        let device = Device::flex();
        Case {
            name: dir.display().to_string(),
            model: Decoder::load(dir, &device).unwrap_or_else(|error| panic!("{error}")),
            reference: read_reference(&dir.join("reference.safetensors")),
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

    /// Indices, in rows of `S - skipped`, of positions whose token at `position + skipped` is no pad.
    fn kept_positions(&self, skipped: usize) -> Vec<usize> {
        let [_, s] = self.shape();
        let mask = &self.reference["attention_mask"].values;
        let kept = mask.chunks(s).flat_map(|row| row[skipped..].to_vec());
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

    /// Compares with the positions `kept` of the reference, each `width` values.
    fn check(&self, what: &str, got: &[f32], width: usize, kept: &[usize]) {
        let want = pick(&self.reference[what].values, kept, width);
        assert_eq!(got.len(), want.len(), "{}: size of {what}", self.name);
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
            "{}: {what} is {apart} apart, of at most {largest}",
            self.name
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

/// `[B, S, V]` log-probs of the next token and `[B, S]` ids into `[B, S − 1]`.
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

fn cases() -> Vec<Case> {
    let cases: Vec<Case> = folders().iter().map(|dir| Case::load(dir)).collect();
    assert!(!cases.is_empty(), "no folder with a reference.safetensors");
    cases
}

fn folders() -> Vec<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let parents = match env::var_os("VERL_MODELS_DIR") {
        Some(dir) => vec![PathBuf::from(dir)],
        None => vec![here.join("tests/models"), here.join("../../shared/models")],
    };
    let entries = parents
        .iter()
        .filter_map(|parent| fs::read_dir(parent).ok());
    let mut folders: Vec<PathBuf> = entries
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("reference.safetensors").exists())
        .collect();
    folders.sort();
    folders
}

fn read_reference(path: &Path) -> HashMap<String, Reference> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let values = match tensor.dtype() {
            Dtype::F32 => numbers(tensor.data(), f32::from_le_bytes),
            // Token ids and masks, far below 2^24.
            Dtype::I64 => numbers(tensor.data(), |bytes| i64::from_le_bytes(bytes) as f32),
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
