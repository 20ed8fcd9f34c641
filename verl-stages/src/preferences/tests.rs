use std::sync::Arc;

use serde_json::json;
use verl_models::chat_template::ChatTemplate;
use verl_models::tokenizer::Tokenizer;
use verl_words::batch::RowId;
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::field::{Key, Ragged};

use super::*;
use crate::sink::{self, RecordingSink};

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

const CONTEXT: usize = 20;

fn source(rows: Value) -> Source {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-init");
    let rows = rows.as_array().unwrap().clone();
    Source {
        rows: (0..rows.len()).collect(),
        data: Arc::new(Rows(rows)),
        tokenizer: Arc::new(Tokenizer::load(&folder).unwrap()),
        template: Some(ChatTemplate::load(&folder).unwrap()),
        context: CONTEXT,
        order: None,
    }
}

fn stage(config: Preferences, prompts: usize, rows: Value) -> PreferenceStage {
    PreferenceStage {
        prompts,
        source: Some(source(rows)),
        config,
    }
}

fn judge(config: &Preferences, row: Value) -> Result<JudgedRow, DataError> {
    let (source, config) = (source(json!([{}, row])), &config.format);
    let prompts = config.prompts();
    let judged = JudgedRow::encode(config, &prompts, &source, 1)?;
    let fits = judged.long(config, &prompts, CONTEXT).is_none();
    match judged.clone().fit(config, &prompts, &source, 1) {
        Ok(fitted) => assert_eq!(
            fits,
            fitted.answers == judged.answers && fitted.prompt == judged.prompt
        ),
        Err(error) => assert!(!fits || error.to_string().contains("the same tokens")),
    }
    config.read(&source, 1)
}

#[track_caller]
fn check_refused(config: &Preferences, row: Value, words: &str) {
    let error = judge(config, row).expect_err("refused").to_string();
    assert!(error.starts_with("`rows`, row 2: "), "{error}");
    assert!(error.contains(words), "`{words}` is not in: {error}");
}

fn pair(chosen: &str, rejected: &str) -> Value {
    json!({"prompt": "12+34", "chosen": chosen, "rejected": rejected})
}

fn run(stage: &mut PreferenceStage, step: u64) -> (Batch, RecordingSink) {
    let kept = sink::run(stage, step, Batch::with_rows(&[]));
    let [batch] = &kept.batches[..] else {
        panic!("{} batches", kept.batches.len());
    };
    for field in stage.spec().writes {
        batch.check_field(&field).unwrap();
    }
    (batch.clone(), kept)
}

#[test]
fn a_step_contains_prompts_and_both_answers() {
    let rows = json!([pair("#### 46", "#### 5"), {"prompt": 7, "chosen": 7, "rejected": "11"}]);
    let config = Preferences {
        shuffle: false,
        ..Preferences::default()
    };
    let mut stage = stage(config, 3, rows);
    let (batch, kept) = run(&mut stage, 1);
    let tokenizer = stage.source.as_ref().unwrap().tokenizer.clone();
    let texts = |key: &Key<Ragged<u32>>| -> Vec<String> {
        let column = batch.get(key).unwrap();
        let rows = column.rows();
        rows.map(|ids| tokenizer.decode_with_special(ids)).collect()
    };
    let first = "<bos><|user|>12+34<|assistant|>";
    let second = "<bos><|user|>7<|assistant|>";
    assert_eq!(texts(&PROMPTS), [first, second, first]);
    assert_eq!(
        texts(&CHOSEN_RESPONSES),
        ["#### 46<eos>", "7<eos>", "#### 46<eos>"]
    );
    assert_eq!(
        texts(&REJECTED_RESPONSES),
        ["#### 5<eos>", "11<eos>", "#### 5<eos>"]
    );
    let prompts = batch.get(&PROMPT_TEXTS).unwrap();
    assert_eq!(prompts.rows().collect::<Vec<_>>(), [first, second, first]);
    assert_eq!(batch.get(&DATA_ROWS).unwrap().values(), [0, 1, 0]);
    let ids: Vec<String> = batch.ids().iter().map(RowId::to_string).collect();
    assert_eq!(ids, ["0.0#0", "0.1#0", "1.0#0"]);
    assert_eq!(kept.mean(&CHOSEN_LENGTH), Some((5 + 2 + 5) as f64 / 3.0));
    assert_eq!(kept.mean(&REJECTED_LENGTH), Some((4 + 3 + 4) as f64 / 3.0));
    assert_eq!(kept.mean(&PROMPT_LENGTH), Some((8 + 4 + 8) as f64 / 3.0));
    assert_eq!(kept.sum(&TOKENS), (2 * 20 + 12 + 11) as f64);
}

#[test]
fn rows_are_drawn_in_the_same_order_as_prompts() {
    let rows: Vec<Value> = (0..10)
        .map(|n| json!({"prompt": n, "chosen": 1, "rejected": 2}))
        .collect();
    let drawn = |step| {
        let mut stage = stage(Preferences::default(), 4, Value::from(rows.clone()));
        let (batch, _) = run(&mut stage, step);
        let ids = batch.ids();
        ids.iter()
            .map(|id| (id.epoch(), id.row()))
            .collect::<Vec<_>>()
    };
    let order = verl_models::random::shuffle(5, 0, 10);
    let expected: Vec<(u64, u64)> = order.iter().map(|row| (0, *row as u64)).collect();
    assert_eq!([drawn(1), drawn(2)].concat(), expected[..8]);
    assert_eq!(drawn(3)[..2], expected[8..]);
    assert!(drawn(3)[2..].iter().all(|(epoch, _)| *epoch == 1));
}

#[test]
fn single_answers_come_with_their_labels() {
    let rows = json!([
        {"prompt": "1+1", "completion": "2", "label": true},
        {"prompt": "1+1", "completion": "3", "label": 0},
    ]);
    let config = Preferences {
        shuffle: false,
        format: PreferenceFormat {
            labels: Some("label".to_owned()),
            ..PreferenceFormat::default()
        },
        ..Preferences::default()
    };
    let (batch, kept) = run(&mut stage(config.clone(), 2, rows), 1);
    assert_eq!(batch.get(&DESIRABLE).unwrap().values(), [1, 0]);
    assert_eq!(batch.get(&RESPONSES).unwrap().row_len(1), 2);
    assert_eq!(batch.get(&MASK_KINDS).unwrap().values(), [mask::ACTION; 4]);
    assert_eq!(kept.mean(&DESIRABLE_SHARE), Some(0.5));
    let labelled = |label: Value| json!({"prompt": "1", "completion": "2", "label": label});
    check_refused(
        &config,
        labelled(json!("yes")),
        "contains \"yes\", but a label is true or false",
    );
    check_refused(&config, labelled(json!(0.5)), "contains 0.5");
    let without = json!({"prompt": "1", "completion": "2"});
    let error = judge(&config, without).unwrap_err().to_string();
    assert!(error.contains("there is no column `label`"), "{error}");
}

#[test]
fn margins_go_with_both_sides_of_their_pair() {
    let row =
        |margin: Value| json!({"prompt": "1+1", "chosen": 2, "rejected": 3, "better_by": margin});
    let config = Preferences {
        shuffle: false,
        format: PreferenceFormat {
            margins: Some("better_by".to_owned()),
            ..PreferenceFormat::default()
        },
        ..Preferences::default()
    };
    let rows = json!([row(json!(1.5)), row(json!(-2))]);
    let (batch, _) = run(&mut stage(config.clone(), 2, rows), 1);
    assert_eq!(batch.get(&MARGINS).unwrap().values(), [1.5, -2.0]);
    for wrong in [json!("much"), json!(null), json!(1e300)] {
        check_refused(&config, row(wrong), "but a margin is a number");
    }
}

#[test]
fn conversations_share_their_prompt() {
    let config = Preferences::default();
    let user = |text: &str| json!({"role": "user", "content": text});
    let answer = |text: &str| json!({"role": "assistant", "content": text});
    let row = |prompt: Value, chosen: Value, rejected: Value| json!({"prompt": prompt, "chosen": chosen, "rejected": rejected});
    let plain = judge(&config, row(json!("1+1"), json!("2"), json!("3"))).unwrap();
    for same in [
        row(json!([user("1+1")]), json!([answer("2")]), json!("3")),
        row(
            json!("1+1"),
            json!([user("1+1"), answer("2")]),
            json!([answer("3")]),
        ),
    ] {
        assert_eq!(judge(&config, same).unwrap(), plain);
    }
    let whole = Preferences {
        format: PreferenceFormat {
            prompt: String::new(),
            ..config.format.clone()
        },
        ..config.clone()
    };
    let both = |asked: &str, other: &str| json!({"chosen": [user(asked), answer("2")], "rejected": [user(other), answer("3")]});
    assert_eq!(judge(&whole, both("1+1", "1+1")).unwrap(), plain);
    check_refused(
        &whole,
        both("1+1", "1+2"),
        "have different prompts; a pair compares",
    );
    check_refused(
        &whole,
        json!({"chosen": "2", "rejected": "3"}),
        "has no conversation before it",
    );
    let other = row(json!("1+1"), json!("2"), json!([user("1+2"), answer("3")]));
    check_refused(
        &config,
        other,
        "the rejected answer has a different prompt from the one in column `prompt`",
    );
    let unanswered = row(json!("1"), json!([user("1")]), json!("3"));
    check_refused(
        &config,
        unanswered,
        "`chosen` does not end with the assistant's message",
    );
    let asked = row(json!([user("1"), answer("2")]), json!("2"), json!("3"));
    check_refused(&config, asked, "ends with the assistant's message");
    let no_text = row(
        json!("1"),
        json!([json!({"role": "assistant", "content": null})]),
        json!("3"),
    );
    check_refused(&config, no_text, "has no text `content`");
    let raw = Preferences {
        format: PreferenceFormat {
            template: Template::None,
            ..config.format.clone()
        },
        ..config
    };
    check_refused(
        &raw,
        row(json!([user("1")]), json!("2"), json!("3")),
        "which requires a chat template",
    );
    assert_eq!(judge(&raw, pair("2", "3")).unwrap().text, "12+34");
}

#[test]
fn empty_and_equal_answers_are_reported() {
    let mut config = Preferences::default();
    check_refused(
        &config,
        pair("46", ""),
        "the rejected answer (column `rejected`) is empty",
    );
    check_refused(
        &config,
        pair("  ", "46"),
        "the chosen answer (column `chosen`) is empty",
    );
    check_refused(&config, pair("46", "46"), "set `on_equal = \"warn\"`");
    config.format.on_equal = OnEqual::Warn;
    assert!(judge(&config, pair("46", "46")).is_ok());
}

#[test]
fn long_rows_stop_the_run_unless_asked_otherwise() {
    let mut config = Preferences {
        format: PreferenceFormat {
            max_prompt_tokens: Some(8),
            max_response_tokens: Some(5),
            ..PreferenceFormat::default()
        },
        ..Preferences::default()
    };
    let long = || pair("#### 123456", "#### 123457");
    assert!(judge(&config, pair("#### 46", "#### 5")).is_ok());
    check_refused(
        &config,
        long(),
        "the chosen answer has 9 tokens, but only 5 fit",
    );
    let asked = json!({"prompt": "123+456", "chosen": 1, "rejected": 2});
    check_refused(
        &config,
        asked.clone(),
        "the prompt has 10 tokens, but `max_prompt_tokens` is 8",
    );

    config.format.on_long = OnLong::Truncate;
    // Cut off before they differ.
    check_refused(&config, long(), "have the same tokens");
    let cut = judge(&config, pair("#### 123456", "#### 5")).unwrap();
    assert_eq!(cut.answers.iter().map(Vec::len).collect::<Vec<_>>(), [5, 4]);
    assert_eq!(judge(&config, asked).unwrap().prompt.len(), 8);
    // The rest of the context after the prompt is a limit too: one token here.
    let wide = Preferences {
        format: PreferenceFormat {
            max_prompt_tokens: None,
            ..config.format.clone()
        },
        ..config.clone()
    };
    let full = json!({"prompt": "1".repeat(CONTEXT - 3), "chosen": 1, "rejected": 2});
    let cut = judge(&wide, full).unwrap();
    assert_eq!(cut.prompt.len(), CONTEXT - 1);
    assert_eq!(cut.answers.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn bad_settings_are_all_reported() {
    let context = BuildContext {
        data: vec!["train".to_owned()],
        models: vec!["actor".to_owned()],
        ..BuildContext::default()
    };
    let refused = |config: Preferences| -> Vec<String> {
        let faults = config.build(&context).err().unwrap_or_default();
        faults.into_iter().map(|fault| fault.setting).collect()
    };
    let none: [&str; 0] = [];
    assert_eq!(refused(Preferences::default()), none);
    let config = Preferences {
        data: "test".to_owned(),
        model: "policy".to_owned(),
        format: PreferenceFormat {
            rejected: "chosen".to_owned(),
            template: Template::None,
            system: Some("Add.".to_owned()),
            max_response_tokens: Some(0),
            ..PreferenceFormat::default()
        },
        ..Preferences::default()
    };
    let expected = ["system", "rejected", "max_response_tokens", "data", "model"];
    assert_eq!(refused(config), expected);
    let labelled = Preferences {
        format: PreferenceFormat {
            labels: Some(String::new()),
            response: String::new(),
            ..PreferenceFormat::default()
        },
        ..Preferences::default()
    };
    assert_eq!(refused(labelled), ["response", "labels"]);
}

/// The pairs of the examples: an answer is its own tokens and the end of the sequence, as in the first version.
#[test]
fn pairs_of_sums_keep_their_answers() {
    let pairs = crate::data::addition_pairs::AdditionPairs::default();
    let data = pairs.rows().unwrap();
    let source = Source {
        rows: (0..data.len()).collect(),
        data: Arc::new(data),
        ..source(json!([{}]))
    };
    let config = PreferenceFormat::default();
    for row in 0..200 {
        let values = source.data.row(row).unwrap();
        let judged = config.read(&source, row).unwrap();
        for (column, answer) in ["chosen", "rejected"].into_iter().zip(&judged.answers) {
            let text = values[column].as_str().unwrap();
            let mut tokens = source.tokenizer.encode(text, false).unwrap();
            tokens.push(2);
            assert_eq!(*answer, tokens);
        }
        assert_eq!(judged.notes, []);
    }
}

#[test]
fn answers_of_several_turns_are_refused() {
    let config = Preferences::default();
    let user = |text: &str| json!({"role": "user", "content": text});
    let answer = |text: &str| json!({"role": "assistant", "content": text});
    let several = json!([answer("2"), user("sure?"), answer("2")]);
    let words = "several messages after the prompt, but a pair compares single assistant turns";
    check_refused(
        &config,
        json!({"prompt": "1+1", "chosen": several, "rejected": "3"}),
        words,
    );
    let repeated = json!([user("1+1"), answer("2"), user("2+2"), answer("4")]);
    check_refused(
        &config,
        json!({"prompt": "1+1", "chosen": repeated, "rejected": "3"}),
        words,
    );
}

/// Row 3 of the usability findings, for pairs.
#[test]
fn answers_that_already_end_get_no_second_end() {
    let config = Preferences {
        format: PreferenceFormat {
            template: Template::None,
            ..PreferenceFormat::default()
        },
        ..Preferences::default()
    };
    let judged = judge(&config, pair("46<eos>", "4")).unwrap();
    let ends = |answer: &Vec<u32>| answer.iter().filter(|id| **id == 2).count();
    assert_eq!(judged.answers.iter().map(ends).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(
        judged.answers.iter().map(Vec::len).collect::<Vec<_>>(),
        [3, 2]
    );
    let chat = judge(&Preferences::default(), pair("46<eos>", "4")).unwrap();
    assert_eq!(chat.answers, judged.answers);
}

#[test]
fn tool_calls_are_answers() {
    let template = "{% for m in messages %}{% if m.tool_calls %}<|assistant|>{{ m.tool_calls[0].name }}<eos>{% else %}<|user|>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let config = PreferenceFormat::default();
    let call = |name: &str| json!([{"role": "assistant", "content": null, "tool_calls": [{"name": name}]}]);
    let row = json!({"prompt": "1+1", "chosen": call("2"), "rejected": call("11")});
    let source = Source {
        template: Some(ChatTemplate::new(template).unwrap()),
        ..source(json!([row]))
    };
    let judged = config.read(&source, 0).unwrap();
    let texts = judged
        .answers
        .iter()
        .map(|ids| source.tokenizer.decode_with_special(ids));
    assert_eq!(texts.collect::<Vec<_>>(), ["2<eos>", "11<eos>"]);
}
