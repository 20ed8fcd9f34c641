//! Decoder language models on burn: Hugging Face folders, tokenizers, rollout engines, optimisers.
//!
//! This crate knows nothing of pipelines.

pub mod chat_template;
pub mod gguf;
pub mod model;
pub mod optim;
mod packing;
pub mod policy;
pub mod random;
pub mod rollout;
mod rows;
pub mod scoring;
pub mod tokenizer;
#[cfg(test)]
mod toy;
mod weights;
