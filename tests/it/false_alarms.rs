//! One error in a pipeline causes one finding, without findings that follow from it.

use std::sync::Arc;

use verl::pipe::diagnostic::Findings;
use verl::pipe::plan::Plannable;
use verl::pipe::stage::ConfigError;

use crate::pipelines::{files, read};

/// If any stage of any example cannot be built, only that is reported. Without the stage, others lack their keys,
/// their samples and their lengths, but fixing the stage fixes those too.
#[test]
fn a_stage_with_a_bad_setting_causes_no_other_error() {
    let mut tried = 0;
    for file in files() {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let pipe = read(&file, scratch.path());
        for at in 0..pipe.stages.len() {
            let mut broken = pipe.clone();
            broken.stages[at].build = Arc::new(|_| {
                Err(vec![ConfigError::new(
                    "temperature",
                    "is 0",
                    "set it above 0",
                )])
            });
            let findings = broken.plan().err().expect("a refusal");
            let codes: Vec<&str> = findings.iter().map(|finding| finding.code).collect();
            let name = &pipe.stages[at].name;
            assert_eq!(
                codes,
                ["C005"],
                "{}, `{name}`:\n{}",
                pipe.name,
                Findings(findings.clone())
            );
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried}");
}

/// Mini-batches are made from the groups that a filter keeps: without the filter their sizes cannot be checked.
#[test]
fn a_filter_with_a_bad_setting_causes_no_finding_about_sizes() {
    let file = files()
        .into_iter()
        .find(|file| file.ends_with("dapo_addition.toml"));
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let mut pipe = read(&file.expect("the example"), scratch.path());
    // 20 prompts per wave do not divide into mini-batches of 8, but the 16 groups that are kept do.
    pipe.batch.prompts = 20;
    assert!(pipe.plan().is_ok());
    let mut stages = pipe.stages.iter_mut();
    let filter = stages
        .find(|stage| stage.kind == "filter_groups")
        .expect("the filter");
    filter.build = Arc::new(|_| Err(vec![ConfigError::new("max_waves", "is 0", "set it to 1")]));
    let findings = pipe.plan().err().expect("a refusal");
    let codes: Vec<&str> = findings.iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["C005"], "{}", Findings(findings.clone()));
}
