//! Contrastive preference optimisation and SimPO: pairs without a reference.

use verl_algos::losses::{Cpo as Maths, CpoLoss, RowLoss};
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError};

use super::judged::{of_pairs, pair_fault};
use super::{CpoLossName, Loss};
use crate::settings::{coefficient_fault, refusal, settings};

settings! {
    /// CPO: the log-probs of a pair's answers are compared, and the chosen one is imitated; no reference.
    Cpo {
        /// Loss of a pair.
        variant: CpoLossName = CpoLossName::Sigmoid,
        /// β: factor on the difference of log-probs.
        beta: f64 = 0.1,
        /// ε: assumed share of pairs with a wrong label; for `sigmoid`.
        label_smoothing: f64 = 0.0,
        /// Coefficient of the negative log-likelihood of chosen answers.
        nll_coef: f64 = 1.0,
    }
}

settings! {
    /// SimPO: the mean log-probs of a pair's answers are compared, with a margin; no reference.
    SimPo {
        /// β: factor on the difference of mean log-probs.
        beta: f64 = 2.0,
        /// γ: target margin of rewards; the paper's γ/β times β.
        gamma: f64 = 1.0,
        /// ε: assumed share of pairs with a wrong label.
        label_smoothing: f64 = 0.0,
        /// α of AlphaPO, which reshapes rewards; absent or 0: SimPO.
        alphapo_alpha: Option<f64> = None,
        /// Coefficient of the negative log-likelihood of chosen answers, which CPO-SimPO adds.
        nll_coef: f64 = 0.0,
    }
}

impl PartConfig for Cpo {
    type Slot = Loss;
    const KIND: &'static str = "cpo";
    const SUMMARY: &'static str = "CPO on pairs: contrast and imitation, no reference";

    fn build(&self, context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let maths = Maths {
            beta: self.beta,
            label_smoothing: self.label_smoothing,
            ..Maths::new(self.variant.into())
        };
        build(maths, self.nll_coef, Self::KIND, context)
    }
}

impl PartConfig for SimPo {
    type Slot = Loss;
    const KIND: &'static str = "simpo";
    const SUMMARY: &'static str = "SimPO on pairs: mean log-probs with a margin, no reference";

    fn build(&self, context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let maths = Maths {
            loss: CpoLoss::Simpo { gamma: self.gamma },
            beta: self.beta,
            label_smoothing: self.label_smoothing,
            alphapo_alpha: self.alphapo_alpha,
        };
        build(maths, self.nll_coef, Self::KIND, context)
    }
}

fn build(
    maths: Maths,
    nll_coef: f64,
    kind: &str,
    context: &BuildContext,
) -> Result<Loss, Vec<ConfigError>> {
    let mut faults = Vec::from_iter(pair_fault(kind, context));
    faults.extend(coefficient_fault("nll_coef", nll_coef));
    faults.extend(maths.check().err().map(|error| {
        let mut fault = refusal("variant", &error);
        if fault.setting == "simpo_gamma" {
            fault.setting = "gamma".to_owned();
        }
        fault
    }));
    if faults.is_empty() {
        Ok(of_pairs(maths.objective(nll_coef), Some(maths.id())))
    } else {
        Err(faults)
    }
}
