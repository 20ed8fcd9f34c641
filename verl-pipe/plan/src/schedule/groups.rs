//! Device groups: the devices that one worker thread owns.

use verl_declare::sizes::{DevicesConfig, WorkerKind};
use verl_words::diagnostic::Diagnostic;

/// Devices with one owner, as `[devices] group` or a section of `[groups]` names them.
///
/// ```
/// use verl_pipe::schedule::groups::DeviceGroup;
///
/// let group = DeviceGroup::parse("cuda:0-3").unwrap();
/// assert_eq!(group.devices, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]);
/// assert_eq!(DeviceGroup::parse("cpu").unwrap().devices, ["cpu"]);
/// assert!(DeviceGroup::parse("cuda:3-1").is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceGroup {
    /// Its name in `[groups]`, or as written in `[devices]`: `cpu`, `cuda:0`, `cuda:0-3`.
    pub name: String,
    /// Its devices one by one, at least one.
    pub devices: Vec<String>,
    /// Whether `[groups]` declares it; otherwise it is the group of `[devices]`.
    pub is_named: bool,
    /// What its worker is.
    pub worker: WorkerKind,
}

impl DeviceGroup {
    /// The group that `name` describes.
    ///
    /// # Errors
    /// A diagnostic `S010` if `name` is not a valid device group.
    pub fn parse(name: &str) -> Result<DeviceGroup, Diagnostic> {
        let config = DevicesConfig {
            group: name.to_owned(),
            ..DevicesConfig::default()
        };
        let devices = config.list().map_err(|error| finding(error.to_string()))?;
        Ok(DeviceGroup {
            name: name.trim().to_owned(),
            devices,
            is_named: false,
            worker: WorkerKind::Thread,
        })
    }

    /// Whether all its devices are the CPU or shares of it.
    pub fn is_on_cpu(&self) -> bool {
        !self.devices.is_empty() && self.devices.iter().all(|device| is_cpu(device))
    }

    /// The device that kinds of models know: the first one, where a share of the CPU is the CPU. Empty without devices.
    pub fn device(&self) -> &str {
        match self.devices.first() {
            Some(first) if is_cpu(first) => "cpu",
            Some(first) => first,
            None => "",
        }
    }

    /// The setting of its devices, for messages.
    pub fn setting(&self) -> String {
        match self.is_named {
            true => format!("[groups.{}] devices", self.name),
            false => "[devices] group".to_owned(),
        }
    }

    /// Its devices as written, such as `cuda:0-3`.
    pub fn devices_text(&self) -> String {
        match (self.is_named, self.devices.as_slice()) {
            (false, _) => self.name.clone(),
            (true, [first, .., last]) => {
                let last = last
                    .split_once(':')
                    .map_or(last.as_str(), |(_, index)| index);
                format!("{first}-{last}")
            }
            (true, devices) => devices.concat(),
        }
    }
}

/// Whether a device is the CPU or a share of it.
fn is_cpu(device: &str) -> bool {
    device == "cpu" || device.starts_with("cpu:")
}

/// The finding about an invalid device group.
pub(crate) fn finding(why: String) -> Diagnostic {
    Diagnostic::error("S010", "`group` is not a valid device group")
        .at("[devices] group")
        .because(format!(
            "{why}; a device group is a device kind, for GPUs followed by an index"
        ))
        .help("set it to `cpu` or one GPU, such as `cuda:0`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<&[&str]>) {
        let found = DeviceGroup::parse(text).ok().map(|group| group.devices);
        assert_eq!(
            found.as_deref(),
            expected
                .map(|e| e.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
                .as_deref()
        );
    }

    #[test]
    fn valid_and_invalid_groups() {
        check("cpu", Some(&["cpu"]));
        check("cuda:1", Some(&["cuda:1"]));
        check("cuda:0-1", Some(&["cuda:0", "cuda:1"]));
        check("", None);
        check("cuda:", None);
        check("cuda:a", None);
        check("cuda:2-1", None);
        check("cpu:0-1", Some(&["cpu:0", "cpu:1"]));
        check("cpu:1", None);
    }
}
