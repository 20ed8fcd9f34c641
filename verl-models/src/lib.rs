//! Decoder language models on burn: Hugging Face folders, tokenizers, rollout engines, optimisers.
//!
//! This crate knows nothing of pipelines.

pub mod model;
pub mod optim;
pub mod random;
pub mod rollout;
pub mod scoring;

/// Placeholder until the policy module lands.
pub mod policy {
    /// A model with optimiser.
    pub struct Policy;
}
