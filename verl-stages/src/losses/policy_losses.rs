//! The policy losses of [`verl_algos::losses`] under their names in pipelines.
//!
//! Each has its own settings; those that all of them share are in [`PolicyObjective`](super::PolicyObjective).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::{
    CispoLoss, ClipCovLoss, ClippedPolicyLoss, DppoLoss, DroLoss, GmpoLoss, GpgLoss, GspoLoss,
    KlCovLoss, RatioLevel, ReinforceLoss, SapoLoss, TokenLoss, TrlGrpoLoss, VespoLoss,
};

use super::{AggregationName, ClipBounds, PolicyLoss};
use crate::settings::settings;

/// What an importance ratio is computed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Each token.
    #[default]
    Token,
    /// The geometric mean of a response's tokens.
    Sequence,
    /// The product of a response's tokens.
    SequenceProduct,
}

impl From<Level> for RatioLevel {
    fn from(level: Level) -> RatioLevel {
        match level {
            Level::Token => RatioLevel::Token,
            Level::Sequence => RatioLevel::Sequence,
            Level::SequenceProduct => RatioLevel::SequenceProduct,
        }
    }
}

/// Entries of the form `Name = "kind", DefaultAggregation { settings } => |own| maths, bounds of its clip`, the last only
/// where there is a clip.
macro_rules! policy_losses {
    ($(
        $(#[doc = $summary:literal])+
        $name:ident = $kind:literal, $aggregation:ident {
            $($(#[$doc:meta])* $setting:ident: $ty:ty = $default:expr),* $(,)?
        } => |$own:pat_param| $maths:expr $(, $clip:expr)?;
    )+) => {$(
        settings! {
            $(#[doc = $summary])+
            $name { $($(#[$doc])* $setting: $ty = $default),* }
        }

        impl PolicyLoss for $name {
            const KIND: &'static str = $kind;
            const SUMMARY: &'static str = concat!($($summary),+).trim_ascii();
            const AGGREGATION: AggregationName = AggregationName::$aggregation;

            fn token_loss(&self) -> Box<dyn TokenLoss> {
                let $own = self;
                Box::new($maths)
            }

            $(
                fn clip_bounds(&self) -> Option<ClipBounds> {
                    let $own = self;
                    Some($clip)
                }
            )?
        }
    )+};
}

policy_losses! {
    /// The plain policy gradient, weighted by the clipped ratio: no token loses its gradient.
    Cispo = "cispo", TokenMean {
        /// ε_low: the weight is at least 1 − ε_low.
        clip_low: f64 = 0.2,
        /// ε_high: the weight is at most 1 + ε_high.
        clip_high: f64 = 0.28,
    } => |own| CispoLoss { clip_low: own.clip_low, clip_high: own.clip_high }, ClipBounds::new(own.clip_low, own.clip_high);

    /// PPO's clip, without some of the tokens that make the entropy collapse (Clip-Cov).
    ClipCov = "clip_cov", TokenMean {
        /// ε_low: the ratio is clipped at 1 − ε_low where that lowers the objective.
        clip_low: f64 = 0.2,
        /// ε_high: the ratio is clipped at 1 + ε_high.
        clip_high: f64 = 0.2,
        /// Largest share of the mini-batch's tokens that is excluded, in (0, 1].
        ratio: f64 = 0.0002,
        /// Only tokens whose covariance of advantage and log-prob is above this are excluded.
        lower: f64 = 1.0,
        /// Only tokens whose covariance of advantage and log-prob is below this are excluded.
        upper: f64 = 5.0,
    } => |own| ClipCovLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        ratio: own.ratio,
        lower: own.lower,
        upper: own.upper,
    }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The policy gradient on tokens inside a trust region of the binary KL (DPPO).
    DppoKl = "dppo_kl", TokenMean {
        /// ε_low: largest KL of a token whose probability falls (nats).
        clip_low: f64 = 0.05,
        /// ε_high: largest KL of a token whose probability rises (nats).
        clip_high: f64 = 0.05,
        /// c: upper bound of the ratio that weights a token.
        ratio_cap: f64 = 20.0,
    } => |own| DppoLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        ratio_cap: own.ratio_cap,
        ..DppoLoss::kl()
    }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The policy gradient on tokens inside a trust region of probabilities (DPPO).
    DppoTv = "dppo_tv", TokenMean {
        /// ε_low: largest probability that a token may lose.
        clip_low: f64 = 0.15,
        /// ε_high: largest probability that a token may gain.
        clip_high: f64 = 0.15,
        /// c: upper bound of the ratio that weights a token.
        ratio_cap: f64 = 20.0,
    } => |own| DppoLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        ratio_cap: own.ratio_cap,
        ..DppoLoss::tv()
    }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The policy gradient with a quadratic pull to the old policy instead of a clip (DRO).
    Dro = "dro", TokenMean {
        /// β: strength of the pull; a good value depends on the scale of the advantages.
        beta: f64 = 1.0,
    } => |own| DroLoss { beta: own.beta };

    /// The geometric mean of a response's clipped ratios, times its advantage (GMPO).
    Gmpo = "gmpo", SeqMeanTokenMean {
        /// ε_low: the log-ratio is clipped at −ε_low where that lowers the gain (nats).
        clip_low: f64 = 0.4,
        /// ε_high: it is clipped at ε_high (nats).
        clip_high: f64 = 0.4,
    } => |own| GmpoLoss { clip_low: own.clip_low, clip_high: own.clip_high }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The plain policy gradient, −A log π: no ratio, no clip.
    Gpg = "gpg", TokenMean {} => |_| GpgLoss;

    /// PPO's clipped surrogate of each token, with clip-higher and the dual clip.
    Grpo = "grpo", TokenMean {
        /// ε_low: the ratio is clipped at 1 − ε_low where that lowers the objective.
        clip_low: f64 = 0.2,
        /// ε_high: the ratio is clipped at 1 + ε_high; above ε_low is clip-higher (DAPO: 0.28).
        clip_high: f64 = 0.2,
        /// c: bound of the ratio where the advantage is negative (dual clip); 0: none.
        dual_clip: f64 = 3.0,
    } => |own| ClippedPolicyLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        dual_clip: (own.dual_clip != 0.0).then_some(own.dual_clip),
    }, ClipBounds {
        cap: (own.dual_clip != 0.0).then_some(("dual_clip", own.dual_clip)),
        ..ClipBounds::new(own.clip_low, own.clip_high)
    };

    /// PPO's clipped surrogate on the ratio of the entire response.
    Gspo = "gspo", SeqMeanTokenMean {
        /// ε_low: the response's mean ratio is clipped at 1 − ε_low where that lowers the objective.
        clip_low: f64 = 3e-4,
        /// ε_high: it is clipped at 1 + ε_high.
        clip_high: f64 = 4e-4,
    } => |own| GspoLoss { clip_low: own.clip_low, clip_high: own.clip_high }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The ratio times the advantage, with a penalty on the tokens that make the entropy collapse (KL-Cov).
    KlCov = "kl_cov", TokenMean {
        /// Share of the mini-batch's tokens that is penalised, in (0, 1].
        ratio: f64 = 0.0002,
        /// Coefficient of the distance to the old log-probs on those tokens.
        cov_kl_coef: f64 = 1.0,
    } => |own| KlCovLoss { ratio: own.ratio, kl_coef: own.cov_kl_coef };

    /// The plain policy gradient times the rollout weights, if there are any (REINFORCE).
    Reinforce = "reinforce", TokenMean {} => |_| ReinforceLoss;

    /// A smooth gate instead of PPO's clip (SAPO).
    Sapo = "sapo", SeqMeanTokenMean {
        /// τ_pos: how fast the gate closes where the advantage is positive.
        tau_pos: f64 = 1.0,
        /// τ_neg: how fast it closes elsewhere.
        tau_neg: f64 = 1.05,
    } => |own| SapoLoss { tau_pos: own.tau_pos, tau_neg: own.tau_neg };

    /// CISPO as in TRL: the ratio that weights the policy gradient has no lower bound.
    TrlCispo = "trl_cispo", TokenMean {
        /// ε_high: the weight is at most 1 + ε_high; TRL's bound is absolute, here 5.
        clip_high: f64 = 4.0,
    } => |own| CispoLoss::with_cap(1.0 + own.clip_high);

    /// The clipped surrogate as in TRL, of tokens or entire responses.
    TrlGrpo = "trl_grpo", SeqMeanTokenMean {
        /// ε_low: the ratio is clipped at 1 − ε_low where that lowers the objective.
        clip_low: f64 = 0.2,
        /// ε_high: the ratio is clipped at 1 + ε_high.
        clip_high: f64 = 0.2,
        /// δ: cap of the ratio for any sign of the advantage, above 1 + ε_high; none when absent.
        delta: Option<f64> = None,
        /// What a ratio is computed over: `token`, `sequence` (geometric mean), `sequence_product`.
        level: Level = Level::Token,
    } => |own| TrlGrpoLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        delta: own.delta,
        level: own.level.into(),
    }, ClipBounds {
        cap: own.delta.map(|cap| ("delta", cap)),
        ..ClipBounds::new(own.clip_low, own.clip_high)
    };

    /// GSPO as in TRL: the geometric mean of a response's ratios is clipped, and is itself differentiated.
    TrlGspo = "trl_gspo", SeqMeanTokenMean {
        /// ε_low: the response's mean ratio is clipped at 1 − ε_low where that lowers the objective.
        clip_low: f64 = 3e-4,
        /// ε_high: it is clipped at 1 + ε_high.
        clip_high: f64 = 4e-4,
    } => |own| TrlGrpoLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        ..TrlGrpoLoss::gspo()
    }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The loss of TRL's RLOO: the product of a response's ratios is clipped.
    TrlRloo = "trl_rloo", SeqMeanTokenMean {
        /// ε_low: the product is clipped at 1 − ε_low where that lowers the objective.
        clip_low: f64 = 0.2,
        /// ε_high: it is clipped at 1 + ε_high.
        clip_high: f64 = 0.2,
    } => |own| TrlGrpoLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        ..TrlGrpoLoss::rloo()
    }, ClipBounds::new(own.clip_low, own.clip_high);

    /// The policy gradient weighted by a smooth function of the response's ratio (VESPO); needs rollout weights per token.
    Vespo = "vespo", TokenMean {
        /// k where the advantage is not negative.
        k_pos: f64 = 2.0,
        /// λ where the advantage is not negative.
        lambda_pos: f64 = 3.0,
        /// k where the advantage is negative.
        k_neg: f64 = 3.0,
        /// λ where the advantage is negative.
        lambda_neg: f64 = 2.0,
    } => |own| VespoLoss {
        k_pos: own.k_pos,
        lambda_pos: own.lambda_pos,
        k_neg: own.k_neg,
        lambda_neg: own.lambda_neg,
    };
}
