//! Reads a pipeline file, and checks what can be checked of a file with errors.

use std::path::Path;

use verl_declare::config::{self, ReadError};
use verl_declare::pipe::DataPipe;
use verl_declare::registry::Registry;
use verl_words::diagnostic::Diagnostic;

use crate::build::prepare;
use crate::checks::{batch_sizes, settings};

/// Reads a pipeline file and applies overrides (`key=value`).
///
/// # Errors
/// All errors in the file and the overrides; if there are any, also sizes that do not fit and errors in stages.
pub fn read_pipeline<S: AsRef<str>>(
    path: &Path,
    overrides: &[S],
    registry: &Registry,
) -> Result<DataPipe, Vec<Diagnostic>> {
    config::read(path, overrides, registry).map_err(complete)
}

/// Reads the text of a pipeline file, which messages call `origin`; [`DataPipe::base`] stays empty.
///
/// # Errors
/// As [`read_pipeline`].
pub fn parse_pipeline<S: AsRef<str>>(
    text: &str,
    origin: &str,
    overrides: &[S],
    registry: &Registry,
) -> Result<DataPipe, Vec<Diagnostic>> {
    config::parse(text, origin, overrides, registry).map_err(complete)
}

/// Adds errors in sizes and stages, which can be found although the pipeline is incomplete.
fn complete(error: ReadError) -> Vec<Diagnostic> {
    let ReadError {
        mut findings,
        pipe,
        sound_stages,
    } = error;
    if let Some(pipe) = pipe {
        let prepared = prepare(&pipe);
        findings.extend(prepared.violations.iter().map(batch_sizes::finding));
        let stages = prepared.stages.iter();
        let sound = stages.filter(|stage| sound_stages.contains(&stage.decl.name));
        findings.extend(sound.flat_map(settings::errors));
    }
    findings
}
