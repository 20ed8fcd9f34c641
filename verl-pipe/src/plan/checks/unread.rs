//! No key is written for nothing.
//!
//! Stages offer more keys than a pipeline needs (`generate` writes log-probs that only some algorithms read), so an
//! unread key is worth a word only where it shows a slip: when a stage writes keys and none of them is read, or when
//! the pipeline gave the key its name. Sources, and stages that update a model, have done their work anyway.

use crate::diagnostic::{Diagnostic, quoted};
use crate::plan::build::Draft;
use crate::stage::{Access, RowRule};

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    // With a stage that could not be built it is not known what is read.
    if !draft.complete() {
        return;
    }
    let read: std::collections::HashSet<&str> = draft
        .links
        .iter()
        .flatten()
        .map(|link| link.key.as_str())
        .collect();
    for stage in draft.stages.iter().filter(|stage| stage.in_step()) {
        let Some(spec) = &stage.spec else { continue };
        if spec.rows == RowRule::Source
            || spec
                .models
                .iter()
                .any(|(_, access)| *access == Access::Update)
        {
            continue;
        }
        let keys: Vec<&str> = spec
            .writes
            .iter()
            .map(|field| stage.key(&field.name))
            .collect();
        let idle = !keys.iter().any(|key| read.contains(key));
        let named = |key: &str| stage.decl.rename.values().any(|name| name == key);
        let unread: Vec<&str> = keys
            .into_iter()
            .filter(|key| !read.contains(key) && (idle || named(key)))
            .collect();
        if unread.is_empty() {
            continue;
        }
        let name = &stage.decl.name;
        findings.push(
            Diagnostic::warning(
                "P013",
                format!("no stage reads {}", quoted(unread.iter().copied())),
            )
            .at(format!("stage `{name}`"))
            .because(if idle {
                format!("nothing that `{name}` writes is read, so its work changes nothing")
            } else {
                "the pipeline gave the key its name, but no stage reads that name".to_owned()
            })
            .help(format!(
                "let a stage read {}, or remove it",
                quoted(unread.iter().copied())
            )),
        );
    }
}
