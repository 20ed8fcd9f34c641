//! Exact reinforcement-learning maths for language models; no I/O, no randomness, no knowledge of pipelines.
//!
//! | module | what | form |
//! |---|---|---|
//! | [`advantages`] | rewards into advantages: GAE, GRPO (s − μ_g)/(σ_g + ε) and its relatives | plain f64 over [`Ragged`] rows |
//! | [`kl`] | estimators k1, k2, k3 of KL(π‖π_ref); KL in the reward | plain, and tensors `[N]` |
//! | [`kl_control`] | the KL coefficient, fixed or adaptive | plain |
//! | [`log_probs`] | log-probs and entropies from logits | tensors `[N, V]` to `[N]` |
//! | [`aggregate`] | losses of tokens into one number: Σ w_t E_t with weights known beforehand | plain |
//! | [`losses`] | PPO clip, GSPO, CISPO, KL, entropy, SFT; partial sums over packed tokens | tensors `[N]` |
//! | [`masked`] | sum, mean, variance, whitening | plain, packed |
//! | [`rewards`] | shaping of rewards | plain |
//!
//! Nothing here sees padding. Ragged rows carry a mask of action tokens; packed arrays hold the action tokens only, row
//! after row, with the row of each. What lies on an observation is never read, so that NaN there cannot matter.

pub mod advantages;
pub mod aggregate;
mod batch;
mod cut;
mod error;
pub mod kl;
pub mod kl_control;
pub mod log_probs;
pub mod losses;
pub mod masked;
mod ragged;
pub mod rewards;
mod tensor;

pub use aggregate::{Aggregation, Counts};
pub use batch::{MicroBatch, MiniBatch};
pub use cut::CutUnit;
pub use error::AlgoError;
pub use ragged::Ragged;
