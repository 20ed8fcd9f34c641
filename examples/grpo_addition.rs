//! The run of `examples/pipelines/grpo_addition.toml` in Rust, in both forms: stage by stage with what each reads and
//! writes, and as a chain.
//!
//! ```text
//! cargo run --release --example grpo_addition -- [MODEL_FOLDER] [STEPS]
//! ```
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::path::{Path, PathBuf};

use verl::prelude::*;

/// What both forms have in common: sizes, data, models.
pub fn addition(model: &Path, steps: u64) -> DataPipe {
    let optimizer = OptimizerConfig {
        learning_rate: 2e-4,
        // Over all optimiser steps of the run.
        schedule: Schedule::Linear {
            warmup_steps: 5,
            total_steps: None,
            final_share: 0.1,
        },
        ..OptimizerConfig::default()
    };
    let split = |split| Addition {
        split,
        ..Addition::default()
    };
    DataPipe::new("grpo_addition")
        .run(RunConfig {
            dir: PathBuf::from("runs/grpo_addition_rs"),
            steps,
            console_every: 1,
            ..RunConfig::default()
        })
        .batch(BatchConfig {
            prompts: 32,
            samples: 8,
            micro_batch: Some(64),
            ..BatchConfig::default()
        })
        .data("train", split(Split::Train))
        .data("eval", split(Split::HeldOut))
        .model("actor", CausalLm::trained(model, optimizer))
        .model("ref", CausalLm::frozen(model))
}

fn generate() -> Generate {
    Generate {
        max_new_tokens: 12,
        ..Generate::default()
    }
}

fn reference() -> LogProbs {
    LogProbs {
        model: "ref".to_owned(),
        role: Role::Reference,
        ..LogProbs::default()
    }
}

fn update() -> Update {
    let loss = PolicyObjective {
        policy: losses::Grpo {
            clip_high: 0.28,
            ..losses::Grpo::default()
        },
        kl_coef: 0.001,
        ..PolicyObjective::default()
    };
    Update {
        loss: loss.into(),
        ..Update::default()
    }
}

fn evaluate() -> Evaluate {
    Evaluate {
        every: 50,
        questions: Some(1000),
        max_new_tokens: 12,
        ..Evaluate::default()
    }
}

/// The builder: stages by name; keys that are stated are checked against what the stage declares.
pub fn stage_by_stage(pipe: DataPipe) -> DataPipe {
    pipe.add_stage("prompts", Prompts::default())
        .writes(["prompts", "prompt_texts", "data_rows", "answers"])
        .add_stage("generate", generate())
        .reads(["prompts"])
        .add_stage("reward", Reward::default())
        .reads(["responses", "response_texts", "answers"])
        .writes(["rewards"])
        .add_stage("ref_log_probs", reference())
        .reads(["prompts", "responses"])
        .writes(["ref_log_probs"])
        .add_stage("advantages", Advantages::default())
        .add_stage("update", update())
        .add_stage("evaluate", evaluate())
}

/// The operator: the same stages as a chain. Keys decide which stage reads what, not the order of the chain.
pub fn chained(pipe: DataPipe) -> DataPipe {
    pipe.chain(
        Prompts::default()
            >> generate()
            >> Reward::default()
            >> reference().named("ref_log_probs")
            >> Advantages::default()
            >> update()
            >> evaluate(),
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().map_or_else(
        || PathBuf::from("examples/models/addition-base"),
        PathBuf::from,
    );
    let steps = arguments.next().map_or(Ok(400), |text| text.parse())?;

    let plan = chained(addition(&model, steps)).plan().map_err(Findings)?;
    let same = stage_by_stage(addition(&model, steps))
        .plan()
        .map_err(Findings)?;
    assert_eq!(
        plan.to_string(),
        same.to_string(),
        "one pipeline, two forms"
    );

    let mut trainer = Trainer::new(plan)?;
    let first = trainer.step()?;
    if let (Some(loss), Some(reward), Some(kl)) = (first.loss(), first.reward(), first.kl()) {
        println!("after the first step: loss {loss:.4}, reward {reward:.3}, kl {kl:.5}");
    }
    trainer.train()?;
    println!("the run is in {}", trainer.folder().path().display());
    Ok(())
}
