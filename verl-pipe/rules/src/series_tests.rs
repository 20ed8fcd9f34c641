//! Every rule on metrics fires in the step where its anomaly was planted in a series, and in no other.

use super::*;

fn named(rule: &str, step: u64) -> Vec<(u64, String)> {
    vec![(step, rule.to_owned())]
}

/// A value that moves by a tenth, the same way in every run.
fn noisy(value: f64) -> impl Iterator<Item = f64> {
    (0u64..).map(move |at| {
        let noise = (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / f64::from(1 << 24);
        value * (0.9 + 0.2 * noise)
    })
}

/// `steps` noisy values, then `then`.
fn after(steps: usize, value: f64, then: &[f64]) -> Vec<f64> {
    let calm = noisy(value).take(steps);
    calm.chain(then.iter().copied()).collect()
}

/// P3-7: 0.0005 with a median of 0.00004 is not a spike; 17.4 and 7.9 with a median of 1 are.
#[test]
fn p3_7_spikes_of_gradients() {
    let of = |values: Vec<f64>| Series::all("actor/grad_norm", values);
    assert_eq!(of(after(40, 0.000_04, &[0.000_5])), []);
    assert_eq!(of(after(40, 1.0, &[17.4])), named("grad_norm_spike", 41));
    assert_eq!(of(after(40, 1.0, &[7.9])), named("grad_norm_spike", 41));
    // One cause is one event: the second is less than 17 steps after the first.
    let both = [&[17.4][..], &[1.0; 9], &[7.9], &[1.0; 20]].concat();
    assert_eq!(of(after(40, 1.0, &both)), named("grad_norm_spike", 41));
    let apart = [&[17.4][..], &[1.0; 20], &[7.9]].concat();
    let found = of(after(40, 1.0, &apart));
    let steps: Vec<u64> = found.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [41, 62]);
    // The first steps have nothing to compare with.
    assert_eq!(of(after(7, 1.0, &[17.4])), []);
    assert_eq!(of(after(8, 1.0, &[17.4])), named("grad_norm_spike", 9));
    // Norms that are 0 in most steps, where all rewards are equal, have their usual size in the others.
    let now_and_then = (0..60).map(|at| if at % 7 == 3 { 0.4 } else { 1e-9 });
    assert_eq!(of(now_and_then.collect()), []);
    // In a run whose norms vary by a factor of ten, 7 is not a spike.
    let wide = (0..60).map(|at| [1.0, 10.0, 3.0, 0.5][at % 4]);
    assert_eq!(of(wide.chain([7.0, 12.0]).collect()), []);
}

#[test]
fn a_message_has_readable_numbers() {
    let mut series = Series::new();
    for value in after(40, 1.0, &[]) {
        series.step(&[("actor/grad_norm", value)]);
    }
    let found = series.step(&[("actor/grad_norm", 17.4)]);
    assert_eq!(
        found[0].what,
        "the norm is 17.4, 17 times its median of 0.996 over the last 40 steps"
    );
    let text = format!("{:#}", found[0]);
    for part in [
        "grad_norm_spike: step 41, `actor`, `actor/grad_norm`: the norm",
        "\n  likely causes: ",
        "\n  next: look at advantages",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(found[0].to_string().lines().count(), 1);
}

#[test]
fn gradients_and_rates_of_0() {
    let of = |name: &str, values: &[f64]| Series::all(name, values.iter().copied());
    assert_eq!(
        of("actor/grad_norm", &[0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
        named("zero_gradient", 7)
    );
    // The last step of a schedule may have a rate of 0.
    assert_eq!(of("actor/learning_rate", &[2e-4, 1e-4, 0.0]), []);
    // #8: a schedule of 4 optimiser steps in a run of 16.
    assert_eq!(
        of("actor/learning_rate", &[0.000_375, 0.0, 0.0, 0.0]),
        named("zero_learning_rate", 3)
    );
    assert_eq!(of("critic/grad_norm", &[0.0; 3]), named("zero_gradient", 3));
}

/// P2: all responses are truncated, so there is no update.
#[test]
fn p2_a_step_without_an_update() {
    let mut series = Series::new();
    let with = |steps: f64, truncated: f64| {
        vec![
            ("actor/optimizer_steps", steps),
            ("response/truncated_share", truncated),
        ]
    };
    assert_eq!(series.of_all([with(2.0, 0.0), with(1.0, 0.5)]), []);
    let found = series.step(&with(0.0, 1.0));
    assert_eq!(found[0].rule, "no_update");
    assert_eq!(
        found[0].what,
        "the update took no optimiser step: no token was left to train on; every response reached the token limit"
    );
    // What follows from it is not reported.
    let mut series = Series::new();
    let none = vec![("actor/optimizer_steps", 0.0), ("actor/grad_norm", 0.0)];
    assert_eq!(series.of_all(vec![none; 5]), named("no_update", 1));
}

#[test]
fn rows_that_failed() {
    let errors = [0.0, 0.0, 3.0, 1.0, 0.0];
    assert_eq!(
        Series::all("reward/row_errors", errors),
        named("row_errors", 3)
    );
}

#[test]
fn distances_between_policies() {
    let of = |name: &str, values: &[f64]| Series::all(name, values.iter().copied());
    assert_eq!(of("actor/kl", &[0.01, 0.9]), []);
    assert_eq!(of("actor/kl", &[0.01, 1.2]), named("kl_blow_up", 2));
    assert_eq!(of("reward/kl", &[f64::NAN]), named("kl_blow_up", 1));
    assert_eq!(of("actor/ppo_kl", &[0.15, -0.3]), named("large_update", 2));
    // Only the rule that explains both is reported.
    assert_eq!(of("actor/ppo_kl", &[0.15, 3.0]), named("kl_blow_up", 2));
    assert_eq!(
        of("actor/first_ppo_kl", &[1e-6, -1e-3]),
        named("ratio_not_one", 2)
    );
    let clips = [&[0.1; 20][..], &[0.5, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5]].concat();
    assert_eq!(of("actor/pg_clipfrac", &clips), named("clip_share", 25));
    // z₀ of KTO is a sum over tokens and not a KL divergence per token.
    assert_eq!(of("preference/kl", &[0.0, 12.0, 40.0]), []);
    assert_eq!(of("preference/kl", &[0.0, 60.0]), named("kto_baseline", 2));
}

#[test]
fn entropies_that_collapse_or_explode() {
    let of = |values: Vec<f64>| Series::all("response/sampled_entropy", values);
    assert_eq!(
        of(after(30, 0.6, &[0.004; 6])),
        named("entropy_collapse", 33)
    );
    // A collapse in the first steps counts too; one small value, or a low entropy from the start, does not.
    assert_eq!(of(after(3, 0.6, &[0.004; 6])), named("entropy_collapse", 6));
    assert_eq!(of(after(30, 0.6, &[0.004, 0.6, 0.004, 0.6, 0.6])), []);
    assert_eq!(of(after(60, 0.02, &[0.006; 20])), []);
    assert_eq!(
        of(after(30, 0.4, &[2.5; 6])),
        named("entropy_explosion", 33)
    );
    assert_eq!(of(after(30, 0.1, &[0.9; 6])), []);
}

/// P3-7 and P3-14: a collapse of the length from 24 to 1.
#[test]
fn p3_14_lengths_that_collapse() {
    let of = |values: Vec<f64>| Series::all("response/length_mean", values);
    assert_eq!(
        of(after(100, 24.0, &[1.0; 5])),
        named("length_collapse", 102)
    );
    // A slow collapse, as in a policy that is rewarded for it, and one in the first steps.
    let slowly = (0..200).map(|at| 24.0 * (1.0 - f64::from(at) / 200.0) + 1.0);
    let found = of(slowly.collect());
    assert_eq!((found.len(), found[0].1.as_str()), (1, "length_collapse"));
    assert_eq!(of(after(3, 24.0, &[1.0; 5])), named("length_collapse", 5));
    // Single steps, learnt brevity, and responses that were short from the start do not count.
    assert_eq!(of(after(40, 24.0, &[5.0, 24.0, 5.0])), []);
    assert_eq!(of(after(40, 24.0, &[9.0; 40])), []);
    assert_eq!(of(after(40, 3.5, &[0.5; 10])), []);

    // A model that learns to end its responses instead of being cut off.
    let cut = |length: f64, share: f64| {
        vec![
            ("response/length_mean", length),
            ("response/truncated_share", share),
        ]
    };
    let learns = (0..40).map(|at| match at < 20 {
        true => cut(256.0, 0.95),
        false => cut(30.0, 0.0),
    });
    assert_eq!(Series::new().of_all(learns), []);
    let collapses = (0..40).map(|at| match at < 20 {
        true => cut(256.0, 0.95),
        false => cut(1.0, 0.0),
    });
    assert_eq!(
        Series::new().of_all(collapses),
        named("length_collapse", 22)
    );
}

#[test]
fn lengths_that_grow_into_the_limit() {
    let steps = |grows: bool| {
        (0..60).map(move |at| {
            let late = f64::from((at - 20).clamp(0, 30)) / 30.0;
            let length = if grows { 200.0 + 600.0 * late } else { 200.0 };
            vec![
                ("response/length_mean", length),
                ("response/truncated_share", 0.02 + 0.4 * late),
            ]
        })
    };
    let found = Series::new().of_all(steps(true));
    assert_eq!((found.len(), found[0].1.as_str()), (1, "length_growth"));
    assert_eq!(Series::new().of_all(steps(false)), []);
}

#[test]
fn rewards_that_fall_or_jump() {
    let of = |values: Vec<f64>| Series::all("reward/mean", values);
    assert_eq!(of(after(40, 0.7, &[0.05; 8])), named("reward_collapse", 43));
    assert_eq!(of(after(40, 0.3, &[1.0; 8])), named("reward_jump", 43));
    // One bad batch, and a reward that rises by learning, do not count.
    assert_eq!(of(after(40, 0.7, &[0.05, 0.7, 0.05, 0.7])), []);
    let rises = noisy(1.0).take(200).enumerate();
    let rises = rises.map(|(at, noise)| (0.3 + 0.5 * at as f64 / 200.0) * noise);
    assert_eq!(of(rises.collect()), []);
    assert_eq!(of(after(8, 0.7, &[0.05; 8])), []);
}

#[test]
fn a_critic_that_does_not_learn() {
    let of = |values: Vec<f64>| Series::all("critic/explained_variance", values);
    let learns = (0..80).map(|at| -2.0 + 0.04 * f64::from(at));
    assert_eq!(of(learns.collect()), []);
    let found = of(noisy(-0.5).take(80).collect());
    assert_eq!(found, named("blind_critic", 49));
}

/// DPO that pushes both answers down is reported; an accuracy at chance level is not.
#[test]
fn pairs_whose_answers_both_become_unlikely() {
    let pair = |chosen: f64, rejected: f64| {
        vec![
            ("preference/log_probs_chosen", chosen),
            ("preference/log_probs_rejected", rejected),
            ("preference/reward_accuracies", 0.5),
        ]
    };
    let falls = (0..80).map(|at| pair(-20.0 - f64::from(at), -22.0 - 2.0 * f64::from(at)));
    let found = Series::new().of_all(falls);
    assert_eq!((found.len(), found[0].1.as_str()), (1, "chosen_falls"));
    let apart = (0..80).map(|at| pair(-20.0 + 0.1 * f64::from(at), -22.0 - 2.0 * f64::from(at)));
    assert_eq!(Series::new().of_all(apart), []);
    let still = noisy(-20.0).take(80).map(|value| pair(value, value - 2.0));
    assert_eq!(Series::new().of_all(still), []);
}

/// One cause is one event; the summary counts its steps.
#[test]
fn a_rule_that_matches_for_many_steps_is_one_event() {
    let mut series = Series::new();
    let kls = (0..100).map(|at| {
        if at < 60 {
            0.1
        } else {
            2.0 + f64::from(at % 2)
        }
    });
    let found = series.of_all(kls.map(|kl| vec![("actor/kl", kl)]));
    assert_eq!(found, named("kl_blow_up", 61));
    let fired = series.book.fired();
    let Fired {
        events,
        steps,
        first_step,
        last_step,
        ..
    } = fired[0];
    assert_eq!((events, steps, first_step, last_step), (1, 40, 61, 100));
    assert_eq!(
        fired[0].to_string(),
        "kl_blow_up: steps 61 to 100, at first: the divergence is 2 nats per token, above 1"
    );
    // It is reported again only after enough steps without a match.
    let mut series = Series::new();
    let flaps = (0..100).map(|at| if at % 8 == 0 { 2.0 } else { 0.1 });
    assert_eq!(
        series.of_all(flaps.map(|kl| vec![("actor/kl", kl)])).len(),
        1
    );
    assert_eq!(series.book.fired()[0].steps, 13);
    let rare = (0..100).map(|at| if at % 50 == 0 { 2.0 } else { 0.1 });
    assert_eq!(Series::all("actor/kl", rare).len(), 2);
}

/// Series with missing or extreme metrics do not break any rule.
#[test]
fn incomplete_and_extreme_series_are_accepted() {
    let names = [
        "actor/grad_norm",
        "actor/learning_rate",
        "actor/pg_clipfrac",
        "actor/entropy",
        "response/length_mean",
        "response/truncated_share",
        "reward/mean",
        "critic/explained_variance",
        "preference/log_probs_chosen",
        "preference/log_probs_rejected",
    ];
    for value in [0.5, f64::MAX, f64::MIN_POSITIVE] {
        let mut series = Series::new();
        for at in 0..200 {
            let kept = names.iter().enumerate().filter(|(n, _)| (at + n) % 3 > 0);
            let now: Vec<(&str, f64)> = kept.map(|(_, name)| (*name, value)).collect();
            assert_eq!(series.step(&now), [], "{value} in step {at}");
        }
    }
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut series = Series::new();
        for _ in 0..100 {
            series.step(&names.map(|name| (name, value)));
        }
    }
}
