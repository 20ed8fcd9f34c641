//! Hugging Face folders: reads and writes configuration and weights. Safetensors only; pickled files are never opened.

pub mod config;
pub mod error;
pub mod generation;
mod head;
pub mod report;
pub mod save;
#[cfg(test)]
mod tests;
pub mod weights;

pub use config::Origin;
pub use error::LoadError;
pub use generation::GenerationConfig;
pub use report::LoadReport;
pub use save::SaveDType;
