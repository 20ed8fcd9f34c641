//! Matrix products: `gemm_dyn.cu`, `gemm.cu` and `gemm_skinny.cu` in bf16 on Hopper, `product_f32.cu` in f32.

mod divisions;
mod operands;
mod plain;
mod projection;
mod tiled;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;

use self::divisions::{DEEP_ROWS, Deep, FULL, WIDE};
use self::operands::Summed;
use self::plain::plain;
use self::tiled::{Tiled, reduce};
use super::mlp;
use super::probe::supports_large;
use super::tensor::{CubeTensor, cast, dense, empty};

pub(crate) use self::operands::{Joined, Operand, boxes};
pub(crate) use self::projection::{Input, Into, Projection, supports_projection};

/// C\[m, n\] = Σ_k A\[m, k\] B\[n, k\], in `out`: the dtype of A, or f32.
pub(crate) fn product(a: Operand, b: Operand, out: DType) -> CubeTensor {
    added(None, [a, b], out, Split::Idle)
}

/// x Wᵀ like [`product`], without splitting sums: the bits of a row do not depend on the number of rows.
pub(crate) fn product_of_each_row(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let dtype = x.dtype();
    let operands = [x, weight].map(Operand::rows);
    added(None, operands, dtype, Split::Never)
}

/// [`product_of_each_row`] with matrices that may be stored separately.
pub(crate) fn product_with_joined(x: CubeTensor, weight: &Joined) -> CubeTensor {
    match weight.matrices() {
        [one] => product_of_each_row(x, one.clone()),
        _ => apart(x, weight, Into::Product),
    }
}

/// silu(x Gᵀ) · (x Uᵀ) of gates G and ups U, row by row like [`product_of_each_row`].
pub(crate) fn gated_product(x: CubeTensor, gate_up: &Joined) -> CubeTensor {
    let [one] = gate_up.matrices() else {
        return apart(x, gate_up, Into::Swiglu);
    };
    let wide = product_of_each_row(x, one.clone());
    let [rows, width] = wide.shape().dims();
    let inner = empty(&wide, [rows, width / 2], wide.dtype());
    mlp::joined_into(&wide, &inner);
    inner
}

/// Products with several matrices, without splitting sums.
fn apart(x: CubeTensor, weight: &Joined, into: Into) -> CubeTensor {
    let x = dense(x);
    let ([m, k], [n, _]) = (x.shape().dims::<2>(), weight.sizes());
    let swiglu = into == Into::Swiglu;
    let c = empty(&x, [m, if swiglu { n / 2 } else { n }], x.dtype());
    let tiled = Tiled::new([&x, &c], weight, [Summed::Last; 2], into, [m, n, k]);
    if m >= DEEP_ROWS && supports_large(&x.client) {
        tiled.launch_deep(Deep::whole([m, n, k], swiglu, true));
    } else {
        tiled.launch(WIDE, k);
    }
    c
}

/// x Wᵀ, plus `bias` in each row and plus `sum`, in bf16; `None` if this takes more than one kernel.
///
/// # Shapes
/// `x`: `[M, K]`; `weight`: `[N, K]`; `bias`: `[N]`; `sum` and result: `[M, N]`
pub(crate) fn product_and(
    x: &CubeTensor,
    weight: &CubeTensor,
    bias: Option<&CubeTensor>,
    sum: Option<&CubeTensor>,
) -> Option<CubeTensor> {
    let ([m, k], [n, _]) = (x.shape().dims::<2>(), weight.shape().dims::<2>());
    let operands = [Some(x), Some(weight), bias, sum];
    let supported = m >= DEEP_ROWS
        && [n, k].iter().all(|size| size.is_multiple_of(8))
        && operands
            .into_iter()
            .flatten()
            .all(|operand| operand.dtype() == DType::BF16)
        && is_hopper(x)
        && supports_large(&x.client);
    supported.then(|| {
        let c = empty(x, [m, n], DType::BF16);
        let into = match sum {
            Some(_) => Into::Sum,
            None => Into::Product,
        };
        let weight = Joined::one(weight.clone());
        let mut tiled = Tiled::new([x, &c], &weight, [Summed::Last; 2], into, [m, n, k]);
        tiled.bias = bias;
        tiled.sum = sum;
        tiled.launch_deep(Deep::whole([m, n, k], false, false));
        c
    })
}

/// `sum` (or zeros) plus [`product`], in f32. The buffer of `sum` is written to.
pub(crate) fn product_into(sum: Option<CubeTensor>, a: Operand, b: Operand) -> CubeTensor {
    added(sum, [a, b], DType::F32, Split::Idle)
}

/// When to split sums into pieces, which a second kernel adds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    Never,
    /// If tiles leave most of the GPU idle and each piece is long.
    Idle,
}

fn added(sum: Option<CubeTensor>, [a, b]: [Operand; 2], out: DType, split: Split) -> CubeTensor {
    let dtype = a.matrix.dtype();
    let b = Operand {
        matrix: cast(b.matrix, dtype),
        ..b
    };
    let ((m, k), (n, other)) = (a.sizes(), b.sizes());
    debug_assert_eq!(k, other, "operands differ in their inner size");
    let fits = m > 0 && n > 0 && k > 0;
    let inner = |operand: &Operand| operand.matrix.shape().dims::<2>()[1];
    let aligned = [inner(&a), inner(&b), n].iter().all(|size| size % 8 == 0);
    if fits && dtype == DType::BF16 && aligned && is_hopper(&a.matrix) {
        return tiled(sum, [a, b].map(Operand::dense), [m, n, k], out, split);
    }
    let c = if fits && dtype == DType::F32 {
        plain(&a.dense(), &b.dense(), [m, n, k])
    } else {
        let a = match a.summed {
            Summed::Last => a.matrix,
            Summed::First => Cube::float_transpose(a.matrix),
        };
        let b = match b.summed {
            Summed::Last => Cube::float_transpose(b.matrix),
            Summed::First => b.matrix,
        };
        dense(cast(Cube::float_matmul(a, b), out))
    };
    match sum {
        Some(sum) => dense(Cube::float_add(sum, c)),
        None => c,
    }
}

/// Whether the tensor's device has the matrix instructions of Hopper.
pub(crate) fn is_hopper(tensor: &CubeTensor) -> bool {
    let identity = &tensor.client.properties().identity;
    identity.fingerprint.contains("sm90")
}

fn tiled(
    sum: Option<CubeTensor>,
    [a, b]: [Operand; 2],
    [m, n, k]: [usize; 3],
    out: DType,
    split: Split,
) -> CubeTensor {
    let into = match sum {
        Some(_) => Into::Sum,
        None => Into::Product,
    };
    let summed = [a.summed, b.summed];
    let (a, b) = (a.matrix, Joined::one(b.matrix));
    let c = sum.unwrap_or_else(|| empty(&a, [m, n], out));
    let whole = Tiled::new([&a, &c], &b, summed, into, [m, n, k]);
    if m >= DEEP_ROWS && supports_large(&a.client) {
        whole.launch_deep(match split {
            Split::Never => Deep::whole([m, n, k], false, false),
            Split::Idle => Deep::in_pieces([m, n, k]),
        });
        return c;
    }
    let blocks = m.div_ceil(WIDE.rows) * n.div_ceil(WIDE.columns);
    let pieces = match split {
        Split::Never => 1,
        Split::Idle => (FULL / blocks).clamp(1, (k / (16 * WIDE.terms)).max(1)),
    };
    let part = k.div_ceil(pieces).next_multiple_of(WIDE.terms);
    let pieces = k.div_ceil(part);
    if pieces == 1 {
        whole.launch(WIDE, k);
        return c;
    }
    let partial = empty(&a, [pieces, m, n], DType::F32);
    Tiled::new([&a, &partial], &b, summed, Into::Product, [m, n, k]).launch(WIDE, part);
    reduce(&partial, &c, into == Into::Sum, [pieces, m * n]);
    c
}
