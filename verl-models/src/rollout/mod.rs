//! Rollout engines: prompts in, sampled responses out.

pub mod eager;
pub mod engine;
mod row;
pub mod sampling;
pub mod stop;

#[cfg(test)]
mod toy;
