//! The texts of single tokens of a folder's tokenizer.

use std::path::Path;
use std::sync::Arc;

use verl_models::tokenizer::Tokenizer;
use verl_words::resource::TokenTexts;

/// Decodes single tokens. A token's text is what it adds to a text before it: on its own, many tokenizers drop the
/// blank that it begins with.
#[derive(Debug)]
pub(super) struct TokenDecoder {
    tokenizer: Arc<Tokenizer>,
    /// A token to put before the decoded one, and its text.
    before: Option<(u32, String)>,
}

impl TokenDecoder {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let is_plain =
            |text: &String| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric());
        let mut ids = 0..tokenizer.vocab_size() as u32;
        let before = ids.find_map(|id| {
            let text = tokenizer.decode(&[id]);
            // Decoded twice: the second one shows whether its text stays the same before another token.
            let twice = tokenizer.decode(&[id, id]);
            (is_plain(&text) && twice.starts_with(&text) && twice.len() > text.len())
                .then_some((id, text))
        });
        TokenDecoder { tokenizer, before }
    }

    fn added(&self, id: u32) -> Option<String> {
        let (before, text) = self.before.as_ref()?;
        let both = self.tokenizer.decode_with_special(&[*before, id]);
        both.strip_prefix(text.as_str()).map(str::to_owned)
    }
}

impl TokenTexts for TokenDecoder {
    fn token(&self, id: u32) -> String {
        let single = || self.tokenizer.decode_with_special(&[id]);
        let text = self.added(id).unwrap_or_else(single);
        // Part of a character does not decode to readable text; the vocabulary's own spelling is better.
        match text.is_empty() || text.contains('\u{fffd}') {
            true => self.tokenizer.id_to_token(id).unwrap_or_default(),
            false => text,
        }
    }
}

/// The token texts of the tokenizer in a model's folder.
pub(super) fn token_texts(dir: &Path) -> Option<Arc<dyn TokenTexts>> {
    let tokenizer = Tokenizer::load(dir).ok()?;
    Some(Arc::new(TokenDecoder::new(Arc::new(tokenizer))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn token_decoder(model: serde_json::Value, decoder: serde_json::Value) -> TokenDecoder {
        let dir = tempfile::tempdir().unwrap();
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": decoder, "model": model,
            "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
        });
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        TokenDecoder::new(Arc::new(Tokenizer::load(dir.path()).unwrap()))
    }

    #[track_caller]
    fn check(decoder: &TokenDecoder, ids: &[u32], expected: &[&str]) {
        let texts: Vec<String> = ids.iter().map(|id| decoder.token(*id)).collect();
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
        let sentence_piece = token_decoder(model, decoder);
        let expected = ["</s>", " ", "d", " d", "<0xE2>", "  ", "\n", ""];
        check(&sentence_piece, &[0, 1, 2, 3, 4, 5, 6, 7], &expected);
        // The texts of single tokens, joined, are the text of all.
        let text: String = [2, 3, 3, 2].map(|id| sentence_piece.token(id)).concat();
        assert_eq!(text, "d d dd");
    }

    #[test]
    fn bytes_and_words_are_shown_as_in_a_text() {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let vocab = json!({"</s>": 0, "d": 1, "Ġd": 2, "Ã": 3});
        let model = json!({"type": "BPE", "vocab": vocab, "merges": []});
        check(
            &token_decoder(model, bytes),
            &[0, 1, 2, 3],
            &["</s>", "d", " d", "Ã"],
        );
        let vocab = json!({"</s>": 0, "one": 1, "two": 2});
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "</s>"});
        let text: String = [1, 2]
            .map(|id| token_decoder(model.clone(), json!(null)).token(id))
            .concat();
        assert_eq!(text, " one two");
    }
}
