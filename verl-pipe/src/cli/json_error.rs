//! Errors for programs: with `--json` a command writes exactly one JSON object to standard output, a result or an
//! error.
//!
//! ```json
//! {"error": {"code": "T010", "message": "…", "help": "…"}}
//! ```
//!
//! The error also has `where` and `why` if they are known, and `findings` if it comes from several findings. The exit
//! code is the same as without `--json`.

use std::io::{self, Write};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::diagnostic::{Diagnostic, Severity};

/// Code of an invalid command line.
pub const USAGE: &str = "usage";
/// Code of a measurement that is not possible.
pub const BENCH: &str = "bench";
/// Code of a file that a command cannot write.
pub const FILE: &str = "file";

/// The output of a command that fails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JsonError {
    /// The error.
    pub error: Reason,
}

/// An error of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    /// Code of the error; `docs/errors/<CODE>.md` explains it. `usage` for an invalid command line, `file` for a file
    /// that cannot be written, `bench` for a measurement that is not possible.
    pub code: String,
    /// What is wrong.
    pub message: String,
    /// Where it is: a place in the pipeline file, an override, a stage; omitted if it has no particular place.
    #[serde(rename = "where", default, skip_serializing_if = "String::is_empty")]
    pub place: String,
    /// Why it is wrong; omitted if the message says so.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// What to do.
    pub help: String,
    /// All findings, including warnings; omitted if there is only one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<JsonFinding>,
}

/// A finding about a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JsonFinding {
    /// Its code; `docs/errors/<CODE>.md` explains it.
    pub code: String,
    /// `error` if it prevents a run, otherwise `warning`.
    pub severity: String,
    /// What is wrong.
    pub message: String,
    /// Where it is.
    #[serde(rename = "where")]
    pub place: String,
    /// Why it is wrong.
    pub why: String,
    /// What to do.
    pub help: String,
}

impl From<&Diagnostic> for JsonFinding {
    fn from(finding: &Diagnostic) -> Self {
        JsonFinding {
            code: finding.code.to_owned(),
            severity: match finding.severity {
                Severity::Error => "error",
                Severity::Warning | Severity::Blocking => "warning",
            }
            .to_owned(),
            message: finding.what.clone(),
            place: finding.location.clone(),
            why: finding.why.clone(),
            help: finding.help.clone(),
        }
    }
}

impl JsonError {
    /// An error with only a message and a help.
    pub fn new(
        code: impl Into<String>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        JsonError {
            error: Reason {
                code: code.into(),
                message: message.into(),
                help: help.into(),
                ..Reason::default()
            },
        }
    }

    /// The first error of `findings`, with all of them if there are several.
    ///
    /// ```
    /// use verl_pipe::cli::json_error::JsonError;
    /// use verl_pipe::diagnostic::Diagnostic;
    ///
    /// let finding = Diagnostic::error("P001", "two stages are called `reward`").help("rename one");
    /// let failure = JsonError::of_findings(&[finding]);
    /// assert_eq!((failure.error.code.as_str(), failure.error.help.as_str()), ("P001", "rename one"));
    /// ```
    pub fn of_findings(findings: &[Diagnostic]) -> Self {
        let first = findings.iter().find(|finding| finding.is_error());
        let Some(first) = first.or(findings.first()) else {
            return JsonError::new(USAGE, "there are no findings", "");
        };
        let mut error = Reason {
            code: first.code.to_owned(),
            message: first.what.clone(),
            place: first.location.clone(),
            why: first.why.clone(),
            help: first.help.clone(),
            findings: Vec::new(),
        };
        if findings.len() > 1 {
            error.findings = json_findings(findings);
        }
        JsonError { error }
    }

    /// Writes it as the only object of a command's output.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write_json(self, out)
    }
}

/// Findings as they are written in JSON.
pub(crate) fn json_findings(findings: &[Diagnostic]) -> Vec<JsonFinding> {
    findings.iter().map(JsonFinding::from).collect()
}

/// Writes a document and a newline.
pub(crate) fn write_json(value: &impl Serialize, out: &mut dyn Write) -> io::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    writeln!(out, "{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_represents_all_findings() {
        let warning = Diagnostic::warning("P013", "unread")
            .at("a")
            .because("b")
            .help("c");
        let error = Diagnostic::error("P001", "twice")
            .at("d")
            .because("e")
            .help("f");
        let single = JsonError::of_findings(std::slice::from_ref(&error));
        assert_eq!(
            serde_json::to_value(&single).expect("prints"),
            serde_json::json!({
                "error": { "code": "P001", "message": "twice", "where": "d", "why": "e", "help": "f" }
            })
        );
        let both = JsonError::of_findings(&[warning, error]);
        assert_eq!(both.error.code, "P001");
        let severities = both.error.findings.iter().map(|f| f.severity.as_str());
        assert_eq!(severities.collect::<Vec<_>>(), ["warning", "error"]);
        let read: JsonError =
            serde_json::from_value(serde_json::to_value(&both).expect("prints")).expect("reads");
        assert_eq!(read, both);
    }
}
