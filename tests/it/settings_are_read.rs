//! Every setting of a pipeline file is read by something: a setting that nothing reads would silently have no
//! effect.
//!
//! The compiler cannot check this, since settings are public and are also read by `Serialize`. So the source is
//! searched: a setting counts as read if an item that mentions its type, or a type that contains it, reads a field with
//! its name. Derives, constructors, copies of the entire value and reads for a default do not count, and neither does a
//! check of the plan: a setting that is only checked changes nothing. Two settings with the same name in one item are
//! not distinguished; a stage, a loss and an estimator are separate items.
//!
//! Nearly everything contains a pipeline, and with it the sections of the file. So a setting of a section counts as
//! read only if an item mentions the section's type or a type that directly contains it, or accesses the section of the
//! pipeline (`pipe.trace`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use verl::pipe::registry::Registry;
use verl::pipe::schema::kinds::Catalogue;
use verl::pipe::schema::{NOTE, pipeline_schema};

use crate::kit::root;
use crate::source::{Item, items_of, sources};

/// Settings of types: the names of the types that declare them, and the name of the setting.
type Setting = (BTreeSet<String>, String);

/// Every setting of every registered kind, of the sections, and of the tables inside them.
fn settings(registry: &Registry) -> Vec<(String, Setting)> {
    let mut all = Vec::new();
    for document in Catalogue::of(registry).documents() {
        let sorts = ["stage", "part", "model", "data set"];
        let note = &document.schema[NOTE];
        if !note["sort"]
            .as_str()
            .is_some_and(|sort| sorts.contains(&sort))
        {
            continue;
        }
        let definitions = document.schema["$defs"]
            .as_object()
            .cloned()
            .unwrap_or_default();
        let owners = types(note["rust"].as_str().expect("a Rust type"));
        collect(
            &document.path,
            &owners,
            &document.schema,
            &definitions,
            &mut all,
        );
    }
    let whole = pipeline_schema(registry);
    let definitions = whole["$defs"].as_object().cloned().unwrap_or_default();
    let sections = whole["properties"].as_object().expect("sections");
    for (name, section) in sections {
        if let Some(rust) = section[NOTE]["rust"].as_str() {
            collect(name, &types(rust), section, &definitions, &mut all);
        }
    }
    // A named group is an entry of its section.
    let group = &sections["groups"]["additionalProperties"];
    let rust = group[NOTE]["rust"].as_str().expect("a Rust type");
    collect("groups/*", &types(rust), group, &definitions, &mut all);
    // Settings at the top of the file, and those that every stage and model has besides its own.
    let of = |owner: &str, name: &str| (BTreeSet::from([owner.to_owned()]), name.to_owned());
    all.push(("name".to_owned(), of("DataPipe", "name")));
    all.push(("models/*.group".to_owned(), of("ModelDecl", "group")));
    for name in COMMON {
        all.push((format!("stages/*.{name}"), of("StageDecl", name)));
    }
    all
}

/// The section of the file that a setting belongs to, if it does.
fn section(place: &str) -> Option<&str> {
    let (section, _) = place.split_once('.')?;
    (!section.contains('/')).then_some(section)
}

/// Names of the types in a path such as `a::B<c::D>`.
fn types(path: &str) -> BTreeSet<String> {
    let names = path.split(|c: char| !c.is_alphanumeric() && c != '_');
    let names = names.filter(|name| name.starts_with(char::is_uppercase));
    names.map(str::to_owned).collect()
}

/// Settings of every stage.
const COMMON: [&str; 4] = ["name", "rename", "debug", "group"];

fn collect(
    place: &str,
    owners: &BTreeSet<String>,
    schema: &Value,
    definitions: &Map<String, Value>,
    out: &mut Vec<(String, Setting)>,
) {
    let one_of = schema["oneOf"].as_array().into_iter().flatten();
    for schema in std::iter::once(schema).chain(one_of) {
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            // `kind` chooses the type; the common settings belong to the entry of the file.
            let common = match place.split_once('/') {
                Some(("stages", _)) => COMMON.contains(&name.as_str()),
                Some(("models", _)) => name == "group",
                _ => false,
            };
            let known = out
                .iter()
                .any(|(_, (by, setting))| by == owners && setting == name);
            if !property["const"].is_null() || known || (common && !place.contains('.')) {
                continue;
            }
            out.push((format!("{place}.{name}"), (owners.clone(), name.clone())));
            for inner in referred(property) {
                let definition = &definitions.get(inner).unwrap_or(&Value::Null);
                if definition[NOTE]["slot"].is_null() {
                    let owners = BTreeSet::from([inner.to_owned()]);
                    collect(
                        &format!("{place}.{name}"),
                        &owners,
                        definition,
                        definitions,
                        out,
                    );
                }
            }
        }
    }
}

/// Definitions that a property refers to.
fn referred(property: &Value) -> Vec<&str> {
    match property {
        Value::Object(map) => {
            let own = map.get("$ref").and_then(Value::as_str);
            let own = own.and_then(|text| text.strip_prefix("#/$defs/"));
            own.into_iter()
                .chain(map.values().flat_map(referred))
                .collect()
        }
        Value::Array(list) => list.iter().flat_map(referred).collect(),
        _ => Vec::new(),
    }
}

/// The settings that no item reads.
fn unread(settings: &[(String, Setting)], items: &[Item]) -> Vec<String> {
    let mut reads: BTreeMap<&BTreeSet<String>, BTreeSet<&str>> = BTreeMap::new();
    for (place, (owners, _)) in settings {
        reads.entry(owners).or_insert_with(|| {
            let section = section(place);
            let levels = section.map_or(usize::MAX, |_| 1);
            let holders = holders(&with_flattened(owners, items), items, levels);
            let about = items.iter().filter(|item| {
                item.words.iter().any(|word| holders.contains(word))
                    || section.is_some_and(|section| item.reads.contains(section))
            });
            about
                .flat_map(|item| &item.reads)
                .map(String::as_str)
                .collect()
        });
    }
    let unread = settings
        .iter()
        .filter(|(_, (owners, name))| !reads[owners].contains(name.as_str()));
    unread.map(|(place, _)| place.clone()).collect()
}

/// Items of the workspace, with `read` replaced by `instead` in `file`.
fn items_with(file: &str, read: &str, instead: &str) -> Vec<Item> {
    let mut sources = sources(root());
    if let Some((_, source)) = sources.iter_mut().find(|(path, _)| path == file) {
        let maimed = source.replace(read, instead);
        assert_ne!(*source, maimed, "{file} has no `{read}`");
        *source = maimed;
    }
    sources
        .iter()
        .filter(|(path, _)| !path.starts_with("verl-pipe/plan/src/checks/"))
        .flat_map(|(_, source)| items_of(source))
        .collect()
}

/// The types and those that are flattened into them.
fn with_flattened(owners: &BTreeSet<String>, items: &[Item]) -> BTreeSet<String> {
    let mut all = owners.clone();
    let defining = items.iter().filter(|item| {
        item.defines
            .as_ref()
            .is_some_and(|name| owners.contains(name))
    });
    all.extend(defining.flat_map(|item| item.flattens.iter().cloned()));
    all
}

/// The types, the types that contain one of them, the types that contain one of those, and so on for `levels` levels.
fn holders(owners: &BTreeSet<String>, items: &[Item], levels: usize) -> BTreeSet<String> {
    let mut all = owners.clone();
    for _ in 0..levels {
        let found = items.iter().filter_map(|item| {
            let name = item.defines.as_ref()?;
            let holds = item.words.iter().any(|word| all.contains(word));
            (holds && !all.contains(name)).then(|| name.clone())
        });
        let found: Vec<String> = found.collect();
        if found.is_empty() {
            break;
        }
        all.extend(found);
    }
    all
}

#[test]
fn every_setting_is_read_by_something() {
    let settings = settings(&verl::registry());
    assert!(settings.len() > 250, "{}", settings.len());
    let unread = unread(&settings, &items_with("", "", ""));
    assert!(
        unread.is_empty(),
        "nothing reads {unread:#?}\nread them where their stage or part is built or runs, or take them out"
    );
}

#[test]
fn every_sort_of_setting_is_looked_at() {
    let settings = settings(&verl::registry());
    let places: BTreeSet<&str> = settings.iter().map(|(place, _)| place.as_str()).collect();
    for place in [
        "batch.micro_batch",
        "data/jsonl.path",
        "devices.group",
        "groups/*.devices",
        "models/*.group",
        "stages/*.group",
        "models/causal_lm.optimizer.learning_rate",
        "name",
        "parts/loss/grpo.clip_low",
        "run.save",
        "run.stage_deadline_s",
        "stages/*.debug",
        "stages/evaluate.every",
        "stages/evaluate.reward.rule",
        "trace.part_steps",
        "trace.rules",
        "trace.rules.limit",
        "trace.rules.severity",
    ] {
        let known: Vec<_> = places
            .iter()
            .filter(|known| known.starts_with("trace"))
            .collect();
        assert!(
            places.contains(place),
            "{place} is not among them; of the trace: {known:?}"
        );
    }
}

/// A stage with a setting that nothing reads, and the source that it would have.
mod deaf {
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};
    use verl::prelude::*;

    #[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    pub struct DeafTuning {
        pub pitch: f64,
        pub bass: f64,
    }

    #[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    pub struct Deaf {
        pub volume: f64,
        pub loudness: f64,
        pub tuning: DeafTuning,
    }

    pub struct DeafStage {
        pub config: Deaf,
    }

    impl StageConfig for Deaf {
        const KIND: &'static str = "deaf";
        const SUMMARY: &'static str = "does not listen to its volume";
        fn build(&self, _: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
            let config = Deaf {
                volume: 1.0,
                ..self.clone()
            };
            Ok(Box::new(DeafStage { config }))
        }
    }

    impl Stage for DeafStage {
        fn spec(&self) -> StageSpec {
            let loud = self.config.loudness > 0.0 && self.config.tuning.bass > 0.0;
            StageSpec::new().observer(u64::from(loud))
        }
        fn run(&mut self, _: Batch, _: &mut StageContext<'_>) -> Result<(), StageError> {
            Ok(())
        }
    }
}

#[test]
fn a_setting_that_nothing_reads_is_found() {
    let settings = settings(&Registry::new().stage::<deaf::Deaf>());
    let source = include_str!("settings_are_read.rs");
    let own = source.split_once("mod deaf {").expect("the module").1;
    let found = unread(&settings, &items_of(own));
    // The sections of the file are not in this source.
    let found: Vec<&String> = found
        .iter()
        .filter(|place| place.starts_with("stages/deaf"))
        .collect();
    assert_eq!(found, ["stages/deaf.volume", "stages/deaf.tuning.pitch"]);
}

#[test]
fn taking_a_read_away_is_found() {
    let settings = settings(&verl::registry());
    for (file, read, instead, expected) in [
        (
            "verl-stages/src/generate.rs",
            "self.min_p",
            "0.0",
            &["stages/generate.min_p"][..],
        ),
        // Other losses still read settings with the same name.
        (
            "verl-stages/src/losses/policy_losses.rs",
            "GspoLoss { clip_low: own.clip_low, clip_high: own.clip_high }, ClipBounds::new(own.clip_low, own.clip_high)",
            "GspoLoss { clip_low: own.clip_low, clip_high: 0.0 }",
            &["parts/loss/gspo.clip_high"],
        ),
        // Two data sets flatten the settings of the first.
        (
            "verl-stages/src/data/addition.rs",
            "self.held_out",
            "None",
            &[
                "data/addition.held_out",
                "data/addition_episodes.held_out",
                "data/addition_pairs.held_out",
            ],
        ),
        (
            "verl-pipe/plan/src/schedule/batching.rs",
            "num_devices, devices.rollout_tensor_parallel,",
            "num_devices, 1,",
            &["devices.rollout_tensor_parallel"],
        ),
        (
            "verl-pipe/trace/src/record/recording.rs",
            "config.part_steps",
            "32",
            &["trace.part_steps"],
        ),
        (
            "verl-pipe/trace/src/record/recorder.rs",
            "self.config.weights_limit_mb",
            "1024",
            &["trace.weights_limit_mb"],
        ),
        (
            "verl-pipe/train/src/trainer.rs",
            "plan.pipe().run.console_every",
            "1",
            // The command line creates its own console.
            &[],
        ),
    ] {
        assert_eq!(
            unread(&settings, &items_with(file, read, instead)),
            expected
        );
    }
}
