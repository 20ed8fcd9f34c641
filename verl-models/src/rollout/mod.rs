//! Rollout engines: prompts in, sampled responses out.

pub mod eager;
pub mod engine;
