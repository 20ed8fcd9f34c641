//! `pipe plan`: the graph in order, the batch arithmetic, memory.

use std::io::{self, Write};

use clap::Args;

use super::{PipelineArgs, write_findings};
use crate::registry::Registry;

/// Arguments of `pipe plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The pipeline.
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Prints the graph for Graphviz instead.
    #[arg(long)]
    pub dot: bool,
}

/// Prints the plan of a pipeline file, or what is wrong with it. Returns the exit code.
///
/// # Errors
/// When `out` cannot be written.
pub fn plan(args: &PlanArgs, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    match args.pipeline.read(registry).and_then(|pipe| pipe.plan()) {
        Ok(plan) if args.dot => write!(out, "{}", plan.to_dot()).map(|()| 0),
        Ok(plan) => write!(out, "{plan}").map(|()| 0),
        Err(findings) => write_findings(&findings, out).map(|()| 1),
    }
}
