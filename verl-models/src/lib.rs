//! Decoder language models on burn: Hugging Face folders, tokenizers, rollout engines, optimisers.
//!
//! This crate knows nothing of pipelines.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub mod agreement;
mod allocation;
pub mod bench;
pub mod blocks;
pub mod chat_template;
pub mod compiled;
pub mod conformance;
pub mod critic;
pub mod decoder;
pub mod device;
mod error;
pub mod families;
pub mod files;
pub mod gguf;
pub mod hf;
pub mod ilql;
mod interface;
#[cfg(any(feature = "cuda", test))]
mod kernel_text;
pub mod kernels;
mod lanes;
pub mod memory;
pub mod model;
pub mod optim;
mod packing;
mod padded;
pub mod parameters;
pub mod policy;
pub mod prefixes;
pub mod random;
pub mod registers;
pub mod rollout;
mod rows;
pub mod scoring;
pub mod targets;
pub mod tokenizer;
#[cfg(test)]
mod toy;
mod trained;
mod unset;
pub mod value_head;
mod vector;
mod weights;

pub use decoder::{Decoder, DecoderConfig};
pub use value_head::ValueDecoder;

/// The families of models that can be loaded, in order of their names.
pub const FAMILIES: &[families::Family] = &[
    families::LLAMA,
    families::QWEN2,
    families::QWEN3,
    families::SMOLLM,
];
