//! `pipe check`: builds the plan, tells all findings, loads nothing.

use std::io::{self, Write};

use super::{PipelineArgs, number, write_findings};
use crate::registry::Registry;

/// Checks a pipeline file; writes what is wrong with it. Returns the exit code.
///
/// # Errors
/// When `out` cannot be written.
pub fn check(args: &PipelineArgs, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    match args.read(registry).and_then(|pipe| pipe.plan()) {
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
            write_findings(&findings, out)?;
            Ok(1)
        }
    }
}
