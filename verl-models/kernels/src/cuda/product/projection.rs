//! Products of a decoding step: a few rows times a weight, into existing buffers.
//!
//! Nothing is allocated, so that they can be captured. The bits of a row do not depend on the contents of other rows.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::super::launch::{CudaKernel, Source};
use super::super::probe::supports_large;
use super::super::tensor::CubeTensor;
use super::divisions::{Deep, SKINNY_ROWS, Skinny, Tile, is_deep};
use super::is_hopper;
use super::operands::{Joined, Operand, Summed};
use super::plain::plain_into;
use super::tiled::Tiled;

static SKINNY: Source = Source::new(include_str!("../gemm_skinny.cu"));

/// Whether a [`Projection`] supports operands of this dtype with rows of these widths.
pub(crate) fn supports_projection(like: &CubeTensor, widths: &[usize]) -> bool {
    let aligned = widths.iter().all(|width| width.is_multiple_of(8));
    like.dtype() == DType::F32 || like.dtype() == DType::BF16 && aligned && is_hopper(like)
}

/// What happens with a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Into {
    /// The product replaces the contents.
    Product,
    /// The product is added to the contents.
    Sum,
    /// silu(gate) · up of a product with gates and ups.
    Swiglu,
}

/// Rows that are multiplied with a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Input<'a> {
    /// The rows themselves.
    Plain(&'a CubeTensor),
    /// The norm of the rows.
    Normed {
        x: &'a CubeTensor,
        gain: &'a CubeTensor,
        epsilon: f64,
    },
}

impl<'a> Input<'a> {
    fn tensor(&self) -> &'a CubeTensor {
        match self {
            Input::Plain(x) | Input::Normed { x, .. } => x,
        }
    }
}

/// A product of rows with a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Projection<'a> {
    pub input: Input<'a>,
    pub weight: &'a Joined,
    pub to: &'a CubeTensor,
    pub into: Into,
}

impl Projection<'_> {
    /// Launches a kernel; false if no kernel supports [`Input::Normed`] of this size.
    pub fn launch(&self) -> bool {
        let x = self.input.tensor();
        let ([m, k], [n, _]) = (x.shape().dims::<2>(), self.weight.sizes());
        let bf16 = x.dtype() == DType::BF16;
        if let Some(skinny) = Skinny::of(m, [n, k], self.into).filter(|_| bf16) {
            self.skinny(skinny);
            return true;
        }
        if matches!(self.input, Input::Normed { .. }) {
            return false;
        }
        if !bf16 {
            debug_assert_ne!(
                self.into,
                Into::Swiglu,
                "a separate kernel handles gates and ups in f32"
            );
            let [x, weight] = [x, self.weight.first()].map(|matrix| Operand::rows(matrix.clone()));
            plain_into(&x, &weight, self.to, self.into == Into::Sum, [m, n, k]);
            return true;
        }
        let operands = [x, self.to];
        let tiled = Tiled::new(
            operands,
            self.weight,
            [Summed::Last; 2],
            self.into,
            [m, n, k],
        );
        let swiglu = self.into == Into::Swiglu;
        let large = supports_large(&x.client);
        if large && is_deep([m, n, k]) {
            let apart = self.weight.matrices().len() > 1;
            tiled.launch_deep(Deep::of_step([m, n, k], swiglu, apart));
            return true;
        }
        let tile = if large {
            Tile::of_some(m, [n, k], swiglu)
        } else {
            Tile::of_few(m, [n, k], swiglu)
        };
        tiled.launch(tile, k);
        true
    }

    fn skinny(&self, how: Skinny) {
        let x = self.input.tensor();
        let ([m, k], [n, _]) = (x.shape().dims::<2>(), self.weight.sizes());
        let groups = n.div_ceil(16 * how.tiles);
        let blocks = how.sharing * how.most.map_or(groups, |most| groups.min(most));
        let threads = 32 * how.tiles * how.warps;
        let mut buffers = vec![&x.handle];
        buffers.extend(self.weight.matrices().iter().map(|matrix| &matrix.handle));
        buffers.push(&self.to.handle);
        let mut scalars = vec![m as u64, n as u64];
        scalars.extend(self.weight.firsts());
        let normed = if let Input::Normed { gain, epsilon, .. } = self.input {
            buffers.push(&gain.handle);
            scalars.push(epsilon.to_bits());
            true
        } else {
            false
        };
        if self.into == Into::Sum {
            buffers.push(&self.to.handle);
        }
        // SAFETY: rows, weight and result are dense matrices of bf16 of the stated sizes, of which `Skinny::of`
        // supports the division; the list of buffers follows PARTS, NORM and ADD.
        unsafe {
            CudaKernel::new(&SKINNY, "gemm_skinny", threads as u32)
                .define("K_DIM", k)
                .define("TOKENS", SKINNY_ROWS)
                .define("ROW_TILES", how.tiles)
                .define("K_WARPS", how.warps)
                .define("AHEAD", how.ahead)
                .define("CS", how.sharing)
                .define("BLOCKS_PER_SM", how.blocks_per_processor)
                .define("ONCE", u8::from(how.most.is_none()))
                .define("PARTS", self.weight.matrices().len())
                .define("NORM", u8::from(normed))
                .define("ADD", u8::from(self.into == Into::Sum))
                .define("SWIGLU", u8::from(self.into == Into::Swiglu))
                .launch(&x.client, [blocks as u32, 1, 1], &buffers, scalars);
        }
    }
}
