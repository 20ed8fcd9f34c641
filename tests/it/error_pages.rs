//! The pages of `docs/errors`: their pipelines fail with the code of the page, and the repaired pipelines do not, in a
//! folder with a model folder `base` and a file `questions.jsonl`.

use std::fs;
use std::path::{Path, PathBuf};

use verl::pipe::config::read_pipeline;
use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::plan::Plannable;
use verl::pipe::plan::look::Look;

use crate::kit::root;

/// Copies a model folder to `to`.
fn copy_of_a_model(to: &Path) -> PathBuf {
    fs::create_dir(to).expect("a folder");
    let source = root().join("examples/models/addition-base");
    for entry in fs::read_dir(source).expect("a model folder") {
        let file = entry.expect("an entry").path();
        let name = file.file_name().expect("a name");
        fs::copy(&file, to.join(name)).expect("a copy");
    }
    to.to_owned()
}

/// A folder with the files that the pipelines of the pages use.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary folder");
    let base = copy_of_a_model(&place.path().join("base"));
    // The same, with two digits swapped.
    let tokenizer = copy_of_a_model(&place.path().join("other")).join("tokenizer.json");
    let text = fs::read_to_string(&tokenizer).expect("a tokenizer");
    let swapped = text.replace("\"7\"", "\"seven\"").replace("\"8\"", "\"7\"");
    let swapped = swapped.replace("\"seven\"", "\"8\"");
    assert_ne!(text, swapped);
    fs::write(&tokenizer, swapped).expect("a file");
    // As in real models, unlike the example.
    let config = base.join("config.json");
    let text = fs::read_to_string(&config).expect("a config.json");
    let mut described: serde_json::Value = serde_json::from_str(&text).expect("an object");
    described["max_position_embeddings"] = 4096.into();
    fs::write(&config, described.to_string()).expect("a file");
    let row = "{\"question\": \"1 + 1 = ?\", \"answer\": \"#### 2\"}";
    fs::write(place.path().join("questions.jsonl"), row).expect("a file");
    place
}

/// The page's code blocks in `language`: the failing one and its repair.
fn blocks(page: &str, language: &str) -> Vec<String> {
    page.split(&format!("```{language}\n"))
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .map(str::to_owned)
        .collect()
}

/// Pages with their code, in order.
fn pages() -> Vec<(String, String)> {
    let entries = fs::read_dir(root().join("docs/errors")).expect("the pages");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let code = |path: &PathBuf| {
        path.file_stem()
            .and_then(|stem| stem.to_str())
            .map(str::to_owned)
    };
    paths
        .iter()
        .map(|path| {
            (
                code(path).expect("a name"),
                fs::read_to_string(path).expect("a page"),
            )
        })
        .collect()
}

fn findings(file: &Path, overrides: &[&str]) -> Vec<Diagnostic> {
    let look = Look::default();
    let plan = read_pipeline(file, overrides, &verl::registry());
    match plan.and_then(|pipe| pipe.check(&look).plan) {
        Ok(plan) => plan.warnings().to_vec(),
        Err(findings) => findings,
    }
}

/// Findings as printed, without the temporary folder.
fn printed(findings: &[Diagnostic], place: &Path) -> String {
    let texts: Vec<String> = findings
        .iter()
        .map(|finding| format!("{finding}\n"))
        .collect();
    texts
        .join("\n")
        .replace(&format!("{}/", place.display()), "")
}

#[test]
fn pipelines_of_the_pages_fail_and_their_repairs_do_not() {
    let place = place();
    let file = place.path().join("p.toml");
    let mut tried = 0;
    for (code, page) in pages() {
        let blocks = blocks(&page, "toml");
        let [failing, repaired] = blocks.as_slice() else {
            assert_eq!(blocks.len(), 0, "{code} has a pipeline without its repair");
            continue;
        };
        tried += 1;
        fs::write(&file, failing).expect("a file");
        let found = findings(&file, &[]);
        let text = printed(&found, place.path());
        assert!(
            found.iter().any(|finding| finding.code == code),
            "{code}:\n{text}"
        );
        insta::assert_snapshot!(code.clone(), text);
        // A repaired pipeline has no warnings either.
        fs::write(&file, repaired).expect("a file");
        let found = printed(&findings(&file, &[]), place.path());
        assert!(found.is_empty(), "{code}, repaired:\n{found}");
    }
    assert!(tried >= 24, "{tried} pages have a pipeline and its repair");
}

#[test]
fn commands_of_the_pages_fail_and_their_repairs_do_not() {
    let file = root().join("examples/pipelines/grpo_addition.toml");
    let mut tried = 0;
    for (code, page) in pages() {
        let blocks = blocks(&page, "sh");
        let [failing, repaired] = blocks.as_slice() else {
            continue;
        };
        let findings_of = |command: &str| {
            let overrides: Vec<&str> = command.split_whitespace().skip(3).collect();
            assert!(!overrides.is_empty(), "{command}");
            findings(&file, &overrides)
        };
        // Which devices are available depends on the build.
        if code == "S012" && cfg!(feature = "cuda") {
            continue;
        }
        tried += 1;
        let found = findings_of(failing);
        assert!(
            found.iter().any(|finding| finding.code == code),
            "{code}: {}",
            Findings(found)
        );
        let found = findings_of(repaired);
        assert!(
            !found.iter().any(|finding| finding.code == code),
            "{code}: {}",
            Findings(found)
        );
    }
    assert!(tried >= 2, "{tried} pages have a command and its repair");
}
