//! Notes about rows that are trained on, but perhaps not as intended.

use verl_models::targets::Note;

/// A note about a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RowNote {
    /// About its tokens.
    Written(Note),
    /// It has tools that no template writes.
    ToolsUnread,
    /// Its two answers have the same tokens.
    SameAnswers,
}

/// The notes about many rows: each kind once, with the first row that has it.
#[derive(Debug, Default)]
pub(super) struct Notes(Vec<NoteSummary>);

#[derive(Debug)]
struct NoteSummary {
    note: RowNote,
    /// The first row, from 0.
    row: usize,
    rows: usize,
}

impl RowNote {
    fn is_like(&self, other: &RowNote) -> bool {
        self.kind() == other.kind()
    }

    /// The kind of note.
    pub fn kind(&self) -> &'static str {
        match self {
            RowNote::ToolsUnread => "tools_unread",
            RowNote::SameAnswers => "same_answers",
            RowNote::Written(Note::PromptDiffers { .. }) => "apart",
            RowNote::Written(Note::Unended) => "unended",
            RowNote::Written(Note::EndsWithin) => "ends_within",
            RowNote::Written(Note::Changed { .. }) => "changed",
            RowNote::Written(Note::UnmarkedEnd) => "unmarked_end",
            RowNote::Written(Note::Rewritten { .. }) => "rewritten",
        }
    }

    /// The text of the note.
    pub fn text(&self) -> String {
        match self {
            RowNote::ToolsUnread => {
                "the row has tools, but no chat template writes them, so the model does not see them".to_owned()
            }
            RowNote::SameAnswers => {
                "the chosen and the rejected answer have the same tokens, so the pair teaches nothing".to_owned()
            }
            RowNote::Written(Note::PromptDiffers { prompt, finished }) => {
                let (prompt, finished) = excerpts(prompt, finished);
                format!(
                    "the tokens of the prompt are not a prefix of the finished conversation, so training sees a different prompt than generation; generation continues after {prompt}, training uses {finished}"
                )
            }
            RowNote::Written(Note::Unended) => {
                "the chat template does not end an answer with an end-of-sequence id; targets end with the tokenizer's id".to_owned()
            }
            RowNote::Written(Note::EndsWithin) => {
                "an answer continues after a token that stops generation".to_owned()
            }
            RowNote::Written(Note::Changed { answer, written }) => {
                let (answer, written) = excerpts(answer, written);
                format!(
                    "the chat template changes an answer or omits a part of it, which is not trained: {answer} is written as {written}"
                )
            }
            RowNote::Written(Note::UnmarkedEnd) => {
                "the `{% generation %}` marks of the chat template do not include the token that ends the turn, so the model does not learn to end it".to_owned()
            }
            RowNote::Written(Note::Rewritten { alone, within }) => {
                let (alone, within) = excerpts(alone, within);
                format!(
                    "an earlier assistant turn is written differently when messages follow, and is trained that way: {alone} on its own, {within} in the complete conversation"
                )
            }
        }
    }
}

impl Notes {
    /// Adds the notes about row `row`; rows must be added in order.
    pub fn add(&mut self, row: usize, notes: Vec<RowNote>) {
        for note in notes {
            match self.0.iter_mut().find(|known| known.note.is_like(&note)) {
                Some(known) => known.rows += 1,
                None => self.0.push(NoteSummary { note, row, rows: 1 }),
            }
        }
    }

    /// The warnings about the data set `origin` of `all` rows, one for each kind of note.
    pub fn texts(&self, origin: &str, all: usize) -> Vec<String> {
        let texts = self.0.iter().map(|summary| {
            let row = summary.row + 1;
            let rows = match summary.rows {
                1 => format!("row {row}"),
                rows => format!("row {row} and {} more of {all}", rows - 1),
            };
            format!("`{origin}`, {rows}: {}", summary.note.text())
        });
        texts.collect()
    }
}

/// Characters of a text that are shown before and after the point where two texts differ.
const SHOWN: [usize; 2] = [60, 100];

/// Excerpts of two texts, from shortly before the point where they differ.
fn excerpts(one: &str, other: &str) -> (String, String) {
    let shared = one.chars().zip(other.chars());
    let shared = shared.take_while(|(one, other)| one == other).count();
    let from = shared.saturating_sub(SHOWN[0]);
    let shown = |text: &str| {
        let part: String = text.chars().skip(from).take(SHOWN[0] + SHOWN[1]).collect();
        let before = if from > 0 { "…" } else { "" };
        let rest = text.chars().count() > from + SHOWN[0] + SHOWN[1];
        format!("{before}{part:?}{}", if rest { "…" } else { "" })
    };
    (shown(one), shown(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_note_is_reported_once_with_both_texts() {
        let apart = |prompt: &str| {
            RowNote::Written(Note::PromptDiffers {
                prompt: prompt.to_owned(),
                finished: "<user>1<bot>2".to_owned(),
            })
        };
        let mut notes = Notes::default();
        notes.add(2, vec![apart("<user>1<bot><think>"), RowNote::ToolsUnread]);
        notes.add(5, vec![apart("other")]);
        let texts = notes.texts("rows", 9);
        assert_eq!(texts.len(), 2);
        assert!(
            texts[0].starts_with("`rows`, row 3 and 1 more of 9: "),
            "{texts:?}"
        );
        assert!(
            texts[0].contains("after \"<user>1<bot><think>\", training uses \"<user>1<bot>2\""),
            "{texts:?}"
        );
        assert!(
            texts[1].starts_with("`rows`, row 3: the row has tools"),
            "{texts:?}"
        );
    }

    #[test]
    fn long_texts_are_shown_around_the_point_where_they_differ() {
        let same = "x".repeat(500);
        let (one, other) = excerpts(&format!("{same}a"), &format!("{same}{}", "b".repeat(500)));
        assert_eq!(one, format!("…\"{}a\"", "x".repeat(60)));
        assert_eq!(
            other,
            format!("…\"{}{}\"…", "x".repeat(60), "b".repeat(100))
        );
    }
}
