//! The prelude has everything needed to write a pipeline in Rust, and a custom kind.

use std::collections::BTreeSet;
use std::fs;

use crate::kit::root;

/// Every identifier of the prelude's source; the compiler checks that they exist.
fn prelude() -> BTreeSet<String> {
    let source = fs::read_to_string(root().join("src/lib.rs")).expect("the source");
    let prelude = source.split_once("pub mod prelude {").expect("a prelude").1;
    let words = prelude.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.map(str::to_owned).collect()
}

/// The last name of a type's path, without its type parameters.
fn name(path: &str) -> &str {
    let path = path.split('<').next().unwrap_or(path);
    path.rsplit("::").next().unwrap_or(path)
}

#[test]
fn the_settings_of_every_built_in_kind_are_in_the_prelude() {
    let (prelude, registry) = (prelude(), verl::registry());
    let stages = registry.stages().iter().map(|kind| kind.rust_type);
    let models = registry.models().iter().map(|kind| kind.rust_type);
    let data = registry.data_kinds().iter().map(|kind| kind.rust_type);
    let types: Vec<&str> = stages.chain(models).chain(data).collect();
    assert!(types.len() > 30, "{types:?}");
    let missing: Vec<&str> = types
        .into_iter()
        .filter(|path| !prelude.contains(name(path)))
        .collect();
    assert!(missing.is_empty(), "add them to src/lib.rs: {missing:?}");
    // Parts with the same name are distinguished by their module.
    for (slot, module) in [
        ("loss", "losses"),
        ("estimator", "estimators"),
        ("engine", "engines"),
    ] {
        assert!(prelude.contains(module));
        for kind in registry.slot(slot).expect("the slot").iter() {
            let path = format!("verl_stages::{module}::");
            assert!(kind.rust_type.contains(&path), "{}", kind.rust_type);
        }
    }
}

/// User report, part 3, item 12.
#[test]
fn what_an_external_crate_needs_is_in_the_prelude() {
    let prelude = prelude();
    for name in [
        "Jsonl",
        "DataFile",
        "Parquet",
        "Template",
        "OnLong",
        "UpdateCritic",
        "Values",
        "TokenLoss",
        "AdvantageEstimator",
        "JsonSchema",
        "Serialize",
        "Deserialize",
    ] {
        assert!(prelude.contains(name), "{name}");
    }
}
