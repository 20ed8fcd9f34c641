//! A look at the rows of a pipeline's data sets before a run: what a run would refuse of them, without its weights.
//!
//! Every row's columns are read, and some rows are rendered and tokenised as the run will do it: the first [`Look::rows`],
//! and the [`Look::longest`] with the most text wherever they stand, among which the ones too long for a model are. Of a
//! data set that takes long to open, a look at less than the whole sees the first rows alone ([`DataConfig::open_start`]).
//!
//! [`DataConfig::open_start`]: crate::stage::DataConfig::open_start

mod findings;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use crate::data::{DataError, DataLoaderInterface};
use crate::diagnostic::Diagnostic;
use crate::pipe::{DataPipe, StageDecl};
use crate::plan::Plan;
use crate::plan::build::{Prepared, prepare, sorted};
use crate::run::channel::caught;
use crate::stage::{PreviewContext, RowPreview, RowPreviews, StageError};
use findings::{Place, RowFaults};
pub use rows::{ShownRow, ShownTarget, ShownToken, Spread, StageRows};

/// How much a check looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Rows that are rendered and tokenised, from the first on.
    pub rows: usize,
    /// Rows that are rendered and tokenised beside these: those with the most text.
    pub longest: usize,
    /// Rows of each source to give back as they are written, from the first on.
    pub shown: usize,
    /// Whether data sets are opened whole whatever that takes, as a run has to.
    pub whole: bool,
}

impl Default for Look {
    fn default() -> Self {
        Look {
            rows: 1000,
            longest: 100,
            shown: 0,
            whole: false,
        }
    }
}

/// What [`DataPipe::check`] comes to.
#[derive(Clone)]
pub struct Checked {
    /// The plan, or all findings where at least one of them is an error.
    pub plan: Result<Plan, Vec<Diagnostic>>,
    /// What each source makes of its rows, as far as that could be looked at.
    pub rows: Vec<StageRows>,
}

impl DataPipe {
    /// As [`DataPipe::plan`], and looks at the rows of the data sets, as `pipe check` does: what a run would refuse of them
    /// is a finding like the others. Loads no weights.
    ///
    /// ```
    /// use verl_pipe::pipe::DataPipe;
    /// use verl_pipe::plan::look::Look;
    ///
    /// let checked = DataPipe::new("empty").check(&Look::default());
    /// assert!(checked.plan.unwrap().stages.is_empty());
    /// assert!(checked.rows.is_empty());
    /// ```
    pub fn check(&self, look: &Look) -> Checked {
        let prepared = prepare(self);
        let looked = look_at_data(self, &prepared, look);
        let plan = match self.plan_prepared(&prepared) {
            Ok(mut plan) if !looked.findings.iter().any(Diagnostic::is_error) => {
                plan.warnings.extend(looked.findings);
                plan.opened = looked.opened;
                Ok(plan)
            }
            Ok(plan) => Err(sorted([plan.warnings, looked.findings].concat())),
            Err(findings) => Err(sorted([findings, looked.findings].concat())),
        };
        Checked {
            plan,
            rows: looked.rows,
        }
    }
}

/// What was found in the data sets of a pipeline.
#[derive(Default)]
pub(crate) struct Looked {
    pub findings: Vec<Diagnostic>,
    pub rows: Vec<StageRows>,
    /// Data sets that were opened whole.
    pub opened: BTreeMap<String, Arc<dyn DataLoaderInterface>>,
}

/// Opens the data sets of a pipeline and looks at the rows of its sources.
pub(crate) fn look_at_data(pipe: &DataPipe, prepared: &Prepared<'_>, look: &Look) -> Looked {
    let mut looked = Looked::default();
    let mut data: BTreeMap<String, Arc<dyn DataLoaderInterface>> = BTreeMap::new();
    for decl in &pipe.data {
        // A file that is not there is reported by the check of files.
        if (decl.check)(&prepared.context).is_err() {
            continue;
        }
        let opened = match look.whole {
            true => (decl.open)(&prepared.context).map(|rows| (rows, true)),
            false => (decl.open_start)(&prepared.context).map(|start| (start.rows, start.is_whole)),
        };
        match opened {
            Ok((rows, is_whole)) => {
                if is_whole {
                    looked.opened.insert(decl.name.clone(), rows.clone());
                }
                data.insert(decl.name.clone(), rows);
            }
            Err(error) => looked.findings.push(findings::unreadable(decl, &error)),
        }
    }
    let context = PreviewContext {
        data: &data,
        models: &prepared.context.model_infos,
    };
    for stage in prepared.stages.iter().filter(|stage| stage.spec.is_some()) {
        look_at_stage(stage.decl, prepared, context, look, &mut looked);
    }
    looked
}

/// Rows whose columns are read at most: a generated data set may have any number.
const GLANCES: usize = 1 << 20;

fn look_at_stage(
    decl: &StageDecl,
    prepared: &Prepared<'_>,
    context: PreviewContext<'_>,
    look: &Look,
    looked: &mut Looked,
) {
    let Ok(stage) = (decl.build)(&prepared.context) else {
        return;
    };
    let previews = caught(|| stage.preview(context))
        .unwrap_or_else(|panic| Err(StageError::failed(format!("it panicked: {panic}"))));
    let previews = match previews {
        Ok(Some(previews)) => previews,
        Ok(None) => return,
        Err(error) => {
            looked.findings.push(findings::cannot_write(decl, &error));
            return;
        }
    };
    let num_rows = previews.rows().min(GLANCES);
    let is_opened_whole = looked.opened.contains_key(previews.data());
    let place = Place {
        stage: decl,
        data: previews.data(),
        is_whole: is_opened_whole && num_rows == previews.rows(),
    };
    let (sizes, mut faults) = match glance_at(previews.as_ref(), num_rows) {
        Ok(glanced) => glanced,
        // A fault of the file, which every row would repeat.
        Err(error) => {
            looked
                .findings
                .push(findings::column_unreadable(&place, &error));
            return;
        }
    };
    let refused = faults.before(look.shown);
    let chosen = chosen(&sizes, look);
    let rows: Vec<(usize, Result<RowPreview, DataError>)> = chosen
        .par_iter()
        .map(|&row| (row, guarded(row, || previews.row(row))))
        .collect();
    let model = context.models.get(previews.model());
    let mut report = StageRows::new(decl, previews.data(), num_rows, place.is_whole);
    for (row, written) in rows {
        if row < look.shown {
            let texts = model.and_then(|model| model.texts.as_ref());
            report.shown.push(ShownRow::new(row, &written, texts));
        }
        match written {
            Ok(written) => {
                faults.add_written(row, &written, model.map_or(0, |model| model.num_ids));
                report.count(&written);
            }
            Err(error) => faults.add(row, error),
        }
    }
    let refused = refused.into_iter();
    report
        .shown
        .extend(refused.map(|(row, reason)| ShownRow::refused(row, reason)));
    report.shown.sort_by_key(|shown| shown.row);
    let long_rows = previews.long_rows();
    looked
        .findings
        .extend(faults.findings(&place, &report, long_rows, previews.model()));
    report.finish();
    looked.rows.push(report);
}

/// What is read of row `row`; a panic, of a tokenizer say, is a fault of the row.
fn guarded<T>(row: usize, read: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    caught(read).unwrap_or_else(|panic| {
        Err(DataError::Row {
            path: String::new(),
            row: row + 1,
            reason: format!("what reads it panicked: {panic}"),
        })
    })
}

/// Sizes of all rows, `None` for those that cannot be read, and what is wrong with these.
///
/// # Errors
/// What is wrong with the data set as a whole.
fn glance_at(
    previews: &dyn RowPreviews,
    rows: usize,
) -> Result<(Vec<Option<usize>>, RowFaults), DataError> {
    if let Err(error @ (DataError::Unreadable { .. } | DataError::Empty { .. })) =
        guarded(0, || previews.glance(0))
    {
        return Err(error);
    }
    let glances: Vec<Result<usize, DataError>> = (0..rows)
        .into_par_iter()
        .map(|row| guarded(row, || previews.glance(row)))
        .collect();
    let mut faults = RowFaults::default();
    let sizes = glances
        .into_iter()
        .enumerate()
        .map(|(row, glance)| glance.map_err(|error| faults.add(row, error)).ok());
    let sizes = sizes.collect();
    Ok((sizes, faults))
}

/// The rows to render: the first ones and the largest, in their order.
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
