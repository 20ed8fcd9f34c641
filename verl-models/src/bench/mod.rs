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
pub use step::{LARGEST_BETA, StepFigures, StepWork, step};
pub use train::{TrainFigures, TrainWork, train};

use crate::decoder::DecoderConfig;
use crate::device::{memory, memory_of};
use crate::model::ModelError;
use crate::optim::OptimizerConfigError;
use crate::rollout::engine::{RolloutError, RolloutRequest};

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
    #[error("there are no fused operations in {dtype} on this device")]
    Dtype {
        /// The type.
        dtype: String,
    },
    /// Sizes that leave nothing to measure.
    #[error("`{option}` is {value}, but must be at least {least}")]
    Size {
        /// The option of `pipe bench`.
        option: &'static str,
        /// Its value.
        value: usize,
        /// The least value.
        least: usize,
    },
    /// A weight of the KL that is none.
    #[error("`--beta` is {value:?}, but must be from 0 to {largest}", largest = LARGEST_BETA)]
    Beta {
        /// The weight.
        value: f64,
    },
    /// Sequences that the model cannot read.
    #[error("{parts} are {tokens} tokens, but the model's context holds {limit}")]
    Context {
        /// What a sequence is made of.
        parts: String,
        /// Its tokens.
        tokens: usize,
        /// Longest sequence.
        limit: usize,
        /// The options that say so.
        options: &'static str,
    },
    /// Work that no memory holds.
    #[error("{work} would take {} at least, but {place} has {}", gib(*bytes), gib(*memory as f64))]
    Memory {
        /// The work.
        work: String,
        /// Bytes that it cannot do without.
        bytes: f64,
        /// Where they would lie.
        place: &'static str,
        /// Bytes that there are.
        memory: u64,
        /// The options that say so.
        options: &'static str,
    },
}

impl BenchError {
    /// What to do about it.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            BenchError::Model(_) | BenchError::Rollout(_) => {
                "`pipe bench check` tells whether the device computes what the CPU does, with `--model` for weights of a \
                 folder"
                    .to_owned()
            }
            BenchError::Optimizer(_) => "report it: these settings are not of the command line".to_owned(),
            BenchError::Device(_) => {
                "smaller sizes take less of the device; `nvidia-smi` tells whether it works and who else is on it".to_owned()
            }
            BenchError::Dtype { .. } => "measure with `--dtype f32`".to_owned(),
            BenchError::Size { option, least, .. } => format!("give `{option}` {least} or more"),
            BenchError::Beta { .. } => "give `--beta` 0 for a step without a reference, or a weight such as 0.04".to_owned(),
            BenchError::Context { options, .. } => {
                format!("make {options} smaller, or measure a model with a longer context")
            }
            BenchError::Memory { options, .. } => format!("make {options} smaller"),
        }
    }
}

fn gib(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / (1u64 << 30) as f64)
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
    let times: Result<Vec<f64>, BenchError> =
        (0..runs).map(|_| seconds(device, &mut work)).collect();
    Ok(Times::of(times?))
}

fn at_least(option: &'static str, value: usize, least: usize) -> Result<(), BenchError> {
    if value < least {
        return Err(BenchError::Size {
            option,
            value,
            least,
        });
    }
    Ok(())
}

/// Refuses a prompt and a response that do not fit the context together: a rollout would end before.
fn within_context(config: &DecoderConfig, prompt: usize, new: usize) -> Result<(), BenchError> {
    let (tokens, limit) = (prompt.saturating_add(new), config.max_tokens);
    if tokens > limit {
        return Err(BenchError::Context {
            parts: format!("a prompt of {prompt} and a response of {new}"),
            tokens,
            limit,
            options: "`--prompt` or `--new`",
        });
    }
    Ok(())
}

/// Refuses more rows than the machine can list, whatever the device.
fn can_be_listed(rows: f64, tokens: usize, options: &'static str) -> Result<(), BenchError> {
    let row = (size_of::<RolloutRequest>() as f64) + 4.0 * tokens as f64;
    let work = format!("{rows} rows of {tokens} tokens or more");
    fits(work, rows * row, ("the machine", memory("cpu")), options)
}

/// Refuses work that takes more `bytes` than there are. They are counted in f64, which no product overflows.
fn fits(
    work: String,
    bytes: f64,
    (place, memory): (&'static str, Option<u64>),
    options: &'static str,
) -> Result<(), BenchError> {
    match memory {
        Some(memory) if bytes > memory as f64 => Err(BenchError::Memory {
            work,
            bytes,
            place,
            memory,
            options,
        }),
        _ => Ok(()),
    }
}

/// Refuses work that takes more bytes than `device` has.
fn fits_on(
    device: &Device,
    work: String,
    bytes: f64,
    options: &'static str,
) -> Result<(), BenchError> {
    fits(work, bytes, ("the device", memory_of(device)), options)
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

    const CEILINGS: Ceilings = Ceilings {
        copy_gb_s: 1.0,
        product_tflop_s: 1.0,
        arithmetic_tflop_s: None,
    };

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
        assert!(ceilings.arithmetic_tflop_s.is_some_and(|rate| rate > 0.0));
        let work = RolloutWork {
            sequences: 3,
            prompt_tokens: 5,
            new_tokens: 4,
            mixed: false,
            shared_prompts: 1,
            runs: 1,
        };
        let figures = rollout(&decoder, &work, &CEILINGS).unwrap();
        assert_eq!((figures.tokens, figures.idle_share), (12, 0.0));
        // A step is a difference of two times, which noise may turn around.
        assert!(figures.tokens_per_s > 0.0 && figures.step_ms.is_finite());
        let work = RolloutWork {
            sequences: 100,
            new_tokens: 8,
            mixed: true,
            ..work
        };
        let figures = rollout(&decoder, &work, &CEILINGS).unwrap();
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
        let figures = train(decoder.clone(), &work, &CEILINGS).unwrap();
        assert!(figures.tokens_per_s > 0.0 && figures.loss.is_finite());
        assert!((0.0..1.0).contains(&figures.padding_share));
        let work = KernelWork {
            tokens: 12,
            sequence: 4,
            parameters: 1000,
            runs: 1,
        };
        let place = (&device, DType::F32);
        let figures = kernels(&decoder.config, place, &work, &CEILINGS).unwrap();
        assert_eq!(figures.kernels.len(), 15);
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
        let figures = step(decoder, &work, &CEILINGS).unwrap();
        assert!(figures.step.median_ms >= figures.generate_ms);
    }

    #[test]
    fn weights_of_the_kl_that_overflow_are_refused() {
        let device = Device::flex();
        let decoder = random_decoder(preset("tiny").unwrap(), &device, DType::F32);
        for (beta, told) in [
            (1e7, "10000000.0"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "NaN"),
            (-1.0, "-1.0"),
        ] {
            let work = StepWork {
                beta,
                ..StepWork::default()
            };
            let error = step(decoder.clone(), &work, &CEILINGS).unwrap_err();
            let words = format!("`--beta` is {told}, but must be from 0 to 1000000");
            assert_eq!(error.to_string(), words);
        }
    }

    #[test]
    fn sizes_of_nothing_are_refused() {
        let device = Device::flex();
        let decoder = random_decoder(preset("tiny").unwrap(), &device, DType::F32);
        let work = TrainWork {
            rows: 0,
            ..TrainWork::default()
        };
        let error = train(decoder, &work, &CEILINGS).unwrap_err();
        assert_eq!(error.to_string(), "`--rows` is 0, but must be at least 1");
    }

    #[test]
    fn sequences_may_fill_the_context_and_no_more() {
        let config = preset("tiny").unwrap();
        assert!(within_context(&config, 412, 100).is_ok());
        for (prompt, new) in [(412, 101), (1, usize::MAX), (usize::MAX, usize::MAX)] {
            assert!(
                within_context(&config, prompt, new).is_err(),
                "{prompt}, {new}"
            );
        }
    }

    #[test]
    fn work_may_fill_the_memory_and_no_more() {
        let check =
            |bytes: f64, memory| fits("10 rows".into(), bytes, ("a GPU", memory), "`--rows`");
        assert!(check(f64::MAX, None).is_ok(), "nobody knows");
        assert!(check(2048.0, Some(2048)).is_ok());
        let error = check(3e12, Some(1 << 40)).unwrap_err();
        insta::assert_snapshot!(
            format!("{error}; {}", error.help()),
            @"10 rows would take 2794.0 GiB at least, but a GPU has 1024.0 GiB; make `--rows` smaller"
        );
    }
}
