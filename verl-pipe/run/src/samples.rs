//! Rows of a step for `samples.jsonl`: the prompt, the response, and its reward.
//!
//! The values are found by the names of the standard keys, whichever stages write them. The rows are those of the
//! deepest table that has one of these keys; after a filter, the rows that it kept. Keys that the pipeline does not
//! have are left out.

use serde_json::{Map, Value, json};
use verl_plan::Plan;
use verl_plan::schedule::placement::Schedule;
use verl_plan::schedule::wiring::{Hop, path};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId};
use verl_words::field::{Key, Ragged, Text};
use verl_words::keys::{
    ADVANTAGES, ANSWERS, MASK_KINDS, PROMPT_TEXTS, RESPONSE_TEXTS, RESPONSES, REWARDS, TARGETS,
    mask,
};
use verl_words::stage::Cadence;

use crate::runner::{Progress, Run};
use crate::step::StepState;
use crate::table::{AncestorRows, Ancestors, up};
use crate::worker::{Answer, Query};

/// The standard keys of a sample.
const KEYS: [&str; 8] = [
    ADVANTAGES.name(),
    ANSWERS.name(),
    MASK_KINDS.name(),
    PROMPT_TEXTS.name(),
    RESPONSES.name(),
    RESPONSE_TEXTS.name(),
    REWARDS.name(),
    TARGETS.name(),
];

/// Where the keys of a sample are in a pipeline.
#[derive(Debug, Default)]
pub(crate) struct SampledRows {
    table: usize,
    columns: Vec<SampledColumn>,
}

#[derive(Debug)]
struct SampledColumn {
    key: &'static str,
    stage: usize,
    column: usize,
    /// From the sampled rows up to those of the writer.
    path: Vec<Hop>,
}

impl SampledRows {
    /// Looks the keys up in a placed pipeline.
    pub(crate) fn of(schedule: &Schedule) -> SampledRows {
        let plan = schedule.plan();
        let found: Vec<(&'static str, usize, usize, usize)> = KEYS
            .into_iter()
            .filter_map(|key| {
                let (stage, column) = writer(plan, key)?;
                Some((key, stage, column, plan.stages()[stage].table_out()?))
            })
            .collect();
        let depth = |table: usize| {
            let up = |table: &usize| plan.tables()[*table].parent;
            std::iter::successors(Some(table), up).count()
        };
        let tables = found.iter().map(|(.., table)| *table);
        let Some(table) = tables.max_by_key(|table| (depth(*table), std::cmp::Reverse(*table)))
        else {
            return SampledRows::default();
        };
        let column = |(key, stage, column, from)| {
            Some(SampledColumn {
                key,
                stage,
                column,
                path: path(plan, table, from)?,
            })
        };
        SampledRows {
            table,
            columns: found.into_iter().filter_map(column).collect(),
        }
    }
}

/// The stage and column that write the pipeline's key `key`; otherwise the first that writes it under another name.
fn writer(plan: &Plan, key: &str) -> Option<(usize, usize)> {
    let find = |wanted: &dyn Fn(&str, &str) -> bool| {
        let mut stages = plan.stages().iter().enumerate();
        stages.find_map(|(index, stage)| {
            let mut writes = stage.spec().writes.iter();
            let column = writes.position(|field| wanted(&field.name, stage.key(&field.name)))?;
            (stage.spec().cadence == Cadence::Step).then_some((index, column))
        })
    };
    find(&|_, name| name == key).or_else(|| find(&|own, _| own == key))
}

impl Run {
    /// `samples_per_step` rows of a completed step, spread evenly over its rows.
    pub(super) fn sample_rows(&mut self, progress: &Progress) -> Vec<Value> {
        let wanted = self.schedule.plan().pipe().run.samples_per_step;
        if wanted == 0 || self.sampled.columns.is_empty() {
            return Vec::new();
        }
        let sample = self.gather_sample(&progress.state, wanted);
        let texts = if sample.has(RESPONSE_TEXTS.name()) {
            None
        } else {
            self.texts(&sample)
        };
        let ids = sample.ids();
        let rows = ids.iter().enumerate();
        rows.map(|(row, id)| {
            let mut line = sample_row(&sample, row, *id, texts.as_deref());
            // A row without a result says why.
            if let (Some((stage, status, reason)), Some(line)) =
                (progress.rows.loss_of(*id), line.as_object_mut())
            {
                line.insert("failed_in".to_owned(), self.name(stage).into());
                line.insert("status".to_owned(), json!(status));
                line.insert("reason".to_owned(), reason.into());
            }
            line
        })
        .collect()
    }

    /// The keys of the chosen rows.
    fn gather_sample(&self, state: &StepState, wanted: usize) -> Batch {
        let all = state.tables[self.sampled.table].ids();
        let count = wanted.min(all.len());
        let rows: Vec<usize> = (0..count).map(|row| row * all.len() / count).collect();
        let ids: Vec<RowId> = rows.iter().map(|row| RowId(all[*row])).collect();
        let mut sample = Batch::with_rows(&ids);
        for column in &self.sampled.columns {
            let above = rows.iter().map(|row| up(&state.tables, &column.path, *row));
            let ancestors = Ancestors {
                rows: AncestorRows::Some(above.collect()),
                pick: None,
            };
            let outputs = &state.stages[column.stage].outputs;
            let gathered = outputs.gather(&ancestors, &[column.column]);
            let array = gathered.ok().and_then(|mut arrays| arrays.pop());
            let put = array.map(|array| sample.put_array(column.key, array));
            debug_assert!(
                matches!(put, Some(Ok(()))),
                "`{}` is incomplete",
                column.key
            );
        }
        sample
    }

    /// Texts of responses, or of targets, if no stage wrote them as text: decoded by the first model that can.
    fn texts(&mut self, sample: &Batch) -> Option<Vec<String>> {
        let tokens = |key: &Key<Ragged<u32>>| {
            let column = sample.get(key).ok()?;
            Some(column.rows().map(<[u32]>::to_vec).collect::<Vec<_>>())
        };
        let tokens = tokens(&RESPONSES).or_else(|| tokens(&TARGETS))?;
        (0..self.workers.len()).find_map(|group| {
            let tokens = tokens.clone();
            match self.ask(group, Query::Texts { tokens }) {
                Ok(Answer::Texts(texts)) => texts,
                _ => None,
            }
        })
    }
}

/// A row in the format of the file.
fn sample_row(sample: &Batch, row: usize, id: RowId, texts: Option<&[String]>) -> Value {
    let mut line = Map::new();
    line.insert("kind".to_owned(), "training".into());
    line.insert("id".to_owned(), id.to_string().into());
    let text = |key: &Key<Text>| Some(sample.get(key).ok()?.row(row).to_owned());
    let response = text(&RESPONSE_TEXTS).or_else(|| texts?.get(row).cloned());
    let answer = text(&ANSWERS).filter(|answer| !answer.is_empty());
    for (name, text) in [
        ("prompt", text(&PROMPT_TEXTS)),
        ("response", response),
        ("answer", answer),
    ] {
        line.extend(text.map(|text| (name.to_owned(), text.into())));
    }
    if let Ok(rewards) = sample.get(&REWARDS) {
        line.insert("reward".to_owned(), rewards.row(row).into());
    }
    let advantage = advantage(sample, row).map(|mean| ("advantage".to_owned(), mean.into()));
    line.extend(advantage);
    Value::Object(line)
}

/// Mean advantage of the tokens that the policy chose, or of all tokens if the pipeline has no mask.
fn advantage(sample: &Batch, row: usize) -> Option<f64> {
    let advantages = sample.get(&ADVANTAGES).ok()?;
    let kinds = sample.get(&MASK_KINDS).ok();
    let kinds = kinds.as_ref().map(|kinds| kinds.row(row));
    let chosen = |at: usize| kinds.is_none_or(|kinds| kinds.get(at) == Some(&mask::ACTION));
    let tokens = advantages.row(row).iter().enumerate();
    let values: Vec<f64> = tokens
        .filter(|(at, _)| chosen(*at))
        .map(|(_, value)| f64::from(*value))
        .collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}
