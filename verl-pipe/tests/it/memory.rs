//! The memory of a device according to the plan: models, and the largest piece of work.

use crate::kit::*;
use verl_pipe::keys::*;
use verl_pipe::pipe::stage_fn;
use verl_pipe::plan::Plannable;
use verl_pipe::plan::memory::{MemoryPlan, WorkMemory};
use verl_pipe::stage::*;

/// Parameters of the kit's decoder.
const PARAMETERS: u64 = 494_032_768;

fn memory() -> MemoryPlan {
    grpo().plan().expect("a plan").memory_of(0)
}

fn work<'a>(memory: &'a MemoryPlan, stage: &str) -> &'a WorkMemory {
    let found = memory.work.iter().find(|work| work.stage == stage);
    found.expect("work of the stage")
}

#[test]
fn models_stay_in_memory_and_work_is_added_one_piece_at_a_time() {
    let memory = memory();
    let [actor, reference] = memory.models.as_slice() else {
        panic!("two models");
    };
    assert_eq!(
        (actor.model.as_str(), actor.weights),
        ("actor", 2 * PARAMETERS)
    );
    assert_eq!(
        (actor.optimizer, actor.gradients),
        (12 * PARAMETERS, 4 * PARAMETERS)
    );
    assert_eq!((reference.optimizer, reference.gradients), (0, 0));
    assert_eq!(memory.permanent(), 20 * PARAMETERS);

    let logits = 768 << 20;
    // 720 rows, of which 512 fit in a rollout.
    let generate = work(&memory, "generate");
    assert_eq!((generate.rows, generate.tokens), (720, 16));
    assert_eq!(generate.bytes, 512 * 16 * 12_288 + logits);
    let update = work(&memory, "update");
    assert_eq!((update.rows, update.tokens), (20, 16));
    assert_eq!(update.bytes, 20 * 16 * (975_872 + 40_448) + logits);
    let scored = work(&memory, "ref_log_probs");
    assert_eq!(
        (scored.model.as_str(), scored.kind),
        ("ref", WorkKind::Scoring)
    );
    assert_eq!(scored.bytes, 16_384 * 40_448 + logits);

    let largest = memory.largest().expect("work");
    assert_eq!(largest.stage, "ref_log_probs");
    assert_eq!(memory.peak(), memory.permanent() + largest.bytes);
}

#[test]
fn lengths_follow_keys_and_unbounded_keys_are_reported() {
    let memory = memory();
    assert_eq!(work(&memory, "update").unbounded, ["prompts"]);
    let text = memory.to_string();
    assert!(
        text.contains("No setting limits the length of `prompts`"),
        "{text}"
    );

    // A stage whose key is as long as another, and one that reads it by another name.
    let emit = |batch, context: &mut StageContext<'_>| context.emit(batch);
    let copies = StageSpec::new()
        .reads(RESPONSES)
        .writes(TARGETS)
        .as_long_as(TARGETS.name(), [RESPONSES.name()]);
    let trains = StageSpec::new()
        .reads(RESPONSES)
        .rows(RowRule::Sink)
        .uses("actor", Access::Update)
        .works(
            ModelWork::training("actor", 3)
                .of([RESPONSES.name()])
                .tokens(4),
        );
    let pipe = grpo()
        .add_stage("copy", stage_fn(copies, emit))
        .add_stage("again", stage_fn(trains, emit))
        .reading("responses", "targets");
    let plan = pipe.plan().expect("a plan");
    let memory = plan.memory_of(0);
    let again = work(&memory, "again");
    assert_eq!((again.tokens, again.rows), (16 + 4, 3));
    assert!(again.unbounded.is_empty());
}

#[test]
fn rows_are_no_longer_than_the_context() {
    let long = Generate {
        max_new_tokens: 100_000,
        ..Generate::default()
    };
    let mut pipe = grpo();
    let generate = verl_pipe::pipe::DataPipe::new("other").chain(Prompts::default() >> long);
    let position = pipe
        .stages
        .iter()
        .position(|stage| stage.name == "generate");
    pipe.stages[position.expect("generate")] = generate.stages[1].clone();
    let memory = pipe.plan().expect("a plan").memory_of(0);
    assert_eq!(work(&memory, "update").tokens, 4096);
}
