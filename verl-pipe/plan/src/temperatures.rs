//! One temperature: a stage that works with log-probs of sampled tokens uses the temperature at which they were
//! sampled, unless its own is set.
//!
//! The graph shows which stage sampled them: the writer of the key that this stage [follows], or else the nearest stage
//! upstream of that writer, as long as it declares a temperature in the tag of a key that it writes.
//!
//! [follows]: verl_words::stage::StageSpec::at_temperature_of

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use verl_declare::pipe::StageBuilder;
use verl_words::stage::BuildContext;

use crate::build::DraftStage;

/// For each stage the temperature that it uses if its own is not set.
pub(crate) fn followed(stages: &[DraftStage<'_>]) -> Vec<Option<f64>> {
    let mut writers: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, stage) in stages.iter().enumerate().filter(|(_, s)| s.in_step()) {
        for field in stage.spec.iter().flat_map(|spec| &spec.writes) {
            writers.entry(stage.key(&field.name)).or_insert(index);
        }
    }
    let followed = stages.iter().map(|stage| {
        let key = stage.spec.as_ref()?.temperature_of.as_deref()?;
        sampled_at(stages, &writers, stage.key(key))
    });
    followed.collect()
}

/// The temperature at which the tokens of `key` were sampled.
fn sampled_at(
    stages: &[DraftStage<'_>],
    writers: &BTreeMap<&str, usize>,
    key: &str,
) -> Option<f64> {
    let mut seen = vec![false; stages.len()];
    let mut waiting: VecDeque<usize> = writers.get(key).copied().into_iter().collect();
    while let Some(index) = waiting.pop_front() {
        if std::mem::replace(&mut seen[index], true) {
            continue;
        }
        let stage = &stages[index];
        let Some(spec) = &stage.spec else { continue };
        let tags = spec.writes.iter().filter_map(|field| field.tag.as_ref());
        let own = tags.filter_map(|tag| tag.temperature).next();
        // A stage that follows another one has no temperature of its own.
        if own.is_some() && spec.temperature_of.is_none() {
            return own;
        }
        let read = spec.reads.iter().chain(&spec.reads_optional);
        waiting.extend(read.filter_map(|field| writers.get(stage.key(&field.name)).copied()));
    }
    None
}

/// The context for a stage that uses `temperature` if its own is not set.
pub(crate) fn with(context: &BuildContext, temperature: Option<f64>) -> BuildContext {
    BuildContext {
        temperature,
        ..context.clone()
    }
}

/// Builds the stage with the temperature of the plan instead of the context's.
pub(crate) fn builder(stage: &DraftStage<'_>) -> StageBuilder {
    let (build, temperature) = (stage.decl.build.clone(), stage.temperature);
    match temperature {
        None => build,
        Some(_) => Arc::new(move |context| build(&with(context, temperature))),
    }
}
