//! A custom stage with custom keys: a penalty for long responses, subtracted from the rule's reward.
//!
//! ```text
//! cargo run --release --example custom_stage
//! ```
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::path::{Path, PathBuf};

use verl::prelude::*;

/// Cost of a response's length.
const LENGTH_PENALTIES: Key<Scalar<f32>> = Key::new(
    "length_penalties",
    "[B]",
    "reward",
    "cost of the tokens beyond the limit",
)
.finite();

/// The rule's reward, before the penalty is subtracted.
const RULE_REWARDS: Key<Scalar<f32>> =
    Key::new("rule_rewards", "[B]", "reward", "reward of the rule")
        .nullable()
        .finite();

const PENALTY_MEAN: Metric = Metric {
    name: "length/penalty_mean",
    unit: "reward",
    meaning: "mean cost of a response's tokens beyond the limit",
    reduce: Reduce::Mean,
    role: None,
};

/// A stage with settings: each token beyond `limit` costs `price`. It uses no model, so it runs on the host pool, row
/// by row, while the device still generates.
#[derive(Debug, Clone)]
struct LengthPenalty {
    limit: usize,
    price: f32,
}

impl Stage for LengthPenalty {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(keys::RESPONSES)
            .writes(LENGTH_PENALTIES)
            .metrics(&[PENALTY_MEAN])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let mut penalties = Vec::with_capacity(input.num_rows());
        for tokens in input.get(&keys::RESPONSES)?.rows() {
            let penalty = self.price * tokens.len().saturating_sub(self.limit) as f32;
            context.record(&PENALTY_MEAN, f64::from(penalty));
            penalties.push(penalty);
        }
        let mut output = input.rows_only();
        output.put(&LENGTH_PENALTIES, penalties)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

/// rewards = rule_rewards − length_penalties; rows that the rule could not score have no reward.
fn subtract(input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
    let (rules, penalties) = (input.get(&RULE_REWARDS)?, input.get(&LENGTH_PENALTIES)?);
    let rewards: Vec<Option<f32>> = rules
        .rows()
        .zip(penalties.values())
        .map(|(rule, penalty)| rule.map(|rule| rule - penalty))
        .collect();
    let mut output = input.rows_only();
    output.put(&keys::REWARDS, rewards)?;
    context.emit(output)
}

/// GRPO on sums with random weights, rewarded by the rule minus the penalty.
pub fn pipeline(model: &Path, dir: PathBuf) -> DataPipe {
    let penalty = LengthPenalty {
        limit: 4,
        price: 0.1,
    };
    let shaped = StageSpec::new()
        .reads(RULE_REWARDS)
        .reads(LENGTH_PENALTIES)
        .writes(keys::REWARDS);
    let generate = Generate {
        max_new_tokens: 12,
        ..Generate::default()
    };
    let stages = Prompts::default()
        >> generate
        // The built-in stage writes under another name, so that the custom one can write `rewards`.
        >> Reward::default().writing("rewards", "rule_rewards")
        >> stage_with(move |_| Ok(Box::new(penalty.clone()))).named("length_penalty")
        >> stage_fn(shaped, subtract).named("shaped_reward")
        >> Advantages::default()
        >> Update::default();
    let optimizer = OptimizerConfig {
        learning_rate: 5e-3,
        ..OptimizerConfig::default()
    };
    let actor = CausalLm {
        init: Init::Random,
        ..CausalLm::trained(model, optimizer)
    };
    DataPipe::new("custom_stage")
        .run(RunConfig {
            dir,
            steps: 5,
            ..RunConfig::default()
        })
        .batch(BatchConfig {
            prompts: 4,
            samples: 8,
            ..BatchConfig::default()
        })
        .data("train", Addition::default())
        .model("actor", actor)
        .chain(stages)
}

fn main() -> Result<(), Box<dyn Error>> {
    let runs = tempfile::tempdir()?;
    let model = Path::new("examples/models/addition-init");
    let plan = pipeline(model, runs.path().join("run"))
        .plan()
        .map_err(Findings)?;
    println!("{plan}");

    // The trainer prints each step and all warnings to the console.
    let mut trainer = Trainer::new(plan)?;
    for _ in 0..5 {
        let metrics = trainer.step()?;
        println!(
            "step {}: penalty {:.3}, reward {:.3}, length {:.1}",
            metrics.step,
            metrics.get(PENALTY_MEAN.name).unwrap_or(f64::NAN),
            metrics.reward().unwrap_or(f64::NAN),
            metrics.get("response/length_mean").unwrap_or(f64::NAN),
        );
    }
    // Saves the model and writes how the run ended.
    trainer.finish()?;
    Ok(())
}
