//! Estimators on the rewards of several functions, such as one for the form of an answer and one for its content.
//!
//! Each function is a `reward` stage that writes its rewards under its own key:
//!
//! ```toml
//! [[stages]]
//! kind = "reward"
//! name = "form"
//! rename = { rewards = "form_rewards" }
//!
//! [[stages]]
//! kind = "advantages"
//! estimator = { kind = "gdpo", components = ["form_rewards", "rewards"], weights = [0.5, 1.0] }
//! ```

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::advantages as maths;
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError};

use super::{Components, Estimator};
use crate::settings::settings;

/// The deviation that advantages are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageScale {
    /// The deviation over the prompt's responses.
    #[default]
    Group,
    /// The deviation over all responses of the step.
    Batch,
    /// Not divided.
    None,
}

/// Whether the rewards of several functions are summed before or after they are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ComponentOrder {
    /// Rewards are summed, and the sum is normalised.
    #[default]
    SumThenNormalize,
    /// Each function is normalised, and the sum is normalised again over the step. `scale` is ignored.
    NormalizeThenSum,
}

settings! {
    /// Each reward function is normalised separately by GRPO; the sum is whitened over the step (GDPO).
    Gdpo {
        /// Keys with the rewards of each function, one per `reward` stage.
        components: Vec<String> = vec!["rewards".to_owned()],
        /// Weight of each key; all 1 when absent.
        weights: Option<Vec<f64>> = None,
        /// Whether each function's advantages are divided by the deviation of the prompt's responses.
        normalise: bool = true,
        /// ε added to that deviation.
        epsilon: f64 = 1e-6,
    }
}

settings! {
    /// GRPO as in TRL: the standard deviation divides by n − 1, and there may be several reward functions.
    GrpoTrl {
        /// Keys with the rewards of each function, one per `reward` stage; empty: only `rewards`.
        components: Vec<String> = Vec::new(),
        /// Weight of each key; all 1 when absent.
        weights: Option<Vec<f64>> = None,
        /// What advantages are divided by: the deviation of the `group`, of the `batch`, or `none`.
        scale: AdvantageScale = AdvantageScale::Group,
        /// `sum_then_normalize`, or `normalize_then_sum` so that no function dominates the others.
        order: ComponentOrder = ComponentOrder::SumThenNormalize,
        /// ε added to deviations.
        epsilon: f64 = 1e-4,
    }
}

impl PartConfig for Gdpo {
    type Slot = Estimator;
    const KIND: &'static str = "gdpo";
    const SUMMARY: &'static str = "each reward function normalised separately by GRPO, and the sum whitened over the step (GDPO)";

    fn build(&self, _: &BuildContext) -> Result<Estimator, Vec<ConfigError>> {
        let mut faults = faults(&self.components, self.weights.as_deref());
        if self.components.is_empty() {
            faults.push(ConfigError::new(
                "components",
                "is empty, so there is no reward",
                "list the key of each reward function, for example `components = [\"rewards\"]`",
            ));
        }
        let estimator = Estimator::new(maths::Gdpo {
            weights: self.weights.clone(),
            epsilon: self.normalise.then_some(self.epsilon),
        });
        on_components(estimator, faults, &self.components, self.weights.as_deref())
    }
}

impl PartConfig for GrpoTrl {
    type Slot = Estimator;
    const KIND: &'static str = "grpo_trl";
    const SUMMARY: &'static str = "GRPO as in TRL: the standard deviation divides by n - 1, and there may be several reward functions";

    fn build(&self, _: &BuildContext) -> Result<Estimator, Vec<ConfigError>> {
        let mut faults = faults(&self.components, self.weights.as_deref());
        if self.components.is_empty() && self.weights.is_some() {
            faults.push(ConfigError::new(
                "weights",
                "is set, but `components` is empty",
                "list the key of each reward function in `components`, or remove `weights`",
            ));
        }
        let estimator = Estimator::new(maths::GrpoTrl {
            weights: self.weights.clone(),
            scale: match self.scale {
                AdvantageScale::Group => maths::AdvantageScale::Group,
                AdvantageScale::Batch => maths::AdvantageScale::Batch,
                AdvantageScale::None => maths::AdvantageScale::None,
            },
            order: match self.order {
                ComponentOrder::SumThenNormalize => maths::ComponentOrder::SumThenNormalize,
                ComponentOrder::NormalizeThenSum => maths::ComponentOrder::NormalizeThenSum,
            },
            epsilon: self.epsilon,
        });
        on_components(estimator, faults, &self.components, self.weights.as_deref())
    }
}

/// Errors in keys and weights.
fn faults(keys: &[String], weights: Option<&[f64]>) -> Vec<ConfigError> {
    let mut faults = Vec::new();
    let twice = |(at, key): &(usize, &String)| keys[..*at].contains(key);
    if let Some((_, key)) = keys.iter().enumerate().find(twice) {
        faults.push(ConfigError::new(
            "components",
            format!("contains `{key}` twice"),
            "list each key once, and weight it with `weights`",
        ));
    }
    let Some(weights) = weights else {
        return faults;
    };
    if weights.len() != keys.len() && !keys.is_empty() {
        faults.push(ConfigError::new(
            "weights",
            format!(
                "has {} numbers for {} components",
                weights.len(),
                keys.len()
            ),
            "set one weight for each key of `components`, in the same order",
        ));
    }
    if let Some(weight) = weights.iter().find(|weight| !weight.is_finite()) {
        faults.push(ConfigError::new(
            "weights",
            format!("contains {weight}"),
            "use finite numbers",
        ));
    }
    faults
}

fn on_components(
    estimator: Result<Estimator, Vec<ConfigError>>,
    mut faults: Vec<ConfigError>,
    keys: &[String],
    weights: Option<&[f64]>,
) -> Result<Estimator, Vec<ConfigError>> {
    match estimator {
        Ok(estimator) if faults.is_empty() => Ok(estimator.of_components(Components {
            keys: keys.to_vec(),
            weights: weights.map_or_else(|| vec![1.0; keys.len()], <[f64]>::to_vec),
        })),
        Ok(_) => Err(faults),
        Err(errors) => {
            faults.extend(errors);
            Err(faults)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_refused(part: &impl PartConfig<Slot = Estimator>, expected: &[&str]) {
        let faults = part.build(&BuildContext::default()).expect_err("refused");
        let settings: Vec<&str> = faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(settings, expected, "{faults:?}");
    }

    #[test]
    fn keys_and_weights_go_together() {
        let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect();
        let gdpo = |components: &[&str], weights: Option<&[f64]>| Gdpo {
            components: keys(components),
            weights: weights.map(<[f64]>::to_vec),
            ..Gdpo::default()
        };
        check_refused(&gdpo(&[], None), &["components"]);
        check_refused(&gdpo(&["a", "b", "a"], None), &["components"]);
        check_refused(&gdpo(&["a"], Some(&[1.0, 2.0])), &["weights"]);
        check_refused(&gdpo(&["a"], Some(&[f64::NAN])), &["weights"]);
        let part = GrpoTrl {
            weights: Some(vec![1.0]),
            epsilon: -1.0,
            ..GrpoTrl::default()
        };
        check_refused(&part, &["weights", "epsilon"]);
        let both = gdpo(&["a", "b"], Some(&[0.5, 2.0]));
        let built = both.build(&BuildContext::default()).expect("valid");
        assert_eq!(built.components().keys, ["a", "b"]);
        assert_eq!(built.components().weights, [0.5, 2.0]);
    }
}
