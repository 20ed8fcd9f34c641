//! Problems of rows as findings: equal problems are reported once, with the numbers of the rows.

use std::collections::BTreeMap;

use verl_declare::pipe::{DataDecl, StageDecl};
use verl_words::data::DataError;
use verl_words::diagnostic::Diagnostic;
use verl_words::stage::{LongRows, RowPreview, StageError};

use super::StageRows;
use crate::checks::settings::stage_place;
use crate::display::count;

/// The place of findings about rows.
pub(super) struct Place<'a> {
    pub stage: &'a StageDecl,
    /// Name of the data set.
    pub data: &'a str,
    /// Whether it was opened completely.
    pub is_complete: bool,
}

impl Place<'_> {
    fn text(&self) -> String {
        format!("{}, data set `{}`", stage_place(self.stage), self.data)
    }
}

/// Most rows that one finding lists.
const MAX_LISTED_ROWS: usize = 5;

/// Most sorts of problems in one finding.
const MAX_SORTS: usize = 5;

/// Problems of rows, by row number from 0.
#[derive(Default)]
pub(super) struct RowProblems {
    /// Rows that lack a column: by column.
    missing: BTreeMap<String, (Vec<usize>, String)>,
    /// Rows that cannot be used: by reason, in order of first occurrence.
    unusable: Vec<(String, Vec<usize>)>,
    /// Rows that are too long, with the reason and the number of tokens.
    long: Vec<(usize, String, usize)>,
    /// The first row with a token id outside the vocabulary, and that id.
    beyond: Option<(usize, u32)>,
    beyond_rows: usize,
    num_ids: usize,
    /// For each sort: the first row, its text, the number of rows.
    notes: Vec<(&'static str, usize, String, usize)>,
}

impl RowProblems {
    /// Adds the error for which a row is refused.
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

    /// Adds the problems of a row that could be written for a model with `num_ids` token ids (0: unlimited).
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

    /// The rows before `end` that have problems, each with its problem.
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

    /// All problems as findings.
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
                        "{} of `{data}` may not be trained as intended",
                        rows_of(*rows, report.tokenised)
                    ),
                )
                .because(format!("row {}: {text}", row + 1))
                .help("inspect the row with `pipe check --rows`"),
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
        let sorts = self.unusable.iter().take(MAX_SORTS);
        let mut lines: Vec<String> = sorts
            .map(|(reason, rows)| format!("{}: {reason}", numbers(rows)))
            .collect();
        if self.unusable.len() > MAX_SORTS {
            lines.push(format!(
                "and {} with other problems",
                count(
                    self.unusable[MAX_SORTS..]
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
                1 => "no other checked row has".to_owned(),
                rows => format!("{rows} checked rows have"),
            }
        );
        Some(
            Diagnostic::error("D007", format!("`{data}` has tokens that `{model}` cannot read"))
                .because(why)
                .help("use the tokenizer files that belong to the weights; an id in generation_config.json or config.json may be wrong, such as `eos_token_id`"),
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
        let all = place.is_complete && rows.len() == report.rows;
        match long_rows {
            LongRows::Refused => Some(
                Diagnostic::error("D004", format!("{seen} of `{data}` {are} too long"))
                    .because(why)
                    .help("shorten them, or set `on_long` to \"drop\" or \"truncate\""),
            ),
            LongRows::Dropped if all => Some(
                Diagnostic::error("D004", format!("every row of `{data}` is too long, so none is left"))
                    .because(why)
                    .help("shorten the rows, use a model with a longer context, or set `on_long = \"truncate\"`"),
            ),
            LongRows::Dropped => Some(
                Diagnostic::warning("D005", format!("{seen} of `{data}` {are} too long and left out"))
                    .because(why)
                    .help("ignore this if it is intended; otherwise shorten them, or set `on_long` to \"truncate\" or \"error\""),
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
    let listed: Vec<String> = rows
        .iter()
        .take(MAX_LISTED_ROWS)
        .map(|row| (row + 1).to_string())
        .collect();
    let more = rows.len().saturating_sub(MAX_LISTED_ROWS);
    match (&listed[..], more) {
        ([row], _) => format!("row {row}"),
        (_, 0) => format!("rows {}", listed.join(", ")),
        _ => format!("rows {} and {more} more", listed.join(", ")),
    }
}

/// The finding that a data set cannot be opened.
pub(super) fn unreadable(decl: &DataDecl, error: &DataError) -> Diagnostic {
    let help = match error {
        DataError::Row { .. } => "fix or remove that row",
        DataError::Empty { .. } => "use a data set with rows",
        _ => "use a readable JSON Lines or Parquet file",
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

/// The finding that no row can be written at all.
pub(super) fn cannot_write(decl: &StageDecl, error: &StageError) -> Diagnostic {
    Diagnostic::error("D007", "rows cannot be turned into tokens")
        .at(stage_place(decl))
        .because(error.to_string())
        .help("fix the files in the model folder, or change the settings of the stage")
}
