//! The decoder and its files: blocks, Hugging Face folders, GGUF files, families of models.
//!
//! This crate knows neither how responses are sampled nor how weights are trained.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub mod blocks;
pub mod decoder;
pub mod error;
pub mod families;
pub mod gguf;
pub mod hf;
pub mod padded;
pub mod parameters;

pub use decoder::{Decoder, DecoderConfig};

/// The families of models that can be loaded, in order of their names.
pub const FAMILIES: &[families::Family] = &[
    families::LLAMA,
    families::QWEN2,
    families::QWEN3,
    families::SMOLLM,
];
