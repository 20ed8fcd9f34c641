//! The source of the workspace as a list of items, each with its identifiers and the fields that it reads.
//!
//! This is a reader of text without type inference. It can find out whether an item that mentions a
//! type, or a type that contains it, reads a field with some name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A function, an implementation, a definition, or an entry of a macro's list.
#[derive(Debug)]
pub struct Item {
    /// Every identifier in the item.
    pub words: BTreeSet<String>,
    /// Fields that the item reads: `value.field` that is neither called nor assigned, and names in patterns.
    pub reads: BTreeSet<String>,
    /// The type that the item defines.
    pub defines: Option<String>,
    /// Types that are flattened into the defined type (`serde(flatten)`).
    pub flattens: Vec<String>,
}

/// All sources below `root` that are built into the crates, with their relative paths; without tests.
pub fn sources(root: &Path) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for package in [
        "src",
        "verl-algos/src",
        "verl-models/collective/src",
        "verl-models/decoder/src",
        "verl-models/kernels/src",
        "verl-models/reshard/src",
        "verl-models/rollout/src",
        "verl-models/src",
        "verl-models/text/src",
        "verl-pipe/declare/src",
        "verl-pipe/plan/src",
        "verl-pipe/rules/src",
        "verl-pipe/run/src",
        "verl-pipe/src",
        "verl-pipe/trace/src",
        "verl-pipe/train/src",
        "verl-pipe/view/src",
        "verl-pipe/wire/src",
        "verl-pipe/words/src",
        "verl-stages/src",
    ] {
        walk(&root.join(package), package, &mut all);
    }
    all
}

fn walk(folder: &Path, at: &str, out: &mut Vec<(String, String)>) {
    let entries = fs::read_dir(folder).expect("a folder of sources");
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    for path in paths {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let here = format!("{at}/{name}");
        if path.is_dir() && name != "tests" {
            walk(&path, &here, out);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            out.push((here, fs::read_to_string(&path).expect("a source")));
        }
    }
}

/// Items of one source.
pub fn items_of(source: &str) -> Vec<Item> {
    let code = without_comments_and_texts(source);
    let pieces = pieces(&code);
    let kept = pieces
        .iter()
        .filter(|piece| !piece.contains("#[cfg(test)]"));
    let inner = kept.flat_map(|piece| match entries(piece) {
        Some(entries) => entries,
        None => vec![*piece],
    });
    inner.map(item).collect()
}

/// The source with everything but code blanked, so that braces and words can be trusted.
fn without_comments_and_texts(source: &str) -> String {
    let letters: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let at = |index: usize| letters.get(index).copied().unwrap_or('\0');
    let mut i = 0;
    while i < letters.len() {
        let rest = &letters[i..];
        let skip = match (at(i), at(i + 1)) {
            ('/', '/') => rest.iter().take_while(|c| **c != '\n').count(),
            ('/', '*') => block_comment(rest),
            ('r', '"' | '#') if !at(i.wrapping_sub(1)).is_alphanumeric() => raw_text(rest),
            ('"', _) => text(rest),
            ('\'', '\\') => 2 + rest[2..].iter().skip(1).take_while(|c| **c != '\'').count() + 2,
            ('\'', _) if at(i + 2) == '\'' => 3,
            _ => 0,
        };
        if skip == 0 {
            out.push(at(i));
            i += 1;
        } else {
            out.push(' ');
            i += skip;
        }
    }
    out
}

fn block_comment(rest: &[char]) -> usize {
    let end = rest.windows(2).skip(2).position(|pair| pair == ['*', '/']);
    end.map_or(rest.len(), |end| end + 4)
}

fn text(rest: &[char]) -> usize {
    let mut i = 1;
    while i < rest.len() && rest[i] != '"' {
        i += if rest[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

/// `r"…"`, `r#"…"#`; 0 for an identifier such as `r#type`.
fn raw_text(rest: &[char]) -> usize {
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    if rest.get(1 + hashes) != Some(&'"') {
        return 0;
    }
    let end: Vec<char> = std::iter::once('"').chain(vec!['#'; hashes]).collect();
    let body = &rest[2 + hashes..];
    let found = body.windows(end.len()).position(|piece| piece == end);
    found.map_or(rest.len(), |found| 2 + hashes + found + end.len())
}

/// Pieces of code that end with a semicolon or a closing brace outside of all braces.
fn pieces(code: &str) -> Vec<&str> {
    let (mut depth, mut start, mut out) = (0i32, 0, Vec::new());
    for (i, letter) in code.char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 && matches!(letter, ';' | '}') {
            out.push(&code[start..=i]);
            start = i + 1;
        }
    }
    out.push(&code[start..]);
    out
}

/// The entries of a list that a macro is called with, such as `policy_losses! { …; …; }`.
fn entries(piece: &str) -> Option<Vec<&str>> {
    let (head, body) = piece.split_once('{')?;
    let called = head.trim_end().ends_with('!') && !head.contains("macro_rules");
    let body = body.trim_end().strip_suffix('}')?;
    called.then(|| {
        // Only a semicolon ends an entry: settings are in braces.
        let (mut depth, mut start, mut out) = (0i32, 0, Vec::new());
        for (i, letter) in body.char_indices() {
            match letter {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth -= 1,
                ';' if depth == 0 => {
                    out.push(&body[start..=i]);
                    start = i + 1;
                }
                _ => {}
            }
        }
        out.push(&body[start..]);
        out
    })
}

fn item(code: &str) -> Item {
    let tokens = tokens(code);
    let word = |at: usize| tokens.get(at).copied().unwrap_or_default();
    let mut reads = BTreeSet::new();
    for (at, token) in tokens.iter().enumerate() {
        let next = word(at + 1);
        let assigned = next == "=" && word(at + 2) != "=" && word(at + 2) != ">";
        if at > 0 && word(at - 1) == "." && is_name(token) && next != "(" && !assigned {
            reads.insert((*token).to_owned());
        }
        if *token == "{" && at > 0 && is_name(word(at - 1)) {
            reads.extend(pattern(&tokens[at..]).into_iter().map(str::to_owned));
        }
    }
    let defines = tokens
        .windows(2)
        .find(|pair| matches!(pair[0], "struct" | "enum"));
    // A default does not read the user's setting.
    if tokens.windows(2).any(|pair| pair == ["Default", "for"]) {
        reads.clear();
    }
    Item {
        flattens: flattened(&tokens),
        words: tokens
            .iter()
            .filter(|token| is_name(token))
            .map(|token| (*token).to_owned())
            .collect(),
        reads,
        defines: defines.map(|pair| pair[1].to_owned()),
    }
}

fn tokens(code: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let mut start = None;
    for (i, letter) in code.char_indices() {
        let part = letter.is_alphanumeric() || letter == '_';
        match (part, start) {
            (true, None) => start = Some(i),
            (false, Some(begin)) => {
                out.push(&code[begin..i]);
                start = None;
            }
            _ => {}
        }
        if !part && !letter.is_whitespace() {
            out.push(&code[i..i + letter.len_utf8()]);
        }
    }
    out.extend(start.map(|begin| &code[begin..]));
    out
}

/// Types in the fields after `#[serde(flatten)]`.
fn flattened(tokens: &[&str]) -> Vec<String> {
    let mut out = Vec::new();
    for (at, _) in tokens
        .windows(2)
        .enumerate()
        .filter(|(_, pair)| pair == &["flatten", ")"])
    {
        let field = tokens[at..].iter().skip_while(|token| **token != ":");
        let types = field.take_while(|token| !matches!(**token, "," | "}"));
        let types = types.filter(|token| token.starts_with(char::is_uppercase));
        out.extend(types.map(|token| (*token).to_owned()));
    }
    out
}

/// Names of a pattern `{ a, b: c, .. }` at the start of `tokens`; empty if it is not a pattern.
fn pattern<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    let mut depth = 0;
    let mut names = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            // Defaults occur in a macro's list, never in a pattern.
            "=" if depth == 1 => return Vec::new(),
            name if depth == 1
                && is_name(name)
                && matches!(tokens[at - 1], "{" | "," | "ref" | "mut") =>
            {
                names.push(name);
            }
            _ => {}
        }
        if depth == 0 {
            let after = tokens[at + 1..].iter().skip_while(|token| **token == ")");
            let after: Vec<&str> = after.copied().take(2).collect();
            let taken_apart = match after.as_slice() {
                ["=", second] => *second != "=",
                [first, ..] => matches!(*first, "in" | "|" | ":"),
                [] => false,
            };
            return if taken_apart { names } else { Vec::new() };
        }
    }
    Vec::new()
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, reads: &[&str]) {
        let all = items_of(source);
        let found: BTreeSet<&str> = all
            .iter()
            .flat_map(|item| &item.reads)
            .map(String::as_str)
            .collect();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), reads, "{source}");
    }

    #[test]
    fn what_is_a_read() {
        check("fn f(x: &X) -> f64 { x.rate + x.rate() }", &["rate"]);
        check("fn f(x: &mut X) { x.rate = 1.0; }", &[]);
        check("fn f(x: &X) -> bool { x.rate == 1.0 }", &["rate"]);
        check(
            "// x.rate\nfn f() -> &'static str { \"x.rate { \" } /* x.rate */",
            &[],
        );
        check(
            "fn f(x: X) { let X { rate, size: n, .. } = x; }",
            &["rate", "size"],
        );
        check(
            "fn f(x: X) { match x { X::A { rate } => rate, _ => 0 } }",
            &["rate"],
        );
        check(
            "fn f(x: X) { for X { rate } in x {} if let Some(X { size }) = x {} }",
            &["rate", "size"],
        );
        check("fn f(rate: f64) -> X { Some(X { rate, size: 1.0 }) }", &[]);
        check("#[cfg(test)] mod tests { fn f(x: X) { x.rate; } }", &[]);
        check(
            "fn f() -> char { '\\'' } fn g(x: &'static X) { x.rate; } const A: char = '{';",
            &["rate"],
        );
        check("fn f() -> &'static str { r#\"x.size \"# }", &[]);
    }

    #[test]
    fn flattened_types_are_known() {
        let all = items_of("struct A { #[serde(flatten)] pub b: inner::B<C>, x: D }");
        assert_eq!(all[0].flattens, ["B", "C"]);
        check("impl Default for X { fn default() -> X { y.rate } }", &[]);
    }

    #[test]
    fn a_macros_list_is_a_list_of_items() {
        let all = items_of(
            "losses! { A { x: f64 = 1.0 } => |own| own.x; B { x: f64 = 1.0 } => |own| 1.0; }",
        );
        let reading: Vec<bool> = all.iter().map(|item| item.reads.contains("x")).collect();
        assert_eq!(reading[..2], [true, false]);
    }
}
