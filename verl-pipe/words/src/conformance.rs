//! The rules that every [`DataLoaderInterface`] follows, as a check for the tests of a data set.

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::data::{DataError, DataLoaderInterface};

/// Maximum number of rows compared; in larger data sets they are spread evenly.
const ROWS: usize = 256;

/// A rule that a data set breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The rule, in a few words.
    pub rule: &'static str,
    /// What was found instead.
    pub found: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.found)
    }
}

/// Returns all rules that a data set breaks; `open` opens it again at each call.
///
/// - It has rows, and each of them can be read; an index past the end is an error that names the origin.
/// - A row is the same whenever it is read, on any thread and in any order.
/// - After reopening, it has the same rows, origin and fingerprint.
///
/// ```
/// use std::sync::Arc;
/// use serde_json::{Map, Value};
/// use verl_pipe::conformance::check_data;
/// use verl_pipe::data::{DataError, DataLoaderInterface};
///
/// struct Squares;
/// impl DataLoaderInterface for Squares {
///     fn len(&self) -> usize {
///         10
///     }
///     fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
///         if index >= self.len() {
///             let (path, reason) = (self.origin(), "there are only 10".to_owned());
///             return Err(DataError::Row { path, row: index.saturating_add(1), reason });
///         }
///         Ok(Map::from_iter([("square".to_owned(), (index * index).into())]))
///     }
///     fn origin(&self) -> String {
///         "squares".to_owned()
///     }
///     fn fingerprint(&self) -> String {
///         "squares-10".to_owned()
///     }
/// }
///
/// assert_eq!(check_data(|| Ok(Arc::new(Squares))), []);
/// ```
pub fn check_data<F>(open: F) -> Vec<Violation>
where
    F: Fn() -> Result<Arc<dyn DataLoaderInterface>, DataError>,
{
    let mut check = Check::default();
    if let (Some(data), Some(again)) = (check.open(&open), check.open(&open)) {
        check.sizes(data.as_ref());
        check.past_the_end(data.as_ref());
        check.rows(&data);
        check.reopened(data.as_ref(), again.as_ref());
    }
    check.violations
}

type Row = Result<Map<String, Value>, String>;

#[derive(Default)]
struct Check {
    violations: Vec<Violation>,
}

fn read(data: &dyn DataLoaderInterface, index: usize) -> Row {
    data.row(index).map_err(|error| error.to_string())
}

/// The indices to test, in ascending order, including the first and the last row.
fn tested_indices(len: usize) -> Vec<usize> {
    if len <= ROWS {
        return (0..len).collect();
    }
    (0..ROWS).map(|at| at * (len - 1) / (ROWS - 1)).collect()
}

impl Check {
    fn fail(&mut self, rule: &'static str, found: impl Into<String>) {
        let found = found.into();
        self.violations.push(Violation { rule, found });
    }

    fn open<F>(&mut self, open: &F) -> Option<Arc<dyn DataLoaderInterface>>
    where
        F: Fn() -> Result<Arc<dyn DataLoaderInterface>, DataError>,
    {
        open()
            .map_err(|error| self.fail("it can be opened more than once", error.to_string()))
            .ok()
    }

    fn sizes(&mut self, data: &dyn DataLoaderInterface) {
        let rule = "an open data set has rows and a name";
        let (len, is_empty) = (data.len(), data.is_empty());
        if len == 0 || is_empty {
            let found = format!("len {len}, is_empty {is_empty}");
            self.fail(rule, found);
        }
        if data.origin().trim().is_empty() || data.fingerprint().trim().is_empty() {
            let found = format!(
                "origin `{}`, fingerprint `{}`",
                data.origin(),
                data.fingerprint()
            );
            self.fail(rule, found);
        }
    }

    fn past_the_end(&mut self, data: &dyn DataLoaderInterface) {
        let rule = "an index past the end is an error that names the origin";
        for index in [data.len(), data.len() + 1, usize::MAX] {
            match read(data, index) {
                Ok(_) => self.fail(rule, format!("row {index} of {} exists", data.len())),
                Err(text) if !text.contains(&data.origin()) => self.fail(rule, text),
                Err(_) => {}
            }
        }
    }

    fn rows(&mut self, data: &Arc<dyn DataLoaderInterface>) {
        let indices = tested_indices(data.len());
        let first: Vec<Row> = indices.iter().map(|&i| read(data.as_ref(), i)).collect();
        for (index, row) in indices.iter().zip(&first) {
            if let Err(error) = row {
                let found = format!("row {index} of {}: {error}", data.len());
                self.fail("every row can be read", found);
            }
        }
        let rule = "a row is the same whenever it is read";
        for (at, &index) in indices.iter().enumerate().rev() {
            if read(data.as_ref(), index) != first[at] {
                self.fail(
                    rule,
                    format!("row {index} differs when rows are read backwards"),
                );
            }
        }
        let other = data.clone();
        let elsewhere = std::thread::spawn(move || {
            let rows = indices.iter().map(|&i| (i, read(other.as_ref(), i)));
            rows.collect::<Vec<_>>()
        });
        match elsewhere.join() {
            Ok(rows) => {
                for ((index, row), first) in rows.iter().zip(&first) {
                    if row != first {
                        self.fail(rule, format!("row {index} differs on another thread"));
                    }
                }
            }
            Err(_) => self.fail(rule, "reading on another thread panicked"),
        }
    }

    fn reopened(&mut self, data: &dyn DataLoaderInterface, again: &dyn DataLoaderInterface) {
        let rule = "a reopened data set is the same";
        for (what, one, two) in [
            ("rows", data.len().to_string(), again.len().to_string()),
            ("origin", data.origin(), again.origin()),
            ("fingerprint", data.fingerprint(), again.fingerprint()),
        ] {
            if one != two {
                self.fail(rule, format!("{what}: `{one}`, then `{two}`"));
            }
        }
        for index in tested_indices(data.len().min(again.len())) {
            if read(data, index) != read(again, index) {
                self.fail(rule, format!("row {index} differs"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A data set that changes: its rows contain the number of reads so far.
    struct Unstable {
        opened: usize,
        reads: AtomicUsize,
    }

    impl DataLoaderInterface for Unstable {
        fn len(&self) -> usize {
            3
        }
        fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
            let read = self.reads.fetch_add(1, Ordering::SeqCst);
            if index == 1 {
                let (path, reason) = ("unstable".to_owned(), "torn".to_owned());
                return Err(DataError::Row {
                    path,
                    row: 2,
                    reason,
                });
            }
            Ok(Map::from_iter([("read".to_owned(), read.into())]))
        }
        fn origin(&self) -> String {
            "unstable".to_owned()
        }
        fn fingerprint(&self) -> String {
            self.opened.to_string()
        }
    }

    #[test]
    fn every_violation_is_found() {
        let opened = AtomicUsize::new(0);
        let violations = check_data(|| {
            Ok(Arc::new(Unstable {
                opened: opened.fetch_add(1, Ordering::SeqCst),
                reads: AtomicUsize::new(0),
            }))
        });
        let reported: Vec<String> = violations.iter().map(ToString::to_string).collect();
        for text in [
            "an index past the end is an error that names the origin: row 3 of 3 exists",
            "every row can be read: row 1 of 3: `unstable`, row 2: torn",
            "a row is the same whenever it is read: row 0 differs when rows are read backwards",
            "a row is the same whenever it is read: row 2 differs on another thread",
            "a reopened data set is the same: fingerprint: `0`, then `1`",
            "a reopened data set is the same: row 0 differs",
        ] {
            assert!(
                reported.iter().any(|line| line == text),
                "{text}\nnot in {reported:#?}"
            );
        }
        let rejected = check_data(|| {
            Err(DataError::Empty {
                path: "nothing".to_owned(),
            })
        });
        assert_eq!(rejected.len(), 2);
    }

    #[test]
    fn rows_of_large_data_sets_are_spread() {
        let rows = tested_indices(10_000);
        assert_eq!((rows.len(), rows[0], rows[ROWS - 1]), (ROWS, 0, 9_999));
        assert_eq!(tested_indices(3), [0, 1, 2]);
    }
}
