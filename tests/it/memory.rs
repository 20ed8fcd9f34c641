//! Types of weights and memory in plans.

use std::collections::BTreeSet;

use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::plan::memory::MemoryPlan;
use verl::pipe::plan::{Plan, Plannable};
use verl::pipe::stage::{Access, WorkKind};

use crate::kit::{GRPO, Place};
use crate::pipelines::{files, read};

fn memory(place: &Place, more: &[&str]) -> MemoryPlan {
    let plan = place.grpo("run", more).plan();
    plan.unwrap_or_else(|findings| panic!("{}", Findings(findings)))
        .memory_of(0)
}

#[test]
fn weights_are_bf16_on_a_gpu_and_f32_on_the_cpu_by_default() {
    let place = Place::new();
    let cpu = memory(&place, &[]);
    let actor = &cpu.models[0];
    assert!(actor.summary.starts_with("f32, "), "{}", actor.summary);
    assert_eq!(actor.weights, 4 * actor.parameters);
    assert_eq!(actor.optimizer, 8 * actor.parameters);
    assert_eq!(actor.gradients, 4 * actor.parameters);

    let gpu = memory(&place, &["devices.group=cuda:0"]);
    let actor = &gpu.models[0];
    assert!(actor.summary.starts_with("bf16, "), "{}", actor.summary);
    assert_eq!(actor.weights, 2 * actor.parameters);
    assert_eq!(actor.optimizer, 12 * actor.parameters);
    assert_eq!(actor.gradients, 4 * actor.parameters);

    let explicit = memory(&place, &["devices.group=cuda:0", "actor.dtype=f32"]);
    assert_eq!(explicit.models[0].weights, cpu.models[0].weights);
    let training = |memory: &MemoryPlan| {
        let mut work = memory.work.iter();
        let found = work.find(|work| work.kind == WorkKind::Training);
        found.expect("an update").bytes
    };
    assert!(training(&explicit) > training(&gpu));
}

#[test]
fn bf16_on_the_cpu_is_refused() {
    let place = Place::new();
    let findings = place.grpo("run", &["actor.dtype=bf16"]).plan().err();
    let findings = findings.expect("a refusal");
    insta::assert_snapshot!("bf16_on_the_cpu", Findings(findings).to_string());
    let unknown = place.parse(GRPO, "run", &["actor.dtype=fp8"]).err();
    let text = Findings(unknown.expect("a refusal")).to_string();
    assert!(text.contains("`auto`") && text.contains("`bf16`"), "{text}");
}

#[test]
fn recomputation_takes_less_on_a_gpu_and_is_refused_elsewhere() {
    let place = Place::new();
    let training = |more: &[&str]| {
        let memory = memory(&place, more);
        let mut work = memory.work.iter();
        let found = work.find(|work| work.kind == WorkKind::Training);
        found.expect("an update").bytes
    };
    let kept = training(&["devices.group=cuda:0"]);
    let again = training(&["devices.group=cuda:0", "actor.recompute=true"]);
    assert!(again < kept, "{again} of {kept}");
    let findings = place.grpo("run", &["actor.recompute=true"]).plan().err();
    let findings = findings.expect("a refusal");
    insta::assert_snapshot!("recomputation_on_the_cpu", Findings(findings).to_string());
}

/// Plans of the examples.
fn plans() -> Vec<(String, Plan)> {
    let scratch = tempfile::tempdir().expect("a folder");
    let plan = |file: &std::path::PathBuf| {
        let name = file.file_stem().expect("a name").to_string_lossy();
        let pipe = read(file, scratch.path());
        let plan = pipe
            .plan()
            .unwrap_or_else(|found: Vec<Diagnostic>| panic!("{name}: {}", Findings(found)));
        (name.into_owned(), plan)
    };
    files().iter().map(plan).collect()
}

#[test]
fn every_stage_that_works_with_a_model_says_what_it_does() {
    let mut kinds = BTreeSet::new();
    for (name, plan) in plans() {
        for stage in plan.stages() {
            for (model, access) in &stage.spec().models {
                let works = stage.spec().work.iter().filter(|work| work.model == *model);
                let works: Vec<WorkKind> = works.map(|work| work.kind).collect();
                let place = format!("{name}: {} with {model}", stage.name());
                match access {
                    Access::Update => assert_eq!(works, [WorkKind::Training], "{place}"),
                    // Sources use only the tokenizer.
                    Access::Read if stage.table_in().is_none() && stage.table_out().is_some() => {
                        assert_eq!(works, [], "{place}");
                    }
                    Access::Read => assert_eq!(works.len(), 1, "{place}"),
                }
                kinds.insert(stage.kind().to_owned());
            }
        }
        // Examples are small: their memory is known and far below that of any machine.
        let memory = plan.memory_of(0);
        assert!(memory.peak() > memory.permanent(), "{name}");
        assert!(
            !plan.warnings().iter().any(|found| found.code == "S014"),
            "{name}"
        );
    }
    assert!(kinds.len() >= 12, "{kinds:?}");
}

#[test]
fn lengths_of_rows_come_from_the_settings() {
    let place = Place::new();
    let more = ["prompts.max_prompt_tokens=9", "generate.max_new_tokens=7"];
    let memory = memory(&place, &more);
    let of = |stage: &str| {
        let found = memory.work.iter().find(|work| work.stage == stage);
        found.expect("work of the stage").tokens
    };
    assert_eq!((of("generate"), of("update")), (16, 16));
    assert!(memory.work.iter().all(|work| work.unbounded.is_empty()));
}
