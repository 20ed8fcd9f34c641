//! Compares tokenizers and targets with `transformers`.

mod addition_tokenizer;
mod special_tokens;
mod targets;
