//! Settings of `[trace]` make sense in this run: steps that it has, sizes that hold something, rules that can fire.

use super::settings::{doubted, refused, stage_place};
use crate::diagnostic::{Diagnostic, quoted};
use crate::plan::build::Draft;
use crate::stage::{Cadence, ConfigError};
use crate::trace::config::{RuleSetting, TraceConfig};
use crate::trace::rules::{BuiltIn, LooksAt, RULES, RuleDecl, Severity};

const PLACE: &str = "[trace]";

const OFF: &str = "`severity = \"off\"` silences the rule";

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let trace = &draft.pipe.trace;
    let mut told = Told::default();
    steps(trace, draft.pipe.run.steps, &mut told);
    observers(draft, &mut told, findings);
    sizes(trace, draft.pipe.records_in_full(), &mut told);
    for rule in RULES {
        if let Some(setting) = trace.rules.get(rule.name) {
            tuned(&Tunable::from(rule), *setting, trace.stats, &mut told);
            if trace.stats && draft.complete() && !is_off(*setting) {
                told.doubts.extend(blind(rule, draft));
            }
        }
    }
    for rule in &draft.pipe.rules {
        if let Some(setting) = trace.rules.get(&rule.name) {
            tuned(&Tunable::from(rule), *setting, trace.stats, &mut told);
        }
    }
    findings.extend(told.faults.iter().map(|error| refused(PLACE, error)));
    findings.extend(told.doubts.iter().map(|doubt| doubted(PLACE, doubt)));
}

#[derive(Default)]
struct Told {
    faults: Vec<ConfigError>,
    doubts: Vec<ConfigError>,
}

fn steps(trace: &TraceConfig, last: u64, told: &mut Told) {
    let listed = |steps: Vec<u64>| {
        let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
        steps.join(", ")
    };
    let outside = trace.steps.iter().filter(|step| !(1..=last).contains(step));
    let outside: Vec<u64> = outside.copied().collect();
    if !outside.is_empty() {
        told.faults.push(ConfigError::new(
            "steps",
            format!(
                "names {}, but the run has the steps 1 to {last}",
                listed(outside)
            ),
            "name steps of the run (`trace.steps`, `--debug-trace-step`), or raise `run.steps`",
        ));
    }
    let mut twice: Vec<u64> = Vec::new();
    for (at, step) in trace.steps.iter().enumerate() {
        if trace.steps[..at].contains(step) && !twice.contains(step) {
            twice.push(*step);
        }
    }
    if !twice.is_empty() {
        told.doubts.push(ConfigError::new(
            "steps",
            format!("names {} more than once", listed(twice)),
            "name a step once; another one may have been meant",
        ));
    }
    match trace.every {
        Some(0) => told.doubts.push(ConfigError::new(
            "every",
            "is 0, which records no step",
            "leave it out, or set it to a number of steps above 0",
        )),
        Some(every) if every > last => told.doubts.push(ConfigError::new(
            "every",
            format!("is {every}, but the run has {last} steps, so no step is recorded by it"),
            format!(
                "set it to {last} or less (`trace.every`, `--debug-trace-every`), or leave it out"
            ),
        )),
        _ => {}
    }
    if !trace.stages.is_empty() && !trace.captures() {
        let names = quoted(trace.stages.iter().map(String::as_str));
        told.doubts.push(ConfigError::new(
            "stages",
            format!("names {names}, but no step is recorded in full"),
            "say which steps with `steps` or `every` (`every = 1` for all), or leave `stages` out",
        ));
    }
}

/// Stages that are to be recorded and are given no rows, each told where it is named.
fn observers(draft: &Draft<'_>, told: &mut Told, findings: &mut Vec<Diagnostic>) {
    let observers = || {
        let declared = draft.stages.iter().filter(|stage| {
            let spec = stage.spec.as_ref();
            spec.is_some_and(|spec| spec.cadence != Cadence::Step)
        });
        declared.map(|stage| stage.decl)
    };
    let no_rows = "what runs between steps is given no rows, so nothing of it is recorded";
    let measures = "what it measures is in metrics.jsonl and samples.jsonl";
    let listed = observers().filter(|decl| draft.pipe.trace.stages.contains(&decl.name));
    let names = quoted(listed.map(|decl| decl.name.as_str()));
    if !names.is_empty() {
        told.doubts.push(ConfigError::new(
            "stages",
            format!("names {names}: {no_rows}"),
            format!("name stages of the step; {measures}"),
        ));
    }
    findings.extend(observers().filter(|decl| decl.debug).map(|decl| {
        let doubt = ConfigError::new(
            "debug",
            format!("is set, but {no_rows}"),
            format!("leave it out; {measures}"),
        );
        doubted(&stage_place(decl), &doubt)
    }));
}

fn sizes(trace: &TraceConfig, in_full: bool, told: &mut Told) {
    let flies = trace.stats && trace.ring_steps > 0;
    let mut above_0 = |setting: &str, why: &str, help: &str| {
        let reason = format!("is 0, {why}");
        told.faults.push(ConfigError::new(setting, reason, help));
    };
    if trace.part_steps == 0 {
        above_0(
            "part_steps",
            "so that a file of statistics would hold no step",
            "set it to a number of steps above 0; 32 by default",
        );
    }
    if trace.budget_mb == 0 && (in_full || flies) {
        let why = match in_full {
            true => "so that no step that is asked for would be recorded",
            false => "so that no step of the flight recorder would be kept",
        };
        above_0(
            "budget_mb",
            why,
            "set it to megabytes above 0; to keep no step at all, leave out `steps` and `every`, mark no stage with `debug`, and set `ring_steps = 0`",
        );
    }
    if trace.ring_mb == 0 && flies {
        above_0(
            "ring_mb",
            "so that the flight recorder would hold nothing",
            "set it to megabytes above 0; to do without the flight recorder set `ring_steps = 0`",
        );
    }
}

/// What of a rule can be tuned.
struct Tunable<'a> {
    name: &'a str,
    severity: Severity,
    limit: f64,
    /// Of the limit; a rule of one's own tells none.
    unit: Option<&'a str>,
    is_share: bool,
}

impl<'a> From<&'a BuiltIn> for Tunable<'a> {
    fn from(rule: &'a BuiltIn) -> Self {
        Tunable {
            name: rule.name,
            severity: rule.severity,
            limit: rule.limit,
            unit: Some(rule.unit),
            is_share: rule.is_share(),
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
            is_share: false,
        }
    }
}

/// What is wrong with how a rule is tuned.
fn tuned(rule: &Tunable<'_>, setting: RuleSetting, stats: bool, told: &mut Told) {
    let name = rule.name;
    if let Some(limit) = setting.limit {
        let key = format!("rules.{name}.limit");
        let why = match limit {
            limit if limit.is_nan() => {
                Some("is not a number, so that it would fire always or never".to_owned())
            }
            limit if limit < 0.0 => Some(match rule.unit {
                Some(_) => format!("is {limit}, but nothing that the rule measures lies below 0"),
                None => format!("is {limit}, but a limit is not below 0"),
            }),
            limit if limit.is_infinite() => {
                Some("is infinite, so that it would fire always or never".to_owned())
            }
            limit if rule.is_share && limit > 1.0 => Some(format!(
                "is {limit}, but it is a {}, which is 1 at most",
                rule.unit.unwrap_or("share")
            )),
            _ => None,
        };
        match why {
            Some(why) => told.faults.push(ConfigError::new(
                key,
                why,
                match rule.unit {
                    Some(unit) => format!("it is told in {unit}, {} by default; {OFF}", rule.limit),
                    None => format!("it is {} by default; {OFF}", rule.limit),
                },
            )),
            None if setting.severity == Some(Severity::Off) => told.doubts.push(ConfigError::new(
                key,
                format!("is {limit}, but the rule is off"),
                "leave out either `limit` or `severity`",
            )),
            None => {}
        }
    }
    if stats || is_off(setting) {
        return;
    }
    let severity = setting.severity.unwrap_or(rule.severity);
    let word = match severity {
        Severity::Stop => "stop the run",
        _ => "warn",
    };
    let error = ConfigError::new(
        format!("rules.{name}"),
        format!("is to {word}, but `stats = false` takes away the statistics that rules look at"),
        "leave out `stats`, or the rule",
    );
    match severity {
        // Whoever counts on the stop has no protection.
        Severity::Stop => told.faults.push(error),
        _ => told.doubts.push(error),
    }
}

fn is_off(setting: RuleSetting) -> bool {
    setting.severity == Some(Severity::Off)
}

/// A rule that is tuned although nothing that it looks at exists.
fn blind(rule: &BuiltIn, draft: &Draft<'_>) -> Option<ConfigError> {
    let mut specs = draft.stages.iter().flat_map(|stage| &stage.spec);
    let (found, what, wanted) = match rule.looks_at {
        LooksAt::Anything => return None,
        LooksAt::Keys(keys) => {
            let written = |name: &str| keys.contains(&name);
            let found = specs.any(|spec| spec.writes.iter().any(|field| written(&field.name)));
            (found, "writes", keys)
        }
        LooksAt::Metrics(metrics) => {
            let told = |name: &str| LooksAt::names_metric(metrics, name);
            let found = specs.any(|spec| spec.metrics.iter().any(|metric| told(metric.name)));
            (found, "records a metric", metrics)
        }
    };
    let names: Vec<String> = wanted.iter().map(|name| format!("`{name}`")).collect();
    (!found).then(|| {
        ConfigError::new(
            format!("rules.{}", rule.name),
            format!("can never fire as far as the stages tell: none {what} {}", names.join(" or ")),
            "leave the rule out, or let a stage compute what it looks at (`pipe schema --format md` lists who does)",
        )
    })
}
