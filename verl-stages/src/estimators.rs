//! How rewards become advantages: the slot `estimator` of stage [`advantages`](crate::advantages), and the estimators of
//! [`verl_algos::advantages`] under their names in pipelines, a few lines each.
//!
//! An estimator of one's own is an [`AdvantageEstimator`] with settings that are a [`PartConfig`].

use std::ops::Deref;

use verl_algos::advantages::{self as maths, AdvantageEstimator};
use verl_pipe::part::{PartConfig, Slot};
use verl_pipe::stage::{BuildContext, ConfigError};

use crate::settings::{refusal, settings};

/// An estimator, ready to estimate.
#[derive(Debug)]
pub struct Estimator(Box<dyn AdvantageEstimator>);

impl Slot for Estimator {
    const NAME: &'static str = "estimator";
}

impl Estimator {
    /// An estimator whose settings make sense.
    ///
    /// # Errors
    /// What its own check refuses.
    pub fn new(estimator: impl AdvantageEstimator + 'static) -> Result<Self, Vec<ConfigError>> {
        match estimator.check() {
            Ok(()) => Ok(Estimator(Box::new(estimator))),
            Err(error) => Err(vec![refusal(estimator.name(), &error)]),
        }
    }
}

impl Deref for Estimator {
    type Target = dyn AdvantageEstimator;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref()
    }
}

/// Entries of the form `Name = "kind" { settings } => |own| maths`.
macro_rules! estimators {
    ($(
        $(#[doc = $summary:literal])+
        $name:ident = $kind:literal {
            $($(#[$doc:meta])* $setting:ident: $ty:ty = $default:expr),* $(,)?
        } => |$own:pat_param| $maths:expr;
    )+) => {$(
        settings! {
            $(#[doc = $summary])+
            $name { $($(#[$doc])* $setting: $ty = $default),* }
        }

        impl PartConfig for $name {
            type Slot = Estimator;
            const KIND: &'static str = $kind;
            const SUMMARY: &'static str = concat!($($summary),+).trim_ascii();

            fn build(&self, _: &BuildContext) -> Result<Estimator, Vec<ConfigError>> {
                let $own = self;
                Estimator::new($maths)
            }
        }
    )+};
}

estimators! {
    /// s − μ: the score less the mean score of the prompt's responses (Dr. GRPO).
    DrGrpo = "dr_grpo" {} => |_| maths::Grpo::without_std();

    /// Generalised advantage estimation on the values of a critic.
    Gae = "gae" {
        /// Discount γ, in [0, 1].
        gamma: f64 = 1.0,
        /// λ, in [0, 1].
        gae_lambda: f64 = 1.0,
        /// Whether advantages get mean 0 and variance 1 over the step.
        whiten: bool = true,
    } => |own| maths::Gae { gamma: own.gamma, gae_lambda: own.gae_lambda, whiten: own.whiten };

    /// α(s − μ)/f_norm, α the number of rows over that of rows whose score is not 0 (GPG).
    Gpg = "gpg" {
        /// Divisor.
        f_norm: f64 = 1.0,
    } => |own| maths::Gpg { f_norm: own.f_norm };

    /// (s − μ)/(σ + ε) over the prompt's responses.
    Grpo = "grpo" {
        /// ε added to the group's deviation.
        epsilon: f64 = 1e-6,
    } => |own| maths::Grpo { epsilon: Some(own.epsilon) };

    /// The best response of a prompt gets its lead over the second, the others 0 (pass@k).
    GrpoPassK = "grpo_passk" {
        /// Whether the lead is divided by σ + ε.
        normalise: bool = true,
        /// ε added to the group's deviation.
        epsilon: f64 = 1e-6,
    } => |own| maths::GrpoPassK { epsilon: own.normalise.then_some(own.epsilon) };

    /// The score less the mean score of the prompt's responses, each weighted by its length.
    Opo = "opo" {} => |_| maths::Opo;

    /// Discounted returns, whitened over the step.
    ReinforcePlusPlus = "reinforce_plus_plus" {
        /// Discount γ, in [0, 1].
        gamma: f64 = 1.0,
    } => |own| maths::ReinforcePlusPlus { gamma: own.gamma };

    /// s − μ on each token, whitened over the step.
    ReinforcePlusPlusBaseline = "reinforce_plus_plus_baseline" {} => |_| maths::ReinforcePlusPlusBaseline;

    /// Returns less the score of a reference response to the prompt, such as the greedy one.
    ReMax = "remax" {} => |_| maths::ReMax;

    /// The score less the mean score of the prompt's other responses.
    Rloo = "rloo" {} => |_| maths::Rloo;
}
