//! The bounds of a clip, and the check of their order.

use verl_words::stage::ConfigError;

/// The bounds of a policy loss that clips a ratio to the range from `1 − low` to `1 + high`, or another distance to the
/// range from `−low` to `high`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipBounds {
    /// Setting `clip_low`.
    pub low: f64,
    /// Setting `clip_high`.
    pub high: f64,
    /// Cap of the ratio outside the clip range, if there is one: the name of its setting, and its value.
    pub cap: Option<(&'static str, f64)>,
}

impl ClipBounds {
    /// Bounds without a cap.
    pub fn new(low: f64, high: f64) -> Self {
        ClipBounds {
            low,
            high,
            cap: None,
        }
    }

    /// Refuses bounds that are out of order: `clip_low` above `clip_high`, and a cap inside the clip range, where only the
    /// cap would ever apply.
    ///
    /// The maths accepts such bounds; in a pipeline they are a mistake.
    pub(super) fn faults(self) -> Vec<ConfigError> {
        let ClipBounds { low, high, cap } = self;
        let mut faults = Vec::new();
        if low > high {
            faults.push(ConfigError::new(
                "clip_low",
                format!("is {low}, above clip_high = {high}: the bounds are out of order"),
                "set `clip_low` to `clip_high` or less: a clip leaves at least as much room upwards as downwards",
            ));
        }
        if let Some((setting, cap)) = cap.filter(|(_, cap)| *cap <= 1.0 + high) {
            faults.push(ConfigError::new(
                setting,
                format!(
                    "is {cap}, inside the clip range, which ends at 1 + clip_high = {}",
                    1.0 + high
                ),
                "raise it above that, or lower `clip_high`",
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use verl_declare::part::PartConfig;
    use verl_words::stage::BuildContext;

    use crate::losses::*;

    fn refused_settings<L: PolicyLoss>(policy: L) -> Vec<String> {
        let loss = PolicyObjective {
            policy,
            ..PolicyObjective::default()
        };
        let faults = loss
            .build(&BuildContext::default())
            .err()
            .unwrap_or_default();
        faults.into_iter().map(|fault| fault.setting).collect()
    }

    #[test]
    fn bounds_of_a_clip_are_in_order() {
        #[track_caller]
        fn check<L: PolicyLoss>() {
            let swapped = serde_json::json!({ "clip_low": 0.9, "clip_high": 0.1 });
            let policy: L = serde_json::from_value(swapped).unwrap();
            assert_eq!(refused_settings(policy), ["clip_low"], "{}", L::KIND);
        }
        check::<Cispo>();
        check::<ClipCov>();
        check::<DppoKl>();
        check::<DppoTv>();
        check::<Gmpo>();
        check::<Grpo>();
        check::<Gspo>();
        check::<TrlGrpo>();
        check::<TrlGspo>();
        check::<TrlRloo>();
    }

    #[test]
    fn a_cap_is_outside_the_clip_range() {
        let none: [&str; 0] = [];
        let capped = |dual_clip| {
            refused_settings(Grpo {
                clip_high: 0.28,
                dual_clip,
                ..Grpo::default()
            })
        };
        assert_eq!(capped(1.1), ["dual_clip"]);
        assert_eq!(capped(1.28), ["dual_clip"]);
        assert_eq!(capped(1.3), none);
        // 0 means no cap.
        assert_eq!(capped(0.0), none);
        let capped = |delta| {
            refused_settings(TrlGrpo {
                clip_high: 0.28,
                delta,
                ..TrlGrpo::default()
            })
        };
        assert_eq!(capped(Some(1.1)), ["delta"]);
        assert_eq!(capped(Some(4.0)), none);
        assert_eq!(capped(None), none);
    }
}
