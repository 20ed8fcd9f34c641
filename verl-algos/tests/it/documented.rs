//! Every registered estimator, loss and filter, and the other maths with settings, documents what it computes, its
//! shapes, the differences from reference systems and its source. A new item is checked through its line in the
//! registry.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use verl_algos::advantages::ESTIMATORS;
use verl_algos::losses::{OTHER_LOSSES, POLICY_LOSSES, PREFERENCE_LOSSES, TOKEN_FILTERS};

/// Required sections of a doc comment.
const SECTIONS: &[&str] = &["# Shapes", "# Differences", "# Source"];
/// Signs; an equation or inequality contains at least one of them.
const SIGNS: &[char] = &['=', '−', '≤', '≥', '→', '(', 'Σ'];
/// Types without a registry.
const OTHERS: &[&str] = &[
    "DistillationLoss",
    "Divergence",
    "FDivergence",
    "IlqlDecoding",
    "IlqlLoss",
    "OverlongPenalty",
    "PfPpo",
    "RejectionRule",
    "RolloutWeights",
    "TargetSync",
    "TrlSamplerRatio",
];

/// Doc comments of the public types of the crate, by name.
fn documented() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![source];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("the source can be read") {
            let path = entry.expect("a directory entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = fs::read_to_string(&path).expect("a source file");
                types_of(&text, &mut found);
            }
        }
    }
    found
}

fn types_of(text: &str, found: &mut BTreeMap<String, Vec<String>>) {
    let mut doc = Vec::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("///") {
            doc.push(comment.trim().to_owned());
            continue;
        }
        if line.starts_with("#[") {
            continue;
        }
        let declared = ["pub struct ", "pub enum "];
        if let Some(rest) = declared.iter().find_map(|word| line.strip_prefix(word)) {
            let name = rest.split(|c: char| !c.is_alphanumeric()).next();
            // Two types may have the same name; both are checked like a listed one.
            let docs: &mut Vec<String> = found
                .entry(name.unwrap_or_default().to_owned())
                .or_default();
            docs.push(doc.join("\n"));
        }
        doc.clear();
    }
}

/// What is missing from a doc comment.
fn missing_sections(doc: &str) -> Vec<&'static str> {
    let mut missing: Vec<&str> = SECTIONS.to_vec();
    missing.retain(|section| !doc.lines().any(|line| line == *section));
    let equation = doc.split("# ").next().unwrap_or_default();
    if !equation.contains(SIGNS) {
        missing.push("an equation");
    }
    missing
}

/// The type name of a registered item.
fn type_name(item: &dyn std::fmt::Debug) -> String {
    let text = format!("{item:?}");
    let end = text.find(|c: char| !c.is_alphanumeric());
    text[..end.unwrap_or(text.len())].to_owned()
}

#[test]
fn every_registered_item_is_documented() {
    let mut names: Vec<String> = OTHERS.iter().map(|name| (*name).to_owned()).collect();
    names.extend(ESTIMATORS.iter().map(|(_, make)| type_name(&make())));
    let losses = POLICY_LOSSES.iter().chain(OTHER_LOSSES);
    names.extend(losses.map(|(_, make)| type_name(&make())));
    names.extend(PREFERENCE_LOSSES.iter().map(|(_, make)| type_name(&make())));
    names.extend(TOKEN_FILTERS.iter().map(|(_, make)| type_name(&make())));
    names.sort();
    names.dedup();
    let documented = documented();
    let mut faults = Vec::new();
    for name in &names {
        let Some(docs) = documented.get(name) else {
            faults.push(format!("`{name}` is not a public type of the crate"));
            continue;
        };
        let best = docs
            .iter()
            .map(|doc| missing_sections(doc))
            .min_by_key(Vec::len);
        let best = best.unwrap_or_default();
        if !best.is_empty() {
            faults.push(format!("`{name}` lacks {}", best.join(", ")));
        }
    }
    assert!(names.len() > 40, "{names:?}");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn missing_sections_are_reported() {
    assert_eq!(
        missing_sections("x = y\n# Shapes\n# Differences\n# Source"),
        [""; 0]
    );
    assert_eq!(
        missing_sections("Adds up\n# Shapes\n# Source"),
        ["# Differences", "an equation"]
    );
}
