//! Checks the rows of a pipeline's data sets before a run, without loading weights: finds the rows that a run would
//! refuse.
//!
//! The check reads the columns of every row, and renders and tokenises some rows exactly as the run does: the first
//! [`Look::rows`], and the [`Look::longest`] with the most text wherever they are in the file, which include the rows
//! too long for a model. If a data set takes long to open, a partial check sees only its first rows
//! ([`DataConfig::open_start`]).
//!
//! [`DataConfig::open_start`]: verl_words::stage::DataConfig::open_start

mod findings;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;
use verl_declare::pipe::{DataPipe, StageDecl};
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::diagnostic::Diagnostic;
use verl_words::panics::catch_panic;
use verl_words::stage::{PreviewContext, RowPreview, RowPreviews, StageError};

use crate::Plan;
use crate::build::{Prepared, plan_prepared, prepare, sorted};
use findings::{Place, RowProblems};
pub use rows::{ShownRow, ShownTarget, ShownToken, Spread, StageRows};

/// How much of the data a check reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Number of rows to render and tokenise, from the first on.
    pub rows: usize,
    /// Number of further rows to render and tokenise: those with the most text.
    pub longest: usize,
    /// Number of rows of each source to return as they are written, from the first on.
    pub shown: usize,
    /// Whether to open every data set completely, as a run does, however long that takes.
    pub complete: bool,
}

impl Default for Look {
    fn default() -> Self {
        Look {
            rows: 1000,
            longest: 100,
            shown: 0,
            complete: false,
        }
    }
}

/// The result of [`Plannable::check`](crate::Plannable::check).
#[derive(Clone)]
pub struct Checked {
    /// The plan, or all findings if at least one of them is an error.
    pub plan: Result<Plan, Vec<Diagnostic>>,
    /// The rows of each source that could be checked.
    pub rows: Vec<StageRows>,
}

/// [`Plannable::check`](crate::Plannable::check).
pub(crate) fn check_with_rows(pipe: &DataPipe, look: &Look) -> Checked {
    let prepared = prepare(pipe);
    let inspection = inspect_data(pipe, &prepared, look);
    let plan = match plan_prepared(pipe, &prepared) {
        Ok(mut plan) if !inspection.findings.iter().any(Diagnostic::is_error) => {
            plan.warnings.extend(inspection.findings);
            plan.opened = inspection.opened;
            Ok(plan)
        }
        Ok(plan) => Err(sorted([plan.warnings, inspection.findings].concat())),
        Err(findings) => Err(sorted([findings, inspection.findings].concat())),
    };
    Checked {
        plan,
        rows: inspection.rows,
    }
}

/// What a check found in the data sets of a pipeline.
#[derive(Default)]
pub(crate) struct Inspection {
    pub findings: Vec<Diagnostic>,
    pub rows: Vec<StageRows>,
    /// Data sets that were opened completely.
    pub opened: BTreeMap<String, Arc<dyn DataLoaderInterface>>,
}

/// Opens the data sets of a pipeline and checks the rows of its sources.
pub(crate) fn inspect_data(pipe: &DataPipe, prepared: &Prepared<'_>, look: &Look) -> Inspection {
    let mut inspection = Inspection::default();
    let mut data: BTreeMap<String, Arc<dyn DataLoaderInterface>> = BTreeMap::new();
    for decl in &pipe.data {
        // `checks::files` reports missing files.
        if (decl.check)(&prepared.context).is_err() {
            continue;
        }
        let opened = match look.complete {
            true => (decl.open)(&prepared.context).map(|rows| (rows, true)),
            false => {
                (decl.open_start)(&prepared.context).map(|start| (start.rows, start.is_complete))
            }
        };
        match opened {
            Ok((rows, is_complete)) => {
                if is_complete {
                    inspection.opened.insert(decl.name.clone(), rows.clone());
                }
                data.insert(decl.name.clone(), rows);
            }
            Err(error) => inspection.findings.push(findings::unreadable(decl, &error)),
        }
    }
    let context = PreviewContext {
        data: &data,
        models: &prepared.context.model_infos,
    };
    for stage in prepared.stages.iter().filter(|stage| stage.spec.is_some()) {
        inspect_stage(stage.decl, prepared, context, look, &mut inspection);
    }
    inspection
}

/// Most rows whose columns are read: a generated data set may have any number of rows.
const MAX_SCANNED_ROWS: usize = 1 << 20;

fn inspect_stage(
    decl: &StageDecl,
    prepared: &Prepared<'_>,
    context: PreviewContext<'_>,
    look: &Look,
    inspection: &mut Inspection,
) {
    let Ok(stage) = (decl.build)(&prepared.context) else {
        return;
    };
    let previews = catch_panic(|| stage.preview(context))
        .unwrap_or_else(|panic| Err(StageError::failed(format!("it panicked: {panic}"))));
    let previews = match previews {
        Ok(Some(previews)) => previews,
        Ok(None) => return,
        Err(error) => {
            inspection
                .findings
                .push(findings::cannot_write(decl, &error));
            return;
        }
    };
    let num_rows = previews.rows().min(MAX_SCANNED_ROWS);
    let is_opened_completely = inspection.opened.contains_key(previews.data());
    let place = Place {
        stage: decl,
        data: previews.data(),
        is_complete: is_opened_completely && num_rows == previews.rows(),
    };
    let (sizes, mut problems) = match scan(previews.as_ref(), num_rows) {
        Ok(scanned) => scanned,
        // An error of the file, which every row would repeat.
        Err(error) => {
            inspection
                .findings
                .push(findings::column_unreadable(&place, &error));
            return;
        }
    };
    let refused = problems.before(look.shown);
    let chosen = chosen(&sizes, look);
    let rows: Vec<(usize, Result<RowPreview, DataError>)> = chosen
        .par_iter()
        .map(|&row| (row, guarded(row, || previews.row(row))))
        .collect();
    let model = context.models.get(previews.model());
    let mut report = StageRows::new(decl, previews.data(), num_rows, place.is_complete);
    for (row, written) in rows {
        if row < look.shown {
            let texts = model.and_then(|model| model.texts.as_ref());
            report.shown.push(ShownRow::new(row, &written, texts));
        }
        match written {
            Ok(written) => {
                problems.add_written(row, &written, model.map_or(0, |model| model.num_ids));
                report.count(&written);
            }
            Err(error) => problems.add(row, error),
        }
    }
    let refused = refused.into_iter();
    report
        .shown
        .extend(refused.map(|(row, reason)| ShownRow::refused(row, reason)));
    report.shown.sort_by_key(|shown| shown.row);
    let long_rows = previews.long_rows();
    inspection
        .findings
        .extend(problems.findings(&place, &report, long_rows, previews.model()));
    report.finish();
    inspection.rows.push(report);
}

/// Reads row `row`; a panic, for example in a tokenizer, becomes an error of the row.
fn guarded<T>(row: usize, read: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    catch_panic(read).unwrap_or_else(|panic| {
        Err(DataError::Row {
            path: String::new(),
            row: row + 1,
            reason: format!("reading it panicked: {panic}"),
        })
    })
}

/// Sizes of all rows, `None` for those that cannot be read, and the problems of these rows.
///
/// # Errors
/// A problem of the whole data set.
fn scan(
    previews: &dyn RowPreviews,
    rows: usize,
) -> Result<(Vec<Option<usize>>, RowProblems), DataError> {
    if let Err(error @ (DataError::Unreadable { .. } | DataError::Empty { .. })) =
        guarded(0, || previews.measure(0))
    {
        return Err(error);
    }
    let measured: Vec<Result<usize, DataError>> = (0..rows)
        .into_par_iter()
        .map(|row| guarded(row, || previews.measure(row)))
        .collect();
    let mut problems = RowProblems::default();
    let sizes = measured
        .into_iter()
        .enumerate()
        .map(|(row, size)| size.map_err(|error| problems.add(row, error)).ok());
    let sizes = sizes.collect();
    Ok((sizes, problems))
}

/// The rows to render: the first and the largest ones, in ascending order.
fn chosen(sizes: &[Option<usize>], look: &Look) -> Vec<usize> {
    let sound = sizes.iter().enumerate();
    let sound = sound.filter_map(|(row, size)| size.map(|size| (size, row)));
    let first = look.rows.max(look.shown);
    let (mut chosen, mut others): (Vec<_>, Vec<_>) = sound.partition(|(_, row)| *row < first);
    others.sort_by_key(|(size, row)| (std::cmp::Reverse(*size), *row));
    chosen.extend(others.into_iter().take(look.longest));
    let mut chosen: Vec<usize> = chosen.into_iter().map(|(_, row)| row).collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests;
