//! `pipe check`: builds the plan, tells all findings, loads nothing.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;

use super::json_error::{JsonError, json_findings, write_json};
use super::{PipelineArgs, number, write_findings};
use crate::registry::Registry;

/// Arguments of `pipe check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// The pipeline.
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Prints one JSON object: what the pipeline comes to and its warnings, or the error with all findings.
    #[arg(long)]
    pub json: bool,
}

/// Checks a pipeline file; writes what is wrong with it. Returns the exit code.
///
/// # Errors
/// When `out` cannot be written.
pub fn check(args: &CheckArgs, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    match args.pipeline.read(registry).and_then(|pipe| pipe.plan()) {
        Ok(plan) if args.json => {
            let told = json!({
                "pipeline": plan.pipe.name,
                "stages": plan.stages.len(),
                "samples_a_step": plan.batch.rows,
                "optimizer_steps_a_step": plan.batch.optimizer_steps,
                "warnings": json_findings(&plan.warnings),
            });
            write_json(&told, out)?;
            Ok(0)
        }
        Ok(plan) => {
            write_findings(&plan.warnings, out)?;
            writeln!(
                out,
                "{}: {}, {} a step, {} a step",
                plan.pipe.name,
                number(plan.stages.len(), "stage"),
                number(plan.batch.rows, "sample"),
                number(plan.batch.optimizer_steps, "optimiser step")
            )?;
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
