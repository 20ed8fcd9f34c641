//! Complete runs: the [`Trainer`](trainer::Trainer) with its run folder, console, warnings and trace.

pub mod columns;
pub mod console;
mod ending;
pub mod folder;
pub mod folder_lock;
mod lines;
mod replaced;
mod state_file;
pub mod timeline;
pub mod timeline_file;
pub mod trainer;
pub mod warnings;

#[cfg(test)]
mod tests;
