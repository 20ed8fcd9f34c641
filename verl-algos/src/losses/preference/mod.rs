//! Losses over preferences: pairs of a chosen and a rejected response, or single responses that are good or bad.
//!
//! With Δ_w, Δ_l the sums of ℓ − ℓ_ref over the chosen and the rejected response, Δ = Δ_w − Δ_l, and c, r the log-probs
//! of the two responses themselves:
//!
//! | loss | of | needs |
//! |---|---|---|
//! | [`Dpo`] with any [`PreferenceLoss`] | Δ_w, Δ_l of a pair | reference log-probs |
//! | [`Kto`] | Δ of a row, and whether it is desirable | reference log-probs, z₀ |
//! | [`Cpo`] (CPO, SimPO, AlphaPO) | c − r of a pair | |
//! | [`OrpoOdds`] | the log-odds of a pair's means | |
//! | [`ChosenNll`] | the chosen row | |
//! | [`RewardModelLoss`] | the scores of a pair | a scalar head |
//!
//! A mixture is an [`Objective`](super::Objective) with several of them: [`Dpo::mixture`], [`Cpo::objective`],
//! [`orpo`].

mod chosen_nll;
mod cpo;
mod divergence;
mod dpo;
mod kto;
mod log_space;
mod orpo;
mod pairwise;
mod preference_loss;
mod reward_model;
mod rewards;

pub use chosen_nll::ChosenNll;
pub use cpo::{Cpo, CpoLoss, CpoLossName};
pub use divergence::{FDivergence, FDivergenceName};
pub use dpo::Dpo;
pub use kto::{Kto, KtoBaseline, kl_baseline, mismatched_rows};
pub use orpo::{OrpoOdds, orpo};
pub use preference_loss::{PreferenceLoss, PreferenceLossName};
pub use reward_model::RewardModelLoss;

use super::RowLoss;
use crate::batch::MiniBatch;
use crate::error::{AlgoError, check_setting};

/// Name of a row loss, and its constructor with default settings.
pub type RowLossEntry = (&'static str, fn() -> Box<dyn RowLoss>);

/// All preference losses with their default settings, by name.
pub const PREFERENCE_LOSSES: &[RowLossEntry] = &[
    ("apo_zero_unpaired", || Box::new(Kto::apo_zero_unpaired())),
    ("chosen_nll", || Box::new(ChosenNll)),
    ("cpo_alphapo", || Box::new(Cpo::alphapo())),
    ("cpo_hinge", || Box::new(Cpo::new(CpoLoss::Hinge))),
    ("cpo_ipo", || Box::new(Cpo::new(CpoLoss::Ipo))),
    ("cpo_sigmoid", || Box::new(Cpo::new(CpoLoss::Sigmoid))),
    ("cpo_simpo", || Box::new(Cpo::simpo())),
    ("dpo_aot", || dpo(PreferenceLoss::AOT)),
    ("dpo_aot_unpaired", || dpo(PreferenceLoss::AOT_UNPAIRED)),
    ("dpo_apo_down", || dpo(PreferenceLoss::ApoDown)),
    ("dpo_apo_zero", || dpo(PreferenceLoss::ApoZero)),
    ("dpo_bco_pair", || dpo(PreferenceLoss::BcoPair)),
    ("dpo_cdpo", || dpo(PreferenceLoss::CDPO)),
    ("dpo_discopop", || dpo(PreferenceLoss::DISCOPOP)),
    ("dpo_exo_pair", || dpo(PreferenceLoss::EXO_PAIR)),
    ("dpo_hinge", || dpo(PreferenceLoss::Hinge)),
    ("dpo_ipo", || dpo(PreferenceLoss::Ipo)),
    ("dpo_ipo_sum", || dpo(PreferenceLoss::IpoSum)),
    ("dpo_nca_pair", || dpo(PreferenceLoss::NcaPair)),
    ("dpo_robust", || dpo(PreferenceLoss::ROBUST)),
    ("dpo_sft", || dpo(PreferenceLoss::Sft)),
    ("dpo_sigmoid", || dpo(PreferenceLoss::Sigmoid)),
    ("dpo_sigmoid_norm", || dpo(PreferenceLoss::SigmoidNorm)),
    ("dpo_sppo_hard", || dpo(PreferenceLoss::SppoHard)),
    ("kto", || Box::new(Kto::default())),
    ("orpo_odds", || Box::new(OrpoOdds::default())),
    ("reward_model", || Box::new(RewardModelLoss::default())),
];

fn dpo(loss: PreferenceLoss) -> Box<dyn RowLoss> {
    Box::new(Dpo::new(loss))
}

/// The preference loss with this name and its default settings.
///
/// # Errors
/// An unknown name.
pub fn preference_loss(name: &str) -> Result<Box<dyn RowLoss>, AlgoError> {
    match PREFERENCE_LOSSES.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make()),
        None => Err(AlgoError::UnknownName {
            what: "preference loss",
            name: name.to_owned(),
            known: PREFERENCE_LOSSES.iter().map(|(known, _)| *known).collect(),
        }),
    }
}

fn check_beta(beta: f64) -> Result<(), AlgoError> {
    let valid = beta > 0.0 && beta.is_finite();
    check_setting("beta", beta, valid, "it must be a positive number")
}

/// ε is the assumed share of pairs with a wrong label.
fn check_label_smoothing(label_smoothing: f64) -> Result<(), AlgoError> {
    let valid = (0.0..0.5).contains(&label_smoothing);
    let rule = "it must be at least 0 and below 1/2";
    check_setting("label_smoothing", label_smoothing, valid, rule)
}

/// Rejects pairs with one empty side, for losses where a mean over no tokens would look like a probability of 1.
fn check_both_sides(loss: &'static str, batch: &MiniBatch) -> Result<(), AlgoError> {
    let lengths = batch.row_lengths();
    let length = |row: usize| lengths.get(row).copied().unwrap_or(0);
    let has_one_side = |row: &usize| length(*row) == 0 && length(*row ^ 1) > 0;
    match (0..lengths.len().next_multiple_of(2)).find(has_one_side) {
        Some(row) => Err(AlgoError::EmptyRow { loss, row }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_listed_in_order_under_their_own_names() {
        assert!(PREFERENCE_LOSSES.is_sorted_by_key(|(name, _)| *name));
        for (name, make) in PREFERENCE_LOSSES {
            assert_eq!(make().name(), *name);
            assert_eq!(make().check(), Ok(()), "{name}");
        }
        for name in PreferenceLossName::ALL {
            let loss = preference_loss(&format!("dpo_{name}")).unwrap();
            assert_eq!(loss.name(), format!("dpo_{name}"));
        }
        let error = preference_loss("dpo").unwrap_err();
        assert!(error.to_string().contains("dpo_sigmoid"), "{error}");
    }

    #[test]
    fn a_side_without_tokens_is_reported_by_its_row() {
        let sides = |rows: &[usize]| check_both_sides("loss", &MiniBatch::new(rows.to_vec()));
        assert_eq!(sides(&[0, 1, 4, 5]), Ok(()));
        let empty = |row| Err(AlgoError::EmptyRow { loss: "loss", row });
        assert_eq!(sides(&[0, 1, 3]), empty(2));
        assert_eq!(sides(&[0, 1, 2]), empty(3));
    }
}
