//! Coordinates of the ranks of a group of devices.

use serde::{Deserialize, Serialize};

/// Sizes of pipeline, tensor and data parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grid {
    /// Pipeline stages, `p`.
    pub pipeline: usize,
    /// Tensor-parallel parts, `t`.
    pub tensor: usize,
    /// Replicas, `d`.
    pub data: usize,
}

impl Grid {
    /// Number of ranks.
    #[must_use]
    pub fn ranks(self) -> usize {
        self.pipeline * self.tensor * self.data
    }
}

/// The position of a rank in its grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Coordinates {
    /// Pipeline stage.
    pub pipeline: usize,
    /// Tensor-parallel part.
    pub tensor: usize,
    /// Replica.
    pub data: usize,
}

/// Which ranks of a training grid generate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grouping {
    /// Ranks at a distance of t / t_g (and p / p_g stages), so that the training part of each rank is a part of its
    /// generation part. HybridFlow's grouping.
    Stride,
    /// Neighbouring ranks, as a training grid of that size has them. Some ranks then have nothing of their generation part.
    Consecutive,
}

/// Coordinates of each rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks {
    /// Sizes of the grid.
    pub grid: Grid,
    /// Coordinates by rank.
    pub coordinates: Vec<Coordinates>,
}

/// A grid that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// A size of 0.
    #[error("a grid has {grid:?}; use at least 1 for each size")]
    Empty {
        /// The grid.
        grid: Grid,
    },
    /// Generation needs parts that training parts cannot be joined to.
    #[error(
        "{generation} {what} for generation do not divide the {training} of training; use a divisor of {training}"
    )]
    Divisor {
        /// Pipeline stages or tensor-parallel parts.
        what: &'static str,
        /// Size in training.
        training: usize,
        /// Size in generation.
        generation: usize,
    },
}

impl Ranks {
    /// A grid: neighbouring ranks are tensor-parallel parts of one stage, then come the stages, then the replicas.
    ///
    /// # Errors
    /// A size is 0.
    pub fn grid(grid: Grid) -> Result<Self, RanksError> {
        if grid.ranks() == 0 {
            return Err(RanksError::Empty { grid });
        }
        let coordinates = (0..grid.ranks()).map(|rank| Coordinates {
            tensor: rank % grid.tensor,
            pipeline: rank / grid.tensor % grid.pipeline,
            data: rank / (grid.tensor * grid.pipeline),
        });
        Ok(Ranks {
            grid,
            coordinates: coordinates.collect(),
        })
    }

    /// Replicas without any other parallelism.
    ///
    /// # Errors
    /// No replica.
    pub fn data_parallel(replicas: usize) -> Result<Self, RanksError> {
        Ranks::grid(Grid {
            pipeline: 1,
            tensor: 1,
            data: replicas,
        })
    }

    /// The ranks of `training`, in order, as replicas of `pipeline` stages and `tensor` parts for generation.
    ///
    /// Each block of p·t ranks of the training grid becomes d_g = p·t / (p_g·t_g) replicas. With
    /// [`Grouping::Stride`], a = t / t_g and b = p / p_g, the rank at part i and stage j gets part ⌊i / a⌋, stage ⌊j / b⌋
    /// and replica (i mod a, j mod b).
    ///
    /// # Errors
    /// A size is 0, `tensor` does not divide t, or `pipeline` does not divide p.
    ///
    /// # Source
    /// Sheng et al. 2024, HybridFlow, arXiv:2409.19256, section 5.
    pub fn generation(
        training: Grid,
        pipeline: usize,
        tensor: usize,
        grouping: Grouping,
    ) -> Result<Self, RanksError> {
        let of_training = Ranks::grid(training)?;
        for (what, training, generation) in [
            ("tensor-parallel parts", training.tensor, tensor),
            ("pipeline stages", training.pipeline, pipeline),
        ] {
            if generation == 0 || training % generation != 0 {
                return Err(RanksError::Divisor {
                    what,
                    training,
                    generation,
                });
            }
        }
        let (a, b) = (training.tensor / tensor, training.pipeline / pipeline);
        let place = |own: &Coordinates| match grouping {
            Grouping::Stride => Coordinates {
                tensor: own.tensor / a,
                pipeline: own.pipeline / b,
                data: own.data * a * b + own.pipeline % b * a + own.tensor % a,
            },
            Grouping::Consecutive => {
                let at = own.pipeline * training.tensor + own.tensor;
                Coordinates {
                    tensor: at % tensor,
                    pipeline: at / tensor % pipeline,
                    data: own.data * a * b + at / (tensor * pipeline),
                }
            }
        };
        Ok(Ranks {
            grid: Grid {
                pipeline,
                tensor,
                data: training.data * a * b,
            },
            coordinates: of_training.coordinates.iter().map(place).collect(),
        })
    }

    /// Number of ranks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.coordinates.len()
    }

    /// Whether there are no ranks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.coordinates.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: Grid = Grid {
        pipeline: 1,
        tensor: 4,
        data: 1,
    };

    fn groups(ranks: &Ranks, key: impl Fn(&Coordinates) -> [usize; 2]) -> Vec<Vec<usize>> {
        let mut groups = std::collections::BTreeMap::<_, Vec<usize>>::new();
        for (rank, own) in ranks.coordinates.iter().enumerate() {
            groups.entry(key(own)).or_default().push(rank);
        }
        groups.into_values().collect()
    }

    #[test]
    fn stride_groups_distant_ranks_and_consecutive_groups_neighbours() {
        let of = |grouping| Ranks::generation(FOUR, 1, 2, grouping).expect("a grouping");
        let together = |own: &Coordinates| [own.data, own.pipeline];
        let same_part = |own: &Coordinates| [own.tensor, own.pipeline];
        let stride = of(Grouping::Stride);
        assert_eq!(groups(&stride, together), [[0, 2], [1, 3]]);
        assert_eq!(groups(&stride, same_part), [[0, 1], [2, 3]]);
        let consecutive = of(Grouping::Consecutive);
        assert_eq!(groups(&consecutive, together), [[0, 1], [2, 3]]);
        assert_eq!(groups(&consecutive, same_part), [[0, 2], [1, 3]]);
    }

    #[test]
    fn every_position_of_a_generation_grid_is_taken_once() {
        let training = Grid {
            pipeline: 4,
            tensor: 4,
            data: 2,
        };
        for (pipeline, tensor) in [(1, 1), (2, 2), (4, 1), (1, 4), (4, 4), (2, 1)] {
            for grouping in [Grouping::Stride, Grouping::Consecutive] {
                let ranks = Ranks::generation(training, pipeline, tensor, grouping).expect("one");
                let own = ranks.coordinates.iter();
                let mut taken: Vec<_> = own.map(|c| (c.data, c.pipeline, c.tensor)).collect();
                taken.sort_unstable();
                taken.dedup();
                assert_eq!(taken.len(), ranks.grid.ranks());
                assert_eq!(ranks.len(), 32);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused() {
        let error = Ranks::generation(FOUR, 1, 3, Grouping::Stride).expect_err("3 parts of 4");
        assert_eq!(
            error.to_string(),
            "3 tensor-parallel parts for generation do not divide the 4 of training; use a divisor of 4"
        );
        assert!(Ranks::generation(FOUR, 2, 1, Grouping::Stride).is_err());
        assert!(Ranks::generation(FOUR, 1, 0, Grouping::Stride).is_err());
        assert!(Ranks::data_parallel(0).is_err());
    }
}
