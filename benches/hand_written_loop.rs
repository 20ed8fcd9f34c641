//! The cost that the engine adds to a step of the addition pipeline, compared with a hand-written loop.
//!
//! ```text
//! cargo bench --workspace --bench hand_written_loop
//! ```
//!
//! Both sides call the same stages and run the same steps in turn, each on its own models; the rewards must be equal.
//! The target is a share under 1 %. Other processes affect the speed, so the median of the paired ratios counts, with
//! its interval.

#![expect(clippy::print_stdout, reason = "a bench prints its result")]

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use verl::pipe::keys::REWARDS;
use verl::pipe::plan::Plan;
use verl::pipe::run::runner::{Run, RunOptions};
use verl::pipe::stage::{CancelToken, Models, StageSink, StartContext};
use verl::prelude::*;

#[expect(dead_code, reason = "only the common part of the example is used")]
#[path = "../examples/grpo_addition.rs"]
mod addition;

/// Steps that are not counted.
const WARM_UP: u64 = 2;
/// Steps that are counted.
const STEPS: u64 = 400;

/// Gathers what a stage emits.
#[derive(Default)]
struct Gather {
    parts: Vec<Batch>,
}

impl StageSink for Gather {
    fn emit(&mut self, batch: Batch) -> Result<(), StageError> {
        self.parts.push(batch);
        Ok(())
    }
    fn record(&mut self, _: &verl::pipe::stage::Metric, _: f64, _: f64) {}
    fn record_named(&mut self, _: &str, _: f64, _: f64) {}
    fn sample(&mut self, _: serde_json::Value) {}
}

/// The stages and models of the pipeline, called one after the other.
struct Loop {
    stages: Vec<(String, Box<dyn Stage>)>,
    models: Models,
    samples: usize,
    micro_rows: usize,
    seed: u64,
    cancel: CancelToken,
}

impl Loop {
    fn new(plan: &Plan) -> Result<Loop, Box<dyn Error>> {
        let pipe = plan.pipe();
        let context = plan.context().clone();
        let mut models = Models::new();
        for model in &pipe.models {
            let loaded = model.factory.load(&model.name, "cpu", &context)?;
            models.insert(model.name.clone(), loaded);
        }
        let mut data = BTreeMap::new();
        for declared in &pipe.data {
            data.insert(declared.name.clone(), (declared.open)(&context)?);
        }
        let mut stages = Vec::new();
        for declared in pipe.stages.iter().filter(|stage| stage.kind != "evaluate") {
            let mut stage = (declared.build)(&context).map_err(|faults| faults[0].clone())?;
            stage.start(&mut StartContext {
                data: &data,
                models: &mut models,
            })?;
            stages.push((declared.name.clone(), stage));
        }
        Ok(Loop {
            stages,
            models,
            samples: plan.batch().samples,
            micro_rows: plan.batch().micro_rows,
            seed: pipe.run.seed,
            cancel: CancelToken::default(),
        })
    }

    /// One step; returns its rewards.
    fn step(&mut self, step: u64, steps: u64) -> Result<Vec<f32>, Box<dyn Error>> {
        let mut batch = Batch::with_rows(&[]);
        for (name, stage) in &mut self.stages {
            let mut sink = Gather::default();
            let mut context = StageContext {
                stage: name,
                wave: 0,
                step,
                steps,
                seed: self.seed,
                cancel: &self.cancel,
                models: &mut self.models,
                sink: &mut sink,
            };
            // What a model scores comes in the slices that the pipeline declares, on both sides.
            let spec = stage.spec();
            let read = spec.reads.iter().chain(&spec.reads_optional);
            let read: Vec<_> = read
                .map(|field| field.name.as_ref())
                .filter(|name| batch.has(name))
                .collect();
            let input = batch.select(&read)?;
            let slices = match spec.cardinality {
                Cardinality::Row if !spec.models.is_empty() && spec.rows == RowRule::Same => {
                    input.split(self.micro_rows)
                }
                _ => vec![input],
            };
            for slice in slices {
                stage.run(slice, &mut context)?;
            }
            if sink.parts.is_empty() {
                continue;
            }
            let emitted = Batch::concat(&sink.parts)?;
            batch = match name.as_str() {
                "prompts" => emitted,
                "generate" => {
                    let samples = batch.repeat(self.samples)?;
                    samples.join(&in_order(&emitted, &samples)?)?
                }
                _ => batch.join(&emitted)?,
            };
        }
        let rewards = batch.get(&REWARDS)?;
        Ok((0..batch.num_rows())
            .map(|row| rewards.row(row).unwrap_or(f32::NAN))
            .collect())
    }
}

/// The rows of `batch` in the order of `like`: responses come as they are complete.
fn in_order(batch: &Batch, like: &Batch) -> Result<Batch, Box<dyn Error>> {
    let places: HashMap<u64, usize> = batch
        .ids()
        .iter()
        .enumerate()
        .map(|(row, id)| (id.0, row))
        .collect();
    let order: Vec<usize> = like.ids().iter().map(|id| places[&id.0]).collect();
    Ok(batch.take(&order)?)
}

/// Seconds that `work` took, and its result.
fn timed<T>(work: impl FnOnce() -> Result<T, Box<dyn Error>>) -> Result<(f64, T), Box<dyn Error>> {
    let started = Instant::now();
    let result = work()?;
    Ok((started.elapsed().as_secs_f64(), result))
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/addition-base");
    let steps = WARM_UP + STEPS;
    let plan = || {
        addition::chained(addition::addition(&folder, steps))
            .plan()
            .map_err(Findings)
    };
    let mut by_hand = Loop::new(&plan()?)?;
    let schedule = plan()?.schedule().map_err(Findings)?;
    let mut run = Run::start(schedule, RunOptions::default())?;
    let (mut ratios, mut engines, mut hands) = (Vec::new(), Vec::new(), Vec::new());
    for step in 1..=steps {
        // Each goes first every other time.
        let (hand, engine);
        let (rewards, output);
        if step % 2 == 0 {
            (hand, rewards) = timed(|| by_hand.step(step, steps))?;
            (engine, output) = timed(|| Ok(run.step()?))?;
        } else {
            (engine, output) = timed(|| Ok(run.step()?))?;
            (hand, rewards) = timed(|| by_hand.step(step, steps))?;
        }
        let mean = rewards.iter().map(|r| f64::from(*r)).sum::<f64>() / rewards.len() as f64;
        let reward = output.metrics.get("reward/mean");
        assert!(
            reward.is_some_and(|reward| (reward - mean).abs() < 1e-9),
            "step {step}: {reward:?} is not {mean}"
        );
        if step > WARM_UP {
            ratios.push(engine / hand);
            engines.push(engine);
            hands.push(hand);
        }
    }
    let of = |times: &mut Vec<f64>, share: f64| {
        times.sort_by(f64::total_cmp);
        times[((times.len() - 1) as f64 * share).round() as usize]
    };
    // The median of n values lies between those of the ranks n/2 ± 0.98 √n in 95 % of cases, for any distribution.
    let half_width = 0.98 / (STEPS as f64).sqrt();
    println!(
        "engine / hand-written loop, {STEPS} steps: median {:.4} (95 % interval {:.4} to {:.4}), \
         quartiles {:.4} to {:.4}",
        of(&mut ratios, 0.5),
        of(&mut ratios, 0.5 - half_width),
        of(&mut ratios, 0.5 + half_width),
        of(&mut ratios, 0.25),
        of(&mut ratios, 0.75)
    );
    // Other processes can only slow a step down, so the fastest steps of each side are the most reliable.
    println!(
        "fastest tenth: engine {:.2} ms, by hand {:.2} ms",
        1e3 * of(&mut engines, 0.1),
        1e3 * of(&mut hands, 0.1)
    );
    Ok(())
}
