//! Device groups that are invalid or not available are reported before anything is loaded.

use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::plan::Plannable;

use crate::kit::{Place, trainer};

fn findings(place: &Place, group: &str) -> Vec<Diagnostic> {
    let pipe = place.grpo("run", &[&format!("devices.group={group}")]);
    match pipe.plan() {
        Ok(plan) => plan.warnings().to_vec(),
        Err(findings) => findings,
    }
}

#[test]
fn invalid_device_names_are_errors() {
    let place = Place::new();
    for group in [
        "gpu", "gpu:0", "cpu:0", "cpu:1-0", "cuda:x", "cuda:1-0", "\"\"",
    ] {
        let found = findings(&place, group);
        let codes: Vec<&str> = found.iter().map(|finding| finding.code).collect();
        assert_eq!(codes, ["S010"], "{group}");
        assert!(found[0].is_error());
    }
    let found = findings(&place, "gpu");
    insta::assert_snapshot!("S010_kind", Findings(found).to_string());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn devices_of_another_build_can_be_planned_for_but_not_trained_on() {
    let place = Place::new();
    let found = findings(&place, "cuda:0");
    assert!(found.iter().all(|finding| !finding.is_error()));
    insta::assert_snapshot!("S012", Findings(found).to_string());
    let pipe = place.grpo("run", &["devices.group=cuda:0"]);
    let error = trainer(&pipe).err().expect("a refusal");
    assert!(
        error.contains("error[S012]: the devices of `cuda:0` are not available on this machine"),
        "{error}"
    );
    assert!(!place.path("run").exists());
}
