//! AdamW on f32 state, learning-rate schedules, gradient accumulation, clipping by the global norm.

pub mod accumulate;
pub mod adamw;
pub mod clip;
pub(crate) mod flat;
pub(crate) mod pieces;
pub mod schedule;
mod state;

pub use accumulate::{GradientAccumulator, TrainableParameters};
pub use adamw::{AdamW, OptimizerConfig, OptimizerConfigError};
pub use schedule::Schedule;
pub use verl_kernels::optimizer as kernels;
