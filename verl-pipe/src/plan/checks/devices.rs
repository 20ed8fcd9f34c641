//! The models can be loaded onto the devices of the group.

use std::collections::BTreeMap;

use crate::diagnostic::{Diagnostic, quoted};
use crate::plan::build::Draft;
use crate::resource::DeviceRefusal;

/// Code of a device that another machine or another build may have: a pipeline can be planned for it, but not run here.
pub(crate) const ABSENT: &str = "S012";

/// Why devices are refused, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Refused {
    Unknown,
    Unusable,
    Absent,
}

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    // A group that is none is told by the batch arithmetic, which needs the number of devices.
    let devices = draft.pipe.devices.list().unwrap_or_default();
    let mut refusals: BTreeMap<(Refused, String), Vec<&str>> = BTreeMap::new();
    for model in &draft.pipe.models {
        let mut refused = devices
            .iter()
            .filter_map(|device| model.factory.check_device(device).err());
        // One device is enough to tell.
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
                let finding = Diagnostic::error("S010", "`group` names no devices");
                (finding, "write `cpu`, `cuda:0` or `cuda:0-3`")
            }
            Refused::Absent => {
                let what = format!("the devices of `{group}` are not here");
                let help = "train where they are, or set `group = \"cpu\"`; a plan for them can be printed anywhere";
                (Diagnostic::warning(ABSENT, what), help)
            }
            Refused::Unusable => {
                let what = format!("the devices of `{group}` cannot be used");
                let help = "repair what is missing, or set `group = \"cpu\"`; `pipe bench check` tells what works";
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
