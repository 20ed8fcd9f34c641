//! The plan of a correct pipeline: order, rows, cuts, and its printed text.

use crate::kit::*;
use verl_pipe::chain::IntoStage;
use verl_pipe::field::{DType, Key, Ragged, Scalar};
use verl_pipe::keys::*;
use verl_pipe::pipe::{DataPipe, stage_fn};
use verl_pipe::plan::{Plan, Plannable};
use verl_pipe::stage::*;

fn names(plan: &Plan) -> Vec<&str> {
    plan.stages().iter().map(|stage| stage.name()).collect()
}

fn stage<'a>(plan: &'a Plan, name: &str) -> &'a verl_pipe::plan::PlannedStage {
    plan.stages()
        .iter()
        .find(|stage| stage.name() == name)
        .expect("the stage")
}

#[test]
fn the_plan_of_sixty_prompts_and_twelve_samples_is_printed() {
    let plan = grpo().plan().expect("a plan");
    let batch = plan.batch();
    assert_eq!(
        (
            batch.rows,
            batch.rollout_shards,
            batch.rows_per_rollout_shard
        ),
        (720, 1, 720)
    );
    assert_eq!(
        (batch.log_prob_micro_rows, batch.log_prob_micro_batches),
        (8, 90)
    );
    let text = plan.to_string();
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
    insta::assert_snapshot!("grpo", text);
    insta::assert_snapshot!("grpo_dot", plan.to_dot());
}

#[test]
fn the_grpo_plan_has_no_warnings() {
    let plan = grpo().plan().expect("a plan");
    assert_eq!(plan.warnings(), []);
}

#[test]
fn stages_are_ordered_by_keys_then_by_declaration() {
    let mut pipe = grpo();
    pipe.stages.reverse();
    let plan = pipe.plan().expect("a plan");
    // The observer was declared first and depends on nothing; log-probs keep their (reversed) order.
    assert_eq!(
        names(&plan),
        [
            "evaluate",
            "prompts",
            "generate",
            "ref_log_probs",
            "old_log_probs",
            "reward",
            "advantages",
            "update"
        ]
    );
}

#[test]
fn rows_calls_and_waits() {
    let plan = grpo().plan().expect("a plan");
    let tables: Vec<(&str, usize, usize)> = plan
        .tables()
        .iter()
        .map(|table| (table.rows.as_str(), table.num_rows, table.factor))
        .collect();
    assert_eq!(tables, [("P", 60, 1), ("P·n", 720, 12)]);
    let calls: Vec<(&str, usize)> = plan
        .stages()
        .iter()
        .map(|stage| (stage.name(), stage.slice_rows()))
        .collect();
    assert_eq!(
        calls,
        [
            ("prompts", 60),
            ("generate", 8),
            ("reward", 1),
            ("old_log_probs", 8),
            ("ref_log_probs", 8),
            ("advantages", 12),
            ("update", 720),
            ("evaluate", 60),
        ]
    );
    let update = stage(&plan, "update");
    // generate (1) and old_log_probs (3) read the actor; the observer does not run in the step.
    assert_eq!(update.after(), [1, 3]);
    assert_eq!((update.table_in(), update.table_out()), (Some(1), None));
    assert_eq!(stage(&plan, "evaluate").table_in(), None);
    let prompts = update
        .inputs()
        .iter()
        .find(|edge| edge.key == "prompts")
        .expect("reads prompts");
    assert_eq!(
        (prompts.writer, prompts.table, prompts.broadcast),
        (0, 0, false)
    );
}

#[test]
fn a_reader_that_needs_the_update_runs_after_it() {
    const TRAINED: Key<Scalar<f32>> = Key::new("losses", "[B]", "", "loss of each row");
    let source = StageSpec::new().rows(RowRule::Source).writes(PROMPTS);
    let train = StageSpec::new()
        .reads(PROMPTS)
        .writes(TRAINED)
        .uses("actor", Access::Update);
    let before = StageSpec::new()
        .reads(PROMPTS)
        .writes(VALUES.field().shaped("[B, S~]"))
        .uses("actor", Access::Read);
    let after = StageSpec::new()
        .reads(TRAINED)
        .reads(VALUES)
        .rows(RowRule::Sink)
        .uses("actor", Access::Read);
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let plan = DataPipe::new("p")
        .model("actor", trained())
        .add_stage("after", stage_fn(after, emit))
        .add_stage("train", stage_fn(train, emit))
        .add_stage("before", stage_fn(before, emit))
        .add_stage("source", stage_fn(source, emit))
        .plan()
        .expect("a plan");
    assert_eq!(names(&plan), ["source", "before", "train", "after"]);
    assert_eq!(stage(&plan, "train").after(), [1]);
    assert_eq!(stage(&plan, "after").after(), [] as [usize; 0]);
}

#[test]
fn lossless_conversions_and_renames_are_planned_and_printed() {
    const WIDE: Key<Ragged<u64>> = Key::new("responses", "[B, L~]", "token id", "ids, wide");
    let spec = StageSpec::new()
        .reads(WIDE)
        .writes(RETURNS.field().shaped("[B, L~]"));
    let plan = grpo()
        .chain(
            stage_fn(spec, |batch, ctx| ctx.emit(batch))
                .named("wide")
                .writing("returns", "wide_returns"),
        )
        .plan()
        .expect("a plan");
    let wide = stage(&plan, "wide");
    assert_eq!(wide.inputs()[0].convert, Some((DType::U32, DType::U64)));
    assert_eq!(plan.fields()["wide_returns"].dtype, DType::F32);
    assert!(
        plan.to_string()
            .contains("from generate, converted u32 -> u64"),
        "{plan}"
    );
}

#[test]
fn a_key_of_a_prompt_is_repeated_if_declared() {
    const HARD: Key<Scalar<f32>> =
        Key::new("difficulties", "[P]", "share", "difficulty of a prompt");
    let rate = StageSpec::new().reads(PROMPTS).writes(HARD);
    let scale = StageSpec::new()
        .reads(REWARDS)
        .reads_broadcast(HARD)
        .writes(VALUES.field().shaped("[B]"));
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let plan = grpo()
        .add_stage("rate", stage_fn(rate, emit))
        .add_stage("scale", stage_fn(scale, emit))
        .plan()
        .expect("a plan");
    let edge = stage(&plan, "scale")
        .inputs()
        .iter()
        .find(|edge| edge.key == "difficulties")
        .expect("the edge");
    assert!(edge.broadcast);
    assert_eq!(stage(&plan, "scale").table_in(), Some(1));
    assert!(
        plan.to_string().contains("from rate, broadcast 12 times"),
        "{plan}"
    );
}

#[test]
fn waves_and_kept_groups_are_printed() {
    let mut pipe = grpo();
    pipe.batch.mini_batch = Some(20);
    let filter = FilterGroups {
        groups: 40,
        max_waves: 3,
    };
    let plan = pipe
        .add_stage("filter_groups", filter)
        .plan()
        .expect("a plan");
    let tables: Vec<(&str, usize, usize)> = plan
        .tables()
        .iter()
        .map(|table| (table.rows.as_str(), table.num_rows, table.waves))
        .collect();
    assert_eq!(tables, [("P", 60, 3), ("P·n", 720, 3), ("F(P·n)", 480, 1)]);
    let batch = plan.batch();
    assert_eq!((batch.groups, batch.waves, batch.mini_batches), (40, 3, 2));
    assert_eq!(&plan.context().batch, plan.batch());
    assert_eq!(stage(&plan, "update").slice_rows(), 480);
    let text = plan.to_string();
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
    insta::assert_snapshot!("refill", text);
}

#[test]
fn a_reader_of_filtered_rows_gets_filtered_rows_of_every_writer() {
    const LENGTHS: Key<Scalar<f32>> = Key::new("lengths", "[B]", "tokens", "length of a response");
    // Parallel to the filter, not before it.
    let measure = StageSpec::new().reads(RESPONSES).writes(LENGTHS);
    let use_kept = StageSpec::new()
        .reads(GROUP_MEANS)
        .reads(LENGTHS)
        .rows(RowRule::Sink);
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let plan = grpo()
        .add_stage("filter_groups", FilterGroups::default())
        .add_stage("use", stage_fn(use_kept, emit))
        .add_stage("measure", stage_fn(measure, emit))
        .plan()
        .expect("a plan");
    let table = stage(&plan, "use").table_in().expect("a table");
    assert_eq!(plan.tables()[table].rows, "F(P·n)");
    assert!(
        plan.to_string().contains("from measure, filtered from P·n"),
        "{plan}"
    );
}

#[test]
fn a_filter_creates_a_table_and_carries_earlier_keys() {
    let keep = StageSpec::new()
        .reads(REWARDS)
        .writes(VALUES.field().shaped("[B]"))
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group);
    let use_kept = StageSpec::new()
        .reads(VALUES.field().shaped("[B]"))
        .reads(RESPONSES)
        .reads(PROMPTS)
        .rows(RowRule::Sink);
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let plan = grpo()
        .add_stage("keep", stage_fn(keep, emit))
        .add_stage("use", stage_fn(use_kept, emit))
        .plan()
        .expect("a plan");
    let table = &plan.tables()[stage(&plan, "use").table_in().expect("a table")];
    assert_eq!(
        (table.rows.as_str(), table.num_rows, table.filtered),
        ("F(P·n)", 720, true)
    );
}
