//! Compares models with `transformers`; carries weights between layouts and between models.

mod parity;
mod resharded;
mod synced;
