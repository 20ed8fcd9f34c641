//! The command that shows what a rule found.

use std::path::Path;

use verl_rules::Hit;

use crate::record::step_data::StageAbout;
use crate::text::shell_word;

/// Builds the command that shows what a rule found.
pub(crate) struct ShowCommand<'a> {
    /// The run folder.
    pub dir: &'a Path,
    pub step: u64,
    pub stages: &'a [StageAbout],
    /// Whether the rows of the step will be on disk.
    pub rows_recorded: bool,
}

impl ShowCommand<'_> {
    /// The command for a finding: it shows the stage with the key or metric, or all curves if the step's rows are not
    /// recorded.
    pub(crate) fn for_hit(&self, hit: &Hit) -> String {
        let run = shell_word(&self.dir.display().to_string());
        if !self.rows_recorded {
            return format!("pipe debug view --run {run}");
        }
        let of = |about: &&StageAbout| {
            about.name == hit.stage || about.metrics.contains(&hit.key.as_str())
        };
        let stage = self.stages.iter().find(of);
        let stage = stage.map_or_else(String::new, |about| format!(" --stage {}", about.name));
        let sample = hit.samples.first().filter(|_| !stage.is_empty());
        let sample = sample.map_or_else(String::new, |id| format!(" --sample '{id}'"));
        let step = self.step;
        format!("pipe debug trace --run {run} --step {step}{stage}{sample}")
    }
}
