//! What has changed since a step was recorded.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use verl_plan::Plan;
use verl_plan::schedule::placement::Schedule;
use verl_run::records::{DataFile, DataOrigin};
use verl_words::data::DataLoaderInterface;
use verl_words::diagnostic::quoted;

use crate::compare::changes::{changed, content};
use crate::compare::{Change, ChangedData, Changes};
use crate::files::{Conditions, RecordedStep, of_versions};
use crate::replay::traced_run::{InspectError, TracedRun};

/// What has changed since a run was recorded.
///
/// # Errors
/// The recorded conditions are damaged.
pub fn changes_since(traced: &TracedRun) -> Result<Changes, InspectError> {
    let now = Conditions::of(traced.schedule());
    Ok(match Conditions::read(traced.dir())? {
        Some(recorded) => Changes::between(&recorded, &now),
        None => {
            let (recorded, here) = of_versions(traced.dir(), &now.machine);
            let plans = Changes::of_plans(&traced.trace().format().plan_hash, &now.plan_hash);
            plans.with_machines(&recorded, &here)
        }
    })
}

/// Adds to `changes` the data sets whose content differs from the `data.json` of the run in `dir`, and those missing
/// there.
pub(super) fn add_data(
    changes: &mut Changes,
    dir: &Path,
    now: &BTreeMap<String, Arc<dyn DataLoaderInterface>>,
) {
    let recorded = match recorded_data(dir) {
        Ok(recorded) => recorded,
        Err(why) => {
            changes.data_unknown = (!now.is_empty()).then_some(why);
            return;
        }
    };
    let mut missing = Vec::new();
    for (name, data) in now {
        match recorded.get(name) {
            Some(recorded) => {
                let changed = changed_data(name, recorded, data.as_ref());
                changes.data.extend(changed);
            }
            None => missing.push(name.as_str()),
        }
    }
    if !missing.is_empty() {
        changes.data_unknown = Some(format!("data.json has no entry for {}", quoted(missing)));
    }
}

/// Data sets of `plan` that differ from the `data.json` of the run in `dir` or cannot be opened any more, in words.
pub(crate) fn describe_changed_data(dir: &Path, plan: &Plan) -> Vec<String> {
    let recorded = recorded_data(dir).unwrap_or_default();
    let changed = plan.pipe().data.iter().filter_map(|decl| {
        let recorded = recorded.get(&decl.name)?;
        match (decl.open)(plan.context()) {
            Ok(data) => {
                let changed = changed_data(&decl.name, recorded, data.as_ref());
                changed.map(|changed| changed.to_string())
            }
            Err(_) => Some(format!(
                "{} ({}): {} when recorded, but it cannot be opened now",
                decl.name,
                recorded.origin,
                content(recorded)
            )),
        }
    });
    changed.collect()
}

/// The `data.json` of the run in `dir`, or why there is none.
fn recorded_data(dir: &Path) -> Result<DataFile, String> {
    let text = fs::read_to_string(dir.join("data.json"));
    let text = text.map_err(|e| format!("data.json cannot be read ({e})"))?;
    serde_json::from_str(&text).map_err(|e| format!("data.json is invalid ({e})"))
}

fn changed_data(
    name: &str,
    recorded: &DataOrigin,
    now: &dyn DataLoaderInterface,
) -> Option<ChangedData> {
    let now = DataOrigin::of(now);
    (recorded.fingerprint != now.fingerprint).then(|| ChangedData {
        name: name.to_owned(),
        recorded: recorded.clone(),
        now,
    })
}

/// `of_run`, with the changes since what the step itself records about its seed and stages.
pub(super) fn changes_of(
    of_run: &Changes,
    schedule: &Schedule,
    recorded: &RecordedStep,
) -> Changes {
    let mut changes = of_run.clone();
    let plan = schedule.plan();
    if let Some(seed) = recorded.seed.filter(|seed| *seed != plan.context().seed) {
        changes.add(Change {
            name: "run.seed".to_owned(),
            recorded: seed.into(),
            now: plan.context().seed.into(),
        });
    }
    for decl in &plan.pipe().stages {
        let stage = recorded.stages.get(&decl.name);
        let Some(then) = stage.and_then(|stage| stage.parameters.as_ref()) else {
            continue;
        };
        for change in changed(then, &decl.config) {
            let name = format!("stages.{}.{}", decl.name, change.name);
            changes.add(Change { name, ..change });
        }
    }
    changes
}
