//! The pipeline file (TOML) into a [`DataPipe`] and back.
//!
//! ```toml
//! name = "grpo"
//! [run]                      # RunConfig
//! [batch]                    # BatchConfig
//! [devices]                  # DevicesConfig
//! [groups.score]             # GroupConfig: a named device group
//! [trace]                    # TraceConfig
//! [data]
//! train = "train.jsonl"      # a path, or a table with `kind` and the kind's settings
//! [models.actor]             # `kind` (by default the first one registered), `group` and the kind's settings
//! path = "models/actor"
//! [[stages]]
//! kind = "generate"          # and the kind's settings
//! name = "rollout"           # by default the kind
//! rename = { responses = "answers" }
//! debug = true               # records it in full at every step
//! group = "score"            # its device group; by default that of its model
//! ```
//!
//! Relative paths of data and models are resolved against the file's folder, `run.dir` against the working directory.
//! Overrides come from the command line: their relative paths of data and models are resolved against the working
//! directory, or against the file's folder if they exist only there.
//! An unknown key is an error anywhere in the file; all errors of a file are reported at once.

pub(crate) mod decode;
mod faults;
mod fit;
mod overrides;
mod reader;
mod source;
mod synonyms;
mod write;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use verl_words::diagnostic::Diagnostic;

use crate::config::decode::keys_of;
use crate::config::overrides::{Folders, KnownNames};
use crate::config::reader::Reader;
use crate::config::source::Source;
use crate::pipe::{DataPipe, RunConfig};
use crate::registry::Registry;

pub use self::synonyms::Synonym;
pub(crate) use self::synonyms::Synonyms;
pub use self::write::to_toml;

/// Sections of a pipeline file.
pub(crate) const SECTIONS: [&str; 9] = [
    "name", "run", "batch", "devices", "groups", "trace", "data", "models", "stages",
];

/// Errors of a pipeline file, and what could be read of it.
pub struct ReadError {
    /// The errors of the file and the overrides; never empty.
    pub findings: Vec<Diagnostic>,
    /// The pipeline without what is wrong; `None` if the file is not valid TOML.
    pub pipe: Option<Box<DataPipe>>,
    /// Names of the stages that have no error and refer to nothing that has one.
    pub sound_stages: BTreeSet<String>,
}

impl From<Vec<Diagnostic>> for ReadError {
    fn from(findings: Vec<Diagnostic>) -> Self {
        ReadError {
            findings,
            pipe: None,
            sound_stages: BTreeSet::new(),
        }
    }
}

/// Reads a pipeline file and applies overrides (`key=value`). Checks neither sizes nor keys; the plan does.
///
/// # Errors
/// All errors in the file and the overrides.
pub fn read<S: AsRef<str>>(
    path: &Path,
    overrides: &[S],
    registry: &Registry,
) -> Result<DataPipe, ReadError> {
    let text = read_text(path).map_err(|finding| vec![finding])?;
    // A bare file name is in the working directory, whose path is `.`.
    let base = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    let working = std::env::current_dir().unwrap_or_default();
    let folders = Folders {
        working: &working,
        file: &base,
    };
    let origin = path.display().to_string();
    match parse_in(&text, &origin, overrides, registry, Some(folders)) {
        Ok(mut pipe) => {
            pipe.base = base;
            Ok(pipe)
        }
        Err(mut error) => {
            if let Some(pipe) = &mut error.pipe {
                pipe.base = base;
            }
            Err(error)
        }
    }
}

/// The text of a pipeline file.
fn read_text(path: &Path) -> Result<String, Diagnostic> {
    let bytes = std::fs::read(path).map_err(|error| {
        Diagnostic::error("C001", "cannot read the pipeline file")
            .at(path.display().to_string())
            .because(error.to_string())
            .help("give the path of a pipeline file, for example examples/pipelines/grpo_addition.toml")
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let (valid, rest) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let line = valid.iter().filter(|byte| **byte == b'\n').count() + 1;
        Diagnostic::error("C001", "the pipeline file is not valid UTF-8")
            .at(format!("{}:{line}", path.display()))
            .because(format!(
                "invalid UTF-8 at byte 0x{:02x}",
                rest.first().copied().unwrap_or_default()
            ))
            .help("save the file as UTF-8, or give the path of a TOML file")
    })
}

/// Reads the text of a pipeline file, which messages call `origin`; [`DataPipe::base`] stays empty.
///
/// # Errors
/// All errors in the text and the overrides.
pub fn parse<S: AsRef<str>>(
    text: &str,
    origin: &str,
    overrides: &[S],
    registry: &Registry,
) -> Result<DataPipe, ReadError> {
    parse_in(text, origin, overrides, registry, None)
}

fn parse_in<S: AsRef<str>>(
    text: &str,
    origin: &str,
    overrides: &[S],
    registry: &Registry,
    folders: Option<Folders<'_>>,
) -> Result<DataPipe, ReadError> {
    let (mut source, mut document) = Source::parse(origin, text)?;
    let mut findings = Vec::new();
    let run_keys = keys_of::<RunConfig>();
    let names = KnownNames {
        run_keys: &run_keys,
        synonyms: registry.known_synonyms(),
    };
    for text in overrides {
        match overrides::apply(&mut document, text.as_ref(), names, folders) {
            Ok(path) => {
                let text = text.as_ref().to_owned();
                findings.extend(overrides::duplicate_rule(&source.overridden, &path, &text));
                source.overridden.push((path, text));
            }
            Err(finding) => findings.push(finding),
        }
    }
    let mut reader = Reader {
        source,
        registry,
        findings,
        sound_stages: BTreeSet::new(),
    };
    let pipe = registry.reading(|| reader.pipeline(document));
    let (mut findings, sound_stages) = (reader.findings, reader.sound_stages);
    if findings.is_empty() && pipe.stages.is_empty() {
        findings.push(
            Diagnostic::error("C004", "the pipeline has no stages")
                .at(origin.to_owned())
                .because("a run would do nothing")
                .help("add stages, each under `[[stages]]` with its `kind`"),
        );
    }
    if findings.is_empty() {
        return Ok(pipe);
    }
    Err(ReadError {
        findings,
        pipe: Some(Box::new(pipe)),
        sound_stages,
    })
}
