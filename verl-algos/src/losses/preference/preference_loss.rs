//! The losses of DPO and its relatives, by name.

use burn::tensor::Tensor;

use super::{check_label_smoothing, pairwise};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::losses::{Mean, PreparedRows};
use crate::names::names;

/// The loss of a pair, as a function of Δ_w and Δ_l, the sums of ℓ − ℓ_ref over its chosen and its rejected response.
///
/// Δ = Δ_w − Δ_l; L tokens; ε is `label_smoothing`.
///
/// # Shapes
/// Δ_w, Δ_l: `[P]`, one per pair; the result has the same shape.
/// # Differences
/// TRL no longer smooths labels in `sigmoid`; the smoothed form is `cdpo`. `ipo` divides log-ratios by their numbers
/// of tokens, as TRL does; OpenRLHF takes the sums, which is `ipo_sum`. `bco_pair` has no running shift in this
/// version of TRL; here it is [`Preferences::reward_shift`](crate::Preferences::reward_shift), 0 unless set. An `sft`
/// without chosen tokens is 0; TRL's is 0/0.
/// # Source
/// Listed at each loss; TRL `DPOTrainer`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum PreferenceLoss {
    /// Smoothed sigmoid on the sorted log-ratios of policy and reference; needs the entire mini-batch.
    ///
    /// Melnyk et al. 2024, arXiv:2406.05882.
    Aot {
        /// ε, in [0, ½).
        label_smoothing: f64,
    },
    /// Smoothed sigmoid on sorted Δ_w minus sorted Δ_l; needs the entire mini-batch.
    ///
    /// Melnyk et al. 2024, arXiv:2406.05882.
    AotUnpaired {
        /// ε, in [0, ½).
        label_smoothing: f64,
    },
    /// σ(βΔ_w) + 1 − σ(βΔ), for chosen responses that are worse than the policy's own.
    ///
    /// D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8.
    ApoDown,
    /// 1 − σ(βΔ_w) + σ(βΔ_l), for chosen responses that are better than the policy's own.
    ///
    /// D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7.
    ApoZero,
    /// −log σ(βΔ_w − δ) − log σ(δ − βΔ_l), δ a running mean of rewards.
    ///
    /// Jung et al. 2024, arXiv:2404.04656.
    BcoPair,
    /// −(1 − ε) log σ(βΔ) − ε log σ(−βΔ).
    ///
    /// Mitchell 2023, "A note on DPO with noisy preferences".
    Cdpo {
        /// ε, in [0, ½).
        label_smoothing: f64,
    },
    /// (1 − g)(−log σ(x)) + g e^{−x} with x = βΔ, g = σ(x/τ).
    ///
    /// Lu et al. 2024, arXiv:2406.08414, eq. 5.
    DiscoPop {
        /// τ, positive.
        tau: f64,
    },
    /// KL of (σ(βΔ), σ(−βΔ)) from (1 − ε, ε).
    ///
    /// Ji et al. 2024, arXiv:2402.00856, eq. 16.
    ExoPair {
        /// ε, in (0, ½).
        label_smoothing: f64,
    },
    /// max(0, 1 − βΔ).
    ///
    /// Zhao et al. 2023 (SLiC), arXiv:2305.10425; with the reference: Liu et al. 2023, arXiv:2309.06657.
    Hinge,
    /// (Δ_w/L_w − Δ_l/L_l − 1/2β)².
    ///
    /// Azar et al. 2023, arXiv:2310.12036, eq. 17; means over tokens as in TRL.
    Ipo,
    /// (Δ − 1/2β)².
    ///
    /// The same on sums over tokens, as in OpenRLHF.
    IpoSum,
    /// −log σ(βΔ_w) − ½ log σ(−βΔ_w) − ½ log σ(−βΔ_l).
    ///
    /// Chen et al. 2024, arXiv:2402.05369.
    NcaPair,
    /// [−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)]/(1 − 2ε).
    ///
    /// Chowdhury et al. 2024, arXiv:2403.00409: unbiased if a share ε of the labels is flipped.
    Robust {
        /// ε, in [0, ½).
        label_smoothing: f64,
    },
    /// −ℓ of the chosen response, a mean over tokens.
    Sft,
    /// −log σ(βΔ).
    ///
    /// Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    #[default]
    Sigmoid,
    /// −log σ(β(Δ_w/L_w − Δ_l/L_l)).
    ///
    /// Lambert et al. 2024 (Tülu 3), arXiv:2411.15124.
    SigmoidNorm,
    /// (Δ_w − 1/2β)² + (Δ_l + 1/2β)².
    ///
    /// Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with probabilities 1 and 0.
    SppoHard,
}

names! {
    /// The name of a loss of DPO and its relatives. Δ = Δ_w − Δ_l is the chosen answer's sum of ℓ − ℓ_ref minus the
    /// rejected one's, L their tokens.
    #[derive(Default)]
    PreferenceLossName, "preference loss" {
        /// `sigmoid` on the sorted log-ratios of policy and reference; needs the entire mini-batch. arXiv:2406.05882.
        Aot = "aot",
        /// `sigmoid` on sorted Δ_w minus sorted Δ_l; needs the entire mini-batch. arXiv:2406.05882.
        AotUnpaired = "aot_unpaired",
        /// σ(βΔ_w) + 1 − σ(βΔ), for chosen answers that are worse than the policy's own. arXiv:2408.06266.
        ApoDown = "apo_down",
        /// 1 − σ(βΔ_w) + σ(βΔ_l), for chosen answers that are better than the policy's own. arXiv:2408.06266.
        ApoZero = "apo_zero",
        /// −log σ(βΔ_w − δ) − log σ(δ − βΔ_l), δ 0 or a running mean of rewards. arXiv:2404.04656.
        BcoPair = "bco_pair",
        /// `sigmoid` with label smoothing: −(1 − ε) log σ(βΔ) − ε log σ(−βΔ).
        Cdpo = "cdpo",
        /// (1 − g)(−log σ(x)) + g e^{−x} with x = βΔ, g = σ(x/τ). arXiv:2406.08414.
        DiscoPop = "discopop",
        /// KL of (σ(βΔ), σ(−βΔ)) from (1 − ε, ε). arXiv:2402.00856.
        ExoPair = "exo_pair",
        /// max(0, 1 − βΔ): SLiC. arXiv:2305.10425.
        Hinge = "hinge",
        /// (Δ_w/L_w − Δ_l/L_l − 1/2β)², means over tokens. arXiv:2310.12036.
        Ipo = "ipo",
        /// (Δ − 1/2β)², sums over tokens.
        IpoSum = "ipo_sum",
        /// −log σ(βΔ_w) − ½ log σ(−βΔ_w) − ½ log σ(−βΔ_l). arXiv:2402.05369.
        NcaPair = "nca_pair",
        /// [−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)]/(1 − 2ε). arXiv:2403.00409.
        Robust = "robust",
        /// −ℓ of the chosen answer, a mean over tokens.
        Sft = "sft",
        /// −log σ(βΔ): DPO. arXiv:2305.18290.
        #[default]
        Sigmoid = "sigmoid",
        /// −log σ(β(Δ_w/L_w − Δ_l/L_l)), means over tokens. arXiv:2411.15124.
        SigmoidNorm = "sigmoid_norm",
        /// (Δ_w − 1/2β)² + (Δ_l + 1/2β)². arXiv:2405.00675.
        SppoHard = "sppo_hard",
    }
}

impl From<PreferenceLossName> for PreferenceLoss {
    /// The loss with its default settings.
    fn from(name: PreferenceLossName) -> PreferenceLoss {
        use PreferenceLossName as Name;
        match name {
            Name::Aot => PreferenceLoss::AOT,
            Name::AotUnpaired => PreferenceLoss::AOT_UNPAIRED,
            Name::ApoDown => PreferenceLoss::ApoDown,
            Name::ApoZero => PreferenceLoss::ApoZero,
            Name::BcoPair => PreferenceLoss::BcoPair,
            Name::Cdpo => PreferenceLoss::CDPO,
            Name::DiscoPop => PreferenceLoss::DISCOPOP,
            Name::ExoPair => PreferenceLoss::EXO_PAIR,
            Name::Hinge => PreferenceLoss::Hinge,
            Name::Ipo => PreferenceLoss::Ipo,
            Name::IpoSum => PreferenceLoss::IpoSum,
            Name::NcaPair => PreferenceLoss::NcaPair,
            Name::Robust => PreferenceLoss::ROBUST,
            Name::Sft => PreferenceLoss::Sft,
            Name::Sigmoid => PreferenceLoss::Sigmoid,
            Name::SigmoidNorm => PreferenceLoss::SigmoidNorm,
            Name::SppoHard => PreferenceLoss::SppoHard,
        }
    }
}

impl PreferenceLoss {
    /// `aot` without label smoothing.
    pub const AOT: PreferenceLoss = PreferenceLoss::Aot {
        label_smoothing: 0.0,
    };
    /// `aot_unpaired` without label smoothing.
    pub const AOT_UNPAIRED: PreferenceLoss = PreferenceLoss::AotUnpaired {
        label_smoothing: 0.0,
    };
    /// `cdpo` with ε = 0.1.
    pub const CDPO: PreferenceLoss = PreferenceLoss::Cdpo {
        label_smoothing: 0.1,
    };
    /// `discopop` with the paper's τ = 0.05.
    pub const DISCOPOP: PreferenceLoss = PreferenceLoss::DiscoPop { tau: 0.05 };
    /// `exo_pair` with ε = 0.001.
    pub const EXO_PAIR: PreferenceLoss = PreferenceLoss::ExoPair {
        label_smoothing: 1e-3,
    };
    /// `robust` with ε = 0.1.
    pub const ROBUST: PreferenceLoss = PreferenceLoss::Robust {
        label_smoothing: 0.1,
    };

    /// The same loss with another ε.
    ///
    /// # Errors
    /// A loss without ε; a value out of range.
    pub fn with_label_smoothing(mut self, epsilon: f64) -> Result<PreferenceLoss, AlgoError> {
        match &mut self {
            PreferenceLoss::Aot { label_smoothing }
            | PreferenceLoss::AotUnpaired { label_smoothing }
            | PreferenceLoss::Cdpo { label_smoothing }
            | PreferenceLoss::ExoPair { label_smoothing }
            | PreferenceLoss::Robust { label_smoothing } => *label_smoothing = epsilon,
            _ => {
                return Err(AlgoError::Conflict {
                    loss: self.reported_name(),
                    setting: "label_smoothing",
                    reason: "it has none; `cdpo` is the sigmoid with label smoothing",
                });
            }
        }
        self.check()?;
        Ok(self)
    }

    /// The name under which its mean is reported: `dpo_` and its name.
    pub(super) fn reported_name(&self) -> &'static str {
        match self {
            PreferenceLoss::Aot { .. } => "dpo_aot",
            PreferenceLoss::AotUnpaired { .. } => "dpo_aot_unpaired",
            PreferenceLoss::ApoDown => "dpo_apo_down",
            PreferenceLoss::ApoZero => "dpo_apo_zero",
            PreferenceLoss::BcoPair => "dpo_bco_pair",
            PreferenceLoss::Cdpo { .. } => "dpo_cdpo",
            PreferenceLoss::DiscoPop { .. } => "dpo_discopop",
            PreferenceLoss::ExoPair { .. } => "dpo_exo_pair",
            PreferenceLoss::Hinge => "dpo_hinge",
            PreferenceLoss::Ipo => "dpo_ipo",
            PreferenceLoss::IpoSum => "dpo_ipo_sum",
            PreferenceLoss::NcaPair => "dpo_nca_pair",
            PreferenceLoss::Robust { .. } => "dpo_robust",
            PreferenceLoss::Sft => "dpo_sft",
            PreferenceLoss::Sigmoid => "dpo_sigmoid",
            PreferenceLoss::SigmoidNorm => "dpo_sigmoid_norm",
            PreferenceLoss::SppoHard => "dpo_sppo_hard",
        }
    }

    /// Whether it sorts the pairs of a mini-batch, which breaks the pairing.
    pub(super) fn sorts(&self) -> bool {
        use PreferenceLoss::{Aot, AotUnpaired};
        matches!(self, Aot { .. } | AotUnpaired { .. })
    }

    pub(super) fn cut_unit(&self) -> CutUnit {
        if self.sorts() {
            CutUnit::MiniBatch
        } else {
            CutUnit::Pair
        }
    }

    pub(super) fn mean(&self) -> Mean {
        match self {
            PreferenceLoss::Sft => Mean::ChosenTokens,
            _ => Mean::Units,
        }
    }

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn check(&self) -> Result<(), AlgoError> {
        match *self {
            PreferenceLoss::Aot { label_smoothing }
            | PreferenceLoss::AotUnpaired { label_smoothing }
            | PreferenceLoss::Cdpo { label_smoothing }
            | PreferenceLoss::Robust { label_smoothing } => check_label_smoothing(label_smoothing),
            PreferenceLoss::ExoPair { label_smoothing } => {
                let rule = "`exo_pair` takes its logarithm";
                let positive = label_smoothing > 0.0;
                check_setting("label_smoothing", label_smoothing, positive, rule)?;
                check_label_smoothing(label_smoothing)
            }
            PreferenceLoss::DiscoPop { tau } => {
                let valid = tau > 0.0 && tau.is_finite();
                check_setting("discopop_tau", tau, valid, "it must be positive")
            }
            _ => Ok(()),
        }
    }

    /// The loss of each pair, `[P]`.
    pub(super) fn pairs(&self, rows: &PreparedRows<'_>, pairs: &pairwise::Pairs) -> Tensor<1> {
        match *self {
            PreferenceLoss::Aot { label_smoothing } => pairwise::aot(pairs, label_smoothing),
            PreferenceLoss::AotUnpaired { label_smoothing } => {
                pairwise::aot_unpaired(pairs, label_smoothing)
            }
            PreferenceLoss::ApoDown => pairwise::apo_down(pairs),
            PreferenceLoss::ApoZero => pairwise::apo_zero(pairs),
            PreferenceLoss::BcoPair => pairwise::bco_pair(pairs),
            PreferenceLoss::Cdpo { label_smoothing } => pairwise::cdpo(pairs, label_smoothing),
            PreferenceLoss::DiscoPop { tau } => pairwise::discopop(pairs, tau),
            PreferenceLoss::ExoPair { label_smoothing } => {
                pairwise::exo_pair(pairs, label_smoothing)
            }
            PreferenceLoss::Hinge => pairwise::hinge(pairs),
            PreferenceLoss::Ipo => pairwise::ipo(pairs),
            PreferenceLoss::IpoSum => pairwise::ipo_sum(pairs),
            PreferenceLoss::NcaPair => pairwise::nca_pair(pairs),
            PreferenceLoss::Robust { label_smoothing } => pairwise::robust(pairs, label_smoothing),
            PreferenceLoss::Sft => super::chosen_nll::chosen_nll(rows),
            PreferenceLoss::Sigmoid => pairwise::sigmoid(pairs),
            PreferenceLoss::SigmoidNorm => pairwise::sigmoid_norm(pairs),
            PreferenceLoss::SppoHard => pairwise::sppo_hard(pairs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_those_that_are_reported() {
        assert!(PreferenceLossName::ALL.is_sorted_by_key(|name| name.as_str()));
        for name in PreferenceLossName::ALL {
            let loss = PreferenceLoss::from(*name);
            assert_eq!(loss.reported_name(), format!("dpo_{name}"));
            assert_eq!(loss.check(), Ok(()));
        }
    }

    #[test]
    fn label_smoothing_is_checked_and_never_ignored() {
        let smoothed = |loss: PreferenceLoss, epsilon| loss.with_label_smoothing(epsilon);
        assert!(smoothed(PreferenceLoss::CDPO, 0.0).is_ok());
        assert!(smoothed(PreferenceLoss::CDPO, 0.5).is_err());
        assert!(smoothed(PreferenceLoss::CDPO, f64::NAN).is_err());
        assert!(smoothed(PreferenceLoss::EXO_PAIR, 0.0).is_err());
        let error = smoothed(PreferenceLoss::Sigmoid, 0.1).unwrap_err();
        assert!(error.to_string().contains("`cdpo`"), "{error}");
        assert!(PreferenceLoss::DiscoPop { tau: 0.0 }.check().is_err());
    }

    #[test]
    fn only_sorting_losses_need_the_whole_mini_batch() {
        for name in PreferenceLossName::ALL {
            let whole = PreferenceLoss::from(*name).cut_unit() == CutUnit::MiniBatch;
            assert_eq!(whole, name.as_str().starts_with("aot"), "{name}");
        }
    }
}
