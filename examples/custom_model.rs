//! A custom model, trained by the same stages as the built-in ones.
//!
//! ```text
//! cargo run --release --example custom_model
//! ```
//!
//! The model mixes tokens without attention: each head weighs the past only by distance. It has no cache, so it
//! generates with the default engine, which recomputes the prefix.
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Int, Tensor};
use verl::models::blocks::linear::{Embedding, Linear};
use verl::models::blocks::mlp::Mlp;
use verl::models::blocks::norm::RmsNorm;
use verl::models::parameters::{randomized, save_parameters};
use verl::prelude::*;

/// h = x + W_o (A ∗ W_v norm(x)), then h + mlp(norm(h)); A_{h,s,t} = softmax over t ≤ s of w_{h,s−t}.
#[derive(Module, Debug)]
pub struct Mixer {
    embedding: Embedding,
    /// w: `[H, S]`, a logit for each distance.
    distances: Param<Tensor<2>>,
    value: Linear,
    output: Linear,
    mixer_norm: RmsNorm,
    mlp_norm: RmsNorm,
    mlp: Mlp,
    norm: RmsNorm,
    head: Linear,
}

const EPSILON: f64 = 1e-5;

impl Mixer {
    /// A fresh model: `heads` divides `width`.
    pub fn new(vocab: usize, width: usize, heads: usize, context: usize, device: &Device) -> Self {
        Mixer {
            embedding: Embedding::lazy(vocab, width, device),
            distances: Param::from_tensor(Tensor::zeros([heads, context], device)),
            value: Linear::lazy(width, width, false, device),
            output: Linear::lazy(width, width, false, device),
            mixer_norm: RmsNorm::lazy(width, EPSILON, device),
            mlp_norm: RmsNorm::lazy(width, EPSILON, device),
            mlp: Mlp::lazy(width, 2 * width, false, device),
            norm: RmsNorm::lazy(width, EPSILON, device),
            head: Linear::lazy(vocab, width, false, device),
        }
    }

    /// Weights of the past by distance: `[H, S, S]`, 0 above the diagonal.
    fn weights(&self, s: usize, device: &Device) -> Tensor<3> {
        let [heads, _] = self.distances.dims();
        let back: Vec<i32> = (0..s * s)
            .map(|at| (at / s).saturating_sub(at % s) as i32)
            .collect();
        let back = Tensor::<1, Int>::from_data(back.as_slice(), device);
        let logits = self.distances.val().select(1, back).reshape([heads, s, s]);
        let future = Tensor::<2, Bool>::tril_mask([s, s], 0, device);
        let future = future.unsqueeze::<3>().expand([heads, s, s]);
        softmax(logits.mask_fill(future, -1e9), 2)
    }
}

impl ModelInterface for Mixer {
    fn vocab_size(&self) -> usize {
        self.embedding.weight.dims()[0]
    }

    fn max_tokens(&self) -> usize {
        self.distances.dims()[1]
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [b, s] = ids.dims();
        let [heads, _] = self.distances.dims();
        let x = self.embedding.forward(ids.reshape([b * s])); // [B·S, D]
        let width = x.dims()[1];
        let weights = self.weights(s, &x.device());
        let values = self.value.forward(self.mixer_norm.forward(x.clone()));
        // [B·S, D] -> [H, S, B·Dh]
        let values = values
            .reshape([b, s, heads, width / heads])
            .permute([2, 1, 0, 3])
            .reshape([heads, s, b * width / heads]);
        // [H, S, B·Dh] -> [B·S, D]
        let mixed = weights
            .matmul(values)
            .reshape([heads, s, b, width / heads])
            .permute([2, 1, 0, 3])
            .reshape([b * s, width]);
        let x = x + self.output.forward(mixed);
        let x = x.clone() + self.mlp.forward(self.mlp_norm.forward(x));
        self.norm.forward(x).reshape([b, s, width])
    }

    fn head(&self) -> Tensor<2> {
        self.head.weight.val()
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        std::fs::create_dir_all(dir).map_err(|error| ModelError::File {
            action: "create",
            path: dir.display().to_string(),
            reason: error.to_string(),
        })?;
        save_parameters(self, &dir.join("mixer.safetensors"))
    }
}

/// What `policy_model` calls when a run starts. The addition tokenizer has 32 ids.
pub fn mixer(device: &Device, seed: u64) -> Result<Mixer, ModelError> {
    Ok(randomized(Mixer::new(32, 32, 4, 32, device), seed, 0.1))
}

/// Supervised training on sums, with greedy answers before and after.
pub fn pipeline(tokenizer: &Path, dir: PathBuf, steps: u64) -> DataPipe {
    let optimizer = OptimizerConfig {
        learning_rate: 1e-2,
        ..OptimizerConfig::default()
    };
    let actor = policy_model(mixer).trained(optimizer).tokenizer(tokenizer);
    let split = |split| Addition {
        split,
        ..Addition::default()
    };
    let prompts = Prompts {
        with_targets: true,
        ..Prompts::default()
    };
    let update = Update {
        loss: losses::Sft::default().into(),
        ..Update::default()
    };
    let evaluate = Evaluate {
        questions: Some(20),
        max_new_tokens: 8,
        ..Evaluate::default()
    };
    DataPipe::new("custom_model")
        .run(RunConfig {
            dir,
            steps,
            console_every: 10,
            ..RunConfig::default()
        })
        .batch(BatchConfig {
            prompts: 32,
            ..BatchConfig::default()
        })
        .data("train", split(Split::Sft))
        .data("eval", split(Split::HeldOut))
        .model_object("actor", Arc::new(actor))
        .chain(prompts >> update >> evaluate)
}

fn main() -> Result<(), Box<dyn Error>> {
    let runs = tempfile::tempdir()?;
    let tokenizer = Path::new("examples/models/addition-init");
    let plan = pipeline(tokenizer, runs.path().join("run"), 100)
        .plan()
        .map_err(Findings)?;
    let mut trainer = Trainer::new(plan)?;
    let first = trainer.step()?.loss().unwrap_or(f64::NAN);
    let mut last = first;
    while trainer.run().steps_done() < 100 {
        last = trainer.step()?.loss().unwrap_or(f64::NAN);
    }
    // Saves the model and writes how the run ended.
    let summary = trainer.finish()?;
    println!("loss {first:.3} -> {last:.3} in {} steps", summary.steps);
    Ok(())
}
