//! The building blocks of decoders. Field names match Hugging Face checkpoints, so loading needs no translation.
//!
//! Dims: `B` rows, `S` tokens of a row in this call, `T` tokens attended to, `N = B·S`, `D` width, `H` query heads,
//! `K` key/value heads, `G = H / K`, `Dh` width of a head.

pub mod attention;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod rope;
mod rope_scaling;
