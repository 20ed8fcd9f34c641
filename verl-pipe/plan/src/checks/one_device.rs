//! A group has one GPU, as more would be idle, or shares of the CPU, on which its models have replicas.

use verl_declare::pipe::DataPipe;
use verl_words::diagnostic::Diagnostic;

use crate::build::Draft;
use crate::schedule::batching::DevicesConfig;
use crate::schedule::groups::DeviceGroup;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let mut gpus = Vec::new();
    let mut refuse = |place: String, setting: &str, why: String, help: String| {
        gpus.push(
            Diagnostic::error("S015", format!("`{setting}` requests more than one device"))
                .at(place)
                .because(format!("{why}, but a device group has only one GPU so far"))
                .help(help),
        );
    };
    for (index, group) in draft.layout.groups.iter().enumerate() {
        let count = group.devices.len();
        if group.is_on_cpu() {
            check_replicas(draft, index, group, findings);
            continue;
        }
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
    findings.append(&mut gpus);
}

/// Every model in several shares of the CPU must be of a kind that has replicas.
fn check_replicas(
    draft: &Draft<'_>,
    index: usize,
    group: &DeviceGroup,
    findings: &mut Vec<Diagnostic>,
) {
    let count = group.devices.len();
    for (at, model) in draft.pipe.models.iter().enumerate() {
        if count <= 1 || !draft.layout.has(index, at) || model.factory.can_replicate() {
            continue;
        }
        findings.push(
            Diagnostic::error("S015", format!("`{}` cannot have replicas", model.name))
                .at(format!("[models.{}] -> {}", model.name, group.setting()))
                .because(format!(
                    "its group has {count} devices, `{}`, but models of kind `{}` run on one",
                    group.devices_text(),
                    model.kind
                ))
                .help("put the model into a group with one device, such as `cpu`"),
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
    // Replicas on shares of the CPU take turns, so no size has to divide by their number.
    let first = list.and_then(|list| list.into_iter().next());
    let first = first.map(|first| match first.starts_with("cpu:") {
        true => "cpu".to_owned(),
        false => first,
    });
    DevicesConfig {
        group: first.unwrap_or_else(|| devices.group.clone()),
        rollout_tensor_parallel: devices.rollout_tensor_parallel.min(1),
    }
}
