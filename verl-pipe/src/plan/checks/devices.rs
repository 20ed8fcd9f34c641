//! The models can be loaded onto the devices of the group.

use std::collections::BTreeMap;

use crate::diagnostic::{Diagnostic, quoted};
use crate::plan::build::Draft;
use crate::resource::DeviceRefusal;

/// Code of a device that another machine or another build may have: a pipeline can be planned for it, but not run here.
pub(crate) const ABSENT: &str = "S012";

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    // A group that is none is told by the batch arithmetic, which needs the number of devices.
    let devices = draft.pipe.devices.list().unwrap_or_default();
    let mut refusals: BTreeMap<(bool, String), Vec<&str>> = BTreeMap::new();
    for model in &draft.pipe.models {
        let mut refused = devices
            .iter()
            .filter_map(|device| model.factory.check_device(device).err());
        // One device is enough to tell.
        let refusal = match refused.next() {
            Some(DeviceRefusal::Unknown(reason)) => (true, reason),
            Some(DeviceRefusal::Absent(reason)) => (false, reason),
            None => continue,
        };
        refusals.entry(refusal).or_default().push(&model.name);
    }
    let group = &draft.pipe.devices.group;
    for ((unknown, reason), models) in refusals {
        let models = quoted(models);
        let (finding, help) = if unknown {
            let finding = Diagnostic::error("S010", "`group` names no devices");
            (finding, "write `cpu`, `cuda:0` or `cuda:0-3`")
        } else {
            let what = format!("the devices of `{group}` are not here");
            let help = "train where they are, or set `group = \"cpu\"`; a plan for them can be printed anywhere";
            (Diagnostic::warning(ABSENT, what), help)
        };
        findings.push(
            finding
                .at("[devices] group")
                .because(format!("{models} cannot be loaded: {reason}"))
                .help(help),
        );
    }
}
