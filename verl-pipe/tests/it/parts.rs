//! Custom parts in a custom stage: from a file, in Rust, in the schema, and their errors.

use std::sync::{Arc, Mutex};

use crate::kit::{self, *};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use verl_pipe::config::{parse_pipeline, to_toml};
use verl_pipe::diagnostic::{Diagnostic, Findings};
use verl_pipe::keys::{PROMPTS, REWARDS};
use verl_pipe::part::{Part, PartConfig, Slot};
use verl_pipe::pipe::DataPipe;
use verl_pipe::plan::Plannable;
use verl_pipe::registry::Registry;
use verl_pipe::schema::pipeline_schema;
use verl_pipe::stage::*;

/// What parts of slot `rule` are built into: a statement about a row.
struct Rule(String);

impl Slot for Rule {
    const NAME: &'static str = "rule";
}

/// Settings that several kinds share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Scored<R: Default> {
    #[serde(flatten)]
    rule: R,
    /// Reward of a right answer.
    correct: f64,
}

impl<R: Default> Default for Scored<R> {
    fn default() -> Self {
        Scored {
            rule: R::default(),
            correct: 1.0,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Exact {}

impl PartConfig for Scored<Exact> {
    type Slot = Rule;
    const KIND: &'static str = "exact";
    const SUMMARY: &'static str = "the answer itself";
    fn build(&self, _: &BuildContext) -> Result<Rule, Vec<ConfigError>> {
        Ok(Rule(format!("exact {}", self.correct)))
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Near {
    /// How far an answer may be off.
    distance: f64,
    /// Whether signs count.
    signed: bool,
}

impl Default for Near {
    fn default() -> Self {
        Near {
            distance: 0.5,
            signed: true,
        }
    }
}

impl PartConfig for Scored<Near> {
    type Slot = Rule;
    const KIND: &'static str = "near";
    const SUMMARY: &'static str = "a number near the answer";
    fn build(&self, context: &BuildContext) -> Result<Rule, Vec<ConfigError>> {
        if self.rule.distance < 0.0 {
            let reason = format!("is {}", self.rule.distance);
            return Err(vec![ConfigError::new("distance", reason, "set it above 0")]);
        }
        Ok(Rule(format!(
            "near {} {}",
            self.rule.distance, context.seed
        )))
    }
}

/// A kind that contains another part, and has a setting without a default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
struct Inverse {
    /// What must not hold.
    of: Part<Rule>,
}

impl PartConfig for Inverse {
    type Slot = Rule;
    const KIND: &'static str = "inverse";
    const SUMMARY: &'static str = "what another rule does not hold for";
    fn build(&self, context: &BuildContext) -> Result<Rule, Vec<ConfigError>> {
        let Rule(of) = self.of.build("of", context)?;
        Ok(Rule(format!("not {of}")))
    }
}

/// A kind that is not registered.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
struct Own {
    words: Vec<String>,
}

impl PartConfig for Own {
    type Slot = Rule;
    const KIND: &'static str = "own";
    const SUMMARY: &'static str = "words that must occur";
    fn build(&self, _: &BuildContext) -> Result<Rule, Vec<ConfigError>> {
        Ok(Rule(self.words.join("+")))
    }
}

/// A stage with two fields that contain parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Judge {
    /// The rule.
    rule: Part<Rule>,
    /// Further rules.
    more: Vec<Part<Rule>>,
    /// Reward of anything else.
    wrong: f64,
}

impl Default for Judge {
    fn default() -> Self {
        Judge {
            rule: Scored::<Exact>::default().into(),
            more: Vec::new(),
            wrong: 0.0,
        }
    }
}

/// The rules from which the judges of the running test were built.
static BUILT: Mutex<Vec<Vec<String>>> = Mutex::new(Vec::new());

impl StageConfig for Judge {
    const KIND: &'static str = "judge";
    const SUMMARY: &'static str = "judges by rules";
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut rules = vec![self.rule.build("rule", context)?.0];
        for part in &self.more {
            rules.push(part.build("more", context)?.0);
        }
        BUILT.lock().expect("no panic").push(rules);
        let spec = StageSpec::new().reads(PROMPTS).writes(REWARDS);
        Ok(Box::new(Declared(spec)))
    }
}

fn registry() -> Registry {
    kit::registry()
        .stage::<Judge>()
        .part::<Scored<Exact>>()
        .part::<Scored<Near>>()
        .part::<Inverse>()
}

const FILE: &str = "
data.train = \"questions.jsonl\"
[[stages]]
kind = \"prompts\"
[[stages]]
kind = \"judge\"
";

fn read(judge: &str, overrides: &[&str]) -> Result<DataPipe, Vec<Diagnostic>> {
    parse_pipeline(
        &format!("{FILE}{judge}"),
        "judge.toml",
        overrides,
        &registry(),
    )
}

fn config(pipe: &DataPipe) -> Value {
    pipe.stages[1].config.clone()
}

/// The judge that a file with this line and these overrides declares.
#[track_caller]
fn check(judge: &str, overrides: &[&str], expected: Value) {
    let pipe = read(judge, overrides)
        .map_err(Findings)
        .expect("a pipeline");
    assert_eq!(config(&pipe), expected);
    // The resolved file gives the same configuration.
    let text = to_toml(&pipe).expect("a file");
    let again = parse_pipeline::<&str>(&text, "again.toml", &[], &registry());
    let again = again.map_err(Findings).expect("a pipeline");
    assert_eq!(config(&again), expected, "{text}");
}

#[test]
fn a_file_selects_a_part_by_its_kind() {
    let exact = |correct: f64| json!({"kind": "exact", "correct": correct});
    let near = json!({"kind": "near", "distance": 2.0, "signed": true, "correct": 1.0});
    let judge = |rule: &Value| json!({"rule": rule, "more": [], "wrong": 0.0});
    check("", &[], judge(&exact(1.0)));
    check("rule = \"exact\"", &[], judge(&exact(1.0)));
    check(
        "rule = { kind = \"exact\", correct = 3 }",
        &[],
        judge(&exact(3.0)),
    );
    check(
        "rule = { kind = \"near\", distance = 2 }",
        &[],
        judge(&near),
    );
    check(
        "rule = { kind = \"inverse\", of = { kind = \"near\", distance = 2 } }",
        &[],
        judge(&json!({"kind": "inverse", "of": near})),
    );
    check(
        "more = [\"exact\", { kind = \"near\", distance = 2 }]",
        &[],
        json!({"rule": exact(1.0), "more": [exact(1.0), near], "wrong": 0.0}),
    );
    check(
        "rule = \"exact\"",
        &["judge.rule={ kind = \"near\", distance = 2 }"],
        judge(&near),
    );
    for part in ["{ kind = \"near\" }", "\"near\""] {
        let overrides = ["judge.rule.distance=2"];
        check(&format!("rule = {part}"), &overrides, judge(&near));
    }
}

#[test]
fn a_part_is_built_with_its_stage() {
    let own = Own {
        words: vec!["please".to_owned(), "thanks".to_owned()],
    };
    let inverse = Inverse {
        of: own.clone().into(),
    };
    let judge = Judge {
        rule: inverse.into(),
        more: vec![Scored::<Near>::default().into()],
        ..Judge::default()
    };
    let questions = Questions {
        path: "a.jsonl".to_owned(),
    };
    let mut pipe = DataPipe::new("own")
        .data("train", questions)
        .add_stage("prompts", Prompts::default())
        .add_stage("judge", judge);
    pipe.run.seed = 41;
    BUILT.lock().expect("no panic").clear();
    pipe.plan().map_err(Findings).expect("a plan");
    let built = BUILT.lock().expect("no panic").clone();
    assert!(
        built.contains(&vec![
            "not please+thanks".to_owned(),
            "near 0.5 41".to_owned()
        ]),
        "{built:?}"
    );
    // A part that is not registered is written, and reported by name when it is read without registration.
    let text = to_toml(&pipe).expect("a file");
    assert!(text.contains("words = [\"please\", \"thanks\"]"), "{text}");
    let again = |registry: &Registry| parse_pipeline::<&str>(&text, "own.toml", &[], registry);
    let finding = &again(&registry()).err().expect("it is unknown")[0];
    assert_eq!(
        (finding.code, finding.what.as_str()),
        ("C003", "unknown rule kind `own`")
    );
    let again = again(&registry().part::<Own>()).map_err(Findings);
    assert_eq!(config(&again.expect("a pipeline")), config(&pipe));
}

fn printed(findings: &[Diagnostic]) -> String {
    Findings(findings.to_vec()).to_string()
}

#[test]
fn all_faults_of_parts_are_reported_at_once() {
    let text = r#"
seed = 3
data.train = "questions.jsonl"
[[stages]]
kind = "prompts"
dat = "train"
[[stages]]
kind = "judge"
name = "unknown kind"
rule = { kind = "exat", correct = 2 }
wrong = "none"
[[stages]]
kind = "judge"
name = "unknown settings"
rule = { kind = "near", distnace = 1, corect = 1, signed = 3, distance = "far" }
rwong = 1
[[stages]]
kind = "judge"
name = "no kind"
rule = { correct = 2 }
[[stages]]
kind = "judge"
name = "no part"
rule = 3
[[stages]]
kind = "judge"
name = "missing"
rule = "inverse"
[[stages]]
kind = "judge"
name = "nested"
rule = { kind = "inverse", of = { kind = "near", sined = true } }
[[stages]]
kind = "judge"
name = "in a list"
more = ["exact", { kind = 3 }]
"#;
    let found = parse_pipeline::<&str>(text, "judge.toml", &[], &registry());
    insta::assert_snapshot!("faults", printed(&found.err().expect("faults")));
}

#[test]
fn invalid_settings_of_a_part_are_reported_with_its_stage() {
    let rejected = read("rule = { kind = \"near\" }", &["judge.rule.distance=-1"])
        .and_then(|pipe| pipe.plan())
        .err();
    insta::assert_snapshot!("refused", printed(&rejected.expect("an error")));
}

/// Another slot with the name `rule`.
struct Impostor;

impl Slot for Impostor {
    const NAME: &'static str = "rule";
}

#[derive(Clone, Default, Serialize, Deserialize, JsonSchema)]
struct Other {}

impl PartConfig for Other {
    type Slot = Impostor;
    const KIND: &'static str = "other";
    const SUMMARY: &'static str = "of another slot";
    fn build(&self, _: &BuildContext) -> Result<Impostor, Vec<ConfigError>> {
        Ok(Impostor)
    }
}

#[test]
fn duplicate_names_of_parts_are_reported() {
    let registry = registry().part::<Scored<Near>>().part::<Other>();
    let duplicates: Vec<String> = registry
        .duplicates()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        duplicates,
        [
            "there are two rule kinds called `near`",
            "there are two slots called `rule`"
        ]
    );
    let kinds = registry.slot("rule").expect("the slot");
    let known: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    assert_eq!(known, ["exact", "near", "inverse"]);
    assert!(registry.slot("loss").is_none());
}

#[test]
fn a_part_cannot_be_read_without_a_registry() {
    let error = serde_json::from_value::<Part<Rule>>(json!("exact")).expect_err("no registry");
    assert!(error.to_string().contains("Registry::reading"), "{error}");
    let read = |value| registry().reading(|| serde_json::from_value::<Part<Rule>>(value));
    assert_eq!(read(json!("near")).expect("a part").kind(), "near");
    let error = read(json!({"kind": "near", "distnace": 1, "signed": 2})).expect_err("faults");
    for words in ["invalid value for `signed`", "unknown setting `distnace`"] {
        assert!(error.to_string().contains(words), "{error}");
    }
    // Reading on one thread does not affect another.
    let shared = Arc::new(registry());
    let found = std::thread::spawn(move || {
        parse_pipeline::<&str>(FILE, "judge.toml", &[], &shared).map(|pipe| pipe.stages.len())
    });
    assert_eq!(
        found.join().expect("no panic").map_err(Findings).ok(),
        Some(2)
    );
}

#[test]
fn the_schema_agrees_with_the_reader() {
    let schema = pipeline_schema(&registry());
    assert!(jsonschema::meta::is_valid(&schema));
    let validator = jsonschema::draft202012::new(&schema).expect("a schema");
    let kinds = serde_json::to_string_pretty(&schema["$defs"]["rule"]).expect("JSON");
    insta::assert_snapshot!("slot", kinds);
    for (judge, valid) in [
        ("rule = \"near\"", true),
        (
            "rule = { kind = \"near\", distance = 1, correct = 2 }",
            true,
        ),
        ("rule = { kind = \"inverse\", of = \"exact\" }", true),
        ("more = [\"exact\", { kind = \"near\" }]", true),
        ("rule = \"nera\"", false),
        ("rule = \"inverse\"", false),
        ("rule = { kind = \"exact\", distance = 1 }", false),
        ("rule = { distance = 1 }", false),
        ("rule = { kind = \"near\", distance = \"far\" }", false),
        ("rule = { kind = \"inverse\", of = \"no\" }", false),
    ] {
        let table: toml::Table = format!("{FILE}{judge}").parse().expect("TOML");
        assert_eq!(validator.is_valid(&json!(table)), valid, "{judge}");
        assert_eq!(read(judge, &[]).is_ok(), valid, "{judge}");
    }
    // A slot without any kind accepts nothing.
    let empty = pipeline_schema(&kit::registry().stage::<Judge>());
    assert_eq!(empty["$defs"]["rule"], json!(false));
}
