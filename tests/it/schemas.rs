//! Committed schemas match the types that run, and they agree with the reader about files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use jsonschema::Validator;
use serde_json::{Value, json};
use verl::pipe::cli;
use verl::pipe::cli::schema::SchemaArgs;
use verl::pipe::config::parse_pipeline;
use verl::pipe::pipe::DataPipe;
use verl::pipe::plan::Plannable;
use verl::pipe::run::records::{RowErrorLine, RowStatus};
use verl::pipe::run::trainer::{Trainer, TrainerOptions};
use verl::pipe::schema::edges::PipelineEdges;
use verl::pipe::schema::folder::{Document, Format};
use verl::pipe::schema::kinds::Catalogue;
use verl::pipe::schema::run_folder::Written;
use verl::pipe::schema::{NOTE, pipeline_schema};

use crate::kit::{Finished, GRPO, Place, root};

const REFRESH: &str =
    "write the folder anew with `just schemas` (cargo run --bin pipe -- schema --out schemas)";

/// Files below a folder, by their paths in it.
fn files_below(folder: &Path) -> BTreeMap<String, String> {
    fn walk(folder: &Path, root: &Path, out: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, root, out);
            } else {
                let name = path.strip_prefix(root).expect("inside").to_string_lossy();
                out.insert(
                    name.replace('\\', "/"),
                    fs::read_to_string(&path).expect("a text"),
                );
            }
        }
    }
    let mut out = BTreeMap::new();
    walk(folder, folder, &mut out);
    out
}

#[test]
fn the_committed_schemas_are_not_stale() {
    let registry = verl::registry();
    let made: BTreeMap<String, String> = Catalogue::of(&registry)
        .files(Format::Json)
        .into_iter()
        .collect();
    let committed = files_below(&root().join("schemas"));
    let stale = made
        .iter()
        .filter(|(path, text)| committed.get(*path) != Some(*text));
    let stale: Vec<&String> = stale.map(|(path, _)| path).collect();
    assert!(
        stale.is_empty(),
        "stale or missing in schemas/: {stale:?}; {REFRESH}"
    );
    let extra: Vec<&String> = committed
        .keys()
        .filter(|path| !made.contains_key(*path))
        .collect();
    assert!(
        extra.is_empty(),
        "nothing of that name is registered, remove from schemas/: {extra:?}"
    );
}

#[test]
fn every_kind_has_a_document_that_is_a_schema() {
    let registry = verl::registry();
    let catalogue = Catalogue::of(&registry);
    let documents = catalogue.documents();
    let paths: Vec<&str> = documents
        .iter()
        .map(|document| document.path.as_str())
        .collect();
    for kind in registry.stages().iter() {
        assert!(
            paths.contains(&format!("stages/{}", kind.name).as_str()),
            "{}",
            kind.name
        );
    }
    for Document { path, schema } in &documents {
        assert!(jsonschema::meta::is_valid(schema), "{path}");
        jsonschema::draft202012::new(schema).unwrap_or_else(|error| panic!("{path}: {error}"));
        let page = Format::Md.text(schema);
        assert!(page.starts_with("# ") && page.len() > 100, "{path}");
        let longest = page
            .lines()
            .map(|line| line.chars().count())
            .max()
            .unwrap_or_default();
        assert!(longest <= 160, "{path} has a line of {longest} columns");
        // Every stage could list its keys, and every part within its stage.
        let input = |name: &String| name.starts_with("input");
        let sides = schema["$defs"].as_object().into_iter().flatten();
        for (_, side) in sides.filter(|(name, _)| input(name)) {
            let source = schema["$defs"]["output"]["required"] != json!([]);
            let observer = schema[NOTE]["runs"] != "in every step";
            assert!(
                side["required"] != json!([]) || source || observer,
                "{path}"
            );
        }
    }
}

#[test]
fn every_key_and_setting_is_described() {
    let registry = verl::registry();
    for Document { path, schema } in Catalogue::of(&registry).documents() {
        let mut tables = vec![&schema];
        tables.extend(
            schema["$defs"]
                .as_object()
                .into_iter()
                .flat_map(|all| all.values()),
        );
        for table in tables {
            for (name, property) in table["properties"].as_object().into_iter().flatten() {
                let described = property["description"]
                    .as_str()
                    .is_some_and(|text| text.len() > 3);
                let constant = !property["const"].is_null();
                assert!(
                    described || constant || path == "edges" || path == "pipeline",
                    "{path}: {name}"
                );
            }
        }
    }
}

fn validator() -> Validator {
    jsonschema::draft202012::new(&pipeline_schema(&verl::registry())).expect("a schema")
}

fn as_json(text: &str) -> Value {
    json!(text.parse::<toml::Table>().expect("TOML"))
}

fn examples() -> Vec<(PathBuf, String)> {
    let folder = root().join("examples/pipelines");
    let entries = fs::read_dir(folder).expect("the examples");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let texts = paths.into_iter().map(|path| {
        let text = fs::read_to_string(&path).expect("a file");
        (path, text)
    });
    texts.collect()
}

#[test]
fn every_example_names_its_schema_and_fits_it() {
    let validator = validator();
    let examples = examples();
    assert!(examples.len() >= 18);
    for (path, text) in examples {
        let named = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("#:schema "));
        let named = named.unwrap_or_else(|| panic!("{} has no `#:schema` line", path.display()));
        let schema = path.parent().expect("a folder").join(named);
        let schema =
            fs::canonicalize(&schema).unwrap_or_else(|e| panic!("{}: {e}", schema.display()));
        assert_eq!(
            schema,
            fs::canonicalize(root().join("schemas/pipeline.json")).expect("a schema")
        );
        let faults: Vec<String> = validator
            .iter_errors(&as_json(&text))
            .map(|error| error.to_string())
            .collect();
        assert!(faults.is_empty(), "{}: {faults:?}", path.display());
    }
}

#[test]
fn files_with_faults_do_not_fit_the_schema() {
    let validator = validator();
    let registry = verl::registry();
    assert!(validator.is_valid(&as_json(GRPO)));
    for (from, to) in [
        ("seed = 5", "sede = 5"),
        ("steps = 3", "steps = \"3\""),
        ("steps = 3", "steps = -3"),
        ("prompts = 4", "prompts = 4.5"),
        ("max_new_tokens = 10", "max_new_tokns = 10"),
        ("max_new_tokens = 10", "max_new_tokens = true"),
        ("kind = \"reward\"", "kind = \"rewad\""),
        ("rule = \"length\"", "rule = \"lengt\""),
        ("kind = \"grpo\", kl_coef", "kind = \"grpo\", kl_cof"),
        ("kind = \"grpo\", kl_coef", "kind = \"gpro\", kl_coef"),
        ("split = \"heldout\"", "split = \"heldot\""),
        ("learning_rate = 1e-3", "learning_rate = [1e-3]"),
        ("[batch]", "[bath]"),
    ] {
        let text = GRPO.replacen(from, to, 1);
        assert_ne!(text, GRPO, "{from}");
        assert!(!validator.is_valid(&as_json(&text)), "{from} -> {to}");
        let read = parse_pipeline::<&str>(&text, "tiny.toml", &[], &registry);
        assert!(read.is_err(), "{from} -> {to}");
    }
    // An error is reported for the right stage.
    let text = GRPO.replacen("target_tokens = 4", "target_token = 4", 1);
    let errors: Vec<String> = validator
        .iter_errors(&as_json(&text))
        .map(|error| error.to_string())
        .collect();
    assert!(
        errors.len() == 1 && errors[0].contains("target_token") && errors[0].contains("unexpected"),
        "{errors:?}"
    );
    for (from, to) in [
        ("heldout", "test"),
        ("heldout", "held_out"),
        ("{ kind = \"grpo\", kl_coef = 0.01 }", "\"gspo\""),
    ] {
        let text = GRPO.replacen(from, to, 1);
        assert_ne!(text, GRPO, "{from}");
        assert!(validator.is_valid(&as_json(&text)), "{from} -> {to}");
    }
}

/// As written by a run that waited for a long time.
const STALL: &str = r#"{
  "step": 2, "timestamp": 1.5, "quiet_s": 60.0, "error": null,
  "running": [{"stage": "reward", "keys": ["rewards"], "samples": "0.1#2", "waited_s": 60.0, "deadline_s": 90.0, "on": "host"}],
  "waiting": [{"stage": "update", "keys": [], "samples": "", "waited_s": 60.0, "deadline_s": null, "on": "reward"}]
}"#;

/// Files below a folder, as paths in it.
fn paths_below(folder: &Path) -> Vec<String> {
    let mut left = vec![folder.to_owned()];
    let mut paths = Vec::new();
    while let Some(here) = left.pop() {
        for entry in fs::read_dir(here).expect("a folder") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => left.push(path),
                false => {
                    let name = path.strip_prefix(folder).expect("inside");
                    paths.push(name.to_string_lossy().replace('\\', "/"));
                }
            }
        }
    }
    paths
}

#[test]
fn a_run_folder_fits_its_schemas() {
    let place = Place::new();
    let registry = verl::registry();
    // With every file that a run can write: steps in full with their state, a rule that fires, a schema for editors.
    let pipe = place.grpo(
        "run",
        &[
            "steps=2",
            "trace.every=1",
            "trace.rules.length_limit.limit=0",
        ],
    );
    let options = TrainerOptions {
        schema: Some(pipeline_schema(&registry)),
        ..TrainerOptions::default()
    };
    let trainer = Trainer::with_options(pipe.plan().expect("a plan"), options);
    trainer
        .and_then(|mut trainer| trainer.train())
        .expect("a run");
    let run = Finished {
        dir: place.path("run"),
    };
    std::fs::write(run.dir.join("stall.json"), STALL).expect("a file");
    let failed = RowErrorLine {
        step: 2,
        stage: "reward".to_owned(),
        sample: Some("0.1#2".to_owned()),
        data_row: Some(2),
        status: RowStatus::TimedOut,
        reason: "no answer within the deadline of 10 s".to_owned(),
        seconds: Some(10.0),
        rows: 1,
    };
    let failed = serde_json::to_string(&failed).expect("JSON");
    std::fs::write(run.dir.join("row_errors.jsonl"), failed).expect("a file");
    let files = Catalogue::of(&registry).run_files();
    let mut seen = BTreeSet::new();
    for path in paths_below(&run.dir) {
        let known: Vec<_> = files.iter().filter(|file| file.is(&path)).collect();
        let [file] = known.as_slice() else {
            panic!("{path} is documented {} times", known.len());
        };
        seen.insert(file.name);
        let values: Vec<Value> = match file.written {
            Written::Json => vec![serde_json::from_str(&run.read(&path)).expect("JSON")],
            Written::JsonLines => {
                let text = run.read(&path);
                let lines = text.lines().map(serde_json::from_str);
                lines.collect::<Result<_, _>>().expect("objects")
            }
            // Tables are compared where they are written.
            Written::Parquet | Written::ArrowStream | Written::Other(_) => continue,
        };
        let validator = jsonschema::draft202012::new(&file.schema).expect("a schema");
        assert!(!values.is_empty(), "{path}");
        for value in values {
            let faults: Vec<String> = validator
                .iter_errors(&value)
                .map(|error| error.to_string())
                .collect();
            assert!(faults.is_empty(), "{path}: {faults:?} in {value}");
            // The other way round: everything in the file is documented, except names that only the run knows.
            let named = value.as_object().expect("an object").keys();
            let open = [
                "data.json",
                "metrics.jsonl",
                "samples.jsonl",
                "versions.json",
            ];
            let is_documented =
                |name: &&String| file.schema["properties"].get(name.as_str()).is_some();
            let undocumented: Vec<&String> = named.filter(|name| !is_documented(name)).collect();
            assert!(
                undocumented.is_empty() || open.contains(&file.name),
                "{path}: {undocumented:?}"
            );
        }
    }
    let unseen: Vec<&str> = files
        .iter()
        .map(|file| file.name)
        .filter(|name| !seen.contains(name))
        .collect();
    assert!(unseen.is_empty(), "no run of this test writes {unseen:?}");
    // Every number is declared by a stage or the engine, or named at run time by a part.
    let files = Catalogue::of(&registry).run_files();
    let metrics = files
        .iter()
        .find(|file| file.name == "metrics.jsonl")
        .expect("the file");
    let known = |name: &str| {
        let patterns = metrics.schema["patternProperties"]
            .as_object()
            .expect("patterns");
        metrics.schema["properties"].get(name).is_some()
            || patterns.keys().any(|pattern| {
                let (before, after) = pattern.split_once("[^/]+").expect("a stage");
                let (before, after) = (before.trim_start_matches('^'), after.trim_end_matches('$'));
                name.starts_with(before) && name.ends_with(after)
            })
    };
    for line in run.metrics() {
        let unknown: Vec<&String> = line.keys().filter(|name| !known(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
    let config = as_json(&run.read("config.toml"));
    assert!(validator().is_valid(&config), "{config}");
}

/// What `pipe schema` prints, and its exit code.
fn printed(args: &SchemaArgs) -> (u8, String) {
    let mut out = Vec::new();
    let code = cli::schema::schema(args, &verl::registry(), &mut out).expect("a text");
    (code, String::from_utf8(out).expect("UTF-8"))
}

fn page(change: impl FnOnce(&mut SchemaArgs)) -> String {
    let mut args = SchemaArgs {
        format: Format::Md,
        ..SchemaArgs::default()
    };
    change(&mut args);
    let (code, text) = printed(&args);
    assert_eq!(code, 0, "{text}");
    text
}

#[test]
fn pages() {
    insta::assert_snapshot!(
        "schema_generate",
        page(|args| args.stage = Some("generate".to_owned()))
    );
    insta::assert_snapshot!(
        "schema_log_probs",
        page(|args| args.stage = Some("log_probs".to_owned()))
    );
    insta::assert_snapshot!(
        "schema_loss_dpo",
        page(|args| args.part = Some("loss/dpo".to_owned()))
    );
    insta::assert_snapshot!(
        "schema_causal_lm",
        page(|args| args.model = Some("causal_lm".to_owned()))
    );
    insta::assert_snapshot!(
        "schema_status",
        page(|args| args.run_file = Some("status.json".to_owned()))
    );
    for (file, snapshot) in [
        ("trace/steps/<step>/<stage>.parquet", "schema_stage_file"),
        ("trace/anomalies.jsonl", "schema_anomalies"),
    ] {
        insta::assert_snapshot!(snapshot, page(|args| args.run_file = Some(file.to_owned())));
    }
    // A file only by its name.
    assert_eq!(
        page(|args| args.run_file = Some("step.json".to_owned())),
        page(|args| args.run_file = Some("trace/steps/<step>/step.json".to_owned()))
    );
    insta::assert_snapshot!(
        "schema_pipeline_file",
        Format::Md.text(&pipeline_schema(&verl::registry()))
    );
    // Only the kind, if no other slot has it.
    assert_eq!(
        page(|args| args.part = Some("dpo".to_owned())),
        page(|args| args.part = Some("loss/dpo".to_owned()))
    );
}

#[test]
fn edges_of_a_pipeline() {
    let grpo = |args: &mut SchemaArgs| {
        args.pipeline = Some(root().join("examples/pipelines/grpo_addition.toml"));
        let tiny = ["actor", "ref"].map(|model| {
            let folder = root().join("examples/models/addition-init");
            [
                format!("{model}.path={}", folder.display()),
                format!("{model}.init=random"),
            ]
        });
        args.overrides = tiny
            .into_iter()
            .flatten()
            .chain(["batch.samples=4".to_owned()])
            .collect();
    };
    insta::assert_snapshot!("schema_edges", page(grpo));
    let mut args = SchemaArgs::default();
    grpo(&mut args);
    let (code, text) = printed(&args);
    assert_eq!(code, 0, "{text}");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    let schema = fs::read_to_string(root().join("schemas/edges.json")).expect("a schema");
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    assert!(
        jsonschema::draft202012::new(&schema)
            .expect("a schema")
            .is_valid(&value)
    );
    let edges: PipelineEdges = serde_json::from_value(value).expect("edges");
    let advantages = edges
        .edges
        .iter()
        .find(|edge| edge.key == "advantages")
        .expect("the key");
    assert_eq!(advantages.dims[0].size, Some(32 * 4));
}

#[test]
fn unknown_names_are_reported_with_the_nearest_names() {
    type Ask = fn(&mut SchemaArgs, String);
    let asks: [(Ask, &str, &str); 7] = [
        (
            |args, name| args.stage = Some(name),
            "generat",
            "did you mean `generate`?",
        ),
        (
            |args, name| args.part = Some(name),
            "loss/gspp",
            "did you mean `loss/gspo`?",
        ),
        (
            |args, name| args.part = Some(name),
            "grpo",
            "several slots have it: use",
        ),
        (
            |args, name| args.model = Some(name),
            "causal",
            "did you mean `causal_lm`?",
        ),
        (
            |args, name| args.data = Some(name),
            "jsonn",
            "did you mean `jsonl`?",
        ),
        (
            |args, name| args.run_file = Some(name),
            "status",
            "did you mean `status.json`?",
        ),
        (
            |args, name| args.run_file = Some(name),
            "trace/step.json",
            "known files: ",
        ),
    ];
    for (ask, name, expected) in asks {
        let mut args = SchemaArgs::default();
        ask(&mut args, name.to_owned());
        let (code, text) = printed(&args);
        assert_eq!(code, 1);
        assert!(
            text.contains("error[C003]") && text.contains(expected),
            "{text}"
        );
    }
    let mut args = SchemaArgs {
        pipeline: Some(root().join("examples/pipelines/absent.toml")),
        ..SchemaArgs::default()
    };
    let (code, text) = printed(&args);
    assert!(code == 1 && text.contains("error[C001]"), "{text}");
    args.pipeline = Some(root().join("examples/pipelines/grpo_addition.toml"));
    args.overrides = vec!["generate.temprature=1".to_owned()];
    let (code, text) = printed(&args);
    assert!(code == 1 && text.contains("error[C002]"), "{text}");
}

#[test]
fn a_folder_of_documents_has_an_index() {
    let temp = tempfile::tempdir().expect("a folder");
    for format in [Format::Json, Format::Md] {
        let dir = temp.path().join(format.file("docs"));
        let args = SchemaArgs {
            format,
            out: Some(dir.clone()),
            ..SchemaArgs::default()
        };
        let (code, text) = printed(&args);
        assert!(code == 0 && text.contains("files in"), "{text}");
        let files = files_below(&dir);
        let index = match format {
            Format::Json => &files["index.json"],
            Format::Md => &files["README.md"],
        };
        for path in files
            .keys()
            .filter(|path| !["index.json", "README.md"].contains(&path.as_str()))
        {
            assert!(index.contains(path), "{path} is not in the index");
        }
        if format == Format::Md {
            insta::assert_snapshot!("schema_index", index);
        }
    }
    // A single document is written to its path in the complete folder.
    let args = SchemaArgs {
        stage: Some("generate".to_owned()),
        out: Some(temp.path().join("one")),
        ..SchemaArgs::default()
    };
    let (code, _) = printed(&args);
    assert_eq!(code, 0);
    assert_eq!(
        files_below(&temp.path().join("one"))
            .into_keys()
            .collect::<Vec<_>>(),
        ["stages/generate.json"]
    );
}

/// A registered custom stage has a page.
#[test]
fn a_custom_stage_is_documented() {
    let registry = crate::examples::registry_of_the_custom_algorithm();
    let catalogue = Catalogue::of(&registry);
    let loss = catalogue.part("loss", "spo").expect("the loss");
    let reads = &loss["$defs"]["input_of_update"]["properties"];
    assert_eq!(reads["old_log_probs"][NOTE]["used"], "where written");
    let pipe = DataPipe::new("empty");
    assert_eq!(PipelineEdges::of(&pipe.plan().expect("a plan")).edges, []);
}
