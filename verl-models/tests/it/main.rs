//! Models and tokenizers against `transformers`, and rollout engines against each other.

mod addition_tokenizer;
mod engines;
mod parity;
mod special_tokens;
mod targets;
