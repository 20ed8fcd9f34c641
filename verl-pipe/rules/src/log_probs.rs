//! Rules on log-probs that were compared with a counterpart, before the update.

use verl_words::keys::OLD_LOG_PROBS;

use super::robust::shown;
use super::rows::{at, largest};
use super::{Hit, StepView};
use crate::format::Side;
use crate::stats::RatioStats;

/// Fewest tokens for a meaningful mean or effective sample size.
const TOKENS: u64 = 256;
/// Fewest rows for a meaningful standard error.
const ROWS: u64 = 16;
/// Standard errors below 0 at which a mean is not chance: 3 in 100,000.
const ERRORS: f64 = 4.0;
/// Fewest tokens for a meaningful difference between two forward passes: it is not an estimate from samples, but a few
/// tokens of almost equal probability may differ in rank.
const FORWARD_TOKENS: u64 = 32;

pub(super) fn negative_kl(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    ratios(view, |_, ratio| {
        let error = ratio.k1_error?;
        let enough = ratio.tokens >= TOKENS && ratio.rows >= ROWS;
        (enough && ratio.k1 < -limit && ratio.k1 < -ERRORS * error).then(|| {
            let what = format!(
                "the mean of k1 against `{}` is {} ± {} nats over {} tokens of {} rows, but a KL divergence is not negative",
                ratio.counterpart,
                shown(ratio.k1),
                shown(error),
                ratio.tokens,
                ratio.rows
            );
            (ratio.k1, what)
        })
    })
}

pub(super) fn low_ess(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    ratios(view, |key, ratio| {
        let compared = key == OLD_LOG_PROBS.name() && ratio.tokens >= TOKENS;
        (compared && ratio.ess < limit).then(|| {
            let what = format!(
                "the effective sample size against `{}` is {} of {} tokens",
                ratio.counterpart,
                shown(ratio.ess * ratio.tokens as f64),
                ratio.tokens
            );
            (ratio.ess, what)
        })
    })
}

pub(super) fn probability_difference(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    ratios(view, |key, ratio| {
        let compared = key == OLD_LOG_PROBS.name() && ratio.tokens >= FORWARD_TOKENS;
        (compared && ratio.probability_diff > limit).then(|| {
            let what = format!(
                "probabilities differ from `{}` by {} on average over {} tokens, log-probs by up to {} nats",
                ratio.counterpart,
                shown(ratio.probability_diff),
                ratio.tokens,
                shown(ratio.diff_max)
            );
            (ratio.probability_diff, what)
        })
    })
}

/// Hits on log-prob keys that were compared with a counterpart, with the rows that differ most from it.
fn ratios(
    view: &StepView<'_>,
    judge: impl Fn(&str, &RatioStats) -> Option<(f64, String)>,
) -> Vec<Hit> {
    let rows = view.stats.iter().filter(|row| row.side == Side::Output);
    rows.filter_map(|row| {
        let (value, what) = judge(&row.key, row.ratio.as_ref()?)?;
        let distances = view.distances.get(&row.key).cloned().unwrap_or_default();
        let samples = largest(distances.into_iter().map(|(id, d)| (d, id)).collect());
        Some(Hit {
            value,
            samples,
            what,
            ..at(row)
        })
    })
    .collect()
}
