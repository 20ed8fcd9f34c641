//! The statistics of one key on one side of a stage in one step, and of the ratio of two log-probs. Knows neither rules nor
//! files.
//!
//! Slices arrive in any order. Counts, sketch and hash are sums, which do not depend on the order; means and deviations
//! are merged in the order of slices. So a row of the table does not depend on timing.
//!
//! The hash of a key is the sum over its rows, modulo 2⁶⁴, of XXH3-64 of the row's bytes with the row's `sample_id` as
//! seed. It does not depend on the division into slices, and changes with any bit of any value.

mod key_stats;
mod ratio;
mod row;
pub mod sketch;

pub use key_stats::{KeyStats, Place};
pub use ratio::{COUNTERPARTS, Parts, RatioStats, compare_log_probs};
pub(crate) use ratio::{bytes, floats};
pub use row::{QUANTILES, StatRow};
