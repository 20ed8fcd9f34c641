//! Decoding on the CPU: products with packed weights, and attention of one token over the keys and values of its sequence.

mod attention;
mod kv_cache;
mod product;

pub use attention::{Lane, attend};
pub use kv_cache::{KvShape, KvTrack};
pub use product::{Packed, Spread, Write};
