//! `pipe plan`: the graph in order, the batch arithmetic, memory.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;
use verl_declare::registry::Registry;
use verl_plan::Plannable;

use super::json_error::{JsonError, json_findings, write_json};
use super::{PipelineArgs, write_findings};
use crate::schema::edges::PipelineEdges;

/// Arguments of `pipe plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The pipeline.
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Prints the graph for Graphviz instead.
    #[arg(long, conflicts_with = "json")]
    pub dot: bool,
    /// Prints one JSON object: stages in order, edges, batch arithmetic, memory and warnings, or the error with all
    /// findings.
    #[arg(long)]
    pub json: bool,
}

/// Prints the plan of a pipeline file, or its findings. Returns the exit code.
///
/// # Errors
/// If `out` cannot be written.
pub fn plan(args: &PlanArgs, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    match args.pipeline.read(registry).and_then(|pipe| pipe.plan()) {
        Ok(plan) if args.json => {
            let PipelineEdges {
                pipeline,
                stages,
                edges,
            } = PipelineEdges::of(&plan);
            let document = json!({
                "pipeline": pipeline,
                "batch": plan.batch(),
                "memory": plan.memory(),
                "stages": stages,
                "edges": edges,
                "warnings": json_findings(plan.warnings()),
            });
            write_json(&document, out).map(|()| 0)
        }
        Ok(plan) if args.dot => write!(out, "{}", plan.to_dot()).map(|()| 0),
        Ok(plan) => write!(out, "{plan}").map(|()| 0),
        Err(findings) if args.json => JsonError::of_findings(&findings).write(out).map(|()| 1),
        Err(findings) => write_findings(&findings, out).map(|()| 1),
    }
}
