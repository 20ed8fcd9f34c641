//! Frequencies of the rotary embedding, and their scaling for contexts longer than in pre-training.

use std::f64::consts::TAU;

/// Shape of the rotary embedding.
///
/// A pair (xᵢ, xᵢ₊ₕ), h = Dh / 2, at position p is rotated by the angle p · fᵢ with fᵢ = θ^(−2i / Dh), scaled.
/// Su et al., *RoFormer*, 2021.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base θ.
    pub theta: f64,
    /// How frequencies are scaled for longer contexts.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are scaled for contexts longer than in pre-training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// The base grows once a call is longer than the context, which lowers the low frequencies (dynamic NTK):
    /// θ · (factor · length / context − factor + 1)^(Dh / (Dh − 2)).
    ///
    /// Frequencies then depend on the length of the call. Within the context they are unscaled.
    Dynamic {
        /// How fast the base grows.
        factor: f64,
        /// Context of pre-training, in tokens.
        context: usize,
    },
    /// Every frequency is divided by a factor (position interpolation).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high ones kept, with a smooth transition between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of pre-training, in tokens.
        original_context: usize,
    },
    /// YaRN: frequencies with many turns within the original context are kept, those with few turns are divided, with a
    /// ramp over the pairs between; rotated vectors are lengthened. Peng et al. 2023, arXiv:2309.00071.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// Length of a rotated unit vector, 0.1 ln(factor) + 1 unless the model says otherwise.
        magnitude: f64,
        /// A frequency with at least this many turns within the original context is kept.
        beta_fast: f64,
        /// A frequency with at most this many turns is divided.
        beta_slow: f64,
        /// Context of pre-training, in tokens.
        original_context: usize,
        /// Whether the ramp starts and ends at integer pairs.
        truncate: bool,
    },
}

impl RopeConfig {
    /// The `Dh / 2` frequencies fᵢ for a call of `length` tokens; only [`RopeScaling::Dynamic`] uses the length.
    ///
    /// They are rounded to f32, as in the reference: at distant positions the rounding is visible in the angles.
    pub fn frequencies(&self, head_dim: usize, length: usize) -> Vec<f32> {
        let dim = head_dim as f64;
        let theta = self.base(dim, length);
        let frequency = |i: usize| libm::pow(theta, -(2.0 * i as f64) / dim);
        (0..head_dim / 2)
            .map(|i| match self.scaling {
                RopeScaling::Yarn { factor, .. } => {
                    let divided = self.ramp(i as f64, dim);
                    frequency(i) * (divided / factor + 1.0 - divided)
                }
                scaling => scaling.apply(frequency(i)),
            })
            .map(|frequency| frequency as f32)
            .collect()
    }

    fn base(&self, dim: f64, length: usize) -> f64 {
        let RopeScaling::Dynamic { factor, context } = self.scaling else {
            return self.theta;
        };
        let longer = self.scaling.scaled_for(length) as f64 / context as f64;
        self.theta * libm::pow(factor * longer - factor + 1.0, dim / (dim - 2.0))
    }

    /// YaRN: the share of a pair's frequency that is divided: 0 up to the pair that turns `beta_fast` times, 1 from the
    /// pair that turns `beta_slow` times.
    fn ramp(&self, pair: f64, dim: f64) -> f64 {
        let RopeScaling::Yarn {
            beta_fast,
            beta_slow,
            original_context,
            truncate,
            ..
        } = self.scaling
        else {
            return 0.0;
        };
        // The fractional pair that makes this many turns within the original context.
        let turning = |turns: f64| {
            let wavelengths = original_context as f64 / (turns * TAU);
            dim * libm::log(wavelengths) / (2.0 * libm::log(self.theta))
        };
        let (mut low, mut high) = (turning(beta_fast), turning(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 1e-3;
        }
        ((pair - low) / (high - low)).clamp(0.0, 1.0)
    }
}

impl RopeScaling {
    /// The length for which a call of `length` tokens scales frequencies; 0 where frequencies do not depend on it.
    pub(super) fn scaled_for(&self, length: usize) -> usize {
        match *self {
            RopeScaling::Dynamic { context, .. } => length.max(context),
            _ => 0,
        }
    }

    /// Length of a rotated unit vector.
    pub fn magnitude(&self) -> f64 {
        match *self {
            RopeScaling::Yarn { magnitude, .. } => magnitude,
            _ => 1.0,
        }
    }

    /// Scales one frequency, for scalings that need nothing else.
    fn apply(&self, frequency: f64) -> f64 {
        match *self {
            RopeScaling::Default | RopeScaling::Dynamic { .. } | RopeScaling::Yarn { .. } => {
                frequency
            }
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                // Turns within the original context: few for low frequencies.
                let turns = original_context as f64 * frequency / TAU;
                if turns < low_freq_factor {
                    frequency / factor
                } else if turns > high_freq_factor {
                    frequency
                } else {
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(theta: f64, scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta, scaling }
    }

    #[track_caller]
    fn check_close(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    #[test]
    fn frequencies_fall_with_the_pair() {
        // θ = 100, Dh = 4: 100^0 and 100^(−1/2).
        check_close(
            &config(100.0, RopeScaling::Default).frequencies(4, 9),
            &[1.0, 0.1],
        );
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let scaling = RopeScaling::Linear { factor: 4.0 };
        check_close(&config(100.0, scaling).frequencies(4, 9), &[0.25, 0.025]);
    }

    #[test]
    fn llama3_scaling_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 100,
        };
        let frequency = |turns: f64| turns * TAU / 100.0;
        assert_eq!(scaling.apply(frequency(4.5)), frequency(4.5));
        assert_eq!(scaling.apply(frequency(0.5)), frequency(0.5) / 8.0);
        // Halfway: the mean of the divided and the kept frequency.
        let middle = frequency(2.5);
        assert!((scaling.apply(middle) - middle * (1.0 + 1.0 / 8.0) / 2.0).abs() < 1e-12);
    }

    #[test]
    fn dynamic_scaling_starts_beyond_the_context() {
        let scaling = RopeScaling::Dynamic {
            factor: 2.0,
            context: 10,
        };
        let config = config(100.0, scaling);
        check_close(&config.frequencies(4, 3), &[1.0, 0.1]);
        check_close(&config.frequencies(4, 10), &[1.0, 0.1]);
        // At 20: 2 · 20/10 − 1 = 3, to the power 4/2: θ = 900.
        check_close(&config.frequencies(4, 20), &[1.0, 1.0 / 30.0]);
    }

    #[test]
    fn yarn_keeps_high_and_divides_low_frequencies() {
        // θ = 16, Dh = 8: frequencies 1, 1/2, 1/4, 1/8. Pair log₂(wavelengths) turns once in 2π · wavelengths tokens.
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            magnitude: 1.5,
            beta_fast: 2.0,
            beta_slow: 0.5,
            original_context: (TAU * 4.0).round() as usize,
            truncate: true,
        };
        // 25 tokens: 2 turns at pair 0.99…, floor 0; half a turn at 2.99…, ceiling 3. The ramp is 0, 1/3, 2/3, 1.
        let kept = |divided: f64| divided / 4.0 + 1.0 - divided;
        let want = [
            1.0,
            kept(1.0 / 3.0) / 2.0,
            kept(2.0 / 3.0) / 4.0,
            0.25 / 8.0,
        ];
        check_close(&config(16.0, scaling).frequencies(8, 1000), &want);
        assert_eq!(scaling.magnitude(), 1.5);
        assert_eq!(RopeScaling::Default.magnitude(), 1.0);
    }
}
