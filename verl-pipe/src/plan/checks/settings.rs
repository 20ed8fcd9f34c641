//! Settings of stages, models and data sets make sense: what their own configuration refuses or doubts.

use crate::diagnostic::Diagnostic;
use crate::plan::build::Draft;
use crate::stage::ConfigError;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for stage in draft.stages {
        let place = format!("stage `{}` ({})", stage.decl.name, stage.decl.kind);
        findings.extend(stage.errors.iter().map(|error| refused(&place, error)));
        let doubts = stage.spec.iter().flat_map(|spec| &spec.doubts);
        findings.extend(doubts.map(|doubt| doubted(&place, doubt)));
    }
    for (model, info) in draft.pipe.models.iter().zip(draft.models) {
        let place = format!("[models.{}] ({})", model.name, model.kind);
        findings.extend(
            info.as_ref()
                .err()
                .into_iter()
                .flatten()
                .map(|error| refused(&place, error)),
        );
    }
    for data in &draft.pipe.data {
        let place = format!("[data.{}] ({})", data.name, data.kind);
        let errors = (data.check)(draft.context).err().into_iter().flatten();
        findings.extend(errors.map(|error| refused(&place, &error)));
    }
}

fn refused(place: &str, error: &ConfigError) -> Diagnostic {
    Diagnostic::error(
        "C005",
        format!("`{}` cannot be used as it is set", error.setting),
    )
    .at(place)
    .because(error.to_string())
    .help(error.help.clone())
}

fn doubted(place: &str, doubt: &ConfigError) -> Diagnostic {
    Diagnostic::warning(
        "C008",
        format!("`{}` is probably not meant as it is set", doubt.setting),
    )
    .at(place)
    .because(doubt.to_string())
    .help(doubt.help.clone())
}
