//! The flight recorder: the last steps in memory, written when a rule fires or the run fails.

use verl_rules::config::{TraceConfig, bytes_of};

use crate::files::Reason;
use crate::record::reported::Reported;
use crate::record::step_data::Ring;

/// The last steps that have ended, and how often they were written.
///
/// Between calls: the current step is not in `ring`, and `ring` is empty while the flight recorder is off.
pub(crate) struct FlightRecorder {
    pub ring: Ring,
    is_on: bool,
    /// Largest size in memory, as in the settings (MB).
    ring_mb: u64,
    writes: usize,
    max_writes: usize,
}

impl FlightRecorder {
    pub(crate) fn new(config: &TraceConfig) -> FlightRecorder {
        FlightRecorder {
            ring: Ring {
                max_steps: config.ring_steps,
                max_bytes: usize::try_from(bytes_of(config.ring_mb)).unwrap_or(usize::MAX),
                ..Ring::default()
            },
            is_on: config.stats && config.ring_steps > 0,
            ring_mb: config.ring_mb,
            writes: 0,
            max_writes: config.ring_writes,
        }
    }

    /// Whether the flight recorder is on.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Whether the steps are written when a rule fires.
    pub(crate) fn writes_anomalies(&self) -> bool {
        self.is_on && self.writes < self.max_writes
    }

    /// Counts a write of the steps; `false` if they are not to be written.
    pub(crate) fn begin_write(&mut self, reason: Reason, reported: &mut Reported) -> bool {
        if self.writes >= self.max_writes && reason == Reason::Anomaly {
            if reported.is_first("ring_writes") {
                tracing::warn!(
                    "trace: the flight recorder was written {} times (`trace.ring_writes`); from now on anomalies are reported, but their steps are not recorded",
                    self.writes
                );
            }
            return false;
        }
        self.writes += 1;
        true
    }

    /// Reports that `step` is larger than the flight recorder.
    pub(crate) fn report_too_large(&self, step: u64, reported: &mut Reported) {
        if reported.is_first("ring") {
            tracing::warn!(
                "trace: step {step} is larger than the {} MB of the flight recorder (`trace.ring_mb`), which keeps only a part of it",
                self.ring_mb
            );
        }
    }
}
