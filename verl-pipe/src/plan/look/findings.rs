//! What is wrong with rows, as findings: faults that are alike are reported once, with the numbers of the rows.

use std::collections::BTreeMap;

use super::StageRows;
use crate::data::DataError;
use crate::diagnostic::Diagnostic;
use crate::pipe::{DataDecl, StageDecl};
use crate::plan::checks::settings::stage_place;
use crate::plan::display::count;
use crate::stage::{LongRows, RowPreview, StageError};

/// Where rows are at fault.
pub(super) struct Place<'a> {
    pub stage: &'a StageDecl,
    /// Name of the data set.
    pub data: &'a str,
    /// Whether it was opened whole.
    pub is_whole: bool,
}

impl Place<'_> {
    fn text(&self) -> String {
        format!("{}, data set `{}`", stage_place(self.stage), self.data)
    }
}

/// Rows of one finding that are named.
const NAMED: usize = 5;

/// Faults of different sorts in one finding.
const SORTS: usize = 5;

/// What is wrong with rows, by their numbers from 0.
#[derive(Default)]
pub(super) struct RowFaults {
    /// Rows that lack a column: by column.
    missing: BTreeMap<String, (Vec<usize>, String)>,
    /// Rows that cannot be used: by reason, in the order in which reasons are met.
    unusable: Vec<(String, Vec<usize>)>,
    /// Rows that are too long, with the reason and the number of tokens.
    long: Vec<(usize, String, usize)>,
    /// The first token that the model cannot read.
    beyond: Option<(usize, u32)>,
    beyond_rows: usize,
    num_ids: usize,
    /// By sort: the first row, the text, the number of rows.
    notes: Vec<(&'static str, usize, String, usize)>,
}

impl RowFaults {
    /// Adds what a row is refused for.
    pub fn add(&mut self, row: usize, error: DataError) {
        match error {
            DataError::MissingColumn { column, known, .. } => {
                let rows = &mut self.missing.entry(column).or_insert((Vec::new(), known)).0;
                rows.push(row);
            }
            DataError::Row { reason, .. } => self.add_unusable(row, reason),
            other => self.add_unusable(row, other.to_string()),
        }
    }

    fn add_unusable(&mut self, row: usize, reason: String) {
        match self.unusable.iter_mut().find(|(other, _)| *other == reason) {
            Some((_, rows)) => rows.push(row),
            None => self.unusable.push((reason, vec![row])),
        }
    }

    /// Adds what is to be said of a row that could be written for a model of `num_ids` token ids (0: any number).
    pub fn add_written(&mut self, row: usize, written: &RowPreview, num_ids: usize) {
        if let Some(reason) = &written.too_long {
            let targets = written.targets.iter().map(|target| target.tokens.len());
            let tokens = written.prompt.len() + targets.max().unwrap_or(0);
            self.long.push((row, reason.clone(), tokens));
        }
        let targets = written.targets.iter().flat_map(|target| &target.tokens);
        let mut ids = written.prompt.iter().chain(targets);
        if let Some(id) = ids.find(|id| num_ids > 0 && **id as usize >= num_ids) {
            self.num_ids = num_ids;
            self.beyond_rows += 1;
            self.beyond.get_or_insert((row, *id));
        }
        for note in &written.notes {
            match self.notes.iter_mut().find(|(sort, ..)| *sort == note.sort) {
                Some((.., rows)) => *rows += 1,
                None => self.notes.push((note.sort, row, note.text.clone(), 1)),
            }
        }
    }

    /// The rows before `end` that are at fault, with what is wrong.
    pub fn before(&self, end: usize) -> BTreeMap<usize, String> {
        let missing = self.missing.iter().flat_map(|(column, (rows, known))| {
            let text = format!("there is no column `{column}`; {known}");
            rows.iter().map(move |row| (*row, text.clone()))
        });
        let unusable = self.unusable.iter();
        let unusable =
            unusable.flat_map(|(reason, rows)| rows.iter().map(move |row| (*row, reason.clone())));
        missing
            .chain(unusable)
            .filter(|(row, _)| *row < end)
            .collect()
    }

    /// All of it as findings.
    pub fn findings(
        self,
        place: &Place<'_>,
        report: &StageRows,
        long_rows: LongRows,
        model: &str,
    ) -> Vec<Diagnostic> {
        let data = place.data;
        let mut findings = Vec::new();
        for (column, (rows, known)) in &self.missing {
            let what = match rows.len() == report.rows {
                true => format!("`{data}` has no column `{column}`"),
                false => format!(
                    "column `{column}` is missing in {} of `{data}`",
                    rows_of(rows.len(), report.rows)
                ),
            };
            findings.push(
                Diagnostic::error("D002", what)
                    .because(format!("{known} ({})", numbers(rows)))
                    .help("name a column that every row has; a dot reaches into an object, as in `reward_model.ground_truth`"),
            );
        }
        findings.extend(self.unusable(data, report));
        findings.extend(self.beyond(data, model));
        findings.extend(self.too_long(place, report, long_rows));
        for (_, row, text, rows) in &self.notes {
            findings.push(
                Diagnostic::warning(
                    "D006",
                    format!(
                        "{} of `{data}` may not be trained as meant",
                        rows_of(*rows, report.tokenised)
                    ),
                )
                .because(format!("row {}: {text}", row + 1))
                .help("look at the row with `pipe check --rows`"),
            );
        }
        let at = place.text();
        findings
            .into_iter()
            .map(|finding| finding.at(at.clone()))
            .collect()
    }

    fn unusable(&self, data: &str, report: &StageRows) -> Option<Diagnostic> {
        let all: usize = self.unusable.iter().map(|(_, rows)| rows.len()).sum();
        let sorts = self.unusable.iter().take(SORTS);
        let mut lines: Vec<String> = sorts
            .map(|(reason, rows)| format!("{}: {reason}", numbers(rows)))
            .collect();
        if self.unusable.len() > SORTS {
            lines.push(format!(
                "and {} of other faults",
                count(
                    self.unusable[SORTS..]
                        .iter()
                        .map(|(_, rows)| rows.len())
                        .sum(),
                    "row"
                )
            ));
        }
        (all > 0).then(|| {
            Diagnostic::error(
                "D003",
                format!("{} of `{data}` cannot be used", rows_of(all, report.rows)),
            )
            .because(lines.join("\n"))
            .help("fix or remove these rows, or change the settings of the stage that reads them")
        })
    }

    fn beyond(&self, data: &str, model: &str) -> Option<Diagnostic> {
        let (row, id) = self.beyond?;
        let why = format!(
            "row {} has the token id {id}, but the vocabulary of `{model}` ends at {}; {} such an id",
            row + 1,
            self.num_ids,
            match self.beyond_rows {
                1 => "no other row looked at has".to_owned(),
                rows => format!("{rows} rows looked at have"),
            }
        );
        Some(
            Diagnostic::error("D007", format!("`{data}` has tokens that `{model}` cannot read"))
                .because(why)
                .help("give the tokenizer files that belong to the weights; an id of generation_config.json or config.json may be wrong, such as `eos_token_id`"),
        )
    }

    fn too_long(
        &self,
        place: &Place<'_>,
        report: &StageRows,
        long_rows: LongRows,
    ) -> Option<Diagnostic> {
        let (row, reason, _) = self
            .long
            .iter()
            .max_by_key(|(row, _, tokens)| (*tokens, std::cmp::Reverse(*row)))?;
        let rows: Vec<usize> = self.long.iter().map(|(row, ..)| *row).collect();
        let seen = rows_of(rows.len(), report.tokenised);
        let are = if rows.len() == 1 { "is" } else { "are" };
        let why = match rows.len() {
            1 => format!("row {}: {reason}", row + 1),
            _ => format!(
                "{}; in the longest, row {}, {reason}",
                numbers(&rows),
                row + 1
            ),
        };
        let data = place.data;
        let all = place.is_whole && rows.len() == report.rows;
        match long_rows {
            LongRows::Refused => Some(
                Diagnostic::error("D004", format!("{seen} of `{data}` {are} too long"))
                    .because(why)
                    .help("shorten them, or set `on_long` to \"drop\" or \"truncate\""),
            ),
            LongRows::Dropped if all => Some(
                Diagnostic::error("D004", format!("every row of `{data}` is too long, so that none is left"))
                    .because(why)
                    .help("shorten the rows, give a model with a longer context, or set `on_long = \"truncate\"`"),
            ),
            LongRows::Dropped => Some(
                Diagnostic::warning("D005", format!("{seen} of `{data}` {are} too long and left out"))
                    .because(why)
                    .help("nothing to do where that is meant; otherwise shorten them, or set `on_long` to \"truncate\" or \"error\""),
            ),
            LongRows::Cut => None,
        }
    }
}

/// `3 of 1000 rows`.
fn rows_of(rows: usize, all: usize) -> String {
    format!("{rows} of {}", count(all, "row"))
}

/// `row 3`, `rows 3, 4, 5, 6, 7 and 12 more`.
fn numbers(rows: &[usize]) -> String {
    let named: Vec<String> = rows
        .iter()
        .take(NAMED)
        .map(|row| (row + 1).to_string())
        .collect();
    let more = rows.len().saturating_sub(NAMED);
    match (&named[..], more) {
        ([row], _) => format!("row {row}"),
        (_, 0) => format!("rows {}", named.join(", ")),
        _ => format!("rows {} and {more} more", named.join(", ")),
    }
}

/// The finding that a data set cannot be opened.
pub(super) fn unreadable(decl: &DataDecl, error: &DataError) -> Diagnostic {
    let help = match error {
        DataError::Row { .. } => "fix or remove that row",
        DataError::Empty { .. } => "give a data set with rows",
        _ => "give a JSON Lines or Parquet file that can be read",
    };
    Diagnostic::error("D001", format!("data set `{}` cannot be read", decl.name))
        .at(format!("[data.{}] ({})", decl.name, decl.kind))
        .because(error.to_string())
        .help(help)
}

/// The finding that a column cannot be read, in any row.
pub(super) fn column_unreadable(place: &Place<'_>, error: &DataError) -> Diagnostic {
    Diagnostic::error("D001", format!("data set `{}` cannot be read", place.data))
        .at(place.text())
        .because(error.to_string())
        .help("name a column of another type, or convert the file")
}

/// The finding that no row at all can be written.
pub(super) fn cannot_write(decl: &StageDecl, error: &StageError) -> Diagnostic {
    Diagnostic::error("D007", "rows cannot be turned into tokens")
        .at(stage_place(decl))
        .because(error.to_string())
        .help("fix the files of the model's folder, or change the settings of the stage")
}
