//! Rows that are trained on: conversations, their tools, and what is reported about them before the first step.

use serde_json::json;
use verl_models::chat_template::ChatTemplate;
use verl_words::field::{Key, Ragged};
use verl_words::stage::ModelFactory;

use super::tests::{rows, stage, step, survey, tokenizer};
use super::*;
use crate::model::{CausalLm, Init};

/// Turns of user, assistant and tool, after the list of tools.
const TOOLS: &str = "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool.name }}{% endfor %}{% endif %}{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.name }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if brief %}{{ '####' }}{% endif %}{% endif %}";

fn with_tools(config: Prompts, data: Value) -> PromptStage {
    let mut stage = stage(config, 1, rows(data));
    let variables = json!({"bos_token": "<bos>", "eos_token": "<eos>"});
    let template = ChatTemplate::new(TOOLS).unwrap();
    let template = template.with_variables(variables.as_object().unwrap().clone());
    stage.source.as_mut().unwrap().template = Some(template);
    stage
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn imitated() -> Prompts {
    Prompts {
        messages: Some("messages".to_owned()),
        with_targets: true,
        ..Prompts::default()
    }
}

/// Prompt, target and kinds of the only row.
fn written(stage: &mut PromptStage) -> (String, String, Vec<u8>) {
    survey(stage).unwrap();
    let (batch, _) = step(stage, 1, 0).unwrap();
    for field in stage.spec().writes {
        batch.check_field(&field).unwrap();
    }
    let text = |key: &Key<Ragged<u32>>| {
        let column = batch.get(key).unwrap();
        tokenizer().decode_with_special(column.row(0))
    };
    let kinds = batch.get(&TARGET_KINDS).unwrap().row(0).to_vec();
    (text(&PROMPTS), text(&TARGETS), kinds)
}

fn refused(stage: &mut PromptStage) -> String {
    survey(stage).unwrap_err().to_string()
}

/// Row A15 of the usability findings.
#[test]
fn conversations_that_end_with_the_answer_are_imitated() {
    let messages = json!([user("12+34"), assistant("#### 46")]);
    let expected = (
        "<bos><|user|>12+34<|assistant|>".to_owned(),
        "#### 46<eos>".to_owned(),
        vec![mask::ACTION; 5],
    );
    let alone = || json!([{"messages": messages}]);
    for answer in ["answer", ""] {
        let config = Prompts {
            answer: answer.to_owned(),
            ..imitated()
        };
        assert_eq!(written(&mut stage(config, 1, rows(alone()))), expected);
    }
    // The answer of the column is for rewards; the target comes from the conversation.
    let both = json!([{"messages": messages, "answer": 46}]);
    let mut running = stage(imitated(), 1, rows(both));
    assert_eq!(written(&mut running), expected);
    let (batch, _) = step(&mut running, 1, 0).unwrap();
    assert_eq!(batch.get(&ANSWERS).unwrap().row(0), "46");
    let mut running = stage(imitated(), 1, rows(alone()));
    let (batch, _) = step(&mut running, 1, 0).unwrap();
    assert_eq!(batch.get(&ANSWERS).unwrap().row(0), "#### 46");
    // A conversation without an answer, which is in a column of its own.
    let open = json!([{"messages": [user("12+34")], "answer": "#### 46"}]);
    assert_eq!(written(&mut stage(imitated(), 1, rows(open))), expected);
    let bare = Prompts {
        answer: String::new(),
        ..imitated()
    };
    let open = json!([{"messages": [user("12+34")]}]);
    let error = refused(&mut stage(bare, 1, rows(open)));
    assert!(
        error.contains(
            "row 1: the conversation in column `messages` does not end with the assistant's message"
        ),
        "{error}"
    );
    let error = refused(&mut stage(
        imitated(),
        1,
        rows(json!([{"messages": [assistant("1")]}])),
    ));
    assert!(error.contains("has an answer but no question"), "{error}");
}

#[test]
fn a_prompt_that_ends_with_an_answer_is_refused_without_targets() {
    let config = Prompts {
        with_targets: false,
        answer: String::new(),
        ..imitated()
    };
    let data = json!([{"messages": [user("1+1"), assistant("2")]}]);
    let error = refused(&mut stage(config, 1, rows(data)));
    assert!(
        error.ends_with("which the model should write; remove it, or train on it with `with_targets = true` in stage `prompts`"),
        "{error}"
    );
}

#[test]
fn all_turns_or_the_last_turn_are_trained() {
    let data = || json!([{"messages": [user("1+1"), assistant("2"), user("2+2"), assistant("4")]}]);
    let last = written(&mut stage(imitated(), 1, rows(data())));
    assert_eq!(
        last.0,
        "<bos><|user|>1+1<|assistant|>2<eos><|user|>2+2<|assistant|>"
    );
    assert_eq!((last.1.as_str(), last.2), ("4<eos>", vec![mask::ACTION; 2]));
    let config = Prompts {
        train_on: TrainOn::All,
        ..imitated()
    };
    let (prompt, target, kinds) = written(&mut stage(config, 1, rows(data())));
    assert_eq!(prompt, "<bos><|user|>1+1<|assistant|>");
    assert_eq!(target, "2<eos><|user|>2+2<|assistant|>4<eos>");
    assert_eq!(kinds, [1, 1, 0, 0, 0, 0, 0, 1, 1]);
}

#[test]
fn tool_calls_are_trained_and_their_results_are_not() {
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"name": "12+34"}]});
    let result = json!({"role": "tool", "content": "46", "tool_calls": null});
    let messages = json!([user("1"), call, result, assistant("46")]);
    let data = json!([{"messages": messages, "tools": [{"name": "+"}]}]);
    let config = Prompts {
        train_on: TrainOn::All,
        ..imitated()
    };
    let (prompt, target, kinds) = written(&mut with_tools(config, data));
    assert_eq!(prompt, "<bos>+<|user|>1<|assistant|>");
    assert_eq!(target, "12+34<eos><|user|>46<|assistant|>46<eos>");
    assert_eq!(kinds, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]);
    // A call is an answer too.
    let data = json!([{"messages": messages.as_array().unwrap()[..2], "answer": ""}]);
    let (_, target, _) = written(&mut with_tools(imitated(), data));
    assert_eq!(target, "12+34<eos>");
}

/// Row 9 of the usability findings.
#[test]
fn tools_of_a_row_are_passed_to_the_template() {
    let prompt = |config: Prompts, tools: Value| {
        let data = json!([{"question": "1", "answer": "2", "tools": tools}]);
        let mut stage = with_tools(config, data);
        survey(&mut stage).map(|()| {
            let (batch, _) = step(&mut stage, 1, 0).unwrap();
            batch.get(&PROMPT_TEXTS).unwrap().row(0).to_owned()
        })
    };
    let of_row = |tools: Value| prompt(Prompts::default(), tools);
    let with = "<bos>+<|user|>1<|assistant|>";
    let without = "<bos><|user|>1<|assistant|>";
    assert_eq!(of_row(json!([{"name": "+"}])).unwrap(), with);
    assert_eq!(of_row(json!("[{\"name\": \"+\"}]")).unwrap(), with);
    for none in [json!(null), json!([]), json!(" ")] {
        assert_eq!(of_row(none).unwrap(), without);
    }
    for wrong in [
        json!(["+"]),
        json!({"name": "+"}),
        json!("{}"),
        json!("[{"),
        json!(3),
    ] {
        let error = of_row(wrong).unwrap_err().to_string();
        assert!(
            error.contains("column `tools` contains neither a list of objects"),
            "{error}"
        );
    }
    // The tools of the row take precedence over those of all rows.
    let all = json!({"tools": [{"name": "12"}]});
    let config = Prompts {
        template_variables: all.as_object().unwrap().clone(),
        ..Prompts::default()
    };
    assert_eq!(
        prompt(config.clone(), json!([{"name": "+"}])).unwrap(),
        with
    );
    let other = Prompts {
        tools: String::new(),
        ..Prompts::default()
    };
    assert_eq!(prompt(other, json!([{"name": "+"}])).unwrap(), without);
}

#[test]
fn variables_of_a_row_take_precedence_over_those_of_all_rows() {
    let prompt = |own: Value| {
        let data = json!([{"question": "1", "answer": "2", "chat_template_kwargs": own}]);
        let all = json!({"brief": true});
        let config = Prompts {
            template_variables: all.as_object().unwrap().clone(),
            ..Prompts::default()
        };
        let mut stage = with_tools(config, data);
        let template = stage.source.as_mut().unwrap().template.take().unwrap();
        let all = stage.format.template_variables.clone();
        stage.source.as_mut().unwrap().template = Some(template.with_variables(all));
        survey(&mut stage).map(|()| {
            let (batch, _) = step(&mut stage, 1, 0).unwrap();
            batch.get(&PROMPT_TEXTS).unwrap().row(0).to_owned()
        })
    };
    assert_eq!(
        prompt(json!(null)).unwrap(),
        "<bos><|user|>1<|assistant|>####"
    );
    for own in [json!({"brief": false}), json!("{\"brief\": false}")] {
        assert_eq!(prompt(own).unwrap(), "<bos><|user|>1<|assistant|>");
    }
    let error = prompt(json!([1])).unwrap_err().to_string();
    assert!(
        error.contains("column `chat_template_kwargs` contains neither an object"),
        "{error}"
    );
}

#[test]
fn tools_that_no_template_writes_are_reported() {
    let data = json!([{"question": "1", "answer": "2", "tools": [{"name": "+"}]}]);
    let notes = |stage: &PromptStage| {
        let source = stage.source.as_ref().unwrap();
        stage.config.show(&stage.format, source, 0).unwrap().notes
    };
    let silent = stage(Prompts::default(), 1, rows(data.clone()));
    assert_eq!(notes(&silent), [RowNote::ToolsUnread]);
    let plain = Prompts {
        template: Template::None,
        ..Prompts::default()
    };
    assert_eq!(
        notes(&stage(plain, 1, rows(data.clone()))),
        [RowNote::ToolsUnread]
    );
    assert_eq!(notes(&with_tools(Prompts::default(), data)), []);
}

/// The usability finding "a long prompt with `on_long = "error"` in row 150" of part 2, and row 4 of part 3.
#[test]
fn rows_that_are_too_long_are_found_before_the_first_step() {
    let long = "1".repeat(70);
    let data = |long_rows: &[usize]| {
        let row = |row: usize| match long_rows.contains(&row) {
            true => json!({"question": long, "answer": "1"}),
            false => json!({"question": "1+1", "answer": "2"}),
        };
        rows((0..200).map(row).collect())
    };
    let config = |on_long| Prompts {
        on_long,
        ..Prompts::default()
    };
    let error = refused(&mut stage(config(OnLong::Error), 4, data(&[149])));
    assert_eq!(
        error,
        "`rows`, row 150: the prompt has 73 tokens, but the model's context is 64, which must also fit an answer; shorten it, or set `on_long` to \"drop\" or \"truncate\""
    );
    let many = [3, 7, 20, 21, 22, 149, 150];
    let error = refused(&mut stage(config(OnLong::Error), 4, data(&many)));
    let first =
        "`rows`: 7 of 200 rows are too long; the first are:\n  row 4: the prompt has 73 tokens";
    assert!(error.starts_with(first), "{error}");
    assert!(
        error.contains("row 23") && !error.contains("row 150"),
        "{error}"
    );
    // By default they are dropped, and the others are drawn as if they did not exist.
    let mut dropping = stage(Prompts::default(), 4, data(&many));
    survey(&mut dropping).unwrap();
    let kept = &dropping.source.as_ref().unwrap().rows;
    assert_eq!(kept.len(), 193);
    assert!(many.iter().all(|row| !kept.contains(row)));
    let mut cutting = stage(config(OnLong::Truncate), 200, data(&many));
    survey(&mut cutting).unwrap();
    let (batch, _) = step(&mut cutting, 1, 0).unwrap();
    let longest = batch.get(&PROMPTS).unwrap().rows().map(<[u32]>::len).max();
    assert_eq!(longest, Some(63));
}

#[test]
fn a_preview_shows_a_row_as_a_run_writes_it() {
    let data = rows(json!([{"question": "12+34", "answer": "#### 46"}]));
    let config = Prompts {
        with_targets: true,
        ..Prompts::default()
    };
    let stage = config
        .build(&BuildContext {
            data: vec!["train".to_owned()],
            models: vec!["actor".to_owned()],
            ..BuildContext::default()
        })
        .unwrap_or_else(|faults| panic!("{faults:?}"));
    let data = [("train".to_owned(), data)].into();
    let actor = CausalLm {
        init: Init::Random,
        ..CausalLm::frozen(super::tests::folder())
    };
    let actor = actor.describe(&BuildContext::default()).unwrap();
    let models = [("actor".to_owned(), actor)].into();
    let context = PreviewContext {
        data: &data,
        models: &models,
    };
    let rows = stage.preview(context).unwrap().unwrap();
    assert_eq!((rows.data(), rows.model()), ("train", "actor"));
    let row = rows.row(0).unwrap();
    assert_eq!(row.prompt_text, "<bos><|user|>12+34<|assistant|>");
    assert_eq!(row.answer.as_deref(), Some("#### 46"));
    assert_eq!(
        tokenizer().decode_with_special(&row.prompt),
        row.prompt_text
    );
    let [target] = &row.targets[..] else {
        panic!("{} targets", row.targets.len());
    };
    assert_eq!(target.name, "target");
    assert_eq!(
        tokenizer().decode_with_special(&target.tokens),
        "#### 46<eos>"
    );
    assert_eq!(target.trained, [true; 5]);
    assert_eq!((row.too_long, row.notes), (None, vec![]));
    // Without a described model there is no preview.
    let nowhere = PreviewContext {
        models: &Default::default(),
        ..context
    };
    assert!(stage.preview(nowhere).unwrap().is_none());
}

/// The targets of the examples' sums are the tokens of the answer and the end of the sequence, as in the first version.
#[test]
fn sums_keep_their_targets() {
    let sums = crate::data::addition::Addition {
        count: Some(300),
        ..Default::default()
    };
    let config = Prompts {
        with_targets: true,
        ..Prompts::default()
    };
    let stage = stage(config, 1, std::sync::Arc::new(sums.rows().unwrap()));
    let source = stage.source.as_ref().unwrap();
    for row in 0..source.data.len() {
        let values = source.data.row(row).unwrap();
        let text = |column: &str| values[column].as_str().unwrap().to_owned();
        let prompt = format!("<bos><|user|>{}<|assistant|>", text("question"));
        let mut answer = source.tokenizer.encode(&text("answer"), false).unwrap();
        answer.push(source.tokenizer.eos_id().unwrap());
        let example = stage.config.encode(&stage.format, source, row).unwrap();
        assert_eq!(example.prompt.text, prompt);
        assert_eq!(
            example.prompt.tokens,
            source.tokenizer.encode(&prompt, false).unwrap()
        );
        assert_eq!(example.target.tokens, answer);
        assert_eq!(example.notes, []);
    }
}
