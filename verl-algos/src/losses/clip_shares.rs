//! Shares of tokens or rows that a one-sided clip affects, as reported by TRL.

use burn::tensor::{Bool, Tensor};

use super::Reduction;
use crate::tensor::ones_where;

/// `clip_ratio_low_mean`, `…_high_mean`, `…_region_mean` (either), `…_low_min` and `…_high_max` over rows.
pub(crate) fn clip_shares(
    low: Tensor<1, Bool>,
    high: Tensor<1, Bool>,
    like: &Tensor<1>,
) -> Vec<(&'static str, Tensor<1>)> {
    let region = ones_where(low.clone().bool_or(high.clone()), like);
    let (low, high) = (ones_where(low, like), ones_where(high, like));
    vec![
        ("clip_ratio_low_mean", low.clone()),
        ("clip_ratio_high_mean", high.clone()),
        ("clip_ratio_region_mean", region),
        ("clip_ratio_low_min", low),
        ("clip_ratio_high_max", high),
    ]
}

/// How these are reduced: the extremes over rows, the means with `mean`.
pub(crate) fn clip_share_reduction(metric: &str, mean: Reduction) -> Reduction {
    match metric {
        "clip_ratio_low_min" => Reduction::LeastRow,
        "clip_ratio_high_max" => Reduction::LargestRow,
        _ => mean,
    }
}
