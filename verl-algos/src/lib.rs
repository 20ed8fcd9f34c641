//! Exact reinforcement-learning maths for language models; no I/O, no randomness, no knowledge of pipelines.
//!
//! | module | what | form |
//! |---|---|---|
//! | [`advantages`] | rewards into advantages: GAE, GRPO (s − μ_g)/(σ_g + ε) and its relatives | plain f64 over [`Ragged`] rows |
//! | [`ilql`] | offline Q-learning: Q, V, CQL and AWAC terms, target heads, decoding | packed, tensors `[N, V]` |
//! | [`entropy_control`] | the coefficient of the entropy bonus, fixed or adaptive | plain |
//! | [`functions`] | exponentials and logarithms with the same bits on every CPU | tensors |
//! | [`kl`] | estimators k1, k2, k3 of KL(π‖π_ref); KL in the reward | plain, and tensors `[N]` |
//! | [`kl_control`] | the KL coefficient, fixed or adaptive | plain |
//! | [`log_probs`] | log-probs and entropies from logits | tensors `[N, V]` to `[N]` |
//! | [`aggregate`] | token losses into one number: Σ w_t E_t with weights known beforehand | plain |
//! | [`losses`] | policy losses (PPO clip, GSPO, CISPO, GMPO, SAPO, DPPO, TRL's), value, KL, entropy, SFT, distillation; partial sums over packed tokens | tensors `[N]` |
//! | [`losses`] | DPO and relatives, KTO, ORPO, CPO, SimPO, Bradley–Terry; partial sums over rows and pairs | tensors `[N]` |
//! | [`rewards`] | shaping and scaling of scores, group filter | plain |
//! | [`rollout_correction`] | weights e^(ℓ_train − ℓ_roll) and rejection where the sampler is off | plain f64 over [`Ragged`] rows |
//! | [`masked`] | sum, mean, variance, whitening | plain, packed |
//!
//! Nothing here has padding. Ragged rows carry a mask of action tokens; packed arrays contain only the action tokens,
//! row after row, with the row of each. Values at observations are never read, so NaN there has no effect.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub mod advantages;
pub mod aggregate;
mod batch;
mod cut;
pub mod entropy_control;
mod error;
pub mod functions;
pub mod ilql;
pub mod kl;
pub mod kl_control;
pub mod log_probs;
pub mod losses;
pub mod masked;
mod names;
mod preferences;
mod ragged;
pub mod rewards;
pub mod rollout_correction;
mod tensor;

pub use aggregate::{Aggregation, AggregationName, Counts};
pub use batch::{MicroBatch, MiniBatch};
pub use cut::CutUnit;
pub use error::AlgoError;
pub use preferences::Preferences;
pub use ragged::Ragged;
