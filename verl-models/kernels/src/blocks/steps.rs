//! The steps that a half of a layer is composed of; a backend with faster kernels replaces single steps.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Flex, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::AttentionBlock;
use crate::DecoderGradients;

/// Positions of the tokens of a call.
#[derive(Debug, Clone)]
pub struct Places<B: Backend> {
    /// Cosines and signed sines of positions.
    pub tables: [FloatTensor<B>; 2],
    /// First token of each sequence, and the end.
    pub starts: IntTensor<B>,
    /// Position of each token.
    pub positions: IntTensor<B>,
}

/// The steps of a half, forward and backward.
pub trait BlockGradients: DecoderGradients {
    /// Matrices stacked by rows, or vectors concatenated.
    fn joined(parts: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        Self::float_cat(parts, 0)
    }

    /// Splits a gradient of [`BlockGradients::joined`] matrices into parts of `rows` rows.
    fn parted(whole: FloatTensor<Self>, rows: &[usize]) -> Vec<FloatTensor<Self>> {
        let mut start = 0;
        let part = |rows: &usize| {
            let range = Slice::from(start..start + rows);
            start += rows;
            Self::float_slice(whole.clone(), &[range, Slice::full()])
        };
        rows.iter().map(part).collect()
    }

    /// x Wᵀ + b.
    fn product_and_bias(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let y = Self::product_with_rows(x, weight);
        match bias {
            Some(bias) => {
                let row = Shape::new([1, bias.shape()[0]]);
                Self::float_add(y, Self::float_reshape(bias, row))
            }
            None => y,
        }
    }

    /// sum + x Wᵀ.
    fn product_and_sum(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        sum: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::float_add(sum, Self::product_with_rows(x, weight))
    }

    /// The gradient of a bias: `[N, W]` -> `[W]`.
    fn column_sums(gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let width = gradient.shape()[1];
        Self::float_reshape(Self::float_sum_dim(gradient, 0), Shape::new([width]))
    }

    /// Gradients for `x` and the norm's weight; `past` is the gradient that reaches `x` around the norm.
    fn rms_norm_backward_past(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        epsilon: f64,
        saved: Option<FloatTensor<Self>>,
        gradient: FloatTensor<Self>,
        past: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let [dx, d_gain] = Self::rms_norm_backward(x, gain, epsilon, saved, gradient);
        [Self::float_add(dx, past), d_gain]
    }

    /// silu(gate) · up: `[N, 2I]`, gates first, -> `[N, I]`.
    fn swiglu_joined(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        let [gate, up] = halves::<Self>(gate_up);
        Self::fused_swiglu(gate, up)
    }

    /// The gradient for gates and ups, `[N, 2I]`.
    fn swiglu_joined_backward(
        gate_up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [gate, up] = halves::<Self>(gate_up);
        Self::float_cat(Self::swiglu_backward(gate, up, gradient).into(), 1)
    }

    /// Attention of joined queries, keys and values, `[N, W]` -> `[N, H·Dh]`, and what its backward pass needs.
    fn attention_joined(
        block: &AttentionBlock,
        joined: FloatTensor<Self>,
        places: &Places<Self>,
    ) -> (FloatTensor<Self>, Vec<Vec<FloatTensor<Self>>>) {
        let parts = columns::<Self>(&joined, &block.widths());
        let (mut mixed, mut saved) = (Vec::new(), Vec::new());
        let mut start = 0;
        for &tokens in &*block.lengths {
            let own = |x: &FloatTensor<Self>| rows::<Self>(x, start, tokens);
            let table = |x: &FloatTensor<Self>| rows::<Self>(x, 0, tokens);
            let [queries, keys, values] = [&parts[0], &parts[1], &parts[2]].map(own);
            let [cos, sin] = places.tables.each_ref().map(table);
            let shape = block.shape_of(1, tokens);
            let found = Self::attention_saving(shape, [queries, keys, values, cos, sin]);
            mixed.push(found.0);
            saved.push(found.1);
            start += tokens;
        }
        (Self::float_cat(mixed, 0), saved)
    }

    /// The gradient for joined queries, keys and values.
    fn attention_joined_backward(
        block: &AttentionBlock,
        _places: &Places<Self>,
        saved: Vec<Vec<FloatTensor<Self>>>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let mut start = 0;
        let parts = saved
            .into_iter()
            .zip(&*block.lengths)
            .map(|(saved, &tokens)| {
                let own = rows::<Self>(&gradient, start, tokens);
                start += tokens;
                let parts = Self::attention_backward(block.shape_of(1, tokens), saved, own);
                Self::float_cat(parts.into(), 1)
            });
        Self::float_cat(parts.collect(), 0)
    }
}

impl BlockGradients for Flex {}

fn rows<B: Backend>(x: &FloatTensor<B>, start: usize, count: usize) -> FloatTensor<B> {
    let range = Slice::from(start..start + count);
    B::float_slice(x.clone(), &[range, Slice::full()])
}

/// Splits `x` into columns of these widths.
fn columns<B: Backend>(x: &FloatTensor<B>, widths: &[usize]) -> Vec<FloatTensor<B>> {
    let mut start = 0;
    let part = |width: &usize| {
        let range = Slice::from(start..start + width);
        start += width;
        B::float_slice(x.clone(), &[Slice::full(), range])
    };
    widths.iter().map(part).collect()
}

fn halves<B: Backend>(x: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let inner = x.shape()[1] / 2;
    let mut parts = columns::<B>(&x, &[inner, inner]);
    let last = parts.remove(1);
    [parts.remove(0), last]
}

/// Each of the gradients, or `None` for all.
pub(super) fn each<T, const N: usize>(parts: Option<[T; N]>) -> [Option<T>; N] {
    parts.map_or_else(|| [const { None }; N], |parts| parts.map(Some))
}

/// Registers each gradient with its parent.
macro_rules! register {
    ($parents:expr, $parts:expr, $grads:expr) => {
        for (node, part) in $parents.into_iter().zip($parts) {
            if let (Some(node), Some(part)) = (node, part) {
                $grads.register::<B>(node.id, part);
            }
        }
    };
}
pub(super) use register;
