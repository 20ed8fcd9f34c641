//! Which token each id of a tokenizer.json is, read without building the tokenizer, which takes many times as long.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

use crate::tokenizer::{SpecialIds, TokenizerError};

/// Ids of one tokenizer beyond this are a damaged file, and so is an embedding with more rows.
pub(crate) const MAX_IDS: usize = 1 << 24;

/// The tokens of a folder's tokenizer.json by id, added ones included; `None` where an id is no token.
///
/// `None` for a kind of tokenizer that does not list its vocabulary as a map or a list.
///
/// # Errors
/// A folder without tokenizer.json; a file that is malformed or holds no token; special tokens that the files beside it
/// declare and the tokenizer would refuse.
pub fn tokens(folder: &Path) -> Result<Option<Vec<Option<String>>>, TokenizerError> {
    let path = folder.join("tokenizer.json");
    let malformed = |reason: String| TokenizerError::Malformed {
        path: path.display().to_string(),
        reason,
    };
    let bytes = std::fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => TokenizerError::Missing {
            folder: folder.display().to_string(),
        },
        _ => malformed(error.to_string()),
    })?;
    let file: File =
        serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
    let Some(vocab) = file.model.vocab else {
        // Which tokens there are is not known, so that each may be.
        SpecialIds::read(folder, |_| Some(0))?;
        return Ok(None);
    };
    let added = file.added_tokens.into_iter();
    let added = added.map(|token| (token.content, token.id));
    let mut tokens: Vec<Option<String>> = Vec::new();
    for (token, id) in vocab.0.into_iter().chain(added) {
        let id = id as usize;
        if id >= MAX_IDS {
            return Err(malformed(format!(
                "token `{token}` has the id {id}, beyond any vocabulary"
            )));
        }
        if tokens.len() <= id {
            tokens.resize(id + 1, None);
        }
        tokens[id] = Some(token);
    }
    if tokens.is_empty() {
        return Err(malformed("the vocabulary is empty".to_owned()));
    }
    SpecialIds::read(folder, |token| {
        let id = tokens.iter().position(|t| t.as_deref() == Some(token))?;
        u32::try_from(id).ok()
    })?;
    Ok(Some(tokens))
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Model,
    // Small, and read only to see that the tokenizer can.
    #[serde(rename = "normalizer")]
    _normalizer: Option<NormalizerWrapper>,
    #[serde(rename = "pre_tokenizer")]
    _pre_tokenizer: Option<PreTokenizerWrapper>,
    #[serde(rename = "post_processor")]
    _post_processor: Option<PostProcessorWrapper>,
    #[serde(rename = "decoder")]
    _decoder: Option<DecoderWrapper>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: Option<Vocab>,
}

/// Tokens with their ids: a map of them, or a list of tokens with scores, whose ids are their places.
struct Vocab(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = Vocab;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tokens and ids, or a list of tokens and scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
        let mut tokens = Vec::new();
        while let Some(entry) = map.next_entry()? {
            tokens.push(entry);
        }
        Ok(Vocab(tokens))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocab, A::Error> {
        let mut tokens = Vec::new();
        while let Some((token, IgnoredAny)) = list.next_element()? {
            tokens.push((token, tokens.len() as u32));
        }
        Ok(Vocab(tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;
    use crate::tokenizer::tests::{folder, word_level};
    use serde_json::json;

    fn read(text: &str) -> Result<Option<Vec<Option<String>>>, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
        tokens(dir.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn maps_lists_and_added_tokens_by_hand() {
        let some = |tokens: &[&str]| tokens.iter().map(|t| Some((*t).to_owned())).collect();
        let map = r#"{"added_tokens": [{"id": 3, "content": "<end>", "special": true}],
            "model": {"type": "BPE", "vocab": {"b": 1, "a": 0}, "merges": []}}"#;
        let mut expected: Vec<Option<String>> = some(&["a", "b"]);
        expected.extend([None, Some("<end>".to_owned())]);
        assert_eq!(read(map), Ok(Some(expected)));
        let list =
            r#"{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["x", -1.5], ["y", 0]]}}"#;
        assert_eq!(read(list), Ok(Some(some(&["x", "y"]))));
        assert_eq!(read(r#"{"model": {"type": "Own"}}"#), Ok(None));
    }

    #[test]
    fn what_is_no_vocabulary_is_told() {
        let told = |text: &str| read(text).unwrap_err();
        assert!(told("{").contains("tokenizer.json"));
        assert!(told(r#"{"model": {"vocab": {}}}"#).contains("empty"));
        assert!(told(r#"{"model": {"vocab": {"a": 4294967295}}}"#).contains("beyond"));
        assert!(told(r#"{"model": {"vocab": 3}}"#).contains("a map of tokens"));
        for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
            let file = json!({"model": {"vocab": {"a": 0}}, part: {"type": "Unknown"}});
            assert!(told(&file.to_string()).contains("tokenizer.json"), "{part}");
        }
        let dir = tempfile::tempdir().unwrap();
        let missing = tokens(dir.path()).unwrap_err().to_string();
        assert!(missing.contains("no tokenizer.json"), "{missing}");
    }

    #[test]
    fn what_the_tokenizer_refuses_of_the_files_beside_it_is_refused() {
        let words = r#"{"model": {"type": "Own"}}"#;
        let listed = word_level(&["<unk>", "a"]).to_string();
        let damaged = [
            ("generation_config.json", "{\"eos_token_id\": 2"),
            ("generation_config.json", r#"{"eos_token_id": [0, -1]}"#),
            ("config.json", r#"{"pad_token_id": "a"}"#),
            ("tokenizer_config.json", "[]"),
        ];
        for (name, text) in damaged {
            for vocabulary in [words, &listed] {
                let dir = tempfile::tempdir().unwrap();
                std::fs::write(dir.path().join("tokenizer.json"), vocabulary).unwrap();
                std::fs::write(dir.path().join(name), text).unwrap();
                let told = tokens(dir.path()).unwrap_err().to_string();
                assert!(told.contains(name), "{told}");
            }
        }
        let dir = folder(&[("tokenizer_config.json", json!({"eos_token": "<none>"}))]);
        let told = tokens(dir.path()).unwrap_err().to_string();
        assert_eq!(told, Tokenizer::load(dir.path()).unwrap_err().to_string());
    }

    #[test]
    fn it_is_what_the_tokenizer_says() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../examples/models/addition-init"
        );
        let found = tokens(folder.as_ref()).unwrap().unwrap();
        let tokenizer = Tokenizer::load(folder.as_ref()).unwrap();
        assert_eq!(found.len(), tokenizer.vocab_size());
        for (id, token) in found.iter().enumerate() {
            assert_eq!(*token, tokenizer.id_to_token(id as u32), "{id}");
        }
    }
}
