//! `pipe check`: builds the plan, checks the data, reports all findings; loads no weights.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;
use verl_declare::registry::Registry;
use verl_plan::Plannable;
use verl_plan::look::{Checked, Look};

use super::json_error::{JsonError, json_findings, write_json};
use super::rows::{write_rows, write_summary};
use super::{PipelineArgs, number, write_findings};

/// Arguments of `pipe check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// The pipeline.
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Prints this many rows of each data set as a run would see them: text and tokens of the prompt, the trained
    /// tokens after it, the answer.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub rows: usize,
    /// Prints one JSON object: a summary of the pipeline, the rows of its sources and its warnings, or the error with
    /// all findings.
    #[arg(long)]
    pub json: bool,
}

/// Checks a pipeline file and its data, and writes the findings. Returns the exit code.
///
/// # Errors
/// If `out` cannot be written.
pub fn check(args: &CheckArgs, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    let pipe = match args.pipeline.read(registry) {
        Ok(pipe) => pipe,
        Err(findings) => {
            match args.json {
                true => JsonError::of_findings(&findings).write(out)?,
                false => write_findings(&findings, out)?,
            }
            return Ok(1);
        }
    };
    let Checked { plan, rows } = pipe.check(&Look {
        shown: args.rows,
        ..Look::default()
    });
    if !args.json {
        for rows in &rows {
            write_rows(rows, out)?;
        }
    }
    match plan {
        Ok(plan) if args.json => {
            let summary = json!({
                "pipeline": plan.pipe().name,
                "stages": plan.stages().len(),
                "samples_a_step": plan.batch().rows,
                "optimizer_steps_a_step": plan.batch().optimizer_steps,
                "rows": rows,
                "warnings": json_findings(plan.warnings()),
            });
            write_json(&summary, out)?;
            Ok(0)
        }
        Ok(plan) => {
            write_findings(plan.warnings(), out)?;
            writeln!(
                out,
                "{}: {}, {} a step, {} a step",
                plan.pipe().name,
                number(plan.stages().len(), "stage"),
                number(plan.batch().rows, "sample"),
                number(plan.batch().optimizer_steps, "optimiser step")
            )?;
            for rows in &rows {
                write_summary(rows, out)?;
            }
            Ok(0)
        }
        Err(findings) => {
            match args.json {
                true => JsonError::of_findings(&findings).write(out)?,
                false => write_findings(&findings, out)?,
            }
            Ok(1)
        }
    }
}
