//! The policy losses of [`verl_algos::losses`] under their names in pipelines, a few lines each.
//!
//! Each becomes settings of its own; what all of them share is in [`PolicyObjective`](super::PolicyObjective).

use verl_algos::losses::{CispoLoss, ClippedPolicyLoss, GpgLoss, GspoLoss, TokenLoss};

use super::PolicyLoss;
use crate::settings::settings;

/// Entries of the form `Name = "kind", "default aggregation" { settings } => |own| maths`.
macro_rules! policy_losses {
    ($(
        $(#[doc = $summary:literal])+
        $name:ident = $kind:literal, $aggregation:literal {
            $($(#[$doc:meta])* $setting:ident: $ty:ty = $default:expr),* $(,)?
        } => |$own:pat_param| $maths:expr;
    )+) => {$(
        settings! {
            $(#[doc = $summary])+
            $name { $($(#[$doc])* $setting: $ty = $default),* }
        }

        impl PolicyLoss for $name {
            const KIND: &'static str = $kind;
            const SUMMARY: &'static str = concat!($($summary),+).trim_ascii();
            const AGGREGATION: &'static str = $aggregation;

            fn token_loss(&self) -> Box<dyn TokenLoss> {
                let $own = self;
                Box::new($maths)
            }
        }
    )+};
}

policy_losses! {
    /// The plain policy gradient, weighted by the clipped ratio: no token loses its gradient.
    Cispo = "cispo", "token-mean" {
        /// ε_low: the weight is at least 1 − ε_low.
        clip_low: f64 = 0.2,
        /// ε_high: the weight is at most 1 + ε_high.
        clip_high: f64 = 0.28,
    } => |own| CispoLoss { clip_low: own.clip_low, clip_high: own.clip_high };

    /// The plain policy gradient, −A log π: no ratio, no clip.
    Gpg = "gpg", "token-mean" {} => |_| GpgLoss;

    /// PPO's clipped surrogate of each token, with clip-higher and the dual clip.
    Grpo = "grpo", "token-mean" {
        /// ε_low: the ratio is clipped at 1 − ε_low where that lowers the gain.
        clip_low: f64 = 0.2,
        /// ε_high: the ratio is clipped at 1 + ε_high; above ε_low is clip-higher (DAPO: 0.28).
        clip_high: f64 = 0.2,
        /// c: bound of the ratio where the advantage is negative (dual clip); 0: none.
        dual_clip: f64 = 3.0,
    } => |own| ClippedPolicyLoss {
        clip_low: own.clip_low,
        clip_high: own.clip_high,
        dual_clip: (own.dual_clip != 0.0).then_some(own.dual_clip),
    };

    /// PPO's clipped surrogate on the ratio of the whole response.
    Gspo = "gspo", "seq-mean-token-mean" {
        /// ε_low: the response's mean ratio is clipped at 1 − ε_low where that lowers the gain.
        clip_low: f64 = 3e-4,
        /// ε_high: it is clipped at 1 + ε_high.
        clip_high: f64 = 4e-4,
    } => |own| GspoLoss { clip_low: own.clip_low, clip_high: own.clip_high };
}
