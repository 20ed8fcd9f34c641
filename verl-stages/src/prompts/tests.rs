use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use burn::tensor::Tensor;
use serde_json::json;
use verl_models::chat_template::ChatTemplate;
use verl_models::model::{
    Extras, ModelError, PackedScores, PolicyModel, ScoreRow, Scores, StepReport, TrainedModel,
};
use verl_models::rollout::engine::{EngineWeights, PreparedModel, RolloutError};
use verl_models::tokenizer::Tokenizer;
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::stage::{CancelToken, Models, StageSink};

use super::*;
use crate::data::addition::Addition;
use crate::model::PolicyResource;

/// Rows in memory.
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

pub(super) fn rows(values: Value) -> Arc<dyn DataLoaderInterface> {
    Arc::new(Rows(values.as_array().unwrap().clone()))
}

pub(super) fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-init")
}

pub(super) fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::load(&folder()).unwrap())
}

fn template() -> ChatTemplate {
    ChatTemplate::load(&folder()).unwrap()
}

pub(super) fn stage(
    config: Prompts,
    prompts: usize,
    data: Arc<dyn DataLoaderInterface>,
) -> PromptStage {
    let tokenizer = tokenizer();
    let template = template();
    PromptStage {
        format: config.format(),
        prompts,
        source: Some(Source {
            rows: (0..data.len()).collect(),
            data,
            tokenizer,
            template: (config.template == Template::Chat).then_some(template),
            context: 64,
            order: None,
        }),
        config,
    }
}

/// Surveys the rows as [`Stage::start`] does.
pub(super) fn survey(stage: &mut PromptStage) -> Result<(), StageError> {
    let (config, format) = (&stage.config, &stage.format);
    let source = stage.source.as_mut().unwrap();
    source.survey(format.on_long, |source, row| {
        Ok(config.show(format, source, row)?.surveyed())
    })
}

#[derive(Default)]
pub(super) struct Sink {
    batches: Vec<Batch>,
    metrics: Vec<(String, f64)>,
}

impl StageSink for Sink {
    fn emit(&mut self, batch: Batch) -> Result<(), StageError> {
        self.batches.push(batch);
        Ok(())
    }
    fn record(&mut self, metric: &Metric, value: f64, _weight: f64) {
        self.metrics.push((metric.name.to_owned(), value));
    }
    fn record_named(&mut self, name: &str, value: f64, _weight: f64) {
        self.metrics.push((name.to_owned(), value));
    }
    fn sample(&mut self, _sample: Value) {}
}

pub(super) fn step(
    stage: &mut PromptStage,
    step: u64,
    seed: u64,
) -> Result<(Batch, Sink), StageError> {
    wave(stage, step, 0, seed)
}

fn wave(
    stage: &mut PromptStage,
    step: u64,
    wave: u64,
    seed: u64,
) -> Result<(Batch, Sink), StageError> {
    let mut sink = Sink::default();
    stage.run(
        Batch::with_rows(&[]),
        &mut StageContext {
            stage: "prompts",
            step,
            steps: 10,
            seed,
            wave,
            cancel: &CancelToken::default(),
            models: &mut BTreeMap::new(),
            sink: &mut sink,
        },
    )?;
    assert_eq!(sink.batches.len(), 1);
    Ok((sink.batches[0].clone(), sink))
}

fn sums(count: usize) -> Arc<dyn DataLoaderInterface> {
    let config = Addition {
        count: Some(count),
        ..Addition::default()
    };
    Arc::new(config.rows().unwrap())
}

#[test]
fn the_columns_of_a_step_agree() {
    let data = rows(json!([{"question": "12+34", "answer": "#### 46"}]));
    let config = Prompts {
        with_targets: true,
        ..Prompts::default()
    };
    let mut stage = stage(config, 1, data);
    let (batch, sink) = step(&mut stage, 1, 0).unwrap();
    for field in stage.spec().writes {
        batch.check_field(&field).unwrap();
    }
    let tokenizer = tokenizer();
    let written = |ids: &[u32]| -> Vec<String> {
        ids.iter()
            .map(|&id| tokenizer.id_to_token(id).unwrap())
            .collect()
    };
    assert_eq!(
        written(batch.get(&PROMPTS).unwrap().row(0)),
        [
            "<bos>",
            "<|user|>",
            "1",
            "2",
            "+",
            "3",
            "4",
            "<|assistant|>"
        ]
    );
    assert_eq!(
        batch.get(&PROMPT_TEXTS).unwrap().row(0),
        "<bos><|user|>12+34<|assistant|>"
    );
    assert_eq!(batch.get(&ANSWERS).unwrap().row(0), "#### 46");
    assert_eq!(
        written(batch.get(&TARGETS).unwrap().row(0)),
        ["####", " ", "4", "6", "<eos>"]
    );
    assert_eq!(batch.get(&TARGET_KINDS).unwrap().row(0), [mask::ACTION; 5]);
    assert_eq!(batch.get(&DATA_ROWS).unwrap().values(), [0]);
    assert_eq!(sink.metrics, [("prompt/length_mean".to_owned(), 8.0)]);
}

#[test]
fn epochs_are_permutations_and_steps_need_no_state() {
    let data = sums(10);
    let mut running = stage(Prompts::default(), 4, data.clone());
    let batches: Vec<(Batch, Sink)> = (1..=5).map(|k| step(&mut running, k, 7).unwrap()).collect();
    let drawn: Vec<(u64, u64)> = batches
        .iter()
        .flat_map(|(batch, _)| batch.ids())
        .map(|id| (id.epoch(), id.row()))
        .collect();
    for epoch in 0..2 {
        let part = &drawn[epoch * 10..(epoch + 1) * 10];
        assert!(part.iter().all(|&(e, _)| e == epoch as u64));
        assert_eq!(
            part.iter()
                .map(|&(_, row)| row)
                .collect::<HashSet<_>>()
                .len(),
            10
        );
    }
    let order = |epoch: usize| {
        drawn[epoch * 10..(epoch + 1) * 10]
            .iter()
            .map(|d| d.1)
            .collect::<Vec<_>>()
    };
    assert_ne!(order(0), order(1));
    let epochs: Vec<u64> = batches
        .iter()
        .map(|(batch, _)| batch.ids()[0].epoch())
        .collect();
    assert_eq!(epochs, [0, 0, 0, 1, 1]);
    for (batch, _) in &batches {
        for (row, id) in batch.ids().iter().enumerate() {
            assert_eq!(batch.get(&DATA_ROWS).unwrap().row(row), Some(id.row()));
            let question = data.row(id.row() as usize).unwrap()["question"].clone();
            let text = batch.get(&PROMPT_TEXTS).unwrap().row(row).to_owned();
            assert!(text.contains(question.as_str().unwrap()), "{text}");
        }
    }

    let mut resumed = stage(Prompts::default(), 4, data.clone());
    assert_eq!(step(&mut resumed, 3, 7).unwrap().0, batches[2].0);
    assert_eq!(step(&mut resumed, 1, 7).unwrap().0, batches[0].0);
    assert_ne!(step(&mut resumed, 1, 8).unwrap().0, batches[0].0);

    let config = Prompts {
        shuffle: false,
        ..Prompts::default()
    };
    let (batch, _) = step(&mut stage(config, 4, data), 3, 7).unwrap();
    let ids: Vec<(u64, u64)> = batch
        .ids()
        .iter()
        .map(|id| (id.epoch(), id.row()))
        .collect();
    assert_eq!(ids, [(0, 8), (0, 9), (1, 0), (1, 1)]);
}

#[test]
fn waves_of_a_step_draw_other_rows_and_do_not_change_the_first() {
    let rows_of = |batch: &Batch| batch.ids().iter().map(|id| id.row()).collect::<Vec<u64>>();
    for shuffle in [true, false] {
        let config = Prompts {
            shuffle,
            ..Prompts::default()
        };
        let mut running = stage(config.clone(), 5, sums(40));
        // Eight waves of five prompts are the 40 rows, each once.
        for k in [1, 3, 8] {
            let waves: Vec<Batch> = (0..8)
                .map(|w| wave(&mut running, k, w, 7).unwrap().0)
                .collect();
            let mut drawn: Vec<u64> = waves.iter().flat_map(rows_of).collect();
            drawn.sort_unstable();
            assert_eq!(drawn, (0..40).collect::<Vec<_>>());
            for (w, batch) in waves.iter().enumerate() {
                let ids = batch.ids();
                assert!(ids.iter().all(|id| id.wave() == w as u64));
                assert!(ids.iter().all(|id| id.epoch() == 0));
            }
            assert_eq!(waves[0], step(&mut running, k, 7).unwrap().0);
            // Earlier waves leave no state behind.
            let mut fresh = stage(config.clone(), 5, sums(40));
            assert_eq!(wave(&mut fresh, k, 5, 7).unwrap().0, waves[5]);
        }
        assert!(running.spec().draws_waves);
    }
}

#[test]
fn small_data_sets_repeat_rows_in_waves_with_other_identities() {
    let mut running = stage(Prompts::default(), 4, sums(3));
    let mut seen = HashSet::new();
    for w in 0..16 {
        let (batch, _) = wave(&mut running, 2, w, 7).unwrap();
        assert!(batch.ids().into_iter().all(|id| seen.insert(id)));
    }
    assert!(wave(&mut running, 2, 16, 7).is_err());
}

#[test]
fn more_prompts_than_rows_draw_several_epochs() {
    let (batch, _) = step(&mut stage(Prompts::default(), 7, sums(3)), 1, 0).unwrap();
    assert_eq!(batch.ids().iter().collect::<HashSet<_>>().len(), 7);
    assert_eq!(batch.ids()[6].epoch(), 2);
}

fn encode_error(format: &PromptFormat, row: Value) -> String {
    encode(format, row).unwrap_err().to_string()
}

fn encode(format: &PromptFormat, row: Value) -> Result<EncodedPrompt, DataError> {
    let data = rows(json!([{"question": "1", "answer": ""}, row]));
    let prompt = format.encode(data.as_ref(), 1, &tokenizer(), Some(&template()))?;
    format.fit(prompt, 64, data.as_ref(), 1)
}

#[test]
fn long_prompts_stop_the_run_unless_asked_otherwise() {
    let long = json!({"question": "123456+1", "answer": 123457});
    let mut format = PromptFormat {
        max_prompt_tokens: Some(9),
        on_long: OnLong::Error,
        ..PromptFormat::default()
    };
    assert_eq!(
        encode_error(&format, long.clone()),
        "`rows`, row 2: the prompt has 11 tokens, but `max_prompt_tokens` is 9; raise it, or set `on_long` to \"drop\" or \"truncate\""
    );
    format.max_prompt_tokens = Some(11);
    let whole = encode(&format, long.clone()).unwrap();
    assert_eq!(whole.answer, "123457");
    format.max_prompt_tokens = Some(9);
    format.on_long = OnLong::Truncate;
    assert_eq!(
        encode(&format, long.clone()).unwrap().tokens,
        whole.tokens[2..]
    );
    format.max_prompt_tokens = None;
    format.on_long = OnLong::Error;
    let question = "1".repeat(62);
    assert!(
        encode_error(&format, json!({"question": question, "answer": ""}))
            .contains("the model's context is 64, which must also fit an answer")
    );

    let config = Prompts {
        max_prompt_tokens: Some(9),
        on_long: OnLong::Drop,
        ..Prompts::default()
    };
    let data =
        rows(json!([{"question": "1+1", "answer": "2"}, long, {"question": "2+2", "answer": "4"}]));
    let mut dropping = stage(config.clone(), 4, data);
    survey(&mut dropping).unwrap();
    let (batch, _) = step(&mut dropping, 1, 0).unwrap();
    let drawn: Vec<u64> = batch.get(&DATA_ROWS).unwrap().values().to_vec();
    assert!(!drawn.contains(&1), "{drawn:?}");
    assert_eq!(batch.ids()[2].epoch(), 1);
    dropping.format.max_prompt_tokens = Some(2);
    let error = survey(&mut dropping).unwrap_err().to_string();
    assert!(
        error.starts_with("`rows`: all rows are too long"),
        "{error}"
    );
}

#[test]
fn conversations_and_plain_text() {
    let chat = PromptFormat {
        messages: Some("talk".to_owned()),
        answer: String::new(),
        ..PromptFormat::default()
    };
    let talk = |messages: Value| json!({"talk": messages});
    let user = json!({"role": "user", "content": "1+1"});
    let assistant = json!({"role": "assistant", "content": "2"});
    let prompt = encode(&chat, talk(json!([user, assistant, user]))).unwrap();
    assert_eq!(
        prompt.text,
        "<bos><|user|>1+1<|assistant|>2<eos><|user|>1+1<|assistant|>"
    );
    assert!(
        encode_error(&chat, talk(json!([user, assistant])))
            .contains("ends with the assistant's message")
    );
    assert!(encode_error(&chat, talk(json!([]))).contains("is an empty list"));
    assert!(encode_error(&chat, talk(json!("1+1"))).contains("is not a list of objects"));
    assert!(
        encode_error(&chat, json!({"question": "1"}))
            .contains("there is no column `talk`; the row has `question`")
    );

    let system = PromptFormat {
        system: Some("Add.".to_owned()),
        ..PromptFormat::default()
    };
    assert!(
        encode_error(&system, json!({"question": "1", "answer": ""})).contains(
            "row 2: the chat template refuses the messages: roles are user and assistant"
        )
    );

    let plain = PromptFormat {
        template: Template::None,
        ..PromptFormat::default()
    };
    let prompt = encode(&plain, json!({"question": "1+1=", "answer": 2})).unwrap();
    assert_eq!(prompt.text, "1+1=");
    assert_eq!(tokenizer().decode_with_special(&prompt.tokens), "<bos>1+1=");
    assert_eq!(prompt.answer, "2");
    let null = encode_error(&plain, json!({"question": null, "answer": ""}));
    assert!(
        null.ends_with("row 2: column `question` contains null, not a text"),
        "{null}"
    );
}

#[test]
fn bad_settings_are_all_reported() {
    let context = BuildContext {
        data: vec!["train".to_owned()],
        models: vec!["actor".to_owned(), "ref".to_owned()],
        ..BuildContext::default()
    };
    let config = Prompts {
        data: "test".to_owned(),
        model: "policy".to_owned(),
        question: String::new(),
        answer: String::new(),
        template: Template::None,
        system: Some("Add.".to_owned()),
        max_prompt_tokens: Some(0),
        with_targets: true,
        ..Prompts::default()
    };
    let faults: Vec<String> = match config.build(&context) {
        Ok(_) => Vec::new(),
        Err(faults) => faults.into_iter().map(|fault| fault.setting).collect(),
    };
    assert_eq!(
        faults,
        [
            "question",
            "system",
            "max_prompt_tokens",
            "data",
            "model",
            "with_targets"
        ]
    );
    assert!(Prompts::default().build(&context).is_ok());
    assert!(serde_json::from_value::<Prompts>(json!({"dataset": "train"})).is_err());
}

/// A model of which the source only reads the context.
struct Weightless;

impl EngineWeights for Weightless {
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        Err(RolloutError::NoTensors)
    }
}

impl PolicyModel for Weightless {
    fn score(
        &self,
        _rows: &[ScoreRow<'_>],
        _temperature: f64,
        _extras: Extras,
    ) -> Result<Vec<Scores>, ModelError> {
        Ok(Vec::new())
    }
    fn accumulate(
        &mut self,
        _rows: &[ScoreRow<'_>],
        _select: &dyn Fn(usize, usize) -> bool,
        _temperature: f64,
        _entropies: bool,
        _loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        Err(ModelError::Frozen)
    }
}

impl TrainedModel for Weightless {
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        Err(ModelError::Frozen)
    }
    fn optimizer_steps(&self) -> u64 {
        0
    }
    fn weights_hash(&self) -> String {
        String::new()
    }
    fn snapshot(&self) -> Box<dyn std::any::Any + Send + Sync> {
        Box::new(())
    }
    fn restore(&mut self, _snapshot: &(dyn std::any::Any + Send + Sync)) -> bool {
        true
    }
    fn save(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }
    fn vocab_size(&self) -> usize {
        32
    }
    fn max_tokens(&self) -> usize {
        9
    }
}

/// Builds and starts the stage of `config` on `resource`.
fn started(config: Prompts, resource: PolicyResource) -> Result<PromptStage, StageError> {
    let mut stage = PromptStage {
        format: config.format(),
        prompts: 2,
        source: None,
        config,
    };
    let data = BTreeMap::from([(
        "train".to_owned(),
        rows(json!([{"question": "1+1", "answer": "2"}, {"question": "100+100", "answer": "200"}])),
    )]);
    let mut models: Models = BTreeMap::from([("actor".to_owned(), Box::new(resource) as _)]);
    stage.start(&mut StartContext {
        data: &data,
        models: &mut models,
    })?;
    Ok(stage)
}

fn resource(tokenizer: Option<Arc<Tokenizer>>, chat: Option<ChatTemplate>) -> PolicyResource {
    let mut resource = PolicyResource::new(Box::new(Weightless));
    resource.tokenizer = tokenizer;
    resource.template = chat.map(Arc::new);
    resource
}

#[test]
fn starting_uses_tokenizer_template_and_context_of_the_model() {
    let whole = || resource(Some(tokenizer()), Some(template()));
    let start_error = |config: Prompts, resource: PolicyResource| match started(config, resource) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    let refusing = Prompts {
        on_long: OnLong::Error,
        ..Prompts::default()
    };
    let error = start_error(refusing, whole());
    assert!(
        error.contains("row 2: the prompt has 10 tokens, but the model's context is 9"),
        "{error}"
    );

    let config = Prompts {
        with_targets: true,
        ..Prompts::default()
    };
    let (batch, _) = step(&mut started(config.clone(), whole()).unwrap(), 1, 0).unwrap();
    assert_eq!(batch.get(&DATA_ROWS).unwrap().values(), [0, 0]);
    assert_eq!(batch.get(&TARGETS).unwrap().row(0), [22, 2]);

    assert_eq!(
        start_error(config.clone(), resource(None, None)),
        "model `actor` has no tokenizer, which prompts need"
    );
    assert_eq!(
        start_error(config.clone(), resource(Some(tokenizer()), None)),
        "model `actor` has no chat template; set `template = \"none\"` to use the question as it is"
    );
    let plain = Prompts {
        template: Template::None,
        ..config.clone()
    };
    assert_eq!(start_error(plain, resource(Some(tokenizer()), None)), "");
    let elsewhere = Prompts {
        data: "test".to_owned(),
        ..config.clone()
    };
    assert!(
        start_error(elsewhere, whole())
            .contains("no data set `test`; the pipeline declares: train")
    );
    let variables = Prompts {
        template_variables: json!({"bos_token": "7"}).as_object().unwrap().clone(),
        ..config
    };
    let (batch, _) = step(&mut started(variables, whole()).unwrap(), 1, 0).unwrap();
    assert_eq!(
        batch.get(&PROMPT_TEXTS).unwrap().row(0),
        "7<|user|>1+1<|assistant|>"
    );
}

/// The error when the stage of `config` starts on `values`; empty without one.
fn start_error(config: Prompts, values: Value) -> String {
    let data = BTreeMap::from([("train".to_owned(), rows(values))]);
    let whole = resource(Some(tokenizer()), Some(template()));
    let mut models: Models = BTreeMap::from([("actor".to_owned(), Box::new(whole) as _)]);
    let mut stage = PromptStage {
        format: config.format(),
        prompts: 1,
        source: None,
        config,
    };
    let started = stage.start(&mut StartContext {
        data: &data,
        models: &mut models,
    });
    started
        .err()
        .map_or(String::new(), |error| error.to_string())
}

#[test]
fn bad_rows_are_reported_before_the_first_step() {
    let row = |answer: Value| json!({"question": "1+1", "answer": answer});
    let one = json!([row(json!("2")), row(json!(null)), row(json!(2))]);
    assert_eq!(
        start_error(Prompts::default(), one),
        "`rows`, row 2: column `answer` contains null, not a text"
    );
    let several = json!([{"question": 3}, row(json!("2")), {"answer": "2"}, row(json!([]))]);
    let error = start_error(Prompts::default(), several);
    for words in [
        "row 1: there is no column `answer`",
        "row 3: there is no column `question`",
        "row 4: column `answer` contains a list",
    ] {
        assert!(error.contains(words), "`{words}` is not in: {error}");
    }
    let all = Value::Array(vec![json!({"question": "1+1"}); 400]);
    let error = start_error(Prompts::default(), all);
    assert!(error.contains("the first are"), "{error}");
    assert!(
        error.contains("row 5") && !error.contains("row 6"),
        "{error}"
    );
    let conversation = Prompts {
        messages: Some("chat".to_owned()),
        answer: String::new(),
        ..Prompts::default()
    };
    let ends = json!([{"chat": [{"role": "assistant", "content": "2"}]}]);
    let error = start_error(conversation, ends);
    assert!(error.contains("row 1: the conversation ends"), "{error}");
}

#[test]
fn answers_that_do_not_fit_the_context_are_handled_as_long_prompts() {
    let long = "1".repeat(60);
    let data =
        || rows(json!([{"question": "1+1", "answer": long}, {"question": "2+2", "answer": "4"}]));
    let config = |on_long| Prompts {
        on_long,
        with_targets: true,
        shuffle: false,
        ..Prompts::default()
    };
    let refused = step(&mut stage(config(OnLong::Error), 1, data()), 1, 0);
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("row 1: the answer has 61 tokens"), "{error}");
    let (batch, _) = step(&mut stage(config(OnLong::Truncate), 1, data()), 1, 0).unwrap();
    let prompt = batch.get(&PROMPTS).unwrap().row_len(0);
    assert_eq!(batch.get(&TARGETS).unwrap().row_len(0), 64 - prompt);
    let mut dropping = stage(config(OnLong::Drop), 1, data());
    survey(&mut dropping).unwrap();
    assert_eq!(dropping.source.unwrap().rows, [1]);
}
