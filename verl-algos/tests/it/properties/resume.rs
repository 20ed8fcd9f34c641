//! Property 12, for the maths: training that is resumed at any step continues as if it had not stopped.
//!
//! Estimators, losses, filters and corrections keep no state between steps, so one that is created for a step must
//! return the same as one that has seen all steps before. Any state is a value that a checkpoint can store.
//! `tests/it/replay.rs` of the root package compares entire runs, with weights, optimiser and random draws.

use std::fmt::Debug;

use proptest::prelude::*;
use verl_algos::advantages::ESTIMATORS;
use verl_algos::entropy_control::{EntropyController, EntropySteering};
use verl_algos::kl_control::KlController;
use verl_algos::rewards::scaling::{RewardScale, RewardScaler, RunningMoments};

use super::preferences::{self, pairs};
use super::rollout_correction::{correct, corrections};
use super::rows::rows;
use super::{evaluate, objectives, tokens, whole};

/// Processes `values` in one go, and with a copy of the state taken after the first `at`.
#[track_caller]
fn check_state<S: Clone + PartialEq + Debug>(
    start: S,
    values: &[f64],
    at: usize,
    step: impl Fn(&mut S, f64),
) {
    let mut through = start.clone();
    values.iter().for_each(|value| step(&mut through, *value));
    let mut stopped = start;
    let (before, after) = values.split_at(at);
    before.iter().for_each(|value| step(&mut stopped, *value));
    let mut resumed = stopped.clone();
    after.iter().for_each(|value| step(&mut resumed, *value));
    assert_eq!(resumed, through);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn estimators_do_not_remember_steps(steps in prop::collection::vec(rows(), 1..4)) {
        for (name, make) in ESTIMATORS {
            let reused = make();
            for step in &steps {
                let fresh = make();
                prop_assert_eq!(step.estimate(reused.as_ref()), step.estimate(fresh.as_ref()), "{}", name);
            }
        }
    }

    #[test]
    fn losses_do_not_remember_steps(steps in prop::collection::vec(tokens(), 1..4)) {
        let reused = objectives(0.7);
        for step in &steps {
            let rows = whole(step);
            for ((name, reused), (_, fresh)) in reused.iter().zip(&objectives(0.7)) {
                prop_assert_eq!(evaluate(step, reused, &rows), evaluate(step, fresh, &rows), "{}", name);
            }
        }
    }

    #[test]
    fn preference_losses_do_not_remember_steps(steps in prop::collection::vec(pairs(), 1..4)) {
        let reused: Vec<_> = preferences::objectives().collect();
        for step in &steps {
            for ((name, reused), (_, fresh)) in reused.iter().zip(preferences::objectives()) {
                prop_assert_eq!(step.whole(reused), step.whole(&fresh), "{}", name);
            }
        }
    }

    #[test]
    fn corrections_do_not_remember_steps(steps in prop::collection::vec(rows(), 1..4)) {
        let reused = corrections();
        for step in &steps {
            for (reused, fresh) in reused.iter().zip(&corrections()) {
                prop_assert_eq!(correct(step, reused), correct(step, fresh));
            }
        }
    }

    #[test]
    fn controllers_resume_where_they_stopped(
        values in prop::collection::vec(0.0f64..2.0, 1..12),
        at in any::<prop::sample::Index>(),
    ) {
        let at = at.index(values.len());
        let steering = EntropySteering { step: 0.005, target: 0.5, min: 0.0, max: 0.02 };
        check_state(EntropyController::adaptive(0.01, steering).unwrap(), &values, at, |c, v| c.update(v).unwrap());
        check_state(KlController::adaptive(0.1, 0.3, 100.0).unwrap(), &values, at, |c, v| c.update(v, 16).unwrap());
        check_state(RunningMoments::default(), &values, at, |m, v| m.update(&[v, v * v]).unwrap());
        let scaler = RewardScaler::new(RewardScale::Running, true, Some(1.5));
        check_state(scaler, &values, at, |s, v| {
            s.scale(&[Some(v), None, Some(-v)]).unwrap();
        });
    }
}
