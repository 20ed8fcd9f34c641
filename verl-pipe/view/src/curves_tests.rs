use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, StringArray};
use verl_rules::stats::{KeyStats, Place, RatioStats};

use super::*;

fn row(step: u64, stage: &str, side: Side, key: &str, array: ArrayRef) -> StatRow {
    let mut stats = KeyStats::default();
    let ids: Vec<u64> = (0..array.len() as u64).collect();
    stats.add((0, 0), &array, &ids);
    stats.row(Place {
        step,
        stage,
        side,
        key,
        name: key,
        brief: false,
    })
}

fn numbers(values: &[f32]) -> ArrayRef {
    Arc::new(Float32Array::from(values.to_vec()))
}

fn key_curves(stats: &[StatRow], most: usize) -> Vec<Curve> {
    let mut curves = KeyCurves::default();
    // As if read from two files.
    let half = stats.partition_point(|row| row.step <= stats[stats.len() / 2].step);
    curves.add(&stats[..half], None);
    curves.add(&stats[half..], None);
    curves.finish(None, most)
}

fn titles(curves: &[Curve]) -> Vec<String> {
    let title = |c: &Curve| format!("{} {} {} {:?}", c.stage, c.side, c.key, c.what);
    curves.iter().map(title).collect()
}

#[test]
fn an_input_is_shown_only_if_it_differs_from_what_was_emitted() {
    let mut stats = Vec::new();
    for step in 1..=2 {
        let emitted = numbers(&[0.0, 1.0]);
        stats.push(row(step, "reward", Side::Output, "rewards", emitted));
        // Repeated rows have the same numbers; changed rows do not.
        let repeated = numbers(&[0.0, 0.0, 1.0, 1.0]);
        stats.push(row(step, "advantages", Side::Input, "rewards", repeated));
        let changed = numbers(&[0.0, step as f32]);
        stats.push(row(step, "update", Side::Input, "rewards", changed));
    }
    let curves = key_curves(&stats, 100);
    assert_eq!(
        titles(&curves),
        [
            "reward output rewards Some(Value)",
            "update input rewards Some(Value)"
        ]
    );
    assert_eq!(curves[0].step, [1, 2]);
    assert_eq!(curves[0].mean, [Some(0.5), Some(0.5)]);
    assert_eq!(curves[0].high, [Some(1.0), Some(1.0)]);
    assert!(curves[0].non_finite.is_empty());
}

#[test]
fn ratios_texts_and_non_finite_numbers_have_separate_curves() {
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "abc"]));
    let ratio = RatioStats {
        counterpart: "rollout_log_probs".to_owned(),
        tokens: 2,
        diff_mean: 0.5,
        diff_max: 1.0,
        k1: -0.25,
        k1_error: None,
        rows: 1,
        ratio_min: 0.5,
        ratio_max: 2.0,
        probability_diff: 0.125,
        ess: 0.75,
    };
    let stats = [
        row(1, "generate", Side::Output, "texts", texts),
        StatRow {
            ratio: Some(ratio),
            ..row(
                1,
                "old",
                Side::Output,
                "log_probs",
                numbers(&[f32::NAN, -1.0]),
            )
        },
    ];
    let curves = key_curves(&stats, 100);
    assert_eq!(
        titles(&curves),
        [
            "generate output texts Some(Length)",
            "old output log_probs Some(Value)",
            "old output log_probs Some(K1)",
            "old output log_probs Some(Ess)",
            "old output log_probs Some(ProbabilityDiff)",
        ]
    );
    assert_eq!(
        (curves[0].mean[0], curves[0].unit.as_str()),
        (Some(2.0), "characters")
    );
    assert_eq!(curves[1].non_finite, [1]);
    assert_eq!(
        (curves[2].mean[0], curves[2].counterpart.as_str()),
        (Some(-0.25), "rollout_log_probs")
    );
}

#[test]
fn bands_of_a_thinned_curve_include_every_extreme() {
    let stats: Vec<StatRow> = (1..=1_000)
        .map(|step| {
            let high = if step == 345 { 90.0 } else { 2.0 };
            row(step, "s", Side::Output, "k", numbers(&[0.0, 1.0, high]))
        })
        .collect();
    let curve = &key_curves(&stats, 50)[0];
    assert_eq!((curve.steps, curve.step.len() <= 50), (1_000, true));
    assert_eq!((curve.step[0], curve.step.last()), (1, Some(&1_000)));
    assert!(curve.high.contains(&Some(90.0)));
}

#[test]
fn metrics_that_are_not_numbers_leave_a_gap() {
    let line = |step, value: serde_json::Value| MetricsLine {
        step,
        epoch: 0,
        timestamp: 0.0,
        values: std::iter::once(("actor/loss".to_owned(), value)).collect(),
    };
    let lines = [line(1, 0.5.into()), line(2, serde_json::Value::Null)];
    let curves = metric_curves(&lines, None, 100);
    assert_eq!(curves.len(), 1);
    assert_eq!(curves[0].key, "actor/loss");
    assert_eq!(curves[0].mean, [Some(0.5), None]);
    let text = serde_json::to_string(&curves[0]).expect("JSON");
    assert_eq!(
        text,
        "{\"key\":\"actor/loss\",\"steps\":2,\"step\":[1,2],\"mean\":[0.5,null]}"
    );
}
