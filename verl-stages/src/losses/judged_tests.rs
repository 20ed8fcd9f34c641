use verl_algos::CutUnit;
use verl_algos::losses::LossInput;
use verl_declare::part::PartConfig;
use verl_words::stage::{BuildContext, ConfigError};

use super::kto::Baseline;
use super::*;

/// The context of a batch with these samples a prompt, and rows of a mini-batch.
fn context(samples: usize, mini_rows: usize) -> BuildContext {
    let mut context = BuildContext::default();
    context.batch.samples = samples;
    context.batch.mini_rows = mini_rows;
    context
}

fn pairs() -> BuildContext {
    context(2, 16)
}

#[track_caller]
fn check_refused(built: Result<Loss, Vec<ConfigError>>, expected: &[(&str, &str)]) {
    let faults = built.expect_err("refused");
    assert_eq!(faults.len(), expected.len(), "{faults:?}");
    for (fault, (setting, words)) in faults.iter().zip(expected) {
        assert_eq!(fault.setting, *setting);
        let text = format!("{fault}; {}", fault.help);
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
}

fn dpo(change: impl FnOnce(&mut Dpo)) -> Result<Loss, Vec<ConfigError>> {
    let mut dpo = Dpo::default();
    change(&mut dpo);
    dpo.build(&pairs())
}

#[test]
fn every_variant_of_dpo_is_available_and_reported() {
    for name in PreferenceLossName::ALL {
        let loss = dpo(|dpo| dpo.variant = *name).unwrap();
        assert!(
            loss.of_pairs && loss.reads(LossInput::RefLogProbs),
            "{name}"
        );
        let own = format!("dpo_{name}");
        let (_, metric) = loss
            .metrics
            .iter()
            .find(|(known, _)| known.name() == own)
            .unwrap();
        assert_eq!(metric.name, "preference/loss");
        let sorts = loss.objective.cut_unit() == CutUnit::MiniBatch;
        assert_eq!(sorts, name.as_str().starts_with("aot"), "{name}");
    }
}

/// For losses with a ratio, `update` may treat a micro-batch as an entire mini-batch; preference losses do not allow
/// that.
#[test]
fn no_preference_loss_has_a_ratio() {
    let losses = [
        Cpo::default().build(&pairs()),
        Dpo::default().build(&pairs()),
        Kto::default().build(&pairs()),
        Orpo::default().build(&pairs()),
        SimPo::default().build(&pairs()),
    ];
    for loss in losses {
        let loss = loss.unwrap();
        assert!(!loss.reads(LossInput::OldLogProbs), "{loss:?}");
        assert!(loss.reads_labels());
        let needs_whole = loss.reads(LossInput::KlBaseline);
        assert_eq!(loss.reference.is_some(), needs_whole);
        assert_eq!(loss.of_pairs, loss.objective.cut_unit() == CutUnit::Pair);
    }
}

#[test]
fn settings_of_dpo_reach_the_maths() {
    let loss = dpo(|dpo| {
        dpo.variant = PreferenceLossName::Cdpo;
        dpo.beta = 0.25;
        dpo.label_smoothing = Some(0.2);
        dpo.divergence = FDivergenceName::AlphaDivergence;
        dpo.divergence_alpha = Some(0.5);
        dpo.ld_alpha = Some(0.75);
    });
    let written = format!("{:?}", loss.unwrap().objective);
    for words in [
        "Cdpo { label_smoothing: 0.2 }",
        "beta: 0.25",
        "Alpha { alpha: 0.5 }",
        "ld_alpha: Some(0.75)",
    ] {
        assert!(
            written.contains(words),
            "{written} does not contain {words}"
        );
    }
    let tau = dpo(|dpo| {
        dpo.variant = PreferenceLossName::DiscoPop;
        dpo.discopop_tau = Some(0.5);
    });
    let written = format!("{:?}", tau.unwrap().objective);
    assert!(written.contains("DiscoPop { tau: 0.5 }"), "{written}");
}

#[test]
fn a_mixture_has_its_weights() {
    use PreferenceLossName::{BcoPair, Ipo, Robust, Sft, Sigmoid};
    let mixed = |weights: &[(PreferenceLossName, f64)], change: fn(&mut Dpo)| {
        dpo(|dpo| {
            dpo.mixture = weights.iter().copied().collect();
            change(dpo);
        })
    };
    let mpo = [(Sigmoid, 0.8), (BcoPair, 0.2), (Sft, 1.0)];
    let written = format!("{:?}", mixed(&mpo, |_| ()).unwrap().objective);
    for words in [
        "(0.8, Dpo { loss: Sigmoid",
        "(0.2, Dpo { loss: BcoPair",
        "(1.0, Dpo { loss: Sft",
    ] {
        assert!(
            written.contains(words),
            "{written} does not contain {words}"
        );
    }
    // ε applies to the variants that have one, and at least one must.
    let smoothed = mixed(&[(Sft, 1.0), (Robust, 1.0)], |dpo| {
        dpo.label_smoothing = Some(0.2)
    });
    let written = format!("{:?}", smoothed.unwrap().objective);
    assert!(
        written.contains("Robust { label_smoothing: 0.2 }"),
        "{written}"
    );
    check_refused(
        mixed(&mpo, |dpo| dpo.label_smoothing = Some(0.2)),
        &[("label_smoothing", "it has none")],
    );
    check_refused(
        mixed(&[(Sigmoid, 0.0)], |dpo| dpo.variant = Ipo),
        &[
            ("variant", "`mixture` is set and replaces it"),
            ("mixture", "sets the weight of `sigmoid` to 0"),
        ],
    );
}

#[test]
fn invalid_settings_are_reported() {
    check_refused(
        dpo(|dpo| dpo.divergence = FDivergenceName::AlphaDivergence),
        &[("divergence_alpha", "is not set")],
    );
    check_refused(dpo(|dpo| dpo.beta = 0.0), &[("beta", "is 0")]);
    check_refused(
        dpo(|dpo| dpo.label_smoothing = Some(0.1)),
        &[("label_smoothing", "`cdpo`")],
    );
    check_refused(
        dpo(|dpo| dpo.discopop_tau = Some(0.1)),
        &[("discopop_tau", "`discopop` is not used")],
    );
    let simpo = SimPo {
        gamma: -1.0,
        nll_coef: -1.0,
        ..SimPo::default()
    };
    check_refused(
        simpo.build(&pairs()),
        &[("nll_coef", "is -1"), ("gamma", "is -1")],
    );
    let orpo = Orpo { beta: f64::NAN };
    check_refused(orpo.build(&pairs()), &[("beta", "is NaN")]);
    let kto = Kto {
        undesirable_weight: -1.0,
        ..Kto::default()
    };
    check_refused(kto.build(&pairs()), &[("undesirable_weight", "is -1")]);
}

#[test]
fn pairs_are_two_rows_of_a_prompt() {
    for samples in [1, 3, 4] {
        // Three samples make odd mini-batches.
        let context = context(samples, samples);
        let reason = format!("batch.samples is {samples}");
        let expected = [("kind", reason.as_str())];
        check_refused(Dpo::default().build(&context), &expected);
        check_refused(Cpo::default().build(&context), &expected);
        check_refused(Orpo::default().build(&context), &expected);
        check_refused(SimPo::default().build(&context), &expected);
    }
}

#[test]
fn kto_needs_a_second_prompt_for_its_baseline() {
    let single = |samples, mini_rows| Kto::default().build(&context(samples, mini_rows));
    for (samples, mini_rows) in [(1, 1), (2, 2)] {
        let expected = [("kind", "`mini_batch` in [batch] to 2 or more")];
        check_refused(single(samples, mini_rows), &expected);
        let zero = Kto {
            baseline: Baseline::Zero,
            ..Kto::default()
        };
        let loss = zero.build(&context(samples, mini_rows)).unwrap();
        assert_eq!(loss.reference, None);
    }
    for (samples, mini_rows) in [(1, 2), (2, 4)] {
        let loss = single(samples, mini_rows).unwrap();
        assert_eq!(loss.reference.as_deref(), Some("ref"));
    }
}
