//! When a response ends: end-of-sequence ids, id sequences, texts, and the token limit; and the part of its text before
//! a stop text.
//!
//! Stop texts are searched in the text including special tokens, so a stop text may be a special token, contain one or
//! be spelled by ordinary tokens, and may begin and end inside tokens. A response ends with the token that completes a
//! stop text. If several stop texts are complete then, the one that begins first counts.

use std::fmt;
use std::sync::Arc;

use super::engine::{FinishReason, RolloutError, SamplingSettings};

type Decode = dyn Fn(&[u32]) -> String + Send + Sync;

/// Decodes token ids to text including special tokens, as stop texts require; shared by the rows of a rollout.
#[derive(Clone)]
pub struct TextDecoder(Arc<Decode>);

impl TextDecoder {
    /// Wraps a function that decodes a response.
    pub fn new(decode: impl Fn(&[u32]) -> String + Send + Sync + 'static) -> Self {
        TextDecoder(Arc::new(decode))
    }

    /// Text of `tokens`.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        (self.0)(tokens)
    }
}

impl fmt::Debug for TextDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TextDecoder")
    }
}

/// The same function, not merely an equal one.
impl PartialEq for TextDecoder {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The stop rules of a rollout, checked once.
#[derive(Debug)]
pub struct StopRules<'a> {
    settings: &'a SamplingSettings,
    decoder: Option<&'a TextDecoder>,
    longest_text: usize,
}

impl<'a> StopRules<'a> {
    /// Reads the rules of `settings`.
    ///
    /// # Errors
    /// [`RolloutError::Setting`] for an empty stop sequence or text, and for stop texts without a decoder.
    pub fn new(settings: &'a SamplingSettings) -> Result<Self, RolloutError> {
        if settings.stop_ids.iter().any(Vec::is_empty) {
            return Err(setting("stop_ids", "contains an empty sequence"));
        }
        if settings.stop_texts.iter().any(String::is_empty) {
            return Err(setting("stop_texts", "contains an empty text"));
        }
        let decoder = settings.text_decoder.as_ref();
        if !settings.stop_texts.is_empty() && decoder.is_none() {
            return Err(setting("stop_texts", "requires `text_decoder`"));
        }
        let longest_text = settings.stop_texts.iter().map(String::len).max();
        Ok(StopRules {
            settings,
            decoder,
            longest_text: longest_text.unwrap_or(0),
        })
    }

    /// Why the response `tokens` ends with its last token, if it does. The end-of-sequence id takes precedence over
    /// stop rules, and these over the limit, so that a response that is complete at its last allowed token does not
    /// count as truncated.
    #[must_use]
    pub fn finish(&self, tokens: &[u32], max_new_tokens: usize) -> Option<FinishReason> {
        let last = tokens.last()?;
        if self.settings.eos_ids.contains(last) {
            Some(FinishReason::Eos)
        } else if self.ends_with_stop_ids(tokens) || self.contains_stop_text(tokens) {
            Some(FinishReason::Stop)
        } else if tokens.len() >= max_new_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    fn ends_with_stop_ids(&self, tokens: &[u32]) -> bool {
        self.settings
            .stop_ids
            .iter()
            .any(|ids| tokens.ends_with(ids))
    }

    /// Searches only the tail of the text, because earlier text was searched when its tokens arrived. A match is then
    /// confirmed on the complete text, because a tail may decode differently at its cut (a stripped space, half a
    /// character).
    fn contains_stop_text(&self, tokens: &[u32]) -> bool {
        let Some(decoder) = self.decoder.filter(|_| self.longest_text > 0) else {
            return false;
        };
        self.has_stop_text(&self.tail(decoder, tokens))
            && self.has_stop_text(&decoder.decode(tokens))
    }

    fn has_stop_text(&self, text: &str) -> bool {
        self.settings
            .stop_texts
            .iter()
            .any(|stop| text.contains(stop.as_str()))
    }

    /// Text of the last token, and of as many tokens before it as cover the longest stop text and a margin for a cut
    /// and an unfinished character at either end; of all tokens if the text is shorter.
    fn tail(&self, decoder: &TextDecoder, tokens: &[u32]) -> String {
        const MARGIN: usize = 32;
        let last = tokens.len().saturating_sub(1);
        // A stop text may begin right before the last token, regardless of that token's length.
        let needed = self.longest_text + MARGIN + decoder.decode(&tokens[last..]).len();
        let mut count = self.longest_text.min(16) + 4;
        loop {
            let start = tokens.len().saturating_sub(count);
            let text = decoder.decode(&tokens[start..]);
            if start == 0 || text.len() >= needed {
                return text;
            }
            count *= 2;
        }
    }
}

/// The text of a response up to its stop text, if it has one: the part of the last token after it is left out, and with
/// `include` the stop text is kept.
///
/// `spelled` returns the text of tokens including special ones, `visible` without them: the stop text is searched in
/// the former, and the latter is returned.
#[must_use]
pub fn text_to_stop(
    tokens: &[u32],
    stops: &[String],
    include: bool,
    spelled: impl Fn(&[u32]) -> String,
    visible: impl Fn(&[u32]) -> String,
) -> String {
    let full = if stops.is_empty() {
        String::new()
    } else {
        spelled(tokens)
    };
    let found = stops
        .iter()
        .filter_map(|stop| Some((full.find(stop.as_str())?, stop)));
    let Some((at, stop)) = found.min_by_key(|(at, _)| *at) else {
        return visible(tokens);
    };
    // Complete tokens that end at or before the stop text; the first part of the next one may precede the stop text
    // too.
    let whole = (0..tokens.len()).rev().find_map(|count| {
        let text = spelled(&tokens[..count]);
        (text.len() <= at && full.starts_with(&text)).then_some((count, text.len()))
    });
    let (count, length) = whole.unwrap_or_default();
    let mut text = visible(&tokens[..count]);
    let next = &tokens[count..tokens.len().min(count + 1)];
    let is_special = visible(next).is_empty() && !spelled(next).is_empty();
    if !is_special {
        text.push_str(&full[length..at]);
    }
    if include {
        text.push_str(stop);
    }
    text
}

fn setting(setting: &'static str, reason: &str) -> RolloutError {
    RolloutError::Setting {
        setting,
        reason: reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids are bytes.
    fn bytes() -> TextDecoder {
        TextDecoder::new(|ids| {
            let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    /// The first prefix of `response` that ends, and why.
    fn first_stop(
        settings: &SamplingSettings,
        response: &str,
        limit: usize,
    ) -> Option<(usize, FinishReason)> {
        let rules = StopRules::new(settings).unwrap();
        let tokens = ids(response);
        (1..=tokens.len()).find_map(|n| rules.finish(&tokens[..n], limit).map(|why| (n, why)))
    }

    #[test]
    fn any_of_several_eos_ids_ends() {
        let settings = SamplingSettings {
            eos_ids: vec![u32::from(b'$'), u32::from(b'!')],
            ..SamplingSettings::default()
        };
        assert_eq!(
            first_stop(&settings, "ab!c$", 9),
            Some((3, FinishReason::Eos))
        );
        assert_eq!(first_stop(&settings, "abc", 9), None);
        assert_eq!(
            first_stop(&settings, "abc", 3),
            Some((3, FinishReason::Length))
        );
        // Complete at the last allowed token: not truncated.
        assert_eq!(
            first_stop(&settings, "ab!", 3),
            Some((3, FinishReason::Eos))
        );
    }

    #[test]
    fn id_sequences_end() {
        let settings = SamplingSettings {
            stop_ids: vec![ids("xyz"), ids("##")],
            ..SamplingSettings::default()
        };
        assert_eq!(
            first_stop(&settings, "a#b##c", 9),
            Some((5, FinishReason::Stop))
        );
        assert_eq!(first_stop(&settings, "xy", 9), None);
    }

    #[test]
    fn stop_texts_may_cross_token_boundaries() {
        let settings = SamplingSettings {
            stop_texts: vec!["Question:".to_owned(), "\n\n".to_owned(), "é".to_owned()],
            text_decoder: Some(bytes()),
            ..SamplingSettings::default()
        };
        let long = format!("{}Question: and more", "a long answer. ".repeat(20));
        assert_eq!(
            first_stop(&settings, &long, 999),
            Some((309, FinishReason::Stop))
        );
        assert_eq!(
            first_stop(&settings, "a\n\nb", 9),
            Some((3, FinishReason::Stop))
        );
        // A character of two bytes is complete with its second one.
        assert_eq!(
            first_stop(&settings, "aéb", 9),
            Some((3, FinishReason::Stop))
        );
        assert_eq!(first_stop(&settings, "Question", 9), None);
    }

    #[test]
    fn tokens_without_text_do_not_hide_a_stop() {
        let settings = SamplingSettings {
            stop_texts: vec!["ab".to_owned()],
            text_decoder: Some(TextDecoder::new(|ids| {
                ids.iter()
                    .filter(|&&id| id > 0)
                    .map(|&id| char::from(id as u8))
                    .collect()
            })),
            ..SamplingSettings::default()
        };
        let rules = StopRules::new(&settings).unwrap();
        let mut tokens = vec![u32::from(b'a')];
        tokens.extend(vec![0; 100]);
        assert_eq!(rules.finish(&tokens, 999), None);
        tokens.push(u32::from(b'b'));
        assert_eq!(rules.finish(&tokens, 999), Some(FinishReason::Stop));
    }

    /// The stop text begins before the last token, which by itself is longer than the searched tail.
    #[test]
    fn a_long_last_token_does_not_hide_a_stop() {
        let words = [vec!["a"; 60].concat(), "b".to_owned()];
        let settings = SamplingSettings {
            stop_texts: vec![format!("{}{}", "b".repeat(39), "a")],
            text_decoder: Some(TextDecoder::new(move |ids| {
                ids.iter().map(|&id| words[id as usize].as_str()).collect()
            })),
            ..SamplingSettings::default()
        };
        let rules = StopRules::new(&settings).unwrap();
        let mut tokens = vec![1; 39];
        assert_eq!(rules.finish(&tokens, 999), None);
        tokens.push(0);
        assert_eq!(rules.finish(&tokens, 999), Some(FinishReason::Stop));
    }

    /// Tokens of a vocabulary whose last two are special: `<|end|>` and `<|x|>`.
    const WORDS: [&str; 8] = [
        "x", "<EN", "D> tail", "18", "\n\n", "<|", "<|end|>", "<|x|>",
    ];

    #[track_caller]
    fn check_text(tokens: &[u32], stops: &[&str], cut: &str, kept: &str) {
        let spelled = |ids: &[u32]| ids.iter().map(|&id| WORDS[id as usize]).collect::<String>();
        let visible = |ids: &[u32]| {
            let ids = ids.iter().filter(|&&id| id < 6);
            ids.map(|&id| WORDS[id as usize]).collect::<String>()
        };
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let text = |include| text_to_stop(tokens, &stops, include, spelled, visible);
        assert_eq!((text(false).as_str(), text(true).as_str()), (cut, kept));
    }

    #[test]
    fn a_response_ends_before_its_stop_text() {
        // A6: the stop text ends inside the last token.
        check_text(&[0, 1, 2], &["<END>"], "x", "x<END>");
        // #5: the stop text is a special token.
        check_text(&[3, 6], &["<|end|>"], "18", "18<|end|>");
        check_text(&[3, 6, 4], &["<|end|>\n"], "18", "18<|end|>\n");
        check_text(&[3, 4, 6], &["\n<|end|>"], "18\n", "18\n\n<|end|>");
        // Special tokens before the stop text are not part of the text.
        check_text(&[7, 3, 7, 6], &["<|end|>"], "18", "18<|end|>");
        // A special token inside of which the stop text begins is not part of it either.
        check_text(&[3, 6], &["end|>"], "18", "18end|>");
        // Of two, the one that begins first.
        check_text(&[0, 1, 2], &["D>", "EN"], "x<", "x<EN");
        check_text(&[0, 1, 2], &["x<", "<END"], "", "x<");
        // The first token, none, all.
        check_text(&[6], &["<|end|>"], "", "<|end|>");
        check_text(&[0, 3], &["<|end|>"], "x18", "x18");
        check_text(&[], &["x"], "", "");
        check_text(&[0, 6], &[], "x", "x");
    }

    #[test]
    fn a_stop_text_between_partial_characters_is_removed() {
        let tokens = ids("né…STOP");
        let text = |stop: &str| {
            let decode = |ids: &[u32]| bytes().decode(ids);
            text_to_stop(&tokens, &[stop.to_owned()], false, decode, decode)
        };
        assert_eq!(text("STOP"), "né…");
        assert_eq!(text("…"), "né");
        assert_eq!(text("é…ST"), "n");
    }

    #[test]
    fn invalid_rules_are_rejected() {
        let refused =
            |settings: SamplingSettings| StopRules::new(&settings).unwrap_err().to_string();
        assert_eq!(
            refused(SamplingSettings {
                stop_texts: vec!["x".to_owned()],
                ..SamplingSettings::default()
            }),
            "sampling setting `stop_texts` requires `text_decoder`"
        );
        assert_eq!(
            refused(SamplingSettings {
                stop_ids: vec![vec![]],
                ..SamplingSettings::default()
            }),
            "sampling setting `stop_ids` contains an empty sequence"
        );
        assert_eq!(
            refused(SamplingSettings {
                stop_texts: vec![String::new()],
                text_decoder: Some(bytes()),
                ..SamplingSettings::default()
            }),
            "sampling setting `stop_texts` contains an empty text"
        );
    }
}
