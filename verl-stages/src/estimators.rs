//! How rewards become advantages: the slot `estimator` of stage [`advantages`](crate::advantages), and the estimators
//! of [`verl_algos::advantages`] under their names in pipelines.
//!
//! A custom estimator is an [`AdvantageEstimator`] whose settings are a [`PartConfig`].

mod components;

use std::ops::Deref;

use verl_algos::advantages::{self as maths, AdvantageEstimator};
use verl_declare::part::{PartConfig, Slot};
use verl_words::stage::{BuildContext, ConfigError};

use crate::settings::{refusal, settings};

pub use components::{AdvantageScale, ComponentOrder, Gdpo, GrpoTrl};

/// An estimator, ready to estimate.
#[derive(Debug)]
pub struct Estimator {
    maths: Box<dyn AdvantageEstimator>,
    components: Components,
}

/// The rewards of several functions that an estimator reads instead of `rewards`; no keys if it reads `rewards`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Components {
    /// Keys of these rewards, each in the form of `rewards`.
    pub keys: Vec<String>,
    /// Weight of each in the reported reward.
    pub weights: Vec<f64>,
}

impl Slot for Estimator {
    const NAME: &'static str = "estimator";
}

impl Estimator {
    /// An estimator with valid settings.
    ///
    /// # Errors
    /// Settings that the estimator's own check refuses.
    pub fn new(estimator: impl AdvantageEstimator + 'static) -> Result<Self, Vec<ConfigError>> {
        match estimator.check() {
            Ok(()) => Ok(Estimator {
                maths: Box::new(estimator),
                components: Components::default(),
            }),
            Err(error) => Err(vec![refusal(estimator.name(), &error)]),
        }
    }

    /// The same estimator on the rewards of several functions.
    #[must_use]
    pub fn of_components(self, components: Components) -> Self {
        Estimator { components, ..self }
    }

    /// The rewards that it reads instead of `rewards`.
    pub fn components(&self) -> &Components {
        &self.components
    }
}

impl Deref for Estimator {
    type Target = dyn AdvantageEstimator;

    fn deref(&self) -> &Self::Target {
        self.maths.as_ref()
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
    /// s − μ: the score minus the mean score of the prompt's responses (Dr. GRPO).
    DrGrpo = "dr_grpo" {} => |_| maths::Grpo::without_std();

    /// Generalised advantage estimation on the values of a critic.
    Gae = "gae" {
        /// Discount γ, in [0, 1].
        gamma: f64 = 1.0,
        /// λ, in [0, 1].
        gae_lambda: f64 = 1.0,
        /// Whether advantages are whitened to mean 0 and variance 1 over the step.
        whiten: bool = true,
    } => |own| maths::Gae { gamma: own.gamma, gae_lambda: own.gae_lambda, whiten: own.whiten };

    /// α(s − μ)/f_norm, where α is the number of rows divided by the number of rows with a non-zero score (GPG).
    Gpg = "gpg" {
        /// Divisor.
        f_norm: f64 = 1.0,
    } => |own| maths::Gpg { f_norm: own.f_norm };

    /// (s − μ)/(σ + ε) over the prompt's responses.
    Grpo = "grpo" {
        /// ε added to the group's deviation.
        epsilon: f64 = 1e-6,
    } => |own| maths::Grpo { epsilon: Some(own.epsilon) };

    /// The best response of a prompt gets its margin over the second best, the others get 0 (pass@k).
    GrpoPassK = "grpo_passk" {
        /// Whether the margin is divided by σ + ε.
        normalise: bool = true,
        /// ε added to the group's deviation.
        epsilon: f64 = 1e-6,
    } => |own| maths::GrpoPassK { epsilon: own.normalise.then_some(own.epsilon) };

    /// The score minus the mean score of the prompt's responses, weighted by their lengths.
    Opo = "opo" {} => |_| maths::Opo;

    /// Reward-to-go minus a baseline for each position of a response, weighted by the accumulated variance.
    Otb = "otb" {
        /// Whether the longest response of a prompt has baseline 0 at positions that no other response reaches.
        handle_zero_tail: bool = true,
    } => |own| maths::OptimalTokenBaseline {
        handle_zero_tail: own.handle_zero_tail,
        ..maths::OptimalTokenBaseline::flat()
    };

    /// Discounted returns, whitened over the step.
    ReinforcePlusPlus = "reinforce_plus_plus" {
        /// Discount γ, in [0, 1].
        gamma: f64 = 1.0,
    } => |own| maths::ReinforcePlusPlus { gamma: own.gamma };

    /// s − μ on each token, whitened over the step.
    ReinforcePlusPlusBaseline = "reinforce_plus_plus_baseline" {} => |_| maths::ReinforcePlusPlusBaseline;

    /// Returns minus the score of a reference response to the prompt, such as the greedy one.
    ReMax = "remax" {} => |_| maths::ReMax;

    /// The score minus the mean score of the prompt's other responses.
    Rloo = "rloo" {} => |_| maths::Rloo;

    /// RLOO with the KL to the reference subtracted from the score; advantages optionally normalised over the step (TRL).
    RlooTrl = "rloo_trl" {
        /// β: coefficient of the KL to the reference; 0 needs no reference.
        beta: f64 = 0.05,
        /// Bounds of the score before the KL is subtracted: `[low, high]`.
        reward_clip: Option<[f64; 2]> = None,
        /// Whether advantages are normalised to mean 0 and standard deviation 1 over the step.
        normalize: bool = false,
        /// ε added to that deviation.
        epsilon: f64 = 1e-4,
    } => |own| maths::RlooTrl {
        beta: own.beta,
        reward_clip: own.reward_clip.map(|[low, high]| (low, high)),
        normalize: own.normalize,
        epsilon: own.epsilon,
    };

    /// `otb` with positions counted in the tokens that the policy chose, for responses with observations.
    TirOtb = "tir_otb" {
        /// Whether the longest response of a prompt has baseline 0 at positions that no other response reaches.
        handle_zero_tail: bool = true,
    } => |own| maths::OptimalTokenBaseline {
        handle_zero_tail: own.handle_zero_tail,
        ..maths::OptimalTokenBaseline::multi_turn()
    };
}
