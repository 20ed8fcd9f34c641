//! Rotary position embedding in the rotate-half layout of Hugging Face checkpoints.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::norm::to_dtype;
pub use super::rope_scaling::{RopeConfig, RopeScaling};

/// The rotary embedding of a model: builds the [`Rotation`] of a call from cached tables.
///
/// Clones share the tables, which grow with the longest requested position.
#[derive(Debug, Clone)]
pub struct Rope {
    config: RopeConfig,
    head_dim: usize,
    tables: Arc<Mutex<Option<Tables>>>,
}

/// Cosines and signed sines of positions `0..length`, `[length, Dh]` each, in f32.
#[derive(Debug, Clone)]
struct Tables {
    length: usize,
    /// The length for which frequencies were scaled.
    scaled_for: usize,
    device: Device,
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl Rope {
    /// The embedding for heads of `head_dim`, an even number.
    pub fn new(config: RopeConfig, head_dim: usize) -> Self {
        Rope {
            config,
            head_dim,
            tables: Arc::default(),
        }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Rotation of positions `0..length`, the same for every row.
    pub fn leading(&self, length: usize, device: &Device, dtype: DType) -> Rotation {
        let Tables { cos, sin, .. } = self.tables(length, device);
        let shaped = |table: Tensor<2>| {
            let table = table.narrow(0, 0, length);
            to_dtype(table.reshape([1, 1, length, self.head_dim]), dtype)
        };
        Rotation {
            cos: shaped(cos),
            sin: shaped(sin),
        }
    }

    /// Cosines and signed sines of positions from 0, `[at least length, Dh]` each in f32, without padding between rows.
    pub fn full_tables(&self, length: usize, device: &Device) -> [Tensor<2>; 2] {
        let Tables { cos, sin, .. } = self.tables(length, device);
        [cos, sin]
    }

    /// Rotation of explicit positions, all less than `length`.
    ///
    /// `length` is an argument because finding the largest position would require a read from the device.
    ///
    /// # Shapes
    /// `positions`: `[B, S]`
    pub fn at(&self, positions: Tensor<2, Int>, length: usize, dtype: DType) -> Rotation {
        let [b, s] = positions.dims();
        let Tables { cos, sin, .. } = self.tables(length, &positions.device());
        let positions = positions.reshape([b * s]);
        let shaped = |table: Tensor<2>| {
            let rows = table.select(0, positions.clone());
            to_dtype(rows.reshape([b, 1, s, self.head_dim]), dtype)
        };
        Rotation {
            cos: shaped(cos),
            sin: shaped(sin),
        }
    }

    fn tables(&self, length: usize, device: &Device) -> Tables {
        let mut cached = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |tables: &Tables| {
            tables.length >= length
                && tables.scaled_for == self.config.scaling.scaled_for(length)
                && tables.device == *device
        };
        match &*cached {
            Some(tables) if fits(tables) => tables.clone(),
            _ => cached.insert(self.compute(length, device)).clone(),
        }
    }

    fn compute(&self, length: usize, device: &Device) -> Tables {
        let frequencies = self.config.frequencies(self.head_dim, length);
        let magnitude = self.config.scaling.magnitude() as f32;
        let scaled_for = self.config.scaling.scaled_for(length);
        // Rounded up to a power of two, so that slowly growing lengths do not recompute the tables each time.
        let length = length.next_power_of_two().max(128);
        let device = device.clone().without_autodiff();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..length {
            // The product is rounded to f32 like the reference's.
            let angles = frequencies.iter().map(|f| f64::from(position as f32 * f));
            let (row_sin, row_cos): (Vec<f32>, Vec<f32>) = angles
                .map(|angle| (libm::sin(angle) as f32, libm::cos(angle) as f32))
                .map(|(sin, cos)| (magnitude * sin, magnitude * cos))
                .unzip();
            cos.extend(row_cos.iter().chain(&row_cos));
            sin.extend(
                row_sin
                    .iter()
                    .map(|sine| -sine)
                    .chain(row_sin.iter().copied()),
            );
        }
        // Created as a vector first: a GPU may pad the rows of a matrix.
        let tensor = |values: Vec<f32>| {
            let values = TensorData::new(values, [length * self.head_dim]);
            let flat = Tensor::<1>::from_data(values, (&device, DType::F32));
            flat.reshape([length, self.head_dim])
        };
        Tables {
            length,
            scaled_for,
            cos: tensor(cos),
            sin: tensor(sin),
            device: device.clone(),
        }
    }
}

/// Rotates the queries and keys of one call.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// `[B or 1, 1, S, Dh]`: cos of the angle, both halves equal. Like the sines, it includes the scaling's magnitude.
    cos: Tensor<4>,
    /// `[B or 1, 1, S, Dh]`: −sin of the angle in the first half, sin in the second.
    sin: Tensor<4>,
}

impl Rotation {
    /// (x₁, x₂) → (x₁ cos − x₂ sin, x₂ cos + x₁ sin), with x₁ and x₂ the halves of the last dim.
    ///
    /// The sines include the sign, so that only the halves have to be swapped.
    ///
    /// # Shapes
    /// `x`: `[B, H, S, Dh]`; result: the same
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let half = x.dims()[3] / 2;
        let swapped = Tensor::cat(
            vec![
                x.clone().narrow(3, half, half),
                x.clone().narrow(3, 0, half),
            ],
            3,
        );
        x * self.cos.clone() + swapped * self.sin.clone()
    }

    /// Cosines and signed sines of a rotation that is the same for every row, `[S, Dh]` each.
    pub fn tables(&self) -> [Tensor<2>; 2] {
        let [_, _, s, dim] = self.cos.dims();
        [&self.cos, &self.sin].map(|table| table.clone().reshape([s, dim]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: RopeConfig = RopeConfig {
        theta: 100.0,
        scaling: RopeScaling::Default,
    };

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().as_slice::<f32>().unwrap().to_vec()
    }

    #[track_caller]
    fn check_close(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    #[test]
    fn halves_are_rotated_by_the_positions_angle() {
        let rope = Rope::new(PLAIN, 4);
        let device = Device::flex();
        let x = Tensor::<4>::from_data([[[[1.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 2.0]]]], &device);
        let turned = values(rope.leading(2, &device, DType::F32).apply(x));
        let (angle, slow) = (1.0f64, 0.1f64);
        check_close(&turned[..4], &[1.0, 0.0, 0.0, 2.0]);
        // Pair (1, 0) turned by 1, pair (0, 2) turned by 0.1.
        check_close(
            &turned[4..],
            &[
                angle.cos(),
                -2.0 * slow.sin(),
                angle.sin(),
                2.0 * slow.cos(),
            ],
        );
    }

    #[test]
    fn explicit_positions_agree_with_leading_ones() {
        let rope = Rope::new(PLAIN, 4);
        let device = Device::flex();
        let row = [0.3f32, -0.7, 1.1, 0.2];
        let x = Tensor::<4>::from_data([[[row, row, row]]], &device);
        let leading = values(rope.leading(3, &device, DType::F32).apply(x.clone()));
        let positions = Tensor::from_data([[2, 0, 1]], &device);
        let explicit = values(rope.at(positions, 3, DType::F32).apply(x));
        assert_eq!(explicit[..4], leading[8..]);
        assert_eq!(explicit[4..8], leading[..4]);
        assert_eq!(explicit[8..], leading[4..8]);
    }

    #[test]
    fn length_dependent_frequencies_are_never_reused_for_another_length() {
        let scaling = RopeScaling::Dynamic {
            factor: 2.0,
            context: 8,
        };
        let device = Device::flex();
        let at_3 = |rope: &Rope, length| {
            let [cos, _] = rope.leading(length, &device, DType::F32).tables();
            values(cos.narrow(0, 3, 1))
        };
        let rope = Rope::new(RopeConfig { scaling, ..PLAIN }, 4);
        let fresh = |length| at_3(&Rope::new(RopeConfig { scaling, ..PLAIN }, 4), length);
        let (short, long) = (fresh(8), fresh(32));
        assert_ne!(short, long);
        assert_eq!(at_3(&rope, 32), long);
        assert_eq!(at_3(&rope, 5), short);
        assert_eq!(short, at_3(&Rope::new(PLAIN, 4), 5));
    }

    #[test]
    fn tables_grow_and_are_shared_by_clones() {
        let rope = Rope::new(PLAIN, 4);
        let device = Device::flex();
        rope.clone().leading(129, &device, DType::F32);
        let cached = rope.tables.lock().unwrap().as_ref().map(|t| t.length);
        assert_eq!(cached, Some(256));
    }
}
