//! Odds-ratio preference optimisation: supervised training with a preference term.

use verl_algos::losses::{OrpoOdds, RowLoss, orpo};
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError};

use super::Loss;
use super::judged::{of_pairs, pair_fault};
use crate::settings::{refusal, settings};

settings! {
    /// ORPO: the chosen answer is imitated, and its odds are compared with those of the rejected one; no reference.
    Orpo {
        /// β: weight of the odds ratio; λ in the paper.
        beta: f64 = 0.1,
    }
}

impl PartConfig for Orpo {
    type Slot = Loss;
    const KIND: &'static str = "orpo";
    const SUMMARY: &'static str = "ORPO on pairs: imitation and odds ratio, no reference";

    fn build(&self, context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let odds = OrpoOdds { beta: self.beta };
        let mut faults = Vec::from_iter(pair_fault(Self::KIND, context));
        faults.extend(odds.check().err().map(|error| refusal("beta", &error)));
        if faults.is_empty() {
            Ok(of_pairs(orpo(self.beta), Some(odds.id())))
        } else {
            Err(faults)
        }
    }
}
