//! Text and tokens: tokenizers, chat templates, and which tokens of a conversation are trained.
//!
//! This crate knows no tensors.

pub mod chat_template;
pub mod files;
pub mod targets;
pub mod tokenizer;
