//! Settings of `[trace]` are valid for this run: existing steps, sizes above 0, rules that can fire.

use verl_rules::config::{RuleSetting, TraceConfig};
use verl_rules::{BuiltIn, LimitUnit, RULES, RuleDecl, RuleInputs, RuleSeverity};
use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::stage::{Cadence, ConfigError, MetricRole};

use super::settings::{setting_error, setting_warning, stage_place};
use crate::build::Draft;

const PLACE: &str = "[trace]";

const OFF: &str = "`severity = \"off\"` disables the rule";

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let trace = &draft.pipe.trace;
    let mut problems = Problems::default();
    steps(trace, draft.pipe.run.steps, &mut problems);
    observers(draft, &mut problems, findings);
    sizes(trace, draft.pipe.records_in_full(), &mut problems);
    for rule in RULES {
        if let Some(setting) = trace.rules.get(rule.name) {
            check_tuning(&Tunable::from(rule), *setting, trace.stats, &mut problems);
            if trace.stats && draft.complete() && !is_off(*setting) {
                problems.warnings.extend(never_fires(rule, draft));
            }
        }
    }
    for rule in &draft.pipe.rules {
        if let Some(setting) = trace.rules.get(&rule.name) {
            check_tuning(&Tunable::from(rule), *setting, trace.stats, &mut problems);
        }
    }
    findings.extend(
        problems
            .errors
            .iter()
            .map(|error| setting_error(PLACE, error)),
    );
    findings.extend(
        problems
            .warnings
            .iter()
            .map(|warning| setting_warning(PLACE, warning)),
    );
}

#[derive(Default)]
struct Problems {
    errors: Vec<ConfigError>,
    warnings: Vec<ConfigError>,
}

fn steps(trace: &TraceConfig, last: u64, problems: &mut Problems) {
    let listed = |steps: Vec<u64>| {
        let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
        steps.join(", ")
    };
    let outside = trace.steps.iter().filter(|step| !(1..=last).contains(step));
    let outside: Vec<u64> = outside.copied().collect();
    if !outside.is_empty() {
        problems.errors.push(ConfigError::new(
            "steps",
            format!(
                "contains {}, but the run has steps 1 to {last}",
                listed(outside)
            ),
            "use steps of the run (`trace.steps`, `--debug-trace-step`), or raise `run.steps`",
        ));
    }
    let mut twice: Vec<u64> = Vec::new();
    for (at, step) in trace.steps.iter().enumerate() {
        if trace.steps[..at].contains(step) && !twice.contains(step) {
            twice.push(*step);
        }
    }
    if !twice.is_empty() {
        problems.warnings.push(ConfigError::new(
            "steps",
            format!("contains {} more than once", listed(twice)),
            "remove the duplicate, or replace it with the intended step",
        ));
    }
    match trace.every {
        Some(0) => problems.warnings.push(ConfigError::new(
            "every",
            "is 0, so no step is recorded",
            "remove it, or set it to a number of steps above 0",
        )),
        Some(every) if every > last => problems.warnings.push(ConfigError::new(
            "every",
            format!("is {every}, but the run has {last} steps, so no step is recorded"),
            format!(
                "set it to {last} or less (`trace.every`, `--debug-trace-every`), or remove it"
            ),
        )),
        _ => {}
    }
    if !trace.stages.is_empty() && !trace.captures() {
        let names = quoted(trace.stages.iter().map(String::as_str));
        problems.warnings.push(ConfigError::new(
            "stages",
            format!("contains {names}, but no step is recorded in full"),
            "select steps with `steps` or `every` (`every = 1` for all), or remove `stages`",
        ));
    }
}

/// Reports stages that are to be recorded but get no rows, at the setting that selects them.
fn observers(draft: &Draft<'_>, problems: &mut Problems, findings: &mut Vec<Diagnostic>) {
    let observers = || {
        let declared = draft.stages.iter().filter(|stage| {
            let spec = stage.spec.as_ref();
            spec.is_some_and(|spec| spec.cadence != Cadence::Step)
        });
        declared.map(|stage| stage.decl)
    };
    let no_rows = "a stage that runs between steps gets no rows, so it is not recorded";
    let measures = "its measurements are in metrics.jsonl and samples.jsonl";
    let listed = observers().filter(|decl| draft.pipe.trace.stages.contains(&decl.name));
    let names = quoted(listed.map(|decl| decl.name.as_str()));
    if !names.is_empty() {
        problems.warnings.push(ConfigError::new(
            "stages",
            format!("contains {names}: {no_rows}"),
            format!("use stages that run in a step; {measures}"),
        ));
    }
    findings.extend(observers().filter(|decl| decl.debug).map(|decl| {
        let warning = ConfigError::new(
            "debug",
            format!("is set, but {no_rows}"),
            format!("remove it; {measures}"),
        );
        setting_warning(&stage_place(decl), &warning)
    }));
}

fn sizes(trace: &TraceConfig, in_full: bool, problems: &mut Problems) {
    let has_flight_recorder = trace.stats && trace.ring_steps > 0;
    let mut above_0 = |setting: &str, why: &str, help: &str| {
        let reason = format!("is 0, {why}");
        problems
            .errors
            .push(ConfigError::new(setting, reason, help));
    };
    if trace.part_steps == 0 {
        above_0(
            "part_steps",
            "so a statistics file would contain no steps",
            "set it to a number of steps above 0 (default: 32)",
        );
    }
    if trace.budget_mb == 0 && (in_full || has_flight_recorder) {
        let why = match in_full {
            true => "so no requested step could be recorded",
            false => "so no step of the flight recorder could be stored",
        };
        above_0(
            "budget_mb",
            why,
            "set it to megabytes above 0; to record no steps, remove `steps`, `every` and the stages' `debug`, and set `ring_steps = 0`",
        );
    }
    if trace.ring_mb == 0 && has_flight_recorder {
        above_0(
            "ring_mb",
            "so the flight recorder could store nothing",
            "set it to megabytes above 0, or set `ring_steps = 0` to disable the flight recorder",
        );
    }
}

/// The properties of a rule that settings can tune.
struct Tunable<'a> {
    name: &'a str,
    severity: RuleSeverity,
    limit: f64,
    /// Unit of the limit; custom rules have none.
    unit: Option<LimitUnit>,
}

impl<'a> From<&'a BuiltIn> for Tunable<'a> {
    fn from(rule: &'a BuiltIn) -> Self {
        Tunable {
            name: rule.name,
            severity: rule.severity,
            limit: rule.limit,
            unit: Some(rule.unit),
        }
    }
}

impl<'a> From<&'a RuleDecl> for Tunable<'a> {
    fn from(rule: &'a RuleDecl) -> Self {
        Tunable {
            name: &rule.name,
            severity: rule.severity,
            limit: rule.limit,
            unit: None,
        }
    }
}

/// Reports invalid settings of a rule.
fn check_tuning(rule: &Tunable<'_>, setting: RuleSetting, stats: bool, problems: &mut Problems) {
    let name = rule.name;
    if let Some(limit) = setting.limit {
        let key = format!("rules.{name}.limit");
        let why = match limit {
            limit if limit.is_nan() => {
                Some("is not a number, so the rule would fire always or never".to_owned())
            }
            limit if limit < 0.0 => Some(match rule.unit {
                Some(_) => format!("is {limit}, but the rule measures no values below 0"),
                None => format!("is {limit}, but a limit must not be below 0"),
            }),
            limit if limit.is_infinite() => {
                Some("is infinite, so the rule would fire always or never".to_owned())
            }
            limit => rule
                .unit
                .filter(|unit| unit.is_share() && limit > 1.0)
                .map(|unit| format!("is {limit}, but it is a {unit}, which is at most 1")),
        };
        match why {
            Some(why) => problems.errors.push(ConfigError::new(
                key,
                why,
                match rule.unit {
                    Some(unit) => format!("set it in {unit} (default: {}); {OFF}", rule.limit),
                    None => format!("set it to 0 or more (default: {}); {OFF}", rule.limit),
                },
            )),
            None if setting.severity == Some(RuleSeverity::Off) => {
                problems.warnings.push(ConfigError::new(
                    key,
                    format!("is {limit}, but the rule is off"),
                    "remove either `limit` or `severity`",
                ))
            }
            None => {}
        }
    }
    if stats || is_off(setting) {
        return;
    }
    let severity = setting.severity.unwrap_or(rule.severity);
    let word = match severity {
        RuleSeverity::Stop => "stop the run",
        _ => "warn",
    };
    let error = ConfigError::new(
        format!("rules.{name}"),
        format!("is set to {word}, but `stats = false` disables the statistics that rules need"),
        "remove `stats`, or the rule",
    );
    match severity {
        // The stop would not protect the run.
        RuleSeverity::Stop => problems.errors.push(error),
        _ => problems.warnings.push(error),
    }
}

fn is_off(setting: RuleSetting) -> bool {
    setting.severity == Some(RuleSeverity::Off)
}

/// Warns about a rule that is tuned although no stage produces what it checks.
fn never_fires(rule: &BuiltIn, draft: &Draft<'_>) -> Option<ConfigError> {
    let mut specs = draft.stages.iter().flat_map(|stage| &stage.spec);
    let (found, what, wanted) = match rule.rule_inputs {
        RuleInputs::Anything => return None,
        RuleInputs::Keys(keys) => {
            let written = |name: &str| keys.contains(&name);
            let found = specs.any(|spec| spec.writes.iter().any(|field| written(&field.name)));
            let names = keys.iter().map(|name| format!("`{name}`"));
            (found, "writes", names.collect::<Vec<_>>())
        }
        RuleInputs::Metrics(roles) => {
            let recorded =
                |role: Option<MetricRole>| role.is_some_and(|role| roles.contains(&role));
            let found = specs.any(|spec| spec.metrics.iter().any(|metric| recorded(metric.role)));
            let roles = roles.iter().map(MetricRole::to_string);
            (found, "records", roles.collect())
        }
    };
    (!found).then(|| {
        ConfigError::new(
            format!("rules.{}", rule.name),
            format!("can never fire: no stage declares that it {what} {}", wanted.join(" or ")),
            "remove the rule, or add a stage that computes what it checks (`pipe schema --format md` lists these stages)",
        )
    })
}
