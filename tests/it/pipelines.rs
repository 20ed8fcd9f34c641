//! The pipeline files of the examples.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use verl::pipe::config::read_pipeline;
use verl::pipe::diagnostic::Findings;
use verl::pipe::pipe::DataPipe;
use verl::pipe::plan::Plannable;
use verl::pipe::run::columns::Columns;
use verl::pipe::stage::BuildContext;

use crate::kit::{root, save_value_model, trainer};

/// A model folder in the repository, for pipelines whose own model is not.
const STAND_IN: &str = "examples/models/addition-base";

/// Rows for pipelines whose data is not in the repository: questions with their answers, and pairs of answers.
fn rows() -> String {
    let row = |n: u32| {
        let (a, b) = (12 + 7 * n, 21 + 5 * n);
        let written = |sum: u32| format!("{a}+{b}={sum}\n#### {sum}");
        let row = serde_json::json!({
            "question": format!("{a}+{b}"),
            "answer": format!("#### {}", a + b),
            "prompt": format!("{a}+{b}"),
            "chosen": written(a + b),
            "rejected": written(a + b + 1),
        });
        format!("{row}\n")
    };
    (0..8).map(row).collect()
}

pub fn files() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("examples/pipelines")).expect("the examples");
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort();
    files
}

/// A copy of [`STAND_IN`] with the longest context of all models.
fn stand_in(scratch: &Path) -> PathBuf {
    let folder = scratch.join("stand_in");
    std::fs::create_dir_all(&folder).expect("a folder");
    for entry in std::fs::read_dir(root().join(STAND_IN)).expect("a folder") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
    }
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).expect("a config.json");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("an object");
    config["max_position_embeddings"] = 4096.into();
    std::fs::write(&path, config.to_string()).expect("a file");
    folder
}

/// The pipeline of a file. Missing model folders and data files are replaced, a value model
/// by a folder in `scratch`.
pub fn read(file: &Path, scratch: &Path) -> DataPipe {
    read_with(file, scratch, &[])
}

/// The same with further overrides.
fn read_with(file: &Path, scratch: &Path, more: &[&str]) -> DataPipe {
    let read = |overrides: &[String]| {
        read_pipeline(file, overrides, &verl::registry())
            .unwrap_or_else(|findings| panic!("{}: {}", file.display(), Findings(findings)))
    };
    let pipe = read(&[]);
    let missing = |config: &serde_json::Value| {
        let path = config.get("path").and_then(|path| path.as_str());
        path.is_some_and(|path| !pipe.base.join(path).exists())
    };
    let stand_in = stand_in(scratch);
    let models = pipe.models.iter().filter(|model| missing(&model.config));
    let models = models.map(|model| {
        let mut folder = stand_in.clone();
        if model.kind == "value_model" {
            folder = scratch.join(&model.name);
            save_value_model(&stand_in, &folder);
        }
        format!("models.{}.path={}", model.name, folder.display())
    });
    let file_of_rows = scratch.join("rows.jsonl");
    fs::write(&file_of_rows, rows()).expect("a file");
    let data = pipe.data.iter().filter(|data| missing(&data.config));
    let data = data.map(|data| format!("data.{}.path={}", data.name, file_of_rows.display()));
    let more = more.iter().map(|text| (*text).to_owned());
    let overrides: Vec<String> = models.chain(data).chain(more).collect();
    read(&overrides)
}

#[test]
fn every_file_is_a_plan() {
    let files = files();
    assert!(files.len() >= 2, "{files:?}");
    for file in files {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let pipe = read(&file, scratch.path());
        let plan = pipe
            .plan()
            .unwrap_or_else(|findings| panic!("{}: {}", file.display(), Findings(findings)));
        assert!(
            plan.warnings().is_empty(),
            "{}: {:?}",
            file.display(),
            plan.warnings()
        );
        assert!(plan.to_string().contains(&pipe.name));
    }
}

/// User report, part 3, item 5: one override changes the temperature of the entire pipeline.
#[test]
fn one_temperature_is_enough_for_every_file() {
    let mut sampling = 0;
    for file in files() {
        let plan_of = |more: &[&str]| {
            let scratch = tempfile::tempdir().expect("a temporary folder");
            let pipe = read_with(&file, scratch.path(), more);
            let plan = pipe.plan().map_err(Findings);
            plan.unwrap_or_else(|findings| panic!("{}: {findings}", file.display()))
        };
        let temperatures = |more: &[&str]| {
            let plan = plan_of(more);
            assert!(
                plan.warnings().is_empty(),
                "{}: {:?}",
                file.display(),
                plan.warnings()
            );
            let specs = plan.stages().iter().map(|stage| stage.spec());
            let fields = specs.flat_map(|spec| spec.reads.iter().chain(&spec.writes));
            let tags = fields.filter_map(|field| field.tag.as_ref()?.temperature);
            tags.map(|temperature| temperature.to_string())
                .collect::<std::collections::BTreeSet<_>>()
        };
        let whole = plan_of(&[]);
        let samples = whole
            .stages()
            .iter()
            .any(|stage| stage.kind() == "generate");
        let offline = temperatures(&[]);
        assert!(
            offline.is_empty() || offline.iter().eq(["1"]),
            "{offline:?}"
        );
        if samples {
            sampling += 1;
            let cooler = temperatures(&["generate.temperature=0.7"]);
            assert!(cooler.iter().eq(["0.7"]), "{}: {cooler:?}", file.display());
            // The run builds its stages with the values of the plan.
            let plan = plan_of(&["generate.temperature=0.7"]);
            for stage in plan.stages() {
                let built = stage
                    .build(plan.context())
                    .map_err(|errors| errors[0].to_string());
                assert_eq!(
                    &built.expect("a stage").spec(),
                    stage.spec(),
                    "{}",
                    stage.name()
                );
            }
        }
    }
    assert!(sampling >= 12, "{sampling}");
}

/// Steps set on the command line change the schedule of every file.
#[test]
fn every_schedule_follows_the_steps_of_the_run() {
    for file in files() {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let pipe = read_with(&file, scratch.path(), &["steps=1000"]);
        let plan = pipe.plan().map_err(Findings).expect("a plan");
        assert!(
            plan.warnings().is_empty(),
            "{}: {:?}",
            file.display(),
            plan.warnings()
        );
        for model in &plan.pipe().models {
            let schedule = &model.config["optimizer"]["schedule"];
            let steps = plan.context().optimizer_steps.get(&model.name);
            if let (Some("linear" | "cosine"), Some(steps)) = (schedule["kind"].as_str(), steps) {
                assert!(*steps >= 900, "{}: {steps}", file.display());
                assert_eq!(schedule["total_steps"], *steps, "{}", file.display());
            }
        }
    }
}

/// The pipeline of a file, reduced to two fast steps with all its stages.
fn small(file: &Path, scratch: &Path) -> DataPipe {
    let whole = read(file, scratch);
    let mut overrides = vec![
        "steps=2".to_owned(),
        "batch.prompts=4".to_owned(),
        "batch.micro_batch=4".to_owned(),
        format!("run.dir={}", scratch.join("run").display()),
    ];
    let mut groups = 4;
    for stage in &whole.stages {
        let mut set = |setting: &str, value: u64| {
            let old = stage
                .config
                .get(setting)
                .and_then(serde_json::Value::as_u64);
            if old.is_some_and(|old| old > value) {
                overrides.push(format!("stages.{}.{setting}={value}", stage.name));
            }
        };
        // Otherwise the data of the examples fills a context of 64 tokens.
        set("max_new_tokens", 12);
        set("questions", 4);
        set("max_prompt_tokens", 24);
        set("max_response_tokens", 24);
        set("warmup_steps", 1);
        set("groups", 2);
        if stage.config.get("groups").is_some() {
            groups = 2;
        }
        // The stand-in's template does not support system messages, and its tokenizer has no words.
        if stage
            .config
            .get("system")
            .is_some_and(|text| text.is_string())
        {
            overrides.push(format!("stages.{}.system=", stage.name));
        }
    }
    let worded = whole.data.iter().filter(|data| {
        let question = data.config.get("question");
        question.is_some_and(|text| text.is_string())
    });
    let plain = "{a}+{b}";
    overrides.extend(worded.map(|data| format!("data.{}.question={plain}", data.name)));
    if whole.batch.mini_batch.is_some() {
        overrides.push(format!("batch.mini_batch={}", groups / 2));
    }
    overrides.extend(whole.data.iter().filter_map(|data| {
        let path = data.config.get("path")?.as_str()?;
        Some(format!("data.{}.path={path}", data.name))
    }));
    overrides.extend(whole.models.iter().map(|model| {
        let path = model.config["path"].as_str().expect("a folder");
        format!(
            "models.{}.path={}",
            model.name,
            whole.base.join(path).display()
        )
    }));
    read_pipeline(file, &overrides, &verl::registry())
        .unwrap_or_else(|findings| panic!("{}: {}", file.display(), Findings(findings)))
}

/// Every file trains: two steps with all its stages, from the start of the run to the saved model.
#[test]
fn every_file_trains() {
    let mut shown = String::new();
    for file in files() {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let pipe = small(&file, scratch.path());
        let mut trainer = trainer(&pipe).unwrap_or_else(|e| panic!("{}: {e}", pipe.name));
        let mut moved = 0.0;
        let mut columns = Columns::of(&pipe.plan().expect("a plan"));
        let mut line = String::new();
        for _ in 0..2 {
            let metrics = trainer
                .step()
                .unwrap_or_else(|e| panic!("{}: {e}", pipe.name));
            for (name, value) in &metrics.values {
                assert!(value.is_finite(), "{}: {name}", pipe.name);
                if name.ends_with("/grad_norm") {
                    moved += value;
                }
            }
            line = columns.line(&metrics, 400);
            assert!(line.chars().count() <= 100, "{line}");
            if pipe.name == "remax_addition" {
                // Each question is answered greedily once, and that answer is scored separately from the samples.
                let get = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
                let share = get("baseline_reward/correct_share");
                assert!((0.0..=1.0).contains(&share) && get("baseline/length_mean") > 0.0);
            }
        }
        assert!(moved > 0.0, "{} does not learn", pipe.name);
        shown += &format!("{}: {}\n", pipe.name, labels(&line));
        trainer
            .train()
            .unwrap_or_else(|e| panic!("{}: {e}", pipe.name));
        let samples =
            fs::read_to_string(scratch.path().join("run/samples.jsonl")).expect("samples");
        let training = samples.lines().filter(|line| line.contains("\"training\""));
        assert_eq!(
            training.count(),
            2 * pipe.run.samples_per_step,
            "{}:\n{samples}",
            pipe.name
        );
    }
    // P3-6: what the console shows for each.
    insta::assert_snapshot!("console_columns", shown);
}

/// The labels of a line of the console.
fn labels(line: &str) -> String {
    let parts = line.split("  ").map(str::trim);
    let labels = parts.filter_map(|part| {
        let label = part.trim_end_matches(|c: char| !c.is_whitespace());
        let label = label.trim();
        let label = if label.is_empty() { part } else { label };
        (label.starts_with(char::is_alphabetic) && label != "step").then(|| label.to_owned())
    });
    labels.collect::<Vec<_>>().join(", ")
}

/// Questions and sums of every data set of a file; sums ignore the order of their operands.
fn sums(file: &str) -> BTreeMap<String, HashSet<Vec<u32>>> {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let pipe = read(
        &root().join("examples/pipelines").join(file),
        scratch.path(),
    );
    let context = BuildContext {
        base: pipe.base.clone(),
        ..BuildContext::default()
    };
    let mut all = BTreeMap::new();
    for declared in &pipe.data {
        let data = (declared.open)(&context).expect("a data set");
        let operands = (0..data.len()).map(|row| {
            let row = data.row(row).expect("a row");
            let question = row.get("question").or(row.get("prompt"));
            let question = question.and_then(|text| text.as_str()).expect("a text");
            let numbers = question.split(|c: char| !c.is_ascii_digit());
            let mut operands: Vec<u32> = numbers.filter_map(|n| n.parse().ok()).collect();
            operands.sort_unstable();
            operands
        });
        all.insert(declared.name.clone(), operands.collect());
    }
    all
}

#[test]
fn no_sum_is_in_two_splits_as_the_files_have_them() {
    let (sft, grpo) = (sums("sft_addition.toml"), sums("grpo_addition.toml"));
    assert_eq!(sft["eval"], grpo["eval"]);
    for file in ["dpo", "kto", "orpo", "simpo"] {
        let pairs = sums(&format!("{file}_addition.toml"));
        assert_eq!(
            (&pairs["train"], &pairs["eval"]),
            (&grpo["train"], &grpo["eval"])
        );
    }
    for (one, other) in [
        (&sft["train"], &grpo["train"]),
        (&sft["train"], &grpo["eval"]),
        (&grpo["train"], &grpo["eval"]),
    ] {
        assert!(one.len() > 400 && other.len() > 400);
        assert!(one.is_disjoint(other));
    }
    // A reward model has not seen the training or evaluation questions of the policy.
    let reward = sums("reward_model_addition.toml");
    let pairs = &reward["train"];
    for other in sums("ppo_reward_model_addition.toml")
        .values()
        .chain([&reward["eval"]])
    {
        assert!(pairs.len() > 400 && pairs.is_disjoint(other));
    }
}
