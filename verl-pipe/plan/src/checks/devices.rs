//! The models can be loaded onto the devices of the group.

use std::collections::BTreeMap;

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::resource::DeviceRefusal;

use crate::build::Draft;
use crate::schedule::groups::DeviceGroup;

/// Why devices are refused, most severe first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Refused {
    Unknown,
    Unusable,
    Absent,
}

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for (index, group) in draft.layout.groups.iter().enumerate() {
        check_group(draft, index, group, findings);
    }
}

fn check_group(
    draft: &Draft<'_>,
    index: usize,
    group: &DeviceGroup,
    findings: &mut Vec<Diagnostic>,
) {
    let mut refusals: BTreeMap<(Refused, String), Vec<&str>> = BTreeMap::new();
    let layout = &draft.layout;
    for (at, model) in draft.pipe.models.iter().enumerate() {
        if !layout.has(index, at) {
            continue;
        }
        let devices = match group.is_on_cpu() {
            true => vec![group.device()],
            false => group.devices.iter().map(String::as_str).collect(),
        };
        let mut refused = devices
            .into_iter()
            .filter_map(|device| model.factory.devices().check(device).err());
        // Report only the first refused device.
        let refusal = match refused.next() {
            Some(DeviceRefusal::Unknown(reason)) => (Refused::Unknown, reason),
            Some(DeviceRefusal::Absent(reason)) => (Refused::Absent, reason),
            Some(DeviceRefusal::Unusable(reason)) => (Refused::Unusable, reason),
            None => continue,
        };
        refusals.entry(refusal).or_default().push(&model.name);
    }
    let setting = if group.is_named { "devices" } else { "group" };
    let (place, group) = (group.setting(), group.devices_text());
    for ((refused, reason), models) in refusals {
        let models = quoted(models);
        let (finding, help) = match refused {
            Refused::Unknown => {
                let what = format!("`{setting}` is not a valid device group");
                let help = "set it to `cpu` or one GPU, such as `cuda:0`";
                (Diagnostic::error("S010", what), help.to_owned())
            }
            Refused::Absent => {
                let what = format!("the devices of `{group}` are not available on this machine");
                let help = format!(
                    "run where they are available, or set `{setting} = \"cpu\"`; `pipe plan` works without them"
                );
                // Another machine or build may have them: a pipeline can be planned for them, but not run here.
                (Diagnostic::blocking("S012", what), help)
            }
            Refused::Unusable => {
                let what = format!("the devices of `{group}` cannot be used");
                let help = format!(
                    "fix the problem, or set `{setting} = \"cpu\"`; run `pipe bench check` to see what works"
                );
                (Diagnostic::error("S013", what), help)
            }
        };
        findings.push(
            finding
                .at(place.clone())
                .because(format!("{models} cannot be loaded: {reason}"))
                .help(help),
        );
    }
}
