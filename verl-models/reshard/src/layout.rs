//! The part of each tensor that each rank has.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::block::{Block, share};
use crate::ranks::Ranks;

/// The type of a tensor's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Element {
    /// IEEE 754, 64 bits.
    F64,
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl Element {
    /// Bytes of a cell.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Element::F64 => 8,
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }
}

/// Name, element type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Unique name.
    pub name: String,
    /// Type of its cells.
    pub element: Element,
    /// Length of each axis.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of cells.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.cells() * self.element.size()
    }
}

/// Which pipeline stages have a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Depth {
    /// The first stage.
    First,
    /// The stage of this layer, counted from 0. Layers are dealt to stages in order, as evenly as possible.
    Layer(usize),
    /// The last stage.
    Last,
    /// The first and the last stage: an embedding that is also the output head.
    Ends,
}

/// How tensor parallelism cuts a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Split {
    /// The axis that is cut.
    pub axis: usize,
    /// Cells along the axis that stay together, such as those of an attention head. Parts that outnumber the units share
    /// them: several ranks then have the same unit.
    pub unit: usize,
}

/// A tensor and how parallelism divides it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Weight {
    /// The tensor.
    pub spec: TensorSpec,
    /// Its stages.
    pub depth: Depth,
    /// Its cut; without one, every tensor-parallel rank of the stage has all of it.
    pub split: Option<Split>,
}

/// What a rank has of a tensor, stored densely in row-major order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// The block that the rank's model-parallel position has.
    pub block: Block,
    /// The interval of the flattened block that the rank has, if replicas share the block's cells (ZeRO, FSDP).
    pub cells: Option<Range<usize>>,
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cells {
            Some(cells) => write!(f, "cells {cells:?} of block {}", self.block),
            None => write!(f, "block {}", self.block),
        }
    }
}

impl Shard {
    /// The cells as disjoint blocks in the order in which they are stored.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        match &self.cells {
            Some(cells) => self.block.run(cells.clone()),
            None if self.block.cells() == 0 => Vec::new(),
            None => vec![self.block.clone()],
        }
    }

    /// Number of cells.
    #[must_use]
    pub fn cells(&self) -> usize {
        match &self.cells {
            Some(cells) => cells.len(),
            None => self.block.cells(),
        }
    }
}

/// The part of each tensor that each rank has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    ranks: usize,
    tensors: Vec<TensorSpec>,
    /// By tensor, then by rank.
    shards: Vec<Vec<Option<Shard>>>,
}

/// A layout that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A cut that does not fit the tensor.
    #[error(
        "`{tensor}` of shape {shape:?} cannot be cut along axis {axis} in units of {unit}; \
         use an axis whose length is a multiple of the unit"
    )]
    Split {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The axis of the cut.
        axis: usize,
        /// Cells that stay together.
        unit: usize,
    },
    /// A shard outside its tensor.
    #[error(
        "rank {rank} has {shard} of `{tensor}`, which has the shape {shape:?}; use intervals within it"
    )]
    Outside {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The rank.
        rank: usize,
        /// What it would have.
        shard: Box<Shard>,
    },
    /// Tensors, or ranks of a tensor, without an entry.
    #[error("there are shards for {got} {what}, but {expected} are needed; list one for each")]
    Count {
        /// Tensors, or ranks of a tensor.
        what: String,
        /// Entries.
        got: usize,
        /// Entries needed.
        expected: usize,
    },
}

impl Layout {
    /// A layout from the shards of each tensor, one for each of `ranks` ranks.
    ///
    /// # Errors
    /// An entry is missing, or a shard is not within its tensor.
    pub fn new(
        tensors: Vec<TensorSpec>,
        ranks: usize,
        shards: Vec<Vec<Option<Shard>>>,
    ) -> Result<Self, LayoutError> {
        let count = |what: &dyn Fn() -> String, got, expected| {
            if got == expected {
                return Ok(());
            }
            Err(LayoutError::Count {
                what: what(),
                got,
                expected,
            })
        };
        count(&|| "tensors".to_owned(), shards.len(), tensors.len())?;
        for (tensor, shards) in tensors.iter().zip(&shards) {
            count(
                &|| format!("ranks of `{}`", tensor.name),
                shards.len(),
                ranks,
            )?;
            for (rank, shard) in shards.iter().enumerate() {
                let Some(shard) = shard else { continue };
                let within = |cells: &Range<usize>| {
                    cells.start <= cells.end && cells.end <= shard.block.cells()
                };
                let fits = shard.block.fits(&tensor.shape);
                if !(fits && shard.cells.as_ref().is_none_or(within)) {
                    return Err(LayoutError::Outside {
                        tensor: tensor.name.clone(),
                        shape: tensor.shape.clone(),
                        rank,
                        shard: Box::new(shard.clone()),
                    });
                }
            }
        }
        Ok(Layout {
            ranks,
            tensors,
            shards,
        })
    }

    /// The layout of weights over ranks: layers by stage, cuts by tensor-parallel part, the same for every replica.
    ///
    /// # Errors
    /// A cut does not fit its tensor.
    pub fn of(weights: &[Weight], ranks: &Ranks) -> Result<Self, LayoutError> {
        let (stages, parts) = (ranks.grid.pipeline, ranks.grid.tensor);
        let layers = weights.iter().map(|weight| match weight.depth {
            Depth::Layer(layer) => layer + 1,
            _ => 0,
        });
        let layers = layers.max().unwrap_or(0);
        let is_at = |depth: Depth, stage: usize| match depth {
            Depth::First => stage == 0,
            Depth::Layer(layer) => share(stage, stages, layers).contains(&layer),
            Depth::Last => stage + 1 == stages,
            Depth::Ends => stage == 0 || stage + 1 == stages,
        };
        let mut shards = Vec::with_capacity(weights.len());
        for weight in weights {
            let blocks = (0..parts).map(|part| weight.block(part, parts));
            let blocks = blocks.collect::<Result<Vec<_>, _>>()?;
            let own = ranks.coordinates.iter().map(|at| {
                is_at(weight.depth, at.pipeline).then(|| Shard {
                    block: blocks[at.tensor].clone(),
                    cells: None,
                })
            });
            shards.push(own.collect());
        }
        Ok(Layout {
            ranks: ranks.len(),
            tensors: weights.iter().map(|weight| weight.spec.clone()).collect(),
            shards,
        })
    }

    /// The same with the cells of each block shared among the replicas of `ranks`: replica k has the k-th interval of the
    /// flattened block. For weights this is ZeRO-3 or FSDP; for gradients and optimiser states, ZeRO-2 and ZeRO-1.
    #[must_use]
    pub fn sharded(mut self, ranks: &Ranks) -> Self {
        for shards in &mut self.shards {
            for (shard, at) in shards.iter_mut().zip(&ranks.coordinates) {
                if let Some(shard) = shard {
                    shard.cells = Some(share(at.data, ranks.grid.data, shard.block.cells()));
                }
            }
        }
        self
    }

    /// The layout of some of the ranks, such as those of one replica, in the given order.
    ///
    /// # Panics
    /// Panics if there is no such rank.
    #[must_use]
    pub fn subset(&self, ranks: &[usize]) -> Self {
        let of_tensor = |shards: &Vec<Option<Shard>>| {
            let own = ranks.iter().map(|&rank| shards[rank].clone());
            own.collect()
        };
        Layout {
            ranks: ranks.len(),
            tensors: self.tensors.clone(),
            shards: self.shards.iter().map(of_tensor).collect(),
        }
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The tensors.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// What a rank has of a tensor, by positions.
    ///
    /// # Panics
    /// Panics if there is no such tensor or rank.
    #[must_use]
    pub fn shard(&self, tensor: usize, rank: usize) -> Option<&Shard> {
        self.shards[tensor][rank].as_ref()
    }

    /// The blocks that a rank has of a tensor, in the order in which its buffer contains them.
    ///
    /// # Panics
    /// As [`Layout::shard`].
    #[must_use]
    pub fn blocks(&self, tensor: usize, rank: usize) -> Vec<Block> {
        self.shard(tensor, rank)
            .map_or_else(Vec::new, Shard::blocks)
    }

    /// Bytes that a rank has of a tensor.
    ///
    /// # Panics
    /// As [`Layout::shard`].
    #[must_use]
    pub fn tensor_bytes(&self, tensor: usize, rank: usize) -> usize {
        let cells = self.shard(tensor, rank).map_or(0, Shard::cells);
        cells * self.tensors[tensor].element.size()
    }

    /// Bytes that a rank has.
    ///
    /// # Panics
    /// Panics if there is no such rank.
    #[must_use]
    pub fn bytes(&self, rank: usize) -> u64 {
        let tensors = 0..self.tensors.len();
        tensors
            .map(|tensor| self.tensor_bytes(tensor, rank) as u64)
            .sum()
    }
}

impl Weight {
    /// The block of tensor-parallel part `part` of `parts`.
    fn block(&self, part: usize, parts: usize) -> Result<Block, LayoutError> {
        let mut block = Block::whole(&self.spec.shape);
        let Some(Split { axis, unit }) = self.split else {
            return Ok(block);
        };
        let length = self.spec.shape.get(axis).copied();
        let units = length.filter(|length| unit > 0 && length % unit == 0 && *length > 0);
        let Some(units) = units.map(|length| length / unit) else {
            return Err(LayoutError::Split {
                tensor: self.spec.name.clone(),
                shape: self.spec.shape.clone(),
                axis,
                unit,
            });
        };
        let own = if units < parts {
            let shared = part * units / parts;
            shared..shared + 1
        } else {
            share(part, parts, units)
        };
        block.0[axis] = own.start * unit..own.end * unit;
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Grid;

    fn weight(name: &str, shape: &[usize], depth: Depth, split: Option<(usize, usize)>) -> Weight {
        Weight {
            spec: TensorSpec {
                name: name.to_owned(),
                element: Element::F32,
                shape: shape.to_vec(),
            },
            depth,
            split: split.map(|(axis, unit)| Split { axis, unit }),
        }
    }

    fn grid(pipeline: usize, tensor: usize, data: usize) -> Ranks {
        let grid = Grid {
            pipeline,
            tensor,
            data,
        };
        Ranks::grid(grid).expect("sizes above 0")
    }

    fn blocks(layout: &Layout, tensor: usize) -> Vec<Vec<Block>> {
        let ranks = 0..layout.ranks();
        ranks.map(|rank| layout.blocks(tensor, rank)).collect()
    }

    #[test]
    fn stages_parts_and_replicas_have_their_parts() {
        let weights = [
            weight("embed", &[8, 2], Depth::Ends, Some((0, 1))),
            weight("layer", &[2, 6], Depth::Layer(1), Some((1, 1))),
            weight("norm", &[2], Depth::Last, None),
        ];
        let layout = Layout::of(&weights, &grid(2, 2, 1)).expect("a layout");
        let [low, high] = [Block(vec![0..4, 0..2]), Block(vec![4..8, 0..2])];
        let both = [vec![low], vec![high]];
        assert_eq!(blocks(&layout, 0), [both.clone(), both].concat());
        let left = Block(vec![0..2, 0..3]);
        let right = Block(vec![0..2, 3..6]);
        assert_eq!(
            blocks(&layout, 1),
            [vec![], vec![], vec![left], vec![right]]
        );
        let norm = vec![Block::whole(&[2])];
        assert_eq!(blocks(&layout, 2), [vec![], vec![], norm.clone(), norm]);
        assert_eq!(layout.bytes(0), 32);
        assert_eq!(layout.bytes(3), 32 + 24 + 8);
    }

    #[test]
    fn heads_stay_whole_and_are_shared_by_parts_that_outnumber_them() {
        let weights = [weight("k", &[6, 5], Depth::Layer(0), Some((0, 3)))];
        let layout = Layout::of(&weights, &grid(1, 4, 1)).expect("a layout");
        let rows = |rank| layout.blocks(0, rank)[0].0[0].clone();
        assert_eq!(
            [rows(0), rows(1), rows(2), rows(3)],
            [0..3, 0..3, 3..6, 3..6]
        );
        let error = Layout::of(
            &[weight("k", &[7], Depth::First, Some((0, 3)))],
            &grid(1, 2, 1),
        );
        assert_eq!(
            error.expect_err("7 rows in units of 3").to_string(),
            "`k` of shape [7] cannot be cut along axis 0 in units of 3; use an axis whose length is a multiple of the unit"
        );
    }

    #[test]
    fn replicas_share_the_cells_of_their_block() {
        let weights = [weight("w", &[4, 3], Depth::Layer(0), Some((0, 1)))];
        let ranks = grid(1, 2, 4);
        let layout = Layout::of(&weights, &ranks).expect("a layout");
        let layout = layout.sharded(&ranks);
        // Rank 1 is part 1 of replica 0, rank 7 part 1 of replica 3; a block has 6 cells.
        assert_eq!(layout.blocks(0, 1), [Block(vec![2..3, 0..1])]);
        assert_eq!(layout.blocks(0, 7), [Block(vec![3..4, 1..3])]);
        let bytes: u64 = (0..8).map(|rank| layout.bytes(rank)).sum();
        assert_eq!(bytes, 4 * 3 * 4);
    }

    #[test]
    fn shards_outside_their_tensor_are_refused() {
        let spec = weight("w", &[4], Depth::First, None).spec;
        let shard = |end: usize, cells| {
            Some(Shard {
                block: Block::whole(&[end]),
                cells,
            })
        };
        let new = |shards| Layout::new(vec![spec.clone()], 2, vec![shards]);
        assert!(new(vec![shard(4, None), None]).is_ok());
        assert!(new(vec![shard(4, Some(0..4))]).is_err());
        assert!(new(vec![None, shard(5, None)]).is_err());
        let error = new(vec![None, shard(4, Some(2..5))]).expect_err("5 cells of 4");
        assert_eq!(
            error.to_string(),
            "rank 1 has cells 2..5 of block [0..4] of `w`, which has the shape [4]; use intervals within it"
        );
    }
}
