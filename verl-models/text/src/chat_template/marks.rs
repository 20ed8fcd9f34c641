//! `{% generation %}` … `{% endgeneration %}`: the parts of a rendered text that the assistant wrote.
//!
//! `transformers` uses the marks to find the assistant's tokens, and they print nothing. Here the block becomes a
//! filter that puts one character before and one after its text. Both are Unicode noncharacters, which ordinary text
//! does not contain.

use std::ops::Range;

const OPEN: char = '\u{FDD0}';
const CLOSE: char = '\u{FDD1}';

/// Name of the filter that replaces the block.
pub(super) const FILTER: &str = "generation_marks";

/// Marks `text` as the assistant's.
pub(super) fn mark(text: &str) -> String {
    format!("{OPEN}{text}{CLOSE}")
}

/// The template `source` with its blocks replaced by filters, and by conditions that are always true. The first is
/// `None` if `source` has no marks. The tags keep their whitespace control.
pub(super) fn without_generation_blocks(source: &str) -> (Option<String>, String) {
    let filter = format!("filter {FILTER}");
    let marked = replaced(source, &filter, "endfilter");
    let plain = replaced(source, "if true", "endif");
    ((marked != source).then_some(marked), plain)
}

fn replaced(source: &str, open: &str, close: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = &tag[2..tag.len() - 2];
        match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replacen("generation", open, 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", close, 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// A rendered text without its marks, and the byte ranges of it that were between them.
pub(super) fn read(marked: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(marked.len());
    let mut ranges = Vec::new();
    let mut open = None;
    for c in marked.chars() {
        match c {
            OPEN => open = open.or(Some(text.len())),
            CLOSE => ranges.extend(open.take().map(|start| start..text.len())),
            c => text.push(c),
        }
    }
    (text, ranges)
}
