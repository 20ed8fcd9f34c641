//! The inputs that a loss declares.

/// An input of a loss from the mini-batch or the model, besides the current log-probs of the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LossInput {
    /// Advantages.
    Advantages,
    /// Log-probs at the start of the update, for a ratio.
    OldLogProbs,
    /// Log-probs of the reference policy.
    RefLogProbs,
    /// Current entropies of the policy.
    Entropies,
    /// Log-probs of the policy at the start of the optimiser step, for rules over the entire mini-batch.
    CurrentLogProbs,
    /// Entropies of the policy at the same time.
    CurrentEntropies,
    /// Uniform draws, for random subsets.
    Draws,
    /// Current values of a critic, or scores of a reward model.
    Values,
    /// Values of the critic at the start of the update.
    OldValues,
    /// Returns, a critic's targets.
    Returns,
    /// Which rows are desirable.
    Desirable,
    /// KTO's z₀, of mismatched prompts and responses.
    KlBaseline,
}

#[cfg(test)]
mod tests {
    use super::LossInput::*;
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::{MicroBatch, MiniBatch};
    use crate::losses::{
        EntropyBonus, GpgLoss, OTHER_LOSSES, Objective, POLICY_LOSSES, PREFERENCE_LOSSES,
        RewardModelLoss, TOKEN_FILTERS,
    };
    use crate::preferences::Preferences;
    use crate::tensor::test::constant;

    /// Whether the objective has a loss with these inputs.
    fn works(objective: &Objective, declared: &[LossInput]) -> bool {
        let column =
            |input: LossInput, values: [f64; 3]| declared.contains(&input).then(|| values.to_vec());
        let batch = MiniBatch {
            old_log_probs: column(OldLogProbs, [-1.0, -2.0, -0.5]),
            advantages: column(Advantages, [1.0, -1.0, 0.5]),
            ref_log_probs: column(RefLogProbs, [-1.5, -1.0, -0.25]),
            current_log_probs: column(CurrentLogProbs, [-1.25, -1.75, -0.5]),
            current_entropies: column(CurrentEntropies, [0.5, 1.0, 0.25]),
            draws: column(Draws, [0.1, 0.7, 0.3]),
            old_values: column(OldValues, [0.2, 0.1, -0.3]),
            returns: column(Returns, [1.0, 1.0, 0.0]),
            preferences: Preferences {
                desirable: declared.contains(&Desirable).then(|| vec![true, false]),
                kl_baseline: declared.contains(&KlBaseline).then_some(0.25),
                ..Preferences::default()
            },
            ..MiniBatch::new(vec![0, 0, 1])
        };
        let output = |input, values: [f64; 3]| declared.contains(&input).then(|| constant(&values));
        let whole = MicroBatch {
            entropies: output(Entropies, [0.5, 1.0, 0.25]),
            values: output(Values, [0.3, 0.4, 0.5]),
            ..batch.whole(constant(&[-1.25, -1.75, -0.5]), None)
        };
        let prepared = objective.prepare(&batch);
        prepared.and_then(|prepared| prepared.loss(&whole)).is_ok()
    }

    #[track_caller]
    fn check(name: &str, objective: &Objective) {
        let declared = objective.inputs();
        assert!(
            works(objective, &declared),
            "{name} reads more than {declared:?}"
        );
        for left_out in &declared {
            let fewer: Vec<_> = declared.iter().copied().filter(|i| i != left_out).collect();
            assert!(
                !works(objective, &fewer),
                "{name} does not read {left_out:?}"
            );
        }
    }

    #[test]
    fn every_loss_reads_the_inputs_that_it_declares() {
        let empty = || Objective::new(Aggregation::TokenMean);
        for (name, make) in POLICY_LOSSES.iter().chain(OTHER_LOSSES) {
            check(name, &empty().with_boxed(1.0, make()));
        }
        for (name, make) in PREFERENCE_LOSSES {
            check(name, &empty().with_boxed_rows(1.0, make()));
        }
        for (name, make) in TOKEN_FILTERS {
            let filtered = empty().with_filters(1.0, GpgLoss, vec![make()]);
            check(name, &filtered);
        }
    }

    #[test]
    fn an_objective_reads_what_its_terms_read() {
        assert_eq!(Objective::new(Aggregation::TokenMean).inputs(), []);
        let both = Objective::new(Aggregation::TokenMean)
            .with(1.0, GpgLoss)
            .with(0.1, EntropyBonus)
            .with_rows(1.0, RewardModelLoss::default());
        assert_eq!(both.inputs(), [Advantages, Entropies, Values]);
    }
}
