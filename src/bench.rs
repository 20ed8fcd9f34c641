//! `pipe bench`: compares the results of a device with the CPU, and measures its speed.

mod failure;

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::DType;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use verl::models::agreement::{self, Distance, Measure, Subject, subjects, wide};
use verl::models::bench::{
    self, Ceilings, KernelWork, PRESETS, RolloutWork, StepWork, Times, TrainWork, preset,
    random_decoder,
};
use verl::models::compiled;
use verl::models::decoder::Decoder;
use verl::models::device::{DeviceKind, Preflight, device, preflight};
use verl::models::registers;
use verl::pipe::cli::json_error::{BENCH, JsonError};

use failure::Failure;

/// Measures a device: agreement with the CPU, then speed.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Compares everything a decoder computes with the CPU's result; fails if a bound is broken.
    Check(CheckArgs),
    /// Sampling: tokens per second, time per step, share of the memory bandwidth.
    Rollout(RolloutArgs),
    /// Training: tokens per second, share of the matrix rate.
    Train(TrainArgs),
    /// A complete GRPO step, without an engine around it.
    Step(StepArgs),
    /// Single operations: times, shares of the memory bandwidth and of the matrix rate.
    Kernels(KernelArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Common {
    /// `cpu` or `cuda:N`.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    common: Common,
    /// Model folders to compare, instead of small decoders with drawn weights.
    #[arg(long)]
    model: Vec<PathBuf>,
    /// Types of the weights on the device.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "f32,bf16")]
    dtype: Vec<Dtype>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    common: Common,
    /// A model folder, or a shape with random weights: tiny, smollm2-135m, qwen2.5-0.5b.
    #[arg(long, default_value = "tiny")]
    model: String,
    /// Type of the weights; the default is bf16 on a GPU and f32 on the CPU.
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Number of timed runs, at least one.
    #[arg(long, default_value_t = 3)]
    runs: usize,
}

#[derive(Debug, Args)]
pub(crate) struct RolloutArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Number of responses.
    #[arg(long, default_value_t = 16)]
    sequences: usize,
    /// Tokens per prompt; prompt and response together must fit into the model's context.
    #[arg(long, default_value_t = 16)]
    prompt: usize,
    /// Tokens per response, at least two.
    #[arg(long, default_value_t = 32)]
    new: usize,
    /// Mixed lengths: prompts from `prompt`/16 to `prompt` tokens, responses from `new`/64 to `new` tokens.
    #[arg(long)]
    mixed: bool,
    /// Responses per prompt.
    #[arg(long, default_value_t = 1)]
    samples: usize,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Rows per step.
    #[arg(long, default_value_t = 8)]
    rows: usize,
    /// Predicted tokens of the longest row; one more token precedes them.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Rows per micro-batch.
    #[arg(long, default_value_t = 8)]
    micro: usize,
    /// Mixed lengths: rows from `tokens`/4 to `tokens` tokens.
    #[arg(long)]
    mixed: bool,
    /// Keep only the inputs of layers and recompute the rest in the backward pass.
    #[arg(long)]
    recompute: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Number of prompts.
    #[arg(long, default_value_t = 4)]
    prompts: usize,
    /// Responses per prompt.
    #[arg(long, default_value_t = 4)]
    samples: usize,
    /// Tokens per prompt; prompt and response together must fit into the model's context.
    #[arg(long, default_value_t = 16)]
    prompt: usize,
    /// Tokens per response.
    #[arg(long, default_value_t = 16)]
    new: usize,
    /// Rows per micro-batch.
    #[arg(long, default_value_t = 16)]
    micro: usize,
    /// Weight of the KL to a reference; with 0 there is no reference.
    #[arg(long, default_value_t = 0.0)]
    beta: f64,
}

#[derive(Debug, Args)]
pub(crate) struct KernelArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens per call.
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 64)]
    sequence: usize,
    /// Parameters per optimiser step.
    #[arg(long, default_value_t = 1 << 20)]
    parameters: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    Bf16,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::BF16,
        }
    }
}

/// Runs the command. Exit code 1 if a bound is broken or nothing could be measured.
///
/// # Errors
/// When `out` cannot be written.
pub(crate) fn bench(command: &Bench, out: &mut dyn Write) -> io::Result<u8> {
    compiled::begin();
    let answer = match command {
        Bench::Check(args) => check(args),
        Bench::Rollout(args) => rollout(args),
        Bench::Train(args) => train(args),
        Bench::Step(args) => step(args),
        Bench::Kernels(args) => kernels(args),
    };
    match answer {
        Ok(answer) => {
            out.write_all(answer.text.as_bytes())?;
            Ok(u8::from(!answer.good))
        }
        Err(error) => {
            match command.json() {
                true => JsonError::new(BENCH, error.message, error.help).write(out)?,
                false => {
                    writeln!(io::stderr(), "error: {}", error.message)?;
                    writeln!(io::stderr(), "  help: {}", error.help)?;
                }
            }
            Ok(1)
        }
    }
}

impl Bench {
    /// Whether to print JSON.
    fn json(&self) -> bool {
        match self {
            Bench::Check(args) => args.common.json,
            Bench::Rollout(args) => args.model.common.json,
            Bench::Train(args) => args.model.common.json,
            Bench::Step(args) => args.model.common.json,
            Bench::Kernels(args) => args.model.common.json,
        }
    }
}

struct Answer {
    text: String,
    good: bool,
}

fn check(args: &CheckArgs) -> Result<Answer, Failure> {
    let found = preflight(&args.common.device)?;
    let device = device(&args.common.device)?;
    let subjects = if args.model.is_empty() {
        let mut subjects = subjects();
        if !DeviceKind::of(&device).is_host() {
            subjects.push(wide());
        }
        subjects
    } else {
        let folders = args.model.iter().map(|dir| Subject::folder(dir));
        folders.collect::<Result<_, _>>()?
    };
    let mut distances = Vec::new();
    for &dtype in &args.dtype {
        for subject in &subjects {
            distances.extend(agreement::compare(subject, &device, dtype.into())?);
        }
    }
    let good = distances.iter().all(Distance::holds);
    let text = if args.common.json {
        let distances: Vec<Value> = distances
            .iter()
            .map(|distance| {
                let mut value = serde_json::to_value(distance).unwrap_or_default();
                value["holds"] = distance.holds().into();
                value
            })
            .collect();
        let kernels = compiled::tally();
        line(&json!({ "device": found, "holds": good, "kernels": kernels, "distances": distances }))
    } else {
        let mut text = table(&found, &distances);
        if let Some(tally) = compiled::tally() {
            text += &row("kernels", WIDTH, &tally.to_string());
        }
        text
    };
    Ok(Answer { text, good })
}

fn table(found: &Preflight, distances: &[Distance]) -> String {
    let mut text = format!(
        "{found}, against the CPU in f32\n\n{:<10} {:<5} {:<42} {:>10} {:>9}\n",
        "decoder", "dtype", "quantity", "distance", "bound"
    );
    for distance in distances {
        let measure = match distance.measure {
            Measure::Relative => "relative",
            Measure::Largest => "largest",
            Measure::Mean => "mean",
            Measure::Count => "count",
        };
        let quantity = format!("{} ({measure})", distance.quantity);
        let Distance {
            subject,
            dtype,
            distance: far,
            bound,
            at,
            ..
        } = distance;
        let broken = if distance.holds() { "" } else { "  BROKEN" };
        let at = at
            .as_ref()
            .map(|at| format!("  at {at}"))
            .unwrap_or_default();
        text += &format!(
            "{subject:<10} {dtype:<5} {quantity:<42} {far:>10.2e} {bound:>9.0e}{broken}{at}\n"
        );
    }
    let broken = distances
        .iter()
        .filter(|distance| !distance.holds())
        .count();
    text += &match broken {
        0 => format!("\nall {} bounds hold\n", distances.len()),
        _ => format!("\n{broken} of {} bounds are broken\n", distances.len()),
    };
    text
}

/// A decoder on a device, and the rates of the device.
struct Place {
    decoder: Decoder,
    ceilings: Ceilings,
    heading: Heading,
}

/// What an answer says before the figures.
struct Heading {
    found: Preflight,
    dtype: DType,
    start: Start,
}

/// The time of the preparation, in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Start {
    preflight: f64,
    load: f64,
    ceilings: f64,
}

impl Start {
    fn json(self) -> Value {
        json!({
            "preflight_ms": self.preflight,
            "load_ms": self.load,
            "ceilings_ms": self.ceilings,
            "kernels": compiled::tally(),
        })
    }

    fn lines(self, width: usize) -> String {
        let mut text = row(
            "start",
            width,
            &format!(
                "preflight {:.0} ms, load {:.0} ms, rates of the device {:.0} ms",
                self.preflight, self.load, self.ceilings
            ),
        );
        if let Some(tally) = compiled::tally() {
            text += &row("kernels", width, &tally.to_string());
        }
        text
    }
}

/// Minimum width of the names before the figures.
const WIDTH: usize = 22;

fn row(name: &str, width: usize, value: &str) -> String {
    format!("  {name:<width$} {value}\n")
}

/// Milliseconds since `since`, which is reset to now.
fn lap(since: &mut Instant) -> f64 {
    let now = Instant::now();
    1e3 * now
        .duration_since(std::mem::replace(since, now))
        .as_secs_f64()
}

impl ModelArgs {
    fn place(&self) -> Result<Place, Failure> {
        let mut since = Instant::now();
        let found = preflight(&self.common.device)?;
        let preflight = lap(&mut since);
        let device = device(&self.common.device)?;
        let dtype = match self.dtype {
            Some(dtype) => dtype.into(),
            None if DeviceKind::of(&device).bf16() => DType::BF16,
            None => DType::F32,
        };
        let decoder = match preset(&self.model) {
            Some(config) => random_decoder(config, &device, dtype),
            None => {
                let dir = PathBuf::from(&self.model);
                if !dir.exists() {
                    let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
                    return Err(Failure::new(
                        format!("`{}` is neither a model folder nor a shape", self.model),
                        format!(
                            "set `--model` to a folder or to one of {}",
                            names.join(", ")
                        ),
                    ));
                }
                Decoder::load_as(&dir, &device, dtype)?.0
            }
        };
        let load = lap(&mut since);
        let quick = self.model == "tiny";
        let ceilings = Ceilings::measure(&device, dtype, quick)?;
        let start = Start {
            preflight,
            load,
            ceilings: lap(&mut since),
        };
        Ok(Place {
            ceilings,
            decoder,
            heading: Heading {
                found,
                dtype,
                start,
            },
        })
    }

    fn answer(
        &self,
        heading: &Heading,
        figures: &impl serde::Serialize,
        lines: &[(&str, String)],
    ) -> Result<Answer, Failure> {
        let Heading {
            found,
            dtype,
            start,
        } = heading;
        let dtype = format!("{dtype:?}").to_lowercase();
        let text = if self.common.json {
            line(&json!({
                "device": found,
                "model": self.model,
                "dtype": dtype,
                "start": start.json(),
                "figures": serde_json::to_value(figures).unwrap_or_default(),
            }))
        } else {
            let widths = lines.iter().map(|(name, _)| name.len());
            let width = widths.max().unwrap_or(0).max(WIDTH);
            let mut text = format!("{} in {dtype} on {found}\n", self.model);
            for (name, value) in lines {
                text += &row(name, width, value);
            }
            text + &start.lines(width)
        };
        Ok(Answer { text, good: true })
    }
}

fn rollout(args: &RolloutArgs) -> Result<Answer, Failure> {
    let place = args.model.place()?;
    let work = RolloutWork {
        sequences: args.sequences,
        prompt_tokens: args.prompt,
        new_tokens: args.new,
        mixed: args.mixed,
        shared_prompts: args.samples,
        runs: args.model.runs,
    };
    let figures = bench::rollout(&place.decoder, &work, &place.ceilings)?;
    let lines = [
        ("tokens/s", format!("{:.0}", figures.tokens_per_s)),
        ("run", times(&figures.run)),
        ("prompts", format!("{:.2} ms", figures.prompts_ms)),
        ("step", format!("{:.3} ms", figures.step_ms)),
        (
            "idle",
            format!("{:.1} % of the rows' steps", 1e2 * figures.idle_share),
        ),
        (
            "bandwidth",
            share(
                figures.bandwidth_share,
                place.ceilings.copy_gb_s,
                "GB/s of a copy",
            ),
        ),
        ("memory", memory(figures.peak_bytes)),
    ];
    args.model.answer(&place.heading, &figures, &lines)
}

fn train(args: &TrainArgs) -> Result<Answer, Failure> {
    let place = args.model.place()?;
    let work = TrainWork {
        rows: args.rows,
        tokens: args.tokens,
        micro_rows: args.micro,
        mixed: args.mixed,
        recompute: args.recompute,
        runs: args.model.runs,
    };
    let figures = bench::train(place.decoder, &work, &place.ceilings)?;
    let lines = [
        ("tokens/s", format!("{:.0}", figures.tokens_per_s)),
        ("step", times(&figures.step)),
        ("optimiser", format!("{:.2} ms of it", figures.optimizer_ms)),
        ("padding", format!("{:.1} %", 1e2 * figures.padding_share)),
        (
            "matrix rate",
            share(
                figures.matrix_share,
                place.ceilings.product_tflop_s,
                "TFLOP/s of a large product",
            ),
        ),
        ("loss", format!("{:.4}", figures.loss)),
        ("memory", memory(figures.peak_bytes)),
    ];
    args.model.answer(&place.heading, &figures, &lines)
}

fn step(args: &StepArgs) -> Result<Answer, Failure> {
    let place = args.model.place()?;
    let work = StepWork {
        prompts: args.prompts,
        samples: args.samples,
        prompt_tokens: args.prompt,
        new_tokens: args.new,
        micro_rows: args.micro,
        beta: args.beta,
        runs: args.model.runs,
    };
    let figures = bench::step(place.decoder, &work, &place.ceilings)?;
    let lines = [
        ("step", times(&figures.step)),
        ("generate", format!("{:.1} ms", figures.generate_ms)),
        ("reference", format!("{:.1} ms", figures.reference_ms)),
        ("update", format!("{:.1} ms", figures.update_ms)),
        ("tokens/s", format!("{:.0}", figures.tokens_per_s)),
        (
            "first step done after",
            format!("{:.0} ms", figures.first_step_ms),
        ),
        ("memory", memory(figures.peak_bytes)),
    ];
    args.model.answer(&place.heading, &figures, &lines)
}

fn kernels(args: &KernelArgs) -> Result<Answer, Failure> {
    let place = args.model.place()?;
    let work = KernelWork {
        tokens: args.tokens,
        sequence: args.sequence,
        parameters: args.parameters,
        runs: args.model.runs,
    };
    let device = device(&args.model.common.device)?;
    let (config, dtype) = (&place.decoder.config, place.heading.dtype);
    let figures = bench::kernels(config, &device, dtype, &work, &place.ceilings)?;
    let ceilings = &place.ceilings;
    let peak = ceilings.arithmetic_tflop_s.map(|peak| {
        let share = 1e2 * ceilings.product_tflop_s / peak;
        let line = format!(
            "{peak:.3} TFLOP/s with {} registers; {share:.1} % of it in a large product",
            registers::used().name()
        );
        ("peak", line)
    });
    let kernels = figures.kernels.iter();
    let lines: Vec<(&str, String)> = peak
        .into_iter()
        .chain(kernels.map(|own| {
            let shares = [
                (own.matrix_share, "matrix rate"),
                (own.arithmetic_share, "peak"),
            ];
            let shares = shares.map(|(share, of)| {
                share.map_or(String::new(), |share| {
                    format!("{:5.1} % of the {of}", 1e2 * share)
                })
            });
            let matrix = shares.join("  ");
            let figures = format!(
                "{:<22} {:>10.4} ms {:>7.1} % of a copy  {matrix}",
                own.sizes,
                own.times.median_ms,
                1e2 * own.bandwidth_share
            );
            (own.name.as_str(), figures.trim_end().to_owned())
        }))
        .collect();
    args.model.answer(&place.heading, &figures, &lines)
}

fn times(times: &Times) -> String {
    format!(
        "{:.2} ms median of {} ({:.2} to {:.2})",
        times.median_ms, times.runs, times.min_ms, times.max_ms
    )
}

fn share(share: f64, of: f64, what: &str) -> String {
    format!("{:.1} % of {of:.1} {what}", 1e2 * share)
}

fn memory(bytes: Option<u64>) -> String {
    match bytes {
        Some(bytes) => format!("{:.2} GiB at most", bytes as f64 / (1u64 << 30) as f64),
        None => "unknown".to_owned(),
    }
}

fn line(value: &Value) -> String {
    format!("{value}\n")
}
