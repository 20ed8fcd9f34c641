//! A model has the role that the stage requires.

use verl_words::diagnostic::{Diagnostic, quoted};

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let declared = || draft.pipe.models.iter().zip(draft.models);
    let role = |name: &str| {
        let (_, info) = declared().find(|(model, _)| model.name == name)?;
        let role = info.as_ref().ok()?.role;
        (!role.is_empty()).then_some(role)
    };
    for stage in draft.stages {
        for (model, wanted) in stage.spec.iter().flat_map(|spec| &spec.roles) {
            let Some(found) = role(model).filter(|found| found != wanted) else {
                continue;
            };
            let name = &stage.decl.name;
            let fitting: Vec<&str> = declared()
                .map(|(model, _)| model.name.as_str())
                .filter(|name| role(name) == Some(wanted))
                .collect();
            findings.push(
                Diagnostic::error(
                    "P022",
                    format!("`{name}` cannot use `{model}`, which is not a {wanted}"),
                )
                .at(format!("stage `{name}` -> [models.{model}]"))
                .because(format!("`{name}` needs a {wanted}, `{model}` is a {found}"))
                .help(match fitting.as_slice() {
                    [] => format!("declare a {wanted} in [models], and use it in `{name}`"),
                    names => format!(
                        "use another model in `{name}`: {}",
                        quoted(names.iter().copied())
                    ),
                }),
            );
        }
    }
}
