//! Checks every row of a data set before the first step: which rows cannot be used, which are too long, and what to report
//! about the others. So none of this ends a run later, when a row is drawn.
//!
//! Rows are tokenised in parallel, one block at a time, and checked in order, so that reports do not depend on timing.

use rayon::prelude::*;
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::stage::StageError;

use super::encode::TooLong;
use super::format::OnLong;
use super::notes::{Notes, RowNote};
use super::source::Source;

/// Row errors that are reported together.
const FAULTS: usize = 5;

/// Rows that are tokenised before the first of them is checked.
const BLOCK: usize = 4096;

/// The result of checking a row.
#[derive(Debug, Default)]
pub(crate) struct SurveyedRow {
    /// What is too long in it.
    pub long: Option<TooLong>,
    /// What to report about it.
    pub notes: Vec<RowNote>,
}

/// Rows that are too long.
#[derive(Debug, Default)]
struct LongRows {
    /// Numbers of all rows that are too long, from 0.
    rows: Vec<usize>,
    /// The first few of them.
    first: Vec<(usize, TooLong)>,
    longest: Option<(usize, TooLong)>,
}

impl LongRows {
    fn add(&mut self, row: usize, long: TooLong) {
        self.rows.push(row);
        if self.first.len() < FAULTS {
            self.first.push((row, long.clone()));
        }
        let is_longer = |(_, other): &(usize, TooLong)| long.tokens > other.tokens;
        if self.longest.as_ref().is_none_or(is_longer) {
            self.longest = Some((row, long));
        }
    }
}

impl Source {
    /// Checks the rows that are drawn from, and drops those that are too long if `on_long` says so.
    ///
    /// # Errors
    /// The first few rows that `look` refuses, together; rows that are too long, if `on_long` is `error`; a data set with no
    /// rows left.
    pub(crate) fn survey(
        &mut self,
        on_long: OnLong,
        look: impl Fn(&Source, usize) -> Result<SurveyedRow, DataError> + Sync,
    ) -> Result<(), StageError> {
        let (mut long, mut notes, mut faults) = (LongRows::default(), Notes::default(), Vec::new());
        for block in self.rows.chunks(BLOCK) {
            let looked = block.par_iter().map(|row| look(self, *row));
            let looked: Vec<Result<SurveyedRow, DataError>> = looked.collect();
            for (row, looked) in block.iter().zip(looked) {
                match looked {
                    Ok(surveyed) => {
                        notes.add(*row, surveyed.notes);
                        surveyed
                            .long
                            .into_iter()
                            .for_each(|found| long.add(*row, found));
                    }
                    Err(fault) => faults.push(fault),
                }
            }
            if faults.len() > FAULTS {
                break;
            }
        }
        refuse_faults(self.data.as_ref(), faults)?;
        for text in notes.texts(&self.data.origin(), self.rows.len()) {
            tracing::warn!("{text}");
        }
        if let Some((row, longest)) = &long.longest {
            match on_long {
                OnLong::Error => return Err(self.refuse_long(&long)),
                OnLong::Drop => self.drop_long(&long.rows, *row, longest)?,
                OnLong::Truncate => {}
            }
        }
        Ok(())
    }

    /// The error about rows that are too long.
    fn refuse_long(&self, long: &LongRows) -> StageError {
        let path = self.data.origin();
        let count = long.rows.len();
        if let [(row, only)] = &long.first[..] {
            let reason = only.refusal();
            let row = row + 1;
            return StageError::Data(DataError::Row { path, row, reason });
        }
        let first = long.first.iter();
        let first = first.map(|(row, long)| format!("\n  row {}: {}", row + 1, long.reason));
        let first: String = first.collect();
        let more = if count > FAULTS {
            "; the first are"
        } else {
            ""
        };
        StageError::failed(format!(
            "`{path}`: {count} of {} rows are too long{more}:{first}\nraise the limit, shorten them, or set `on_long` to \"drop\" or \"truncate\"",
            self.rows.len()
        ))
    }

    /// Drops the rows `long`, of which `row` is the longest.
    fn drop_long(
        &mut self,
        long: &[usize],
        row: usize,
        longest: &TooLong,
    ) -> Result<(), StageError> {
        let (all, origin, row) = (self.rows.len(), self.data.origin(), row + 1);
        let TooLong { reason, help, .. } = longest;
        if long.len() == all {
            return Err(StageError::failed(format!(
                "`{origin}`: all rows are too long, so `on_long = \"drop\"` leaves none; in the longest, row {row}, {reason}; {help}, or set `on_long = \"truncate\"`"
            )));
        }
        let is_long = |row: &usize| long.binary_search(row).is_ok();
        self.rows.retain(|row| !is_long(row));
        tracing::warn!(
            "`{origin}`: {} of {all} rows are too long and left out, {} are kept; in the longest, row {row}, {reason}; {help}, or set `on_long` to \"truncate\" or \"error\"",
            long.len(),
            self.rows.len()
        );
        Ok(())
    }
}

/// Reports the first few rows that cannot be used.
fn refuse_faults(
    data: &dyn DataLoaderInterface,
    mut faults: Vec<DataError>,
) -> Result<(), StageError> {
    let more = faults.len() > FAULTS;
    faults.truncate(FAULTS);
    if faults.len() < 2 {
        return faults.pop().map_or(Ok(()), |fault| Err(fault.into()));
    }
    let lines: Vec<String> = faults.iter().map(|fault| format!("\n  {fault}")).collect();
    Err(StageError::failed(format!(
        "`{}` has rows that cannot be used{}:{}",
        data.origin(),
        if more { "; the first are" } else { "" },
        lines.concat()
    )))
}
