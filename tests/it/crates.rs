//! The table of crates in ARCHITECTURE.md agrees with the manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use toml::Table;

use crate::kit::root;

/// For each crate, the crates in its manifest, without those that another crate in its manifest is built on.
fn built_on() -> BTreeMap<String, BTreeSet<String>> {
    let read = |folder: &str| {
        let path = root().join(folder).join("Cargo.toml");
        let text = fs::read_to_string(&path).expect("a manifest");
        text.parse::<Table>().expect("TOML")
    };
    let workspace = read(".");
    let members = workspace["workspace"]["members"]
        .as_array()
        .expect("members");
    let folders = members
        .iter()
        .map(|member| member.as_str().expect("a folder"));
    let mut direct = BTreeMap::new();
    for folder in folders.chain(["."]) {
        let manifest = read(folder);
        let name = manifest["package"]["name"].as_str().expect("a name");
        let own = manifest.get("dependencies").and_then(|all| all.as_table());
        let own = own.into_iter().flat_map(|all| all.keys());
        let own: BTreeSet<String> = own
            .filter(|name| name.starts_with("verl-"))
            .cloned()
            .collect();
        direct.insert(name.to_owned(), own);
    }
    let below = |from: &str| {
        let mut found: BTreeSet<String> = BTreeSet::new();
        let mut open: Vec<&String> = direct[from].iter().collect();
        while let Some(next) = open.pop() {
            if found.insert(next.clone()) {
                open.extend(&direct[next]);
            }
        }
        found
    };
    let reduced = |own: &BTreeSet<String>| {
        let indirect: BTreeSet<String> = own.iter().flat_map(|name| below(name)).collect();
        own - &indirect
    };
    direct
        .iter()
        .map(|(name, own)| (name.clone(), reduced(own)))
        .collect()
}

#[test]
fn the_table_of_crates_is_that_of_the_manifests() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page");
    let names = |cell: &str| -> BTreeSet<String> {
        let names = cell.split('`').skip(1).step_by(2);
        names.map(str::to_owned).collect()
    };
    let mut listed = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `verl")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let name = cells[1].trim_matches('`').to_owned();
        listed.insert(name, names(cells[2]));
    }
    assert_eq!(listed, built_on());
}
