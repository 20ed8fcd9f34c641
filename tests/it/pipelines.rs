//! The pipeline files of the examples.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use verl::pipe::config::read_pipeline;
use verl::pipe::diagnostic::Findings;
use verl::pipe::pipe::DataPipe;
use verl::pipe::stage::BuildContext;

use crate::kit::{root, save_value_model, start};

/// A model folder that is in the repository, for pipelines whose own is not.
const STAND_IN: &str = "examples/models/addition-init";

fn files() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("examples/pipelines")).expect("the examples");
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort();
    files
}

/// The pipeline of a file; models whose folder is not there and data files that are not there are replaced, a value model
/// by a folder in `scratch`.
fn read(file: &Path, scratch: &Path) -> DataPipe {
    let read = |overrides: &[String]| {
        read_pipeline(file, overrides, &verl::registry())
            .unwrap_or_else(|findings| panic!("{}: {}", file.display(), Findings(findings)))
    };
    let pipe = read(&[]);
    let missing = |config: &serde_json::Value| {
        let path = config.get("path").and_then(|path| path.as_str());
        path.is_some_and(|path| !pipe.base.join(path).exists())
    };
    let stand_in = root().join(STAND_IN);
    let models = pipe.models.iter().filter(|model| missing(&model.config));
    let models = models.map(|model| {
        let mut folder = stand_in.clone();
        if model.kind == "value_model" {
            folder = scratch.join(&model.name);
            save_value_model(&stand_in, &folder);
        }
        format!("models.{}.path={}", model.name, folder.display())
    });
    // A plan looks whether a data file is there and reads nothing of it.
    let data = pipe.data.iter().filter(|data| missing(&data.config));
    let data = data.map(|data| format!("data.{}.path={}", data.name, file.display()));
    let overrides: Vec<String> = models.chain(data).collect();
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
            plan.warnings.is_empty(),
            "{}: {:?}",
            file.display(),
            plan.warnings
        );
        assert!(plan.to_string().contains(&pipe.name));
    }
}

/// The files of one algorithm each on the addition task, small.
#[test]
fn the_addition_files_train() {
    let own = |path: &PathBuf| {
        let name = path.file_stem().and_then(|stem| stem.to_str());
        name.is_some_and(|name| {
            ["dr_grpo", "gspo", "reinforce_plus_plus", "remax", "rloo"]
                .iter()
                .any(|algorithm| name == format!("{algorithm}_addition"))
        })
    };
    let files: Vec<PathBuf> = files().into_iter().filter(own).collect();
    assert_eq!(files.len(), 5);
    for file in files {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let mut pipe = read(&file, scratch.path());
        pipe.run.steps = 2;
        pipe.batch.prompts = 8;
        pipe.batch.micro_batch = Some(8);
        pipe.batch.mini_batch = pipe.batch.mini_batch.map(|_| 4);
        pipe.stages.retain(|stage| stage.kind != "evaluate");
        let mut run = start(&pipe);
        let mut norms = 0.0;
        for _ in 0..2 {
            let metrics = run.step().expect("a step").metrics;
            let get = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
            assert!(get("actor/pg_loss").is_finite(), "{}", pipe.name);
            norms += get("actor/grad_norm");
            if pipe.name == "remax_addition" {
                // Each question is answered greedily once, and that is scored apart from the samples.
                let share = get("baseline_reward/correct_share");
                assert!((0.0..=1.0).contains(&share) && get("baseline/length_mean") > 0.0);
            }
        }
        assert!(norms > 0.0 && norms.is_finite(), "{}: {norms}", pipe.name);
    }
}

/// Questions and sums of every data set of a file; sums without regard to the order of their operands.
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
    // A reward model has not seen what the policy is trained on or asked at the end.
    let reward = sums("reward_model_addition.toml");
    let pairs = &reward["train"];
    for other in sums("ppo_reward_model_addition.toml")
        .values()
        .chain([&reward["eval"]])
    {
        assert!(pairs.len() > 400 && pairs.is_disjoint(other));
    }
}
