//! What is not as it was when a step was recorded.

use crate::schedule::placement::Schedule;
use crate::trace::changes::{Change, Changes, changed};
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
