//! Decoder language models on burn: Hugging Face folders, tokenizers, rollout engines, optimisers.
//!
//! This crate knows nothing of pipelines.

pub mod blocks;
pub mod decoder;
pub mod device;
pub mod families;
pub mod hf;
pub mod model;
pub mod parameters;
pub mod random;
pub mod rollout;

pub use decoder::{Decoder, DecoderConfig};

/// The families of models that can be loaded, in order of their names.
pub const FAMILIES: &[families::Family] = &[
    families::LLAMA,
    families::QWEN2,
    families::QWEN3,
    families::SMOLLM,
];

/// Placeholder until the policy module lands.
pub mod policy {
    /// A model with optimiser.
    pub struct Policy;
}
