//! What is told of rows that are trained on, but perhaps not as they were meant.

use verl_models::targets::Note;

/// Something of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RowNote {
    /// Of what its tokens are.
    Written(Note),
    /// It names tools that no template writes.
    ToolsUnread,
    /// Its two answers are the same tokens.
    SameAnswers,
}

/// What is told of many rows: each sort once, by the first row that it is true of.
#[derive(Debug, Default)]
pub(super) struct Notes(Vec<Told>);

#[derive(Debug)]
struct Told {
    note: RowNote,
    /// The first row, from 0.
    row: usize,
    rows: usize,
}

impl RowNote {
    fn is_like(&self, other: &RowNote) -> bool {
        self.sort() == other.sort()
    }

    /// What sort of thing it is.
    pub fn sort(&self) -> &'static str {
        match self {
            RowNote::ToolsUnread => "tools_unread",
            RowNote::SameAnswers => "same_answers",
            RowNote::Written(Note::Apart { .. }) => "apart",
            RowNote::Written(Note::Unended) => "unended",
            RowNote::Written(Note::EndsWithin) => "ends_within",
            RowNote::Written(Note::Changed { .. }) => "changed",
            RowNote::Written(Note::UnmarkedEnd) => "unmarked_end",
            RowNote::Written(Note::Rewritten { .. }) => "rewritten",
        }
    }

    /// What is told.
    pub fn text(&self) -> String {
        match self {
            RowNote::ToolsUnread => {
                "the row names tools, which no chat template writes: the model does not see them".to_owned()
            }
            RowNote::SameAnswers => {
                "the chosen and the rejected answer are the same tokens, which teaches nothing".to_owned()
            }
            RowNote::Written(Note::Apart { prompt, finished }) => {
                let (prompt, finished) = excerpts(prompt, finished);
                format!(
                    "the tokens of the prompt are not the first ones of the finished conversation, so that training sees another prompt than generation; generation goes on behind {prompt}, training is on {finished}"
                )
            }
            RowNote::Written(Note::Unended) => {
                "the chat template does not end an answer with an end-of-sequence id; targets end with the tokenizer's".to_owned()
            }
            RowNote::Written(Note::EndsWithin) => {
                "an answer goes on behind a token that generation stops at".to_owned()
            }
            RowNote::Written(Note::Changed { answer, written }) => {
                let (answer, written) = excerpts(answer, written);
                format!(
                    "the chat template writes an answer in other words or leaves out a part of it, which is not trained: of {answer} it writes {written}"
                )
            }
            RowNote::Written(Note::UnmarkedEnd) => {
                "the `{% generation %}` marks of the chat template leave out the token that ends the turn, so that the model does not learn to end it".to_owned()
            }
            RowNote::Written(Note::Rewritten { alone, within }) => {
                let (alone, within) = excerpts(alone, within);
                format!(
                    "an earlier turn of the assistant is written in another way once messages follow, and trained so: alone {alone}, in the whole conversation {within}"
                )
            }
        }
    }
}

impl Notes {
    /// Adds what is told of row `row`; rows come in their order.
    pub fn add(&mut self, row: usize, notes: Vec<RowNote>) {
        for note in notes {
            match self.0.iter_mut().find(|told| told.note.is_like(&note)) {
                Some(told) => told.rows += 1,
                None => self.0.push(Told { note, row, rows: 1 }),
            }
        }
    }

    /// What is to be told of the data set `origin` of `all` rows, a text each.
    pub fn texts(&self, origin: &str, all: usize) -> Vec<String> {
        let texts = self.0.iter().map(|told| {
            let row = told.row + 1;
            let rows = match told.rows {
                1 => format!("row {row}"),
                rows => format!("row {row} and {} more of {all}", rows - 1),
            };
            format!("`{origin}`, {rows}: {}", told.note.text())
        });
        texts.collect()
    }
}

/// Characters of a text that are shown before and behind the place where two part.
const SHOWN: [usize; 2] = [60, 100];

/// Two texts from a little before where they part.
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
    fn each_sort_is_told_once_with_both_texts() {
        let apart = |prompt: &str| {
            RowNote::Written(Note::Apart {
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
            texts[0].contains("behind \"<user>1<bot><think>\", training is on \"<user>1<bot>2\""),
            "{texts:?}"
        );
        assert!(
            texts[1].starts_with("`rows`, row 3: the row names tools"),
            "{texts:?}"
        );
    }

    #[test]
    fn long_texts_are_shown_around_the_place_where_they_part() {
        let same = "x".repeat(500);
        let (one, other) = excerpts(&format!("{same}a"), &format!("{same}{}", "b".repeat(500)));
        assert_eq!(one, format!("…\"{}a\"", "x".repeat(60)));
        assert_eq!(
            other,
            format!("…\"{}{}\"…", "x".repeat(60), "b".repeat(100))
        );
    }
}
