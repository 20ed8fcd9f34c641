//! The loss of a pair: one function per loss. x = βΔ unless stated otherwise; sources are listed at [`PreferenceLoss`].
//!
//! [`PreferenceLoss`]: super::PreferenceLoss

use burn::tensor::Tensor;

use super::log_space::{log_sigmoid, sigmoid as sigma};
use crate::functions::exp;
use crate::losses::Sides;

/// The inputs of the functions for pairs, `[P]` each.
pub(super) struct Pairs {
    /// Δ_w and Δ_l: the sums of ℓ − ℓ_ref, or their transformation by a divergence.
    pub deltas: Sides,
    /// Sums of ℓ_ref.
    pub ref_log_probs: Sides,
    /// L_w and L_l, tokens, at least 1.
    pub lengths: Sides,
    /// β.
    pub beta: f64,
    /// δ of [`bco_pair`].
    pub reward_shift: f64,
}

impl Pairs {
    /// βΔ.
    fn x(&self) -> Tensor<1> {
        self.deltas.margin() * self.beta
    }

    /// βΔ_w and βΔ_l.
    fn rewards(&self) -> Sides {
        self.deltas.map(|delta| delta * self.beta)
    }

    /// Δ_w/L_w − Δ_l/L_l.
    fn mean_margin(&self) -> Tensor<1> {
        self.deltas.over(&self.lengths).margin()
    }
}

/// −(1 − ε) log σ(x) − ε log σ(−x).
pub(super) fn smoothed_sigmoid(x: Tensor<1>, epsilon: f64) -> Tensor<1> {
    log_sigmoid(x.clone()) * (epsilon - 1.0) - log_sigmoid(-x) * epsilon
}

/// max(0, 1 − x).
pub(super) fn hinge_of(x: Tensor<1>) -> Tensor<1> {
    (-x + 1.0).clamp_min(0.0)
}

/// (margin − 1/2β)².
pub(super) fn squared_to_target(margin: Tensor<1>, beta: f64) -> Tensor<1> {
    (margin - 0.5 / beta).square()
}

/// −log σ(x).
pub(super) fn sigmoid(pairs: &Pairs) -> Tensor<1> {
    -log_sigmoid(pairs.x())
}

/// −(1 − ε) log σ(x) − ε log σ(−x).
pub(super) fn cdpo(pairs: &Pairs, epsilon: f64) -> Tensor<1> {
    smoothed_sigmoid(pairs.x(), epsilon)
}

/// [−(1 − ε) log σ(x) + ε log σ(−x)]/(1 − 2ε): unbiased if a share ε of the labels is flipped.
pub(super) fn robust(pairs: &Pairs, epsilon: f64) -> Tensor<1> {
    let x = pairs.x();
    let clean = log_sigmoid(x.clone()) * (epsilon - 1.0);
    let flipped = log_sigmoid(-x) * epsilon;
    (clean + flipped) / (1.0 - 2.0 * epsilon)
}

/// max(0, 1 − x).
pub(super) fn hinge(pairs: &Pairs) -> Tensor<1> {
    hinge_of(pairs.x())
}

/// (Δ_w/L_w − Δ_l/L_l − 1/2β)².
pub(super) fn ipo(pairs: &Pairs) -> Tensor<1> {
    squared_to_target(pairs.mean_margin(), pairs.beta)
}

/// (Δ − 1/2β)²: sums over tokens, as in OpenRLHF.
pub(super) fn ipo_sum(pairs: &Pairs) -> Tensor<1> {
    squared_to_target(pairs.deltas.margin(), pairs.beta)
}

/// q(log q − log(1 − ε)) + (1 − q)(log(1 − q) − log ε), q = σ(x).
pub(super) fn exo_pair(pairs: &Pairs, epsilon: f64) -> Tensor<1> {
    let log_q = log_sigmoid(pairs.x());
    let log_not_q = log_sigmoid(-pairs.x());
    exp(log_q.clone()) * (log_q - libm::log1p(-epsilon))
        + exp(log_not_q.clone()) * (log_not_q - libm::log(epsilon))
}

/// −log σ(βΔ_w) − ½ log σ(−βΔ_w) − ½ log σ(−βΔ_l).
pub(super) fn nca_pair(pairs: &Pairs) -> Tensor<1> {
    let Sides { chosen, rejected } = pairs.rewards();
    -log_sigmoid(chosen.clone()) - log_sigmoid(-chosen) * 0.5 - log_sigmoid(-rejected) * 0.5
}

/// −log σ(βΔ_w − δ) − log σ(−(βΔ_l − δ)).
pub(super) fn bco_pair(pairs: &Pairs) -> Tensor<1> {
    let Sides { chosen, rejected } = pairs.rewards().map(|reward| reward - pairs.reward_shift);
    -log_sigmoid(chosen) - log_sigmoid(-rejected)
}

/// (Δ_w − 1/2β)² + (Δ_l + 1/2β)².
pub(super) fn sppo_hard(pairs: &Pairs) -> Tensor<1> {
    let Sides { chosen, rejected } = pairs.deltas.clone();
    squared_to_target(chosen, pairs.beta) + squared_to_target(-rejected, pairs.beta)
}

/// Smoothed sigmoid on β(sort(ℓ_w − ℓ_l) − sort(ℓ_ref,w − ℓ_ref,l)).
pub(super) fn aot(pairs: &Pairs, epsilon: f64) -> Tensor<1> {
    let reference = pairs.ref_log_probs.margin();
    let policy = reference.clone() + pairs.deltas.margin();
    let margin = policy.sort(0) - reference.sort(0);
    smoothed_sigmoid(margin * pairs.beta, epsilon)
}

/// Smoothed sigmoid on β(sort(Δ_w) − sort(Δ_l)).
pub(super) fn aot_unpaired(pairs: &Pairs, epsilon: f64) -> Tensor<1> {
    let sorted = pairs.deltas.map(|delta| delta.sort(0));
    smoothed_sigmoid(sorted.margin() * pairs.beta, epsilon)
}

/// 1 − σ(βΔ_w) + σ(βΔ_l).
pub(super) fn apo_zero(pairs: &Pairs) -> Tensor<1> {
    let Sides { chosen, rejected } = pairs.rewards();
    sigma(-chosen) + sigma(rejected)
}

/// σ(βΔ_w) + 1 − σ(βΔ).
pub(super) fn apo_down(pairs: &Pairs) -> Tensor<1> {
    sigma(pairs.rewards().chosen) + sigma(-pairs.x())
}

/// (1 − g)(−log σ(x)) + g e^{−x}, g = σ(x/τ).
///
/// g e^{−x} is computed as e^{log g − x}, which does not overflow.
pub(super) fn discopop(pairs: &Pairs, tau: f64) -> Tensor<1> {
    let x = pairs.x();
    let logistic = -log_sigmoid(x.clone());
    let exponential = exp(log_sigmoid(x.clone() / tau) - x.clone());
    sigma(-x / tau) * logistic + exponential
}

/// −log σ(β(Δ_w/L_w − Δ_l/L_l)).
pub(super) fn sigmoid_norm(pairs: &Pairs) -> Tensor<1> {
    -log_sigmoid(pairs.mean_margin() * pairs.beta)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, gradient, read};

    /// One pair with these Δ, 5 and 7 tokens, and β = 0.1.
    fn pair(chosen: Tensor<1>, rejected: Tensor<1>) -> Pairs {
        Pairs {
            ref_log_probs: Sides {
                chosen: chosen.zeros_like(),
                rejected: rejected.zeros_like(),
            },
            lengths: Sides {
                chosen: chosen.zeros_like() + 5.0,
                rejected: rejected.zeros_like() + 7.0,
            },
            deltas: Sides { chosen, rejected },
            beta: 0.1,
            reward_shift: 0.0,
        }
    }

    #[track_caller]
    fn check(loss: impl Fn(&Pairs) -> Tensor<1>, expected: f64) {
        let got = read(loss(&pair(constant(&[1.0]), constant(&[-1.0]))))[0];
        assert!((got - expected).abs() < 1e-6, "{got}");
    }

    #[test]
    fn of_log_ratios_one_and_minus_one() {
        check(sigmoid, 0.598139);
        check(|p| cdpo(p, 0.1), 0.618139);
        check(|p| robust(p, 0.1), 0.573139);
        check(hinge, 0.8);
        check(ipo, 21.688980);
        check(ipo_sum, 9.0);
        check(|p| exo_pair(p, 0.1), 0.406304);
        check(nca_pair, 1.338793);
        check(bco_pair, 1.288793);
        check(sppo_hard, 32.0);
        check(apo_zero, 0.950042);
        check(apo_down, 0.975145);
        check(|p| aot(p, 0.1), 0.618139);
        check(|p| aot_unpaired(p, 0.1), 0.618139);
        // x = 0.2, g = σ(4).
        check(
            |p| discopop(p, 0.05),
            0.017986 * 0.598139 + 0.982014 * 0.818731,
        );
        // Δ_w/5 − Δ_l/7 = 12/35.
        check(sigmoid_norm, (1.0 + (-1.2f64 / 35.0).exp()).ln());
    }

    #[test]
    fn a_running_mean_shifts_both_rewards() {
        let mut shifted = pair(constant(&[3.0]), constant(&[3.0]));
        shifted.reward_shift = 0.3;
        assert!((read(bco_pair(&shifted))[0] - 2.0 * 2f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn sorting_pairs_the_smallest_with_the_smallest() {
        let (loss, grad) = gradient(&[3.0, -2.0], |chosen| {
            aot_unpaired(&pair(chosen, constant(&[-2.0, 3.0])), 0.0)
        });
        assert!((loss - 2.0 * 2f64.ln()).abs() < 1e-12, "{loss}");
        assert_eq!(grad, [-0.05, -0.05]);
    }

    #[test]
    fn far_margins_stay_finite() {
        let losses: [fn(&Pairs) -> Tensor<1>; 5] = [
            sigmoid,
            apo_down,
            |p| discopop(p, 0.05),
            |p| exo_pair(p, 0.001),
            |p| cdpo(p, 0.1),
        ];
        for loss in losses {
            for delta in [-1e4, 1e4] {
                let (value, grad) = gradient(&[delta], |d| loss(&pair(d, constant(&[0.0]))));
                assert!(value.is_finite() && grad[0].is_finite(), "{value} {grad:?}");
            }
        }
    }
}
