//! The rows of one stage, one per line.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::sample::SampleView;
use super::value::show;
use super::view::ShownStep;
use crate::text::{Align, Table, count, one_line};

/// Number of rows that are listed.
const LISTED_ROWS: usize = 20;

/// The rows of one stage, one per line.
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

impl ShownStep<'_> {
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
            stage: self.schedule.plan().stages()[stage].name().to_owned(),
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
