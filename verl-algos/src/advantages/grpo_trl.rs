//! GRPO as in TRL: several reward functions, and a choice of how advantages are scaled.

use super::inputs::component_weights;
use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores, group_rows};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// The deviation by which advantages are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdvantageScale {
    /// The deviation of the row's group.
    #[default]
    Group,
    /// The deviation of all scored rows.
    Batch,
    /// No division.
    None,
}

/// Whether reward functions are summed before they are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ComponentOrder {
    /// r = Σ_k w_k r_k, then A = (r − μ_g)/(σ + ε).
    #[default]
    SumThenNormalize,
    /// a_k = (r_k − μ_gk)/(σ_gk + ε), then A = Σ_k w_k a_k, normalised over the batch. The scale is ignored.
    NormalizeThenSum,
}

/// GRPO by TRL's rules: A = (Σ_k w_k r_k − μ_g)/(σ + ε), σ of the group or of the batch, or no division; or each
/// function normalised before the sum ([`ComponentOrder`]).
///
/// Reward functions are the `reward_components`, or else only the outcome score. Deviations are Bessel's (n − 1).
/// Missing scores are left out: a function that did not score a row is left out of the row's sum, and a row that no
/// function scored is left out of all statistics. Its advantage is 0, and so is that of a row that is the only scored
/// one of its group. Equal scores give exactly 0.
///
/// # Shapes
/// Components `[K, B]` or scores `[B]`, groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Errors
/// [`AlgoError::TooFew`] for a group of one; lengths that differ; scores that are not finite.
/// # Differences
/// [`Grpo`](super::Grpo) adds ε = 1e-6 and keeps the score of a lone row, as verl does.
/// # Source
/// TRL `GRPOTrainer`; normalising first: Liu et al. 2026, arXiv:2601.05242.
#[derive(Debug, Clone, PartialEq)]
pub struct GrpoTrl {
    /// w_k; `None` for 1 each.
    pub weights: Option<Vec<f64>>,
    /// The scale of advantages.
    pub scale: AdvantageScale,
    /// The order of sum and normalisation.
    pub order: ComponentOrder,
    /// Added to deviations.
    pub epsilon: f64,
}

impl Default for GrpoTrl {
    fn default() -> GrpoTrl {
        GrpoTrl {
            weights: None,
            scale: AdvantageScale::Group,
            order: ComponentOrder::SumThenNormalize,
            epsilon: 1e-4,
        }
    }
}

impl AdvantageEstimator for GrpoTrl {
    fn name(&self) -> &'static str {
        "grpo_trl"
    }

    fn cut_unit(&self) -> CutUnit {
        match (self.order, self.scale) {
            (ComponentOrder::NormalizeThenSum, _) | (_, AdvantageScale::Batch) => {
                CutUnit::MiniBatch
            }
            _ => CutUnit::Group,
        }
    }

    fn smallest_group(&self) -> usize {
        2
    }

    fn check(&self) -> Result<(), AlgoError> {
        let valid = self.epsilon >= 0.0 && self.epsilon.is_finite();
        let rule = "it must be a finite number of at least 0";
        check_setting("epsilon", self.epsilon, valid, rule)
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        inputs.of_rows(&self.row_advantages(inputs)?)
    }
}

impl GrpoTrl {
    /// Advantage of each row, `[B]`.
    ///
    /// # Errors
    /// The same as the estimator.
    pub fn row_advantages(&self, inputs: &AdvantageInputs<'_>) -> Result<Vec<f64>, AlgoError> {
        self.check()?;
        let components = match inputs.reward_components {
            Some(_) => inputs.components(self.name())?.to_vec(),
            None => vec![inputs.outcome_scores(self.name())?],
        };
        let weights = component_weights(self.weights.as_deref(), components.len())?;
        let groups = inputs.group_ids(self.name())?;
        check_groups(self.name(), groups)?;
        match self.order {
            ComponentOrder::SumThenNormalize => {
                self.normalize(weighted_sums(&components, &weights), groups, self.scale)
            }
            ComponentOrder::NormalizeThenSum => {
                let normalized = components.iter().map(|component| {
                    let scale = AdvantageScale::Group;
                    let own = self.normalize(component.clone(), groups, scale)?;
                    let scored = component.iter().zip(own);
                    Ok(scored.map(|(score, a)| score.map(|_| a)).collect())
                });
                let normalized = normalized.collect::<Result<Vec<Vec<_>>, AlgoError>>()?;
                let sums = weighted_sums(&normalized, &weights);
                Ok(standardized(&sums, self.epsilon))
            }
        }
    }

    /// (s − μ_g)/(σ + ε) of scored rows.
    fn normalize(
        &self,
        scores: Vec<Option<f64>>,
        groups: &[u64],
        scale: AdvantageScale,
    ) -> Result<Vec<f64>, AlgoError> {
        let of_batch = deviation(&scores.iter().flatten().copied().collect::<Vec<f64>>());
        GroupScores::from_parts(scores, groups)?.map_groups(|_, scores| {
            let mean = masked::mean(scores);
            let scale = match scale {
                AdvantageScale::Group => deviation(scores) + self.epsilon,
                AdvantageScale::Batch => of_batch + self.epsilon,
                AdvantageScale::None => 1.0,
            };
            let centred = scores.iter().map(|s| s - mean);
            Ok(match scores {
                [_] => vec![0.0],
                _ => centred.map(|a| a / scale).collect(),
            })
        })
    }
}

/// Rejects a group of one: there is nothing to compare its row with.
pub(super) fn check_groups(algorithm: &'static str, groups: &[u64]) -> Result<(), AlgoError> {
    match group_rows(groups).iter().find(|rows| rows.len() < 2) {
        None => Ok(()),
        Some(rows) => Err(AlgoError::TooFew {
            algorithm,
            unit: "responses to a prompt",
            needed: 2,
            got: rows.len(),
        }),
    }
}

/// (a − mean)/(std + ε) over the scored rows; 0 for the others.
pub(super) fn standardized(rows: &[Option<f64>], epsilon: f64) -> Vec<f64> {
    let there: Vec<f64> = rows.iter().flatten().copied().collect();
    let (mean, scale) = (masked::mean(&there), deviation(&there) + epsilon);
    let equal = there.windows(2).all(|pair| pair[0] == pair[1]);
    let each = rows.iter().map(|row| match row {
        Some(a) if !equal => (a - mean) / scale,
        _ => 0.0,
    });
    each.collect()
}

/// Bessel's deviation; 0 for fewer than two numbers.
fn deviation(values: &[f64]) -> f64 {
    masked::variance(values).map_or(0.0, f64::sqrt)
}

/// Σ_k w_k r_k over the functions that scored the row; `None` if none did.
fn weighted_sums(components: &[Vec<Option<f64>>], weights: &[f64]) -> Vec<Option<f64>> {
    let num_rows = components.first().map_or(0, Vec::len);
    let row = |b: usize| {
        let each = components.iter().zip(weights);
        let scored = each.filter_map(|(component, weight)| Some(weight * component[b]?));
        scored.reduce(|sum, next| sum + next)
    };
    (0..num_rows).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check;
    use crate::ragged::Ragged;

    fn estimate(
        grpo: &GrpoTrl,
        groups: &[u64],
        components: &[Vec<Option<f64>>],
    ) -> Result<Vec<f64>, AlgoError> {
        let actions = Ragged::<bool>::from_rows(vec![[true]; groups.len()]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.groups = Some(groups);
        inputs.reward_components = Some(components);
        grpo.row_advantages(&inputs)
    }

    #[test]
    fn by_hand() {
        let components = [
            vec![Some(1.0), Some(0.0), Some(4.0), Some(2.0)],
            vec![Some(1.0), None, Some(1.0), Some(1.0)],
        ];
        let mut grpo = GrpoTrl {
            weights: Some(vec![1.0, 3.0]),
            scale: AdvantageScale::None,
            epsilon: 0.0,
            ..GrpoTrl::default()
        };
        // Sums 4, 0 | 7, 5.
        let groups = [1, 1, 2, 2];
        let got = estimate(&grpo, &groups, &components).unwrap();
        check(&got, &[2.0, -2.0, 1.0, -1.0]);
        grpo.scale = AdvantageScale::Group;
        let half = 0.5f64.sqrt();
        let got = estimate(&grpo, &groups, &components).unwrap();
        check(&got, &[half, -half, half, -half]);
        grpo.scale = AdvantageScale::Batch;
        // Mean 4, deviations 0, -4, 3, 1: variance 26/3.
        let std = (26.0f64 / 3.0).sqrt();
        let got = estimate(&grpo, &groups, &components).unwrap();
        check(&got, &[2.0 / std, -2.0 / std, 1.0 / std, -1.0 / std]);
        // Each function normalised: ±√½ and ±√½; 0, - and 0, 0. Over the batch: variance ⅔.
        grpo.order = ComponentOrder::NormalizeThenSum;
        let one = (0.5f64 / (2.0 / 3.0)).sqrt();
        let got = estimate(&grpo, &groups, &components).unwrap();
        check(&got, &[one, -one, one, -one]);
    }

    #[test]
    fn missing_scores_are_left_out() {
        let components = [vec![Some(1.0), None, Some(3.0), None, Some(0.4)]];
        let grpo = GrpoTrl {
            scale: AdvantageScale::None,
            ..GrpoTrl::default()
        };
        let got = estimate(&grpo, &[5, 5, 5, 6, 6], &components).unwrap();
        assert_eq!(got, [-1.0, 0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn equal_scores_are_exactly_zero() {
        let components = [vec![Some(0.7); 3], vec![Some(0.1); 3]];
        for order in [
            ComponentOrder::SumThenNormalize,
            ComponentOrder::NormalizeThenSum,
        ] {
            let grpo = GrpoTrl {
                order,
                ..GrpoTrl::default()
            };
            assert_eq!(estimate(&grpo, &[1; 3], &components).unwrap(), [0.0; 3]);
        }
    }

    #[test]
    fn a_group_of_one_is_rejected() {
        let error = estimate(&GrpoTrl::default(), &[1], &[vec![Some(1.0)]]).unwrap_err();
        let text = "`grpo_trl` needs at least 2 responses to a prompt, got 1";
        assert_eq!(error.to_string(), text);
    }
}
