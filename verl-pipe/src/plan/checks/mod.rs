//! The checks of a pipeline, one rule a file. Each adds its findings; none stops at the first.

pub(crate) mod cycles;
pub(crate) mod keys;

use crate::diagnostic::Diagnostic;
use crate::plan::build::Draft;
use crate::plan::tables::Tables;

/// A check of what was declared.
pub(crate) type Check = fn(&Draft<'_>, &mut Vec<Diagnostic>);
/// A check that needs the stages in order and their tables.
pub(crate) type OrderedCheck = fn(&Draft<'_>, &[usize], &Tables, &mut Vec<Diagnostic>);

/// Checks of what was declared, in the order of their findings.
pub(crate) const DECLARED: &[Check] = &[keys::check];

/// Checks of the ordered graph, in the order of their findings.
pub(crate) const ORDERED: &[OrderedCheck] = &[];
