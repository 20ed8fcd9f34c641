//! Log-probs of frozen weights come from a model that no stage updates.

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::field::Weights;
use verl_words::stage::Access;

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for (key, by) in &draft.written {
        let Some(tag) = &by.field.tag else { continue };
        let (Some(model), Some(Weights::Frozen)) = (&tag.policy, tag.weights) else {
            continue;
        };
        let updaters = draft.stages.iter().filter(|stage| {
            let models = stage.spec.iter().flat_map(|spec| &spec.models);
            models
                .into_iter()
                .any(|(name, access)| name == model && *access == Access::Update)
        });
        let updaters = quoted(updaters.map(|stage| stage.decl.name.as_str()));
        if updaters.is_empty() {
            continue;
        }
        let writer = draft.name(by.stage);
        findings.push(
            Diagnostic::error("P018", format!("`{key}` are not computed with frozen weights"))
                .at(format!("stage `{writer}`, model `{model}`"))
                .because(format!(
                    "`{writer}` declares them as log-probs of weights that never change, but {updaters} trains `{model}`"
                ))
                .help(format!(
                    "declare a second model without an optimiser, for example [models.ref], and use it in `{writer}`"
                )),
        );
    }
}
