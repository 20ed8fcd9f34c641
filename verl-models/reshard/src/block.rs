//! Hyper-rectangles of cells of a tensor.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// An interval per axis. A tensor without axes has one cell.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Block(pub Vec<Range<usize>>);

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl Block {
    /// All cells of a tensor.
    #[must_use]
    pub fn whole(shape: &[usize]) -> Self {
        Block(shape.iter().map(|&length| 0..length).collect())
    }

    /// Number of cells.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).product()
    }

    /// Whether every interval is within the axis of the same position.
    #[must_use]
    pub fn fits(&self, shape: &[usize]) -> bool {
        let fits =
            |(own, &length): (&Range<usize>, &usize)| own.start <= own.end && own.end <= length;
        self.0.len() == shape.len() && self.0.iter().zip(shape).all(fits)
    }

    /// Whether the blocks have cells in common.
    #[must_use]
    pub fn overlaps(&self, other: &Block) -> bool {
        let mut axes = self.0.iter().zip(&other.0);
        axes.all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    /// The cells of both; `None` if there are none.
    #[must_use]
    pub fn intersection(&self, other: &Block) -> Option<Block> {
        let axes = self.0.iter().zip(&other.0);
        let common = axes.map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
        self.overlaps(other).then(|| Block(common.collect()))
    }

    /// Whether every cell of `other` is in this block.
    #[must_use]
    pub fn contains(&self, other: &Block) -> bool {
        self.intersection(other).is_some_and(|both| both == *other)
    }

    /// The cells that are not in `other`, as disjoint blocks.
    #[must_use]
    pub fn without(&self, other: &Block) -> Vec<Block> {
        let Some(common) = self.intersection(other) else {
            return vec![self.clone()];
        };
        let mut rest = self.clone();
        let mut blocks = Vec::new();
        for (axis, cut) in common.0.iter().enumerate() {
            let own = rest.0[axis].clone();
            for outside in [own.start..cut.start, cut.end..own.end] {
                if !outside.is_empty() {
                    let mut block = rest.clone();
                    block.0[axis] = outside;
                    blocks.push(block);
                }
            }
            rest.0[axis] = cut.clone();
        }
        blocks
    }

    /// The cells at positions `cells` of the row-major order, as blocks in that order: at most two per axis.
    #[must_use]
    pub fn run(&self, cells: Range<usize>) -> Vec<Block> {
        if cells.is_empty() {
            return Vec::new();
        }
        let Some((axis, inner)) = self.0.split_first() else {
            return vec![self.clone()];
        };
        let inner = Block(inner.to_vec());
        let length = inner.cells();
        let with = |rows: Range<usize>, inner: &Block| {
            let rows = axis.start + rows.start..axis.start + rows.end;
            Block([vec![rows], inner.0.clone()].concat())
        };
        let [(first, skipped), (last, taken)] =
            [cells.start, cells.end].map(|at| (at / length, at % length));
        let part = |row: usize, cells: Range<usize>| {
            let blocks = inner.run(cells).into_iter();
            blocks.map(move |block| with(row..row + 1, &block))
        };
        if first == last {
            return part(first, skipped..taken).collect();
        }
        let mut blocks = Vec::new();
        let whole_rows = first + usize::from(skipped > 0)..last;
        if skipped > 0 {
            blocks.extend(part(first, skipped..length));
        }
        if !whole_rows.is_empty() {
            blocks.push(with(whole_rows, &inner));
        }
        blocks.extend(part(last, 0..taken));
        blocks
    }

    /// Calls `see(from, to, length)` for each run of cells of this block that is contiguous in both `source` and
    /// `destination`, which contain it: positions in the row-major order of each, and the number of cells.
    pub fn copies(
        &self,
        source: &Block,
        destination: &Block,
        mut see: impl FnMut(usize, usize, usize),
    ) {
        if self.cells() == 0 {
            return;
        }
        let rank = self.0.len();
        let full = |axis: &usize| {
            self.0[*axis] == source.0[*axis] && self.0[*axis] == destination.0[*axis]
        };
        let full = (0..rank).rev().take_while(full).count();
        // The axis before those that all three share belongs to the run too.
        let outer = rank.saturating_sub(full + 1);
        let length = self.0[outer..].iter().map(ExactSizeIterator::len).product();
        let mut at: Vec<usize> = self.0.iter().map(|axis| axis.start).collect();
        loop {
            see(source.position(&at), destination.position(&at), length);
            let Some(axis) = (0..outer)
                .rev()
                .find(|&axis| at[axis] + 1 < self.0[axis].end)
            else {
                return;
            };
            at[axis] += 1;
            let inner = at.iter_mut().zip(&self.0).take(outer).skip(axis + 1);
            inner.for_each(|(at, axis)| *at = axis.start);
        }
    }

    /// Position of a cell in this block's row-major order.
    fn position(&self, cell: &[usize]) -> usize {
        let axes = self.0.iter().zip(cell);
        axes.fold(0, |position, (axis, at)| {
            position * axis.len() + at - axis.start
        })
    }
}

/// Interval `index` of `total` cells in `parts` parts whose sizes differ by at most one. The intervals of `parts` are unions
/// of those of any multiple of `parts`.
#[must_use]
pub fn share(index: usize, parts: usize, total: usize) -> Range<usize> {
    index * total / parts..(index + 1) * total / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(axes: &[(usize, usize)]) -> Block {
        Block(axes.iter().map(|&(start, end)| start..end).collect())
    }

    #[test]
    fn a_block_without_its_middle_is_a_frame() {
        let rest = block(&[(0, 4), (0, 4)]).without(&block(&[(1, 3), (1, 3)]));
        let frame = [
            block(&[(0, 1), (0, 4)]),
            block(&[(3, 4), (0, 4)]),
            block(&[(1, 3), (0, 1)]),
            block(&[(1, 3), (3, 4)]),
        ];
        assert_eq!(rest, frame);
        assert_eq!(block(&[(0, 2)]).without(&block(&[(0, 2)])), []);
        assert_eq!(
            block(&[(0, 2)]).without(&block(&[(2, 3)])),
            [block(&[(0, 2)])]
        );
    }

    #[test]
    fn a_run_is_a_part_of_a_row_whole_rows_and_a_part_of_a_row() {
        let whole = block(&[(2, 6), (1, 4)]);
        let blocks = whole.run(2..10);
        let expected = [
            block(&[(2, 3), (3, 4)]),
            block(&[(3, 5), (1, 4)]),
            block(&[(5, 6), (1, 2)]),
        ];
        assert_eq!(blocks, expected);
        assert_eq!(whole.run(4..5), [block(&[(3, 4), (2, 3)])]);
        assert_eq!(whole.run(0..12), [whole]);
        assert_eq!(Block::whole(&[]).run(0..1), [Block::whole(&[])]);
    }

    #[test]
    fn shares_of_few_parts_are_unions_of_shares_of_many() {
        for (few, times, total) in [(2, 2, 7), (3, 4, 10), (1, 5, 3), (4, 2, 64)] {
            for index in 0..few {
                let many = few * times;
                let from = share(index * times, many, total).start;
                let to = share((index + 1) * times - 1, many, total).end;
                assert_eq!(share(index, few, total), from..to);
            }
        }
    }
}
