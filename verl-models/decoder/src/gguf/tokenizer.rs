//! Converts `tokenizer.ggml.*` to `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

use candle_core::quantized::gguf_file::Value as GgufValue;
use serde_json::{Map, Value, json};

use super::{GgufError, Metadata, integer, object};

/// Ids of special tokens.
#[derive(Debug, Default)]
pub(super) struct SpecialIds {
    pub(super) bos: Option<u32>,
    /// Every id that ends a sequence or a turn.
    pub(super) eos: Vec<u32>,
    pub(super) pad: Option<u32>,
}

/// Contents of the tokenizer's files.
pub(super) struct Files {
    pub(super) special: SpecialIds,
    pub(super) tokenizer: Value,
    pub(super) tokenizer_config: Value,
    pub(super) generation: Value,
}

/// `tokenizer.ggml.token_type`, numbered as in llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<Kind>,
}

pub(super) fn files(metadata: &Metadata<'_>) -> Result<Files, GgufError> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let text = |value: &GgufValue| value.to_string().ok().cloned();
    let tokens = metadata
        .list(&key("tokens"), text)?
        .ok_or_else(|| Metadata::missing(&key("tokens")))?;
    let kinds = metadata
        .list(&key("token_type"), |value| {
            Some(match integer(value)? {
                1 => Kind::Normal,
                2 => Kind::Unknown,
                3 => Kind::Control,
                4 => Kind::UserDefined,
                5 => Kind::Unused,
                6 => Kind::Byte,
                _ => return None,
            })
        })?
        .unwrap_or_else(|| vec![Kind::Normal; tokens.len()]);
    if kinds.len() != tokens.len() {
        return Err(GgufError::Metadata {
            key: key("token_type"),
            reason: format!("has {} entries for {} tokens", kinds.len(), tokens.len()),
        });
    }
    let vocabulary = Vocabulary { tokens, kinds };

    let special_id = |name: &str| -> Result<Option<u32>, GgufError> {
        let key = key(&format!("{name}_token_id"));
        let id = metadata.token_id(&key)?;
        match id {
            Some(id) if id as usize >= vocabulary.tokens.len() => Err(GgufError::Metadata {
                key,
                reason: format!("is {id}, past the end of the vocabulary"),
            }),
            id => Ok(id),
        }
    };
    // Invalid values of these two are ignored, as nothing requires them.
    let optional_id = |name: &str| -> Result<Option<u32>, GgufError> {
        let id = metadata.token_id(&key(&format!("{name}_token_id")))?;
        Ok(id.filter(|id| (*id as usize) < vocabulary.tokens.len()))
    };
    let mut special = SpecialIds {
        bos: special_id("bos")?,
        eos: Vec::new(),
        pad: optional_id("padding")?,
    };
    for name in ["eos", "eot", "eom"] {
        if let Some(id) = special_id(name)?
            && !special.eos.contains(&id)
        {
            special.eos.push(id);
        }
    }
    let unknown = optional_id("unknown")?;

    let model_key = key("model");
    let model = metadata
        .text(&model_key)?
        .ok_or_else(|| Metadata::missing(&model_key))?;
    let add_bos = metadata.flag(&key("add_bos_token"))?;
    let pieces = match model {
        "gpt2" => byte_level(metadata, &vocabulary)?,
        "llama" => sentence_piece(metadata, &vocabulary, unknown)?,
        other => {
            return Err(GgufError::Unsupported {
                what: "tokenizer model",
                found: other.to_owned(),
                known: "gpt2 (byte-level BPE), llama (SentencePiece BPE)".to_owned(),
            });
        }
    };
    let token = |id: Option<u32>| id.map(|id| Value::from(vocabulary.tokens[id as usize].as_str()));
    let bos = special.bos.filter(|_| add_bos.unwrap_or(pieces.adds_bos));
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(&vocabulary),
        "normalizer": pieces.normalizer,
        "pre_tokenizer": pieces.pre_tokenizer,
        "post_processor": post_processor(bos.map(|id| (id, vocabulary.tokens[id as usize].as_str()))),
        "decoder": pieces.decoder,
        "model": pieces.model,
    });
    let tokenizer_config = object([
        ("tokenizer_class", Some("PreTrainedTokenizerFast".into())),
        ("bos_token", token(special.bos)),
        ("eos_token", token(special.eos.first().copied())),
        ("unk_token", token(unknown)),
        ("pad_token", token(special.pad)),
        ("add_bos_token", Some(bos.is_some().into())),
        ("clean_up_tokenization_spaces", Some(false.into())),
        (
            "chat_template",
            metadata.text("tokenizer.chat_template")?.map(Value::from),
        ),
    ]);
    let generation = object([
        ("bos_token_id", special.bos.map(Value::from)),
        (
            "eos_token_id",
            (!special.eos.is_empty()).then(|| json!(special.eos)),
        ),
        ("pad_token_id", special.pad.map(Value::from)),
    ]);
    Ok(Files {
        special,
        tokenizer,
        tokenizer_config: tokenizer_config.into(),
        generation: generation.into(),
    })
}

/// The parts of `tokenizer.json` that differ between kinds of tokenizer.
struct Pieces {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
    adds_bos: bool,
}

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const WORDS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+";
const REST: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Byte-level BPE; `tokenizer.ggml.pre` names how text is split before merging.
fn byte_level(metadata: &Metadata<'_>, vocabulary: &Vocabulary) -> Result<Pieces, GgufError> {
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let split = |numbers: &str| {
        let pattern = [CONTRACTIONS, WORDS, numbers, REST].join("|");
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            bytes(false)
        ]})
    };
    let pre = metadata.text("tokenizer.ggml.pre")?.unwrap_or("gpt-2");
    let (pre_tokenizer, normalizer, whole_words, adds_bos) = match pre {
        "smollm" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            let pre = json!({"type": "Sequence", "pretokenizers": [digits, bytes(true)]});
            (pre, Value::Null, false, false)
        }
        "llama-bpe" | "llama3" | "llama-v3" => (split(r"\p{N}{1,3}"), Value::Null, true, true),
        "qwen2" => (split(r"\p{N}"), json!({"type": "NFC"}), false, false),
        "gpt-2" => (bytes(true), Value::Null, false, false),
        other => {
            return Err(GgufError::Unsupported {
                what: "pre-tokenizer",
                found: other.to_owned(),
                known: "smollm, llama-bpe, qwen2, gpt-2".to_owned(),
            });
        }
    };
    let key = "tokenizer.ggml.merges";
    let merges = metadata
        .list(key, |value| {
            let merge = value.to_string().ok()?;
            merge
                .split_once(' ')
                .map(|(left, right)| json!([left, right]))
        })?
        .ok_or_else(|| Metadata::missing(key))?;
    Ok(Pieces {
        normalizer,
        pre_tokenizer,
        decoder: bytes(true),
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_words,
            "vocab": vocabulary.to_json(), "merges": merges
        }),
        adds_bos,
    })
}

/// SentencePiece's BPE, whose merges follow from the scores of the pieces: the merge whose result has the highest score
/// comes first.
fn sentence_piece(
    metadata: &Metadata<'_>,
    vocabulary: &Vocabulary,
    unknown: Option<u32>,
) -> Result<Pieces, GgufError> {
    let key = "tokenizer.ggml.scores";
    let scores = metadata
        .list(key, |value| value.to_f32().ok().filter(|x| x.is_finite()))?
        .ok_or_else(|| Metadata::missing(key))?;
    if scores.len() != vocabulary.tokens.len() {
        return Err(GgufError::Metadata {
            key: key.to_owned(),
            reason: format!(
                "has {} entries for {} tokens",
                scores.len(),
                vocabulary.tokens.len()
            ),
        });
    }
    let prefix = metadata
        .flag("tokenizer.ggml.add_space_prefix")?
        .unwrap_or(true);
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", "▁")];
    let mut decoders = vec![
        replace("▁", " "),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(Pieces {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: json!({
            "type": "BPE", "dropout": null,
            "unk_token": unknown.map(|id| vocabulary.tokens[id as usize].as_str()),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocabulary.to_json(), "merges": merges(vocabulary, &scores)
        }),
        adds_bos: true,
    })
}

/// # Source
/// `generate_merges` of `transformers`' `convert_slow_tokenizer.py`.
fn merges(vocabulary: &Vocabulary, scores: &[f32]) -> Vec<[String; 2]> {
    let ids: std::collections::HashMap<&str, usize> = vocabulary
        .tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.as_str(), id))
        .collect();
    let mut merges = Vec::new();
    for (token, &score) in vocabulary.tokens.iter().zip(scores) {
        let mut ways: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (left, right) = token.split_at(at);
                Some((*ids.get(left)?, *ids.get(right)?))
            })
            .collect();
        ways.sort_unstable();
        merges.extend(ways.into_iter().map(|way| (score, way)));
    }
    let length = |id: usize| vocabulary.tokens[id].chars().count();
    merges.sort_by(|(a, (al, ar)), (b, (bl, br))| {
        b.total_cmp(a)
            .then_with(|| length(*bl).cmp(&length(*al)))
            .then_with(|| length(*br).cmp(&length(*ar)))
    });
    merges
        .into_iter()
        .map(|(_, (l, r))| [vocabulary.tokens[l].clone(), vocabulary.tokens[r].clone()])
        .collect()
}

impl Vocabulary {
    /// Token → id, without slots that only pad the embedding.
    fn to_json(&self) -> Map<String, Value> {
        self.tokens
            .iter()
            .zip(&self.kinds)
            .enumerate()
            .filter(|(_, (_, kind))| **kind != Kind::Unused)
            .map(|(id, (token, _))| (token.clone(), id.into()))
            .collect()
    }
}

/// Tokens that are found in text before it is split: control tokens (left out of decoded text) and user-defined tokens.
fn added_tokens(vocabulary: &Vocabulary) -> Vec<Value> {
    vocabulary
        .tokens
        .iter()
        .zip(&vocabulary.kinds)
        .enumerate()
        .filter(|(_, (_, kind))| {
            matches!(kind, Kind::Control | Kind::UserDefined | Kind::Unknown)
        })
        .map(|(id, (token, kind))| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": *kind != Kind::UserDefined})
        })
        .collect()
}

/// Adds the begin token, if there is one, before a text.
fn post_processor(bos: Option<(u32, &str)>) -> Value {
    let Some((id, token)) = bos else {
        return Value::Null;
    };
    let begin = |part: u32| json!({"SpecialToken": {"id": token, "type_id": part}});
    let text = |name: &str, part: u32| json!({"Sequence": {"id": name, "type_id": part}});
    let mut tokens = Map::new();
    tokens.insert(
        token.to_owned(),
        json!({"id": token, "ids": [id], "tokens": [token]}),
    );
    json!({
        "type": "TemplateProcessing",
        "single": [begin(0), text("A", 0)],
        "pair": [begin(0), text("A", 0), begin(1), text("B", 1)],
        "special_tokens": tokens
    })
}
