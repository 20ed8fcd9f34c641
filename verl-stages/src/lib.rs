//! The stages and algorithms of verl, and the data sets they read.

pub mod data;
