//! Finds where a text states its answer, in the order of Math-Verify: a box or "the final answer is", `####`, what follows
//! the word "answer", and finally the formula or number nearest to the end.

use super::super::number::Number;
use super::super::rule::{final_answer, final_answer_at};
use super::Candidate;
use super::plain_number::{first_number, last_number};

/// Most characters between the word "answer" and the answer.
const REACH: usize = 100;
/// Most characters of an answer after that word.
const LONGEST_ANSWER: usize = 1000;
/// Most occurrences of the word that are tried, from the last one on.
const MOST_PLACES: usize = 20;
/// Words of plain text that are mathematics.
const MATHEMATICS: &str = "sqrt pi sin cos tan log ln exp infinity or and";

/// The answer that a response states; `None` if it states none.
pub(super) fn of_response(text: &str) -> Option<String> {
    let boxes = boxes(text)?;
    let last = last_boxes(text, &boxes);
    let announced = after(text, "final answer", true);
    match (last, announced) {
        (Some(boxed), Some(announced)) if announced.end > boxed.end => return Some(announced.text),
        (Some(boxed), _) => return Some(boxed.text),
        (None, Some(announced))
            if marked(text).is_none_or(|marked| marked.start < announced.start) =>
        {
            return Some(announced.text);
        }
        (None, _) => {}
    }
    if let Some(marked) = marked(text) {
        return Some(marked.text);
    }
    if let Some(answer) = after(text, "answer", false) {
        return Some(answer.text);
    }
    let formulas = formulas(text);
    let number = last_number(text);
    let found = match (last_formulas(text, &formulas), number) {
        (Some(formula), Some(number)) if number.start >= formula.end => number,
        (Some(formula), _) => formula,
        (None, Some(number)) => number,
        (None, None) => return final_answer(text).map(str::to_owned),
    };
    (!denies(&text[..found.start])).then_some(found.text)
}

/// What follows the last `####`, if it is mathematics and not a Markdown heading.
fn marked(text: &str) -> Option<Candidate> {
    let (start, answer) = final_answer_at(text)?;
    let sound =
        answer.contains(['$', '\\']) || is_mathematics(answer) || Number::read(answer).is_some();
    sound.then(|| Candidate {
        text: answer.to_owned(),
        start,
        end: start + answer.len(),
    })
}

/// The answer of a reference: its box, what follows its `####`, its formula, or all of it.
pub(super) fn of_reference(text: &str) -> Option<String> {
    let boxes = boxes(text)?;
    if let Some(boxed) = last_boxes(text, &boxes) {
        return Some(boxed.text);
    }
    if let Some(answer) = final_answer(text) {
        return Some(answer.to_owned());
    }
    let formulas = formulas(text);
    let text =
        last_formulas(text, &formulas).map_or_else(|| text.trim().to_owned(), |found| found.text);
    (!text.is_empty()).then_some(text)
}

/// The outermost boxes; `None` if one is not closed, since the response ends within its answer.
fn boxes(text: &str) -> Option<Vec<Candidate>> {
    let mut boxes = Vec::new();
    let mut at = 0;
    while let Some(start) = text[at..].find('\\').map(|found| at + found) {
        at = start + 1;
        let rest = &text[start..];
        let Some(inner) = ["\\boxed", "\\fbox"]
            .iter()
            .find_map(|name| rest.strip_prefix(name))
        else {
            continue;
        };
        let open = text.len() - inner.trim_start().len();
        if !text[open..].starts_with('{') {
            continue;
        }
        let end = closing(text, open)?;
        boxes.push(Candidate {
            text: text[open + 1..end].trim().to_owned(),
            start,
            end: end + 1,
        });
        at = end + 1;
    }
    Some(boxes)
}

/// The brace that closes the one at `open`.
fn closing(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0usize;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(open) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// The last box, with those before it that are items of the same list: `\boxed{1} and \boxed{2}`.
fn last_boxes(text: &str, boxes: &[Candidate]) -> Option<Candidate> {
    // An empty box only mentions the requested form, unless there is no other box.
    let filled = boxes
        .iter()
        .rposition(|found| !found.text.is_empty())
        .unwrap_or(boxes.len().checked_sub(1)?);
    let boxes = &boxes[..=filled];
    let mut all = boxes.last()?.clone();
    for before in boxes.iter().rev().skip(1) {
        if !joins(&text[before.end..all.start]) {
            break;
        }
        all.text = format!("{},{}", before.text, all.text);
        all.start = before.start;
    }
    Some(all)
}

/// Whether the text between two answers makes them items of one list.
fn joins(between: &str) -> bool {
    if between.len() > 40 {
        return false;
    }
    let mut plain = between.to_owned();
    for mark in [
        "\\(", "\\)", "\\[", "\\]", "\\,", "\\;", "\\quad", "$", "\\text{", "}", "{",
    ] {
        plain = plain.replace(mark, " ");
    }
    let words = plain
        .split(|c: char| c.is_whitespace() || matches!(c, ',' | ';' | '='))
        .filter(|word| !word.is_empty());
    words.into_iter().all(|word| {
        matches!(word, "and" | "or")
            || word.chars().count() == 1 && word.chars().all(char::is_alphabetic)
    })
}

/// Formulas: `$…$`, `$$…$$`, `\(…\)`, `\[…\]`.
fn formulas(text: &str) -> Vec<Candidate> {
    let bytes = text.as_bytes();
    let mut formulas = Vec::new();
    // A closing delimiter that does not occur after one position does not occur after later ones.
    let mut missing: Vec<&str> = Vec::new();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let rest = &text[at.min(text.len())..];
        let (open, close) = match byte {
            b'\\' if rest.starts_with("\\(") => ("\\(", "\\)"),
            b'\\' if rest.starts_with("\\[") => ("\\[", "\\]"),
            b'$' if rest.starts_with("$$") => ("$$", "$$"),
            b'$' => ("$", "$"),
            b'\\' => {
                // An escaped dollar opens nothing.
                at += 1 + rest[1..].chars().next().map_or(0, char::len_utf8);
                continue;
            }
            _ => {
                at += rest.chars().next().map_or(1, char::len_utf8);
                continue;
            }
        };
        let start = at + open.len();
        let end = match missing.contains(&close) {
            true => None,
            false => end_of_formula(text, start, close),
        };
        match end {
            Some(end) => {
                let inner = text[start..end].trim().to_owned();
                if !inner.is_empty() {
                    formulas.push(Candidate {
                        text: inner,
                        start: at,
                        end: end + close.len(),
                    });
                }
                at = end + close.len();
            }
            None => {
                if close != "$" {
                    missing.push(close);
                }
                at = start;
            }
        }
    }
    formulas
}

fn end_of_formula(text: &str, start: usize, close: &str) -> Option<usize> {
    let mut from = start;
    loop {
        let end = from + text[from..].find(close)?;
        // `\$` within dollars is a dollar; a single dollar does not span lines.
        let escaped = close.starts_with('$') && text[start..end].ends_with('\\');
        if close == "$" && text[from..end].contains('\n') {
            return None;
        }
        if !escaped {
            return Some(end);
        }
        from = end + close.len();
    }
}

fn last_formulas(text: &str, formulas: &[Candidate]) -> Option<Candidate> {
    let mut all = formulas.last()?.clone();
    for before in formulas.iter().rev().skip(1) {
        let between = text[before.end..all.start].trim();
        if !matches!(
            between,
            "," | "and" | "or" | ", and" | ", or" | ",and" | ",or" | ";"
        ) {
            break;
        }
        all.text = format!("{},{}", before.text, all.text);
        all.start = before.start;
    }
    // `$50$\%`: a percent sign belongs to the formula before it.
    let percent = ["\\%", "%", "percent"]
        .iter()
        .any(|sign| text[all.end..].trim_start().starts_with(sign));
    if percent {
        all.text.push_str("\\%");
    }
    Some(all)
}

/// The answer after the last `word` that is followed by one: a formula or number at most [`REACH`] characters away. Empty
/// if the answer is negated, or one of several alternatives.
fn after(text: &str, word: &str, needs_is: bool) -> Option<Candidate> {
    let lower = text.to_ascii_lowercase();
    let places = lower.rmatch_indices(word).take(MOST_PLACES);
    places
        .map(|(at, _)| at + word.len())
        .find_map(|start| announced(text, &lower, start, needs_is))
}

fn announced(text: &str, lower: &str, mut start: usize, needs_is: bool) -> Option<Candidate> {
    let ahead = |start: usize, characters: usize| {
        text[start..]
            .char_indices()
            .nth(characters)
            .map_or(text.len(), |(at, _)| start + at)
    };
    let reach = ahead(start, REACH);
    if needs_is {
        start += lower[start..reach].find(" is")? + 3;
    }
    let rest = &text[start..ahead(start, LONGEST_ANSWER)];
    let found = |text: &str, from: usize, to: usize| {
        let left_open = rest[to..]
            .trim_start()
            .strip_prefix("or")
            .is_some_and(|next| next.starts_with(char::is_whitespace));
        let text = if denies(&rest[..from]) || left_open {
            ""
        } else {
            text
        };
        Some(Candidate {
            text: text.to_owned(),
            start: start + from,
            end: start + to,
        })
    };
    let formulas = formulas(rest);
    if let Some(first) = formulas
        .iter()
        .position(|formula| start + formula.start <= reach)
    {
        let mut last = first;
        while formulas
            .get(last + 1)
            .is_some_and(|next| joins(&rest[formulas[last].end..next.start]))
        {
            last += 1;
        }
        let all = last_formulas(rest, &formulas[first..=last])?;
        return found(&all.text, all.start, all.end);
    }
    let sentence = sentence(rest);
    let announced = sentence
        .trim_start_matches(|c: char| c.is_whitespace() || matches!(c, ':' | '*' | '_' | '='));
    let announced = ["is ", "is:", "are "]
        .iter()
        .fold(announced, |rest, lead| {
            rest.strip_prefix(lead).unwrap_or(rest)
        })
        .trim();
    let plain = announced
        .trim_matches(['*', '_', '`', ' '])
        .trim_end_matches('.')
        .trim();
    if is_mathematics(plain) || plain.len() == 1 && plain.chars().all(char::is_alphabetic) {
        return found(plain, 0, sentence.len());
    }
    let number = first_number(&rest[..reach - start])?;
    found(&number.text, number.start, number.end)
}

/// Whether the words directly before an answer negate it.
fn denies(before: &str) -> bool {
    let sentence = before
        .rsplit(['.', ';', '!', '?', '\n'])
        .next()
        .unwrap_or_default()
        .to_lowercase();
    let mut words = sentence
        .split(|c: char| !(c.is_alphabetic() || c == '\'' || c == '’'))
        .filter(|word| !word.is_empty())
        .rev()
        .take(4);
    words.any(|word| {
        matches!(
            word,
            "not" | "never" | "isn't" | "isn’t" | "aren't" | "neither" | "nor" | "cannot" | "wrong"
        )
    })
}

/// The text up to the end of the line or the sentence.
fn sentence(text: &str) -> &str {
    let line = text
        .trim_start_matches(['*', ' ', ':'])
        .lines()
        .next()
        .unwrap_or_default();
    let skipped = text.len() - text.trim_start_matches(['*', ' ', ':']).len();
    let end = line.find(". ").map_or(line.len(), |at| at + 1);
    &text[..skipped + end]
}

/// Whether a plain text is a formula: it has only mathematical words, and not only letters.
fn is_mathematics(text: &str) -> bool {
    let mut words = text
        .split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty());
    let sound = words.all(|word| {
        word.chars().count() == 1 || MATHEMATICS.split_whitespace().any(|known| known == word)
    });
    sound
        && text.contains(|c: char| c.is_ascii_digit() || "+-*/=^<>([{".contains(c))
        && text.len() <= 200
}
