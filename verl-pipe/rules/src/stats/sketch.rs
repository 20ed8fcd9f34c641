//! A quantile sketch that costs one addition per value and can be merged by adding counts.
//!
//! Numbers are rounded to f32; sign, exponent and the first four bits of the mantissa select the bucket: 16 buckets per
//! octave. Buckets are numbered in the order of their values. A bucket stands for its end nearer to zero, so a quantile
//! is exact for short binary fractions and whole numbers below 32, and otherwise too close to zero by at most 1/16 of
//! its value.

/// Low bits of an f32 that are ignored.
const DROPPED: u32 = 19;
/// Number of buckets.
const BUCKETS: usize = 1 << (32 - DROPPED);

/// Counts by bucket.
#[derive(Debug, Clone)]
pub struct Sketch {
    counts: Vec<u32>,
    touched: Vec<u16>,
}

impl Default for Sketch {
    fn default() -> Self {
        Sketch {
            counts: vec![0; BUCKETS],
            touched: Vec::new(),
        }
    }
}

impl Sketch {
    /// Adds a finite value.
    #[inline]
    pub fn add(&mut self, value: f32) {
        let bucket = bucket(value);
        let count = &mut self.counts[usize::from(bucket)];
        if *count == 0 {
            self.touched.push(bucket);
        }
        *count = count.saturating_add(1);
    }

    /// Buckets with their counts, in ascending order.
    pub fn buckets(&mut self) -> Vec<(u16, u32)> {
        self.touched.sort_unstable();
        let counts = &self.counts;
        let count = |bucket: &u16| (*bucket, counts[usize::from(*bucket)]);
        self.touched.iter().map(count).collect()
    }

    /// Removes all values.
    pub fn clear(&mut self) {
        for bucket in self.touched.drain(..) {
            self.counts[usize::from(bucket)] = 0;
        }
    }
}

/// The bucket of a value that is not NaN.
#[inline]
pub fn bucket(value: f32) -> u16 {
    // Adding zero makes negative zero positive.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    (ordered >> DROPPED) as u16
}

/// The value that a bucket stands for: its end nearer to zero.
pub fn bucket_value(bucket: u16) -> f64 {
    let ordered = u32::from(bucket) << DROPPED;
    let bits = if ordered >> 31 == 1 {
        ordered & !(1 << 31)
    } else {
        !(ordered | ((1 << DROPPED) - 1))
    };
    f64::from(f32::from_bits(bits))
}

/// The value below which a share `q` of all counts lies; `None` if there are none.
///
/// ```
/// use verl_pipe::trace::stats::sketch::{Sketch, quantile};
///
/// let mut sketch = Sketch::default();
/// (0..=20).for_each(|value| sketch.add(value as f32));
/// assert_eq!(quantile(&sketch.buckets(), 0.5), Some(10.0));
/// ```
pub fn quantile(buckets: &[(u16, u32)], q: f64) -> Option<f64> {
    let total: u64 = buckets.iter().map(|(_, count)| u64::from(*count)).sum();
    let rank = (q * total.saturating_sub(1) as f64).round() as u64;
    let mut below = 0;
    buckets.iter().find_map(|(bucket, count)| {
        below += u64::from(*count);
        (rank < below).then(|| bucket_value(*bucket))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_numbers_are_exact() {
        for value in [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            31.0,
            -24.0,
            0.0625,
            f32::INFINITY,
        ] {
            assert_eq!(bucket_value(bucket(value)), f64::from(value));
        }
        assert_eq!(quantile(&[], 0.5), None);
    }

    proptest! {
        #[test]
        fn buckets_are_ordered_and_close(a in -1e30f32..1e30, b in -1e30f32..1e30) {
            prop_assert!((a <= b) == (bucket(a) <= bucket(b)) || bucket(a) == bucket(b));
            let stands = bucket_value(bucket(a));
            prop_assert!(stands.abs() <= f64::from(a).abs());
            prop_assert!((stands - f64::from(a)).abs() <= f64::from(a).abs() / 16.0 + 1e-38);
        }

        #[test]
        fn quantiles_are_close_and_clear_removes_all(mut values in prop::collection::vec(-100f32..100.0, 1..200)) {
            let mut sketch = Sketch::default();
            sketch.add(1e9);
            sketch.clear();
            values.iter().for_each(|value| sketch.add(*value));
            let buckets = sketch.buckets();
            prop_assert_eq!(buckets.iter().map(|b| b.1 as usize).sum::<usize>(), values.len());
            values.sort_by(f32::total_cmp);
            for q in [0.0, 0.05, 0.5, 0.95, 1.0] {
                let exact = f64::from(values[(q * (values.len() - 1) as f64).round() as usize]);
                let got = quantile(&buckets, q).expect("values");
                prop_assert!((got - exact).abs() <= exact.abs() / 16.0 + 1e-38, "{} {}", got, exact);
            }
        }
    }
}
