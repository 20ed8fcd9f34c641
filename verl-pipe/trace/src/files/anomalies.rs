//! What the rules found in a run, as recorded in `anomalies.jsonl`.

use std::fs;

use verl_rules::{Anomaly, RuleSeverity};

use crate::files::trace_dir::TraceDir;

impl TraceDir {
    /// What the rules found, in order. Skips unreadable lines, such as one that a killed run left incomplete.
    pub fn anomalies(&self) -> Vec<Anomaly> {
        let bytes = fs::read(self.layout().anomalies()).unwrap_or_default();
        let lines = bytes.split(|byte| *byte == b'\n');
        let read = lines.filter_map(|line| serde_json::from_slice(line).ok());
        read.collect()
    }

    /// The anomaly that ended the run, if the run ended that way: `reason` is the one in its `status.json`.
    pub fn stopped(&self, reason: &str) -> Option<Anomaly> {
        let stops = |anomaly: &Anomaly| {
            anomaly.severity == RuleSeverity::Stop && reason.starts_with(&anomaly.to_string())
        };
        self.anomalies().into_iter().rev().find(stops)
    }
}
