//! A tiny decoder and a fast GRPO pipeline of three steps on it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use verl::models::value_head::HeadKind;
use verl::pipe::config::parse_pipeline;
use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::pipe::DataPipe;
use verl::pipe::plan::Plannable;
use verl::pipe::registry::Registry;
use verl::pipe::run::runner::{Run, RunOptions};
use verl::pipe::run::trainer::{Trainer, TrainerOptions};
use verl::pipe::stage::{BuildContext, ModelFactory};
use verl::prelude::{Init, OptimizerConfig};
use verl::stages::model::{HeadInit, ValueLm};

/// The root of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder of models and runs that is removed at the end of the test.
pub struct Place {
    dir: tempfile::TempDir,
}

/// GRPO with a reference, rewarded for short answers, so that a model with random weights finds a signal.
pub const GRPO: &str = r#"
name = "grpo_tiny"

[run]
seed = 5
steps = 3

[batch]
prompts = 4
samples = 4
micro_batch = 8

[data]
train = { kind = "addition" }
eval = { kind = "addition", split = "heldout" }

[models.actor]
path = "tiny"
init = "random"
optimizer = { learning_rate = 1e-3 }

[models.ref]
path = "tiny"
init = "random"

[[stages]]
kind = "prompts"

[[stages]]
kind = "generate"
max_new_tokens = 10

[[stages]]
kind = "reward"
rule = "length"
target_tokens = 4

[[stages]]
kind = "log_probs"
name = "old_log_probs"

[[stages]]
kind = "log_probs"
name = "ref_log_probs"
model = "ref"
role = "reference"

[[stages]]
kind = "advantages"

[[stages]]
kind = "update"
loss = { kind = "grpo", kl_coef = 0.01 }

[[stages]]
kind = "evaluate"
questions = 6
max_new_tokens = 8
"#;

impl Place {
    /// A place with a tiny model folder `tiny` (config.json and tokenizer, no weights).
    pub fn new() -> Place {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let tiny = dir.path().join("tiny");
        fs::create_dir(&tiny).expect("a folder");
        let source = root().join("examples/models/addition-init");
        for name in [
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(source.join(name), tiny.join(name)).expect("a copy");
        }
        let config = fs::read_to_string(source.join("config.json")).expect("a config.json");
        let mut config: Map<String, Value> = serde_json::from_str(&config).expect("an object");
        for (key, value) in [
            ("hidden_size", 16),
            ("intermediate_size", 24),
            ("num_hidden_layers", 2),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 2),
            ("head_dim", 4),
        ] {
            config.insert(key.to_owned(), value.into());
        }
        config.insert("initializer_range".to_owned(), Value::from(0.3));
        let config = Value::Object(config).to_string();
        fs::write(tiny.join("config.json"), config).expect("a file");
        Place { dir }
    }

    /// A path inside.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The pipeline of a text with overrides; its run goes to folder `run`.
    pub fn parse(&self, text: &str, run: &str, more: &[&str]) -> Result<DataPipe, Vec<Diagnostic>> {
        self.parse_with(text, run, more, &verl::registry())
    }

    /// Like [`Place::parse`], with another registry.
    pub fn parse_with(
        &self,
        text: &str,
        run: &str,
        more: &[&str],
        registry: &Registry,
    ) -> Result<DataPipe, Vec<Diagnostic>> {
        let mut overrides: Vec<String> = more.iter().map(|text| (*text).to_owned()).collect();
        overrides.push(format!("run.dir={}", self.path(run).display()));
        let mut pipe = parse_pipeline(text, "tiny.toml", &overrides, registry)?;
        pipe.base = self.dir.path().to_owned();
        Ok(pipe)
    }

    /// [`GRPO`] with overrides.
    pub fn grpo(&self, run: &str, more: &[&str]) -> DataPipe {
        self.parse(GRPO, run, more)
            .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
    }

    /// Runs [`GRPO`] with overrides to its end.
    pub fn train(&self, run: &str, more: &[&str]) -> Finished {
        let mut trainer = trainer(&self.grpo(run, more)).expect("a trainer");
        trainer.train().expect("a run that ends well");
        Finished {
            dir: self.path(run),
        }
    }
}

/// Writes a value model with random weights into `dir`, on the decoder of the model folder `of`.
pub fn save_value_model(of: &Path, dir: &Path) {
    let config = ValueLm {
        init: Init::Random,
        head: HeadKind::SequenceClassification,
        head_init: HeadInit::Normal,
        ..ValueLm::trained(of, OptimizerConfig::default())
    };
    let model = config.load("reward", "cpu", &BuildContext::default());
    let saved = model.and_then(|mut model| model.save(dir));
    saved.unwrap_or_else(|error| panic!("{error}"));
}

/// A trainer without console output; errors of the plan and of the start as one text.
pub fn trainer(pipe: &DataPipe) -> Result<Trainer, String> {
    let plan = pipe
        .plan()
        .map_err(|findings| Findings(findings).to_string())?;
    Trainer::with_options(plan, TrainerOptions::default()).map_err(|error| error.to_string())
}

/// The started run of a pipeline, without a folder.
pub fn start(pipe: &DataPipe) -> Run {
    let plan = pipe
        .plan()
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)));
    let schedule = plan.schedule().expect("one device group");
    Run::start(schedule, RunOptions::default()).expect("a started run")
}

/// The folder of a run that has ended.
pub struct Finished {
    pub dir: PathBuf,
}

impl Finished {
    /// A file of the run folder.
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// The lines of metrics.jsonl.
    pub fn metrics(&self) -> Vec<Map<String, Value>> {
        let text = self.read("metrics.jsonl");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("an object a line"))
            .collect()
    }

    /// The trained weights as written.
    pub fn weights(&self) -> Vec<u8> {
        fs::read(self.dir.join("model/actor/model.safetensors")).expect("saved weights")
    }
}

/// Numbers of a line that depend only on the seed: all but times and memory.
pub fn decided(line: &Map<String, Value>) -> BTreeMap<String, f64> {
    line.iter()
        .filter(|(name, _)| !name.starts_with("perf/") && *name != "timestamp")
        .map(|(name, value)| (name.clone(), value.as_f64().unwrap_or(f64::NAN)))
        .collect()
}
