use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use verl_models::optim::OptimizerConfig;
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::{ModelConfig, Models};

use super::*;
use crate::model::ValueLm;
use crate::sink::run_with;

/// Rows held in memory.
struct Rows(Vec<Value>);

impl DataLoaderInterface for Rows {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        Ok(self.0[index].as_object().unwrap().clone())
    }
    fn origin(&self) -> String {
        "rows".to_owned()
    }
    fn fingerprint(&self) -> String {
        String::new()
    }
}

/// What the stage makes of `rows` in its first step, in their order; the model is a reward model in the making.
fn drawn(format: PairFormat, rows: Value) -> Result<Batch, StageError> {
    let config = Preferences {
        model: "reward".to_owned(),
        format,
        shuffle: false,
        ..Preferences::default()
    };
    let rows = Rows(rows.as_array().unwrap().clone());
    let mut context = BuildContext {
        models: vec!["reward".to_owned()],
        data: vec!["train".to_owned()],
        ..BuildContext::default()
    };
    context.batch.prompts = rows.len();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-base");
    let model = ValueLm::trained(folder, OptimizerConfig::default());
    let model = model.load("reward", "cpu", &BuildContext::default())?;
    let mut models = Models::from([("reward".to_owned(), model)]);
    let mut stage = StageConfig::build(&config, &context).unwrap();
    stage.start(&mut StartContext {
        data: &BTreeMap::from([("train".to_owned(), Arc::new(rows) as _)]),
        models: &mut models,
    })?;
    let kept = run_with(stage.as_mut(), 1, Batch::with_rows(&[]), &mut models)?;
    Ok(kept.batches[0].clone())
}

/// A response of the addition tokenizer, whose id 2 ends it.
fn tokens(text: &str) -> Vec<u32> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-base");
    let tokenizer = verl_models::tokenizer::Tokenizer::load(&folder).unwrap();
    let mut tokens = tokenizer.encode(text, false).unwrap();
    tokens.push(2);
    tokens
}

#[test]
fn a_row_becomes_a_prompt_with_two_responses_that_end() {
    let format = PairFormat {
        margin: Some("lead".to_owned()),
        ..PairFormat::default()
    };
    let rows = json!([
        {"prompt": "1+2", "chosen": "3", "rejected": "12", "lead": 0.5},
        {"prompt": "7+7", "chosen": [{"role": "assistant", "content": "14"}], "rejected": "4", "lead": 2},
    ]);
    let batch = drawn(format, rows).unwrap();
    assert_eq!(batch.num_rows(), 2);
    let (chosen, rejected) = (
        batch.get(&CHOSEN_RESPONSES).unwrap(),
        batch.get(&REJECTED_RESPONSES).unwrap(),
    );
    assert_eq!(chosen.row(0), tokens("3"));
    assert_eq!(chosen.row(1), tokens("14"));
    assert_eq!(rejected.row(0), tokens("12"));
    assert_eq!(batch.get(&MARGINS).unwrap().values(), [0.5, 2.0]);
    assert_eq!(batch.get(&DATA_ROWS).unwrap().values(), [0, 1]);
    let texts = batch.get(&PROMPT_TEXTS).unwrap();
    assert!(texts.row(0).contains("1+2") && texts.row(0) != "1+2");
}

#[test]
fn long_responses_lose_their_end_where_that_is_asked_for() {
    let rows = || json!([{"prompt": "1+2", "chosen": "3", "rejected": "1".repeat(80)}]);
    let told = drawn(PairFormat::default(), rows()).err().unwrap();
    let told = told.to_string();
    assert!(
        told.contains("row 1: prompt and `rejected` have") && told.contains("context is 64"),
        "{told}"
    );
    let format = PairFormat {
        max_response_tokens: Some(5),
        ..PairFormat::default()
    };
    let batch = drawn(format, rows()).unwrap();
    assert_eq!(batch.get(&REJECTED_RESPONSES).unwrap().row(0).len(), 5);
}

#[test]
fn rows_that_are_no_preferences_are_told() {
    #[track_caller]
    fn check(row: Value, words: &str) {
        let format = PairFormat {
            margin: Some("lead".to_owned()),
            ..PairFormat::default()
        };
        let told = drawn(format, json!([row])).err().unwrap().to_string();
        assert!(told.contains("row 1") && told.contains(words), "{told}");
    }
    check(json!({"prompt": "1", "rejected": "2"}), "`chosen`");
    let turns = json!([{"role": "user", "content": "3"}]);
    check(
        json!({"prompt": "1", "chosen": turns, "rejected": "2"}),
        "neither a text nor a list of one message of the assistant",
    );
    check(
        json!({"prompt": "1", "chosen": "2", "rejected": "3", "lead": "far"}),
        "`lead` holds no finite number",
    );
}

#[test]
fn senseless_settings_are_told_together() {
    let config = Preferences {
        data: "nowhere".to_owned(),
        format: PairFormat {
            max_response_tokens: Some(0),
            ..PairFormat::default()
        },
        ..Preferences::default()
    };
    let faults = StageConfig::build(&config, &BuildContext::default());
    let settings: Vec<String> = faults
        .err()
        .unwrap()
        .into_iter()
        .map(|f| f.setting)
        .collect();
    assert_eq!(settings, ["max_response_tokens", "data", "model"]);
}
