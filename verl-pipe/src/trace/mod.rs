//! Seeing what flows: the tap on every edge.

pub mod tap;
