//! Direct preference optimisation and its relatives: pairs against a reference.

use std::collections::BTreeMap;

use verl_algos::losses::{Dpo as Maths, FDivergence, PreferenceLoss, RowLoss};
use verl_algos::{AlgoError, losses::Objective};
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError};

use super::judged::{of_pairs, pair_fault};
use super::loss_state::RunningMean;
use super::{FDivergenceName, Loss, LossState, PreferenceLossName};
use crate::settings::{refusal, settings};

settings! {
    /// DPO and its relatives on pairs, with log-probs of a reference.
    Dpo {
        /// Loss of a pair.
        variant: PreferenceLossName = PreferenceLossName::Sigmoid,
        /// Weights of several variants by name, whose weighted sum replaces `variant`. MPO is
        /// `{ sigmoid = 0.8, bco_pair = 0.2, sft = 1.0 }`.
        #[schemars(extend("propertyNames" = { "enum": PreferenceLossName::ALL }))]
        mixture: BTreeMap<PreferenceLossName, f64> = BTreeMap::new(),
        /// β: strength of the penalty on departures from the reference.
        beta: f64 = 0.1,
        /// ε: assumed share of pairs with a wrong label, for `aot`, `aot_unpaired`, `cdpo`, `exo_pair` and `robust`;
        /// the default of each when absent.
        label_smoothing: Option<f64> = None,
        /// τ of `discopop`; 0.05 when absent.
        discopop_tau: Option<f64> = None,
        /// f-divergence that keeps the policy near the reference.
        divergence: FDivergenceName = FDivergenceName::ReverseKl,
        /// α of `alpha_divergence`.
        divergence_alpha: Option<f64> = None,
        /// LD-DPO: weight in [0, 1] of tokens beyond the length of the pair's shorter answer; 1 when absent.
        ld_alpha: Option<f64> = None,
        /// WPO: weights each pair by how likely the policy is to generate both its answers, e^{mean(ℓ − log Σ π²)} of
        /// each; takes one more forward pass per optimiser step.
        wpo: bool = false,
        /// Whether the δ of `bco_pair` is the mean of all implicit rewards before the current optimiser step, as in its
        /// paper; otherwise it is 0, as in TRL's DPO.
        reward_shift: bool = false,
    }
}

impl Dpo {
    /// Names of the variants with their weights.
    fn weights(&self) -> Vec<(f64, PreferenceLossName)> {
        if self.mixture.is_empty() {
            return vec![(1.0, self.variant)];
        }
        let each = self.mixture.iter();
        each.map(|(name, weight)| (*weight, *name)).collect()
    }

    /// The variants with ε and τ as set; refuses an ε or τ that no variant uses.
    fn variants(&self) -> Result<Vec<(f64, PreferenceLoss)>, Vec<ConfigError>> {
        let mut faults = Vec::new();
        if !self.mixture.is_empty() && self.variant != Dpo::default().variant {
            faults.push(ConfigError::new(
                "variant",
                format!(
                    "is `{}`, but `mixture` is set and replaces it",
                    self.variant
                ),
                "remove one of the two, or give the variant a weight in `mixture`",
            ));
        }
        let (mut smoothed, mut has_tau) = (false, false);
        let mut conflict = None;
        let mut variants = Vec::new();
        for (weight, name) in self.weights() {
            if !(weight > 0.0 && weight.is_finite()) {
                let reason = format!("sets the weight of `{name}` to {weight}");
                faults.push(ConfigError::new("mixture", reason, "use a number above 0"));
            }
            let mut variant = PreferenceLoss::from(name);
            if let (PreferenceLoss::DiscoPop { tau }, Some(set)) = (&mut variant, self.discopop_tau)
            {
                (*tau, has_tau) = (set, true);
            }
            if let Some(epsilon) = self.label_smoothing {
                match variant.with_label_smoothing(epsilon) {
                    Ok(with) => (variant, smoothed) = (with, true),
                    Err(error @ AlgoError::Conflict { .. }) => conflict = Some(error),
                    Err(error) => {
                        smoothed = true;
                        faults.push(refusal("label_smoothing", &error));
                    }
                }
            }
            variants.push((weight, variant));
        }
        faults.extend(
            conflict
                .filter(|_| !smoothed)
                .map(|error| refusal("label_smoothing", &error)),
        );
        if self.discopop_tau.is_some() && !has_tau {
            faults.push(ConfigError::new(
                "discopop_tau",
                "is set, but `discopop` is not used",
                "remove it, or set `variant = \"discopop\"`",
            ));
        }
        if faults.is_empty() {
            Ok(variants)
        } else {
            Err(faults)
        }
    }
}

impl Dpo {
    /// Refuses a running mean of rewards that no variant reads, or of rewards that the divergence does not use.
    fn shift_fault(&self, variants: &[(f64, PreferenceLoss)]) -> Option<ConfigError> {
        let reads = |(_, loss): &(f64, PreferenceLoss)| *loss == PreferenceLoss::BcoPair;
        let (reason, help) = if !variants.iter().any(reads) {
            (
                "is the δ of `bco_pair`, but `bco_pair` is not used",
                "remove it, or set `variant = \"bco_pair\"`",
            )
        } else if self.divergence != Dpo::default().divergence {
            (
                "is a mean of log-ratios, but a `divergence` other than `reverse_kl` has other rewards",
                "remove one of the two",
            )
        } else {
            return None;
        };
        self.reward_shift
            .then(|| ConfigError::new("reward_shift", reason, help))
    }
}

impl PartConfig for Dpo {
    type Slot = Loss;
    const KIND: &'static str = "dpo";
    const SUMMARY: &'static str = "DPO and its relatives on pairs, with log-probs of a reference";

    fn build(&self, context: &BuildContext) -> Result<Loss, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(pair_fault(Self::KIND, context));
        let variants = self.variants().map_err(|own| faults.extend(own));
        let divergence = FDivergence::named(self.divergence, self.divergence_alpha);
        let divergence = divergence.map_err(|error| {
            let mut fault = refusal("divergence", &error);
            if fault.setting == "alpha" {
                fault.setting = "divergence_alpha".to_owned();
            }
            faults.push(fault);
        });
        let (Ok(variants), Ok(divergence)) = (variants, divergence) else {
            return Err(faults);
        };
        let maths = |loss| Maths {
            beta: self.beta,
            divergence,
            ld_alpha: self.ld_alpha,
            wpo: self.wpo,
            ..Maths::new(loss)
        };
        for (_, loss) in &variants {
            let refused = maths(*loss).check().err();
            let refused = refused.map(|error| refusal("variant", &error));
            // An invalid β is invalid in every term; it is reported once.
            faults.extend(refused.filter(|fault| !faults.contains(fault)));
        }
        faults.extend(self.shift_fault(&variants));
        if !faults.is_empty() {
            return Err(faults);
        }
        let objective: Objective = maths(PreferenceLoss::Sigmoid).mixture(&variants);
        let own = match variants[..] {
            [(_, loss)] => Some(maths(loss).id()),
            _ => None,
        };
        Ok(Loss {
            state: LossState {
                reward_shift: self.reward_shift.then(RunningMean::default),
                ..LossState::default()
            },
            reads_sum_pi_squared: self.wpo,
            ..of_pairs(objective, own)
        })
    }
}
