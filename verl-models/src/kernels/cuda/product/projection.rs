//! Products of a decoding step: few rows with a weight, into buffers that are there.
//!
//! Nothing is allocated, so that they can be captured. The bits of a row do not depend on what the other rows hold.

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::super::launch::{CudaKernel, Source};
use super::super::probe::takes_large;
use super::super::tensor::CubeTensor;
use super::divisions::{AHEAD_BYTES, Deep, SKINNY_ROWS, Skinny, Tile, is_deep};
use super::is_hopper;
use super::operands::{Joined, Summed};
use super::plain::plain_into;
use super::tiled::Tiled;

static SKINNY: Source = Source::new(include_str!("../gemm_skinny.cu"));

/// Whether [`project`] takes operands of this dtype with rows of these widths.
pub(crate) fn projects(like: &CubeTensor, widths: &[usize]) -> bool {
    let aligned = widths.iter().all(|width| width.is_multiple_of(8));
    like.dtype() == DType::F32 || like.dtype() == DType::BF16 && aligned && is_hopper(like)
}

/// Whether the norm between two products of so many rows is theirs: the first leaves [`Weighed`] rows, the second reads
/// them.
pub(crate) fn hands_over(dtype: DType, rows: usize) -> bool {
    dtype == DType::BF16 && rows > SKINNY_ROWS
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Into {
    /// The product.
    Product,
    /// What is there, plus the product.
    Sum,
    /// silu(gate) · up of a product with gates and ups.
    Swiglu,
}

/// Rows that are multiplied with a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Input<'a> {
    /// These.
    Plain(&'a CubeTensor),
    /// The norm of these.
    Normed {
        x: &'a CubeTensor,
        gain: &'a CubeTensor,
        epsilon: f64,
    },
    /// The norm of rows that a product left [`Weighed`].
    Weighed {
        x: &'a CubeTensor,
        squares: &'a CubeTensor,
        epsilon: f64,
    },
}

impl<'a> Input<'a> {
    fn tensor(&self) -> &'a CubeTensor {
        match self {
            Input::Plain(x) | Input::Normed { x, .. } | Input::Weighed { x, .. } => x,
        }
    }
}

/// What a sum leaves besides itself, for the product that reads its norm: `to` \[M, N\] is the sum times `gain` \[N\],
/// `squares` \[N / 8, M\] in f32 the sums of squares of eight neighbours of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weighed<'a> {
    pub gain: &'a CubeTensor,
    pub to: &'a CubeTensor,
    pub squares: &'a CubeTensor,
}

/// A weight whose beginning a kernel brings into the L2 cache, for one that follows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead<'a> {
    pub weight: &'a CubeTensor,
}

impl Ahead<'_> {
    /// How much of it, a multiple of 16.
    pub fn bytes(&self) -> u64 {
        let size = self.weight.shape().num_elements() * self.weight.dtype().size();
        (size.min(AHEAD_BYTES) / 16 * 16) as u64
    }
}

/// A product of rows with a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Projection<'a> {
    pub input: Input<'a>,
    pub weight: &'a Joined,
    pub to: &'a CubeTensor,
    pub into: Into,
    /// Only where [`hands_over`] says so.
    pub weighed: Option<Weighed<'a>>,
    /// A hint: not all kernels bring anything.
    pub ahead: Option<Ahead<'a>>,
}

impl<'a> Projection<'a> {
    /// Without anything besides.
    pub fn new(input: Input<'a>, weight: &'a Joined, to: &'a CubeTensor, into: Into) -> Self {
        Projection {
            input,
            weight,
            to,
            into,
            weighed: None,
            ahead: None,
        }
    }

    /// Launches a kernel; false where none takes [`Input::Normed`] of this size.
    pub fn launch(&self) -> bool {
        let x = self.input.tensor();
        let ([m, k], [n, _]) = (x.shape().dims::<2>(), self.weight.sizes());
        let bf16 = x.dtype() == DType::BF16;
        let handed = matches!(self.input, Input::Weighed { .. }) || self.weighed.is_some();
        debug_assert!(!handed || hands_over(x.dtype(), m), "one kernel norms");
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
                "a kernel of its own takes gates and ups in f32"
            );
            plain_into(
                (x, Summed::Last),
                (self.weight.first(), Summed::Last),
                self.to,
                self.into == Into::Sum,
                [m, n, k],
            );
            return true;
        }
        let operands = [x, self.to];
        let mut tiled = Tiled::new(
            operands,
            self.weight,
            [Summed::Last; 2],
            self.into,
            [m, n, k],
        );
        if let Input::Weighed {
            squares, epsilon, ..
        } = self.input
        {
            tiled.squares = Some((squares, epsilon));
        }
        tiled.weighed = self.weighed;
        let swiglu = self.into == Into::Swiglu;
        let large = takes_large(&x.client);
        if large && is_deep(m, n) {
            let apart = self.weight.matrices().len() > 1;
            tiled.launch_deep(Deep::of_step([m, n, k], swiglu, apart));
            return true;
        }
        tiled.ahead = self.ahead;
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
        if let Some(ahead) = &self.ahead {
            buffers.push(&ahead.weight.handle);
            scalars.push(ahead.bytes());
        }
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
            .define("PREFETCH", u8::from(self.ahead.is_some()))
            .launch(&x.client, [blocks as u32, 1, 1], &buffers, scalars);
    }
}

/// [`project`] of the norm of `x`, in one kernel; false where there is none.
pub(crate) fn project_normed(
    x: &CubeTensor,
    (gain, epsilon): (&CubeTensor, f64),
    weight: &CubeTensor,
    to: &CubeTensor,
    into: Into,
) -> bool {
    let input = Input::Normed { x, gain, epsilon };
    Projection::new(input, &Joined::one(weight.clone()), to, into).launch()
}

/// A product of the few rows of a decoding step with a weight, `[N, K]`.
pub(crate) fn project(x: &CubeTensor, weight: &CubeTensor, to: &CubeTensor, into: Into) {
    Projection::new(Input::Plain(x), &Joined::one(weight.clone()), to, into).launch();
}
