//! Commands of the executable, each a function of a registry and a writer. The executable fills the registry.
//!
//! Exit codes: 0 for success, 1 if the pipeline has errors or its run failed, 130 if a run was cancelled. [`debug`]
//! documents its own.
//!
//! A command with `--json` writes exactly one JSON object, which is a [`JsonError`](json_error::JsonError) if it fails;
//! `--json` does not change its exit code.

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
pub mod worker;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use verl_declare::pipe::DataPipe;
use verl_declare::registry::Registry;
use verl_plan::read::read_pipeline;
use verl_words::diagnostic::Diagnostic;

/// A pipeline file with overrides, as commands accept it.
#[derive(Debug, Clone, Args)]
pub struct PipelineArgs {
    /// Pipeline file (TOML).
    pub file: PathBuf,
    /// Overrides of its settings, such as `steps=10`, `actor.path=DIR`, `data.train=FILE`, `generate.temperature=0.7`.
    ///
    /// The first part of a key is a section of the file, a model or a stage; a key without a dot is a setting of
    /// `[run]`. An empty value removes a setting from the file (`batch.mini_batch=`).
    /// Relative paths in overrides are resolved against the working directory, or against the folder of the pipeline
    /// file if they do not exist there; paths in the file are resolved against its folder.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

impl PipelineArgs {
    /// Reads the file and applies the overrides.
    ///
    /// # Errors
    /// All errors in the file and the overrides.
    pub fn read(&self, registry: &Registry) -> Result<DataPipe, Vec<Diagnostic>> {
        read_pipeline(&self.file, &self.overrides, registry)
    }
}

/// Writes findings and their number.
///
/// # Errors
/// If `out` cannot be written.
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
