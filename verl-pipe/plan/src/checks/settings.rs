//! Settings of the run and of stages are valid; a configuration's own errors and warnings are reported in its words.

use verl_declare::pipe::StageDecl;
use verl_words::diagnostic::Diagnostic;
use verl_words::stage::ConfigError;

use crate::build::{Draft, DraftStage};

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let run = &draft.pipe.run;
    for (name, deadline, nothing) in [
        (
            "stage_deadline_s",
            run.stage_deadline_s,
            "no call of a stage could finish in time",
        ),
        (
            "worker_deadline_s",
            run.worker_deadline_s,
            "every worker process would be lost at once",
        ),
    ] {
        // NaN is not a duration either.
        if deadline.is_nan() || deadline <= 0.0 {
            let error = ConfigError::new(
                name,
                format!("is {deadline}, so {nothing}"),
                "set it to a number of seconds above 0",
            );
            findings.push(setting_error("[run]", &error));
        }
    }
    if run.worker_deadline_s > 0.0 && run.worker_deadline_s < 0.1 {
        let error = ConfigError::new(
            "worker_deadline_s",
            format!(
                "is {}, in which no heartbeat can be relied on",
                run.worker_deadline_s
            ),
            "set it to at least 0.1 seconds",
        );
        findings.push(setting_error("[run]", &error));
    }
    if run.worker_snapshot_steps == 0 {
        let error = ConfigError::new(
            "worker_snapshot_steps",
            "is 0, but a snapshot is taken after at least 1 step",
            "set it to 1 for a snapshot after every step",
        );
        findings.push(setting_error("[run]", &error));
    }
    let share = draft.pipe.run.max_failed_share;
    if !(0.0..=1.0).contains(&share) {
        let error = ConfigError::new(
            "max_failed_share",
            format!("is {share}, which is not between 0 and 1"),
            "set it to a number from 0 (no row may fail) to 1 (a step fails only if all its rows fail)",
        );
        findings.push(setting_error("[run]", &error));
    }
    for stage in draft.stages {
        findings.extend(errors(stage));
        let place = stage_place(stage.decl);
        let warnings = stage.spec.iter().flat_map(|spec| &spec.warnings);
        findings.extend(warnings.map(|warning| setting_warning(&place, warning)));
    }
}

/// The findings about invalid settings of a stage.
pub(crate) fn errors(stage: &DraftStage<'_>) -> Vec<Diagnostic> {
    let place = stage_place(stage.decl);
    let errors = stage.errors.iter();
    errors.map(|error| setting_error(&place, error)).collect()
}

/// The stage as the place of a finding about its settings.
pub(crate) fn stage_place(decl: &StageDecl) -> String {
    format!("stage `{}` ({})", decl.name, decl.kind)
}

/// The finding about an invalid setting.
pub(super) fn setting_error(place: &str, error: &ConfigError) -> Diagnostic {
    Diagnostic::error("C005", format!("invalid setting `{}`", error.setting))
        .at(place)
        .because(error.to_string())
        .help(error.help.clone())
}

/// The finding about a setting that is valid but probably a mistake.
pub(crate) fn setting_warning(place: &str, warning: &ConfigError) -> Diagnostic {
    Diagnostic::warning(
        "C008",
        format!("setting `{}` is probably a mistake", warning.setting),
    )
    .at(place)
    .because(warning.to_string())
    .help(warning.help.clone())
}
