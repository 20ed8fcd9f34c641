//! Problems of the recorder, each of which is reported once.

use std::collections::BTreeSet;

use crate::files::TraceError;

/// Problems that were reported.
#[derive(Debug, Default)]
pub(crate) struct Reported(BTreeSet<&'static str>);

impl Reported {
    /// Whether `problem` is reported for the first time.
    pub(crate) fn is_first(&mut self, problem: &'static str) -> bool {
        self.0.insert(problem)
    }

    /// Reports an I/O error, once for each kind of data.
    pub(crate) fn error(&mut self, about: &'static str, result: Result<(), TraceError>) {
        if let Err(error) = result
            && self.is_first(about)
        {
            tracing::warn!(
                "trace: cannot write {about} ({}): {error}; the run continues and keeps trying to write later data",
                error.code()
            );
        }
    }
}
