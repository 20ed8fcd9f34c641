//! A recorded step with its rows indexed once: everything about one row, from every stage.

use std::collections::HashMap;

use verl_plan::schedule::placement::Schedule;
use verl_words::batch::RowId;
use verl_words::resource::TokenTexts;

use crate::compare::{Cell, Rows, rows_of};
use crate::files::{RecordedBatch, RecordedStep};

/// Rows of one side of a stage, and the row of sample 0 of each group.
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

/// A recorded step with its rows indexed once, to show many samples of it.
pub struct ShownStep<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) step: u64,
    /// Input and output of each stage of the plan.
    sides: Vec<Option<(SideRows<'a>, SideRows<'a>)>>,
    pub(super) rows: Vec<Vec<RowId>>,
}

impl<'a> ShownStep<'a> {
    /// Indexes a step.
    pub fn new(schedule: &'a Schedule, recorded: &'a RecordedStep) -> ShownStep<'a> {
        let stages = schedule.plan().stages().iter();
        let stages = stages.map(|planned| recorded.stages.get(planned.name()));
        ShownStep {
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

    /// Keys of row `id` under the pipeline's names: what each stage wrote for it or for its prompt, and the input of
    /// stage `asked`.
    pub(super) fn gather(&self, asked: usize, id: RowId) -> Gathered<'a> {
        let mut keys: Vec<(String, Cell<'a>)> = Vec::new();
        let mut add = |side: &SideRows<'a>, local: &str, key: &str| {
            if !keys.iter().any(|(known, _)| known == key) {
                keys.extend(side.cell(id.0, local).map(|cell| (key.to_owned(), cell)));
            }
        };
        for (index, planned) in self.schedule.plan().stages().iter().enumerate() {
            let Some((given, written)) = &self.sides[index] else {
                continue;
            };
            for field in &planned.spec().writes {
                add(written, &field.name, planned.key(&field.name));
            }
            if index == asked {
                for edge in planned.inputs() {
                    add(given, &edge.local, &edge.key);
                }
            }
        }
        Gathered { keys }
    }
}

/// Everything that a step recorded about one row.
pub(super) struct Gathered<'a> {
    pub(super) keys: Vec<(String, Cell<'a>)>,
}

impl<'a> Gathered<'a> {
    fn take(&mut self, key: &str) -> Option<Cell<'a>> {
        let at = self.keys.iter().position(|(name, _)| name == key)?;
        Some(self.keys.remove(at).1)
    }

    pub(super) fn take_text(&mut self, key: &str) -> Option<String> {
        match self.take(key)? {
            Cell::Text(texts) => texts.first().map(|text| (*text).to_owned()),
            _ => None,
        }
    }

    pub(super) fn take_tokens(
        &mut self,
        key: &str,
        words: Option<&dyn TokenTexts>,
    ) -> Vec<(u32, String)> {
        let Some(Cell::U32(ids)) = self.take(key) else {
            return Vec::new();
        };
        let text = |id: u32| words.map_or_else(String::new, |words| words.token(id));
        ids.iter().map(|id| (*id, text(*id))).collect()
    }
}
