//! How far the sampler was from the training engine.

use super::LOG_RATIO_BOUND;
use super::log_ratios::LogRatios;
use super::stats::{Mismatch, largest, smallest};
use crate::masked;

/// A token that the sampler scored.
struct Scored {
    row: usize,
    train: f64,
    rollout: f64,
}

/// The mismatch over the tokens that the sampler scored, and over the rows that have such tokens.
pub(super) fn mismatch(ratios: &LogRatios) -> Mismatch {
    let each = ratios.rows.iter().zip(&ratios.train).zip(&ratios.rollout);
    let scored = each.filter_map(|((&row, &train), rollout)| {
        let rollout = (*rollout)?;
        Some(Scored {
            row,
            train,
            rollout,
        })
    });
    let tokens: Vec<Scored> = scored.collect();
    let mean = |f: fn(&Scored) -> f64| masked::mean(&tokens.iter().map(f).collect::<Vec<_>>());
    let rows = row_means(&tokens, ratios.lengths.len());
    let of_rows = |f: fn(&RowMeans) -> f64| rows.iter().map(f).collect::<Vec<f64>>();
    let mean_of_rows = |f: fn(&RowMeans) -> f64| masked::mean(&of_rows(f));
    let differences = of_rows(RowMeans::log_ppl_diff);
    Mismatch {
        kl: mean(|t| t.rollout - t.train),
        k3_kl: mean(|t| libm::expm1(t.train - t.rollout) - (t.train - t.rollout)),
        probs_diff_mean: mean(|t| (libm::exp(t.train) - libm::exp(t.rollout)).abs()),
        chi2_token: mean(|t| chi_square(t.train - t.rollout)),
        chi2_seq: mean_of_rows(|row| chi_square(-row.log_ppl_diff() * row.tokens)),
        training_ppl: mean_of_rows(|row| libm::exp(-row.train)),
        training_log_ppl: mean_of_rows(|row| -row.train),
        rollout_ppl: mean_of_rows(|row| libm::exp(-row.rollout)),
        rollout_log_ppl: mean_of_rows(|row| -row.rollout),
        log_ppl_diff: masked::mean(&differences),
        log_ppl_abs_diff: mean_of_rows(|row| row.log_ppl_diff().abs()),
        log_ppl_diff_max: largest(&differences),
        log_ppl_diff_min: smallest(&differences),
        ppl_ratio: mean_of_rows(|row| libm::exp(row.log_ppl_diff())),
    }
}

/// ρ² − 1 of a log-ratio.
fn chi_square(q: f64) -> f64 {
    libm::expm1(2.0 * q.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
}

/// Mean log-probs of a row.
#[derive(Clone, Default)]
struct RowMeans {
    tokens: f64,
    train: f64,
    rollout: f64,
}

impl RowMeans {
    /// Log of π_train's perplexity over π_roll's.
    fn log_ppl_diff(&self) -> f64 {
        self.rollout - self.train
    }
}

/// Mean log-probs of the rows that have a scored token.
fn row_means(tokens: &[Scored], num_rows: usize) -> Vec<RowMeans> {
    let mut rows = vec![RowMeans::default(); num_rows];
    for token in tokens {
        rows[token.row].tokens += 1.0;
        rows[token.row].train += token.train;
        rows[token.row].rollout += token.rollout;
    }
    rows.retain(|row| row.tokens > 0.0);
    for row in &mut rows {
        row.train /= row.tokens;
        row.rollout /= row.tokens;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ragged::Ragged;
    use crate::rollout_correction::LogProbPair;

    #[test]
    fn by_hand() {
        // Probabilities of the training engine and the sampler: ½ and ¼, 1 and ½ | ¼ and ½ | nothing scored.
        let actions = Ragged::<bool>::from_rows([vec![true, true], vec![true], vec![true]]);
        let log = |rows: [Vec<f64>; 3]| Ragged::<f64>::from_rows(rows).map(|_, _, p| p.ln());
        let train = log([vec![0.5, 1.0], vec![0.25], vec![0.5]]);
        let rollout = log([vec![0.25, 0.5], vec![0.5], vec![1.0]]);
        let rollout = rollout.map(|b, _, log_prob| (b < 2).then_some(log_prob));
        let pair = LogProbPair {
            actions: &actions,
            train_log_probs: &train,
            rollout_log_probs: &rollout,
        };
        let got = mismatch(&LogRatios::new(&pair).unwrap());
        let ln2 = 2f64.ln();
        let expected = [
            ("kl", -ln2 / 3.0),
            ("k3_kl", (2.0 * (1.0 - ln2) + (ln2 - 0.5)) / 3.0),
            ("probs_diff_mean", 1.0 / 3.0),
            ("chi2_token", (3.0 + 3.0 - 0.75) / 3.0),
            ("chi2_seq", (15.0 - 0.75) / 2.0),
            ("training_ppl", (2f64.sqrt() + 4.0) / 2.0),
            ("training_log_ppl", (0.5 + 2.0) * ln2 / 2.0),
            ("rollout_ppl", (8f64.sqrt() + 2.0) / 2.0),
            ("rollout_log_ppl", (1.5 + 1.0) * ln2 / 2.0),
            ("log_ppl_diff", 0.0),
            ("log_ppl_abs_diff", ln2),
            ("log_ppl_diff_max", ln2),
            ("log_ppl_diff_min", -ln2),
            ("ppl_ratio", 1.25),
        ];
        for ((name, value), (expected_name, expected)) in got.named().into_iter().zip(expected) {
            assert_eq!(name, expected_name);
            assert!((value - expected).abs() < 1e-12, "{name}: {value}");
        }
    }
}
