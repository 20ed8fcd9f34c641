//! The executable `pipe`.

mod bench;
mod kernels;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use bench::Bench;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kernels::OfGpu;
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

Exit status: 0 done, 1 a faulty pipeline, a run that failed, or a difference that `debug` found, 2 a wrong command line,
3 what `debug` cannot tell, 130 a run that was cancelled.
Environment: VERL_LOG=debug tells more (error, warn, info, debug, trace); NO_COLOR=1 takes colours away;
VERL_REGISTERS=plain, avx2 or avx512 names the widest vector registers that the CPU's kernels use (same bits, other speed);
CUDA_CACHE_PATH=DIR has the NVIDIA driver keep machine code of kernels in DIR instead of ~/.nv/ComputeCache.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a pipeline to its target step.
    Train(TrainArgs),
    /// Takes one step, so that the driver of the GPU keeps the kernels of a pipeline for a later start.
    Warmup(WarmupArgs),
    /// Checks a pipeline and tells every fault; loads no weights.
    Check(CheckArgs),
    /// Prints the checked graph, the batch arithmetic and a memory estimate.
    Plan(PlanArgs),
    /// Documents pipeline files, kinds of stages and parts, run folders, or one pipeline: JSON Schema or Markdown.
    Schema(SchemaArgs),
    /// Looks at what a run recorded, runs it again, and compares.
    #[command(subcommand)]
    Debug(Debug),
    /// Measures a device: whether it computes what the CPU does, and how fast.
    #[command(subcommand)]
    Bench(Bench),
    /// Turns a model of another format into a Hugging Face folder.
    #[command(subcommand)]
    Import(Import),
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
        Err(error) => return wrong_command_line(&error),
    };
    if let Err(error) = known_registers() {
        return wrong_environment(&error);
    }
    let registry = verl::registry();
    let mut out = Answer(Some(std::io::stdout().lock()));
    let result = match cli.command {
        Command::Train(args) => {
            drop(out);
            let versions = verl::versions();
            let kernels = Arc::new(OfGpu::counted());
            let status = cli::train::train(&args, &registry, versions, Some(kernels));
            return ExitCode::from(status);
        }
        Command::Warmup(args) => {
            let kernels = Arc::new(OfGpu::counted());
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
            tracing::error!("cannot write the answer: {error}");
            if asks_for_json() {
                // Nothing of the answer may have come out; where that is impossible too, the status tells.
                let told = JsonError::new(FILE, error.to_string(), "make room, or write elsewhere");
                let _ = told.write(&mut out);
            }
            ExitCode::FAILURE
        }
    }
}

/// Where the answer goes. A closed pipe (`pipe plan | head`) is how readers say that they have seen enough: what follows goes
/// nowhere, and the exit status stays what it would have been.
struct Answer(Option<std::io::StdoutLock<'static>>);

impl Answer {
    fn tell<T>(
        &mut self,
        otherwise: T,
        tell: impl FnOnce(&mut std::io::StdoutLock<'static>) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let Some(out) = &mut self.0 else {
            return Ok(otherwise);
        };
        match tell(out) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                self.0 = None;
                Ok(otherwise)
            }
            told => told,
        }
    }
}

impl Write for Answer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.tell(bytes.len(), |out| out.write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.tell((), |out| out.flush())
    }
}

/// Whether the command line asks for JSON; for a command line that cannot be parsed too.
fn asks_for_json() -> bool {
    std::env::args_os().any(|word| word == "--json")
}

/// Refuses a name of registers that do not exist.
fn known_registers() -> Result<(), String> {
    match std::env::var_os(registers::VARIABLE) {
        Some(name) => registers::at_most(&name.to_string_lossy()).map(drop),
        None => Ok(()),
    }
}

/// Reports an environment variable that cannot be followed.
fn wrong_environment(error: &str) -> ExitCode {
    if asks_for_json() {
        let report = JsonError::new(USAGE, error, "change or unset the variable");
        let _ = report.write(&mut std::io::stdout());
    } else {
        let _ = writeln!(std::io::stderr(), "error: {error}");
    }
    ExitCode::from(2)
}

/// Tells what is wrong with the command line, or the help that it asks for.
fn wrong_command_line(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && asks_for_json() {
        let text = error.render().to_string();
        let about = text.lines().map(str::trim);
        let about = about.take_while(|line| !line.starts_with("Usage:"));
        let about: Vec<&str> = about.filter(|line| !line.is_empty()).collect();
        let message = about.join(" ");
        let message = message.trim_start_matches("error: ");
        let told = JsonError::new(
            USAGE,
            message,
            "`--help` behind the command tells what it takes",
        );
        let _ = told.write(&mut std::io::stdout());
    }
    error.exit()
}

/// Whether an environment variable is there and not empty.
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
