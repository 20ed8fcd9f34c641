//! Implicit language Q-learning: offline reinforcement learning with Q and V heads on a language model.
//!
//! A trajectory has an action a_t (a token) in each state s_t (the text before it) and one final state after the last
//! action. c_t says whether state t is alive. With two or more Q heads, copies Q̂ of them that follow slowly, a V head
//! and the policy's logits:
//!
//! | what | here |
//! |---|---|
//! | returns of a data set to rewards | [`standardize_returns`], [`IlqlBatch::from_returns`] |
//! | Q + V + CQL + AWAC, as partial sums | [`IlqlLoss`] |
//! | Q̂ ← α Q + (1 − α) Q̂ | [`TargetSync`] |
//! | softmax of log π + β (min Q̂ − V) | [`IlqlDecoding`] |
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use verl_algos::Ragged;
//! use verl_algos::ilql::{IlqlBatch, IlqlLoss, IlqlMicroBatch};
//! use verl_algos::losses::{MetricId, MetricSum};
//!
//! // One row: the tokens 1 and 0, and a return of 1 after them.
//! let batch = IlqlBatch::from_returns(Ragged::from_rows([[1u32, 0]]), &[1.0])?;
//! let loss = IlqlLoss::default();
//! let prepared = loss.prepare(&batch)?;
//! let device = Device::flex().autodiff();
//! let partial = prepared.loss(&IlqlMicroBatch {
//!     rows: vec![0],
//!     qs: vec![Tensor::from_floats([[0.0, 0.4], [0.3, 0.0]], &device).require_grad()],
//!     target_qs: vec![Tensor::from_floats([0.6, 0.1], &device)],
//!     values: Tensor::from_floats([0.2, 0.5, 0.1], &device).require_grad(),
//!     logits: Tensor::zeros([2, 2], &device),
//! })?;
//! let value_loss = MetricSum::find(&partial.read_metrics()?, MetricId::V_LOSS);
//! assert!((value_loss.unwrap() - 0.08).abs() < 1e-6);
//! # Ok::<(), verl_algos::AlgoError>(())
//! ```
//!
//! Source: Snell et al. 2023, arXiv:2206.11871; the expectile: Kostrikov et al. 2022, arXiv:2110.06169; CQL: Kumar et
//! al. 2020, arXiv:2006.04779; AWAC: Nair et al. 2020, arXiv:2006.09359; the defaults are trlX's.

mod batch;
mod decoding;
mod loss;
mod returns;
mod target_sync;
mod terms;

pub use batch::{IlqlBatch, IlqlMicroBatch};
pub use decoding::IlqlDecoding;
pub use loss::{IlqlLoss, PreparedIlql};
pub use returns::standardize_returns;
pub use target_sync::TargetSync;
