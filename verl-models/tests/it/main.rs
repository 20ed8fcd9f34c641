//! Compares models with `transformers`.

mod parity;
