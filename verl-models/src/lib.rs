//! Models that are trained: policies, critics, reward models, ILQL; their optimiser, memory, conformance and benches.
//!
//! Also re-exports what the crates below it offer: kernels, text, the decoder, rollout engines. This crate knows nothing of
//! pipelines.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub mod agreement;
pub mod bench;
pub mod conformance;
pub mod critic;
pub mod ilql;
pub mod memory;
pub mod model;
pub mod optim;
mod packing;
pub mod policy;
pub mod replicas;
pub mod reshard;
mod rows;
pub mod sampled;
#[cfg(test)]
mod toy;
mod trained;
pub mod value_head;
mod weights;

pub use value_head::ValueDecoder;
pub use verl_decoder::{Decoder, DecoderConfig, FAMILIES};
pub use verl_decoder::{blocks, decoder, families, gguf, hf, parameters};
pub use verl_kernels::{compiled, device, prefixes, random, registers, scoring};
pub use verl_text::{chat_template, files, targets, tokenizer};

/// Fused operations of decoders, with their own backward passes.
pub mod kernels {
    pub use verl_kernels::{
        AttentionParameters, AttentionShape, BlockOps, DecoderGradients, DecoderOps, HalfSettings,
        Heads, Products, Sequences, are_fused, attention, attention_block, attention_is_fused,
        blocks_are_fused, linear, mlp_block, rms_norm, swiglu, take_rows,
    };
}

/// Rollout engines: prompts in, sampled responses out.
pub mod rollout {
    pub use verl_rollout::{Cancel, Decoding, batched, eager, engine, native, sampling, stop};
}
