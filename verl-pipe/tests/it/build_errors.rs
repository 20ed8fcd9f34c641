//! Each error code: a failing pipeline and its printed text. The root package tests the pipelines of the error pages,
//! since it has the stages that they use.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::kit::*;
use schemars::JsonSchema;
use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use verl_pipe::chain::IntoStage;
use verl_pipe::config::{parse_pipeline, read_pipeline};
use verl_pipe::diagnostic::Diagnostic;
use verl_pipe::field::{Key, Scalar};
use verl_pipe::keys::*;
use verl_pipe::pipe::{DataPipe, stage_fn};
use verl_pipe::plan::Plannable;
use verl_pipe::registry::Registry;
use verl_pipe::schedule::batching::DevicesConfig;
use verl_pipe::schedule::groups::DeviceGroup;
use verl_pipe::sizes::{GroupConfig, WorkerKind};
use verl_pipe::stage::*;

fn pages() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors")
}

fn printed(findings: &[Diagnostic]) -> String {
    findings
        .iter()
        .map(|finding| format!("{finding}\n"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Findings of a pipeline file, warnings of a good one included.
fn findings_of(text: &str, overrides: &[&str]) -> Vec<Diagnostic> {
    match parse_pipeline(text, "example.toml", overrides, &registry()).and_then(|pipe| pipe.plan())
    {
        Ok(plan) => plan.warnings().to_vec(),
        Err(findings) => findings,
    }
}

fn findings(pipe: &DataPipe) -> Vec<Diagnostic> {
    match pipe.plan() {
        Ok(plan) => plan.warnings().to_vec(),
        Err(findings) => findings,
    }
}

/// A stage whose settings cannot be written as JSON.
#[derive(Clone, Deserialize, JsonSchema)]
struct Unwritable {}

impl Serialize for Unwritable {
    fn serialize<S: Serializer>(&self, _serializer: S) -> Result<S::Ok, S::Error> {
        Err(S::Error::custom("there are no words for it"))
    }
}

impl StageConfig for Unwritable {
    const KIND: &'static str = "unwritable";
    const SUMMARY: &'static str = "settings that cannot be written";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let spec = StageSpec::new().rows(RowRule::Source).writes(PROMPTS);
        Ok(Box::new(Declared(spec)))
    }
}

#[test]
fn settings_that_cannot_be_written() {
    let pipe = DataPipe::new("unwritable").add_stage("source", Unwritable {});
    let text = printed(&findings(&pipe));
    let words = "`kind` is `unwritable`, whose settings cannot be written as JSON: there are no words for it";
    assert!(
        text.contains("error[C005]") && text.contains(words),
        "{text}"
    );
}

#[test]
fn values_of_another_critic() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let update = StageSpec::new()
        .reads(VALUES.tagged(critic_tag("critic")))
        .rows(RowRule::Sink);
    let values = Values {
        model: "other".to_owned(),
    };
    let other = Critic {
        path: "base".to_owned(),
        optimizer: None,
    };
    let pipe = grpo()
        .model("other", other)
        .add_stage("values", values)
        .add_stage("update_critic", stage_fn(update, emit));
    insta::assert_snapshot!("P007_values", printed(&findings(&pipe)));
}

#[test]
fn overrides_that_cannot_be_applied() {
    let text = "[models.actor]\npath = \"base\"\n[[stages]]\nkind = \"generate\"\n";
    let overrides = [
        "stesp=10",
        "genrate.temperature=0.7",
        "models.acter.path=x",
        "steps",
        "generate.temprature=1",
    ];
    insta::assert_snapshot!("C006", printed(&findings_of(text, &overrides)));
}

#[test]
fn kinds_that_are_registered_twice() {
    let registry = Registry::new()
        .stage::<Generate>()
        .stage::<Generate>()
        .model::<Decoder>();
    let found = parse_pipeline::<&str>("", "example.toml", &[], &registry)
        .err()
        .expect("is rejected");
    insta::assert_snapshot!("C007", printed(&found));
}

#[test]
fn a_file_that_does_not_exist() {
    let found = read_pipeline::<&str>(Path::new("no/such/file.toml"), &[], &registry())
        .err()
        .expect("fails");
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].code, found[0].location.as_str()),
        ("C001", "no/such/file.toml")
    );
}

#[test]
fn stated_keys_that_differ() {
    let pipe = DataPipe::new("stated")
        .reads(["prompts"])
        .data(
            "train",
            Questions {
                path: "a.jsonl".to_owned(),
            },
        )
        .add_stage("prompts", Prompts::default())
        .writes(["prompts", "answers"])
        .add_stage("reward", Reward::default())
        .reads(["response_texts", "answer"])
        .writes(["scores"])
        .writing("rewards", "scores");
    let found: Vec<Diagnostic> = findings(&pipe)
        .into_iter()
        .filter(|finding| finding.code == "P014")
        .collect();
    insta::assert_snapshot!("P014", printed(&found));
}

#[test]
fn stages_without_rows() {
    const KEPT: Key<Scalar<f32>> = Key::new("kept", "[B]", "", "kept");
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let source = StageSpec::new()
        .rows(RowRule::Source)
        .reads(ANSWERS)
        .writes(KEPT);
    let constant = StageSpec::new().writes(VALUES.field().shaped("[B]"));
    let none = StageSpec::new()
        .reads(PROMPTS)
        .writes(RETURNS)
        .rows(RowRule::Expand(0));
    let filter = StageSpec::new().reads(REWARDS).rows(RowRule::Filter);
    let observer = StageSpec::new().reads(REWARDS).observer(10);
    let pipe = grpo()
        .add_stage("observer", stage_fn(observer, emit))
        .add_stage("source", stage_fn(source, emit))
        .add_stage("constant", stage_fn(constant, emit))
        .add_stage("none", stage_fn(none, emit))
        .add_stage("filter", stage_fn(filter, emit));
    let found: Vec<Diagnostic> = findings(&pipe)
        .into_iter()
        .filter(|finding| finding.code == "P015")
        .collect();
    insta::assert_snapshot!("P015", printed(&found));
}

#[test]
fn filters_that_cannot_refill() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let refill = Refill {
        groups: 0,
        waves: 2,
        on_short: OnShort::Error,
    };
    let rowwise = StageSpec::new()
        .reads(REWARDS)
        .writes(RETURNS.field().shaped("[B]"))
        .rows(RowRule::Filter)
        .refill(refill);
    let nothing = rowwise
        .clone()
        .writes(VALUES.field().shaped("[B]"))
        .cardinality(Cardinality::Group);
    let mut nothing = nothing;
    nothing.writes.remove(0);
    let train = StageSpec::new()
        .reads(REWARDS)
        .writes(REWARDS.field().renamed("trained_rewards"))
        .uses("actor", Access::Update);
    let silent = StageSpec::new()
        .rows(RowRule::Source)
        .writes(PROMPTS)
        .writes(ANSWERS);
    let mut pipe = grpo()
        .add_stage("train", stage_fn(train, emit))
        .add_stage("filter_groups", FilterGroups::default())
        .reading("rewards", "trained_rewards")
        .add_stage("rowwise", stage_fn(rowwise, emit))
        .add_stage("nothing", stage_fn(nothing, emit));
    pipe.stages[0] = stage_fn(silent, emit).named("prompts").declare();
    let found: Vec<Diagnostic> = findings(&pipe)
        .into_iter()
        .filter(|finding| finding.code == "P021")
        .collect();
    insta::assert_snapshot!("P021_others", printed(&found));
}

#[test]
fn rows_that_never_meet() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let other = StageSpec::new()
        .rows(RowRule::Source)
        .writes(VALUES.field().shaped("[B]"));
    let both = StageSpec::new()
        .reads(VALUES.field().shaped("[B]"))
        .reads(REWARDS)
        .rows(RowRule::Sink);
    let pipe = grpo()
        .add_stage("other", stage_fn(other, emit))
        .add_stage("both", stage_fn(both, emit));
    insta::assert_snapshot!("P008_unrelated", printed(&findings(&pipe)));
}

#[test]
fn a_long_cycle_is_printed_as_a_path_of_names() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let step = |from: &str, to: &str| {
        StageSpec::new()
            .reads(REWARDS.field().renamed(from.to_owned()))
            .writes(REWARDS.field().renamed(to.to_owned()))
    };
    let pipe = grpo()
        .add_stage("a", stage_fn(step("k3", "k1"), emit))
        .add_stage("b", stage_fn(step("k1", "k2"), emit))
        .add_stage("c", stage_fn(step("k2", "k3"), emit));
    let found = findings(&pipe);
    assert_eq!(
        (found[0].code, found[0].location.as_str()),
        ("P006", "a -> b -> c -> a")
    );
}

#[test]
fn all_errors_of_a_file_are_reported_at_once() {
    let text = r#"
nmae = "x"
[run]
stpes = 3
seed = "one"
[batch]
prompts = 7
mini_batch = 2
[devices]
group = "cuda:3-1"
[data]
train = "questions.jsonl"
test = "questions.zip"
[models.actor]
path = "base"
optimizer = { learning_rat = 1e-6 }
[[stages]]
kind = "prompts"
[[stages]]
kind = "generat"
[[stages]]
name = "nameless"
[[stages]]
kind = "reward"
rull = "exact"
temprature = 3
"#;
    insta::assert_snapshot!("all_at_once", printed(&findings_of(text, &[])));
}

#[test]
fn all_errors_of_a_graph_are_reported_at_once() {
    let reference = LogProbs {
        model: "reff".to_owned(),
        reference: true,
        ..LogProbs::default()
    };
    let mut pipe = grpo()
        .model(
            "critic",
            Decoder {
                path: "missing".to_owned(),
                optimizer: None,
            },
        )
        .add_stage("more_log_probs", reference.named("again"))
        .add_stage(
            "reward",
            Reward {
                rule: "second".to_owned(),
            },
        )
        .writing("rewards", "second_rewards");
    pipe.batch.micro_batch = Some(7);
    pipe.batch.samples = 5;
    insta::assert_snapshot!("graph_at_once", printed(&findings(&pipe)));
}

#[test]
fn models_to_save_that_do_not_exist() {
    let mut pipe = grpo();
    pipe.run.save = Some(["acter", "ref"].map(str::to_owned).to_vec());
    insta::assert_snapshot!("P009_save", printed(&findings(&pipe)));
}

#[test]
fn deadlines_that_leave_no_time() {
    for seconds in [0.0, -1.0, f64::NAN] {
        let mut pipe = grpo();
        pipe.run.stage_deadline_s = seconds;
        let found = findings(&pipe);
        assert_eq!((found.len(), found[0].code), (1, "C005"), "{seconds}");
    }
    let text = "[run]\nstage_deadline_s = 0.0\n[[stages]]\nkind = \"prompts\"\ndata = \"train\"\n[data]\ntrain = \"a.jsonl\"\n";
    insta::assert_snapshot!("C005_deadline", printed(&findings_of(text, &[])));
}

#[test]
fn several_devices() {
    let mut pipe = grpo();
    pipe.devices = DevicesConfig {
        group: "cuda:0-5".to_owned(),
        rollout_tensor_parallel: 2,
    };
    // Sizes that do not divide by the number of devices are not reported in addition.
    pipe.batch.prompts = 61;
    (pipe.batch.mini_batch, pipe.batch.micro_batch) = (None, None);
    insta::assert_snapshot!("S015", printed(&findings(&pipe)));
    pipe.devices.group = "cuda:5".to_owned();
    let found = findings(&pipe);
    assert_eq!(
        (found.len(), found[0].location.as_str()),
        (1, "[devices] rollout_tensor_parallel")
    );
}

#[test]
fn models_and_stages_without_a_place() {
    let cpu = || GroupConfig::new("cpu");
    let groups = |pipe: DataPipe| pipe.group("train", cpu()).group("score", cpu());
    // No default group, an unknown group, and a stage that needs none.
    let mut pipe = groups(grpo());
    pipe.models[1].group = Some("scores".to_owned());
    let stage = |pipe: &DataPipe, kind: &str| {
        let mut stages = pipe.stages.iter();
        stages
            .position(|stage| stage.kind == kind)
            .expect("a stage")
    };
    let reward = stage(&pipe, "reward");
    pipe.stages[reward].group = Some("train".to_owned());
    insta::assert_snapshot!("S016", printed(&findings(&pipe)));
    // An update in a group that the model is not in, devices that are not valid, and several of them.
    let mut pipe = groups(grpo());
    pipe.devices.group = "train".to_owned();
    let update = stage(&pipe, "update");
    pipe.stages[update].group = Some("score".to_owned());
    pipe.groups[0].1.devices = "cuda:0-3".to_owned();
    pipe.groups[1].1.devices = "cuda:".to_owned();
    insta::assert_snapshot!("S017", printed(&findings(&pipe)));
    // Settings of worker processes, and stages that exist only in this process.
    let mut pipe = groups(grpo()).add_stage(
        "own",
        stage_fn(
            StageSpec::new().reads(REWARDS).rows(RowRule::Sink),
            |_, _| Ok(()),
        ),
    );
    pipe.devices.group = "train".to_owned();
    pipe.groups[1].1.worker = WorkerKind::Process;
    (pipe.run.worker_deadline_s, pipe.run.worker_snapshot_steps) = (0.0, 0);
    insta::assert_snapshot!("S018", printed(&findings(&pipe)));
    // A copy of a model of a kind whose copies do not follow.
    let mut pipe = groups(grpo());
    pipe.devices.group = "train".to_owned();
    let generate = stage(&pipe, "generate");
    pipe.stages[generate].group = Some("score".to_owned());
    insta::assert_snapshot!("S017_copy", printed(&findings(&pipe)));
}

/// A station's letter and three digits.
fn is_code(text: &str) -> bool {
    text.len() == 4
        && text.starts_with(['C', 'D', 'P', 'S', 'R', 'M', 'T'])
        && text[1..].bytes().all(|b| b.is_ascii_digit())
}

#[test]
fn work_that_two_stages_repeat() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let penalty = StageSpec::new()
        .reads(REWARDS)
        .rows(RowRule::Sink)
        .once("a penalty");
    let pipe = grpo().add_stage("first", stage_fn(penalty.clone(), emit));
    assert_eq!(printed(&findings(&pipe)), "");
    let pipe = pipe.add_stage("second", stage_fn(penalty, emit));
    insta::assert_snapshot!("P020", printed(&findings(&pipe)));
}

#[test]
fn settings_that_a_stage_warns_about() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let idle = StageSpec::new()
        .reads(REWARDS)
        .rows(RowRule::Sink)
        .warning(ConfigError::new(
            "price",
            "is 0, so that nothing is taken off",
            "set it to a number above 0",
        ));
    let found = findings(&grpo().add_stage("idle", stage_fn(idle, emit)));
    insta::assert_snapshot!("C008", printed(&found));
}

#[test]
fn the_reader_of_a_missing_key_provides_the_help() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let critic = StageSpec::new()
        .reads(VALUES)
        .rows(RowRule::Sink)
        .remedy("values", "train a critic");
    let pipe = grpo().add_stage("critic", stage_fn(critic, emit));
    let pipe = pipe.reading("values", "worths");
    let found = findings(&pipe);
    assert_eq!(
        (found[0].code, found[0].help.as_str()),
        ("P002", "train a critic")
    );
    assert!(found[0].what.contains("`worths`"), "{}", found[0]);
}

#[test]
fn devices_that_cannot_be_used() {
    let model = Decoder {
        path: "for_newer_devices".to_owned(),
        optimizer: None,
    };
    let mut found = findings(&grpo().model("other", model));
    found.retain(|finding| finding.code == "S013");
    insta::assert_snapshot!("S013", printed(&found));
}

#[test]
fn runs_that_do_not_fit() {
    let model = |path: &str| Decoder {
        path: path.to_owned(),
        ..trained()
    };
    let plan_of = |path: &str| {
        let mut pipe = grpo();
        let other = DataPipe::new("other").model("actor", model(path));
        pipe.models[0] = other.models[0].clone();
        pipe.plan().expect("a plan")
    };
    let plan = plan_of("on_a_small_device");
    let found: Vec<Diagnostic> = plan.warnings().to_vec();
    insta::assert_snapshot!("S014", printed(&found));
    // It can be planned, but not run.
    let errors = plan.schedule().expect_err("does not fit");
    assert_eq!(errors.len(), 1);
    assert!(errors[0].code == "S014" && errors[0].is_error());
    let plan = plan_of("on_a_large_device");
    assert_eq!(printed(plan.warnings()), "");
    assert!(plan.schedule().is_ok());
}

#[test]
fn invalid_device_groups() {
    let found = DeviceGroup::parse("cuda:3-1").expect_err("is rejected");
    insta::assert_snapshot!("S010", printed(&[found]));
}

#[test]
fn nulls_for_a_stage_that_requires_values() {
    const SURE: Key<Scalar<f32>> = Key::new("rewards", "[B]", "", "a reward in every row");
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let sure = StageSpec::new().reads(SURE).rows(RowRule::Sink);
    let found = findings(&grpo().add_stage("sure", stage_fn(sure, emit)));
    insta::assert_snapshot!("P019", printed(&found));
}

#[test]
fn rows_per_prompt_that_disagree_with_the_batch() {
    let emit = |batch, ctx: &mut StageContext<'_>| ctx.emit(batch);
    let train = StageSpec::new()
        .reads(PROMPTS)
        .rows(RowRule::Sink)
        .uses("actor", Access::Update);
    let found: Vec<Diagnostic> =
        findings(&grpo().add_stage("train_on_prompts", stage_fn(train, emit)))
            .into_iter()
            .filter(|finding| finding.code == "S002")
            .collect();
    insta::assert_snapshot!("S002", printed(&found));
}

#[test]
fn every_code_of_the_source_has_a_page_and_vice_versa() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut used = BTreeSet::new();
    let sources = [
        "src",
        "verl-pipe/declare/src",
        "verl-pipe/plan/src",
        "verl-pipe/rules/src",
        "verl-pipe/run/src",
        "verl-pipe/src",
        "verl-pipe/trace/src",
        "verl-pipe/train/src",
        "verl-pipe/view/src",
        "verl-pipe/words/src",
        "verl-stages/src",
        "verl-models/collective/src",
        "verl-models/decoder/src",
        "verl-models/kernels/src",
        "verl-models/rollout/src",
        "verl-models/src",
        "verl-models/text/src",
    ];
    let mut folders: Vec<PathBuf> = sources.iter().map(|folder| root.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                used.extend(
                    text.split('"')
                        .filter(|quoted| is_code(quoted))
                        .map(str::to_owned),
                );
            }
        }
    }
    let paged: BTreeSet<String> = fs::read_dir(pages())
        .expect("the pages")
        .filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_str()?.to_owned()))
        .collect();
    assert_eq!(used, paged);
    for code in &paged {
        let page = fs::read_to_string(pages().join(format!("{code}.md"))).expect("a page");
        assert!(page.starts_with(&format!("# {code}: ")), "{code}");
        for heading in ["## Why", "## Repair"] {
            assert!(page.contains(heading), "{code} has no {heading}");
        }
        // Other tests print the errors of runs, data and traces.
        if code.starts_with(['D', 'R', 'T']) || code == "S011" {
            continue;
        }
        assert!(page.contains("## A pipeline that fails"), "{code}");
        let here = format!("verl-pipe/tests/it/snapshots/it__build_errors__{code}.snap");
        let of_page = format!("tests/it/snapshots/it__error_pages__{code}.snap");
        let others = format!("tests/it/snapshots/it__devices__{code}.snap");
        let printed = [here, of_page, others]
            .iter()
            .any(|path| root.join(path).exists());
        assert!(printed, "{code} has no printed text");
    }
}
