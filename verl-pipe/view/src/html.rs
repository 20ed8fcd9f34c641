//! Assembles one self-contained page: it makes no requests, and no text of a run can become markup or code of the page.

use std::fmt::Write;

use serde::Serialize;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("../assets/view/page.html");
const STYLE: &str = include_str!("../assets/view/view.css");
/// The parts of the page's script, in the order of their dependencies.
const SCRIPT: &str = concat!(
    include_str!("../assets/view/base.js"),
    include_str!("../assets/view/charts.js"),
    include_str!("../assets/view/graph.js"),
    include_str!("../assets/view/lists.js"),
    include_str!("../assets/view/samples.js"),
    include_str!("../assets/view/texts.js"),
    include_str!("../assets/view/main.js"),
);
/// uPlot (MIT) draws the curves; its licence is in `assets/uplot`.
const PLOT_STYLE: &str = include_str!("../assets/uplot/uPlot.min.css");
const PLOT_SCRIPT: &str = include_str!("../assets/uplot/uPlot.iife.min.js");
const PLOT_LICENCE: &str = include_str!("../assets/uplot/LICENSE");

/// JSON documents of a page, which its script finds by name.
#[derive(Debug, Default)]
pub(crate) struct Blocks(String);

impl Blocks {
    /// Adds a document. `name` contains only letters, digits and hyphens.
    pub(crate) fn add(&mut self, name: &str, document: &impl Serialize) {
        // Numbers, strings and lists of them always serialise to JSON.
        self.add_json(name, &serde_json::to_string(document).unwrap_or_default());
    }

    /// Adds a document that is already JSON.
    pub(crate) fn add_json(&mut self, name: &str, json: &str) {
        // `<` occurs only in strings, where it can be escaped, so neither `</script` nor `<!--` can occur.
        let json = json.replace('<', "\\u003c");
        let _ = writeln!(
            self.0,
            "<script type=\"application/json\" id=\"{name}\">{json}</script>"
        );
    }
}

/// The page with `title` and `blocks`. Its policy allows only its own two scripts.
pub(crate) fn page(title: &str, blocks: &Blocks) -> String {
    let policy = format!(
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}' 'sha256-{}'; base-uri 'none'; form-action 'none'",
        digest(PLOT_SCRIPT),
        digest(SCRIPT),
    );
    fill(&[
        ("POLICY", &policy),
        ("TITLE", &escaped(title)),
        ("LICENCE", PLOT_LICENCE),
        ("PLOT_STYLE", PLOT_STYLE),
        ("STYLE", STYLE),
        ("BLOCKS", &blocks.0),
        ("PLOT_SCRIPT", PLOT_SCRIPT),
        ("SCRIPT", SCRIPT),
    ])
}

/// The template with each `@NAME@` replaced, in order of occurrence; inserted text is not searched.
fn fill(parts: &[(&str, &str)]) -> String {
    let length = parts.iter().map(|(_, text)| text.len()).sum::<usize>();
    let mut page = String::with_capacity(PAGE.len() + length);
    let mut left = PAGE;
    for (name, text) in parts {
        let Some((before, after)) = left.split_once(&format!("@{name}@")) else {
            debug_assert!(false, "the template has no @{name}@ at this place");
            continue;
        };
        page += before;
        page += text;
        left = after;
    }
    page + left
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// SHA-256 in base 64, as a content security policy names a script.
fn digest(text: &str) -> String {
    base64(&Sha256::digest(text.as_bytes()))
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            text.push(match at <= chunk.len() {
                true => char::from(LETTERS[(bits >> (18 - 6 * at) & 63) as usize]),
                false => '=',
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_base_64() {
        // RFC 4648, section 10.
        for (bytes, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), expected);
        }
        assert_eq!(digest(""), "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
    }

    #[test]
    fn no_text_can_end_its_script_or_begin_a_comment() {
        let text = "</script><img src=x onerror=alert(1)><!--<script>@SCRIPT@]]>";
        let mut blocks = Blocks::default();
        blocks.add("data", &[text]);
        let inner = blocks
            .0
            .strip_prefix("<script type=\"application/json\" id=\"data\">");
        let inner = inner
            .and_then(|rest| rest.strip_suffix("</script>\n"))
            .expect("one script");
        assert!(!inner.contains('<'), "{inner}");
        let read: Vec<String> = serde_json::from_str(inner).expect("JSON");
        assert_eq!(read, [text]);
        let page = page(text, &blocks);
        assert!(page.contains("<title>&lt;/script&gt;&lt;img"));
        // The marker in the text remains; the template's own are replaced.
        assert_eq!(page.matches("@SCRIPT@").count(), 2);
        assert!(!page.contains("@BLOCKS@") && !page.contains("@PLOT_SCRIPT@"));
        assert!(!page.contains("<img"));
    }

    #[test]
    fn the_page_makes_no_requests() {
        let page = page("run", &Blocks::default());
        for pattern in [
            "src=\"",
            "<link rel=\"stylesheet",
            "@import",
            "fetch(",
            "XMLHttpRequest",
            "import(",
        ] {
            assert!(!page.contains(pattern), "{pattern}");
        }
        // The content of scripts must not end them.
        assert_eq!(page.matches("</script").count(), 2);
    }
}
