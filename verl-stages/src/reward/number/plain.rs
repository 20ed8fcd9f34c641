//! Converts LaTeX, full-width characters and marks of emphasis to plain text.

use std::iter::Peekable;
use std::str::Chars;

/// Commands that display their argument.
const SHOWS_ITS_ARGUMENT: &str = "boxed fbox text textbf textit textrm textsf texttt emph mathrm mathbf mathit mathsf mathtt \
    mbox bm boldsymbol operatorname underline";

/// `text` without LaTeX; `None` if it contains an unknown command, which may mean anything.
pub(super) fn plain(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => command(&mut chars, &mut out)?,
            '{' | '}' => {}
            '\u{ff01}'..='\u{ff5e}' => out.extend(char::from_u32(c as u32 - 0xfee0)),
            '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2060}' | '\u{feff}' => {}
            _ => out.push(c),
        }
    }
    let out = out.replace("^°", "°");
    Some(unwrapped(&out).to_owned())
}

/// Reads what follows a backslash and writes what it means.
fn command(chars: &mut Peekable<Chars<'_>>, out: &mut String) -> Option<()> {
    let mut name = String::new();
    while let Some(&c) = chars.peek() {
        if !c.is_ascii_alphabetic() {
            break;
        }
        name.push(c);
        chars.next();
    }
    let meaning = match name.as_str() {
        "" => match chars.next()? {
            c @ ('$' | '%' | '#' | '_' | '&') => {
                out.push(c);
                return Some(());
            }
            ',' | ';' | ':' | '>' => "\u{2009}",
            '!' => "",
            '(' | ')' | '[' | ']' | ' ' | '\\' | '\n' => " ",
            _ => return None,
        },
        "frac" | "dfrac" | "tfrac" | "cfrac" => {
            let (top, bottom) = (argument(chars)?, argument(chars)?);
            out.push_str(&format!(" {top}/{bottom} "));
            return Some(());
        }
        "times" | "cdot" => "×",
        "approx" | "simeq" => "≈",
        "circ" | "degree" => "°",
        "pounds" => "£",
        "euro" => "€",
        "yen" => "¥",
        "quad" | "qquad" => " ",
        "left" | "right" | "displaystyle" | "large" | "Large" | "bf" | "rm" => "",
        shows
            if SHOWS_ITS_ARGUMENT
                .split_whitespace()
                .any(|known| known == shows) =>
        {
            " "
        }
        _ => return None,
    };
    out.push_str(meaning);
    Some(())
}

/// An argument of `\frac`: one digit, or digits in braces.
fn argument(chars: &mut Peekable<Chars<'_>>) -> Option<String> {
    while chars.next_if(|c| *c == ' ').is_some() {}
    let first = chars.next()?;
    if first.is_ascii_digit() {
        return Some(first.to_string());
    }
    let mut inner = String::new();
    if first != '{' {
        return None;
    }
    loop {
        match chars.next()? {
            '}' => return Some(inner.trim().to_owned()),
            '\\' if chars.next_if(|c| matches!(c, ',' | '!')).is_some() => {}
            '\\' | '{' => return None,
            c => inner.push(c),
        }
    }
}

/// `text` without white space, marks of emphasis, quotes and tags at both ends, a closing mark of a sentence, and
/// surrounding brackets.
pub(super) fn unwrapped(text: &str) -> &str {
    let mut rest = text;
    loop {
        let before = rest;
        rest = rest.trim_matches(|c: char| {
            c.is_whitespace() || matches!(c, '*' | '_' | '`' | '"' | '“' | '”' | '«' | '»')
        });
        rest = rest.trim_start_matches([':', '\'', '‘']);
        rest = rest.trim_end_matches(['.', ',', ';', ':', '!', '?', '。', '’', '\'', '#']);
        rest = rest
            .strip_suffix('>')
            .and_then(|inner| {
                let (kept, tag) = inner.rsplit_once('<')?;
                is_tag(tag).then_some(kept)
            })
            .unwrap_or(rest);
        rest = rest
            .strip_prefix('<')
            .and_then(|inner| {
                let (tag, kept) = inner.split_once('>')?;
                is_tag(tag).then_some(kept)
            })
            .unwrap_or(rest);
        rest = bracketed(rest).unwrap_or(rest);
        if rest == before {
            return rest;
        }
    }
}

/// Whether `text` is what a tag has between its angle brackets: `answer`, `/answer`, `|im_end|`.
fn is_tag(text: &str) -> bool {
    let name = text.trim_matches(['/', '|']);
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(letters)
}

/// The text between brackets or dollars that surround all of `text`; not for `($5)`, which accountants read as −5.
fn bracketed(text: &str) -> Option<&str> {
    let inner = |open: char, close: char| {
        let inner = text.strip_prefix(open)?.strip_suffix(close)?;
        (!inner.contains([open, close])).then_some(inner)
    };
    inner('$', '$')
        .or_else(|| inner('[', ']'))
        .or_else(|| inner('(', ')').filter(|inner| !inner.contains(['$', '£', '€', '¥'])))
}
