use super::*;
use serde_json::json;

/// A word-level tokenizer with the given vocabulary; words in angle brackets are special.
fn word_level(words: &[&str]) -> Value {
    let vocab: Map<String, Value> = words
        .iter()
        .enumerate()
        .map(|(id, word)| ((*word).to_owned(), json!(id)))
        .collect();
    let added: Vec<Value> = words
            .iter()
            .enumerate()
            .filter(|(_, word)| word.starts_with('<'))
            .map(|(id, word)| {
                json!({"id": id, "content": word, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": true})
            })
            .collect();
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        },
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    })
}

const WORDS: [&str; 7] = ["<unk>", "<s>", "</s>", "one", "two", "three", "<end>"];

pub(crate) fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("tokenizer.json"),
        word_level(&WORDS).to_string(),
    )
    .unwrap();
    for (name, value) in files {
        std::fs::write(dir.path().join(name), value.to_string()).unwrap();
    }
    dir
}

#[test]
fn encodes_and_decodes_without_the_files_truncation() {
    let dir = folder(&[]);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("one two three", false).unwrap(), [3, 4, 5]);
    assert_eq!(
        tokenizer.encode("one two three", true).unwrap(),
        [1, 3, 4, 5]
    );
    assert_eq!(tokenizer.encode("one</s>", false).unwrap(), [3, 2]);
    assert_eq!(tokenizer.decode(&[1, 3, 4, 2]), "one two");
    assert_eq!(tokenizer.decode_with_special(&[1, 3, 2]), "<s> one </s>");
    assert_eq!(tokenizer.token_to_id("two"), Some(4));
    assert_eq!(tokenizer.id_to_token(6).as_deref(), Some("<end>"));
    assert_eq!(tokenizer.id_to_token(7), None);
    assert_eq!(tokenizer.vocab_size(), 7);
}

#[test]
fn every_end_of_sequence_id_is_used_in_order_of_precedence() {
    let config = ("config.json", json!({"eos_token_id": 2, "pad_token_id": 0}));
    let tokens = (
        "tokenizer_config.json",
        json!({"eos_token": {"content": "<end>"}, "bos_token": "<s>"}),
    );
    let generation = ("generation_config.json", json!({"eos_token_id": [6, 2]}));
    let without_ids = ("generation_config.json", json!({"temperature": 1.0}));
    let cases = [
        (vec![], vec![], None),
        (vec![tokens.clone()], vec![6], Some(1)),
        (vec![tokens.clone(), config.clone()], vec![2], Some(1)),
        (
            vec![tokens.clone(), config.clone(), without_ids],
            vec![2],
            Some(1),
        ),
        (vec![tokens, config, generation], vec![6, 2], Some(1)),
    ];
    for (files, eos, bos) in cases {
        let dir = folder(&files);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        assert_eq!(tokenizer.eos_ids(), eos, "{files:?}");
        assert_eq!(tokenizer.eos_id(), eos.first().copied());
        assert_eq!(tokenizer.bos_id(), bos, "{files:?}");
    }
}

#[test]
fn pad_is_declared_or_falls_back() {
    let pad = |files: &[(&str, Value)]| Tokenizer::load(folder(files).path()).unwrap().pad_id();
    let token = ("tokenizer_config.json", json!({"pad_token": "<end>"}));
    let generation = ("generation_config.json", json!({"pad_token_id": 2}));
    let unknown = ("tokenizer_config.json", json!({"unk_token": "three"}));
    assert_eq!(pad(&[token, generation.clone()]), 6);
    assert_eq!(pad(&[generation]), 2);
    assert_eq!(pad(&[unknown]), 5);
    assert_eq!(pad(&[]), 0);
}

#[test]
fn invalid_folders_are_reported() {
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        Tokenizer::load(empty.path()),
        Err(TokenizerError::Missing { .. })
    ));
    let message = |files: &[(&str, &str)]| {
        let dir = folder(&[]);
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        Tokenizer::load(dir.path()).unwrap_err().to_string()
    };
    assert!(message(&[("tokenizer.json", "{\"version\": ")]).contains("tokenizer.json`: "));
    assert!(message(&[("tokenizer_config.json", "[]")]).contains("tokenizer_config.json`: "));
    assert!(message(&[("generation_config.json", "{")]).contains("generation_config.json`: "));
    let text = message(&[("config.json", r#"{"pad_token_id": "a"}"#)]);
    assert!(text.contains("config.json`: "), "{text}");
    let text = message(&[("tokenizer_config.json", r#"{"eos_token": "<stop>"}"#)]);
    assert!(
        text.ends_with("eos_token is `<stop>`, which is not in the vocabulary"),
        "{text}"
    );
    let text = message(&[("generation_config.json", r#"{"eos_token_id": [2, "a"]}"#)]);
    assert!(
        text.ends_with("`eos_token_id` is \"a\", which is not a token id"),
        "{text}"
    );
}

#[test]
fn damaged_tokenizers_are_reported() {
    let dir = folder(&[]);
    let with = |at: &str, value: Value| {
        let mut file = word_level(&WORDS);
        let (parent, key) = at.rsplit_once('/').unwrap();
        file.pointer_mut(parent).unwrap()[key] = value;
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path()).unwrap_err().to_string()
    };
    let bpe = |merges: Value| json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": merges});
    let unigram = json!({"type": "Unigram", "unk_id": 99, "vocab": [["a", -1.0]]});
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    let bare = json!([{"id": 0, "content": "<unk>"}]);
    for (at, value) in [
        ("/normalizer", precompiled),
        ("/normalizer", json!({"type": "Unknown"})),
        ("/pre_tokenizer", json!({"type": "Unknown"})),
        ("/post_processor", json!({"type": "Unknown"})),
        ("/decoder", json!({"type": "Unknown"})),
        ("/version", json!("9.0")),
        ("/truncation", json!(5)),
        ("/padding", json!("x")),
        ("/added_tokens", bare),
        ("/model", json!({"type": "Own"})),
        ("/model", bpe(json!([["a", "c"]]))),
        ("/model", bpe(Value::Null)),
        ("/model", unigram),
        ("/model/vocab", json!(3)),
    ] {
        let message = with(at, value);
        assert!(message.contains("tokenizer.json`: "), "{at}: {message}");
    }
    let none = json!({"type": "WordLevel", "vocab": {}, "unk_token": "a"});
    let mut file = word_level(&[]);
    file["model"] = none;
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let message = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(message.contains("the vocabulary is empty"), "{message}");
    let message = with("/model/vocab", json!({"<unk>": 4_294_967_295_u32}));
    assert!(
        message.contains("but the limit is 16777216 ids"),
        "{message}"
    );
}

#[test]
fn ids_without_a_token_are_none() {
    let dir = folder(&[]);
    let mut file = word_level(&WORDS);
    file["model"]["vocab"] = json!({"<unk>": 0, "one": 3});
    file["added_tokens"].as_array_mut().unwrap().truncate(1);
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let tokens: Vec<_> = tokenizer.tokens().collect();
    let some = |token: &str| Some(token.to_owned());
    assert_eq!(tokens, [some("<unk>"), None, None, some("one")]);
}

#[test]
fn files_are_copied_byte_for_byte() {
    let dir = folder(&[("generation_config.json", json!({"eos_token_id": 2}))]);
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ x }}\r\n").unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let out = dir.path().join("a/b");
    tokenizer.save(&out).unwrap();
    let names = [
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    ];
    for name in names {
        assert_eq!(
            std::fs::read(out.join(name)).unwrap(),
            std::fs::read(dir.path().join(name)).unwrap()
        );
    }
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), names.len());
}

/// A SentencePiece-style tokenizer, if it exists next to the workspace; the ids come from `transformers`.
#[test]
fn stories_are_tokenised_as_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/stories260K");
    if !folder.exists() {
        return;
    }
    let tokenizer = Tokenizer::load(&folder).unwrap();
    assert_eq!(tokenizer.eos_ids(), [1, 2]);
    assert_eq!((tokenizer.bos_id(), tokenizer.pad_id()), (Some(1), 0));
    let ids = [
        1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426,
    ];
    let text = "Once upon a time, there was a little girl named Lily.";
    assert_eq!(tokenizer.encode(text, true).unwrap(), ids);
    assert_eq!(tokenizer.decode(&ids), text);
    let ids = [1, 320, 485, 306, 414, 13, 410, 475, 479];
    assert_eq!(tokenizer.encode("Héllo\n 12", true).unwrap(), ids);
    assert_eq!(tokenizer.decode(&ids), "Héllo\n 12");
}
