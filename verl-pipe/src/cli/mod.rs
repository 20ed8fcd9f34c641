//! The commands of the `pipe` executable, written against a registry.

pub mod train;
