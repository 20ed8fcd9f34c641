//! Each group has one device: its models and stages run on one, so more would be idle.

use verl_declare::pipe::DataPipe;
use verl_words::diagnostic::Diagnostic;

use crate::build::Draft;
use crate::schedule::batching::DevicesConfig;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let mut refuse = |place: String, setting: &str, why: String, help: String| {
        findings.push(
            Diagnostic::error("S015", format!("`{setting}` requests more than one device"))
                .at(place)
                .because(format!("{why}, but a device group has only one so far"))
                .help(help),
        );
    };
    for group in &draft.layout.groups {
        let count = group.devices.len();
        let setting = if group.is_named { "devices" } else { "group" };
        if count > 1 {
            refuse(
                group.setting(),
                setting,
                format!("`{}` contains {count} devices", group.devices_text()),
                format!("set `{setting}` to a single device, such as `cuda:0`"),
            );
        }
    }
    let shards = draft.pipe.devices.rollout_tensor_parallel;
    if shards > 1 {
        refuse(
            "[devices] rollout_tensor_parallel".to_owned(),
            "rollout_tensor_parallel",
            format!("a rollout engine would use {shards} devices"),
            "remove `rollout_tensor_parallel`".to_owned(),
        );
    }
}

/// The devices that the sizes of the batch are checked for: what this check refuses is reported once, and not again by
/// every size that does not divide by it.
pub(crate) fn without_refused(pipe: &DataPipe) -> DevicesConfig {
    let devices = &pipe.devices;
    // With named groups, `group` is the name of one.
    let list = match pipe.groups.is_empty() {
        true => devices.list().ok(),
        false => Some(vec!["cpu".to_owned()]),
    };
    let first = list.and_then(|list| list.into_iter().next());
    DevicesConfig {
        group: first.unwrap_or_else(|| devices.group.clone()),
        rollout_tensor_parallel: devices.rollout_tensor_parallel.min(1),
    }
}
