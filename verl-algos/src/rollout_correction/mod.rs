//! Corrections for training on tokens that another policy sampled.
//!
//! A sampler computes in other kernels, at another precision, or with older weights than the training engine. With
//! q = ℓ_train − ℓ_roll of each action token, [`RolloutCorrection::correct`] returns importance weights e^q, bounded
//! ([`RolloutWeights`]), and a smaller mask, without the tokens or rows that are too far off ([`RejectionRule`]).
//! Neither has a gradient. Both modes of training end in [`RolloutCorrection::mini_batch`]:
//!
//! | mode | ℓ_train | ratio of the loss | weights |
//! |---|---|---|---|
//! | decoupled | ℓ_old, computed by the training engine at the start of the update | π/π_old | multiply the loss |
//! | bypass, `ppo_clip` | ℓ, of the current policy | π/π_roll | none: the ratio includes them |
//! | bypass, `reinforce` | ℓ | none: −A ℓ | multiply the loss |
//!
//! All in f64 on ragged rows. Values at observations are never read.
//!
//! # Source
//! Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"; Yao et
//! al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; verl `rollout_corr_helper`.

mod bypass;
mod correction;
mod diagnostics;
mod log_ratios;
mod presets;
mod rejection;
mod stats;
mod trl;
mod weights;

pub use bypass::BypassLoss;
pub use correction::{Correction, Mode, RolloutCorrection};
pub use log_ratios::{LogProbPair, all_scored};
pub use presets::Preset;
pub use rejection::{Divergence, RejectionLevel, RejectionRule, RejectionRuleName};
pub use stats::{Mismatch, RejectionStats, WeightStats};
pub use trl::{SamplerRatioMode, TrlSamplerRatio};
pub use weights::{RolloutWeights, WeightBound, WeightLevel};

/// Bound of a log-ratio before `exp`; e^20 is finite in f32, and far beyond any bound in use.
const LOG_RATIO_BOUND: f64 = 20.0;
