//! `pipe debug diff`: where two runs part.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use super::{DIFFERS, Failure, NOTHING, write, write_json};
use crate::registry::Registry;
use crate::trace::diff::{RunDiff, diff_settings, diff_step};
use crate::trace::diff_stats::diff_stats;
use crate::trace::traced_run::TracedRun;

/// Arguments of `pipe debug diff`.
#[derive(Debug, Clone, Args)]
pub struct DiffArgs {
    /// Folder of the first run.
    pub first: PathBuf,
    /// Folder of the second run.
    pub second: PathBuf,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn diff(
    args: &DiffArgs,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let first = TracedRun::open(&args.first, registry)?;
    let second = TracedRun::open(&args.second, registry)?;
    let [left, right]: [BTreeSet<u64>; 2] =
        [&first, &second].map(|run| run.trace().steps().into_iter().collect());
    let mut found = RunDiff {
        settings: diff_settings(&config(&args.first), &config(&args.second)),
        ..RunDiff::default()
    };
    let lone = left.symmetric_difference(&right).count();
    if lone > 0 {
        found
            .notes
            .push(format!("{lone} steps are recorded in one of the runs only"));
    }
    for step in left.intersection(&right) {
        let (a, b) = (first.step(*step)?, second.step(*step)?);
        found.steps.push(diff_step(first.schedule(), &a, &b));
    }
    found.stats = diff_stats(
        first.schedule(),
        &first.trace().stats(..)?,
        &second.trace().stats(..)?,
    );
    match args.json {
        true => write_json(out, &found)?,
        false => write(out, &found)?,
    }
    let compared = !found.steps.is_empty() || !found.stats.steps.is_empty();
    let differs = found.first().is_some() || found.stats.parting.is_some();
    Ok(match (compared, differs) {
        (false, _) => NOTHING,
        (true, false) => 0,
        (true, true) => DIFFERS,
    })
}

/// The resolved configuration of a run; it has been read before, as a pipeline.
fn config(dir: &Path) -> Value {
    let text = std::fs::read_to_string(dir.join("config.toml")).unwrap_or_default();
    toml::from_str(&text).unwrap_or_default()
}
