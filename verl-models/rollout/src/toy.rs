//! A model small enough to check by hand: the hidden state is the running sum of embeddings.

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use verl_decoder::error::ModelError;
use verl_kernels::random::{DrawKey, Purpose};

use crate::interface::ModelInterface;

/// Hidden state at s is Σ_{r ≤ s} embedding(id_r); no attention, no layers.
#[derive(Module, Debug)]
pub struct Toy {
    embedding: Param<Tensor<2>>,
    head: Param<Tensor<2>>,
}

/// Ids of the toy's vocabulary.
pub const VOCAB: usize = 11;
/// Longest sequence.
pub const CONTEXT: usize = 40;
const WIDTH: usize = 6;

impl Toy {
    /// Weights drawn from `seed`.
    pub fn new(seed: u64) -> Self {
        let matrix = |row: u64| {
            let stream = DrawKey {
                seed,
                purpose: Purpose::Init,
                step: 0,
                row,
                attempt: 0,
            }
            .stream();
            let values: Vec<f32> = (0..VOCAB * WIDTH)
                .map(|i| stream.normal(0, i as u32) as f32)
                .collect();
            let data = TensorData::new(values, [VOCAB, WIDTH]);
            Param::from_tensor(Tensor::from_data(data, &Device::flex()))
        };
        Toy {
            embedding: matrix(0),
            head: matrix(1),
        }
    }
}

impl ModelInterface for Toy {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn max_tokens(&self) -> usize {
        CONTEXT
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [rows, tokens] = ids.dims();
        self.embedding
            .val()
            .select(0, ids.reshape([rows * tokens]))
            .reshape([rows, tokens, WIDTH])
            .cumsum(1)
    }

    fn head(&self) -> Tensor<2> {
        self.head.val()
    }

    fn save(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }
}
