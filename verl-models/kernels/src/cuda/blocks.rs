//! The steps of a decoder layer's halves: single kernels where the composed steps would be several.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::attention::Call;
use super::tensor::{CubeTensor, dense};
use super::{columns, mlp, norm, product};
use crate::blocks::{AttentionBlock, BlockGradients, Places};
use crate::{DecoderGradients, Products};

/// Alignment in bytes of a view's start that every kernel accepts.
const ALIGNMENT: usize = 256;

impl BlockGradients for Cube {
    fn joined(parts: Vec<CubeTensor>) -> CubeTensor {
        let whole = |parts: &[CubeTensor]| {
            let mut shape = parts[0].shape();
            shape[0] = parts.iter().map(|part| part.shape()[0]).sum();
            shape
        };
        let shape = whole(&parts);
        // As vectors, whose elements are not padded.
        let flat = |part: CubeTensor| {
            let length = part.shape().num_elements();
            Cube::float_reshape(dense(part), Shape::new([length]))
        };
        let joined = Cube::float_cat(parts.into_iter().map(flat).collect(), 0);
        Cube::float_reshape(joined, shape)
    }

    /// Without copies if the parts are aligned.
    fn parted(whole: CubeTensor, rows: &[usize]) -> Vec<CubeTensor> {
        let whole = dense(whole);
        let [all, width] = whole.shape().dims();
        let row = width * whole.dtype().size();
        let mut start = 0;
        let part = |&rows: &usize| {
            let (before, after) = (start * row, (all - start - rows) * row);
            let range = start..start + rows;
            start += rows;
            if !before.is_multiple_of(ALIGNMENT) {
                let ranges = [Slice::from(range), Slice::full()];
                return dense(Cube::float_slice(whole.clone(), &ranges));
            }
            let handle = whole.handle.clone().offset_start(before as u64);
            CubeTensor::new_contiguous(
                whole.client.clone(),
                whole.device.clone(),
                Shape::new([rows, width]),
                handle.offset_end(after as u64),
                whole.dtype(),
            )
        };
        rows.iter().map(part).collect()
    }

    fn product_and_bias(x: CubeTensor, weight: CubeTensor, bias: Option<CubeTensor>) -> CubeTensor {
        let (x, weight, bias) = (dense(x), dense(weight), bias.map(dense));
        if let Some(y) = product::product_and(&x, &weight, bias.as_ref(), None) {
            return y;
        }
        let y = Self::product_with_rows(x, weight);
        match bias {
            Some(bias) => {
                let row = Shape::new([1, bias.shape()[0]]);
                dense(Cube::float_add(y, Cube::float_reshape(bias, row)))
            }
            None => y,
        }
    }

    fn product_and_sum(x: CubeTensor, weight: CubeTensor, sum: CubeTensor) -> CubeTensor {
        let (x, weight, sum) = (dense(x), dense(weight), dense(sum));
        match product::product_and(&x, &weight, None, Some(&sum)) {
            Some(y) => y,
            None => dense(Cube::float_add(sum, Self::product_with_rows(x, weight))),
        }
    }

    fn column_sums(gradient: CubeTensor) -> CubeTensor {
        columns::sums(gradient)
    }

    fn rms_norm_backward_past(
        x: CubeTensor,
        gain: CubeTensor,
        epsilon: f64,
        scale: Option<CubeTensor>,
        gradient: CubeTensor,
        past: CubeTensor,
    ) -> [CubeTensor; 2] {
        let scale = scale.unwrap_or_else(|| {
            let (_, scale) = Self::rms_norm_saving(x.clone(), gain.clone(), epsilon);
            scale.expect("the forward pass saves the scale")
        });
        norm::backward(x, gain, scale, gradient, Some(past))
    }

    fn swiglu_joined(gate_up: CubeTensor) -> CubeTensor {
        mlp::joined(gate_up)
    }

    fn swiglu_joined_backward(gate_up: CubeTensor, gradient: CubeTensor) -> CubeTensor {
        mlp::joined_backward(gate_up, gradient)
    }

    fn attention_joined(
        block: &AttentionBlock,
        joined: CubeTensor,
        places: &Places<Self>,
    ) -> (CubeTensor, Vec<Vec<CubeTensor>>) {
        let joined = dense(joined);
        let call = call(block, places, &joined);
        let (mixed, saved) = call.forward(&joined, places.tables.clone());
        (mixed, vec![saved])
    }

    fn attention_joined_backward(
        block: &AttentionBlock,
        places: &Places<Self>,
        saved: Vec<Vec<CubeTensor>>,
        gradient: CubeTensor,
    ) -> CubeTensor {
        let saved = saved.concat();
        call(block, places, &saved[0]).backward(&saved, gradient)
    }
}

fn call(block: &AttentionBlock, places: &Places<Cube>, like: &CubeTensor) -> Call {
    let (shape, lengths) = block.call();
    let places = [&places.starts, &places.positions];
    debug_assert!(places.iter().all(|place| place.is_contiguous()));
    Call::placed(shape, lengths, places, like.dtype())
}
