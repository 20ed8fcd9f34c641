//! Scores of tokens from hidden states: products with the head, and launches of `vocab.cu` on the logits.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape, Slice};
use cubecl::server::Handle;

use super::launch::{CudaKernel, Source};
use super::product::{Operand, product, product_into, product_of_each_row};
use super::tensor::{CubeTensor, cast, dense, element, empty};
use crate::{KEPT_LOGIT_BYTES, LOGIT_BYTES};

static SOURCE: Source = Source::with_prefix(include_str!("rowwise.cuh"), include_str!("vocab.cu"));

/// Numbers that the kernel writes for a token: log-prob, entropy, Σ π², largest logit, log Σ e.
const KINDS: usize = 5;
const THREADS: u32 = 256;

/// Operands of a call.
pub(crate) struct Operands {
    /// `[N, D]`
    pub hidden: CubeTensor,
    /// `[V, D]`
    pub head: CubeTensor,
    /// `[N, 1]`
    pub targets: CubeTensor,
    pub temperature: f64,
    /// Least number of tokens whose logits are in memory at once.
    pub chunk: usize,
}

impl Operands {
    fn sizes(&self) -> (usize, usize) {
        (self.hidden.shape()[0], self.head.shape()[0])
    }

    /// Tokens of each product, a function of the model's sizes only: the bits of a token do not depend on others.
    fn chunk(&self) -> usize {
        let row = self.sizes().1 * self.hidden.dtype().size();
        self.chunk.max((LOGIT_BYTES / row).next_power_of_two() / 2)
    }

    fn temperature(&self) -> Handle {
        let temperature = (self.temperature as f32).to_le_bytes();
        self.hidden.client.create_from_slice(&temperature)
    }

    /// Starts and ends of chunks of `chunk` tokens.
    fn chunks(&self, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
        let tokens = self.sizes().0;
        (0..tokens)
            .step_by(chunk)
            .map(move |start| (start, tokens.min(start + chunk)))
    }

    fn hidden(&self, start: usize, end: usize) -> CubeTensor {
        rows(&self.hidden, start, end)
    }

    fn logits(&self, hidden: CubeTensor) -> CubeTensor {
        dense(product_of_each_row(hidden, self.head.clone()))
    }

    fn kernel(&self, entry: &'static str) -> CudaKernel {
        CudaKernel::new(&SOURCE, entry, THREADS).define("ELEMENT", element(self.hidden.dtype()))
    }

    fn scalars(&self, start: usize, end: usize) -> Vec<u64> {
        let (tokens, vocab) = self.sizes();
        [end - start, vocab, start, tokens]
            .map(|size| size as u64)
            .into()
    }
}

fn rows(tensor: &CubeTensor, start: usize, end: usize) -> CubeTensor {
    if start == 0 && end == tensor.shape()[0] {
        return tensor.clone();
    }
    Cube::float_slice(tensor.clone(), &[Slice::from(start..end), Slice::full()])
}

/// The kernel's results for each token: `[5, N]`.
pub(crate) fn forward(operands: &Operands) -> CubeTensor {
    forward_of(operands, operands.chunk()).0
}

/// [`forward`], and the logits if they are few enough to keep: `[N, V]`.
pub(crate) fn forward_saving(operands: &Operands) -> (CubeTensor, Option<CubeTensor>) {
    let (tokens, vocab) = operands.sizes();
    if tokens * vocab * operands.hidden.dtype().size() > KEPT_LOGIT_BYTES {
        return (forward(operands), None);
    }
    let (scores, logits) = forward_of(operands, tokens);
    (scores, Some(logits))
}

/// The scores, and the logits of the last `chunk` tokens.
fn forward_of(operands: &Operands, chunk: usize) -> (CubeTensor, CubeTensor) {
    let (tokens, _) = operands.sizes();
    let scores = empty(&operands.hidden, [KINDS, tokens], DType::F32);
    let best = empty(&operands.hidden, [tokens], DType::I32);
    let temperature = operands.temperature();
    let targets = dense(operands.targets.clone());
    let mut last: Option<CubeTensor> = None;
    for (start, end) in operands.chunks(chunk) {
        // The buffer is freed before the next is needed.
        drop(last.take());
        let logits = operands.logits(operands.hidden(start, end));
        // SAFETY: the logits have a row for each block, scores, targets and `best` have a column for each token of
        // the call, and targets are below the vocabulary, as its caller guarantees.
        unsafe {
            operands.kernel("score_rows").launch(
                &logits.client,
                [(end - start) as u32, 1, 1],
                &[
                    &logits.handle,
                    &targets.handle,
                    &temperature,
                    &scores.handle,
                    &best.handle,
                ],
                operands.scalars(start, end),
            );
        }
        last = Some(logits);
    }
    (scores, last.expect("there is a token to score"))
}

/// The requested rows: `[1, N]` to `[3, N]`.
pub(crate) fn chosen(scores: &CubeTensor, entropies: bool, sum_pi_squared: bool) -> CubeTensor {
    let parts = [(0, true), (1, entropies), (2, sum_pi_squared)].into_iter();
    let parts = parts.filter(|(_, wanted)| *wanted);
    let mut parts: Vec<CubeTensor> = parts.map(|(at, _)| rows(scores, at, at + 1)).collect();
    if parts.len() == 1 {
        parts.remove(0)
    } else {
        Cube::float_cat(parts, 0)
    }
}

/// Gradients of hidden states, in their dtype, and of the head, in f32, each if requested. `kept` are the logits, if
/// they were kept; they are overwritten.
pub(crate) fn backward(
    operands: &Operands,
    scores: &CubeTensor,
    kept: Option<CubeTensor>,
    entropies: bool,
    gradient: CubeTensor,
    [want_hidden, want_head]: [bool; 2],
) -> [Option<CubeTensor>; 2] {
    let (tokens, vocab) = operands.sizes();
    let gradient = cast(gradient, DType::F32);
    let of_log_probs = rows(&gradient, 0, 1);
    let of_entropies = if entropies {
        rows(&gradient, 1, 2)
    } else {
        let zeros = of_log_probs.clone();
        Cube::float_mul_scalar(zeros, 0.0.into())
    };
    let gradients = dense(Cube::float_cat(vec![of_log_probs, of_entropies], 0));
    let temperature = operands.temperature();
    let targets = dense(operands.targets.clone());
    let dtype = operands.hidden.dtype();
    // 16-byte accesses, 1,024 per block.
    let columns = vocab.div_ceil(16 / dtype.size() * 1024) as u32;
    let (mut d_hidden, mut d_head) = (Vec::new(), None);
    let chunk = kept.as_ref().map_or_else(|| operands.chunk(), |_| tokens);
    for (start, end) in operands.chunks(chunk) {
        let hidden = operands.hidden(start, end);
        let logits = kept
            .clone()
            .unwrap_or_else(|| operands.logits(hidden.clone()));
        // SAFETY: as in `forward_of`, whose scores these are; the gradients have two rows, and the grid covers the
        // columns.
        unsafe {
            operands.kernel("score_rows_backward").launch(
                &logits.client,
                [columns, (end - start).min(65_535) as u32, 1],
                &[
                    &logits.handle,
                    &targets.handle,
                    &temperature,
                    &scores.handle,
                    &gradients.handle,
                ],
                operands.scalars(start, end),
            );
        }
        if want_hidden {
            let head = Operand::columns(operands.head.clone());
            d_hidden.push(product(Operand::rows(logits.clone()), head, dtype));
        }
        if want_head {
            let (logits, hidden) = (Operand::columns(logits), Operand::columns(hidden));
            d_head = Some(product_into(d_head, logits, hidden));
        }
    }
    let width = operands.hidden.shape()[1];
    let d_hidden = want_hidden.then(|| match d_hidden.len() {
        1 => d_hidden.remove(0),
        _ => Cube::float_cat(d_hidden, 0),
    });
    let whole = |tensor| Cube::float_reshape(tensor, Shape::new([tokens, width]));
    [d_hidden.map(whole), d_head]
}
