//! Measurements of one device: what `pipe bench` prints.
//!
//! Each measurement uses a decoder with random weights drawn on the device, or one from a model folder, and returns its
//! figures as data. [`Ceilings`], measured in the same process, are the device's peak rates; figures are also given as
//! shares of them.

mod ceilings;
mod kernels;
mod rollout;
mod shape;
mod step;
mod train;

use std::time::Instant;

use burn::tensor::Device;
use serde::Serialize;
use verl_decoder::decoder::DecoderConfig;
use verl_kernels::device::{memory, memory_of};
use verl_rollout::engine::{RolloutError, RolloutRequest};

pub use ceilings::Ceilings;
pub use kernels::{KernelFigure, KernelFigures, KernelWork, kernels};
pub use rollout::{RolloutFigures, RolloutWork, rollout};
pub use shape::{PRESETS, Preset, preset, random_decoder};
pub use step::{LARGEST_BETA, StepFigures, StepWork, step};
pub use train::{TrainFigures, TrainWork, train};

use crate::model::ModelError;
use crate::optim::OptimizerConfigError;

/// Errors of a measurement.
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
    /// A type without fused operations on the device.
    #[error("there are no fused operations in {dtype} on this device")]
    Dtype {
        /// The type.
        dtype: String,
    },
    /// A size that leaves nothing to measure.
    #[error("`{option}` is {value}, but must be at least {least}")]
    Size {
        /// The option of `pipe bench`.
        option: &'static str,
        /// Its value.
        value: usize,
        /// The least value.
        least: usize,
    },
    /// An invalid weight of the KL.
    #[error("`--beta` is {value:?}, but must be from 0 to {largest}", largest = LARGEST_BETA)]
    Beta {
        /// The weight.
        value: f64,
    },
    /// Sequences longer than the model's context.
    #[error("{parts} are {tokens} tokens, but the model's context is limited to {limit}")]
    Context {
        /// The parts of a sequence.
        parts: String,
        /// Its tokens.
        tokens: usize,
        /// Longest sequence.
        limit: usize,
        /// The options that set it.
        options: &'static str,
    },
    /// Work that does not fit in memory.
    #[error("{work} would need at least {}, but {place} has {}", gib(*bytes), gib(*memory as f64))]
    Memory {
        /// The work.
        work: String,
        /// Bytes that it requires at least.
        bytes: f64,
        /// Where they would be allocated.
        place: &'static str,
        /// Bytes available.
        memory: u64,
        /// The options that set it.
        options: &'static str,
    },
}

impl BenchError {
    /// What to do about it.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            BenchError::Model(_) | BenchError::Rollout(_) => {
                "run `pipe bench check` to compare the device's results with the CPU's; pass `--model` to use a folder's \
                 weights"
                    .to_owned()
            }
            BenchError::Optimizer(_) => "report this bug: these settings do not come from the command line".to_owned(),
            BenchError::Device(_) => {
                "use smaller sizes, or run `nvidia-smi` to see whether the device works and which processes use it".to_owned()
            }
            BenchError::Dtype { .. } => "measure with `--dtype f32`".to_owned(),
            BenchError::Size { option, least, .. } => format!("set `{option}` to {least} or more"),
            BenchError::Beta { .. } => "set `--beta` to 0 for a step without a reference, or to a weight such as 0.04".to_owned(),
            BenchError::Context { options, .. } => {
                format!("reduce {options}, or measure a model with a longer context")
            }
            BenchError::Memory { options, .. } => format!("reduce {options}"),
        }
    }
}

fn gib(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / (1u64 << 30) as f64)
}

/// Times of the same work, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Times {
    /// The median.
    pub median_ms: f64,
    /// The shortest.
    pub min_ms: f64,
    /// The longest.
    pub max_ms: f64,
    /// The number of timed runs, warm-up runs excluded.
    pub runs: usize,
}

impl Times {
    /// Summarises `seconds`, which must not be empty.
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

/// Waits until the device is idle.
fn settle(device: &Device) -> Result<(), BenchError> {
    let done = device.sync();
    done.map_err(|error| BenchError::Device(error.to_string()))
}

/// Runs `work` `warm_up` times untimed, then `runs` times timed.
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

/// Rejects a prompt and a response that together exceed the context: the rollout would end early.
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

/// Rejects more rows than fit in the machine's memory as requests, whatever the device.
fn requests_fit(rows: f64, tokens: usize, options: &'static str) -> Result<(), BenchError> {
    let row = (size_of::<RolloutRequest>() as f64) + 4.0 * tokens as f64;
    let work = format!("{rows} rows of {tokens} tokens or more");
    let room = Room {
        place: "the machine",
        memory: memory("cpu"),
    };
    fits(work, rows * row, room, options)
}

/// Memory of the machine or a device.
struct Room {
    place: &'static str,
    /// Bytes, if they are known.
    memory: Option<u64>,
}

/// Rejects work that needs more `bytes` than there are. They are counted in f64, so that products do not overflow.
fn fits(
    work: String,
    bytes: f64,
    Room { place, memory }: Room,
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

/// Rejects work that needs more bytes than `device` has.
fn fits_on(
    device: &Device,
    work: String,
    bytes: f64,
    options: &'static str,
) -> Result<(), BenchError> {
    let room = Room {
        place: "the device",
        memory: memory_of(device),
    };
    fits(work, bytes, room, options)
}

/// Peak bytes of the device's allocator or, on the CPU, of the process.
fn peak_bytes(device: &Device) -> Option<u64> {
    // Pages stay reserved until they are released explicitly, so the reserved bytes are the peak.
    match device.memory_pool_usage() {
        Some(usage) => Some(usage.bytes_reserved),
        None => resident_peak(),
    }
}

/// The process's peak resident size, where the system reports it.
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
        // A step is a difference of two times, which noise may make negative.
        assert!(figures.tokens_per_s > 0.0 && figures.step_ms.is_finite());
        let work = RolloutWork {
            sequences: 100,
            new_tokens: 8,
            mixed: true,
            ..work
        };
        let figures = rollout(&decoder, &work, &CEILINGS).unwrap();
        assert!((100..800).contains(&figures.tokens));
        // More responses than rows: a row that ends early is reused until only the last responses remain.
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
        let figures = kernels(&decoder.config, &device, DType::F32, &work, &CEILINGS).unwrap();
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
        for (beta, printed) in [
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
            let words = format!("`--beta` is {printed}, but must be from 0 to 1000000");
            assert_eq!(error.to_string(), words);
        }
    }

    #[test]
    fn sizes_of_zero_are_refused() {
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
    fn sequences_may_fill_but_not_exceed_the_context() {
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
    fn work_may_fill_but_not_exceed_the_memory() {
        let check = |bytes: f64, memory| {
            let place = "a GPU";
            fits("10 rows".into(), bytes, Room { place, memory }, "`--rows`")
        };
        assert!(
            check(f64::MAX, None).is_ok(),
            "unknown memory is not checked"
        );
        assert!(check(2048.0, Some(2048)).is_ok());
        let error = check(3e12, Some(1 << 40)).unwrap_err();
        insta::assert_snapshot!(
            format!("{error}; {}", error.help()),
            @"10 rows would need at least 2794.0 GiB, but a GPU has 1024.0 GiB; reduce `--rows`"
        );
    }
}
