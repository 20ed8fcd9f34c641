//! Seconds of a complete GRPO step on a model folder, as one JSON line: for comparing engines on one machine.
//!
//! ```text
//! cargo run --release --example grpo_step_speed -- MODEL_DIR PROMPTS.jsonl [new=64] [n=8] [micro=64] [beta=0] [steps=6]
//! ```
//!
//! Rows of the file have a `prompt`; all of them make up a step. Every response has exactly `new` tokens, the reward is
//! the parity of the response's bytes, old log-probs are the update's own (one optimiser step a step), and the first
//! step is not counted.

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::time::Instant;

use verl::models::optim::OptimizerConfig;
use verl::pipe::chain::stage_fn;
use verl::pipe::keys::{RESPONSE_TEXTS, REWARDS};
use verl::pipe::run::runner::{Run, RunOptions};
use verl::prelude::*;
use verl::stages::data::file::DataFile;
use verl::stages::prompts::Template;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let started = Instant::now();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompts, options @ ..] = args.as_slice() else {
        return Err("usage: grpo_step_speed MODEL_DIR PROMPTS.jsonl [new=64] [n=8] [micro=64] [beta=0] [steps=6]".into());
    };
    let option = |name: &str, default: f64| -> Result<f64, Box<dyn std::error::Error>> {
        let given = options
            .iter()
            .find_map(|o| o.strip_prefix(name)?.strip_prefix('='));
        Ok(given.map_or(Ok(default), str::parse)?)
    };
    let (new, steps, beta) = (
        option("new", 64.0)? as usize,
        option("steps", 6.0)? as u64,
        option("beta", 0.0)?,
    );
    let rows = std::fs::read_to_string(prompts)?
        .lines()
        .filter(|line| !line.trim().is_empty())
        .count();
    let batch = BatchConfig {
        prompts: rows,
        samples: option("n", 8.0)? as usize,
        micro_batch: Some(option("micro", 64.0)? as usize),
        ..BatchConfig::default()
    };
    let optimizer = OptimizerConfig {
        learning_rate: 1e-6,
        weight_decay: 0.0,
        ..OptimizerConfig::default()
    };

    let parity = StageSpec::new().reads(RESPONSE_TEXTS).writes(REWARDS);
    let parity = stage_fn(parity, |batch: Batch, context: &mut StageContext<'_>| {
        let texts = batch.get(&RESPONSE_TEXTS)?;
        let rewards = texts
            .rows()
            .map(|text| 1.0 - text.bytes().fold(0u8, |sum, byte| sum ^ (byte & 1)) as f32);
        let rewards: Vec<f32> = rewards.collect();
        let mut output = batch.rows_only();
        output.put(&REWARDS, rewards)?;
        context.emit(output)
    });
    let prompts = Prompts {
        question: "prompt".into(),
        answer: String::new(),
        template: Template::None,
        ..Prompts::default()
    };
    let generate = Generate {
        max_new_tokens: new,
        min_new_tokens: new,
        ..Generate::default()
    };
    let mut pipe = DataPipe::new("grpo_step_speed")
        .run(RunConfig {
            steps,
            ..RunConfig::default()
        })
        .batch(batch)
        .data(
            "train",
            DataFile {
                path: std::path::absolute(&args[1])?,
            },
        )
        .model(
            "actor",
            CausalLm::trained(std::path::absolute(model)?, optimizer),
        )
        .chain(prompts >> generate >> parity.named("parity"));
    if beta > 0.0 {
        let reference = LogProbs {
            model: "ref".into(),
            role: Role::Reference,
            ..LogProbs::default()
        };
        pipe = pipe
            .model("ref", CausalLm::frozen(std::path::absolute(model)?))
            .add_stage("ref_log_probs", reference);
    }
    let loss = PolicyObjective {
        policy: losses::Grpo {
            dual_clip: 0.0,
            ..losses::Grpo::default()
        },
        kl_coef: beta,
        ..PolicyObjective::default()
    };
    let pipe = pipe.chain(
        Advantages {
            estimator: estimators::Grpo { epsilon: 1e-4 }.into(),
            ..Advantages::default()
        } >> Update {
            loss: loss.into(),
            ..Update::default()
        },
    );

    let plan = pipe.plan().map_err(|findings| {
        findings
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")
    })?;
    let schedule = plan.schedule().map_err(|findings| {
        findings
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")
    })?;
    let mut run = Run::start(schedule, RunOptions::default())?;
    let mut seconds = Vec::new();
    let mut stages: Vec<(String, f64)> = Vec::new();
    let mut first_done = 0.0;
    for step in 1..=steps {
        let start = Instant::now();
        let output = run.step()?;
        if step == 1 {
            first_done = started.elapsed().as_secs_f64();
            continue;
        }
        seconds.push(start.elapsed().as_secs_f64());
        stages = output
            .metrics
            .values
            .iter()
            .filter_map(|(name, value)| {
                Some((name.strip_prefix("perf/stage/")?.to_owned(), *value))
            })
            .collect();
    }
    seconds.sort_by(f64::total_cmp);
    let stages: serde_json::Map<String, serde_json::Value> = stages
        .into_iter()
        .map(|(name, value)| (name, value.into()))
        .collect();
    println!(
        "{}",
        serde_json::json!({
            "median_s_per_step": seconds.get(seconds.len() / 2),
            "min_s_per_step": seconds.first(),
            "max_s_per_step": seconds.last(),
            "start_to_first_step_done_s": first_done,
            "last_step_stages_s": stages,
        })
    );
    Ok(())
}
