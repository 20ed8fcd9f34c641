//! Tokenizers of Hugging Face folders: text to token ids and back, and which ids begin, end and pad a sequence.
//!
//! Four files of the folder say what the ids mean; all but the first may be absent:
//!
//! | file | what is read |
//! |---|---|
//! | `tokenizer.json` | the tokenizer itself; its truncation and padding settings are ignored |
//! | `tokenizer_config.json` | `bos_token`, `eos_token`, `pad_token`, `unk_token` |
//! | `generation_config.json` | every id of `eos_token_id`; `bos_token_id`, `pad_token_id` |
//! | `config.json` | the same ids, where the file above does not give them |

mod guarded;
mod special;

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

use guarded::guarded;
use special::SpecialIds;
pub(crate) use special::special_token;

/// Ids of one tokenizer beyond this are a damaged file, and so is an embedding with more rows.
pub(crate) const MAX_IDS: usize = 1 << 24;

/// What can go wrong with a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A folder without `tokenizer.json`.
    #[error(
        "`{folder}` has no tokenizer.json; slow tokenizers (tokenizer.model, vocab.json) have to be converted first"
    )]
    Missing {
        /// The folder.
        folder: String,
    },
    /// A file that cannot be read or parsed.
    #[error("cannot read `{path}`: {reason}")]
    Malformed {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// A special token that the vocabulary does not hold.
    #[error("`{path}`: {role} is `{token}`, which the vocabulary does not hold")]
    UnknownToken {
        /// The file that names it.
        path: String,
        /// Its role: `eos_token`, `pad_token`.
        role: &'static str,
        /// The token.
        token: String,
    },
    /// Text that the tokenizer refuses.
    #[error("the tokenizer refuses a text: {reason}")]
    Encode {
        /// Why.
        reason: String,
    },
    /// A folder that cannot be written.
    #[error("cannot write `{path}`: {reason}")]
    Write {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
}

/// Files that make up a tokenizer; copied by [`Tokenizer::save`] where they exist.
const FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// The tokenizer of a model folder.
///
/// ```no_run
/// use verl_models::tokenizer::Tokenizer;
///
/// let tokenizer = Tokenizer::load("models/smollm2".as_ref())?;
/// let ids = tokenizer.encode("12+34", false)?;
/// assert_eq!(tokenizer.decode(&ids), "12+34");
/// # Ok::<(), verl_models::tokenizer::TokenizerError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    declared_pad: Option<u32>,
    pad: u32,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("pad", &self.pad)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a Hugging Face folder.
    ///
    /// - **Ends of sequence**: every id of `generation_config.json`, else of `config.json`, else the `eos_token` of
    ///   `tokenizer_config.json`. The first one is [`eos_id`](Self::eos_id).
    /// - **Pad**: `pad_token` of `tokenizer_config.json`, else `pad_token_id` of `generation_config.json` or
    ///   `config.json`, else `unk_token`, else id 0. Nothing in this workspace reads a pad id back (lengths are kept,
    ///   nothing is padded between stages), so the last two serve as well as any; but a declared pad that also ends
    ///   sequences is warned of, because other programs that mask by pad id hide the end with it.
    ///
    /// # Errors
    /// When `tokenizer.json` is missing, a file is malformed, or a special token is not in the vocabulary.
    pub fn load(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let tokenizer = Self::read(folder)?;
        let eos = tokenizer.eos_ids();
        if let Some(id) = eos.iter().find(|&&id| tokenizer.id_to_token(id).is_none()) {
            tracing::warn!(
                folder = %folder.display(), id,
                "an end-of-sequence id is not in the tokenizer's vocabulary"
            );
        }
        if let Some(pad) = tokenizer.declared_pad
            && eos.contains(&pad)
        {
            tracing::warn!(
                folder = %folder.display(), pad,
                "the pad token also ends sequences; lengths are kept here, but a program that masks by pad id would hide the end"
            );
        }
        Ok(tokenizer)
    }

    /// [`Self::load`] without its warnings: to see whether a run could load a tokenizer.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn read(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let mut files = Vec::new();
        for name in FILES {
            if let Some(bytes) = read_optional(&folder.join(name))? {
                files.push((name, bytes));
            }
        }
        let bytes = match files.first() {
            Some(("tokenizer.json", bytes)) => bytes,
            _ => {
                return Err(TokenizerError::Missing {
                    folder: folder.display().to_string(),
                });
            }
        };
        let malformed = |reason: String| TokenizerError::Malformed {
            path: folder.join("tokenizer.json").display().to_string(),
            reason,
        };
        let mut inner =
            guarded(|| tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string()))
                .map_err(malformed)?;
        inner
            .with_truncation(None)
            .map_err(|e| malformed(e.to_string()))?;
        inner.with_padding(None);
        let vocabulary = inner.get_vocab(true);
        let (token, last) = vocabulary
            .iter()
            .max_by_key(|(_, id)| **id)
            .ok_or_else(|| malformed("the vocabulary is empty".to_owned()))?;
        let vocab_size = *last as usize + 1;
        if vocab_size > MAX_IDS {
            return Err(malformed(format!(
                "token `{token}` has the id {last}, beyond any vocabulary"
            )));
        }

        let special = SpecialIds::read(folder, |token| inner.token_to_id(token))?;
        Ok(Tokenizer {
            inner,
            vocab_size,
            bos: special.bos,
            eos: special.eos,
            declared_pad: special.declared_pad,
            pad: special.declared_pad.or(special.unknown).unwrap_or(0),
            files,
        })
    }

    /// Token ids of `text`. With `special` the tokenizer adds what it adds to a sequence (often a begin token); a
    /// rendered chat template holds those already.
    ///
    /// Special tokens written out in `text` become their ids in both cases.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the text cannot be tokenised (no unknown token, for example).
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.inner
            .encode_fast(text, special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| TokenizerError::Encode {
                reason: e.to_string(),
            })
    }

    /// Text of `ids`, special tokens left out. Ids outside the vocabulary (rows that only fill up an embedding) are
    /// passed over, and bytes that are no UTF-8 print as U+FFFD.
    ///
    /// # Differences
    /// `clean_up_tokenization_spaces` is not applied: it changes text that byte-level tokenizers give back exactly.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_as(ids, true)
    }

    /// Text of `ids`, special tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.decode_as(ids, false)
    }

    fn decode_as(&self, ids: &[u32], skip_special: bool) -> String {
        match self.inner.decode(ids, skip_special) {
            Ok(text) => text,
            Err(error) => {
                tracing::warn!(%error, "the tokenizer's decoder failed; its tokens are joined as they are");
                ids.iter().filter_map(|&id| self.id_to_token(id)).collect()
            }
        }
    }

    /// Id of a token as the vocabulary writes it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Token of an id, as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The token of each id, from 0 on; `None` where an id is no token.
    pub fn tokens(&self) -> impl Iterator<Item = Option<String>> {
        (0..self.vocab_size as u32).map(|id| self.id_to_token(id))
    }

    /// Largest id plus one, added tokens included: the least number of embedding rows that a model needs.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Id that begins a sequence.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// Every id that ends a sequence; empty where the folder names none.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The first of [`eos_ids`](Self::eos_ids).
    pub fn eos_id(&self) -> Option<u32> {
        self.eos.first().copied()
    }

    /// Id for slots that nothing reads.
    pub fn pad_id(&self) -> u32 {
        self.pad
    }

    /// Writes the tokenizer's files into `folder`, byte for byte as they were loaded.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), TokenizerError> {
        let failed = |path: &Path, e: std::io::Error| TokenizerError::Write {
            path: path.display().to_string(),
            reason: e.to_string(),
        };
        std::fs::create_dir_all(folder).map_err(|e| failed(folder, e))?;
        for (name, bytes) in &self.files {
            let path = folder.join(name);
            std::fs::write(&path, bytes).map_err(|e| failed(&path, e))?;
        }
        Ok(())
    }
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(TokenizerError::Malformed {
            path: path.display().to_string(),
            reason: e.to_string(),
        }),
    }
}

/// The object in a JSON file of `folder`; `None` where there is no such file.
pub(crate) fn read_json(
    folder: &Path,
    name: &str,
) -> Result<Option<Map<String, Value>>, TokenizerError> {
    let path = folder.join(name);
    let Some(bytes) = read_optional(&path)? else {
        return Ok(None);
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| TokenizerError::Malformed {
            path: path.display().to_string(),
            reason: e.to_string(),
        })
}

#[cfg(test)]
pub(crate) mod tests {
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
    fn encodes_and_decodes_without_the_files_own_truncation() {
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
    fn every_end_of_sequence_id_counts_in_order_of_precedence() {
        let config = ("config.json", json!({"eos_token_id": 2, "pad_token_id": 0}));
        let tokens = (
            "tokenizer_config.json",
            json!({"eos_token": {"content": "<end>"}, "bos_token": "<s>"}),
        );
        let generation = ("generation_config.json", json!({"eos_token_id": [6, 2]}));
        let silent = ("generation_config.json", json!({"temperature": 1.0}));
        let cases = [
            (vec![], vec![], None),
            (vec![tokens.clone()], vec![6], Some(1)),
            (vec![tokens.clone(), config.clone()], vec![2], Some(1)),
            (
                vec![tokens.clone(), config.clone(), silent],
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
    fn bad_folders_are_told() {
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(
            Tokenizer::load(empty.path()),
            Err(TokenizerError::Missing { .. })
        ));
        let told = |files: &[(&str, &str)]| {
            let dir = folder(&[]);
            for (name, text) in files {
                std::fs::write(dir.path().join(name), text).unwrap();
            }
            Tokenizer::load(dir.path()).unwrap_err().to_string()
        };
        assert!(told(&[("tokenizer.json", "{\"version\": ")]).contains("tokenizer.json`: "));
        assert!(told(&[("tokenizer_config.json", "[]")]).contains("tokenizer_config.json`: "));
        assert!(told(&[("generation_config.json", "{")]).contains("generation_config.json`: "));
        let text = told(&[("config.json", r#"{"pad_token_id": "a"}"#)]);
        assert!(text.contains("config.json`: "), "{text}");
        let text = told(&[("tokenizer_config.json", r#"{"eos_token": "<stop>"}"#)]);
        assert!(
            text.ends_with("eos_token is `<stop>`, which the vocabulary does not hold"),
            "{text}"
        );
        let text = told(&[("generation_config.json", r#"{"eos_token_id": [2, -1]}"#)]);
        assert!(
            text.ends_with("`eos_token_id` holds -1, which is no token id"),
            "{text}"
        );
    }

    #[test]
    fn damaged_tokenizers_are_told() {
        let dir = folder(&[]);
        let with = |at: &str, value: Value| {
            let mut file = word_level(&WORDS);
            let (parent, key) = at.rsplit_once('/').unwrap();
            file.pointer_mut(parent).unwrap()[key] = value;
            std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
            Tokenizer::load(dir.path()).unwrap_err().to_string()
        };
        let bpe =
            |merges: Value| json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": merges});
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
            let told = with(at, value);
            assert!(told.contains("tokenizer.json`: "), "{at}: {told}");
        }
        let none = json!({"type": "WordLevel", "vocab": {}, "unk_token": "a"});
        let mut file = word_level(&[]);
        file["model"] = none;
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let told = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(told.contains("the vocabulary is empty"), "{told}");
        let told = with("/model/vocab", json!({"<unk>": 4_294_967_295_u32}));
        assert!(told.contains("beyond any vocabulary"), "{told}");
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

    /// A SentencePiece-style tokenizer, where it lies beside the workspace; ids as `transformers` gives them.
    #[test]
    fn stories_are_tokenised_as_elsewhere() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/models/stories260K");
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
}
