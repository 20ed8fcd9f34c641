//! What is not as it was when a step was recorded.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::data::DataLoaderInterface;
use crate::run::records::{DataFile, DataOrigin};
use crate::schedule::placement::Schedule;
use crate::trace::changes::{Change, ChangedData, Changes, changed};
use crate::trace::conditions::{Conditions, of_versions};
use crate::trace::recorded::RecordedStep;
use crate::trace::traced_run::{LookError, TracedRun};

/// What is not as it was when a run was recorded.
///
/// # Errors
/// When what the trace tells of the recording is damaged.
pub(crate) fn changes_since(traced: &TracedRun) -> Result<Changes, LookError> {
    let now = Conditions::of(traced.schedule());
    Ok(match Conditions::read(traced.dir())? {
        Some(recorded) => Changes::between(&recorded, &now),
        None => {
            let (recorded, here) = of_versions(traced.dir(), &now.machine);
            Changes {
                machine: changed(&recorded, &here).collect(),
                ..Changes::of_plans(&traced.trace().format().plan_hash, &now.plan_hash)
            }
        }
    })
}

/// Data sets whose content is not what the `data.json` of the run in `dir` tells. Where that cannot be read nothing is
/// said.
pub(super) fn changed_data(
    dir: &Path,
    now: &BTreeMap<String, Arc<dyn DataLoaderInterface>>,
) -> Vec<ChangedData> {
    let text = fs::read_to_string(dir.join("data.json")).unwrap_or_default();
    let mut recorded: DataFile = serde_json::from_str(&text).unwrap_or_default();
    let changed = now.iter().filter_map(|(name, data)| {
        let (recorded, now) = (recorded.remove(name)?, DataOrigin::of(data.as_ref()));
        (recorded.fingerprint != now.fingerprint).then(|| ChangedData {
            name: name.clone(),
            recorded,
            now,
        })
    });
    changed.collect()
}

/// `of_run`, and what the step itself tells of its seed and stages.
pub(super) fn changes_of(
    of_run: &Changes,
    schedule: &Schedule,
    recorded: &RecordedStep,
) -> Changes {
    let mut changes = of_run.clone();
    let plan = &schedule.plan;
    if let Some(seed) = recorded.seed.filter(|seed| *seed != plan.context.seed) {
        changes.add(Change {
            name: "run.seed".to_owned(),
            recorded: seed.into(),
            now: plan.context.seed.into(),
        });
    }
    for decl in &plan.pipe.stages {
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
