//! Numbers and expressions such as `36/2` in plain text.

use super::Candidate;

fn in_number(c: char) -> bool {
    c.is_ascii_digit()
        || matches!(
            c,
            '.' | ',' | '/' | '*' | '×' | '÷' | '^' | '(' | ')' | '+' | '-' | '−' | '%' | ' '
        )
}

/// The runs of digits and operators of a text, first to last.
fn numbers(text: &str) -> impl DoubleEndedIterator<Item = Candidate> {
    let mut runs: Vec<Candidate> = Vec::new();
    let mut start = None;
    for (at, c) in text.char_indices().chain([(text.len(), '\n')]) {
        match (in_number(c), start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                if text[from..at].contains(|c: char| c.is_ascii_digit()) {
                    runs.push(Candidate {
                        text: text[from..at].to_owned(),
                        start: from,
                        end: at,
                    });
                }
                start = None;
            }
            _ => {}
        }
    }
    let before: Vec<bool> = runs
        .iter()
        .map(|run| {
            let attached = text[..run.start]
                .chars()
                .next_back()
                .is_some_and(char::is_alphanumeric);
            !attached || run.text.starts_with(' ')
        })
        .collect();
    runs.into_iter()
        .zip(before)
        .filter(|(_, separate)| *separate)
        .map(|(run, _)| run)
        .map(trimmed)
}

/// A run without what belongs to the sentence: a dash before, a full stop or bracket after, earlier items of a list.
fn trimmed(run: Candidate) -> Candidate {
    let mut end = run.text.trim_end().len();
    loop {
        let text = run.text[..end].trim_end_matches(['.', ',', '+', '-', '*', '/', '^', ' ', '(']);
        let closed_too_often = text.matches('(').count() < text.matches(')').count();
        let kept = match closed_too_often {
            true => text.trim_end_matches(')').len(),
            false => text.len(),
        };
        if kept == end {
            break;
        }
        end = kept;
    }
    let text = &run.text[..end];
    let mut start = text.rfind(", ").map_or(0, |at| at + 2);
    loop {
        let rest = text[start..].trim_start();
        start = end - rest.len();
        let Some(next) = rest.strip_prefix(['-', '+', '*', '/', ',', '.', ')', '^', '(', '−'])
        else {
            break;
        };
        let digit = next.starts_with(|c: char| c.is_ascii_digit());
        let sign = rest.starts_with(['-', '+', '−']) && (digit || next.starts_with(['.', '(']));
        let bracket = rest.starts_with('(') && next.contains(')');
        if sign || bracket || rest.starts_with('.') && digit {
            break;
        }
        start = end - next.len();
    }
    Candidate {
        text: text[start..].to_owned(),
        start: run.start + start,
        end: run.start + end,
    }
}

/// The first number or plain expression of a text.
pub(super) fn first_number(text: &str) -> Option<Candidate> {
    numbers(text).find(|run| !run.text.is_empty())
}

/// The number or plain expression nearest to the end; with the one before it if the text leaves open which of them it is.
pub(super) fn last_number(text: &str) -> Option<Candidate> {
    let mut runs = numbers(text).filter(|run| !run.text.is_empty()).rev();
    let last = runs.next()?;
    if let Some(before) = runs.next() {
        let between = text.get(before.end..last.start).unwrap_or_default();
        if between.trim() == "or" {
            return Some(Candidate {
                text: format!("{},{}", before.text, last.text),
                start: before.start,
                end: last.end,
            });
        }
    }
    Some(last)
}
