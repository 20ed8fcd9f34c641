//! Compares special tokens from every file of a folder with `transformers` 4.57 and 5.24. The expected values come from
//! `scripts/tokenizers/special_tokens.py`.

use std::path::Path;

use serde_json::{Map, Value};
use verl_text::chat_template::{ChatTemplate, message};
use verl_text::tokenizer::Tokenizer;

/// Cases that are refused here but load in `transformers`, which gives the tokens ids other than those in the files, or
/// ends sequences with a token that the model does not know.
const REFUSED: [(&str, &str); 4] = [
    ("gap", "the next free id is 99"),
    ("taken", "that id belongs to `E`"),
    ("elsewhere", "the vocabulary has it at 2"),
    (
        "unknown_eos",
        "eos_token is `<|end|>`, which is not in the vocabulary",
    ),
];

/// Cases in which the two versions differ in which tokens are special, with the version followed here.
const FOLLOWED: [(&str, &str); 1] = [("added_tokens_and_map", "4.57")];

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/special_tokens.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn folder(case: &Value, template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in case["files"].as_object().unwrap() {
        std::fs::write(dir.path().join(name), content.to_string()).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

fn texts(golden: &Value) -> Vec<String> {
    let texts = golden["texts"].as_array().unwrap();
    texts
        .iter()
        .map(|text| text.as_str().unwrap().to_owned())
        .collect()
}

/// The results for a folder, in the form of the golden file.
fn read(folder: &Path, texts: &[String], roles: &Map<String, Value>) -> Value {
    let tokenizer = Tokenizer::load(folder).unwrap();
    let ids: Vec<Vec<u32>> = texts
        .iter()
        .map(|text| tokenizer.encode(text, false).unwrap())
        .collect();
    let role_ids: Map<String, Value> = roles
        .keys()
        .map(|role| {
            let token = roles[role].as_str().unwrap();
            (role.clone(), tokenizer.token_to_id(token).into())
        })
        .collect();
    let template = ChatTemplate::load(folder).unwrap();
    let visible = ids.iter().map(|ids| tokenizer.decode(ids));
    let spelled = ids.iter().map(|ids| tokenizer.decode_with_special(ids));
    serde_json::json!({
        "length": tokenizer.vocab_size(),
        "visible": visible.collect::<Vec<_>>(),
        "spelled": spelled.collect::<Vec<_>>(),
        "role_ids": role_ids,
        "variables": template.render(&[message("user", "hi")], false).unwrap(),
        "ids": ids,
    })
}

#[test]
fn special_tokens_match_transformers() {
    let golden = golden();
    let (texts, template) = (texts(&golden), golden["template"].as_str().unwrap());
    let mut compared = 0;
    for (name, case) in golden["cases"].as_object().unwrap() {
        let dir = folder(case, template);
        if let Some((_, reason)) = REFUSED.iter().find(|(refused, _)| refused == name) {
            let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
            assert!(error.contains(reason), "{name}: {error}");
            continue;
        }
        let version = FOLLOWED.iter().find(|(followed, _)| followed == name);
        let mut want = case[version.map_or("5.24", |(_, version)| version)].clone();
        if version.is_none() {
            assert_eq!(want["ids"], case["4.57"]["ids"], "{name}");
        }
        want.as_object_mut().unwrap().remove("roles");
        let roles: Map<String, Value> = case["5.24"]["roles"].as_object().unwrap().clone();
        let roles = roles.into_iter().filter(|(_, token)| token != "").collect();
        let got = read(dir.path(), &texts, &roles);
        for (key, value) in want.as_object().unwrap() {
            assert_eq!(&got[key], value, "{name}: {key}");
        }
        // A saved folder is read the same way.
        let saved = dir.path().join("saved");
        Tokenizer::load(dir.path()).unwrap().save(&saved).unwrap();
        assert_eq!(read(&saved, &texts, &roles), got, "{name}");
        compared += 1;
    }
    assert!(compared >= 19, "{compared}");
}

/// `[PAD]` has no row in the embedding, and nothing reads it.
#[test]
fn a_pad_token_without_a_row_is_ignored() {
    let golden = golden();
    let case = &golden["cases"]["roles_get_ids"];
    for (rows, id) in [(99, None), (100, Some(99))] {
        let dir = folder(case, "");
        let config = format!("{{\"vocab_size\": {rows}}}");
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        assert_eq!(tokenizer.token_to_id("[PAD]"), id);
        assert_eq!(tokenizer.vocab_size(), rows);
    }
}

/// Negative ids mean none; ids without a row in the embedding cannot end a response.
#[test]
fn ids_outside_the_vocabulary_are_ignored_or_refused() {
    let golden = golden();
    let case = &golden["cases"]["plain"];
    let load = |config: &str, generation: &str| {
        let dir = folder(case, "");
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        std::fs::write(dir.path().join("generation_config.json"), generation).unwrap();
        Tokenizer::load(dir.path()).map_err(|error| error.to_string())
    };
    let ends =
        |config: &str, generation: &str| load(config, generation).unwrap().eos_ids().to_vec();
    let none = r#"{"vocab_size": 99, "pad_token_id": -1, "bos_token_id": -1, "eos_token_id": -1}"#;
    let tokenizer = load(none, r#"{"pad_token_id": -1, "eos_token_id": [-1]}"#).unwrap();
    assert_eq!(
        (tokenizer.eos_ids(), tokenizer.bos_id(), tokenizer.pad_id()),
        (&[][..], None, 0)
    );
    let config = r#"{"vocab_size": 99, "eos_token_id": 2}"#;
    assert_eq!(ends(config, r#"{"eos_token_id": [-1]}"#), [2]);
    assert_eq!(
        ends(config, r#"{"eos_token_id": [100000, 1, -1, 2]}"#),
        [1, 2]
    );
    let error = load(config, r#"{"eos_token_id": 100000}"#).unwrap_err();
    let expected =
        "generation_config.json`: `eos_token_id` is 100000, but the vocabulary ends at 99";
    assert!(error.ends_with(expected), "{error}");
    assert!(load(config, r#"{"eos_token_id": 1.5}"#).is_err());
    assert!(load(config, r#"{"eos_token_id": 4294967296}"#).is_err());
}

#[test]
fn git_lfs_pointers_and_byte_order_marks_are_recognised() {
    let golden = golden();
    let case = &golden["cases"]["decoder"];
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "config.json",
    ] {
        let dir = folder(case, "");
        std::fs::write(dir.path().join(name), pointer).unwrap();
        let error = match name {
            "chat_template.jinja" => ChatTemplate::load(dir.path()).unwrap_err().to_string(),
            _ => Tokenizer::load(dir.path()).unwrap_err().to_string(),
        };
        assert!(
            error.contains(name) && error.contains("git lfs pull"),
            "{error}"
        );
    }
    // Pointers to files that are not read are left out of a saved folder instead.
    let dir = folder(case, "{{ bos_token }}");
    std::fs::write(dir.path().join("tokenizer.model"), pointer).unwrap();
    let saved = dir.path().join("saved");
    Tokenizer::load(dir.path()).unwrap().save(&saved).unwrap();
    assert!(!saved.join("tokenizer.model").exists());
    // A byte-order mark is skipped and not written.
    let dir = folder(case, "\u{feff}{{ bos_token }}");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let text = std::fs::read_to_string(dir.path().join(name)).unwrap();
        std::fs::write(dir.path().join(name), format!("\u{feff}{text}")).unwrap();
    }
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(100));
    let template = ChatTemplate::load(dir.path()).unwrap();
    assert_eq!(template.render(&[], false).unwrap(), "<s>");
    tokenizer.save(&dir.path().join("saved")).unwrap();
    let written = std::fs::read(dir.path().join("saved/tokenizer_config.json")).unwrap();
    assert!(written.starts_with(b"{"));
}

#[test]
fn templates_in_separate_files_take_precedence() {
    let golden = golden();
    let dir = folder(
        &golden["cases"]["map_alone"],
        "from the file {{ eos_token }}\r\n",
    );
    let render = || {
        let template = ChatTemplate::load(dir.path()).map_err(|error| error.to_string())?;
        template
            .render(&[], false)
            .map_err(|error| error.to_string())
    };
    let config = |template: &str| {
        let text = format!("{{\"chat_template\": {template}}}");
        std::fs::write(dir.path().join("tokenizer_config.json"), text).unwrap();
    };
    config("\"from the config\"");
    // The token is declared only in special_tokens_map.json.
    assert_eq!(render().unwrap(), "from the file </s>");
    let further = dir.path().join("additional_chat_templates");
    std::fs::create_dir(&further).unwrap();
    std::fs::write(further.join("tool_use.jinja"), "with tools").unwrap();
    assert_eq!(render().unwrap(), "from the file </s>");
    std::fs::write(further.join("default.jinja"), "a\r\nb\rc").unwrap();
    assert_eq!(render().unwrap(), "a\nb\nc");
    let saved = dir.path().join("saved");
    Tokenizer::load(dir.path()).unwrap().save(&saved).unwrap();
    assert!(
        saved
            .join("additional_chat_templates/tool_use.jinja")
            .exists()
    );
    std::fs::remove_file(further.join("default.jinja")).unwrap();
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    assert!(render().unwrap_err().contains("none is named `default`"));
    std::fs::remove_dir_all(&further).unwrap();
    assert_eq!(render().unwrap(), "from the config");
    for template in [
        r#"[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]"#,
        r#"{"tool_use": "x", "default": "named"}"#,
    ] {
        config(template);
        assert_eq!(render().unwrap(), "named");
    }
    config("null");
    std::fs::write(dir.path().join("chat_template.json"), "{}").unwrap();
    assert!(
        render()
            .unwrap_err()
            .contains("chat_template.json is only for processors")
    );
}
