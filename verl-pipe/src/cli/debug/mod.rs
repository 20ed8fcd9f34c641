//! `pipe debug …`: looks at what a run recorded, runs it again, and compares.
//!
//! Exit codes: 0 where nothing is wrong; 1 where something differs or was found; 3 where there is nothing to look at (no
//! such run, step, stage or sample; a step that cannot be replayed).

mod diff;
mod first_bad;
mod replay;
mod stall;
mod trace;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;

use super::json_error::{JsonError, json_findings};
use crate::diagnostic::Findings;
use crate::registry::Registry;
use crate::trace::traced_run::LookError;

pub use diff::DiffArgs;
pub use first_bad::FirstBadArgs;
pub use replay::ReplayArgs;
pub use stall::StallArgs;
pub use trace::TraceArgs;

/// Something differs, or a fault was found.
pub const DIFFERS: u8 = 1;
/// There is nothing to look at.
pub const NOTHING: u8 = 3;

/// Commands that look at a traced run.
#[derive(Debug, Clone, Subcommand)]
pub enum Debug {
    /// Shows a recorded step: all stages with statistics, or one stage's samples token by token.
    Trace(TraceArgs),
    /// Runs recorded stages again and compares every value with the recorded one.
    Replay(ReplayArgs),
    /// Finds the first step, stage, key and row where something went wrong.
    FirstBad(FirstBadArgs),
    /// Compares two runs: where they part, and how far apart they go from there.
    Diff(DiffArgs),
    /// Tells what a run that does not move waits for.
    Stall(StallArgs),
}

/// Runs a command. Returns the exit code.
///
/// # Errors
/// When `out` cannot be written.
pub fn debug(command: &Debug, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    let json = command.json();
    let done = match command {
        Debug::Trace(args) => trace::trace(args, registry, out),
        Debug::Replay(args) => replay::replay(args, registry, out),
        Debug::FirstBad(args) => first_bad::first_bad(args, registry, out),
        Debug::Diff(args) => diff::diff(args, registry, out),
        Debug::Stall(args) => stall::stall(args, out),
    };
    match done {
        Ok(code) => Ok(code),
        Err(Failure::Write(error)) => Err(error),
        Err(Failure::Look(error)) => {
            match json {
                true => json_error(&error).write(out)?,
                false => writeln!(out, "error[{}]: {error}", error.code())?,
            }
            Ok(NOTHING)
        }
        Err(Failure::Nothing(what)) => {
            match json {
                true => JsonError::new(NOT_RECORDED, what, RECORD_SOME).write(out)?,
                false => writeln!(out, "{what}; {RECORD_SOME}")?,
            }
            Ok(NOTHING)
        }
    }
}

impl Debug {
    /// Whether the answer is to be JSON.
    fn json(&self) -> bool {
        match self {
            Debug::Trace(args) => args.json,
            Debug::Replay(args) => args.json,
            Debug::FirstBad(args) => args.json,
            Debug::Diff(args) => args.json,
            Debug::Stall(args) => args.json,
        }
    }
}

/// Code of a trace in which no step is recorded: that of a step that is not there.
const NOT_RECORDED: &str = "T004";
/// What to do about it.
const RECORD_SOME: &str = "start the run with --debug";

/// The error as a program reads it.
fn json_error(error: &LookError) -> JsonError {
    let code = error.code();
    let page = format!("docs/errors/{code}.md says what happened and what to do");
    let help = match error {
        LookError::NoRun { near, .. } => match near {
            Some(near) => format!("did you mean `{near}`?"),
            None => "give the folder of a run, the one that `run.dir` named".to_owned(),
        },
        LookError::Step {
            near: Some(near), ..
        } => format!("the nearest recorded step is {near}"),
        LookError::Sample { help, .. } => help.trim_start_matches("; ").to_owned(),
        LookError::Config(findings) => match findings.first() {
            Some(first) => first.help.clone(),
            None => page,
        },
        _ => page,
    };
    let mut told = JsonError::new(code, error.to_string(), help);
    if let LookError::Config(findings) = error {
        told.error.message =
            "the configuration of the run is not accepted by this version".to_owned();
        told.error.why = Findings(findings.clone()).to_string();
        told.error.findings = json_findings(findings);
    }
    told
}

/// Why a command gave no answer.
enum Failure {
    Look(LookError),
    /// The run can be read, and nothing was recorded that the command looks at.
    Nothing(&'static str),
    Write(io::Error),
}

impl<E: Into<LookError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Look(error.into())
    }
}

fn write(out: &mut dyn Write, text: impl std::fmt::Display) -> Result<(), Failure> {
    write!(out, "{text}").map_err(Failure::Write)
}

fn write_json(out: &mut dyn Write, value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::Write(e.into()))?;
    write(out, format_args!("{text}\n"))
}

/// The run that a command is about.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArg {
    /// Folder of the run.
    #[arg(long = "run", value_name = "DIR")]
    pub dir: PathBuf,
}
