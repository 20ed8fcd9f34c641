//! The cost that the statistics of every edge and the flight recorder add to a step of the addition pipeline.
//!
//! ```text
//! cargo bench --workspace --bench cost_of_statistics
//! ```
//!
//! Two runs of the same pipeline in one process, which differ only in `[trace] stats`, take blocks of steps in turn;
//! their losses must be equal. Each block of one run is compared with the adjacent block of the other, once by the
//! clock and once by the CPU seconds of the entire process, which include the recorder's thread and exclude other
//! processes. The target is a share under 2 %. It takes two and a half minutes on any machine.

#![expect(clippy::print_stdout, reason = "a bench prints its result")]

use std::error::Error;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use verl::prelude::*;

#[expect(dead_code, reason = "only the common part of the example is used")]
#[path = "../examples/grpo_addition.rs"]
mod addition;

/// Steps that are not counted.
const WARM_UP: u64 = 5;
/// Seconds that are measured, both runs together.
const SECONDS: f64 = 140.0;
/// Approximate CPU seconds of a block; they are reported in hundredths, which are half a percent of it.
const BLOCK_SECONDS: f64 = 2.0;
/// Steps that no run reaches in this time.
const STEPS: u64 = 100_000;

/// A run without its observers, which have their own schedule.
fn trainer(folder: &Path, stats: bool) -> Result<Trainer, Box<dyn Error>> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/addition-base");
    let mut pipe = addition::chained(addition::addition(&model, STEPS));
    pipe.stages.retain(|stage| stage.kind != "evaluate");
    pipe.run.dir = folder.join(if stats { "with" } else { "without" });
    pipe.trace.stats = stats;
    let plan = pipe.plan().map_err(Findings)?;
    Ok(Trainer::with_options(plan, TrainerOptions::default())?)
}

/// The time of a block of steps.
struct Block {
    wall: f64,
    cpu: Option<f64>,
    loss: Option<f64>,
}

fn block(trainer: &mut Trainer, steps: u64) -> Result<Block, Box<dyn Error>> {
    let (since, before) = (Instant::now(), cpu_seconds());
    let mut loss = None;
    for _ in 0..steps {
        loss = trainer.step()?.loss();
    }
    let wall = since.elapsed().as_secs_f64();
    // The remaining work of the recorder's thread belongs to this block.
    thread::sleep(Duration::from_millis(20));
    let cpu = cpu_seconds().zip(before).map(|(now, before)| now - before);
    Ok(Block { wall, cpu, loss })
}

/// CPU seconds of the process, in user and system mode, as Linux reports them: in hundredths.
fn cpu_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    let mut ticks = fields.split_whitespace().skip(11).map(str::parse::<f64>);
    let (own, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some((own + system) / 100.0)
}

/// Prints the median of the ratios of `with` to `without`, and the ratio of the sums, each with its interval.
fn print(what: &str, unit: f64, pairs: &[(f64, f64)]) {
    let mut ratios: Vec<f64> = pairs.iter().map(|(with, without)| with / without).collect();
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let rank = (ratios.len() - 1) as f64 * share.clamp(0.0, 1.0);
        100.0 * (ratios[rank.round() as usize] - 1.0)
    };
    // The median of n values lies between those of the ranks n/2 ± 0.98 √n in 95 % of cases, for any distribution.
    let half_width = 0.98 / (ratios.len() as f64).sqrt();
    let (with, without) = pairs.iter().fold((0.0, 0.0), |(a, b), (with, without)| {
        (a + with, b + without)
    });
    // Two standard errors of a ratio of sums, from the distance of each pair from it.
    let ratio = with / without;
    let squares = pairs.iter().map(|(a, b)| (a - ratio * b).powi(2));
    let error = 200.0 * squares.sum::<f64>().sqrt() / without;
    println!(
        "{what}: {:+.2} % (median of {} pairs; 95 % interval {:+.2} to {:+.2} %; quartiles {:+.2} to {:+.2} %); \
         of the sums {:+.2} ± {error:.2} %; {:.2} against {:.2} ms per step",
        at(0.5),
        ratios.len(),
        at(0.5 - half_width),
        at(0.5 + half_width),
        at(0.25),
        at(0.75),
        100.0 * (ratio - 1.0),
        with * unit,
        without * unit,
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let mut with = trainer(folder.path(), true)?;
    let mut without = trainer(folder.path(), false)?;
    let warm = block(&mut with, WARM_UP)?;
    block(&mut without, WARM_UP)?;
    let spent = warm.cpu.unwrap_or(warm.wall).max(0.01);
    let steps = (BLOCK_SECONDS * WARM_UP as f64 / spent).ceil() as u64;
    println!("statistics and flight recorder on against off, in turn: blocks of {steps} steps");
    let (mut walls, mut cpus) = (Vec::new(), Vec::new());
    let since = Instant::now();
    while since.elapsed().as_secs_f64() < SECONDS {
        // Each goes first every other time.
        let (a, b);
        if walls.len() % 2 == 0 {
            a = block(&mut with, steps)?;
            b = block(&mut without, steps)?;
        } else {
            b = block(&mut without, steps)?;
            a = block(&mut with, steps)?;
        }
        assert_eq!(a.loss, b.loss, "the two runs differ");
        walls.push((a.wall, b.wall));
        cpus.extend(a.cpu.zip(b.cpu));
    }
    let unit = 1e3 / (walls.len() as f64 * steps as f64);
    print("CPU seconds of the process", unit, &cpus);
    print("time by the clock", unit, &walls);
    Ok(())
}
