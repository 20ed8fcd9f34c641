//! Commands of the executable, each a function of a registry and a writer. The executable fills the registry.
//!
//! Exit codes: 0 where the answer is good, 1 where the pipeline has faults or its run
//! failed, 130 where a run was cancelled. Those of [`debug`] stand there.
//!
//! A command with `--json` writes exactly one JSON object, which is a [`JsonError`](json_error::JsonError) where it has no
//! answer; its exit code is the same as without.

pub mod check;
#[cfg(test)]
mod counting;
pub mod debug;
pub mod json_error;
pub mod plan;
mod rows;
pub mod schema;
pub mod train;
pub mod warmup;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;

use crate::config::read_pipeline;
use crate::diagnostic::Diagnostic;
use crate::pipe::DataPipe;
use crate::registry::Registry;

/// A pipeline file with overrides, as commands take it.
#[derive(Debug, Clone, Args)]
pub struct PipelineArgs {
    /// Pipeline file (TOML).
    pub file: PathBuf,
    /// Overrides of its settings, such as `steps=10`, `actor.path=DIR`, `data.train=FILE`, `generate.temperature=0.7`.
    ///
    /// The first part of a key is a section of the file, a model or a stage; a key alone is a setting of `[run]`.
    /// Nothing behind the `=` takes a setting out of the file (`batch.mini_batch=`).
    /// Relative paths given here are read against the working directory (and against the pipeline file's folder only
    /// where nothing is there); paths in the file itself are read against the file's folder.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

impl PipelineArgs {
    /// Reads the file and applies the overrides.
    ///
    /// # Errors
    /// All faults of both.
    pub fn read(&self, registry: &Registry) -> Result<DataPipe, Vec<Diagnostic>> {
        read_pipeline(&self.file, &self.overrides, registry)
    }
}

/// Writes findings and their number.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_findings(findings: &[Diagnostic], out: &mut dyn Write) -> io::Result<()> {
    for finding in findings {
        writeln!(out, "{finding}\n")?;
    }
    let errors = findings.iter().filter(|finding| finding.is_error()).count();
    writeln!(
        out,
        "{}, {}",
        number(errors, "error"),
        number(findings.len() - errors, "warning")
    )
}

/// `1 stage`, `2 stages`.
fn number(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
