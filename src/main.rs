//! The executable `pipe`.

mod bench;
mod kernels;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use bench::Bench;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kernels::GpuKernels;
use tracing_subscriber::EnvFilter;
use verl::models::gguf::{self, WeightType};
use verl::models::registers;
use verl::pipe::cli;
use verl::pipe::cli::check::CheckArgs;
use verl::pipe::cli::debug::Debug;
use verl::pipe::cli::json_error::{FILE, JsonError, USAGE};
use verl::pipe::cli::plan::PlanArgs;
use verl::pipe::cli::schema::SchemaArgs;
use verl::pipe::cli::train::TrainArgs;
use verl::pipe::cli::warmup::WarmupArgs;
use verl::pipe::run::console::LogWriter;

/// Typed pipelines for reinforcement-learning post-training of language models.
#[derive(Debug, Parser)]
#[command(name = "pipe", version, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  pipe check examples/pipelines/grpo_addition.toml
  pipe train examples/pipelines/grpo_addition.toml steps=20 run.dir=runs/short
  pipe train examples/pipelines/grpo_addition.toml --debug-trace-step 500 --debug-trace-stages generate,reward

Exit status: 0 success, 1 an invalid pipeline, a failed run, or a difference that `debug` found, 2 an invalid command line,
3 no result from `debug`, 130 a cancelled run.
Environment: VERL_LOG=debug prints more (error, warn, info, debug, trace); NO_COLOR=1 turns colours off;
VERL_REGISTERS=plain, avx2 or avx512 limits the vector registers that CPU kernels use (same bits, different speed);
CUDA_CACHE_PATH=DIR makes the NVIDIA driver cache the machine code of kernels in DIR instead of ~/.nv/ComputeCache.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a pipeline to its target step.
    Train(TrainArgs),
    /// Runs one step, so that the GPU driver caches the kernels of a pipeline for later starts.
    Warmup(WarmupArgs),
    /// Checks a pipeline and reports every error; loads no weights.
    Check(CheckArgs),
    /// Prints the checked graph, the batch arithmetic and a memory estimate.
    Plan(PlanArgs),
    /// Documents pipeline files, kinds of stages and parts, run folders, or one pipeline as JSON Schema or Markdown.
    Schema(SchemaArgs),
    /// Inspects, replays and compares what runs recorded.
    #[command(subcommand)]
    Debug(Debug),
    /// Measures a device: whether its results agree with the CPU, and how fast it is.
    #[command(subcommand)]
    Bench(Bench),
    /// Converts a model in another format into a Hugging Face folder.
    #[command(subcommand)]
    Import(Import),
    /// Serves a device group of the run that starts this process; not for use by hand.
    #[command(hide = true)]
    Worker,
}

#[derive(Debug, Subcommand)]
enum Import {
    /// A GGUF file of architecture llama, qwen2 or qwen3.
    Gguf(GgufArgs),
}

#[derive(Debug, Args)]
struct GgufArgs {
    /// The GGUF file.
    file: PathBuf,
    /// The folder to write; must not exist.
    #[arg(long)]
    out: PathBuf,
    /// Type of the written weights.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Weights,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Weights {
    Bf16,
    F16,
    F32,
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("VERL_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter)
        .with_ansi(std::io::stderr().is_terminal() && !set("NO_COLOR"))
        .with_target(false)
        .without_time()
        .init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return command_line_error(&error),
    };
    if let Err(error) = check_registers() {
        return environment_error(&error);
    }
    let registry = verl::registry();
    cli::worker::register();
    let mut out = Output(Some(std::io::stdout().lock()));
    let result = match cli.command {
        Command::Train(args) => {
            drop(out);
            let versions = verl::versions();
            let kernels = Arc::new(GpuKernels::counted());
            let status = cli::train::train(&args, &registry, versions, Some(kernels));
            return ExitCode::from(status);
        }
        Command::Worker => {
            drop(out);
            return ExitCode::from(cli::worker::worker(registry));
        }
        Command::Warmup(args) => {
            let kernels = Arc::new(GpuKernels::counted());
            cli::warmup::warmup(&args, &registry, kernels, &mut out)
        }
        Command::Check(args) => cli::check::check(&args, &registry, &mut out),
        Command::Plan(args) => cli::plan::plan(&args, &registry, &mut out),
        Command::Schema(args) => cli::schema::schema(&args, &registry, &mut out),
        Command::Debug(command) => cli::debug::debug(&command, &registry, &mut out),
        Command::Bench(command) => bench::bench(&command, &mut out),
        Command::Import(Import::Gguf(args)) => import(&args, &mut out),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            tracing::error!("cannot write the output: {error}");
            if requests_json() {
                // Nothing may have been written yet. If this fails too, only the exit status reports the error.
                let help = "free some space, or write elsewhere";
                let report = JsonError::new(FILE, error.to_string(), help);
                let _ = report.write(&mut out);
            }
            ExitCode::FAILURE
        }
    }
}

/// The standard output. A closed pipe (`pipe plan | head`) is not an error: further output is discarded, and the exit
/// status stays the same.
struct Output(Option<std::io::StdoutLock<'static>>);

impl Output {
    fn with_stdout<T>(
        &mut self,
        if_closed: T,
        act: impl FnOnce(&mut std::io::StdoutLock<'static>) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let Some(out) = &mut self.0 else {
            return Ok(if_closed);
        };
        match act(out) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                self.0 = None;
                Ok(if_closed)
            }
            result => result,
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.with_stdout(bytes.len(), |out| out.write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.with_stdout((), |out| out.flush())
    }
}

/// Whether the command line requests JSON, even if it cannot be parsed.
fn requests_json() -> bool {
    std::env::args_os().any(|word| word == "--json")
}

/// Rejects unknown names of vector registers.
fn check_registers() -> Result<(), String> {
    match std::env::var_os(registers::VARIABLE) {
        Some(name) => registers::at_most(&name.to_string_lossy()).map(drop),
        None => Ok(()),
    }
}

/// Reports an invalid environment variable.
fn environment_error(error: &str) -> ExitCode {
    if requests_json() {
        let report = JsonError::new(USAGE, error, "change or unset the variable");
        let _ = report.write(&mut std::io::stdout());
    } else {
        let _ = writeln!(std::io::stderr(), "error: {error}");
    }
    ExitCode::from(2)
}

/// Prints what is wrong with the command line, or the help that it requests.
fn command_line_error(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && requests_json() {
        let text = error.render().to_string();
        let about = text.lines().map(str::trim);
        let about = about.take_while(|line| !line.starts_with("Usage:"));
        let about: Vec<&str> = about.filter(|line| !line.is_empty()).collect();
        let message = about.join(" ");
        let message = message.trim_start_matches("error: ");
        let report = JsonError::new(USAGE, message, "run the command with `--help` for usage");
        let _ = report.write(&mut std::io::stdout());
    }
    error.exit()
}

/// Whether an environment variable is set and not empty.
fn set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

fn import(args: &GgufArgs, out: &mut dyn Write) -> std::io::Result<u8> {
    let weights = match args.dtype {
        Weights::Bf16 => WeightType::Bf16,
        Weights::F16 => WeightType::F16,
        Weights::F32 => WeightType::F32,
    };
    match gguf::import(&args.file, &args.out, weights) {
        Ok(report) => writeln!(out, "{report}").map(|()| 0),
        Err(error) => {
            writeln!(std::io::stderr(), "error: {error}")?;
            Ok(1)
        }
    }
}
