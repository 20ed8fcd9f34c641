//! Advantages: how much better a response, or a token of it, was than expected.
//!
//! Plain scans over ragged rows in f64. An estimator takes [`AdvantageInputs`], uses the inputs that it needs, returns
//! an error if one is missing, and otherwise returns [`Advantages`]. A new one is a file here and a line in
//! [`ESTIMATORS`].

use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::ragged::Ragged;

mod gae;
mod gdpo;
mod gpg;
mod grpo;
mod grpo_passk;
mod grpo_trl;
mod inputs;
mod needs;
mod opo;
mod otb;
mod reinforce_plus_plus;
mod remax;
mod rloo;
mod rloo_trl;

pub use gae::Gae;
pub use gdpo::Gdpo;
pub use gpg::Gpg;
pub use grpo::{Grpo, grpo_advantages};
pub use grpo_passk::GrpoPassK;
pub use grpo_trl::{AdvantageScale, ComponentOrder, GrpoTrl};
pub use inputs::{AdvantageInputs, GroupScores, backward_scan, group_rows, outcome_scores};
pub use needs::EstimatorInput;
pub use opo::Opo;
pub use otb::{OptimalTokenBaseline, TokenTime};
pub use reinforce_plus_plus::{ReinforcePlusPlus, ReinforcePlusPlusBaseline};
pub use remax::ReMax;
pub use rloo::Rloo;
pub use rloo_trl::RlooTrl;

/// The result of an estimator; 0 at observations.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// `[B, T~]`
    pub advantages: Ragged<f64>,
    /// `[B, T~]`: the critic's targets, if the estimator defines them.
    pub returns: Option<Ragged<f64>>,
}

/// An estimator with its settings.
pub trait AdvantageEstimator: std::fmt::Debug + Send + Sync {
    /// Its name in pipelines.
    fn name(&self) -> &'static str;

    /// The unit that it must receive in one piece.
    fn cut_unit(&self) -> CutUnit;

    /// The inputs that it reads besides the mask of actions.
    fn inputs(&self) -> &'static [EstimatorInput] {
        &[EstimatorInput::Scores, EstimatorInput::Groups]
    }

    /// Smallest number of responses to a prompt for which it is defined.
    fn smallest_group(&self) -> usize {
        1
    }

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    fn check(&self) -> Result<(), AlgoError> {
        Ok(())
    }

    /// Advantages of a batch of complete cut units.
    ///
    /// # Errors
    /// Inputs that are missing, of the wrong shape or not finite; settings out of range.
    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError>;
}

/// Name of an estimator, and its constructor with default settings.
pub type EstimatorEntry = (&'static str, fn() -> Box<dyn AdvantageEstimator>);

/// All estimators with their default settings, by name.
pub const ESTIMATORS: &[EstimatorEntry] = &[
    ("dr_grpo", || Box::new(Grpo::without_std())),
    ("gae", || Box::new(Gae::default())),
    ("gdpo", || Box::new(Gdpo::default())),
    ("gpg", || Box::new(Gpg::default())),
    ("grpo", || Box::new(Grpo::default())),
    ("grpo_passk", || Box::new(GrpoPassK::default())),
    ("grpo_trl", || Box::new(GrpoTrl::default())),
    ("opo", || Box::new(Opo)),
    ("otb", || Box::new(OptimalTokenBaseline::flat())),
    ("reinforce_plus_plus", || {
        Box::new(ReinforcePlusPlus::default())
    }),
    ("reinforce_plus_plus_baseline", || {
        Box::new(ReinforcePlusPlusBaseline)
    }),
    ("remax", || Box::new(ReMax)),
    ("rloo", || Box::new(Rloo)),
    ("rloo_trl", || Box::new(RlooTrl::default())),
    ("tir_otb", || Box::new(OptimalTokenBaseline::multi_turn())),
];

/// The estimator with this name and its default settings.
///
/// # Errors
/// An unknown name.
pub fn estimator(name: &str) -> Result<Box<dyn AdvantageEstimator>, AlgoError> {
    match ESTIMATORS.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make()),
        None => Err(AlgoError::UnknownName {
            what: "advantage estimator",
            name: name.to_owned(),
            known: ESTIMATORS.iter().map(|(known, _)| *known).collect(),
        }),
    }
}

#[cfg(test)]
mod test {
    use super::{AdvantageEstimator, AdvantageInputs};
    use crate::ragged::Ragged;

    /// Compares numbers.
    #[track_caller]
    pub fn check(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (a, e) in got.iter().zip(expected) {
            assert!((a - e).abs() < 1e-6, "{got:?}");
        }
    }

    /// Advantages of scores [1, 0, 0, 1 | .2, .4 | .7] with lengths [4, 2, 2, 8 | 3, 1 | 5].
    #[track_caller]
    pub fn check_groups(estimator: &dyn AdvantageEstimator, expected: &[f64; 7]) {
        let actions = Ragged::<bool>::from_rows([4, 2, 2, 8, 3, 1, 5].map(|n| vec![true; n]));
        let scores = [1.0, 0.0, 0.0, 1.0, 0.2, 0.4, 0.7].map(Some);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.scores = Some(&scores);
        assert!(estimator.estimate(&inputs).is_err(), "without groups");
        inputs.groups = Some(&[9, 9, 9, 9, 4, 4, 7]);
        let result = estimator.estimate(&inputs).expect("advantages");
        let first: Vec<f64> = result.advantages.rows().map(|row| row[0]).collect();
        check(&first, expected);
    }
}
