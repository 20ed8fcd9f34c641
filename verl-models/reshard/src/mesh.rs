//! Which rows a rank gets, and whose outputs count.
//!
//! Each way of calling a group of ranks is two arrays: the data rank of each rank, and whether its outputs are collected.
//! Ranks with one data rank get the same rows. `docs/dispatch.md` compares this with verl's dispatch modes.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::block::share;
use crate::ranks::Ranks;

/// How rows are dealt to the first ranks of a group, and whose outputs count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// Data rank of each rank: the position of its chunk of rows. All from 0 to the largest occur.
    pub dp_rank: Vec<usize>,
    /// Whether the outputs of each rank are collected; true for at least one rank of each data rank.
    pub collect: Vec<bool>,
}

/// Arrays that are not a mesh, or outputs that do not match one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// Arrays of different lengths, or empty ones.
    #[error(
        "a mesh has {dp_ranks} data ranks and {collects} collect flags; list one of each for each rank"
    )]
    Lengths {
        /// Entries of `dp_rank`.
        dp_ranks: usize,
        /// Entries of `collect`.
        collects: usize,
    },
    /// A data rank whose outputs would be lost.
    #[error(
        "no rank collects the outputs of data rank {dp_rank} of {size}; number data ranks from 0 without gaps and collect from each"
    )]
    Uncollected {
        /// The data rank.
        dp_rank: usize,
        /// Number of data ranks.
        size: usize,
    },
    /// Too few or too many outputs.
    #[error("{outputs} outputs arrived for a mesh of {ranks} ranks; pass one for each rank")]
    Outputs {
        /// Outputs.
        outputs: usize,
        /// Ranks of the mesh.
        ranks: usize,
    },
}

impl Mesh {
    /// The mesh of ranks that are replicas, each possibly divided into stages and parts: all ranks of a replica get the
    /// same rows, and the last stage's part 0 has the outputs.
    #[must_use]
    pub fn of(ranks: &Ranks) -> Self {
        let own = ranks.coordinates.iter();
        let outputs = |stage, part| part == 0 && stage + 1 == ranks.grid.pipeline;
        Mesh {
            dp_rank: own.clone().map(|at| at.data).collect(),
            collect: own.map(|at| outputs(at.pipeline, at.tensor)).collect(),
        }
    }

    /// Only the first rank is called.
    #[must_use]
    pub fn rank_zero() -> Self {
        Mesh::one_each(1)
    }

    /// Every rank gets all rows, and all outputs are collected.
    #[must_use]
    pub fn one_to_all(ranks: usize) -> Self {
        Mesh {
            dp_rank: vec![0; ranks],
            collect: vec![true; ranks],
        }
    }

    /// Every rank gets its own rows, and all outputs are collected.
    #[must_use]
    pub fn one_each(ranks: usize) -> Self {
        Mesh {
            dp_rank: (0..ranks).collect(),
            collect: vec![true; ranks],
        }
    }

    /// Checks arrays from elsewhere.
    ///
    /// # Errors
    /// The arrays are empty or have different lengths, or the outputs of a data rank are not collected.
    pub fn check(&self) -> Result<(), MeshError> {
        let (dp_ranks, collects) = (self.dp_rank.len(), self.collect.len());
        if dp_ranks != collects || dp_ranks == 0 {
            return Err(MeshError::Lengths { dp_ranks, collects });
        }
        let size = self.dp_size();
        let collected = |dp_rank: &usize| {
            let mut ranks = self.dp_rank.iter().zip(&self.collect);
            ranks.any(|(own, collect)| own == dp_rank && *collect)
        };
        // More data ranks than ranks leave a gap among the first of them.
        match (0..size.min(dp_ranks + 1)).find(|dp_rank| !collected(dp_rank)) {
            Some(dp_rank) => Err(MeshError::Uncollected { dp_rank, size }),
            None => Ok(()),
        }
    }

    /// Number of data ranks: chunks that rows are cut into.
    #[must_use]
    pub fn dp_size(&self) -> usize {
        self.dp_rank
            .iter()
            .max()
            .map_or(0, |last| last.saturating_add(1))
    }

    /// The rows of each rank. Chunks are contiguous, in order, and differ by at most one row; no row is repeated to fill a
    /// chunk, so with fewer rows than data ranks some chunks are empty.
    #[must_use]
    pub fn dispatch(&self, rows: usize) -> Vec<Range<usize>> {
        let size = self.dp_size();
        let own = self.dp_rank.iter();
        own.map(|&dp_rank| share(dp_rank, size, rows)).collect()
    }

    /// The outputs that count, from one output per rank, ordered by data rank and then by rank.
    ///
    /// # Errors
    /// The number of outputs is not that of the ranks.
    pub fn collect<T>(&self, outputs: Vec<T>) -> Result<Vec<T>, MeshError> {
        let ranks = self.dp_rank.len();
        if outputs.len() != ranks {
            let outputs = outputs.len();
            return Err(MeshError::Outputs { outputs, ranks });
        }
        let own = self.dp_rank.iter().zip(&self.collect).zip(outputs);
        let collected = own.filter(|((_, collect), _)| **collect);
        let mut collected: Vec<_> = collected.map(|((at, _), output)| (*at, output)).collect();
        collected.sort_by_key(|(dp_rank, _)| *dp_rank);
        Ok(collected.into_iter().map(|(_, output)| output).collect())
    }
}

/// One line per data rank: its ranks, with a `*` at those whose outputs are collected.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for dp_rank in 0..self.dp_size() {
            if dp_rank > 0 {
                writeln!(f)?;
            }
            write!(f, "rows {}/{}: rank", dp_rank + 1, self.dp_size())?;
            let ranks = self.dp_rank.iter().zip(&self.collect).enumerate();
            for (rank, (_, collect)) in ranks.filter(|(_, (own, _))| **own == dp_rank) {
                write!(f, " {rank}{}", if *collect { "*" } else { "" })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::{Grid, Grouping};

    const TRAINING: Grid = Grid {
        pipeline: 2,
        tensor: 2,
        data: 2,
    };

    /// RANK_ZERO.
    #[test]
    fn rank_zero_gets_all_rows_and_no_other_rank_is_called() {
        let mesh = Mesh::rank_zero();
        let all_rows: Vec<_> = std::iter::once(0..5).collect();
        assert_eq!(mesh.dispatch(5), all_rows);
        assert_eq!(mesh.collect(vec!["first"]), Ok(vec!["first"]));
    }

    /// ONE_TO_ALL.
    #[test]
    fn one_to_all_passes_the_same_to_all_and_lists_all_outputs() {
        let mesh = Mesh::one_to_all(3);
        assert_eq!(mesh.dispatch(5), [0..5, 0..5, 0..5]);
        assert_eq!(mesh.collect(vec![7, 8, 9]), Ok(vec![7, 8, 9]));
    }

    /// ALL_TO_ALL and DP_COMPUTE: the caller has one item per rank.
    #[test]
    fn an_item_per_rank_goes_to_its_rank_and_back() {
        let mesh = Mesh::one_each(4);
        assert_eq!(mesh.dispatch(4), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(mesh.collect(vec![7, 8, 9, 6]), Ok(vec![7, 8, 9, 6]));
    }

    /// DP_COMPUTE_PROTO, DP_COMPUTE_PROTO_WITH_FUNC and DP_COMPUTE_METRIC, without padding.
    #[test]
    fn rows_are_dealt_in_order_without_repeating_any() {
        let mesh = Mesh::one_each(4);
        assert_eq!(mesh.dispatch(8), [0..2, 2..4, 4..6, 6..8]);
        for rows in 0..40 {
            let chunks = mesh.dispatch(rows);
            let joined: Vec<usize> = chunks.iter().cloned().flatten().collect();
            assert_eq!(joined, (0..rows).collect::<Vec<_>>());
            let lengths = chunks.iter().map(ExactSizeIterator::len);
            assert!(lengths.clone().max() <= lengths.min().map(|least| least + 1));
            let outputs = chunks.into_iter().map(Iterator::collect).collect();
            let collected: Vec<Vec<usize>> = mesh.collect(outputs).expect("one per rank");
            assert_eq!(collected.concat(), joined);
        }
    }

    /// The modes by a named mesh: `actor` and `rollout` of one group.
    #[test]
    fn peers_of_a_replica_get_the_same_rows_and_its_last_stage_answers_once() {
        let actor = Mesh::of(&Ranks::grid(TRAINING).expect("a grid"));
        assert_eq!(actor.dp_rank, [0, 0, 0, 0, 1, 1, 1, 1]);
        let last_stage = [false, false, true, false, false, false, true, false];
        assert_eq!(actor.collect, last_stage);
        assert_eq!(actor.dispatch(3)[3..5], [0..1, 1..3]);
        let outputs: Vec<usize> = (0..8).collect();
        assert_eq!(actor.collect(outputs.clone()), Ok(vec![2, 6]));

        let rollout = Ranks::generation(TRAINING, 1, 2, Grouping::Stride).expect("a grouping");
        let rollout = Mesh::of(&rollout);
        assert_eq!(rollout.dp_rank, [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(rollout.collect(outputs.clone()), Ok(vec![0, 2, 4, 6]));

        // Replicas of distant ranks: outputs are in the order of the rows, not of the ranks.
        let halves = Ranks::generation(TRAINING, 2, 1, Grouping::Stride).expect("a grouping");
        let halves = Mesh::of(&halves);
        assert_eq!(halves.dp_rank, [0, 1, 0, 1, 2, 3, 2, 3]);
        assert_eq!(halves.collect(outputs), Ok(vec![2, 3, 6, 7]));
    }

    #[test]
    fn outputs_are_in_the_order_of_the_rows() {
        let mesh = Mesh {
            dp_rank: vec![1, 0, 1, 0],
            collect: vec![true, false, false, true],
        };
        assert_eq!(mesh.check(), Ok(()));
        assert_eq!(mesh.collect(vec!['a', 'b', 'c', 'd']), Ok(vec!['d', 'a']));
        let error = mesh.collect(vec!['a']).expect_err("1 of 4 outputs");
        assert_eq!(
            error.to_string(),
            "1 outputs arrived for a mesh of 4 ranks; pass one for each rank"
        );
        assert_eq!(mesh.to_string(), "rows 1/2: rank 1 3*\nrows 2/2: rank 0* 2");
    }

    #[test]
    fn arrays_that_lose_rows_or_outputs_are_refused() {
        let check = |dp_rank: &[usize], collect: &[bool]| {
            let mesh = Mesh {
                dp_rank: dp_rank.to_vec(),
                collect: collect.to_vec(),
            };
            mesh.check()
        };
        assert!(check(&[], &[]).is_err());
        assert!(check(&[0, 1], &[true]).is_err());
        assert!(check(&[0, 2], &[true, true]).is_err());
        assert!(check(&[0, usize::MAX], &[true, true]).is_err());
        let error = check(&[0, 1, 1], &[true, false, false]).expect_err("data rank 1 is lost");
        assert_eq!(
            error.to_string(),
            "no rank collects the outputs of data rank 1 of 2; number data ranks from 0 without gaps and collect from each"
        );
    }
}
