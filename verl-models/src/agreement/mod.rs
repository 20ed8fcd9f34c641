//! Compares a device's results with the CPU's on small decoders, for `pipe bench check`.
//!
//! [`compare`] runs the same work on both sides and reports, for each quantity, the distance, its bound, and where the
//! distance is largest. The reference is always the CPU in f32; a decoder in bf16 is compared with the CPU's at the
//! same rounded weights, so that only the arithmetic differs.

mod measure;
mod quantities;
mod subjects;

use burn::tensor::{DType, Device};
use serde::Serialize;
use verl_decoder::decoder::Decoder;
use verl_rollout::engine::RolloutError;

pub use subjects::{Subject, subjects, wide};

use crate::model::ModelError;

/// How a distance is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// ‖device − CPU‖ / ‖CPU‖.
    Relative,
    /// Largest |device − CPU|.
    Largest,
    /// Mean |device − CPU|.
    Mean,
    /// How many values differ.
    Count,
}

/// The distance of one quantity of a decoder from its reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Distance {
    /// The decoder.
    pub subject: String,
    /// Type of the weights on the device: `f32` or `bf16`.
    pub dtype: &'static str,
    /// The quantity.
    pub quantity: &'static str,
    /// How the distance is measured.
    pub measure: Measure,
    /// The distance; NaN where a value is not finite.
    pub distance: f64,
    /// The largest allowed distance.
    pub bound: f64,
    /// Where the distance is largest, for quantities with several parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
}

impl Distance {
    /// Whether the distance is within the bound; NaN never is.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.distance <= self.bound
    }
}

/// Errors of the comparison itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgreementError {
    /// A pass or a step of training failed.
    #[error("`{subject}`: {source}")]
    Model {
        /// The decoder.
        subject: String,
        /// Why.
        source: ModelError,
    },
    /// The context is too short for any sequence of the comparison.
    #[error(
        "`{subject}`: the model's context of {limit} tokens is too short for any sequence of the comparison"
    )]
    Context {
        /// The decoder.
        subject: String,
        /// Longest sequence.
        limit: usize,
    },
    /// A rollout failed.
    #[error("`{subject}`: {source}")]
    Rollout {
        /// The decoder.
        subject: String,
        /// Why.
        source: RolloutError,
    },
}

/// Compares everything that a decoder computes on `device`, in `dtype` (f32 or bf16), with the CPU in f32.
///
/// Logits of padded rows; log-probs and entropies of ragged rows; a loss, its gradient for every parameter, the global
/// norm; two optimiser steps on equal gradients; greedy tokens; the tokens and log-probs of one seed sampled twice,
/// which must be bit-identical; log-probs that a rollout reports compared with those that training computes.
///
/// # Errors
/// The context is too short for any sequence of the comparison, or one of the sides fails to compute.
pub fn compare(
    subject: &Subject,
    device: &Device,
    dtype: DType,
) -> Result<Vec<Distance>, AgreementError> {
    let values = subject.values(dtype);
    let reference = subject.decoder(&values, &Device::flex(), DType::F32);
    let other = subject.decoder(&values, device, dtype);
    quantities::all(subject, dtype, &reference, &other)
}

/// The type's name in the output.
fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        _ => "f32",
    }
}

/// Both sides of a comparison.
struct Sides<'a> {
    reference: &'a Decoder,
    other: &'a Decoder,
}

#[cfg(test)]
mod tests {
    use super::*;
    use verl_decoder::decoder::DecoderConfig;

    #[test]
    fn the_cpu_agrees_with_itself() {
        for subject in subjects() {
            let distances = compare(&subject, &Device::flex(), DType::F32).unwrap();
            assert!(distances.len() >= 12, "{distances:#?}");
            for distance in distances {
                assert!(distance.holds(), "{distance:#?}");
                // Rollouts and training compute log-probs in different loops.
                if !quantities::OF_ROLLOUTS.contains(&distance.quantity) {
                    assert_eq!(distance.distance, 0.0, "{distance:#?}");
                }
            }
        }
    }

    #[test]
    fn bf16_on_the_cpu_stays_within_its_bounds() {
        let subject = &subjects()[0];
        let distances = compare(subject, &Device::flex(), DType::BF16).unwrap();
        for distance in &distances {
            assert!(distance.holds(), "{distance:#?}");
            assert_eq!(distance.dtype, "bf16");
        }
        let logits = distances.iter().find(|d| d.quantity == "logits").unwrap();
        assert!(logits.distance > 1e-4, "bf16 is not f32: {logits:#?}");
    }

    #[test]
    fn a_context_that_is_too_short_is_reported() {
        let drawn = |max_tokens| {
            let config = subjects()[0].config().clone();
            Subject::drawn(
                "short",
                DecoderConfig {
                    max_tokens,
                    ..config
                },
            )
        };
        let compare = |max_tokens| compare(&drawn(max_tokens), &Device::flex(), DType::F32);
        assert!(compare(6).unwrap().iter().all(Distance::holds));
        insta::assert_snapshot!(
            compare(5).unwrap_err(),
            @"`short`: the model's context of 5 tokens is too short for any sequence of the comparison"
        );
    }

    #[test]
    fn a_wrong_device_is_found() {
        let subject = &subjects()[0];
        let values = subject.values(DType::F32);
        let reference = subject.decoder(&values, &Device::flex(), DType::F32);
        let mut wrong = reference.clone();
        let norm = &mut wrong.model.norm;
        norm.weight = norm.weight.clone().map(|weight| weight * 1.01);
        let distances = quantities::all(subject, DType::F32, &reference, &wrong).unwrap();
        let failed: Vec<&str> = distances
            .iter()
            .filter(|distance| !distance.holds())
            .map(|distance| distance.quantity)
            .collect();
        assert!(failed.contains(&"logits"), "{failed:?}");
        assert!(failed.contains(&"gradients"), "{failed:?}");
    }

    #[test]
    fn nan_is_never_within_the_bound() {
        let distance = Distance {
            subject: String::new(),
            dtype: "f32",
            quantity: "logits",
            measure: Measure::Relative,
            distance: f64::NAN,
            bound: f64::INFINITY,
            at: None,
        };
        assert!(!distance.holds());
    }
}
