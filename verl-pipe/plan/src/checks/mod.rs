//! The checks of a pipeline, one rule a file. Each adds its findings; none stops at the first.

pub(crate) mod agreements;
pub(crate) mod barriers;
pub(crate) mod batch_sizes;
pub(crate) mod cycles;
pub(crate) mod devices;
pub(crate) mod dtypes;
pub(crate) mod files;
pub(crate) mod frozen;
pub(crate) mod keys;
pub(crate) mod lengths;
pub(crate) mod models;
pub(crate) mod names;
pub(crate) mod nulls;
pub(crate) mod one_device;
pub(crate) mod processes;
pub(crate) mod refills;
pub(crate) mod roles;
pub(crate) mod samples;
pub(crate) mod settings;
pub(crate) mod shapes;
pub(crate) mod stated;
pub(crate) mod tags;
pub(crate) mod trace_settings;
pub(crate) mod traced;
pub(crate) mod twice;
pub(crate) mod unread;
pub(crate) mod vocabularies;

use verl_words::diagnostic::Diagnostic;

use crate::build::Draft;
use crate::tables::Tables;

/// A check of the declarations.
pub(crate) type Check = fn(&Draft<'_>, &mut Vec<Diagnostic>);
/// A check that needs the stages in order and their tables.
pub(crate) type OrderedCheck = fn(&Draft<'_>, &[usize], &Tables, &mut Vec<Diagnostic>);

/// Checks of settings, in the order of their findings; [`files`] runs after them.
pub(crate) const SETTINGS: &[Check] = &[
    batch_sizes::check,
    one_device::check,
    devices::check,
    processes::check,
    names::check,
    settings::check,
];

/// Checks of the declarations, in the order of their findings.
pub(crate) const DECLARED: &[Check] = &[
    stated::check,
    models::check,
    roles::check,
    vocabularies::check,
    agreements::check,
    keys::check,
    shapes::check,
    dtypes::check,
    nulls::check,
    tags::check,
    frozen::check,
    traced::check,
    trace_settings::check,
    twice::check,
    unread::check,
];

/// Checks of the ordered graph, in the order of their findings.
pub(crate) const ORDERED: &[OrderedCheck] = &[
    samples::check,
    lengths::check,
    refills::check,
    barriers::check,
];
