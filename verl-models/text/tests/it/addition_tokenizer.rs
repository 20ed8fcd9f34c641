//! The tokenizer in `examples/models/addition-init`: 32 tokens for sums, questions and `#### n` answers.
//!
//! This test generates its files: `VERL_WRITE_EXAMPLES=1 cargo test --workspace addition_tokenizer` writes them, and
//! without the variable the test compares. Text becomes one token per character, except `####`, which two merges join.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use verl_text::chat_template::{ChatTemplate, message};
use verl_text::tokenizer::Tokenizer;

const SPECIAL: [&str; 6] = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<|user|>",
    "<|assistant|>",
];
const CHARACTERS: &str = "\n #+-*/=?.,:()0123456789";
const JOINED: [&str; 2] = ["##", "####"];

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('roles are user and assistant') }}{% endif %}\
{{ '<|' + message['role'] + '|>' + message['content'] }}\
{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/addition-init")
}

fn files() -> [(&'static str, Value); 3] {
    let characters: Vec<String> = CHARACTERS.chars().map(String::from).collect();
    let vocabulary: Map<String, Value> = SPECIAL
        .into_iter()
        .chain(characters.iter().map(String::as_str))
        .chain(JOINED)
        .enumerate()
        .map(|(id, token)| (token.to_owned(), id.into()))
        .collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let begin = |part: u32| json!({"SpecialToken": {"id": "<bos>", "type_id": part}});
    let text = |name: &str, part: u32| json!({"Sequence": {"id": name, "type_id": part}});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin(0), text("A", 0)],
            "pair": [begin(0), text("A", 0), begin(1), text("B", 1)],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}}
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [["#", "#"], ["##", "##"]]
        }
    });
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        "clean_up_tokenization_spaces": false,
        "chat_template": TEMPLATE
    });
    let generation = json!({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0});
    [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ]
}

#[test]
fn the_committed_files_are_up_to_date() {
    for (name, value) in files() {
        let path = folder().join(name);
        let text = format!("{value:#}\n");
        if std::env::var_os("VERL_WRITE_EXAMPLES").is_some() {
            std::fs::create_dir_all(folder()).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "{name}");
    }
}

#[test]
fn sums_and_answers_become_few_tokens_and_decode_to_the_same_text() {
    let tokenizer = Tokenizer::load(&folder()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 32);
    let ids = tokenizer.encode("12+34=46\n#### 46", false).unwrap();
    assert_eq!(ids.len(), 8 + 1 + 1 + 1 + 2);
    assert_eq!(tokenizer.decode(&ids), "12+34=46\n#### 46");
    assert_eq!(tokenizer.encode("####", false).unwrap(), [31]);
    assert_eq!(tokenizer.encode("1", true).unwrap(), [1, 21]);
    assert_eq!(tokenizer.encode("x", false).unwrap(), [3]);
    assert_eq!((tokenizer.eos_ids(), tokenizer.pad_id()), (&[2][..], 0));
}

#[test]
fn the_template_opens_an_answer_that_ends_with_eos() {
    let tokenizer = Tokenizer::load(&folder()).unwrap();
    let template = ChatTemplate::load(&folder()).unwrap();
    let question = message("user", "12+34");
    assert_eq!(
        template
            .render(std::slice::from_ref(&question), true)
            .unwrap(),
        "<bos><|user|>12+34<|assistant|>"
    );
    assert_eq!(
        template
            .render(&[question, message("assistant", "#### 46")], false)
            .unwrap(),
        "<bos><|user|>12+34<|assistant|>#### 46<eos>"
    );
    assert_eq!(template.terminator(&tokenizer).unwrap(), Some(2));
    assert!(template.render(&[message("system", "Add.")], true).is_err());
}
