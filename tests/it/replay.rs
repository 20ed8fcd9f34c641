//! Same seed, same bits; another split, the same numbers.

use std::collections::BTreeMap;

use crate::kit::{Place, decided, start};

/// Rounding of sums in another order, as a share of the value.
const RELATIVE: f64 = 1e-4;
/// Values around 0 that are differences of larger ones.
const ABSOLUTE: f64 = 1e-6;

#[test]
fn the_same_seed_gives_the_same_metrics_and_weights() {
    let place = Place::new();
    let (one, two) = (place.train("one", &[]), place.train("two", &[]));
    let numbers =
        |run: &crate::kit::Finished| -> Vec<_> { run.metrics().iter().map(decided).collect() };
    assert_eq!(numbers(&one), numbers(&two));
    assert!(one.weights() == two.weights(), "the weights differ");
    assert_eq!(one.read("samples.jsonl"), two.read("samples.jsonl"));

    let other = place.train("other", &["seed=6"]);
    assert_ne!(numbers(&one), numbers(&other));
    assert!(one.weights() != other.weights());
}

#[track_caller]
fn check_close(one: &BTreeMap<String, f64>, other: &BTreeMap<String, f64>) {
    assert!(one.keys().eq(other.keys()), "{one:?} {other:?}");
    for (name, a) in one {
        let b = other[name];
        let allowed = RELATIVE * a.abs().max(b.abs()) + ABSOLUTE;
        assert!((a - b).abs() <= allowed, "{name}: {a} became {b}");
    }
}

#[test]
fn the_micro_batch_changes_nothing_but_rounding() {
    let place = Place::new();
    let whole = place.train("whole", &["batch.micro_batch=16"]);
    let small = place.train("small", &["batch.micro_batch=2"]);
    let lines = whole.metrics().into_iter().zip(small.metrics());
    for (whole, small) in lines {
        check_close(&decided(&whole), &decided(&small));
    }
}

#[test]
fn a_restored_run_repeats_its_step_bit_by_bit() {
    let place = Place::new();
    let mut run = start(&place.grpo("none", &[]));
    let decided = |output: verl::pipe::run::runner::StepOutput| {
        let mut values = output.metrics.values;
        values.retain(|name, _| !name.starts_with("perf/"));
        (output.metrics.step, values, output.samples)
    };
    run.step().expect("step 1");
    let before = run.snapshot().expect("a snapshot");
    let second = decided(run.step().expect("step 2"));
    let third = decided(run.step().expect("step 3"));
    let after = run.snapshot().expect("a snapshot").models["actor"].clone();

    run.restore(&before).expect("a snapshot of this run");
    let restored = run.snapshot().expect("a snapshot").models["actor"].clone();
    assert_eq!(restored, before.models["actor"]);
    assert_eq!(decided(run.step().expect("step 2 again")), second);
    assert_eq!(decided(run.step().expect("step 3 again")), third);
    let again = run.snapshot().expect("a snapshot").models["actor"].clone();
    assert_eq!(again, after);
    assert_ne!(again.hash, restored.hash);
    assert_eq!((restored.step, again.step), (1, 3));
}
