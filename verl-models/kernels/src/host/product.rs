//! Products of activations with packed weights.
//!
//! A packed matrix stores its outputs in panels of [`LANES`], inputs outermost: `[out/16][in][16]`. A product reads a
//! panel once, adding inputs in ascending order to one accumulator per output; so an output's bits do not depend on the
//! number of rows, on the position of its row, or on the number of threads.

use rayon::prelude::*;

use crate::unset::{self, Unset};
use crate::vector::{LANES, fetch, tile_rows, vectorised};

/// Rows that stay in the second-level cache while panels stream by.
const BLOCK: usize = 64;
/// How many inputs ahead weights are prefetched: the hardware prefetches too late, or not across pages, and weights
/// would arrive from memory at half of its bandwidth.
const AHEAD: usize = 64;

/// Which threads compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// The calling thread: rows are already divided among threads.
    Alone,
    /// All threads, each with its own panels: weights are too large for every thread to read.
    Panels,
}

/// What happens to results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// They replace the output.
    Set,
    /// They are added to the output: a residual stream.
    Add,
}

/// A matrix `[out, in]` in panels, and its bias.
#[derive(Debug)]
pub struct Packed {
    panels: Vec<f32>,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
}

impl Packed {
    /// Packs matrices with `inputs` columns, stacked by rows.
    pub fn new(matrices: &[&[f32]], inputs: usize, bias: Option<Vec<f32>>) -> Self {
        let rows: Vec<&[f32]> = matrices
            .iter()
            .flat_map(|m| m.chunks_exact(inputs))
            .collect();
        let write = |panels: &mut [Unset]| {
            panels
                .par_chunks_mut(inputs * LANES)
                .zip(rows.par_chunks(LANES))
                .for_each(|(panel, rows)| pack(rows, panel.as_chunks_mut().0));
        };
        #[expect(unsafe_code, reason = "`pack` writes every lane of every panel")]
        let panels = unsafe { unset::made(rows.len().div_ceil(LANES) * inputs * LANES, write) };
        Packed {
            panels,
            bias,
            inputs,
            outputs: rows.len(),
        }
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> usize {
        self.panels.len() * size_of::<f32>()
    }

    /// x Wᵀ + b.
    ///
    /// # Shapes
    /// `x`: `[N, in]`; `out`: `[N, out]`
    pub fn multiply(&self, x: &[f32], out: &mut [f32], write: Write, spread: Spread) {
        match spread {
            Spread::Alone => self.multiply_alone(x, out, write),
            Spread::Panels => self.multiply_in_panels(x, out, write),
        }
    }

    fn multiply_alone(&self, x: &[f32], out: &mut [f32], write: Write) {
        let blocks = x
            .chunks(BLOCK * self.inputs)
            .zip(out.chunks_mut(BLOCK * self.outputs));
        for (x, out) in blocks {
            for (index, panel) in self.panels.chunks_exact(self.inputs * LANES).enumerate() {
                panel_product(panel, x, self.inputs, |row, lanes| {
                    self.store(out, row, index, lanes, write);
                });
            }
        }
    }

    /// Each thread writes its panels into a buffer `[out/16][N][16]`, which is then reordered.
    fn multiply_in_panels(&self, x: &[f32], out: &mut [f32], write: Write) {
        let rows = x.len() / self.inputs;
        let count = self.outputs.div_ceil(LANES);
        let mut buffer = vec![[0.0; LANES]; count * rows];
        // A few pieces per thread, so that a slow piece does not delay the rest.
        let piece = count.div_ceil(4 * rayon::current_num_threads()).max(1);
        buffer
            .par_chunks_mut(piece * rows)
            .zip(self.panels.par_chunks(piece * self.inputs * LANES))
            .for_each(|(buffer, panels)| {
                for (block, x) in x.chunks(BLOCK * self.inputs).enumerate() {
                    let panels = panels.chunks_exact(self.inputs * LANES);
                    for (panel, buffer) in panels.zip(buffer.chunks_exact_mut(rows)) {
                        panel_product(panel, x, self.inputs, |row, lanes| {
                            buffer[block * BLOCK + row] = lanes;
                        });
                    }
                }
            });
        for (index, panel) in buffer.chunks_exact(rows).enumerate() {
            for (row, &lanes) in panel.iter().enumerate() {
                self.store(out, row, index, lanes, write);
            }
        }
    }

    #[inline(always)]
    fn store(&self, out: &mut [f32], row: usize, panel: usize, lanes: [f32; LANES], write: Write) {
        let first = panel * LANES;
        let width = LANES.min(self.outputs - first);
        let start = row * self.outputs + first;
        let out = &mut out[start..start + width];
        let mut lanes = lanes;
        if let Some(bias) = &self.bias {
            for (lane, &bias) in lanes.iter_mut().zip(&bias[first..]) {
                *lane += bias;
            }
        }
        match write {
            Write::Set => out.copy_from_slice(&lanes[..width]),
            Write::Add => out
                .iter_mut()
                .zip(&lanes)
                .for_each(|(out, &lane)| *out += lane),
        }
    }
}

/// Packs rows of a matrix, [`LANES`] at most, side by side; lanes without a row are 0.
fn pack(rows: &[&[f32]], panel: &mut [[Unset; LANES]]) {
    if let Ok(rows) = <&[&[f32]; LANES]>::try_from(rows) {
        let rows = rows.map(|row| &row[..panel.len()]);
        for (input, lanes) in panel.iter_mut().enumerate() {
            for lane in 0..LANES {
                lanes[lane].write(rows[lane][input]);
            }
        }
    } else {
        for (input, lanes) in panel.iter_mut().enumerate() {
            for (lane, to) in lanes.iter_mut().enumerate() {
                to.write(rows.get(lane).map_or(0.0, |row| row[input]));
            }
        }
    }
}

/// The products of all rows of `x` with one panel, a tile of rows at a time.
fn panel_product(
    panel: &[f32],
    x: &[f32],
    inputs: usize,
    mut store: impl FnMut(usize, [f32; LANES]),
) {
    let rows = tile_rows();
    vectorised(
        #[inline(always)]
        || {
            for (index, tile) in x.chunks(rows * inputs).enumerate() {
                let mut store = |row: usize, lanes| store(index * rows + row, lanes);
                match tile.len() / inputs {
                    8 => tile_product::<8>(panel, tile, inputs, &mut store),
                    7 => tile_product::<7>(panel, tile, inputs, &mut store),
                    6 => tile_product::<6>(panel, tile, inputs, &mut store),
                    5 => tile_product::<5>(panel, tile, inputs, &mut store),
                    4 => tile_product::<4>(panel, tile, inputs, &mut store),
                    3 => tile_product::<3>(panel, tile, inputs, &mut store),
                    2 => tile_product::<2>(panel, tile, inputs, &mut store),
                    _ => tile_product::<1>(panel, tile, inputs, &mut store),
                }
            }
        },
    );
}

#[inline(always)]
fn tile_product<const ROWS: usize>(
    panel: &[f32],
    x: &[f32],
    inputs: usize,
    store: &mut impl FnMut(usize, [f32; LANES]),
) {
    let mut sums = [[0.0_f32; LANES]; ROWS];
    let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &x[row * inputs..(row + 1) * inputs]);
    let panel = &panel.as_chunks::<LANES>().0[..inputs];
    for input in 0..inputs {
        let weights = panel[input];
        fetch(&panel[input], AHEAD);
        for row in 0..ROWS {
            let value = rows[row][input];
            for lane in 0..LANES {
                sums[row][lane] = value.mul_add(weights[lane], sums[row][lane]);
            }
        }
    }
    for (row, lanes) in sums.into_iter().enumerate() {
        store(row, lanes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|i| (((i + seed) * 7919) % 199) as f32 / 100.0 - 1.0)
            .collect()
    }

    /// Compares both ways with plain sums in f64, with and without bias, for sizes that do not fill a tile or a panel.
    #[test]
    fn products_are_right() {
        for (rows, inputs, outputs) in [(1, 5, 3), (7, 64, 40), (130, 33, 17)] {
            let (x, w) = (numbers(rows * inputs, 1), numbers(outputs * inputs, 2));
            let bias = numbers(outputs, 3);
            let (upper, lower) = w.split_at(2 * inputs);
            let packed = Packed::new(&[upper, lower], inputs, Some(bias.clone()));
            for spread in [Spread::Alone, Spread::Panels] {
                let mut out = vec![1.0; rows * outputs];
                packed.multiply(&x, &mut out, Write::Add, spread);
                for (index, &got) in out.iter().enumerate() {
                    let (row, output) = (index / outputs, index % outputs);
                    let products = (0..inputs).map(|i| {
                        f64::from(x[row * inputs + i]) * f64::from(w[output * inputs + i])
                    });
                    let want = 1.0 + f64::from(bias[output]) + products.sum::<f64>();
                    assert!((f64::from(got) - want).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_other_rows() {
        let (inputs, outputs) = (96, 50);
        let w = numbers(outputs * inputs, 5);
        let packed = Packed::new(&[&w], inputs, None);
        let x = numbers(133 * inputs, 6);
        let mut together = vec![0.0; 133 * outputs];
        packed.multiply(&x, &mut together, Write::Set, Spread::Panels);
        for (x, want) in x.chunks(inputs).zip(together.chunks(outputs)) {
            let mut single = vec![0.0; outputs];
            packed.multiply(x, &mut single, Write::Set, Spread::Alone);
            assert_eq!(single, want);
        }
    }
}
