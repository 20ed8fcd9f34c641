//! The words of a folder's tokenizer, one token at a time.

use std::path::Path;
use std::sync::Arc;

use verl_models::tokenizer::Tokenizer;
use verl_pipe::resource::TokenTexts;

/// The words of a tokenizer. A token's text is what it adds to a text before it: alone, many tokenizers drop the blank that
/// it begins with.
#[derive(Debug)]
pub(super) struct Words {
    tokenizer: Arc<Tokenizer>,
    /// A token whose text other tokens follow, and that text.
    before: Option<(u32, String)>,
}

impl Words {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let is_plain =
            |text: &String| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric());
        let mut ids = 0..tokenizer.vocab_size() as u32;
        let before = ids.find_map(|id| {
            let text = tokenizer.decode(&[id]);
            // Twice, since the second one shows whether its text stays as it is.
            let twice = tokenizer.decode(&[id, id]);
            (is_plain(&text) && twice.starts_with(&text) && twice.len() > text.len())
                .then_some((id, text))
        });
        Words { tokenizer, before }
    }

    fn added(&self, id: u32) -> Option<String> {
        let (before, text) = self.before.as_ref()?;
        let both = self.tokenizer.decode_with_special(&[*before, id]);
        both.strip_prefix(text.as_str()).map(str::to_owned)
    }
}

impl TokenTexts for Words {
    fn token(&self, id: u32) -> String {
        let alone = || self.tokenizer.decode_with_special(&[id]);
        let text = self.added(id).unwrap_or_else(alone);
        // A piece of a character decodes to nothing readable; then the vocabulary's own spelling is better.
        match text.is_empty() || text.contains('\u{fffd}') {
            true => self.tokenizer.id_to_token(id).unwrap_or_default(),
            false => text,
        }
    }
}

/// The words of the tokenizer in a model's folder.
pub(super) fn token_texts(dir: &Path) -> Option<Arc<dyn TokenTexts>> {
    let tokenizer = Tokenizer::load(dir).ok()?;
    Some(Arc::new(Words::new(Arc::new(tokenizer))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn words(model: serde_json::Value, decoder: serde_json::Value) -> Words {
        let dir = tempfile::tempdir().unwrap();
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": decoder, "model": model,
            "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
        });
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Words::new(Arc::new(Tokenizer::load(dir.path()).unwrap()))
    }

    #[track_caller]
    fn check(words: &Words, ids: &[u32], expected: &[&str]) {
        let texts: Vec<String> = ids.iter().map(|id| words.token(*id)).collect();
        assert_eq!(texts, expected);
    }

    /// P3-8: SentencePiece writes a blank as `▁`, and its decoder strips the first one.
    #[test]
    fn blanks_of_sentence_pieces_are_shown() {
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let decoder = json!({"type": "Sequence", "decoders": [
            replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        let vocab = json!({"</s>": 0, "▁": 1, "d": 2, "▁d": 3, "<0xE2>": 4, "▁▁": 5, "\n": 6});
        let model =
            json!({"type": "BPE", "vocab": vocab, "merges": [["▁", "d"]], "byte_fallback": true});
        let sentence_piece = words(model, decoder);
        let expected = ["</s>", " ", "d", " d", "<0xE2>", "  ", "\n", ""];
        check(&sentence_piece, &[0, 1, 2, 3, 4, 5, 6, 7], &expected);
        // What is written token by token reads as the text does.
        let text: String = [2, 3, 3, 2].map(|id| sentence_piece.token(id)).concat();
        assert_eq!(text, "d d dd");
    }

    #[test]
    fn bytes_and_words_are_shown_as_they_read_in_a_text() {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let vocab = json!({"</s>": 0, "d": 1, "Ġd": 2, "Ã": 3});
        let model = json!({"type": "BPE", "vocab": vocab, "merges": []});
        check(
            &words(model, bytes),
            &[0, 1, 2, 3],
            &["</s>", "d", " d", "Ã"],
        );
        let vocab = json!({"</s>": 0, "one": 1, "two": 2});
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "</s>"});
        let text: String = [1, 2]
            .map(|id| words(model.clone(), json!(null)).token(id))
            .concat();
        assert_eq!(text, " one two");
    }
}
