//! Measurements of one device: what `pipe bench` prints.
//!
//! Each works on a decoder with random weights that are drawn on the device, or on a folder's, and tells its figures as
//! data; [`Ceilings`] says, from the same process, what the device can do at most, so that a figure has a share.

mod ceilings;
mod kernels;
mod rollout;
mod shape;
mod step;
mod train;

use std::time::Instant;

use burn::tensor::Device;
use serde::Serialize;

pub use ceilings::Ceilings;
pub use kernels::{KernelFigure, KernelFigures, KernelWork, kernels};
pub use rollout::{RolloutFigures, RolloutWork, rollout};
pub use shape::{PRESETS, Preset, preset, random_decoder};
pub use step::{StepFigures, StepWork, step};
pub use train::{TrainFigures, TrainWork, train};

use crate::model::ModelError;
use crate::optim::OptimizerConfigError;
use crate::rollout::engine::RolloutError;

/// What a measurement can fail with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// Training or scoring.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Sampling.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// Settings of the optimiser.
    #[error(transparent)]
    Optimizer(#[from] OptimizerConfigError),
    /// The device.
    #[error("the device failed: {0}")]
    Device(String),
    /// A type that the device has no operations of its own for.
    #[error("there are no fused operations in {dtype} on this device; measure in f32")]
    Dtype {
        /// The type.
        dtype: String,
    },
    /// Sizes that leave nothing to measure.
    #[error("`{setting}` is {value}, but must be at least {least}")]
    Size {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: usize,
        /// The least value.
        least: usize,
    },
}

/// Times of the same work, milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Times {
    /// The median.
    pub median_ms: f64,
    /// The shortest.
    pub min_ms: f64,
    /// The longest.
    pub max_ms: f64,
    /// How many were taken, after those that were not counted.
    pub runs: usize,
}

impl Times {
    /// Of seconds, at least one.
    fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let at = |index: usize| 1e3 * seconds.get(index).copied().unwrap_or(f64::NAN);
        Times {
            median_ms: at(seconds.len() / 2),
            min_ms: at(0),
            max_ms: at(seconds.len().saturating_sub(1)),
            runs: seconds.len(),
        }
    }
}

/// Seconds until the device has done all of `work`.
fn seconds<T, E: Into<BenchError>>(
    device: &Device,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<f64, BenchError> {
    settle(device)?;
    let started = Instant::now();
    work().map_err(Into::into)?;
    settle(device)?;
    Ok(started.elapsed().as_secs_f64())
}

/// Waits until the device has nothing left to do.
fn settle(device: &Device) -> Result<(), BenchError> {
    let done = device.sync();
    done.map_err(|error| BenchError::Device(error.to_string()))
}

/// Runs `work` `warm_up` times, then `runs` times with the clock.
fn repeat<E: Into<BenchError>>(
    device: &Device,
    warm_up: usize,
    runs: usize,
    mut work: impl FnMut() -> Result<(), E>,
) -> Result<Times, BenchError> {
    for _ in 0..warm_up {
        seconds(device, &mut work)?;
    }
    let times: Result<Vec<f64>, BenchError> = (0..runs.max(1))
        .map(|_| seconds(device, &mut work))
        .collect();
    Ok(Times::of(times?))
}

fn at_least(setting: &'static str, value: usize, least: usize) -> Result<(), BenchError> {
    if value < least {
        return Err(BenchError::Size {
            setting,
            value,
            least,
        });
    }
    Ok(())
}

/// Bytes that the device's allocator holds at most, or on the CPU the process.
fn peak_bytes(device: &Device) -> Option<u64> {
    // Pages stay reserved until they are asked back, so what is reserved is the most that was ever needed.
    match device.memory_pool_usage() {
        Some(usage) => Some(usage.bytes_reserved),
        None => resident_peak(),
    }
}

/// The process's largest resident size, where the system tells.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::DType;

    #[test]
    fn times_are_ordered() {
        let times = Times::of(vec![0.003, 0.001, 0.002]);
        assert_eq!(times.runs, 3);
        assert_eq!(
            (times.median_ms, times.min_ms, times.max_ms),
            (2.0, 1.0, 3.0)
        );
    }

    #[test]
    fn every_measurement_runs_on_the_cpu() {
        let device = Device::flex();
        let config = preset("tiny").unwrap();
        let decoder = random_decoder(config, &device, DType::F32);
        let ceilings = Ceilings::measure(&device, DType::F32, true).unwrap();
        assert!(ceilings.copy_gb_s > 0.0 && ceilings.product_tflop_s > 0.0);
        let work = RolloutWork {
            sequences: 3,
            prompt_tokens: 5,
            new_tokens: 4,
            mixed: false,
            shared_prompts: 1,
            runs: 1,
        };
        let figures = rollout(&decoder, &work, &ceilings).unwrap();
        assert_eq!((figures.tokens, figures.idle_share), (12, 0.0));
        // A step is a difference of two times, which noise may turn around.
        assert!(figures.tokens_per_s > 0.0 && figures.step_ms.is_finite());
        let work = RolloutWork {
            sequences: 100,
            new_tokens: 8,
            mixed: true,
            ..work
        };
        let figures = rollout(&decoder, &work, &ceilings).unwrap();
        assert!((100..800).contains(&figures.tokens));
        // More responses than rows: places of short ones are taken over, until the last are left.
        assert!(
            (0.01..0.5).contains(&figures.idle_share),
            "{}",
            figures.idle_share
        );
        let work = TrainWork {
            rows: 2,
            tokens: 16,
            micro_rows: 1,
            mixed: true,
            recompute: true,
            runs: 1,
        };
        let figures = train(decoder.clone(), &work, &ceilings).unwrap();
        assert!(figures.tokens_per_s > 0.0 && figures.loss.is_finite());
        assert!((0.0..1.0).contains(&figures.padding_share));
        let work = KernelWork {
            tokens: 12,
            sequence: 4,
            parameters: 1000,
            runs: 1,
        };
        let place = (&device, DType::F32);
        let figures = kernels(&decoder.config, place, &work, &ceilings).unwrap();
        assert_eq!(figures.kernels.len(), 14);
        assert!(figures.kernels.iter().all(|own| own.times.median_ms > 0.0));
        let work = StepWork {
            prompts: 2,
            samples: 2,
            prompt_tokens: 4,
            new_tokens: 5,
            micro_rows: 2,
            beta: 0.04,
            runs: 1,
        };
        let figures = step(decoder, &work, &ceilings).unwrap();
        assert!(figures.step.median_ms >= figures.generate_ms);
    }

    #[test]
    fn sizes_of_nothing_are_refused() {
        let device = Device::flex();
        let decoder = random_decoder(preset("tiny").unwrap(), &device, DType::F32);
        let ceilings = Ceilings {
            copy_gb_s: 1.0,
            product_tflop_s: 1.0,
        };
        let work = TrainWork {
            rows: 0,
            ..TrainWork::default()
        };
        let error = train(decoder, &work, &ceilings).unwrap_err();
        assert_eq!(error.to_string(), "`rows` is 0, but must be at least 1");
    }
}
