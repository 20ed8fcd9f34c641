//! Concatenated sequences for models that need rows of equal length.

use burn::tensor::{Int, Tensor};
use verl_kernels::indices;

/// Final hidden states of concatenated sequences of these lengths, from `hidden`, which computes those of padded rows.
///
/// # Shapes
/// `ids`: `[N]`, with `N` the sum of `lengths`; `hidden`: `[B, S]` to `[B, S, D]`; result: `[N, D]`
pub fn padded_hidden(
    ids: Tensor<1, Int>,
    lengths: &[usize],
    hidden: impl FnOnce(Tensor<2, Int>) -> Tensor<3>,
) -> Tensor<2> {
    let device = ids.device();
    let (places, sources, width) = padding(lengths);
    let ids = ids.select(0, indices(sources, &device));
    let hidden = hidden(ids.reshape([lengths.len(), width]));
    let [b, s, d] = hidden.dims();
    let places = indices(places, &device);
    hidden.reshape([b * s, d]).select(0, places)
}

/// Index maps for a model that needs rows of equal length: the position of each packed token in the padded rows; for
/// each padded position, the packed token it contains; and the width of the padded rows.
fn padding(lengths: &[usize]) -> (Vec<i32>, Vec<i32>, usize) {
    let width = lengths.iter().copied().max().unwrap_or(0);
    let (mut places, mut sources) = (Vec::new(), Vec::new());
    for (row, &length) in lengths.iter().enumerate() {
        let start = places.len();
        places.extend((0..length).map(|at| (row * width + at) as i32));
        sources.extend((0..width).map(|at| (start + at.min(length.saturating_sub(1))) as i32));
    }
    (places, sources, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_invertible() {
        let (places, sources, width) = padding(&[2, 3, 1]);
        assert_eq!(width, 3);
        assert_eq!(places, [0, 1, 3, 4, 5, 6]);
        assert_eq!(sources, [0, 1, 1, 2, 3, 4, 5, 5, 5]);
        // Mapping a packed token to its padded position and back gives the same token.
        let back: Vec<i32> = places.iter().map(|&at| sources[at as usize]).collect();
        assert!(back.iter().enumerate().all(|(at, &from)| at as i32 == from));
    }
}
