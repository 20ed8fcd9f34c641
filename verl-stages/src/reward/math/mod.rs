//! Mathematics in answers, compared as Math-Verify does.
//!
//! An answer is found in a response (`extract`), parsed into a tree (`parse`), and compared with the reference's
//! (`equal`): numbers exactly, expressions by high-precision values at fixed points (`scalar`, `evaluate`, `complex`,
//! `real`), sets of real numbers by their ends (`real_set`).
//!
//! Time and memory are bounded for any response: answers have at most 4,000 bytes, 2,000 tokens and 40 levels of nesting,
//! numbers at most 16,384 bits, and arithmetic has a limited amount of fuel. Anything beyond these bounds is compared as a
//! text.
//!
//! As with Math-Verify, units and degrees are dropped and not compared, `9\%` is `0.09` and 9, `\log` is to the base 10,
//! `1/2x` is 1/(2x), variables are the same in upper and lower case, a reference `x \le 3` is answered by
//! `(-\infty,3]` but not the other way round, and a decimal number equals what it rounds when both agree in six
//! decimals.
//!
//! # Differences
//! - Numbers are compared exactly: `\pi + 10^{-60}` is not `\pi`, and rounding does not make small numbers equal.
//! - Of several boxes the last one counts, unless they are items of one list (`\boxed{1} and \boxed{2}`); empty boxes are
//!   ignored, and a response that ends within a box states no answer.
//! - `####` marks an answer. A negated answer ("not 18") or one of several alternatives ("18 or 19") does not count.
//! - A letter after the number of the reference is a variable: 2 does not answer `2c`.
//! - `i` is the imaginary unit everywhere, and roots of odd order of negative numbers are real.
//! - Equations and inequalities are equal when one is a multiple of the other.
//! - Integrals, sums over an index and congruences are compared as texts.
//!
//! # Source
//! Math-Verify 0.9 (huggingface/Math-Verify) with latex2sympy2_extended 1.11 and SymPy 1.14. Its verdicts on 1,012 pairs
//! are in `tests/golden/math_verify.json`, written by `scripts/math_verify_pairs.py`; the tests list the 41 that differ.

mod complex;
mod equal;
mod evaluate;
mod expr;
mod extract;
mod parse;
mod plain_number;
mod real;
mod real_set;
mod scalar;
#[cfg(test)]
mod tests;

use self::expr::Expr;
use self::scalar::Comparison;
use super::number::Number;

/// Longest answer that is parsed (bytes).
const LONGEST: usize = 4000;
/// Highest power of ten to which a number is expanded.
const LARGEST_POWER: u32 = 2000;

/// A part of a text that may state an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    text: String,
    /// Where it begins and ends in the text (bytes).
    start: usize,
    end: usize,
}

/// The answer that a response states; `None` if it states none.
///
/// ```
/// use verl_stages::reward::math::answer_of;
///
/// assert_eq!(answer_of(r"So \boxed{\frac{1}{2}}, as asked in task 7.").as_deref(), Some(r"\frac{1}{2}"));
/// assert_eq!(answer_of("The answer is 1,000. I checked it twice.").as_deref(), Some("1,000"));
/// assert_eq!(answer_of("I do not know.").as_deref(), None);
/// ```
pub fn answer_of(response: &str) -> Option<String> {
    extract::of_response(response).filter(|answer| !answer.is_empty())
}

/// Whether an answer, as [`answer_of`] finds it, states what a reference does. A reference is LaTeX or plain text; of a
/// complete solution, its box, what follows its `####`, or its last formula counts.
///
/// ```
/// use verl_stages::reward::math::same_answer;
///
/// assert!(same_answer(r"2\sqrt{2}", r"\sqrt{8}"));
/// assert!(same_answer("(x+1)^2", "x^2 + 2x + 1"));
/// assert!(same_answer(r"x \le 3", r"(-\infty, 3]") && !same_answer(r"(-\infty, 3]", r"x \le 3"));
/// assert!(!same_answer("(1, 2)", "(2, 1)"));
/// ```
pub fn same_answer(reference: &str, answer: &str) -> bool {
    let Some(reference) = extract::of_reference(reference) else {
        return false;
    };
    let (reference, answer) = (reference.as_str(), answer.trim());
    let (words, other) = (normalized(reference), normalized(answer));
    if !words.is_empty() && words == other {
        return true;
    }
    if is_word(&words) || reference.len() > LONGEST || answer.len() > LONGEST {
        return false;
    }
    let (references, answers) = (readings(reference, true), readings(answer, false));
    let comparison = Comparison::new(reference, answer);
    references.iter().any(|reference| {
        answers
            .iter()
            .any(|answer| comparison.answers(reference, answer))
    })
}

/// The possible readings of an answer: as LaTeX, and as a number with a unit in plain words.
///
/// A single letter after a number is a unit in a response and a variable in a reference: `5 m` answers 5, but 5 does not
/// answer `5m`.
fn readings(text: &str, reference: bool) -> Vec<Expr> {
    let text = text.trim_end_matches(|c: char| c.is_whitespace() || matches!(c, '.' | ',' | ';'));
    let text = ungrouped(text.trim_start_matches(|c: char| c.is_whitespace() || c == '='));
    let mut readings: Vec<Expr> = parse::parse(&text).into_iter().collect();
    let other = text.contains(['=', ':', '!', '%', '~', '≈', '<', '>', '|'])
        || text.to_lowercase().contains("percent");
    let mut words = text
        .split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty());
    let variable = reference && words.any(|word| word.chars().count() == 1);
    if !other && !variable {
        let number = Number::read(&text).and_then(|number| number.to_rational(LARGEST_POWER));
        let pointed = text
            .split('.')
            .skip(1)
            .any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        readings.extend(number.map(|value| Expr::Number {
            value,
            decimal: pointed,
        }));
    }
    readings
}

/// `text` without the commas of a number that is the entire answer, or everything after `=`: `1,234,567.5`.
fn ungrouped(text: &str) -> String {
    let start = text.rfind('=').map_or(0, |at| at + 1);
    let (before, number) = text.split_at(start);
    let body = number.trim_start_matches(|c: char| {
        c.is_whitespace() || matches!(c, '\\' | '$' | '-' | '+' | '−')
    });
    let end = body
        .find(|c: char| !c.is_ascii_digit() && !matches!(c, ',' | '.'))
        .unwrap_or(body.len());
    let (digits, after) = body.split_at(end);
    let digits = digits.trim_end_matches(['.', ',']);
    let (integer, _) = digits.split_once('.').unwrap_or((digits, ""));
    let mut groups = integer.split(',');
    let first = groups.next().unwrap_or_default();
    let grouped = (1..=3).contains(&first.len())
        && !first.starts_with('0')
        && groups.clone().count() > 0
        && groups.all(|group| group.len() == 3);
    let unit = after.trim_start();
    let ends = unit.is_empty()
        || unit.starts_with(['.', '$', '%'])
        || unit.starts_with("\\text")
        || unit.starts_with("\\mathrm")
        || unit.starts_with("\\%")
        || unit.starts_with("\\,\\text");
    if !(grouped && ends) {
        return text.to_owned();
    }
    let lead = &number[..number.len() - body.len()];
    format!("{before}{lead}{}{after}", digits.replace(',', ""))
}

/// An answer as a text: in lower case, without spaces, dollars, text commands and a full stop.
fn normalized(text: &str) -> String {
    let mut plain = text.to_lowercase();
    for words in [
        "\\text{",
        "\\textbf{",
        "\\textit{",
        "\\mathrm{",
        "\\mathbf{",
        "\\mbox{",
    ] {
        plain = plain.replace(words, "{");
    }
    for blank in ["\\,", "\\;", "\\ ", "\\left", "\\right", "$"] {
        plain = plain.replace(blank, " ");
    }
    plain = plain.replace("\\!", "");
    let words = !plain.contains(['\\', '^', '_']);
    let mut kept = String::with_capacity(plain.len());
    for part in plain.split_whitespace() {
        // Digits on both sides of a space are two numbers.
        if kept.ends_with(|c: char| c.is_ascii_digit())
            && part.starts_with(|c: char| c.is_ascii_digit())
        {
            kept.push(' ');
        }
        kept.extend(part.chars().filter(|c| !(words && matches!(c, '{' | '}'))));
    }
    kept.trim_end_matches('.').to_owned()
}

/// Whether a text is a word rather than a product of variables.
fn is_word(text: &str) -> bool {
    text.chars().count() >= 4
        && text.chars().all(char::is_alphabetic)
        && !matches!(text, "infinity" | "sqrt")
}
