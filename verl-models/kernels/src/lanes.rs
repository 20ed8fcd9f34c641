//! Sixteen f32 numbers in vector registers, for loops that the compiler does not vectorise on its own.
//!
//! A [`Kernel`] is written once over [`Lanes`] and compiled for the widest registers of the processor. Lanes never mix,
//! and products are fused with their additions on every processor, so that its bits do not depend on the processor.

use std::mem::MaybeUninit;

use crate::registers::{self, Registers};
use crate::vector::LANES;

/// Numbers that are processed in parallel.
pub type Row = [f32; LANES];

/// [`LANES`] numbers in registers. Only this crate implements it, because [`Lanes::store`] relies on what `write` writes.
pub trait Lanes: Copy + sealed::Sealed {
    /// Whether all numbers fit in one register, of which there are 32; otherwise they take two of 16.
    const ARE_WIDE: bool;
    /// The same number in every lane.
    fn splat(x: f32) -> Self;
    /// Loads numbers from memory.
    fn load(x: &Row) -> Self;
    /// Writes numbers to memory that may be uninitialised.
    fn write(self, to: &mut [MaybeUninit<f32>; LANES]);
    /// Stores numbers in memory.
    #[inline(always)]
    fn store(self, to: &mut Row) {
        self.write(unset(to));
    }
    /// self · b + c, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// self · b
    fn mul(self, b: Self) -> Self;
    /// self − b
    fn sub(self, b: Self) -> Self;
    /// Transposes a block of a matrix.
    #[inline(always)]
    fn transpose(
        rows: [&[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE],
    ) -> [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE] {
        std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column]))
    }
}

mod sealed {
    /// Kinds of registers of this crate.
    pub trait Sealed {}
}

impl sealed::Sealed for Plain {}

/// Rows and columns that [`Lanes::transpose`] transposes at a time.
pub const TRANSPOSE_SIZE: usize = 8;

/// Initialised numbers as memory that is written to.
#[inline(always)]
fn unset(row: &mut Row) -> &mut [MaybeUninit<f32>; LANES] {
    let row: *mut Row = row;
    #[expect(
        unsafe_code,
        reason = "same layout; `Lanes::write` writes numbers, so none becomes uninitialised"
    )]
    // SAFETY: see the reason above; the borrow of `row` ends with that of the result.
    unsafe {
        &mut *row.cast()
    }
}

/// Work that is compiled for each kind of registers. Functions that it calls are marked `inline(always)`.
pub trait Kernel {
    /// Does the work.
    fn run<L: Lanes>(self);
}

/// Runs `kernel` with the registers that the process uses.
pub fn run(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    #[expect(
        unsafe_code,
        reason = "`used` returns what was detected on this processor"
    )]
    match registers::used() {
        // SAFETY: `used` returns at most what was detected on this processor.
        Registers::Avx512 => return unsafe { x86::with_avx512(kernel) },
        // SAFETY: as above.
        Registers::Avx2 => return unsafe { x86::with_avx2(kernel) },
        Registers::Plain => {}
    }
    kernel.run::<Plain>();
}

/// Lanes without known registers; on some processors the compiler vectorises them.
#[derive(Clone, Copy)]
pub(crate) struct Plain(Row);

impl Plain {
    #[inline(always)]
    fn zip(mut self, b: Self, op: impl Fn(f32, f32) -> f32) -> Self {
        for (a, b) in self.0.iter_mut().zip(b.0) {
            *a = op(*a, b);
        }
        self
    }
}

impl Lanes for Plain {
    const ARE_WIDE: bool = false;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Plain([x; LANES])
    }

    #[inline(always)]
    fn load(x: &Row) -> Self {
        Plain(*x)
    }

    #[inline(always)]
    fn write(self, to: &mut [MaybeUninit<f32>; LANES]) {
        *to = self.0.map(MaybeUninit::new);
    }

    #[inline(always)]
    fn mul_add(mut self, b: Self, c: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] = self.0[lane].mul_add(b.0[lane], c.0[lane]);
        }
        self
    }

    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }

    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
}

/// Registers of x86-64. Their types are private, so that only [`with_avx512`](x86::with_avx512) and
/// [`with_avx2`](x86::with_avx2) can name them: a kernel that uses them runs on a processor with the features, which is
/// what the callers of these two promise.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "vector instructions; loads and stores stay inside a `Row`"
)]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_permute2f128_ps,
        _mm256_set1_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_ps,
        _mm256_unpacklo_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
        _mm512_storeu_ps, _mm512_sub_ps,
    };

    use std::mem::MaybeUninit;

    use super::{Kernel, LANES, Lanes, Row, TRANSPOSE_SIZE};

    #[target_feature(enable = "avx512f,avx2,fma")]
    pub(super) fn with_avx512(kernel: impl Kernel) {
        kernel.run::<Avx512>();
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn with_avx2(kernel: impl Kernel) {
        kernel.run::<Avx2>();
    }

    /// One register of sixteen numbers. Only [`with_avx512`] names it.
    #[derive(Clone, Copy)]
    struct Avx512(__m512);

    impl super::sealed::Sealed for Avx512 {}
    impl super::sealed::Sealed for Avx2 {}

    impl Lanes for Avx512 {
        const ARE_WIDE: bool = true;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: only code that `with_avx512` calls gets here, so the processor has AVX-512.
            unsafe { Avx512(_mm512_set1_ps(x)) }
        }

        #[inline(always)]
        fn load(x: &Row) -> Self {
            // SAFETY: as in `splat`, the processor has AVX-512, and `x` has sixteen numbers.
            unsafe { Avx512(_mm512_loadu_ps(x.as_ptr())) }
        }

        #[inline(always)]
        fn write(self, to: &mut [MaybeUninit<f32>; LANES]) {
            // SAFETY: as in `splat`, the processor has AVX-512, and `to` has room for sixteen numbers.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr().cast(), self.0) }
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: as in `splat`, the processor has AVX-512.
            unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: as in `splat`, the processor has AVX-512.
            unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: as in `splat`, the processor has AVX-512.
            unsafe { Avx512(_mm512_sub_ps(self.0, b.0)) }
        }

        #[inline(always)]
        fn transpose(
            rows: [&[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE],
        ) -> [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE] {
            // SAFETY: `with_avx512` requires AVX2 too.
            unsafe { transposed(rows) }
        }
    }

    /// Two registers of eight numbers. Only [`with_avx2`] names it.
    #[derive(Clone, Copy)]
    struct Avx2(__m256, __m256);

    impl Lanes for Avx2 {
        const ARE_WIDE: bool = false;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: only code that `with_avx2` calls gets here, so the processor has AVX2 and FMA.
            let half = unsafe { _mm256_set1_ps(x) };
            Avx2(half, half)
        }

        #[inline(always)]
        fn load(x: &Row) -> Self {
            let [low, high] = halves(x).map(<[f32]>::as_ptr);
            // SAFETY: as in `splat`, the processor has AVX2 and FMA, and `x` has sixteen numbers.
            unsafe { Avx2(_mm256_loadu_ps(low), _mm256_loadu_ps(high)) }
        }

        #[inline(always)]
        fn write(self, to: &mut [MaybeUninit<f32>; LANES]) {
            let (low, high) = to.split_at_mut(LANES / 2);
            // SAFETY: as in `splat`, the processor has AVX2 and FMA, and `to` has room for sixteen numbers.
            unsafe {
                _mm256_storeu_ps(low.as_mut_ptr().cast(), self.0);
                _mm256_storeu_ps(high.as_mut_ptr().cast(), self.1);
            }
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: as in `splat`, the processor has AVX2 and FMA.
            unsafe {
                Avx2(
                    _mm256_fmadd_ps(self.0, b.0, c.0),
                    _mm256_fmadd_ps(self.1, b.1, c.1),
                )
            }
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: as in `splat`, the processor has AVX2 and FMA.
            unsafe { Avx2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: as in `splat`, the processor has AVX2 and FMA.
            unsafe { Avx2(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
        }

        #[inline(always)]
        fn transpose(
            rows: [&[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE],
        ) -> [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE] {
            // SAFETY: as in `splat`, the processor has AVX2.
            unsafe { transposed(rows) }
        }
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn transposed(
        rows: [&[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE],
    ) -> [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE] {
        // SAFETY: a row has eight numbers.
        let row = |i: usize| unsafe { _mm256_loadu_ps(rows[i].as_ptr()) };
        // Exchanges pairs, then fours, then halves of registers.
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        let (e, f, g, h) = (row(4), row(5), row(6), row(7));
        let (ab, ba) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd, dc) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let (ef, fe) = (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
        let (gh, hg) = (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
        const LOW: i32 = 0b01_00_01_00;
        const HIGH: i32 = 0b11_10_11_10;
        let (q0, q1) = (
            _mm256_shuffle_ps::<LOW>(ab, cd),
            _mm256_shuffle_ps::<HIGH>(ab, cd),
        );
        let (q2, q3) = (
            _mm256_shuffle_ps::<LOW>(ba, dc),
            _mm256_shuffle_ps::<HIGH>(ba, dc),
        );
        let (q4, q5) = (
            _mm256_shuffle_ps::<LOW>(ef, gh),
            _mm256_shuffle_ps::<HIGH>(ef, gh),
        );
        let (q6, q7) = (
            _mm256_shuffle_ps::<LOW>(fe, hg),
            _mm256_shuffle_ps::<HIGH>(fe, hg),
        );
        let columns = [
            _mm256_permute2f128_ps::<0x20>(q0, q4),
            _mm256_permute2f128_ps::<0x20>(q1, q5),
            _mm256_permute2f128_ps::<0x20>(q2, q6),
            _mm256_permute2f128_ps::<0x20>(q3, q7),
            _mm256_permute2f128_ps::<0x31>(q0, q4),
            _mm256_permute2f128_ps::<0x31>(q1, q5),
            _mm256_permute2f128_ps::<0x31>(q2, q6),
            _mm256_permute2f128_ps::<0x31>(q3, q7),
        ];
        let mut out = [[0.0; TRANSPOSE_SIZE]; TRANSPOSE_SIZE];
        for (out, column) in out.iter_mut().zip(columns) {
            // SAFETY: a row has room for eight numbers.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), column) };
        }
        out
    }

    #[inline(always)]
    fn halves(x: &Row) -> [&[f32]; 2] {
        let (low, high) = x.split_at(x.len() / 2);
        [low, high]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (a·b + c)·a − b of each lane.
    struct Sample<'a> {
        a: &'a Row,
        b: &'a Row,
        out: &'a mut Row,
    }

    impl Kernel for Sample<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let (a, b) = (L::load(self.a), L::load(self.b));
            a.mul_add(b, L::splat(0.1)).mul(a).sub(b).store(self.out);
        }
    }

    /// A block transposed by each kind of registers.
    struct Transposed<'a>(
        &'a [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE],
        &'a mut [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE],
    );

    impl Kernel for Transposed<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            *self.1 = L::transpose(self.0.each_ref());
        }
    }

    #[test]
    fn a_block_is_transposed() {
        let rows = std::array::from_fn(|i| std::array::from_fn(|j| (10 * i + j) as f32));
        let expected: [[f32; TRANSPOSE_SIZE]; TRANSPOSE_SIZE] =
            std::array::from_fn(|i| std::array::from_fn(|j| (10 * j + i) as f32));
        let mut out = [[[0.0; TRANSPOSE_SIZE]; TRANSPOSE_SIZE]; 2];
        Transposed(&rows, &mut out[0]).run::<Plain>();
        run(Transposed(&rows, &mut out[1]));
        assert_eq!(out, [expected; 2]);
    }

    #[test]
    fn every_kind_of_registers_has_the_same_bits() {
        let a: Row = std::array::from_fn(|i| (i as f32 - 7.3) / 3.0);
        let b: Row = std::array::from_fn(|i| 1.0 / (i as f32 + 0.7));
        let sample = |run: &dyn Fn(Sample<'_>)| {
            let mut out = [0.0; LANES];
            run(Sample {
                a: &a,
                b: &b,
                out: &mut out,
            });
            out
        };
        let plain = sample(&|kernel| kernel.run::<Plain>());
        for lane in 0..LANES {
            let expected = a[lane].mul_add(b[lane], 0.1) * a[lane] - b[lane];
            assert_eq!(plain[lane], expected);
        }
        assert_eq!(sample(&|kernel| run(kernel)), plain);
        #[cfg(target_arch = "x86_64")]
        if registers::found() != Registers::Plain {
            #[expect(unsafe_code, reason = "wider registers were just detected")]
            // SAFETY: see the reason above.
            let narrow = sample(&|kernel| unsafe { x86::with_avx2(kernel) });
            assert_eq!(narrow, plain);
        }
    }
}
