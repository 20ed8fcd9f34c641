//! Byte buffers of ranks: cut from whole tensors, and joined again.

use crate::block::Block;
use crate::exchange::ExchangeError;
use crate::layout::{Layout, TensorSpec};

/// The buffer of each tensor, empty where the rank has no part of it. A buffer contains the blocks of the rank's shard, each
/// densely in row-major order, one after the other.
pub type RankBuffers = Vec<Vec<u8>>;

/// A dense block in a buffer, and its first byte there.
pub(crate) struct Placed {
    pub(crate) block: Block,
    pub(crate) offset: usize,
}

impl Placed {
    fn whole(tensor: &TensorSpec) -> Self {
        Placed {
            block: Block::whole(&tensor.shape),
            offset: 0,
        }
    }

    /// Copies the cells of `block`, which both contain, from one buffer to another; a cell has `size` bytes.
    pub(crate) fn copy(
        &self,
        from: &[u8],
        target: &Placed,
        to: &mut [u8],
        block: &Block,
        size: usize,
    ) {
        block.copies(&self.block, &target.block, |source, destination, cells| {
            let source = &from[self.offset + source * size..][..cells * size];
            to[target.offset + destination * size..][..cells * size].copy_from_slice(source);
        });
    }
}

impl Layout {
    /// Cuts whole tensors into the buffers of each rank.
    ///
    /// # Errors
    /// A tensor is missing or has another size.
    pub fn cut(&self, whole: &[Vec<u8>]) -> Result<Vec<RankBuffers>, ExchangeError> {
        check_count("tensors", whole.len(), self.tensors().len())?;
        for (tensor, bytes) in self.tensors().iter().zip(whole) {
            check_length(0, &tensor.name, bytes.len(), tensor.bytes())?;
        }
        let cut = |rank| {
            let mut buffers = self.empty(rank);
            for (tensor, spec) in self.tensors().iter().enumerate() {
                for own in self.placed(tensor, rank) {
                    Placed::whole(spec).copy(
                        &whole[tensor],
                        &own,
                        &mut buffers[tensor],
                        &own.block,
                        spec.element.size(),
                    );
                }
            }
            buffers
        };
        Ok((0..self.ranks()).map(cut).collect())
    }

    /// Joins the buffers of all ranks to whole tensors.
    ///
    /// # Errors
    /// Buffers are not those of this layout, ranks with the same cells disagree, or no rank has some cells.
    pub fn join(&self, ranks: &[RankBuffers]) -> Result<Vec<Vec<u8>>, ExchangeError> {
        check_count("ranks", ranks.len(), self.ranks())?;
        for (rank, buffers) in ranks.iter().enumerate() {
            self.check_buffers(rank, buffers)?;
        }
        let mut whole = Vec::with_capacity(self.tensors().len());
        for (tensor, spec) in self.tensors().iter().enumerate() {
            let all = Placed::whole(spec);
            let mut bytes = vec![0; spec.bytes()];
            let mut missing = vec![all.block.clone()];
            missing.retain(|block| block.cells() > 0);
            for (rank, buffers) in ranks.iter().enumerate() {
                for own in self.placed(tensor, rank) {
                    own.copy(
                        &buffers[tensor],
                        &all,
                        &mut bytes,
                        &own.block,
                        spec.element.size(),
                    );
                    let rest = missing.iter().flat_map(|block| block.without(&own.block));
                    missing = rest.collect();
                }
            }
            if let Some(block) = missing.pop() {
                let tensor = spec.name.clone();
                return Err(ExchangeError::Missing { tensor, block });
            }
            whole.push(bytes);
        }
        // Where ranks disagree, the last one has won.
        for (rank, (own, expected)) in ranks.iter().zip(self.cut(&whole)?).enumerate() {
            if let Some(tensor) = (0..whole.len()).find(|&at| own[at] != expected[at]) {
                let tensor = self.tensors()[tensor].name.clone();
                return Err(ExchangeError::Replica { rank, tensor });
            }
        }
        Ok(whole)
    }

    /// Buffers of a rank, filled with zeros.
    pub(crate) fn empty(&self, rank: usize) -> RankBuffers {
        let tensors = 0..self.tensors().len();
        tensors
            .map(|tensor| vec![0; self.tensor_bytes(tensor, rank)])
            .collect()
    }

    /// The blocks of a rank's buffer.
    pub(crate) fn placed(&self, tensor: usize, rank: usize) -> Vec<Placed> {
        let size = self.tensors()[tensor].element.size();
        let mut end = 0;
        let place = |block: Block| {
            let offset = end;
            end += block.cells() * size;
            Placed { block, offset }
        };
        self.blocks(tensor, rank).into_iter().map(place).collect()
    }

    pub(crate) fn check_buffers(
        &self,
        rank: usize,
        buffers: &RankBuffers,
    ) -> Result<(), ExchangeError> {
        check_count("tensors", buffers.len(), self.tensors().len())?;
        for (tensor, bytes) in buffers.iter().enumerate() {
            let expected = self.tensor_bytes(tensor, rank);
            check_length(rank, &self.tensors()[tensor].name, bytes.len(), expected)?;
        }
        Ok(())
    }
}

pub(crate) fn check_count(
    what: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), ExchangeError> {
    if got == expected {
        return Ok(());
    }
    Err(ExchangeError::Count {
        what,
        got,
        expected,
    })
}

fn check_length(
    rank: usize,
    tensor: &str,
    got: usize,
    expected: usize,
) -> Result<(), ExchangeError> {
    if got == expected {
        return Ok(());
    }
    Err(ExchangeError::Buffer {
        rank,
        tensor: tensor.to_owned(),
        got,
        expected,
    })
}
