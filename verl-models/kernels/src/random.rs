//! Counter-based randomness (Philox 4×32-10): each draw is a function of its key, never of scheduling.
//!
//! # Layout
//! A draw is identified by 296 bits (seed 64, purpose 8, step 64, row 64, attempt 32, position 32, token 32), but a
//! Philox call takes 192. So the identity is bound in three calls, each a bijection of its counter for a fixed key:
//!
//! 1. h₁ = philox(counter = row ‖ step, key = seed);
//! 2. h₂ = philox(counter = h₁, key = attempt ‖ purpose): the identity of the [`Stream`];
//! 3. four words = philox(counter = block ‖ position ‖ h₂\[2..4\], key = h₂\[0..2\]), where word `i` of a position is
//!    lane `i mod 4` of block `i / 4`.
//!
//! All 128 bits of h₂ enter the third call, so draws of one stream never share a counter, and two streams of one
//! seed, purpose and attempt are never the same; streams of different purposes or attempts coincide with
//! probability 2⁻¹²⁸.
//!
//! # Source
//! Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

/// The purpose of draws; different purposes never share random words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// Training rollouts.
    Rollout = 1,
    /// Evaluation rollouts.
    Evaluation = 2,
    /// Baseline rollouts.
    Baseline = 3,
    /// Order of data.
    Shuffle = 4,
    /// Initial weights.
    Init = 5,
    /// Generated data sets.
    Data = 6,
    /// Random subsets of the training data.
    Subset = 7,
}

/// The key that, with position and token id, determines the draws of one response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DrawKey {
    /// Seed of the run.
    pub seed: u64,
    /// Purpose of the draws.
    pub purpose: Purpose,
    /// Step of the run.
    pub step: u64,
    /// Identity of the row: epoch, data-set row and sample index.
    pub row: u64,
    /// Refill attempt.
    pub attempt: u32,
}

impl DrawKey {
    /// The random words of this key.
    #[must_use]
    pub fn stream(&self) -> Stream {
        let [row_low, row_high] = split(self.row);
        let [step_low, step_high] = split(self.step);
        let bound = philox([row_low, row_high, step_low, step_high], split(self.seed));
        let [k0, k1, c2, c3] = philox(bound, [self.attempt, self.purpose as u32]);
        Stream {
            key: [k0, k1],
            high: [c2, c3],
        }
    }
}

/// The random words of one [`DrawKey`]: a pure function of position and index, without state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    high: [u32; 2],
}

impl Stream {
    /// The four words that identify the stream: key, then the high half of the counter.
    #[must_use]
    pub fn words(&self) -> [u32; 4] {
        [self.key[0], self.key[1], self.high[0], self.high[1]]
    }

    /// Words `4·block` to `4·block + 3` of a position.
    #[inline]
    #[must_use]
    pub fn block(&self, position: u32, block: u32) -> [u32; 4] {
        philox([block, position, self.high[0], self.high[1]], self.key)
    }

    /// Word `index` of a position.
    #[inline]
    #[must_use]
    pub fn word(&self, position: u32, index: u32) -> u32 {
        self.block(position, index / 4)[(index % 4) as usize]
    }

    /// A number of the open interval (0, 1); see [`open_unit`].
    #[inline]
    #[must_use]
    pub fn uniform(&self, position: u32, index: u32) -> f64 {
        open_unit(self.word(position, index))
    }

    /// A draw of the standard Gumbel distribution, −ln(−ln u). The argmax over i of logitᵢ + gumbelᵢ is a draw from
    /// softmax(logits).
    #[inline]
    #[must_use]
    pub fn gumbel(&self, position: u32, index: u32) -> f64 {
        gumbel(self.word(position, index))
    }

    /// A draw of the standard normal distribution (Box–Muller on words `2·index` and `2·index + 1`).
    #[must_use]
    pub fn normal(&self, position: u32, index: u32) -> f64 {
        let words = self.block(position, index / 2);
        let lane = (index % 2) as usize * 2;
        let radius = (-2.0 * libm::log(open_unit(words[lane]))).sqrt();
        radius * libm::cos(std::f64::consts::TAU * open_unit(words[lane + 1]))
    }
}

/// Draws from N(0, 1) for the initial values of the parameter `name`. They do not depend on the other parameters of the
/// model.
#[must_use]
pub fn normals(seed: u64, name: &str, count: usize) -> Vec<f32> {
    // FNV-1a.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let stream = DrawKey {
        seed,
        purpose: Purpose::Init,
        step: 0,
        row: hash,
        attempt: 0,
    }
    .stream();
    (0..count)
        .map(|at| stream.normal((at >> 20) as u32, (at & 0xf_ffff) as u32) as f32)
        .collect()
}

/// (w + ½)·2⁻³²: a word as a number of the open interval (0, 1), exact in f64.
#[inline]
#[must_use]
pub fn open_unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

/// (⌊w/2⁹⌋ + ½)·2⁻²³: a word as a number of the open interval (0, 1), exact in f32.
#[inline]
#[must_use]
pub fn open_unit_f32(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0)
}

/// −ln(−ln u) of a word's u; finite for every word, between −3.2 and 22.9.
#[inline]
#[must_use]
pub fn gumbel(word: u32) -> f64 {
    -libm::log(-libm::log(open_unit(word)))
}

/// Order of `len` rows in an epoch: result\[i\] is the i-th row. Fisher–Yates over words of the key
/// (seed, [`Purpose::Shuffle`], step = epoch).
#[must_use]
pub fn shuffle(seed: u64, epoch: u64, len: usize) -> Vec<usize> {
    let stream = DrawKey {
        seed,
        purpose: Purpose::Shuffle,
        step: epoch,
        row: len as u64,
        attempt: 0,
    }
    .stream();
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        // Two words for each swap: the bias of the multiply-shift is below len/2⁶⁴. Positions contain the high half
        // of the index, so that no length wraps around.
        let at = last as u64;
        let words = stream.block((at >> 32) as u32, at as u32);
        let draw = u128::from(words[0]) | (u128::from(words[1]) << 32);
        order.swap(last, ((draw * (u128::from(at) + 1)) >> 64) as usize);
    }
    order
}

/// Philox 4×32 with ten rounds: four random words from a counter and a key.
#[inline]
#[must_use]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    const W0: u32 = 0x9E37_79B9;
    const W1: u32 = 0xBB67_AE85;
    for _ in 0..10 {
        let [low0, high0] = split(M0 * u64::from(counter[0]));
        let [low1, high1] = split(M1 * u64::from(counter[2]));
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(W0), key[1].wrapping_add(W1)];
    }
    counter
}

/// Low and high half.
#[inline]
fn split(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors published with Random123 (`kat_vectors`, philox4x32 with 10 rounds).
    #[test]
    fn philox_gives_the_published_vectors() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    fn key() -> DrawKey {
        DrawKey {
            seed: 7,
            purpose: Purpose::Rollout,
            step: 3,
            row: 11,
            attempt: 0,
        }
    }

    #[test]
    fn every_part_of_the_key_changes_the_words() {
        let base = key();
        let big = 1 << 40;
        let variants = [
            base,
            DrawKey { seed: 8, ..base },
            DrawKey {
                seed: 7 + big,
                ..base
            },
            DrawKey {
                purpose: Purpose::Evaluation,
                ..base
            },
            DrawKey { step: 4, ..base },
            DrawKey {
                step: 3 + big,
                ..base
            },
            DrawKey { row: 12, ..base },
            DrawKey {
                row: 11 + big,
                ..base
            },
            DrawKey { attempt: 1, ..base },
            // Swapped numbers are other keys.
            DrawKey {
                step: 11,
                row: 3,
                ..base
            },
        ];
        let mut words: Vec<[u32; 4]> = variants.iter().map(|k| k.stream().block(0, 0)).collect();
        words.push(base.stream().block(1, 0));
        words.push(base.stream().block(0, 1));
        let distinct: std::collections::HashSet<_> = words.iter().collect();
        assert_eq!(distinct.len(), words.len());
    }

    #[test]
    fn words_are_lanes_of_blocks() {
        let stream = key().stream();
        let block = stream.block(5, 2);
        for lane in 0..4 {
            assert_eq!(stream.word(5, 8 + lane), block[lane as usize]);
        }
    }

    #[test]
    fn uniforms_stay_inside_the_open_interval() {
        for word in [0, 1, 1 << 9, u32::MAX] {
            assert!(open_unit(word) > 0.0 && open_unit(word) < 1.0);
            assert!(open_unit_f32(word) > 0.0 && open_unit_f32(word) < 1.0);
            assert!(gumbel(word).is_finite());
        }
    }

    /// Mean and variance of n draws, each within five standard errors of the distribution's.
    #[track_caller]
    fn check_moments(draw: impl Fn(u32) -> f64, mean: f64, variance: f64, fourth: f64) {
        let n = 40_000;
        let draws: Vec<f64> = (0..n).map(draw).collect();
        let m = draws.iter().sum::<f64>() / f64::from(n);
        let v = draws.iter().map(|x| (x - m).powi(2)).sum::<f64>() / f64::from(n);
        let n = f64::from(n);
        assert!((m - mean).abs() < 5.0 * (variance / n).sqrt(), "mean {m}");
        let spread = ((fourth - variance * variance) / n).sqrt();
        assert!((v - variance).abs() < 5.0 * spread, "variance {v}");
    }

    #[test]
    fn distributions_have_their_moments() {
        let stream = key().stream();
        check_moments(|i| stream.uniform(0, i), 0.5, 1.0 / 12.0, 1.0 / 80.0);
        check_moments(|i| stream.normal(1, i), 0.0, 1.0, 3.0);
        // Gumbel: mean is Euler's constant, variance π²/6, fourth central moment 27/5 · variance².
        let variance = std::f64::consts::PI.powi(2) / 6.0;
        check_moments(
            |i| stream.gumbel(2, i),
            0.577_215_664_901_532_9,
            variance,
            5.4 * variance * variance,
        );
    }

    #[test]
    fn shuffle_is_a_permutation_that_the_seed_and_epoch_decide() {
        let order = shuffle(1, 0, 100);
        assert_eq!(order, shuffle(1, 0, 100));
        assert_ne!(order, shuffle(1, 1, 100));
        assert_ne!(order, shuffle(2, 0, 100));
        let mut sorted = order;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(shuffle(1, 0, 0), Vec::<usize>::new());
        assert_eq!(shuffle(1, 0, 1), vec![0]);
    }

    #[test]
    fn shuffle_visits_all_orders_equally() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6_000 {
            *counts.entry(shuffle(seed, 0, 3)).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 6);
        // χ² with 5 degrees of freedom exceeds 20.5 with probability 0.001.
        let chi: f64 = counts
            .values()
            .map(|&c| (f64::from(c) - 1000.0).powi(2) / 1000.0)
            .sum();
        assert!(chi < 20.5, "{chi}");
    }
}
