//! The models can be loaded onto the devices of the group.

use std::collections::BTreeMap;

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::resource::DeviceRefusal;

use crate::build::Draft;

/// Why devices are refused, most severe first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Refused {
    Unknown,
    Unusable,
    Absent,
}

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    // The batch arithmetic, which needs the number of devices, reports an invalid group.
    let devices = draft.pipe.devices.list().unwrap_or_default();
    let mut refusals: BTreeMap<(Refused, String), Vec<&str>> = BTreeMap::new();
    for model in &draft.pipe.models {
        let mut refused = devices
            .iter()
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
    let group = &draft.pipe.devices.group;
    for ((refused, reason), models) in refusals {
        let models = quoted(models);
        let (finding, help) = match refused {
            Refused::Unknown => {
                let finding = Diagnostic::error("S010", "`group` is not a valid device group");
                (finding, "set it to `cpu` or one GPU, such as `cuda:0`")
            }
            Refused::Absent => {
                let what = format!("the devices of `{group}` are not available on this machine");
                let help = "run where they are available, or set `group = \"cpu\"`; `pipe plan` works without them";
                // Another machine or build may have them: a pipeline can be planned for them, but not run here.
                (Diagnostic::blocking("S012", what), help)
            }
            Refused::Unusable => {
                let what = format!("the devices of `{group}` cannot be used");
                let help = "fix the problem, or set `group = \"cpu\"`; run `pipe bench check` to see what works";
                (Diagnostic::error("S013", what), help)
            }
        };
        findings.push(
            finding
                .at("[devices] group")
                .because(format!("{models} cannot be loaded: {reason}"))
                .help(help),
        );
    }
}
