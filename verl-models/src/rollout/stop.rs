//! When a response ends: end-of-sequence ids, id sequences, texts, and the token limit.

use std::fmt;
use std::sync::Arc;

use super::engine::{FinishReason, RolloutError, SamplingSettings};

type Decode = dyn Fn(&[u32]) -> String + Send + Sync;

/// Token ids into text, as stop texts need it; shared by the rows of a rollout.
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
            return Err(setting("stop_ids", "holds an empty sequence"));
        }
        if settings.stop_texts.iter().any(String::is_empty) {
            return Err(setting("stop_texts", "holds an empty text"));
        }
        let decoder = settings.text_decoder.as_ref();
        if !settings.stop_texts.is_empty() && decoder.is_none() {
            return Err(setting("stop_texts", "needs `text_decoder`"));
        }
        let longest_text = settings.stop_texts.iter().map(String::len).max();
        Ok(StopRules {
            settings,
            decoder,
            longest_text: longest_text.unwrap_or(0),
        })
    }

    /// Why the response `tokens` ends with its last token, if it does. The end-of-sequence id comes before stop rules
    /// and these before the limit, so that a response that is complete at its last allowed token is not called
    /// truncated.
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

    /// Looks at the tail of the text only, because what lies before was looked at when its tokens came; a hit is then
    /// confirmed on the whole text, because a tail may decode otherwise at its cut (a stripped space, half a
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

    /// Text of as many of the last tokens as hold the longest stop text and the margin of a cut and an unfinished
    /// character at either end; of all of them where tokens decode to nothing.
    fn tail(&self, decoder: &TextDecoder, tokens: &[u32]) -> String {
        const MARGIN: usize = 32;
        let mut count = self.longest_text.min(16) + 4;
        loop {
            let start = tokens.len().saturating_sub(count);
            let text = decoder.decode(&tokens[start..]);
            if start == 0 || text.len() >= self.longest_text + MARGIN {
                return text;
            }
            count *= 2;
        }
    }
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
    fn texts_end_wherever_tokens_are_cut() {
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

    #[test]
    fn rules_that_make_no_sense_are_refused() {
        let refused =
            |settings: SamplingSettings| StopRules::new(&settings).unwrap_err().to_string();
        assert_eq!(
            refused(SamplingSettings {
                stop_texts: vec!["x".to_owned()],
                ..SamplingSettings::default()
            }),
            "sampling setting `stop_texts` needs `text_decoder`"
        );
        assert_eq!(
            refused(SamplingSettings {
                stop_ids: vec![vec![]],
                ..SamplingSettings::default()
            }),
            "sampling setting `stop_ids` holds an empty sequence"
        );
        assert_eq!(
            refused(SamplingSettings {
                stop_texts: vec![String::new()],
                text_decoder: Some(bytes()),
                ..SamplingSettings::default()
            }),
            "sampling setting `stop_texts` holds an empty text"
        );
    }
}
