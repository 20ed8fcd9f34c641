//! Invalid settings of `[trace]` are reported together before anything runs, with key, value and fix.

use std::sync::{Arc, Mutex};

use verl::pipe::cli::train::DebugArgs;
use verl::pipe::config::parse_pipeline;
use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::plan::Plannable;
use verl::pipe::registry::Registry;
use verl::pipe::run::trainer::{Trainer, TrainerOptions};
use verl::pipe::schema::pipeline_schema;
use verl::pipe::trace::config::RuleSetting;
use verl::pipe::trace::rules::{Hit, Rule, StepView};

use crate::kit::{GRPO, Place};

/// The findings of a run of three steps with these lines in `[trace]`.
fn findings_for(trace: &str, more: &[&str]) -> Vec<Diagnostic> {
    let place = Place::new();
    let text = format!("{GRPO}\n[trace]\n{trace}\n");
    let found = place.parse(&text, "run", more).and_then(|pipe| pipe.plan());
    found.map_or_else(|findings| findings, |plan| plan.warnings().to_vec())
}

fn printed(findings: Vec<Diagnostic>) -> String {
    Findings(findings).to_string().replace("\n         ", " ")
}

#[test]
fn each_invalid_setting_is_reported() {
    for (trace, head, part) in [
        (
            "steps = [99]",
            "error[C005]",
            "`steps` contains 99, but the run has steps 1 to 3",
        ),
        (
            "steps = [0, 2]",
            "error[C005]",
            "`steps` contains 0, but the run has steps 1 to 3",
        ),
        ("steps = [-1]", "error[C004]", "steps"),
        (
            "steps = [2, 2]",
            "warning[C008]",
            "`steps` contains 2 more than once",
        ),
        (
            "every = 0",
            "warning[C008]",
            "`every` is 0, so no step is recorded",
        ),
        (
            "every = 4",
            "warning[C008]",
            "`every` is 4, but the run has 3 steps",
        ),
        (
            "part_steps = 0",
            "error[C005]",
            "`part_steps` is 0, so a statistics file",
        ),
        (
            "budget_mb = 0",
            "error[C005]",
            "`budget_mb` is 0, so no step of the flight recorder",
        ),
        (
            "every = 1\nbudget_mb = 0",
            "error[C005]",
            "`budget_mb` is 0, so no requested step",
        ),
        (
            "ring_mb = 0",
            "error[C005]",
            "`ring_mb` is 0, so the flight recorder could store nothing",
        ),
        (
            "stages = [\"reward\"]",
            "warning[C008]",
            "`stages` contains `reward`, but no step is recorded",
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
            "`rules.kl_blow_up.limit` is -1, but the rule measures",
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
            "is 1.5, but it is a share of tokens, which is at most 1",
        ),
        (
            "rules.low_ess = { severity = \"off\", limit = 0.1 }",
            "warning[C008]",
            "is 0.1, but the rule is off",
        ),
        (
            "stats = false\nrules.kl_blow_up.severity = \"stop\"",
            "error[C005]",
            "`rules.kl_blow_up` is set to stop the run, but `stats = false`",
        ),
        // Its default severity is `stop`.
        (
            "stats = false\nrules.non_finite.limit = 1",
            "error[C005]",
            "`rules.non_finite` is set to stop the run",
        ),
        (
            "stats = false\nrules.kl_blow_up.limit = 2",
            "warning[C008]",
            "`rules.kl_blow_up` is set to warn, but",
        ),
        (
            "rules.blind_critic.severity = \"stop\"",
            "warning[C008]",
            "no stage declares that it records an explained variance of returns",
        ),
        (
            "[trace.rules.kl_blow_up]\nlimit = 2\n[trace.rules.kl_blow_up]\nlimit = 3",
            "error[C001]",
            "duplicate key",
        ),
    ] {
        let found = findings_for(trace, &[]);
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
fn a_request_to_record_a_stage_between_steps_is_reported() {
    let evaluate = "stages = [\"evaluate\", \"reward\"]\nevery = 1";
    let reward = "stages = [\"reward\"]\nevery = 1";
    assert_eq!(printed(findings_for(reward, &[])), "");
    insta::assert_snapshot!(printed(findings_for(evaluate, &[])), @"
    warning[C008]: setting `stages` is probably a mistake
      where: [trace]
      why:   `stages` contains `evaluate`: a stage that runs between steps gets no rows, so it is not recorded
      help:  use stages that run in a step; its measurements are in metrics.jsonl and samples.jsonl
    ");
    for trace in [reward, ""] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(printed(findings_for(trace, &["evaluate.debug=true"])), @"
            warning[C008]: setting `debug` is probably a mistake
              where: stage `evaluate` (evaluate)
              why:   `debug` is set, but a stage that runs between steps gets no rows, so it is not recorded
              help:  remove it; its measurements are in metrics.jsonl and samples.jsonl
            ");
        }
    }
}

#[test]
fn valid_settings_are_not_reported() {
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
        // Every run that samples measures entropy.
        ("rules.entropy_collapse.limit = 0.1", &[]),
        (
            "rules = { kl_blow_up = {}, grad_norm_spike = {}, weights_unchanged = {}, length_limit = {} }",
            &[],
        ),
    ] {
        let text = printed(findings_for(trace, more));
        assert_eq!(text, "", "{trace}");
    }
}

#[test]
fn all_are_reported_at_once() {
    let trace = "stats = false\nsteps = [0, 2, 2, 99]\nevery = 0\npart_steps = 0\nbudget_mb = 0\n\
                 stages = [\"rewrad\"]\nrules = { low_ess = { limit = 7 }, non_finite = { limit = -1 }, kl = {} }";
    insta::assert_snapshot!("trace_settings", Findings(findings_for(trace, &[])));
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
            .map_or_else(|findings| findings, |plan| plan.warnings().to_vec());
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

/// A limit that cannot be set in a file, since TOML's `nan` is reported when the file is read.
#[test]
fn limits_that_are_not_numbers_are_reported_in_rust_too() {
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
                .map_or_else(|findings| findings, |plan| plan.warnings().to_vec()),
        );
        assert!(
            text.starts_with("error[C005]: invalid setting `rules.grad_norm_spike.limit`"),
            "{text}"
        );
    }
}

#[test]
fn a_rule_that_two_overrides_tune_is_reported() {
    let both = [
        "trace.rules.low_ess.limit=0.1",
        "trace.rules.low_ess.limit=0.2",
    ];
    let found = parse_pipeline(GRPO, "tiny.toml", &both, &verl::registry());
    let text = printed(found.err().expect("refused"));
    assert!(
        text.starts_with("error[C006]") && text.contains("sets the same setting of the rule"),
        "{text}"
    );
    let other = [
        "trace.rules.low_ess.limit=0.1",
        "trace.rules.low_ess.severity=stop",
    ];
    assert!(parse_pipeline(GRPO, "tiny.toml", &other, &verl::registry()).is_ok());
}

/// A rule that records the limits that it is called with, and never fires.
struct Asked(Arc<Mutex<Vec<f64>>>);

impl Rule for Asked {
    fn name(&self) -> &str {
        "length_of_answers"
    }
    fn limit(&self) -> f64 {
        7.0
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn before_update(&mut self, _: &StepView<'_>, limit: f64) -> Vec<Hit> {
        self.0.lock().expect("no panic").push(limit);
        Vec::new()
    }
}

/// A registry with the rule, and the limits that it records.
fn with_rule() -> (Registry, Arc<Mutex<Vec<f64>>>) {
    let asked = Arc::<Mutex<Vec<f64>>>::default();
    let notes = asked.clone();
    let registry = verl::registry().rule(move || Asked(notes.clone()));
    (registry, asked)
}

#[test]
fn a_rule_that_was_added_in_rust_is_tuned_and_silenced_by_its_name() {
    let limits = |trace: &str| {
        let place = Place::new();
        let (registry, asked) = with_rule();
        let text = format!("{GRPO}\n[trace]\n{trace}\n");
        let pipe = place.parse_with(&text, "run", &[], &registry);
        let pipe = pipe.unwrap_or_else(|findings| panic!("{}", Findings(findings)));
        let plan = pipe.plan().expect("a plan");
        assert_eq!(printed(plan.warnings().to_vec()), "", "{trace}");
        let trainer = Trainer::with_options(plan, TrainerOptions::default());
        trainer
            .and_then(|mut trainer| trainer.train())
            .expect("a run");
        let asked = asked.lock().expect("no panic");
        asked.clone()
    };
    assert_eq!(limits(""), [7.0; 3]);
    assert_eq!(limits("rules.length_of_answers.limit = 2.5"), [2.5; 3]);
    assert_eq!(
        limits("rules.length_of_answers.severity = \"off\""),
        [0.0; 0]
    );
}

#[test]
fn names_and_limits_of_rules_that_were_added_in_rust_are_checked() {
    let errors_of = |trace: &str| {
        let place = Place::new();
        let (registry, _) = with_rule();
        let text = format!("{GRPO}\n[trace]\n{trace}\n");
        let pipe = place.parse_with(&text, "run", &[], &registry);
        let found = pipe.and_then(|pipe| pipe.plan());
        printed(found.err().expect("refused"))
    };
    let text = errors_of("rules.length_of_answer.limit = 1");
    assert!(
        text.starts_with("error[P023]") && text.contains("did you mean `length_of_answers`?"),
        "{text}"
    );
    let text = errors_of("rules.length_of_answers.limit = -1");
    assert!(
        text.starts_with("error[C005]")
            && text.contains("is -1, but a limit must not be below 0")
            && text.contains("(default: 7)"),
        "{text}"
    );
    let text = errors_of("stats = false\nrules.length_of_answers.severity = \"stop\"");
    assert!(
        text.starts_with("error[C005]") && text.contains("is set to stop the run"),
        "{text}"
    );
    let (registry, _) = with_rule();
    let schema = pipeline_schema(&registry);
    let names = &schema["properties"]["trace"]["properties"]["rules"]["propertyNames"]["enum"];
    let names = names.as_array().expect("names");
    assert!(names.contains(&"length_of_answers".into()) && names.contains(&"low_ess".into()));
}

#[test]
fn two_rules_with_the_same_name_are_reported() {
    let place = Place::new();
    let notes = Arc::<Mutex<Vec<f64>>>::default();
    let own = move || Asked(notes.clone());
    let pipe = place.grpo("run", &[]).rule(own.clone()).rule(own);
    let text = printed(pipe.plan().err().expect("refused"));
    assert!(
        text.starts_with("error[C007]: two rules are named `length_of_answers`"),
        "{text}"
    );
}
