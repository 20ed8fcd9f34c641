//! Samples token by token, from the steps that were recorded in full.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::{Number, Value};
use verl_plan::schedule::placement::Schedule;
use verl_rules::Anomaly;
use verl_trace::files::RecordedStep;
use verl_trace::replay::TracedRun;
use verl_trace::show::{SampleView, ShownStep};
use verl_trace::text::count;
use verl_words::batch::RowId;
use verl_words::keys;
use verl_words::resource::TokenTexts;

use super::tables::{choose, evenly};
use super::thin::rounded;

/// Most steps to take samples from; each has to be read completely.
const STEPS: usize = 40;
/// Most values shown of a list that does not have one value per response token.
const LISTED: usize = 64;
/// Approximate maximum size of all samples in bytes; a larger page is slow to open.
const MOST_BYTES: usize = 48 << 20;

/// An entry in the list of samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SampleHead {
    pub step: u64,
    pub id: String,
    pub tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Rules that fired for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<String>,
}

/// One sample; tokens are ids, whose texts are in [`Samples::words`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Sample {
    pub stage: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_text: Option<String>,
    pub prompt: Vec<u32>,
    pub response: Vec<u32>,
    /// One value per token, by key.
    pub per_token: Vec<(String, Vec<Value>)>,
    /// One value per row, by key, and its meaning.
    pub per_row: Vec<(String, Value, Option<&'static str>)>,
}

/// The samples of a page.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    pub heads: Vec<SampleHead>,
    /// As JSON, in the order of the heads.
    pub blocks: Vec<String>,
    /// Texts of tokens.
    pub words: BTreeMap<u32, String>,
    /// Number of samples of the steps on the page.
    pub of: usize,
    pub notes: Vec<String>,
}

/// At most `most` samples of the run: from steps with anomalies, the last and the first step, and others in between; in
/// each step, rows with anomalies come first.
pub(crate) fn samples(traced: &TracedRun, anomalies: &[Anomaly], most: usize) -> Samples {
    let mut samples = Samples::default();
    let recorded = traced.trace().steps();
    let mut wanted: Vec<u64> = anomalies.iter().map(|anomaly| anomaly.step).collect();
    wanted.extend(recorded.last());
    let steps = choose(&recorded, &wanted, most.min(STEPS));
    if steps.len() < recorded.len() && most > 0 {
        let n = count(recorded.len() as u64, "recorded step");
        samples
            .notes
            .push(format!("the page has samples of {} of {n}", steps.len()));
    }
    let mut bytes = 0;
    for (at, step) in steps.iter().enumerate() {
        let share = (most - samples.heads.len()) / (steps.len() - at);
        match traced.step(*step) {
            Ok(recorded) => bytes = samples.take(traced, &recorded, anomalies, share, bytes),
            Err(error) => samples
                .notes
                .push(format!("samples of step {step} are left out: {error}")),
        }
    }
    if samples.heads.len() < samples.of {
        let shown = samples.heads.len();
        let note = format!(
            "the page has {shown} of {} samples of these steps; use --samples N for more",
            samples.of
        );
        samples.notes.push(note);
    }
    if bytes >= MOST_BYTES {
        let note = format!("the page has at most {} MB of samples", MOST_BYTES >> 20);
        samples.notes.push(note);
    }
    samples
}

impl Samples {
    /// Adds `share` samples of a step. Returns the size of all samples in bytes.
    fn take(
        &mut self,
        traced: &TracedRun,
        recorded: &RecordedStep,
        anomalies: &[Anomaly],
        share: usize,
        mut bytes: usize,
    ) -> usize {
        let schedule = traced.schedule();
        let view = ShownStep::new(schedule, recorded);
        let Some(stage) = sampled_stage(schedule, &view) else {
            return bytes;
        };
        let rows = view.rows(stage);
        self.of += rows.len();
        let named = named_rows(anomalies, recorded.step);
        let words = traced.token_texts(stage);
        for row in choose_rows(rows, &named, share) {
            if bytes >= MOST_BYTES {
                break;
            }
            let id = rows[row];
            let mut seen = view.sample(stage, id, words.as_deref());
            take_targets(&mut seen, words.as_deref());
            let rules = named.get(&id.0).cloned().unwrap_or_default();
            self.heads.push(head(&seen, rules));
            let tokens = seen.prompt.iter().chain(&seen.response);
            self.words.extend(tokens.cloned());
            // Strings and numbers always serialise to JSON.
            let block = serde_json::to_string(&sample(seen)).unwrap_or_default();
            bytes += block.len();
            self.blocks.push(block);
        }
        bytes
    }
}

/// The stage whose rows are the step's samples: the stage that wrote responses, otherwise the last one with rows.
fn sampled_stage(schedule: &Schedule, view: &ShownStep<'_>) -> Option<usize> {
    let stages = schedule.plan().stages();
    let has_rows = |stage: &usize| !view.rows(*stage).is_empty();
    let writes = |stage: &usize| {
        let planned = &stages[*stage];
        let mut written = planned.spec().writes.iter();
        written.any(|field| planned.key(&field.name) == keys::RESPONSES.name())
    };
    let writer = (0..stages.len()).find(|stage| writes(stage) && has_rows(stage));
    writer.or_else(|| (0..stages.len()).rev().find(has_rows))
}

/// Rows of a step for which rules fired, with the rules.
fn named_rows(anomalies: &[Anomaly], step: u64) -> BTreeMap<u64, Vec<String>> {
    let mut named: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for anomaly in anomalies.iter().filter(|anomaly| anomaly.step == step) {
        for id in &anomaly.sample_ids {
            let rules = named.entry(*id).or_default();
            if !rules.contains(&anomaly.rule) {
                rules.push(anomaly.rule.clone());
            }
        }
    }
    named
}

/// Positions of `share` rows in ascending order: the named rows, and others spread evenly.
fn choose_rows(
    rows: &[RowId],
    named: &BTreeMap<u64, Vec<String>>,
    share: usize,
) -> BTreeSet<usize> {
    let is_named = |at: &usize| named.contains_key(&rows[*at].0);
    let (first, others): (Vec<usize>, Vec<usize>) = (0..rows.len()).partition(is_named);
    let mut chosen: BTreeSet<usize> = first.into_iter().take(share).collect();
    let room = share - chosen.len();
    chosen.extend(evenly(others.len(), room).map(|at| others[at]));
    chosen
}

/// In supervised training, shows targets as responses; lists of the same length become values per token.
fn take_targets(seen: &mut SampleView, words: Option<&dyn TokenTexts>) {
    let mut rows = seen.per_row.iter();
    let at = rows.position(|row| row.key == keys::TARGETS.name());
    let Some(at) = at.filter(|_| seen.response.is_empty()) else {
        return;
    };
    let targets = seen.per_row.remove(at).value;
    let ids = targets.as_array().into_iter().flatten();
    let ids = ids.filter_map(|id| u32::try_from(id.as_u64()?).ok());
    let text = |id| words.map_or_else(String::new, |words| words.token(id));
    seen.response = ids.map(|id| (id, text(id))).collect();
    for row in std::mem::take(&mut seen.per_row) {
        match row.value {
            Value::Array(values) if values.len() == seen.response.len() => {
                seen.per_token.push((row.key, values));
            }
            _ => seen.per_row.push(row),
        }
    }
}

fn head(seen: &SampleView, rules: Vec<String>) -> SampleHead {
    let mut values = seen.per_row.iter();
    let reward = values.find(|row| row.key == keys::REWARDS.name());
    SampleHead {
        step: seen.step,
        id: seen.sample.clone(),
        tokens: seen.response.len(),
        reward: rounded(reward.and_then(|row| row.value.as_f64())),
        rules,
    }
}

fn sample(seen: SampleView) -> Sample {
    let ids = |tokens: Vec<(u32, String)>| tokens.into_iter().map(|(id, _)| id).collect();
    let short_list = |values: Vec<Value>| values.into_iter().map(short).collect::<Vec<_>>();
    let per_row = seen.per_row.into_iter().map(|row| {
        let value = match row.value {
            Value::Array(values) if values.len() > LISTED => {
                let left = values.len() - LISTED;
                let mut listed = short_list(values.into_iter().take(LISTED).collect());
                listed.push(format!("and {left} more").into());
                Value::Array(listed)
            }
            Value::Array(values) => Value::Array(short_list(values)),
            value => short(value),
        };
        (row.key, value, row.meaning)
    });
    let per_token = seen.per_token.into_iter();
    Sample {
        per_row: per_row.collect(),
        per_token: per_token
            .map(|(key, values)| (key, short_list(values)))
            .collect(),
        stage: seen.stage,
        prompt_text: seen.prompt_text,
        response_text: seen.response_text,
        prompt: ids(seen.prompt),
        response: ids(seen.response),
    }
}

/// A float with six digits; any other value unchanged.
fn short(value: Value) -> Value {
    match value.as_f64().filter(|_| value.is_f64()) {
        Some(number) => rounded(Some(number))
            .and_then(Number::from_f64)
            .map_or(value, Value::Number),
        None => value,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use verl_trace::show::RowValue;

    use super::*;

    #[test]
    fn rows_with_anomalies_are_taken_first() {
        let rows: Vec<RowId> = (0..10).map(RowId).collect();
        let named = BTreeMap::from([(7, vec!["low_ess".to_owned()])]);
        let chosen = |share| Vec::from_iter(choose_rows(&rows, &named, share));
        assert_eq!(chosen(0), [0usize; 0]);
        assert_eq!(chosen(1), [7]);
        assert_eq!(chosen(3), [0, 7, 9]);
        assert_eq!(chosen(20).len(), 10);
    }

    #[test]
    fn targets_are_shown_if_there_is_no_response() {
        struct Letters;
        impl TokenTexts for Letters {
            fn token(&self, id: u32) -> String {
                format!("<{id}>")
            }
        }
        let row = |key: &str, value: Value| RowValue {
            key: key.to_owned(),
            value,
            meaning: None,
        };
        let mut seen = SampleView {
            step: 1,
            stage: "update".to_owned(),
            sample: "0.1#0".to_owned(),
            row: 0,
            prompt_text: None,
            prompt: Vec::new(),
            response_text: None,
            response: Vec::new(),
            per_token: Vec::new(),
            per_row: vec![
                row("targets", json!([7, 9])),
                row("log_probs", json!([-0.5, -1.0])),
                row("answers", json!("9")),
            ],
        };
        take_targets(&mut seen, Some(&Letters));
        assert_eq!(
            seen.response,
            [(7, "<7>".to_owned()), (9, "<9>".to_owned())]
        );
        assert_eq!(
            seen.per_token,
            [("log_probs".to_owned(), vec![json!(-0.5), json!(-1.0)])]
        );
        assert_eq!(seen.per_row.len(), 1);
        // Targets do not replace a response.
        let before = SampleView {
            per_row: vec![row("targets", json!([1]))],
            ..seen
        };
        let mut after = before.clone();
        take_targets(&mut after, None);
        assert_eq!(after, before);
    }

    #[test]
    fn only_floats_are_shortened() {
        assert_eq!(short(json!(0.123_456_789)), json!(0.123_457));
        assert_eq!(short(json!(12_345_678)), json!(12_345_678));
        assert_eq!(short(json!("NaN")), json!("NaN"));
    }
}
