use verl_kernels::random::{DrawKey, Purpose};

use super::*;

fn stream(row: u64) -> Stream {
    DrawKey {
        seed: 1,
        purpose: Purpose::Rollout,
        step: 0,
        row,
        attempt: 0,
    }
    .stream()
}

fn sample_with(settings: &SamplingSettings, logits: &[f32], row: u64, seen: &[u32]) -> Sampled {
    let stream = stream(row);
    let draw = Draw {
        stream: &stream,
        position: 0,
        seen,
    };
    Sampler::new(settings)
        .unwrap()
        .sample(logits, draw)
        .unwrap()
}

/// Draws often; the frequencies must match `expected` (χ² below the 0.999 quantile), the reported log-probs exactly.
#[track_caller]
fn check_distribution(settings: &SamplingSettings, logits: &[f32], seen: &[u32], expected: &[f64]) {
    let draws = 20_000;
    let mut counts = vec![0.0; logits.len()];
    for row in 0..draws {
        let sampled = sample_with(settings, logits, row, seen);
        let share = f64::from(sampled.sampling_log_prob).exp();
        assert!(
            (share - expected[sampled.token as usize]).abs() < 1e-5,
            "{sampled:?}"
        );
        counts[sampled.token as usize] += 1.0;
    }
    let mut chi = 0.0;
    let mut freedom = -1.0;
    for (count, share) in counts.iter().zip(expected) {
        let mean = share * draws as f64;
        if *share == 0.0 {
            assert_eq!(*count, 0.0);
        } else {
            chi += (count - mean) * (count - mean) / mean;
            freedom += 1.0;
        }
    }
    // 0.999 quantile of χ² by Wilson and Hilferty.
    let f: f64 = freedom;
    let bound = f * (1.0 - 2.0 / (9.0 * f) + 3.09 * (2.0 / (9.0 * f)).sqrt()).powi(3);
    assert!(
        chi < bound,
        "χ² {chi} with {f} degrees of freedom, counts {counts:?}"
    );
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let exps: Vec<f64> = logits.iter().map(|l| l.exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|e| e / sum).collect()
}

const LOGITS: [f32; 6] = [0.5, -1.0, 2.0, 0.0, f32::NEG_INFINITY, 1.0];

#[test]
fn draws_follow_the_softmax() {
    let all: Vec<f64> = LOGITS.iter().map(|&l| f64::from(l)).collect();
    check_distribution(&SamplingSettings::default(), &LOGITS, &[], &softmax(&all));
    let hot: Vec<f64> = all.iter().map(|l| l / 2.5).collect();
    let settings = SamplingSettings {
        temperature: 2.5,
        ..SamplingSettings::default()
    };
    check_distribution(&settings, &LOGITS, &[], &softmax(&hot));
}

#[test]
fn top_k_keeps_k() {
    let settings = SamplingSettings {
        top_k: 3,
        ..SamplingSettings::default()
    };
    let none = f64::NEG_INFINITY;
    check_distribution(
        &settings,
        &LOGITS,
        &[],
        &softmax(&[0.5, none, 2.0, none, none, 1.0]),
    );
    // Ties at the border: the lowest ids are kept.
    check_distribution(
        &settings,
        &[0.0; 5],
        &[],
        &softmax(&[0.0, 0.0, 0.0, none, none]),
    );
}

#[test]
fn top_k_above_the_vocabulary_keeps_all() {
    let large = SamplingSettings {
        top_k: 100,
        ..SamplingSettings::default()
    };
    for row in 0..200 {
        assert_eq!(
            sample_with(&large, &LOGITS, row, &[]),
            sample_with(&SamplingSettings::default(), &LOGITS, row, &[])
        );
    }
}

#[track_caller]
fn check_best_two(settings: &SamplingSettings) {
    let none = f64::NEG_INFINITY;
    let shares = softmax(&[none, none, 2.0, none, none, 1.0]);
    check_distribution(settings, &LOGITS, &[], &shares);
}

#[test]
fn min_p_keeps_by_share_of_the_best() {
    let settings = SamplingSettings {
        min_p: 0.3,
        ..SamplingSettings::default()
    };
    // e^(1 − 2) = 0.37 is kept, e^(0.5 − 2) = 0.22 is dropped.
    check_best_two(&settings);
}

#[test]
fn top_k_comes_before_top_p() {
    // Of the best three (with shares .629, .231, .140 among them) the first two reach .8; of all six ids they have .73.
    let settings = SamplingSettings {
        top_k: 3,
        top_p: 0.8,
        ..SamplingSettings::default()
    };
    check_best_two(&settings);
}

#[test]
fn repetition_penalty_comes_before_temperature() {
    let settings = SamplingSettings {
        repetition_penalty: 2.0,
        temperature: 0.5,
        ..SamplingSettings::default()
    };
    // Seen 2 (logit 2 → 1) and 1 (logit −1 → −2), then everything doubled.
    let none = f64::NEG_INFINITY;
    check_distribution(
        &settings,
        &LOGITS,
        &[2, 1],
        &softmax(&[1.0, -4.0, 2.0, 0.0, none, 2.0]),
    );
}

/// Logits [1, 0, −1, −2] at temperature 0.5 with top-p 0.9: the ratio of the two log-probs is the kept mass.
#[test]
fn full_and_sampling_log_probs_differ_by_the_kept_mass() {
    let settings = SamplingSettings {
        temperature: 0.5,
        top_p: 0.9,
        ..SamplingSettings::default()
    };
    let logits = [1.0, 0.0, -1.0, -2.0];
    let full = softmax(&[2.0, 0.0, -2.0, -4.0]);
    let kept = full[0] + full[1];
    for row in 0..50 {
        let sampled = sample_with(&settings, &logits, row, &[]);
        let token = sampled.token as usize;
        assert!(token < 2);
        assert!((f64::from(sampled.log_prob) - full[token].ln()).abs() < 1e-6);
        let ratio = f64::from(sampled.log_prob - sampled.sampling_log_prob).exp();
        assert!((ratio - kept).abs() < 1e-6, "{ratio} differs from {kept}");
    }
    check_distribution(
        &settings,
        &logits,
        &[],
        &[full[0] / kept, full[1] / kept, 0.0, 0.0],
    );
}

#[test]
fn top_p_sorts_in_steps() {
    // 500 equal ids: 0.9 of the mass is the first 450.
    let settings = SamplingSettings {
        top_p: 0.9,
        ..SamplingSettings::default()
    };
    for row in 0..300 {
        let sampled = sample_with(&settings, &[0.0; 500], row, &[]);
        assert!(sampled.token < 450);
        assert!((sampled.sampling_log_prob + 450.0_f32.ln()).abs() < 1e-5);
    }
}

/// The race with its shortcuts and the plain argmax choose the same ids.
#[test]
fn shortcuts_change_nothing() {
    let noise = stream(99);
    let logits: Vec<f32> = (0..1003).map(|i| 6.0 * noise.normal(7, i) as f32).collect();
    for temperature in [0.3, 1.0, 5.0] {
        let settings = SamplingSettings {
            temperature,
            ..SamplingSettings::default()
        };
        for row in 0..200 {
            let words = stream(row);
            let score = |i: usize| f64::from(logits[i]) / temperature + words.gumbel(0, i as u32);
            let plain = (0..logits.len()).max_by(|&a, &b| score(a).total_cmp(&score(b)));
            let sampled = sample_with(&settings, &logits, row, &[]);
            assert_eq!(Some(sampled.token as usize), plain);
        }
    }
}

#[test]
fn a_vanishing_temperature_is_greedy() {
    for temperature in [1e-3, 1e-40, f64::MIN_POSITIVE / 8.0] {
        let settings = SamplingSettings {
            temperature,
            ..SamplingSettings::default()
        };
        let sampled = sample_with(&settings, &LOGITS, 0, &[]);
        assert_eq!((sampled.token, sampled.log_prob), (2, 0.0));
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let settings = SamplingSettings {
        temperature: 0.0,
        ..SamplingSettings::default()
    };
    let sampled = sample_with(&settings, &[1.0, 3.0, 3.0], 0, &[]);
    assert_eq!(sampled.token, 1);
    assert_eq!(sampled.sampling_log_prob, 0.0);
    let expected = softmax(&[1.0, 3.0, 3.0])[1].ln();
    assert!((f64::from(sampled.log_prob) - expected).abs() < 1e-6);
}

#[test]
fn min_new_tokens_forbids_the_end() {
    let settings = SamplingSettings {
        eos_ids: vec![2, 900],
        min_new_tokens: 1,
        ..SamplingSettings::default()
    };
    let none = f64::NEG_INFINITY;
    check_distribution(
        &settings,
        &LOGITS,
        &[],
        &softmax(&[0.5, -1.0, none, 0.0, none, 1.0]),
    );
    let stream = stream(0);
    let draw = Draw {
        stream: &stream,
        position: 1,
        seen: &[],
    };
    let only_end = [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0];
    let mut sampler = Sampler::new(&settings).unwrap();
    assert_eq!(sampler.sample(&only_end, draw).map(|s| s.token), Ok(2));
    let first = Draw {
        position: 0,
        ..draw
    };
    assert_eq!(sampler.sample(&only_end, first), Err(NonFiniteLogits));
}

#[test]
fn logits_that_are_not_finite_are_refused() {
    let settings = SamplingSettings::default();
    let stream = stream(0);
    let draw = Draw {
        stream: &stream,
        position: 0,
        seen: &[],
    };
    let none = f32::NEG_INFINITY;
    for logits in [[0.0, f32::NAN], [0.0, f32::INFINITY], [none, none]] {
        let sampled = Sampler::new(&settings).unwrap().sample(&logits, draw);
        assert_eq!(sampled, Err(NonFiniteLogits));
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    #[track_caller]
    fn refused(change: impl Fn(&mut SamplingSettings), text: &str) {
        let mut settings = SamplingSettings::default();
        change(&mut settings);
        assert_eq!(Sampler::new(&settings).unwrap_err().to_string(), text);
    }
    refused(
        |s| s.temperature = -1.0,
        "sampling setting `temperature` must be at least 0 (0 is greedy), got -1",
    );
    refused(
        |s| s.top_p = 0.0,
        "sampling setting `top_p` must be above 0 and at most 1 (1 keeps all), got 0",
    );
    refused(
        |s| s.top_p = f64::NAN,
        "sampling setting `top_p` must be above 0 and at most 1 (1 keeps all), got NaN",
    );
    refused(
        |s| s.min_p = 1.5,
        "sampling setting `min_p` must be between 0 and 1 (0 keeps all), got 1.5",
    );
    refused(
        |s| s.repetition_penalty = 0.0,
        "sampling setting `repetition_penalty` must be above 0 (1 changes nothing), got 0",
    );
}
