//! `pipe debug …`: looks at what a run recorded, runs it again, and compares.
//!
//! What their exit statuses mean stands in [`EXIT_STATUS`].

mod diff;
mod first_bad;
mod replay;
mod stall;
mod trace;
mod view;

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
pub use view::ViewArgs;

/// Exit status where nothing differs.
pub const SAME: u8 = 0;
/// Exit status where something differs.
pub const DIFFERS: u8 = 1;
/// Exit status of a command line that asks for what cannot be.
pub const WRONG_USE: u8 = 2;
/// Exit status where there is nothing to tell.
pub const NOTHING: u8 = 3;

/// Exit statuses of all commands here, and when; `docs/replay.md` has the same table.
pub const EXIT_STATUS: [(u8, &str); 4] = [
    (
        SAME,
        "what was compared is the same; nothing bad was found; what was asked for is shown; the run waits for nothing",
    ),
    (
        DIFFERS,
        "a value, a row or weights differ; a stage failed when it was run again; a fault was found; the run waits, or no process holds its folder",
    ),
    (
        WRONG_USE,
        "a flag that there is not, or a stage that the pipeline has not",
    ),
    (
        NOTHING,
        "it cannot be told: no such run, step or sample, a stage or step that was not recorded, a file that is damaged, whether a run goes on, nothing that could be run again or compared",
    ),
];

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
    /// Writes the run as one HTML page: pipeline, curves, steps, samples, anomalies; serves it on request.
    View(ViewArgs),
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
        Debug::View(args) => view::view(args, registry, out),
    };
    match done {
        Ok(code) => Ok(code),
        Err(Failure::Write(error)) => Err(error),
        Err(Failure::Look(error)) => {
            match json {
                true => json_error(&error).write(out)?,
                false => writeln!(out, "error[{}]: {error}", error.code())?,
            }
            Ok(match error {
                LookError::Replay(error) if error.is_wrong_use() => WRONG_USE,
                _ => NOTHING,
            })
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
            Debug::View(_) => false,
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

fn write_notes(notes: &[String], out: &mut dyn Write) -> Result<(), Failure> {
    notes
        .iter()
        .try_for_each(|note| write(out, format_args!("note: {note}\n")))
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
