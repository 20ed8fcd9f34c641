//! All trained parameters as one row of numbers, and its division among replicas.

use std::ops::Range;

use super::TrainableParameters;
use super::kernels::TASK;

/// The trained parameters, one after another in the order of the module, in a slice for each replica.
///
/// Slices have about the same length. They end between tasks of the optimiser's kernels, so the sum of squares of a
/// parameter has the same bits in whatever slices it is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FlatLayout {
    /// Where each parameter begins, and the end of the last one.
    starts: Vec<usize>,
    /// The slice of each replica.
    slices: Vec<Range<usize>>,
}

impl FlatLayout {
    /// The layout for this number of replicas, at least 1.
    pub fn new(parameters: &TrainableParameters, replicas: usize) -> Self {
        FlatLayout::of_lengths(
            parameters.iter().map(|parameter| parameter.length),
            replicas,
        )
    }

    fn of_lengths(lengths: impl Iterator<Item = usize>, replicas: usize) -> Self {
        let mut starts = vec![0];
        let mut tasks = Vec::new();
        let mut end = 0;
        for length in lengths {
            tasks.extend((end..end + length).step_by(TASK));
            end += length;
            starts.push(end);
        }
        let cut = |replica: usize| {
            let ideal = end / replicas * replica + end % replicas * replica / replicas;
            let task = tasks.partition_point(|start| *start < ideal);
            tasks.get(task).copied().unwrap_or(end)
        };
        let cuts: Vec<usize> = (0..replicas).map(cut).chain([end]).collect();
        FlatLayout {
            starts,
            slices: cuts.windows(2).map(|pair| pair[0]..pair[1]).collect(),
        }
    }

    /// Numbers of all parameters.
    pub fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Number of parameters (tensors).
    pub fn parameters(&self) -> usize {
        self.starts.len() - 1
    }

    /// The slices, by replica.
    pub fn slices(&self) -> &[Range<usize>] {
        &self.slices
    }

    /// Where the parameter at `position` is.
    pub fn place(&self, position: usize) -> Range<usize> {
        self.starts[position]..self.starts[position + 1]
    }

    /// The part of the parameter at `position` that is in `slice`, numbered from the parameter's beginning; possibly empty.
    pub fn piece(&self, position: usize, slice: &Range<usize>) -> Range<usize> {
        let place = self.place(position);
        let within = |at: usize| at.clamp(place.start, place.end) - place.start;
        within(slice.start)..within(slice.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_parameters_and_end_between_tasks() {
        let lengths = [5 * TASK + 7, 12, 3 * TASK, 0, 900];
        for replicas in 1..=12 {
            let layout = FlatLayout::of_lengths(lengths.into_iter(), replicas);
            let total: usize = lengths.iter().sum();
            assert_eq!((layout.len(), layout.parameters()), (total, lengths.len()));
            let mut end = 0;
            for slice in layout.slices() {
                assert_eq!(slice.start, end);
                end = slice.end;
                assert!(
                    slice.len() <= total / replicas + TASK,
                    "{replicas}: {slice:?}"
                );
            }
            assert_eq!((end, layout.slices().len()), (total, replicas));
            for (position, length) in lengths.into_iter().enumerate() {
                let mut end = 0;
                for slice in layout.slices() {
                    let piece = layout.piece(position, slice);
                    if !piece.is_empty() {
                        assert!(piece.start == end && piece.start.is_multiple_of(TASK));
                        end = piece.end;
                    }
                }
                assert_eq!(end, length);
            }
        }
    }

    #[test]
    fn nothing_trained_has_empty_slices() {
        let layout = FlatLayout::of_lengths([].into_iter(), 3);
        assert_eq!((layout.len(), layout.parameters()), (0, 0));
        assert!(layout.slices().iter().all(Range::is_empty));
    }
}
