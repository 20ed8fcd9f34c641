//! Compares models and tokenizers with `transformers`, and rollout engines with each other.

mod addition_tokenizer;
mod engines;
mod parity;
mod special_tokens;
mod targets;
