//! A setting that was changed since the recording, as the first fault.

use verl_plan::schedule::placement::Schedule;
use verl_words::stage::Access;

use crate::compare::Change;
use crate::compare::changes::shown;
use crate::replay::first_bad::{Fault, FirstBad};

/// A setting that was changed since the run was recorded, as the first fault in `step`.
pub fn changed_setting(schedule: &Schedule, step: u64, change: &Change) -> FirstBad {
    let stages = schedule.plan().stages();
    let parts: Vec<&str> = change.name.splitn(3, '.').collect();
    let (stage, key) = match parts[..] {
        ["stages", stage, key] => (Some(stage), key),
        ["models", model, _] => {
            let uses = |(name, _): &(String, Access)| name == model;
            let mut users = stages
                .iter()
                .filter(|stage| stage.spec().models.iter().any(uses));
            (users.next().map(|stage| stage.name()), change.name.as_str())
        }
        _ => (None, change.name.as_str()),
    };
    let first = || stages.first().map_or("", |stage| stage.name());
    let (recorded, now) = (shown(&change.recorded), shown(&change.now));
    FirstBad {
        step,
        stage: stage.unwrap_or_else(first).to_owned(),
        fault: Fault::Settings,
        side: "input",
        key: key.to_owned(),
        row: None,
        sample: None,
        index: None,
        what: format!("it was {recorded} when recorded, but the configuration says {now}"),
        through: Vec::new(),
        reaches: Vec::new(),
    }
}
