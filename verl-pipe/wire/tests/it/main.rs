//! Batches, links and processes, from the outside.

mod batches;
mod links;
mod processes;
mod toy;
