//! Settings of `[trace]` that make no sense are told before anything runs, all at once, with key, value and repair.

use verl::pipe::cli::train::DebugArgs;
use verl::pipe::config::parse_pipeline;
use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::trace::config::RuleSetting;

use crate::kit::{GRPO, Place};

/// What a run of three steps with these lines in `[trace]` is told about them.
fn told(trace: &str, more: &[&str]) -> Vec<Diagnostic> {
    let place = Place::new();
    let text = format!("{GRPO}\n[trace]\n{trace}\n");
    let found = place.parse(&text, "run", more).and_then(|pipe| pipe.plan());
    found.map_or_else(|findings| findings, |plan| plan.warnings)
}

fn printed(findings: Vec<Diagnostic>) -> String {
    Findings(findings).to_string().replace("\n         ", " ")
}

#[test]
fn each_setting_without_sense_is_told() {
    for (trace, head, part) in [
        (
            "steps = [99]",
            "error[C005]",
            "`steps` names 99, but the run has the steps 1 to 3",
        ),
        (
            "steps = [0, 2]",
            "error[C005]",
            "`steps` names 0, but the run has the steps 1 to 3",
        ),
        ("steps = [-1]", "error[C004]", "steps"),
        (
            "steps = [2, 2]",
            "warning[C008]",
            "`steps` names 2 more than once",
        ),
        (
            "every = 0",
            "warning[C008]",
            "`every` is 0, which records no step",
        ),
        (
            "every = 4",
            "warning[C008]",
            "`every` is 4, but the run has 3 steps",
        ),
        (
            "part_steps = 0",
            "error[C005]",
            "`part_steps` is 0, so that a file",
        ),
        (
            "budget_mb = 0",
            "error[C005]",
            "`budget_mb` is 0, so that no step of the flight recorder",
        ),
        (
            "every = 1\nbudget_mb = 0",
            "error[C005]",
            "`budget_mb` is 0, so that no step that is asked for",
        ),
        (
            "ring_mb = 0",
            "error[C005]",
            "`ring_mb` is 0, so that the flight recorder would hold nothing",
        ),
        (
            "stages = [\"reward\"]",
            "warning[C008]",
            "`stages` names `reward`, but no step is recorded",
        ),
        (
            "every = 1\nstages = [\"rewrad\"]",
            "error[P023]",
            "did you mean `reward`?",
        ),
        (
            "rules.entropy_colapse.limit = 1",
            "error[P023]",
            "did you mean `entropy_collapse`?",
        ),
        (
            "rules.kl_blow_up.limit = -1",
            "error[C005]",
            "`rules.kl_blow_up.limit` is -1, but nothing",
        ),
        (
            "rules.kl_blow_up.limit = nan",
            "error[C004]",
            "rules.kl_blow_up.limit",
        ),
        (
            "rules.kl_blow_up.limit = inf",
            "error[C004]",
            "rules.kl_blow_up.limit",
        ),
        (
            "rules.low_ess.limit = 1.5",
            "error[C005]",
            "is 1.5, but it is a share of tokens, which is 1 at most",
        ),
        (
            "rules.low_ess = { severity = \"off\", limit = 0.1 }",
            "warning[C008]",
            "is 0.1, but the rule is off",
        ),
        (
            "stats = false\nrules.kl_blow_up.severity = \"stop\"",
            "error[C005]",
            "`rules.kl_blow_up` is to stop the run, but `stats = false`",
        ),
        // It stops unless it is told otherwise.
        (
            "stats = false\nrules.non_finite.limit = 1",
            "error[C005]",
            "`rules.non_finite` is to stop the run",
        ),
        (
            "stats = false\nrules.kl_blow_up.limit = 2",
            "warning[C008]",
            "`rules.kl_blow_up` is to warn, but",
        ),
        (
            "rules.entropy_collapse.severity = \"stop\"",
            "warning[C008]",
            "none records a metric `entropy` or `entropy_now`",
        ),
        (
            "[trace.rules.kl_blow_up]\nlimit = 2\n[trace.rules.kl_blow_up]\nlimit = 3",
            "error[C001]",
            "duplicate key",
        ),
    ] {
        let found = told(trace, &[]);
        let count = found.len();
        let text = printed(found);
        assert!(
            (count == 1 || head == "error[C001]") && text.starts_with(head) && text.contains(part),
            "{trace}:\n{text}"
        );
        assert!(text.contains("  help:  "), "{trace}:\n{text}");
    }
}

#[test]
fn settings_with_sense_are_not_told() {
    for (trace, more) in [
        (
            "steps = [1, 3]\nstages = [\"reward\"]\npart_steps = 1\nbudget_mb = 1",
            &[][..],
        ),
        (
            "ring_steps = 0\nring_mb = 0\nbudget_mb = 0\nevery = 3",
            &["trace.every="],
        ),
        (
            "stats = false\nring_mb = 0\nrules.kl_blow_up.severity = \"off\"",
            &[],
        ),
        (
            "rules = { low_ess = { limit = 1.0 }, non_finite = { limit = 0.0 } }",
            &[],
        ),
        (
            "rules.entropy_collapse.limit = 0.1",
            &["old_log_probs.entropies=true"],
        ),
        (
            "rules.entropy_collapse.limit = 0.1",
            &["update.loss.entropy_coef=0.01"],
        ),
        (
            "rules = { kl_blow_up = {}, grad_norm_spike = {}, weights_unchanged = {}, length_limit = {} }",
            &[],
        ),
    ] {
        let text = printed(told(trace, more));
        assert_eq!(text, "", "{trace}");
    }
}

#[test]
fn all_are_told_at_once() {
    let trace = "stats = false\nsteps = [0, 2, 2, 99]\nevery = 0\npart_steps = 0\nbudget_mb = 0\n\
                 stages = [\"rewrad\"]\nrules = { low_ess = { limit = 7 }, non_finite = { limit = -1 }, kl = {} }";
    insta::assert_snapshot!("trace_settings", Findings(told(trace, &[])));
}

#[test]
fn what_flags_ask_for_is_checked_like_the_file() {
    let place = Place::new();
    let debug = |change: fn(&mut DebugArgs)| {
        let mut pipe = place.grpo("run", &[]);
        let mut flags = DebugArgs::default();
        change(&mut flags);
        flags.apply(&mut pipe.trace);
        let found = pipe
            .plan()
            .map_or_else(|findings| findings, |plan| plan.warnings);
        printed(found)
    };
    let step = debug(|flags| flags.steps = vec![99]);
    assert!(
        step.starts_with("error[C005]") && step.contains("--debug-trace-step"),
        "{step}"
    );
    let every = debug(|flags| flags.every = Some(50));
    assert!(
        every.starts_with("warning[C008]") && every.contains("--debug-trace-every"),
        "{every}"
    );
    let stage = debug(|flags| flags.stages = vec!["generat".to_owned()]);
    assert!(
        stage.starts_with("error[P023]") && stage.contains("did you mean `generate`?"),
        "{stage}"
    );
    assert_eq!(debug(|flags| flags.debug = true), "");
}

/// A limit that no file can state, since TOML's `nan` is told when the file is read.
#[test]
fn limits_that_are_no_numbers_are_told_in_rust_too() {
    let place = Place::new();
    for limit in [f64::NAN, f64::INFINITY, -0.5] {
        let mut pipe = place.grpo("run", &[]);
        let setting = RuleSetting {
            severity: None,
            limit: Some(limit),
        };
        pipe.trace
            .rules
            .insert("grad_norm_spike".to_owned(), setting);
        let text = printed(
            pipe.plan()
                .map_or_else(|findings| findings, |plan| plan.warnings),
        );
        assert!(
            text.starts_with("error[C005]: `rules.grad_norm_spike.limit`"),
            "{text}"
        );
    }
}

#[test]
fn a_rule_that_two_overrides_tune_is_told() {
    let both = [
        "trace.rules.low_ess.limit=0.1",
        "trace.rules.low_ess.limit=0.2",
    ];
    let found = parse_pipeline(GRPO, "tiny.toml", &both, &verl::registry());
    let text = printed(found.err().expect("refused"));
    assert!(
        text.starts_with("error[C006]") && text.contains("tunes the same rule"),
        "{text}"
    );
    let other = [
        "trace.rules.low_ess.limit=0.1",
        "trace.rules.low_ess.severity=stop",
    ];
    assert!(parse_pipeline(GRPO, "tiny.toml", &other, &verl::registry()).is_ok());
}
