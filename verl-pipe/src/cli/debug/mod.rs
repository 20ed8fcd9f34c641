//! `pipe debug …`: shows what a run recorded, runs it again, and compares.
//!
//! [`EXIT_STATUS`] documents the exit statuses.

mod diff;
mod first_bad;
mod replay;
mod stall;
mod timeline;
mod trace;
mod view;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;
use verl_declare::registry::Registry;
use verl_trace::replay::InspectError;
use verl_view::ServeError;
use verl_view::timeline::TimelineError;
use verl_words::diagnostic::Findings;

use super::json_error::{JsonError, json_findings};

pub use diff::DiffArgs;
pub use first_bad::FirstBadArgs;
pub use replay::ReplayArgs;
pub use stall::StallArgs;
pub use timeline::TimelineArgs;
pub use trace::TraceArgs;
pub use view::ViewArgs;

/// Exit status if nothing differs.
pub const SAME: u8 = 0;
/// Exit status if something differs.
pub const DIFFERS: u8 = 1;
/// Exit status of an invalid command line.
pub const WRONG_USE: u8 = 2;
/// Exit status if there is no result.
pub const NOTHING: u8 = 3;

/// Exit statuses of all debug commands; `docs/replay.md` has the same table.
pub const EXIT_STATUS: [(u8, &str); 4] = [
    (
        SAME,
        "nothing differs; nothing bad was found; the requested output is shown; the run is not stalled",
    ),
    (
        DIFFERS,
        "a value, a row or weights differ; a stage failed when it was run again; a fault was found; the run is stalled, or no process has its folder locked",
    ),
    (
        WRONG_USE,
        "an unknown flag, or a stage that the pipeline does not have",
    ),
    (
        NOTHING,
        "there is no result: the run, step or sample does not exist, a stage or step was not recorded, a file is damaged, it is unknown whether the run is in progress, or nothing could be run again or compared",
    ),
];

/// Commands that inspect a traced run.
#[derive(Debug, Clone, Subcommand)]
pub enum Debug {
    /// Shows a recorded step: all stages with statistics, or one stage's samples token by token.
    Trace(TraceArgs),
    /// Runs recorded stages again and compares every value with the recorded one.
    Replay(ReplayArgs),
    /// Finds the first step, stage, key and row where something went wrong.
    FirstBad(FirstBadArgs),
    /// Compares two runs: where they diverge, and by how much from there on.
    Diff(DiffArgs),
    /// Shows what a stalled run is waiting for.
    Stall(StallArgs),
    /// Shows a step as it ran: each stage and call on the line of its group, and what groups waited for.
    Timeline(TimelineArgs),
    /// Writes the run as one HTML page: pipeline, curves, steps, samples, anomalies; serves it on request.
    View(ViewArgs),
}

/// Runs a command. Returns the exit code.
///
/// # Errors
/// If `out` cannot be written.
pub fn debug(command: &Debug, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    let json = command.json();
    let done = match command {
        Debug::Trace(args) => trace::trace(args, registry, out),
        Debug::Replay(args) => replay::replay(args, registry, out),
        Debug::FirstBad(args) => first_bad::first_bad(args, registry, out),
        Debug::Diff(args) => diff::diff(args, registry, out),
        Debug::Stall(args) => stall::stall(args, out),
        Debug::Timeline(args) => timeline::timeline(args, out),
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
                InspectError::Replay(error) if error.is_wrong_use() => WRONG_USE,
                _ => NOTHING,
            })
        }
        Err(Failure::Serve(error)) => {
            writeln!(out, "error[{}]: {error}", error.code())?;
            Ok(NOTHING)
        }
        Err(Failure::Timeline(error)) => {
            writeln!(out, "error[{}]: {error}", error.code())?;
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
    /// Whether the output is JSON.
    fn json(&self) -> bool {
        match self {
            Debug::Trace(args) => args.json,
            Debug::Replay(args) => args.json,
            Debug::FirstBad(args) => args.json,
            Debug::Diff(args) => args.json,
            Debug::Stall(args) => args.json,
            Debug::Timeline(_) | Debug::View(_) => false,
        }
    }
}

/// Code of a trace without recorded steps: the same as of a step that was not recorded.
const NOT_RECORDED: &str = "T004";
/// Help for such a trace.
const RECORD_SOME: &str = "start the run with --debug";

/// The error in machine-readable form.
fn json_error(error: &InspectError) -> JsonError {
    let code = error.code();
    let page = format!("see `docs/errors/{code}.md`");
    let help = match error {
        InspectError::NoRun { near, .. } => match near {
            Some(near) => format!("did you mean `{near}`?"),
            None => "use a run folder, as set by `run.dir`".to_owned(),
        },
        InspectError::Step {
            near: Some(near), ..
        } => format!("the nearest recorded step is {near}"),
        InspectError::Sample { help, .. } => help.trim_start_matches("; ").to_owned(),
        InspectError::Config(findings) => match findings.first() {
            Some(first) => first.help.clone(),
            None => page,
        },
        _ => page,
    };
    let mut failure = JsonError::new(code, error.to_string(), help);
    if let InspectError::Config(findings) = error {
        failure.error.message =
            "this version does not accept the configuration of the run".to_owned();
        failure.error.why = Findings(findings.clone()).to_string();
        failure.error.findings = json_findings(findings);
    }
    failure
}

/// Why a command has no result.
enum Failure {
    Look(InspectError),
    /// The page cannot be served; the command has no JSON output.
    Serve(ServeError),
    /// The timeline has no such step; the command has no JSON output.
    Timeline(TimelineError),
    /// The run can be read, but nothing that the command needs was recorded.
    Nothing(&'static str),
    Write(io::Error),
}

impl<E: Into<InspectError>> From<E> for Failure {
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

/// The run of a command.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArg {
    /// Folder of the run.
    #[arg(long = "run", value_name = "DIR")]
    pub dir: PathBuf,
}
