//! Time to check a graph of 1,000 stages: the budget is 50 ms.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use verl_pipe::keys::{PROMPTS, RESPONSES, REWARDS};
use verl_pipe::pipe::{DataPipe, stage_fn};
use verl_pipe::plan::Plannable;
use verl_pipe::stage::{RowRule, StageContext, StageSpec};

/// A source, an expansion, and a chain in which each stage reads the responses and the key before it.
fn chain(stages: usize) -> DataPipe {
    let emit = |batch, context: &mut StageContext<'_>| context.emit(batch);
    let reward = |index: usize| REWARDS.field().renamed(format!("rewards_{index}"));
    let source = StageSpec::new().rows(RowRule::Source).writes(PROMPTS);
    let expand = StageSpec::new()
        .rows(RowRule::Expand(8))
        .reads(PROMPTS)
        .writes(RESPONSES)
        .writes(reward(0));
    let mut pipe = DataPipe::new("chain")
        .add_stage("source", stage_fn(source, emit))
        .add_stage("expand", stage_fn(expand, emit));
    // Declared backwards, so that the order has to be found.
    for index in (1..=stages - 3).rev() {
        let spec = StageSpec::new()
            .reads(RESPONSES)
            .reads(reward(index - 1))
            .writes(reward(index));
        pipe = pipe.add_stage(format!("stage_{index}"), stage_fn(spec, emit));
    }
    let sink = StageSpec::new()
        .rows(RowRule::Sink)
        .reads(reward(stages - 3));
    pipe.add_stage("sink", stage_fn(sink, emit))
}

/// Every second stage filters, the others read across all filters: the worst case of the rules for rows.
fn filters(stages: usize) -> DataPipe {
    let emit = |batch, context: &mut StageContext<'_>| context.emit(batch);
    let reward = |index: usize| REWARDS.field().renamed(format!("rewards_{index}"));
    let source = StageSpec::new()
        .rows(RowRule::Source)
        .writes(PROMPTS)
        .writes(reward(0));
    let mut pipe = DataPipe::new("filters").add_stage("source", stage_fn(source, emit));
    for index in 1..stages {
        let rule = if index % 2 == 0 {
            RowRule::Filter
        } else {
            RowRule::Same
        };
        let spec = StageSpec::new()
            .rows(rule)
            .reads(PROMPTS)
            .reads(reward(index - 1))
            .writes(reward(index));
        pipe = pipe.add_stage(format!("stage_{index}"), stage_fn(spec, emit));
    }
    pipe
}

fn plan(criterion: &mut Criterion) {
    for (name, pipe) in [("chain", chain(1000)), ("filters", filters(1000))] {
        assert_eq!(pipe.plan().map(|plan| plan.stages().len()).ok(), Some(1000));
        criterion.bench_function(&format!("check 1,000 stages, {name}"), |bencher| {
            bencher.iter(|| black_box(&pipe).plan().map(|plan| plan.stages().len()))
        });
    }
}

criterion_group!(benches, plan);
criterion_main!(benches);
