//! The engine knows no metric of a stage by name: it finds metrics by the roles that stages declare.

use std::collections::BTreeSet;
use std::path::Path;

use crate::source::sources;

/// Strings of the form `group/name` in the code of a crate, without tests. Metrics in the group `perf` are the engine's.
fn metric_names(package: &str) -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = sources(root).into_iter();
    let own = own.filter(|(path, _)| path.starts_with(package));
    let mut names = BTreeSet::new();
    for (_, text) in own {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            let strings = line.split('"').skip(1).step_by(2);
            names.extend(strings.filter(|text| is_metric(text)).map(str::to_owned));
        }
    }
    names
}

fn is_metric(text: &str) -> bool {
    let is_word = |word: &str| {
        !word.is_empty()
            && word
                .chars()
                .all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
    };
    text.split_once('/')
        .is_some_and(|(group, name)| group != "perf" && is_word(group) && is_word(name))
}

#[test]
fn the_engine_has_no_names_of_metrics() {
    let declared = metric_names("verl-stages/");
    for known in ["actor/loss", "reward/mean", "response/truncated_share"] {
        assert!(declared.contains(known), "{known} is not in {declared:?}");
    }
    let engine = metric_names("verl-pipe/");
    let both: Vec<_> = engine.intersection(&declared).collect();
    assert!(
        both.is_empty(),
        "verl-pipe has {both:?}; give these metrics a role"
    );
}
