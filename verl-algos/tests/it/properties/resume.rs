//! Property 12, as far as it is the maths': training that is taken up again at any step goes on as if it had not stopped.
//!
//! Estimators, losses, filters and corrections keep nothing from step to step, so one that is made anew for a step must
//! say what one says that has seen all steps before. What does have a state is a value that a checkpoint can hold. Whole
//! runs, with weights, optimiser and random draws, are compared by `tests/it/replay.rs` of the root package.

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

/// Goes through `values` at once, and with a copy of the state taken after the first `at`.
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
            let lasting = make();
            for step in &steps {
                let anew = make();
                prop_assert_eq!(step.estimate(lasting.as_ref()), step.estimate(anew.as_ref()), "{}", name);
            }
        }
    }

    #[test]
    fn losses_do_not_remember_steps(steps in prop::collection::vec(tokens(), 1..4)) {
        let lasting = objectives(0.7);
        for step in &steps {
            let rows = whole(step);
            for ((name, lasting), (_, anew)) in lasting.iter().zip(&objectives(0.7)) {
                prop_assert_eq!(evaluate(step, lasting, &rows), evaluate(step, anew, &rows), "{}", name);
            }
        }
    }

    #[test]
    fn preference_losses_do_not_remember_steps(steps in prop::collection::vec(pairs(), 1..4)) {
        let lasting: Vec<_> = preferences::objectives().collect();
        for step in &steps {
            for ((name, lasting), (_, anew)) in lasting.iter().zip(preferences::objectives()) {
                prop_assert_eq!(step.whole(lasting), step.whole(&anew), "{}", name);
            }
        }
    }

    #[test]
    fn corrections_do_not_remember_steps(steps in prop::collection::vec(rows(), 1..4)) {
        let lasting = corrections();
        for step in &steps {
            for (lasting, anew) in lasting.iter().zip(&corrections()) {
                prop_assert_eq!(correct(step, lasting), correct(step, anew));
            }
        }
    }

    #[test]
    fn controllers_go_on_where_they_stopped(
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
