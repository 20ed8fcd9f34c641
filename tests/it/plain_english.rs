//! Words that make messages and documentation hard to read do not come back.

use std::fs;
use std::path::{Path, PathBuf};

/// Banned words and phrases with their replacements. A word also stands for itself as a part of an identifier.
const BANNED: [(&str, &str); 15] = [
    ("tell", "report, print, show, say"),
    ("tells", "reports, prints, shows, says"),
    ("told", "reported, printed, passed, known"),
    ("mend", "fix"),
    ("mends", "fixes"),
    ("mended", "fixed"),
    ("mending", "fixing"),
    ("owes", "pending: …"),
    ("for ever", "forever, indefinitely"),
    ("name of no", "unknown …"),
    ("cannot do without", "requires"),
    ("of one's own", "custom"),
    ("of ours", "own"),
    ("begins no", "invalid …"),
    ("is no folder", "is not a folder"),
];

/// Sentences of training data, on which committed numbers depend.
const QUOTED: [&str; 1] = ["then I tell the result"];

/// Folders and files with text that people read.
const READ: [&str; 15] = [
    "src",
    "verl-pipe",
    "verl-stages",
    "verl-models",
    "verl-algos",
    "tests",
    "examples",
    "benches",
    "docs",
    "schemas",
    "scripts",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
];

const KINDS: [&str; 10] = [
    "rs", "md", "cu", "toml", "sh", "py", "snap", "json", "html", "js",
];

fn files(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("a folder of the repository");
        for entry in entries.map(|entry| entry.expect("an entry").path()) {
            files(&entry, found);
        }
    } else if path
        .extension()
        .is_some_and(|kind| KINDS.iter().any(|known| kind == *known))
    {
        found.push(path.to_owned());
    }
}

/// Lower case, words apart by single spaces, identifiers split into their words.
fn words(line: &str) -> String {
    let mut words = String::from(" ");
    let mut before = ' ';
    for c in line.chars() {
        let begins = before.is_lowercase() && c.is_uppercase();
        let is_word = c.is_alphanumeric() || c == '\'';
        if (begins || !is_word) && !words.ends_with(' ') {
            words.push(' ');
        }
        if is_word {
            words.extend(c.to_lowercase());
        }
        before = c;
    }
    words.push(' ');
    words
}

fn banned(line: &str) -> Option<(&'static str, &'static str)> {
    let words = words(line);
    BANNED
        .into_iter()
        .find(|(word, _)| words.contains(&format!(" {word} ")))
}

#[test]
fn banned_words_are_found_in_text_and_identifiers() {
    let of = |line: &str| banned(line).map(|(word, _)| word);
    assert_eq!(of("the help tells what to do"), Some("tells"));
    assert_eq!(of("fn told_of_unseen()"), Some("told"));
    assert_eq!(of("struct ToldRule;"), Some("told"));
    assert_eq!(of("a stage of one's  own"), Some("of one's own"));
    assert_eq!(of("it recommends foretelling, untold times"), None);
}

#[test]
fn no_text_of_the_repository_uses_banned_words() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = Vec::new();
    for name in READ {
        files(&root.join(name), &mut paths);
    }
    assert!(paths.len() > 500, "{}", paths.len());
    let mut found = Vec::new();
    // Other JSON files contain data.
    let schemas = root.join("schemas");
    paths.retain(|path| path.starts_with(&schemas) || path.extension() != Some("json".as_ref()));
    for path in paths.iter().filter(|path| !path.ends_with(file!())) {
        // Files that are not UTF-8 contain data.
        let Ok(text) = fs::read_to_string(path) else {
            continue;
        };
        for (at, line) in text.lines().enumerate() {
            if QUOTED.iter().any(|quoted| line.contains(quoted)) {
                continue;
            }
            if let Some((word, instead)) = banned(line) {
                let place = path.strip_prefix(root).unwrap_or(path).display();
                found.push(format!("{place}:{}: `{word}`; use: {instead}", at + 1));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
