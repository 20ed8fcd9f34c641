//! `pipe debug stall`: what a stalled run is waiting for.

use std::io::Write;

use clap::Args;
use serde_json::Value;
use verl_run::stall::StallReport;
use verl_trace::replay::InspectError;
use verl_train::folder_lock::{ABANDONED, Process, process_of};

use super::{DIFFERS, Failure, NOTHING, RunArg, SAME, write, write_json};

const UNKNOWN: &str = "it is unknown whether the run is in progress, as status.json says: its process locks metrics.jsonl, \
     which is missing or cannot be checked for a lock on this system";

/// Arguments of `pipe debug stall`.
#[derive(Debug, Clone, Args)]
pub struct StallArgs {
    /// The run; it may be in progress.
    #[command(flatten)]
    pub run: RunArg,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn stall(args: &StallArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let dir = &args.run.dir;
    let no_run = |reason: String| InspectError::NoRun {
        dir: dir.clone(),
        reason,
        near: None,
    };
    if !dir.is_dir() {
        return Err(no_run("there is no such folder".to_owned()).into());
    }
    if !dir.join("status.json").is_file() {
        return Err(no_run("there is no status.json in it".to_owned()).into());
    }
    let report = StallReport::read(dir);
    let report = report.map_err(|e| no_run(format!("its stall.json cannot be read: {e}")))?;
    let process = process_of(dir)?;
    let code = match (&report, process) {
        (Some(_), _) | (None, Process::Gone) => DIFFERS,
        (None, Process::Unknown) => NOTHING,
        (None, Process::Alive | Process::Ended) => SAME,
    };
    if args.json {
        let mut document = serde_json::to_value(&report).unwrap_or_default();
        match process {
            Process::Gone => document["abandoned"] = true.into(),
            Process::Unknown => document["abandoned"] = Value::Null,
            Process::Alive | Process::Ended => {}
        }
        write_json(out, &document)?;
        return Ok(code);
    }
    let last = match process {
        Process::Gone => Some(ABANDONED),
        Process::Unknown => Some(UNKNOWN),
        Process::Alive | Process::Ended => None,
    };
    if let Some(last) = last {
        write(out, format_args!("{last}\n"))?;
    }
    match (report, last) {
        (Some(report), Some(_)) => write(out, format_args!("last report: {report}"))?,
        (Some(report), None) => write(out, &report)?,
        (None, Some(_)) => {}
        (None, None) => write(out, "the run is not stalled\n")?,
    }
    Ok(code)
}
