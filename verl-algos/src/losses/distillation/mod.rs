//! Distillation from a teacher: the student's own tokens, scored by the teacher.
//!
//! | the teacher's output | here |
//! |---|---|
//! | log-probs of its best K tokens at each position | [`DistillationLoss`]: a [`Divergence`] per token, with a
//! [`Tail`] rule |
//! | log-prob of the sampled token only | [`teacher_advantages`] for a policy loss; or [`KlLoss`](super::KlLoss) with the teacher as reference |
//!
//! Whether it is on-policy depends on the author of the tokens: rollouts of the student, a data set, or a mixture of
//! both.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use verl_algos::Aggregation;
//! use verl_algos::losses::{DistillationBatch, DistillationLoss, DistillationMicroBatch, Divergence, Tail};
//!
//! let loss = DistillationLoss {
//!     divergence: Divergence::Reverse,
//!     tail: Tail::Renormalize,
//!     aggregation: Aggregation::TokenMean,
//! };
//! // One token; the teacher's best two are 7 and 3, at 0.5 and 0.25.
//! let batch = DistillationBatch::new(vec![0], 2, vec![7, 3], vec![0.5f64.ln(), 0.25f64.ln()]);
//! let prepared = loss.prepare(&batch)?;
//! let student = Tensor::<2>::from_floats([[-1.0, -1.0]], &Device::flex().autodiff()).require_grad();
//! let partial = prepared.loss(&DistillationMicroBatch {
//!     tokens: vec![0],
//!     log_probs: student,
//! })?;
//! // ½ ln(½ / ⅔) + ½ ln(½ / ⅓)
//! assert!((partial.loss.into_scalar::<f32>() - 0.058892).abs() < 1e-6);
//! # Ok::<(), verl_algos::AlgoError>(())
//! ```

mod advantages;
mod batch;
mod divergence;
mod loss;

pub use advantages::teacher_advantages;
pub use batch::{DistillationBatch, DistillationMicroBatch};
pub use divergence::{Divergence, DivergenceName, Tail};
pub use loss::{DistillationLoss, PreparedDistillation};
