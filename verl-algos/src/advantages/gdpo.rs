//! Several reward functions, each normalised on its own.

use super::grpo::check_epsilon;
use super::inputs::component_weights;
use super::{AdvantageEstimator, AdvantageInputs, Advantages, EstimatorInput, grpo_advantages};
use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::masked;

/// GDPO: A_k by GRPO for each reward function k, then Σ_k w_k A_k on each action token, whitened over the batch.
///
/// No function dominates the others, however large its numbers are. Long rows weigh more in the whitening. A row that a
/// function did not score is excluded from that function's statistics and receives nothing from it.
///
/// # Shapes
/// Components `[K, B]`, groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Errors
/// No `reward_components`; different numbers of weights and components; fewer than two action tokens in the batch.
/// # Differences
/// verl first puts a component's score on a token, and thus on the wrong one for a row without tokens; here scores of
/// rows stay scores of rows.
/// # Source
/// Liu et al. 2026, arXiv:2601.05242; verl `compute_gdpo_outcome_advantage`.
#[derive(Debug, Clone, PartialEq)]
pub struct Gdpo {
    /// w_k; `None` for 1 each.
    pub weights: Option<Vec<f64>>,
    /// Added to the deviation of a group; with `None` there is no division by the deviation.
    pub epsilon: Option<f64>,
}

impl Default for Gdpo {
    fn default() -> Gdpo {
        Gdpo {
            weights: None,
            epsilon: Some(1e-6),
        }
    }
}

impl AdvantageEstimator for Gdpo {
    fn name(&self) -> &'static str {
        "gdpo"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::MiniBatch
    }

    fn inputs(&self) -> &'static [EstimatorInput] {
        &[EstimatorInput::Groups, EstimatorInput::RewardComponents]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_epsilon(self.epsilon)
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let components = inputs.components(self.name())?;
        let weights = component_weights(self.weights.as_deref(), components.len())?;
        let groups = inputs.group_ids(self.name())?;
        let mut rows = vec![0.0; inputs.num_rows()];
        for (component, weight) in components.iter().zip(weights) {
            let own = grpo_advantages(component, groups, self.epsilon)?;
            rows.iter_mut().zip(own).for_each(|(a, b)| *a += weight * b);
        }
        let tokens = inputs.actions.packed_rows();
        let summed: Vec<f64> = tokens.iter().map(|&row| rows[row]).collect();
        Ok(Advantages {
            advantages: inputs.actions.scatter(&masked::whiten(&summed)?)?,
            returns: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check;
    use crate::ragged::Ragged;

    fn estimate(gdpo: &Gdpo, components: &[Vec<Option<f64>>]) -> Result<Vec<f64>, AlgoError> {
        let actions = Ragged::<bool>::from_rows([vec![true], vec![true, true], vec![true]]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.groups = Some(&[1, 1, 1]);
        inputs.reward_components = Some(components);
        Ok(gdpo.estimate(&inputs)?.advantages.values().to_vec())
    }

    #[test]
    fn by_hand() {
        // A of [0, 1, 2] is -1, 0, 1; of [200, 100, 0] 1, 0, -1. With weights 2 and 1 the tokens have -1, 0, 0, 1,
        // whose variance is 2/3.
        let gdpo = Gdpo {
            weights: Some(vec![2.0, 1.0]),
            epsilon: Some(0.0),
        };
        let components = [
            [0.0, 1.0, 2.0].map(Some).to_vec(),
            [200.0, 100.0, 0.0].map(Some).to_vec(),
        ];
        let one = 1.5f64.sqrt();
        check(
            &estimate(&gdpo, &components).unwrap(),
            &[-one, 0.0, 0.0, one],
        );
    }

    #[test]
    fn a_function_ignores_rows_that_it_did_not_score() {
        let gdpo = Gdpo {
            epsilon: None,
            ..Gdpo::default()
        };
        let components = [vec![Some(0.0), None, Some(2.0)]];
        let one = 1.5f64.sqrt();
        check(
            &estimate(&gdpo, &components).unwrap(),
            &[-one, 0.0, 0.0, one],
        );
    }

    #[test]
    fn rejects_invalid_inputs() {
        let gdpo = Gdpo {
            weights: Some(vec![1.0, 1.0]),
            ..Gdpo::default()
        };
        let error = estimate(&gdpo, &[vec![Some(1.0); 3]]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`weights` has 2 reward components, expected 1"
        );
        let gdpo = Gdpo::default();
        assert!(estimate(&gdpo, &[]).is_err());
        assert!(estimate(&gdpo, &[vec![Some(1.0); 2]]).is_err());
        assert!(estimate(&gdpo, &[vec![Some(f64::NAN); 3]]).is_err());
    }
}
