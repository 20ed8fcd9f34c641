//! A recorded step for people: the whole step as a table of stages, and one sample token by token.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::batch::RowId;
use crate::keys;
use crate::plan::PlannedStage;
use crate::resource::TokenTexts;
use crate::schedule::placement::Schedule;
use crate::trace::cell::Cell;
use crate::trace::compare::Rows;
use crate::trace::edges::compare_inputs;
use crate::trace::invariants::first_broken;
use crate::trace::recorded::{RecordedBatch, RecordedStage, RecordedStep};
use crate::trace::text::{Align, Table, count, one_line, short};

/// Columns of a terminal that a text may take.
const TEXT_WIDTH: usize = 88;
/// Columns of a token's text.
const TOKEN_WIDTH: usize = 16;
/// Rows of a stage that are listed.
const LISTED_ROWS: usize = 20;

/// Statistics of one key that a stage emitted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct KeySummary {
    /// The stage's own name of the key.
    pub key: String,
    /// Values, tokens of lists counted one by one.
    pub values: usize,
    /// Smallest finite value; of texts the smallest length (characters).
    pub min: Option<f64>,
    /// Mean of the finite values.
    pub mean: Option<f64>,
    /// Largest finite value.
    pub max: Option<f64>,
    /// Standard deviation (divides by n).
    pub std: Option<f64>,
    /// Values that are null.
    pub nulls: usize,
    /// Floats that are not finite.
    pub non_finite: usize,
}

/// One stage of a recorded step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageSummary {
    /// Its name.
    pub stage: String,
    /// Its kind.
    pub kind: String,
    /// Rows that it was given.
    pub rows_in: usize,
    /// Rows that it emitted.
    pub rows_out: usize,
    /// Calls that it took.
    pub calls: usize,
    /// Keys that it emitted, with their statistics.
    pub keys: Vec<KeySummary>,
    /// What is wrong with its record.
    pub marks: Vec<String>,
}

/// A recorded step as a table of stages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepSummary {
    /// The step.
    pub step: u64,
    /// Name of the pipeline.
    pub pipeline: String,
    /// Stages in the order of the plan.
    pub stages: Vec<StageSummary>,
}

/// The whole step: each recorded stage with statistics of what it emitted, and marks where something is wrong.
pub fn step_summary(schedule: &Schedule, recorded: &RecordedStep) -> StepSummary {
    let planned = schedule.plan.stages.iter().enumerate();
    let stages = planned.filter_map(|(index, planned)| {
        let stage = recorded.stages.get(&planned.name)?;
        Some(StageSummary {
            stage: planned.name.clone(),
            kind: planned.kind.clone(),
            rows_in: stage
                .inputs
                .iter()
                .map(|input| input.batch.num_rows())
                .sum(),
            rows_out: stage
                .outputs
                .iter()
                .map(|output| output.batch.num_rows())
                .sum(),
            calls: stage.inputs.len(),
            keys: key_summaries(planned, stage),
            marks: marks(schedule, recorded, index, stage),
        })
    });
    StepSummary {
        step: recorded.step,
        pipeline: schedule.plan.pipe.name.clone(),
        stages: stages.collect(),
    }
}

fn marks(
    schedule: &Schedule,
    recorded: &RecordedStep,
    index: usize,
    stage: &RecordedStage,
) -> Vec<String> {
    let edges = compare_inputs(schedule, recorded, index).into_iter();
    let mut marks: Vec<String> = edges
        .filter_map(|edges| {
            let writer = &schedule.plan.stages[edges.writer].name;
            let first = edges.compared.first?;
            Some(format!("not as `{writer}` wrote it: {}", first.place()))
        })
        .collect();
    marks.extend(first_broken(schedule, index, stage).map(|broken| {
        let side = if broken.output { "output" } else { "input" };
        let sample = broken
            .sample
            .map_or_else(String::new, |id| format!(", sample {id}"));
        format!("{side} key `{}`{sample}: {}", broken.key, broken.what)
    }));
    marks
}

fn key_summaries(planned: &PlannedStage, stage: &RecordedStage) -> Vec<KeySummary> {
    let rows = Rows::new(stage.outputs.iter().map(|output| &output.batch));
    let keys = planned.spec.writes.iter();
    keys.map(|field| key_summary(&field.name, &rows)).collect()
}

fn key_summary(key: &str, rows: &Rows<'_>) -> KeySummary {
    let mut summary = KeySummary {
        key: key.to_owned(),
        ..KeySummary::default()
    };
    let mut numbers: Vec<f64> = Vec::new();
    for id in rows.ids() {
        match rows.cell(*id, key) {
            None | Some(Cell::Null) => summary.nulls += 1,
            Some(Cell::Text(texts)) => {
                summary.values += texts.len();
                numbers.extend(texts.iter().map(|text| text.chars().count() as f64));
            }
            Some(values) => {
                summary.values += values.len();
                numbers.extend((0..values.len()).filter_map(|at| values.number(at)));
            }
        }
    }
    let total = numbers.len();
    numbers.retain(|number| number.is_finite());
    summary.non_finite = total - numbers.len();
    if !numbers.is_empty() {
        let n = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / n;
        let variance = numbers.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        summary.min = numbers.iter().copied().reduce(f64::min);
        summary.max = numbers.iter().copied().reduce(f64::max);
        (summary.mean, summary.std) = (Some(mean), Some(variance.sqrt()));
    }
    summary
}

impl fmt::Display for StepSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "step {} of {}", self.step, self.pipeline)?;
        let mut table = Table::new(&[
            ("stage", Align::Left),
            ("calls", Align::Right),
            ("rows", Align::Right),
            ("key", Align::Left),
            ("values", Align::Right),
            ("min", Align::Right),
            ("mean", Align::Right),
            ("max", Align::Right),
            ("std", Align::Right),
            ("marks", Align::Left),
        ]);
        let shown = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), short);
        for stage in &self.stages {
            let rows = match (stage.rows_in, stage.rows_out) {
                (given, made) if given == made || made == 0 => given.to_string(),
                (given, made) => format!("{given}→{made}"),
            };
            let mut head = vec![stage.stage.clone(), stage.calls.to_string(), rows];
            let mut mark = match stage.marks.len() {
                0 => String::new(),
                n => format!("! {n}"),
            };
            for key in &stage.keys {
                let mut marks: Vec<String> =
                    Vec::from_iter((!mark.is_empty()).then(|| mark.clone()));
                if key.non_finite > 0 {
                    marks.push(format!("{} not finite", key.non_finite));
                }
                if key.nulls > 0 {
                    marks.push(format!("{} null", key.nulls));
                }
                let numbers = [key.min, key.mean, key.max, key.std].map(shown);
                let own = [key.key.clone(), key.values.to_string()];
                table.row(
                    head.into_iter()
                        .chain(own)
                        .chain(numbers)
                        .chain([marks.join(", ")]),
                );
                head = vec![String::new(); 3];
                mark.clear();
            }
            if stage.keys.is_empty() {
                let blank = vec![String::new(); 5];
                table.row(
                    head.into_iter()
                        .chain(["-".to_owned()])
                        .chain(blank)
                        .chain([mark]),
                );
            }
        }
        write!(f, "{table}")?;
        for stage in &self.stages {
            for mark in &stage.marks {
                writeln!(f, "! `{}`: {mark}", stage.stage)?;
            }
        }
        Ok(())
    }
}

/// A key's value for one row that is no list of its tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowValue {
    /// The pipeline's name of the key.
    pub key: String,
    /// The value.
    pub value: Value,
    /// The value in words where it is a code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meaning: Option<&'static str>,
}

/// One sample with everything that the step recorded of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SampleView {
    /// The step.
    pub step: u64,
    /// The stage that was asked about.
    pub stage: String,
    /// Identity, as `epoch.row#sample`.
    pub sample: String,
    /// Position among the stage's rows.
    pub row: usize,
    /// Prompt as rendered, where it was recorded.
    pub prompt_text: Option<String>,
    /// Prompt tokens: id and text.
    pub prompt: Vec<(u32, String)>,
    /// Response as text, where it was recorded.
    pub response_text: Option<String>,
    /// Response tokens: id and text.
    pub response: Vec<(u32, String)>,
    /// Keys with one value a response token, by the pipeline's names.
    pub per_token: Vec<(String, Vec<Value>)>,
    /// Keys with one value a row.
    pub per_row: Vec<RowValue>,
}

/// Rows of one side of a stage, and which of them stands for each group.
struct SideRows<'a> {
    rows: Rows<'a>,
    prompts: HashMap<u64, u64>,
}

impl<'a> SideRows<'a> {
    fn new(batches: &'a [RecordedBatch]) -> SideRows<'a> {
        let rows = Rows::new(batches.iter().map(|recorded| &recorded.batch));
        let first = rows
            .ids()
            .iter()
            .filter(|id| RowId(**id).sample_index() == 0);
        SideRows {
            prompts: first.map(|id| (RowId(*id).group(), *id)).collect(),
            rows,
        }
    }

    /// The key's value for row `id`, or for its prompt.
    fn cell(&self, id: u64, key: &str) -> Option<Cell<'a>> {
        let found = match self.rows.has(id) {
            true => id,
            false => *self.prompts.get(&RowId(id).group())?,
        };
        self.rows.cell(found, key)
    }
}

/// A recorded step with its rows indexed once, to look at many samples of it.
pub struct StepView<'a> {
    schedule: &'a Schedule,
    step: u64,
    /// Stages of the plan: what each was given and emitted.
    sides: Vec<Option<(SideRows<'a>, SideRows<'a>)>>,
    rows: Vec<Vec<RowId>>,
}

impl<'a> StepView<'a> {
    /// Indexes a step.
    pub fn new(schedule: &'a Schedule, recorded: &'a RecordedStep) -> StepView<'a> {
        let stages = schedule.plan.stages.iter();
        let stages = stages.map(|planned| recorded.stages.get(&planned.name));
        StepView {
            schedule,
            step: recorded.step,
            rows: stages
                .clone()
                .map(|stage| stage.map_or_else(Vec::new, rows_of))
                .collect(),
            sides: stages
                .map(|stage| {
                    stage.map(|stage| (SideRows::new(&stage.inputs), SideRows::new(&stage.outputs)))
                })
                .collect(),
        }
    }

    /// Rows of a stage (by its index in the plan) in declared order.
    pub fn rows(&self, stage: usize) -> &[RowId] {
        &self.rows[stage]
    }

    /// Keys of row `id` under the pipeline's names: what each stage wrote of it or of its prompt, and what `asked` was
    /// given.
    fn gather(&self, asked: usize, id: RowId) -> Gathered<'a> {
        let mut keys: Vec<(String, Cell<'a>)> = Vec::new();
        let mut add = |side: &SideRows<'a>, local: &str, key: &str| {
            if !keys.iter().any(|(known, _)| known == key) {
                keys.extend(side.cell(id.0, local).map(|cell| (key.to_owned(), cell)));
            }
        };
        for (index, planned) in self.schedule.plan.stages.iter().enumerate() {
            let Some((given, written)) = &self.sides[index] else {
                continue;
            };
            for field in &planned.spec.writes {
                add(written, &field.name, planned.key(&field.name));
            }
            if index == asked {
                for edge in &planned.inputs {
                    add(given, &edge.local, &edge.key);
                }
            }
        }
        Gathered { keys }
    }
}

/// All that a step recorded of one row.
struct Gathered<'a> {
    keys: Vec<(String, Cell<'a>)>,
}

impl<'a> Gathered<'a> {
    fn take(&mut self, key: &str) -> Option<Cell<'a>> {
        let at = self.keys.iter().position(|(name, _)| name == key)?;
        Some(self.keys.remove(at).1)
    }

    fn take_text(&mut self, key: &str) -> Option<String> {
        match self.take(key)? {
            Cell::Text(texts) => texts.first().map(|text| (*text).to_owned()),
            _ => None,
        }
    }

    fn take_tokens(&mut self, key: &str, words: Option<&dyn TokenTexts>) -> Vec<(u32, String)> {
        let Some(Cell::U32(ids)) = self.take(key) else {
            return Vec::new();
        };
        let text = |id: u32| words.map_or_else(String::new, |words| words.token(id));
        ids.iter().map(|id| (*id, text(*id))).collect()
    }
}

/// The rows of a stage, in declared order: those that it emitted, or was given where it emits none.
pub fn rows_of(recorded: &RecordedStage) -> Vec<RowId> {
    let given = recorded.input_ids();
    let emitted = Rows::new(recorded.outputs.iter().map(|output| &output.batch));
    let ids = match emitted.ids().is_empty() {
        true => given,
        false => emitted.ordered(&given),
    };
    ids.into_iter().map(RowId).collect()
}

impl StepView<'_> {
    /// Everything that was recorded of row `id` of a stage (by its index in the plan); `words` turns token ids into
    /// text.
    pub fn sample(&self, stage: usize, id: RowId, words: Option<&dyn TokenTexts>) -> SampleView {
        let mut all = self.gather(stage, id);
        let prompt_text = all.take_text(keys::PROMPT_TEXTS.name());
        let response_text = all.take_text(keys::RESPONSE_TEXTS.name());
        let prompt = all.take_tokens(keys::PROMPTS.name(), words);
        let response = all.take_tokens(keys::RESPONSES.name(), words);
        let mut per_token = Vec::new();
        let mut per_row = Vec::new();
        for (key, values) in all.keys {
            let numbers: Vec<Value> = (0..values.len()).map(|at| as_json(&values, at)).collect();
            let is_list = is_ragged(self.schedule, &key);
            if is_list && !response.is_empty() && numbers.len() == response.len() {
                per_token.push((key, numbers));
                continue;
            }
            let value = match (is_list, numbers.len()) {
                (false, 0) => Value::Null,
                (false, 1) => numbers.into_iter().next().unwrap_or_default(),
                _ => Value::Array(numbers),
            };
            let meaning = meaning(&key, &value);
            per_row.push(RowValue {
                key,
                value,
                meaning,
            });
        }
        // What each token is comes before what was computed of it.
        per_token.sort_by_key(|(key, _)| key != keys::MASK_KINDS.name());
        SampleView {
            step: self.step,
            stage: self.schedule.plan.stages[stage].name.clone(),
            sample: id.to_string(),
            row: self.rows[stage]
                .iter()
                .position(|row| *row == id)
                .unwrap_or(0),
            prompt_text,
            prompt,
            response_text,
            response,
            per_token,
            per_row,
        }
    }
}

fn is_ragged(schedule: &Schedule, key: &str) -> bool {
    let field = schedule.plan.fields.get(key);
    let shape = field.and_then(|field| field.parsed_shape().ok());
    shape.is_some_and(|shape| shape.ragged().is_some())
}

fn as_json(values: &Cell<'_>, at: usize) -> Value {
    match values {
        Cell::Text(texts) => texts[at].into(),
        Cell::Bool(flags) => flags[at].into(),
        Cell::U64(numbers) => numbers[at].into(),
        Cell::I64(numbers) => numbers[at].into(),
        Cell::U8(_) | Cell::U32(_) => values.number(at).map_or(Value::Null, |v| json!(v as u64)),
        _ => match values.number(at) {
            Some(number) if number.is_finite() => json!(number),
            // JSON knows no such number; its name is better than nothing.
            Some(number) => number.to_string().into(),
            None => Value::Null,
        },
    }
}

fn meaning(key: &str, value: &Value) -> Option<&'static str> {
    let code = u8::try_from(value.as_u64()?).ok()?;
    (key == keys::FINISH_REASONS.name()).then_some(match code {
        keys::finish::EOS => "end of sequence",
        keys::finish::STOP => "stop text",
        keys::finish::LENGTH => "length limit",
        _ => "unknown",
    })
}

fn mask_word(value: &Value) -> String {
    match value.as_u64().and_then(|kind| u8::try_from(kind).ok()) {
        Some(keys::mask::ACTION) => "action".to_owned(),
        Some(keys::mask::OBSERVATION) => "observation".to_owned(),
        _ => value.to_string(),
    }
}

fn show(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_u64() {
            Some(whole) => whole.to_string(),
            None => short(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Array(values) => {
            let shown: Vec<String> = values.iter().take(8).map(show).collect();
            let more = if values.len() > 8 { ", …" } else { "" };
            format!(
                "[{}{more}] ({})",
                shown.join(", "),
                count(values.len() as u64, "value")
            )
        }
        other => other.to_string(),
    }
}

impl fmt::Display for SampleView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "step {}, stage `{}`, sample {} (row {})",
            self.step, self.stage, self.sample, self.row
        )?;
        let names = self.per_row.iter().map(|row| row.key.len());
        let wide = names.max().unwrap_or(0).max("response".len());
        for (name, text, tokens) in [
            ("prompt", &self.prompt_text, &self.prompt),
            ("response", &self.response_text, &self.response),
        ] {
            if text.is_some() || !tokens.is_empty() {
                let text = text
                    .as_ref()
                    .map_or("not recorded as text".to_owned(), |text| {
                        format!("\"{}\"", one_line(text, TEXT_WIDTH))
                    });
                writeln!(
                    f,
                    "{name:<wide$}  {text}, {}",
                    count(tokens.len() as u64, "token")
                )?;
            }
            if name == "prompt" {
                write_tokens(f, tokens)?;
            }
        }
        for RowValue {
            key,
            value,
            meaning,
        } in &self.per_row
        {
            let meaning = meaning.map_or_else(String::new, |meaning| format!(" ({meaning})"));
            let value = match value {
                Value::String(text) => format!("\"{}\"", one_line(text, TEXT_WIDTH)),
                other => show(other),
            };
            writeln!(f, "{key:<wide$}  {value}{meaning}")?;
        }
        if self.response.is_empty() {
            return Ok(());
        }
        let mut columns = vec![
            ("t", Align::Right),
            ("id", Align::Right),
            ("token", Align::Left),
        ];
        for (key, _) in &self.per_token {
            let is_mask = key == keys::MASK_KINDS.name();
            columns.push((key, if is_mask { Align::Left } else { Align::Right }));
        }
        let mut table = Table::new(&columns);
        for (t, (id, text)) in self.response.iter().enumerate() {
            let own = [t.to_string(), id.to_string(), one_line(text, TOKEN_WIDTH)];
            let values =
                self.per_token
                    .iter()
                    .map(|(key, values)| match key == keys::MASK_KINDS.name() {
                        true => mask_word(&values[t]),
                        false => show(&values[t]),
                    });
            table.row(own.into_iter().chain(values));
        }
        write!(f, "{table}")
    }
}

/// Tokens as `id‹text›`, as many on a line as fit.
fn write_tokens(f: &mut fmt::Formatter<'_>, tokens: &[(u32, String)]) -> fmt::Result {
    let mut line = String::new();
    for (id, text) in tokens {
        let shown = match text.is_empty() {
            true => id.to_string(),
            false => format!("{id}‹{}›", one_line(text, TOKEN_WIDTH)),
        };
        if !line.is_empty() && line.chars().count() + shown.chars().count() > TEXT_WIDTH {
            writeln!(f, "  {}", line.trim_end())?;
            line.clear();
        }
        line += &shown;
        line.push(' ');
    }
    match line.is_empty() {
        true => Ok(()),
        false => writeln!(f, "  {}", line.trim_end()),
    }
}

impl SampleView {
    /// As one JSON object: texts, rows' values by key, and a list of tokens with all that is known of each.
    pub fn to_json(&self) -> Value {
        let tokens = self.response.iter().enumerate().map(|(t, (id, text))| {
            let mut token = Map::new();
            token.insert("t".to_owned(), t.into());
            token.insert("id".to_owned(), (*id).into());
            token.insert("token".to_owned(), text.as_str().into());
            for (key, values) in &self.per_token {
                token.insert(key.clone(), values[t].clone());
            }
            Value::Object(token)
        });
        let prompt = self.prompt.iter();
        let prompt = prompt.map(|(id, text)| json!({"id": id, "token": text}));
        let rows: Map<String, Value> = self
            .per_row
            .iter()
            .map(|row| (row.key.clone(), row.value.clone()))
            .collect();
        json!({
            "step": self.step,
            "stage": self.stage,
            "sample": self.sample,
            "row": self.row,
            "prompt_text": self.prompt_text,
            "prompt": prompt.collect::<Vec<_>>(),
            "response_text": self.response_text,
            "tokens": tokens.collect::<Vec<_>>(),
            "row_values": rows,
        })
    }
}

/// The rows of one stage, a line each.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowList {
    /// The step.
    pub step: u64,
    /// The stage.
    pub stage: String,
    /// Names of the row values that are shown.
    pub keys: Vec<String>,
    /// Rows: identity, tokens of the response, values of `keys`, response as text.
    pub rows: Vec<ListedRow>,
}

/// A line of a [`RowList`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ListedRow {
    /// Identity, as `epoch.row#sample`.
    pub sample: String,
    /// Tokens of the response.
    pub tokens: usize,
    /// Values of the list's keys.
    pub values: Vec<Value>,
    /// Prompt and response as text.
    pub texts: [String; 2],
}

impl StepView<'_> {
    /// The rows of a stage (by its index in the plan) with their numbers.
    pub fn row_list(&self, stage: usize) -> RowList {
        let ids = self.rows[stage].iter();
        let views: Vec<SampleView> = ids.map(|id| self.sample(stage, *id, None)).collect();
        let mut keys: Vec<String> = Vec::new();
        for row in views.iter().flat_map(|view| &view.per_row) {
            if (row.value.is_number() || row.value.is_null()) && !keys.contains(&row.key) {
                keys.push(row.key.clone());
            }
        }
        let rows = views.into_iter().map(|view| {
            let value = |key: &String| {
                let found = view.per_row.iter().find(|row| row.key == *key);
                found.map_or(Value::Null, |row| row.value.clone())
            };
            ListedRow {
                values: keys.iter().map(value).collect(),
                tokens: view.response.len(),
                texts: [view.prompt_text, view.response_text].map(Option::unwrap_or_default),
                sample: view.sample,
            }
        });
        RowList {
            step: self.step,
            stage: self.schedule.plan.stages[stage].name.clone(),
            rows: rows.collect(),
            keys,
        }
    }
}

impl fmt::Display for RowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.rows.len();
        writeln!(
            f,
            "step {}, stage `{}`, {}",
            self.step,
            self.stage,
            count(n as u64, "row")
        )?;
        let mut columns = vec![("sample", Align::Left), ("tokens", Align::Right)];
        columns.extend(self.keys.iter().map(|key| (key.as_str(), Align::Right)));
        columns.extend([("prompt", Align::Left), ("response", Align::Left)]);
        let mut table = Table::new(&columns);
        for row in self.rows.iter().take(LISTED_ROWS) {
            let own = [row.sample.clone(), row.tokens.to_string()];
            let texts = row.texts.iter().map(|text| one_line(text, 28));
            table.row(
                own.into_iter()
                    .chain(row.values.iter().map(show))
                    .chain(texts),
            );
        }
        write!(f, "{table}")?;
        if n > LISTED_ROWS {
            writeln!(
                f,
                "  … and {} (all of them with --json)",
                count((n - LISTED_ROWS) as u64, "more row")
            )?;
        }
        Ok(())
    }
}
