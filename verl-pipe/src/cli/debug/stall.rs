//! `pipe debug stall`: what a run that does not move waits for.

use std::io::Write;

use clap::Args;

use super::{DIFFERS, Failure, RunArg, SAME, write, write_json};
use crate::run::held::{ABANDONED, is_abandoned};
use crate::run::stall::StallReport;
use crate::trace::traced_run::LookError;

/// Arguments of `pipe debug stall`.
#[derive(Debug, Clone, Args)]
pub struct StallArgs {
    /// The run; it may be going on.
    #[command(flatten)]
    pub run: RunArg,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn stall(args: &StallArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let dir = &args.run.dir;
    let no_run = |reason: String| LookError::NoRun {
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
    let abandoned = is_abandoned(dir);
    let code = match report.is_some() || abandoned {
        true => DIFFERS,
        false => SAME,
    };
    if args.json {
        let mut told = serde_json::to_value(&report).unwrap_or_default();
        if abandoned {
            told["abandoned"] = true.into();
        }
        write_json(out, &told)?;
        return Ok(code);
    }
    if abandoned {
        write(out, format_args!("{ABANDONED}\n"))?;
    }
    match report {
        Some(report) if abandoned => {
            write(out, format_args!("when it was last heard of, {report}"))?
        }
        Some(report) => write(out, &report)?,
        None if abandoned => {}
        None => write(out, "the run waits for nothing for long\n")?,
    }
    Ok(code)
}
