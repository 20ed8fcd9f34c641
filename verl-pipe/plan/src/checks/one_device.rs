//! The group has one device: models and stages run on one, so more would be idle.

use verl_words::diagnostic::Diagnostic;

use crate::build::Draft;
use crate::schedule::batching::DevicesConfig;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let devices = &draft.pipe.devices;
    // The batch arithmetic, which needs the number of devices, reports an invalid group.
    let count = devices.list().map_or(1, |list| list.len());
    let refusals = [
        (
            "group",
            format!("`{}` contains {count} devices", devices.group),
            count,
            "set `group` to a single device, such as `cuda:0`",
        ),
        (
            "rollout_tensor_parallel",
            format!(
                "a rollout engine would use {} devices",
                devices.rollout_tensor_parallel
            ),
            devices.rollout_tensor_parallel,
            "remove `rollout_tensor_parallel`",
        ),
    ];
    for (setting, why, count, help) in refusals {
        if count <= 1 {
            continue;
        }
        findings.push(
            Diagnostic::error("S015", format!("`{setting}` requests more than one device"))
                .at(format!("[devices] {setting}"))
                .because(format!("{why}, but a run uses only one so far"))
                .help(help),
        );
    }
}

/// The devices that the sizes of the batch are checked for: what this check refuses is reported once, and not again by
/// every size that does not divide by it.
pub(crate) fn without_refused(devices: &DevicesConfig) -> DevicesConfig {
    let first = devices.list().ok().and_then(|list| list.into_iter().next());
    DevicesConfig {
        group: first.unwrap_or_else(|| devices.group.clone()),
        rollout_tensor_parallel: devices.rollout_tensor_parallel.min(1),
    }
}
