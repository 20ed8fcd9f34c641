//! The stages and algorithms of verl, and the data sets they read.

pub mod data;
pub mod model;
pub mod prompts;
