//! Shares of tokens or rows that a one-sided clip affects, as reported by TRL.

use burn::tensor::{Bool, Tensor};

use super::{MetricId, Reduction};
use crate::tensor::ones_where;

/// `clip_ratio_low_mean`, `…_high_mean`, `…_region_mean` (either), `…_low_min` and `…_high_max` over rows.
pub(crate) fn clip_shares(
    low: Tensor<1, Bool>,
    high: Tensor<1, Bool>,
    like: &Tensor<1>,
) -> Vec<(MetricId, Tensor<1>)> {
    let region = ones_where(low.clone().bool_or(high.clone()), like);
    let (low, high) = (ones_where(low, like), ones_where(high, like));
    vec![
        (MetricId::CLIP_RATIO_LOW_MEAN, low.clone()),
        (MetricId::CLIP_RATIO_HIGH_MEAN, high.clone()),
        (MetricId::CLIP_RATIO_REGION_MEAN, region),
        (MetricId::CLIP_RATIO_LOW_MIN, low),
        (MetricId::CLIP_RATIO_HIGH_MAX, high),
    ]
}

/// How these are reduced: the extremes over rows, the means with `mean`.
pub(crate) fn clip_share_reduction(metric: MetricId, mean: Reduction) -> Reduction {
    match metric {
        MetricId::CLIP_RATIO_LOW_MIN => Reduction::LeastRow,
        MetricId::CLIP_RATIO_HIGH_MAX => Reduction::LargestRow,
        _ => mean,
    }
}
