//! A custom loss and a custom advantage estimator, selected by name in a pipeline file.
//!
//! ```text
//! cargo run --release --example custom_algorithm
//! ```
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl::algos::advantages::{self, AdvantageEstimator, AdvantageInputs, GroupScores};
use verl::algos::functions::exp;
use verl::algos::losses::{MetricId, PerToken, PreparedTokens, TokenLoss};
use verl::algos::{AlgoError, CutUnit};
use verl::pipe::config::read_pipeline;
use verl::pipe::diagnostic::Diagnostic;
use verl::pipe::registry::Registry;
use verl::prelude::*;

/// A = scale · (s − median of the prompt's scores): one lucky response does not make the others look bad.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MedianBaseline {
    /// Factor of the advantages.
    pub scale: f64,
}

impl Default for MedianBaseline {
    fn default() -> Self {
        MedianBaseline { scale: 1.0 }
    }
}

impl AdvantageEstimator for MedianBaseline {
    fn name(&self) -> &'static str {
        Self::KIND
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Group
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<advantages::Advantages, AlgoError> {
        let scores = GroupScores::new(inputs, self.name())?;
        let rows = scores.map_groups(|_, scores| {
            let mut sorted = scores.to_vec();
            sorted.sort_by(f64::total_cmp);
            let (lower, upper) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
            let median = (lower + upper) / 2.0;
            Ok(scores.iter().map(|s| self.scale * (s - median)).collect())
        })?;
        inputs.of_rows(&rows)
    }
}

impl PartConfig for MedianBaseline {
    type Slot = Estimator;
    const KIND: &'static str = "median_baseline";
    const SUMMARY: &'static str = "the score less the median score of the prompt's responses";

    fn build(&self, _context: &BuildContext) -> Result<Estimator, Vec<ConfigError>> {
        Estimator::new(self.clone())
    }
}

/// −A r + |A| (r − 1)²/(2ε), whose minimum lies where PPO clips (SPO: Xie et al. 2024, arXiv:2401.16025).
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Spo {
    /// ε: the target ratio is 1 ± ε.
    pub epsilon: f64,
}

impl Default for Spo {
    fn default() -> Self {
        Spo { epsilon: 0.2 }
    }
}

impl TokenLoss for Spo {
    fn id(&self) -> MetricId {
        MetricId::new(Self::KIND)
    }

    fn check(&self) -> Result<(), AlgoError> {
        if self.epsilon > 0.0 {
            return Ok(());
        }
        Err(AlgoError::Setting {
            setting: "epsilon",
            value: self.epsilon,
            rule: "it must be positive",
        })
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let log_ratio = tokens.log_probs() - tokens.old_log_probs(self.name())?;
        let ratio = exp(log_ratio.clamp(-20.0, 20.0));
        let distance = (ratio.clone() - 1.0).square() * advantages.clone().abs();
        let pull = distance / (2.0 * self.epsilon);
        Ok(PerToken {
            loss: pull.clone() - ratio * advantages,
            metrics: vec![(MetricId::new("spo_pull"), pull)],
        })
    }
}

/// The common terms (aggregation, KL, entropy) come from `PolicyObjective`.
impl PolicyLoss for Spo {
    const KIND: &'static str = "spo";
    const SUMMARY: &'static str = "policy gradient with a quadratic pull towards the old policy";

    fn token_loss(&self) -> Box<dyn TokenLoss> {
        Box::new(self.clone())
    }
}

/// The built-in and the custom kinds, for `read_pipeline` or the command line.
pub fn registry() -> Registry {
    verl::registry()
        .part::<MedianBaseline>()
        .part::<PolicyObjective<Spo>>()
}

/// The addition pipeline with the custom parts by name, on a model with random weights, rewarded for short answers.
pub fn pipeline(file: &Path, model: &Path, dir: &Path) -> Result<DataPipe, Vec<Diagnostic>> {
    let (model, dir) = (model.display(), dir.display());
    let overrides = [
        "advantages.estimator={ kind = \"median_baseline\", scale = 2.0 }",
        "update.loss={ kind = \"spo\", epsilon = 0.1, kl_coef = 0.01 }",
        "reward.rule=length",
        "reward.target_tokens=4",
        "evaluate.questions=20",
        "batch.prompts=4",
        "batch.micro_batch=16",
        "batch.epochs=2",
        "steps=5",
        "actor.init=random",
        "ref.init=random",
        &format!("actor.path={model}"),
        &format!("ref.path={model}"),
        &format!("run.dir={dir}"),
    ];
    let pipe = read_pipeline(file, &overrides, &registry())?;
    // The second pass over a step's rows is off policy: its ratios need the log-probs from before the update.
    Ok(pipe.add_stage("old_log_probs", LogProbs::default()))
}

/// The same parts in Rust, where they need no registry.
pub fn stages() -> (Advantages, Update) {
    let loss = PolicyObjective {
        policy: Spo { epsilon: 0.1 },
        kl_coef: 0.01,
        ..PolicyObjective::default()
    };
    let advantages = Advantages {
        estimator: MedianBaseline { scale: 2.0 }.into(),
        ..Advantages::default()
    };
    let update = Update {
        loss: loss.into(),
        ..Update::default()
    };
    (advantages, update)
}

fn main() -> Result<(), Box<dyn Error>> {
    let runs = tempfile::tempdir()?;
    let file = Path::new("examples/pipelines/grpo_addition.toml");
    let model = Path::new("examples/models/addition-init");
    let pipe = pipeline(file, model, &runs.path().join("run")).map_err(Findings)?;
    let plan = pipe.plan().map_err(Findings)?;
    // The trainer prints each step and all warnings to the console.
    let mut trainer = Trainer::new(plan)?;
    for _ in 0..5 {
        let metrics = trainer.step()?;
        println!(
            "step {}: reward {:.3}, policy loss {:.4}, pull {:.5}, kl {:.5}",
            metrics.step,
            metrics.reward().unwrap_or(f64::NAN),
            metrics.get("actor/pg_loss").unwrap_or(f64::NAN),
            metrics.get("actor/spo_pull").unwrap_or(f64::NAN),
            metrics.kl().unwrap_or(f64::NAN),
        );
    }
    // Saves the model and writes how the run ended.
    trainer.finish()?;
    Ok(())
}
