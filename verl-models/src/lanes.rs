//! Sixteen f32 numbers in vector registers, for loops that the compiler does not vectorise by itself.
//!
//! A [`Kernel`] is written once over [`Lanes`] and compiled for the widest registers that the machine has. Lanes never
//! mix, and products are fused with their additions on every machine, so that its bits do not depend on the machine.

use crate::vector::LANES;

/// Numbers that are worked on side by side.
pub(crate) type Row = [f32; LANES];

/// [`LANES`] numbers in registers.
pub(crate) trait Lanes: Copy {
    /// The same number in every lane.
    fn splat(x: f32) -> Self;
    /// Numbers from memory.
    fn load(x: &Row) -> Self;
    /// Numbers to memory.
    fn store(self, to: &mut Row);
    /// self · b + c, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// self · b
    fn mul(self, b: Self) -> Self;
    /// self − b
    fn sub(self, b: Self) -> Self;
}

/// Work that is compiled for each kind of registers. What it calls is marked `inline(always)`.
pub(crate) trait Kernel {
    /// Does the work.
    fn run<L: Lanes>(self);
}

/// Runs `kernel` with the widest registers of this processor.
pub(crate) fn run(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
            #[expect(unsafe_code, reason = "the features were just found on this processor")]
            return unsafe { x86::with_avx512(kernel) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            #[expect(unsafe_code, reason = "the features were just found on this processor")]
            return unsafe { x86::with_avx2(kernel) };
        }
    }
    kernel.run::<Plain>();
}

/// Lanes of a machine without known registers; on some the compiler finds them.
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
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Plain([x; LANES])
    }

    #[inline(always)]
    fn load(x: &Row) -> Self {
        Plain(*x)
    }

    #[inline(always)]
    fn store(self, to: &mut Row) {
        *to = self.0;
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

/// Registers of x86-64. Their values are made in [`with_avx512`](x86::with_avx512) and [`with_avx2`](x86::with_avx2)
/// alone, whose callers have found the features.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "vector instructions; loads and stores stay inside a `Row`"
)]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps,
        _mm256_storeu_ps, _mm256_sub_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
        _mm512_set1_ps, _mm512_storeu_ps, _mm512_sub_ps,
    };

    use super::{Kernel, Lanes, Row};

    #[target_feature(enable = "avx512f,avx2,fma")]
    pub(super) fn with_avx512(kernel: impl Kernel) {
        kernel.run::<Avx512>();
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn with_avx2(kernel: impl Kernel) {
        kernel.run::<Avx2>();
    }

    /// One register of sixteen numbers.
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(__m512);

    impl Lanes for Avx512 {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            unsafe { Avx512(_mm512_set1_ps(x)) }
        }

        #[inline(always)]
        fn load(x: &Row) -> Self {
            unsafe { Avx512(_mm512_loadu_ps(x.as_ptr())) }
        }

        #[inline(always)]
        fn store(self, to: &mut Row) {
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            unsafe { Avx512(_mm512_sub_ps(self.0, b.0)) }
        }
    }

    /// Two registers of eight numbers.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256, __m256);

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            let half = unsafe { _mm256_set1_ps(x) };
            Avx2(half, half)
        }

        #[inline(always)]
        fn load(x: &Row) -> Self {
            let [low, high] = halves(x).map(<[f32]>::as_ptr);
            unsafe { Avx2(_mm256_loadu_ps(low), _mm256_loadu_ps(high)) }
        }

        #[inline(always)]
        fn store(self, to: &mut Row) {
            let (low, high) = to.split_at_mut(super::LANES / 2);
            unsafe {
                _mm256_storeu_ps(low.as_mut_ptr(), self.0);
                _mm256_storeu_ps(high.as_mut_ptr(), self.1);
            }
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            unsafe {
                Avx2(
                    _mm256_fmadd_ps(self.0, b.0, c.0),
                    _mm256_fmadd_ps(self.1, b.1, c.1),
                )
            }
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            unsafe { Avx2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            unsafe { Avx2(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
        }
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
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            #[expect(unsafe_code, reason = "the features were just found")]
            let narrow = sample(&|kernel| unsafe { x86::with_avx2(kernel) });
            assert_eq!(narrow, plain);
        }
    }
}
