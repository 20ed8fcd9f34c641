//! Diagnostics: what a pipeline's author got wrong. Code, what, where, why, help.

use std::fmt;

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A run is possible.
    Warning,
    /// No run is possible.
    Error,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Code such as `P003`; `docs/errors/<CODE>.md` explains it.
    pub code: &'static str,
    /// How grave it is.
    pub severity: Severity,
    /// What is wrong, in one line.
    pub what: String,
    /// Where: a stage, an edge `writer -> reader`, a section of the file.
    pub location: String,
    /// Why it is wrong.
    pub why: String,
    /// What to do.
    pub help: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        writeln!(f, "{word}[{}]: {}", self.code, self.what)?;
        writeln!(f, "  where: {}", self.location)?;
        writeln!(f, "  why:   {}", self.why.replace('\n', "\n         "))?;
        write!(f, "  help:  {}", self.help.replace('\n', "\n         "))
    }
}
