//! Settings of the run and of stages make sense; what a configuration itself refuses or doubts is told in its words.

use crate::diagnostic::Diagnostic;
use crate::pipe::StageDecl;
use crate::plan::build::Draft;
use crate::stage::ConfigError;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let deadline = draft.pipe.run.stage_deadline_s;
    // NaN is no time either.
    if deadline.is_nan() || deadline <= 0.0 {
        let error = ConfigError::new(
            "stage_deadline_s",
            format!("is {deadline}, so that no call of a stage would have time to end"),
            "set it to a number of seconds above 0",
        );
        findings.push(refused("[run]", &error));
    }
    let share = draft.pipe.run.max_failed_share;
    if !(0.0..=1.0).contains(&share) {
        let error = ConfigError::new(
            "max_failed_share",
            format!("is {share}, which is no share"),
            "set it to a number from 0 (no row may fail) to 1 (a step fails where all of its rows do)",
        );
        findings.push(refused("[run]", &error));
    }
    for stage in draft.stages {
        let place = stage_place(stage.decl);
        findings.extend(stage.errors.iter().map(|error| refused(&place, error)));
        let doubts = stage.spec.iter().flat_map(|spec| &spec.doubts);
        findings.extend(doubts.map(|doubt| doubted(&place, doubt)));
    }
}

/// A stage as the place of a finding about its settings.
pub(crate) fn stage_place(decl: &StageDecl) -> String {
    format!("stage `{}` ({})", decl.name, decl.kind)
}

/// What a configuration refuses.
pub(super) fn refused(place: &str, error: &ConfigError) -> Diagnostic {
    Diagnostic::error(
        "C005",
        format!("`{}` cannot be used as it is set", error.setting),
    )
    .at(place)
    .because(error.to_string())
    .help(error.help.clone())
}

/// What a configuration doubts.
pub(crate) fn doubted(place: &str, doubt: &ConfigError) -> Diagnostic {
    Diagnostic::warning(
        "C008",
        format!("`{}` is probably not meant as it is set", doubt.setting),
    )
    .at(place)
    .because(doubt.to_string())
    .help(doubt.help.clone())
}
