//! What a kind of stage declares: with its defaults, and what changes with one other setting.
//!
//! The keys of a stage follow from its settings, so they are asked of the stage itself. It is built with its defaults,
//! and once more for each other value that is known to exist: the other truth value, each word of a choice, each kind
//! of a part, and a number above 0 where the default is 0 or absent. Where the defaults alone make no stage, what is
//! missing is told, and the stage is asked with such values in the place of what is missing. Nothing is loaded and
//! nothing runs.

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::fill_slots;
use crate::field::Field;
use crate::pipe::StageDecl;
use crate::registry::{Kind, Registry};
use crate::schedule::batching::{BatchConfig, BatchPlan, DevicesConfig};
use crate::stage::{BuildContext, Metric, RowRule, StageSpec};

/// Samples of a prompt that stages are documented with, tried in order: some parts take pairs alone.
const SAMPLES: [usize; 3] = [4, 2, 1];

/// One setting that differs from the default.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The setting; with a part's setting, both with a dot between.
    pub setting: String,
    /// Its value.
    pub value: Value,
}

/// What a kind of stage declares.
#[derive(Debug, Clone)]
pub struct Declared {
    /// With the default settings, and with those of `set` where the defaults alone make no stage.
    pub default: Option<StageSpec>,
    /// Why the defaults alone make no stage.
    pub missing: Vec<String>,
    /// What was set since it is missing.
    pub set: Vec<Change>,
    /// What expands rows does so by `batch.samples`.
    pub by_samples: bool,
    /// With one other setting, where a stage can be built with it.
    pub changed: Vec<(Change, StageSpec)>,
}

/// How a stage uses a key, or whether it records a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// In any case.
    Always,
    /// Where some stage writes the key.
    WhereWritten,
    /// Not at all.
    Not,
}

impl Use {
    /// In words.
    pub fn word(self) -> &'static str {
        match self {
            Use::Always => "always",
            Use::WhereWritten => "where written",
            Use::Not => "not",
        }
    }
}

/// Something that a stage declares, and with which settings.
#[derive(Debug, Clone)]
pub struct Seen<T> {
    /// What it declares.
    pub item: T,
    /// How it is used with the defaults.
    pub by_default: Use,
    /// The other settings with which that changes, and how it is used then.
    pub with: Vec<(Change, Use)>,
}

impl Declared {
    /// A kind of stage of `registry` with its defaults, and with each other value of a setting.
    pub fn of(kind: &Kind<StageDecl>, registry: &Registry) -> Declared {
        Self::with(kind, &Map::new(), None, registry)
    }

    /// A kind of stage with `settings`; of these, the part in `part` is varied where one is named, else the stage.
    pub(crate) fn with(
        kind: &Kind<StageDecl>,
        settings: &Map<String, Value>,
        part: Option<&str>,
        registry: &Registry,
    ) -> Declared {
        let (settings, missing, set) = with_missing(kind, settings, part, registry);
        let built = build(kind, &settings, registry).ok();
        let by_samples = built
            .as_ref()
            .is_some_and(|(spec, samples)| *samples > 1 && spec.rows == RowRule::Expand(*samples))
            && build_at(kind, &settings, 3, registry)
                .is_ok_and(|spec| spec.rows == RowRule::Expand(3));
        let changed = changes(kind, &settings, part, registry)
            .into_iter()
            .filter_map(|(change, settings)| {
                let (spec, _) = build(kind, &settings, registry).ok()?;
                Some((change, spec))
            })
            .collect();
        Declared {
            default: built.map(|(spec, _)| spec),
            missing: missing.into_iter().map(|lack| lack.reason).collect(),
            set,
            by_samples,
            changed,
        }
    }

    /// Keys that are read.
    pub fn reads(&self) -> Vec<Seen<Field>> {
        let keys = |spec: &StageSpec| {
            let needed = spec.reads.iter().map(|field| (field.clone(), Use::Always));
            let optional = spec.reads_optional.iter();
            let optional = optional.map(|field| (field.clone(), Use::WhereWritten));
            needed.chain(optional).collect()
        };
        self.seen(keys, |field| &field.name)
    }

    /// Keys that are written.
    pub fn writes(&self) -> Vec<Seen<Field>> {
        let keys = |spec: &StageSpec| {
            let all = spec.writes.iter();
            all.map(|field| (field.clone(), Use::Always)).collect()
        };
        self.seen(keys, |field| &field.name)
    }

    /// Metrics that are recorded.
    pub fn metrics(&self) -> Vec<Seen<Metric>> {
        let metrics = |spec: &StageSpec| {
            let all = spec.metrics.iter();
            all.map(|metric| (*metric, Use::Always)).collect()
        };
        self.seen(metrics, |metric| metric.name)
    }

    /// Everything of one sort that is declared with any of the settings, that of the defaults first.
    fn seen<T: Clone>(
        &self,
        items: impl Fn(&StageSpec) -> Vec<(T, Use)>,
        name: impl Fn(&T) -> &str,
    ) -> Vec<Seen<T>> {
        let mut all: Vec<Seen<T>> = Vec::new();
        let mut add = |item: T, by_default| {
            if !all.iter().any(|known| name(&known.item) == name(&item)) {
                all.push(Seen {
                    item,
                    by_default,
                    with: Vec::new(),
                });
            }
        };
        if let Some(spec) = &self.default {
            items(spec)
                .into_iter()
                .for_each(|(item, used)| add(item, used));
        }
        for (_, spec) in &self.changed {
            items(spec)
                .into_iter()
                .for_each(|(item, _)| add(item, Use::Not));
        }
        for (change, spec) in &self.changed {
            let here = items(spec);
            for known in &mut all {
                let found = here
                    .iter()
                    .find(|(item, _)| name(item) == name(&known.item));
                let used = found.map_or(Use::Not, |(_, used)| *used);
                if used != known.by_default {
                    known.with.push((change.clone(), used));
                }
            }
        }
        all
    }
}

/// Why settings make no stage.
struct Lack {
    setting: String,
    reason: String,
}

/// The settings with a value for each that is lacking, where one can be thought of; what was lacking; what was set.
fn with_missing(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    part: Option<&str>,
    registry: &Registry,
) -> (Map<String, Value>, Vec<Lack>, Vec<Change>) {
    let (mut filled, mut set) = (settings.clone(), Vec::new());
    let mut missing: Vec<Lack> = Vec::new();
    while let Err(lacks) = build(kind, &filled, registry) {
        let before = set.len();
        for lack in lacks {
            let known = |change: &Change| change.setting == lack.setting;
            if set.iter().any(known) {
                continue;
            }
            let mut changes = changes(kind, &filled, part, registry).into_iter();
            if let Some((change, changed)) = changes.find(|(change, _)| known(change)) {
                filled = changed;
                set.push(change);
            }
            if !missing.iter().any(|known| known.reason == lack.reason) {
                missing.push(lack);
            }
        }
        // A fault that no value mends would be told for ever.
        if set.len() == before {
            break;
        }
    }
    (filled, missing, set)
}

/// What the stage declares, with the first number of samples that it takes, and that number.
fn build(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    registry: &Registry,
) -> Result<(StageSpec, usize), Vec<Lack>> {
    let mut first = None;
    for samples in SAMPLES {
        match build_at(kind, settings, samples, registry) {
            Ok(spec) => return Ok((spec, samples)),
            Err(faults) => drop(first.get_or_insert(faults)),
        }
    }
    Err(first.unwrap_or_default())
}

fn build_at(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    samples: usize,
    registry: &Registry,
) -> Result<StageSpec, Vec<Lack>> {
    let decl = declare(kind, settings, registry)?;
    let stage = (decl.build)(&context(&decl.config, samples)).map_err(|errors| {
        let lacks = errors.into_iter().map(|error| Lack {
            reason: format!("{error}; {}", error.help),
            setting: error.setting,
        });
        lacks.collect::<Vec<_>>()
    })?;
    Ok(stage.spec())
}

fn declare(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    registry: &Registry,
) -> Result<StageDecl, Vec<Lack>> {
    let settings = Value::Object(settings.clone());
    let decoded = registry.reading(|| (kind.declare)(kind.name, settings));
    let faults = decoded.faults.iter().map(|fault| Lack {
        setting: fault.path().join("."),
        reason: fault.to_string(),
    });
    match decoded.value {
        Some(decl) if decoded.faults.is_empty() => Ok(decl),
        _ => Err(faults.collect()),
    }
}

/// A pipeline that declares every model and data set that the settings could name.
fn context(config: &Value, samples: usize) -> BuildContext {
    let sizes = BatchConfig {
        samples,
        ..BatchConfig::default()
    };
    let (batch, _) = BatchPlan::estimate(&sizes, &DevicesConfig::default(), None);
    let mut names = Vec::new();
    texts(config, &mut names);
    BuildContext {
        batch,
        steps: 1,
        models: names.clone(),
        data: names,
        ..BuildContext::default()
    }
}

fn texts(value: &Value, out: &mut Vec<String>) {
    match value {
        Value::String(text) => out.push(text.clone()),
        Value::Array(list) => list.iter().for_each(|value| texts(value, out)),
        Value::Object(map) => map.values().for_each(|value| texts(value, out)),
        _ => {}
    }
}

/// The settings with one of them changed, for each change that can be thought of.
fn changes(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    part: Option<&str>,
    registry: &Registry,
) -> Vec<(Change, Map<String, Value>)> {
    let (schema, definitions) = settings_of(kind, registry);
    let mut out = Vec::new();
    let varied = match part {
        None => schema["properties"].clone(),
        Some(setting) => {
            let named = settings[setting]["kind"].as_str().unwrap_or_default();
            let slot = definition(&schema["properties"][setting], &definitions);
            kind_of_slot(slot, named)["properties"].clone()
        }
    };
    for (name, property) in varied.as_object().into_iter().flatten() {
        for value in others(property, &definitions) {
            let mut changed = settings.clone();
            let table = match part {
                None => Some(&mut changed),
                Some(setting) => changed.get_mut(setting).and_then(Value::as_object_mut),
            };
            if let Some(table) = table {
                table.insert(name.clone(), value.clone());
            }
            let setting = part.map_or_else(|| name.clone(), |part| format!("{part}.{name}"));
            out.push((Change { setting, value }, changed));
        }
    }
    out
}

/// The schema of a kind's settings and the definitions that it refers to.
pub(crate) fn settings_of<D>(kind: &Kind<D>, registry: &Registry) -> (Value, Map<String, Value>) {
    let mut generator = SchemaGenerator::default();
    let schema = (kind.schema)(&mut generator).to_value();
    fill_slots(registry, &mut generator);
    (schema, generator.take_definitions(true))
}

/// What a property refers to, through `$ref` and past `null`; the property itself where it refers to nothing.
pub(crate) fn definition<'a>(
    property: &'a Value,
    definitions: &'a Map<String, Value>,
) -> &'a Value {
    let referred = property["$ref"]
        .as_str()
        .and_then(|text| text.strip_prefix("#/$defs/"));
    if let Some(found) = referred.and_then(|name| definitions.get(name)) {
        return found;
    }
    let any_of = property["anyOf"].as_array().into_iter().flatten();
    let mut rest = any_of.filter(|choice| choice["type"] != "null");
    match (rest.next(), rest.next()) {
        (Some(only), None) => definition(only, definitions),
        _ => property,
    }
}

/// The schema of kind `name` of a slot.
pub(crate) fn kind_of_slot<'a>(slot: &'a Value, name: &str) -> &'a Value {
    let mut kinds = slot["oneOf"].as_array().into_iter().flatten();
    kinds
        .find(|kind| kind["properties"]["kind"]["const"] == name)
        .unwrap_or(&Value::Null)
}

/// The words that a property may be: of a choice, or kinds of a slot that need no settings.
pub(crate) fn words(schema: &Value) -> Vec<&str> {
    let own = schema["enum"].as_array().into_iter().flatten();
    let own = own.chain(schema.get("const")).filter_map(Value::as_str);
    let inner = ["oneOf", "anyOf"].into_iter();
    let inner = inner.flat_map(|key| schema[key].as_array().into_iter().flatten());
    let inner = inner.filter(|choice| choice["type"] != "object");
    own.chain(inner.flat_map(words)).collect()
}

/// Values of a property other than its default, one for each thing that it could mean.
fn others(property: &Value, definitions: &Map<String, Value>) -> Vec<Value> {
    let default = &property["default"];
    let meant = definition(property, definitions);
    let is = |name: &str| {
        meant["type"] == name
            || meant["type"]
                .as_array()
                .is_some_and(|types| types.iter().any(|word| word == name))
    };
    let none = default.is_null() || default.as_f64() == Some(0.0);
    let values = match words(meant) {
        words if !words.is_empty() => words.into_iter().map(Value::from).collect(),
        _ if is("boolean") => vec![json!(true), json!(false)],
        _ if is("integer") && none => vec![json!(1)],
        _ if is("number") && none => vec![json!(0.5)],
        _ if is("string") && property.get("default").is_none() => vec![json!("text")],
        _ => Vec::new(),
    };
    let mut values: Vec<Value> = values;
    values.retain(|value| value != default && *value != default["kind"]);
    values
}

/// The kind of stage `stage` and each of its settings that holds a part of `slot`.
pub(crate) fn holders<'a>(
    slot: &'a str,
    registry: &'a Registry,
) -> impl Iterator<Item = (&'a Kind<StageDecl>, String)> + 'a {
    let reference = format!("#/$defs/{slot}");
    registry.stages().iter().flat_map(move |kind| {
        let schema = section_of(kind);
        let properties = schema["properties"]
            .as_object()
            .cloned()
            .unwrap_or_default();
        let reference = reference.clone();
        let holding = properties
            .into_iter()
            .filter(move |(_, property)| property["$ref"] == reference.as_str());
        holding.map(move |(setting, _)| (kind, setting))
    })
}

fn section_of(kind: &Kind<StageDecl>) -> Value {
    (kind.schema)(&mut SchemaGenerator::default()).to_value()
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::batch::Batch;
    use crate::keys::{ENTROPIES, PROMPTS, RESPONSES, REWARDS, VALUES};
    use crate::stage::{ConfigError, Stage, StageConfig, StageContext, StageError};

    #[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
    #[serde(rename_all = "snake_case")]
    enum Side {
        #[default]
        Left,
        Right,
    }

    /// Reads and writes what its settings say.
    #[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    struct Moody {
        more: bool,
        side: Side,
        coef: f64,
        limit: Option<usize>,
        word: String,
    }

    struct Mood(Moody, usize);

    impl StageConfig for Moody {
        const KIND: &'static str = "moody";
        const SUMMARY: &'static str = "reads what it likes";
        fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
            if self.limit.is_some() && self.side == Side::Left {
                return Err(vec![ConfigError::new(
                    "limit",
                    "is for the right",
                    "remove it",
                )]);
            }
            Ok(Box::new(Mood(self.clone(), context.batch.samples)))
        }
    }

    impl Stage for Mood {
        fn spec(&self) -> StageSpec {
            let mut spec = StageSpec::new().writes(REWARDS);
            if self.0.side == Side::Left {
                spec = spec.reads(PROMPTS).rows(RowRule::Expand(self.1));
            } else {
                spec = spec.reads(RESPONSES);
            }
            if self.0.more {
                spec = spec.writes(ENTROPIES);
            }
            if self.0.coef > 0.0 {
                spec = spec.reads_optional(VALUES);
            }
            spec
        }
        fn run(&mut self, _: Batch, _: &mut StageContext<'_>) -> Result<(), StageError> {
            Ok(())
        }
    }

    #[track_caller]
    fn check(seen: Vec<Seen<Field>>, expected: &[&str]) {
        let found: Vec<String> = seen
            .iter()
            .map(|seen| {
                let with = seen.with.iter();
                let with = with.map(|(change, used)| {
                    format!("; {} with {}={}", used.word(), change.setting, change.value)
                });
                let with: String = with.collect();
                format!("{} {}{with}", seen.item.name, seen.by_default.word())
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_stage_is_asked_with_every_setting() {
        let registry = Registry::new().stage::<Moody>();
        let kind = registry.stages().get("moody").unwrap();
        let declared = Declared::of(kind, &registry);
        assert!(declared.by_samples);
        check(
            declared.reads(),
            &[
                "prompts always; not with side=\"right\"",
                "responses not; always with side=\"right\"",
                "values not; where written with coef=0.5",
            ],
        );
        check(
            declared.writes(),
            &["rewards always", "entropies not; always with more=true"],
        );
        // What makes no stage is left out.
        let tried: Vec<&str> = declared
            .changed
            .iter()
            .map(|(change, _)| change.setting.as_str())
            .collect();
        assert_eq!(tried, ["more", "side", "coef"]);
    }
    /// Does nothing without a limit.
    #[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Needy {
        name: String,
        #[serde(default)]
        limit: usize,
    }

    impl StageConfig for Needy {
        const KIND: &'static str = "needy";
        const SUMMARY: &'static str = "needs a limit";
        fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
            if self.limit == 0 || !context.models.contains(&self.name) {
                return Err(vec![ConfigError::new("limit", "is 0", "set it")]);
            }
            Ok(Box::new(Mood(Moody::default(), 1)))
        }
    }

    #[test]
    fn what_is_missing_is_told_and_set() {
        let registry = Registry::new().stage::<Needy>();
        let kind = registry.stages().get("needy").unwrap();
        let declared = Declared::of(kind, &registry);
        assert_eq!(
            declared.missing,
            ["`name` must be set", "`limit` is 0; set it"]
        );
        let set: Vec<&str> = declared
            .set
            .iter()
            .map(|change| change.setting.as_str())
            .collect();
        assert_eq!(set, ["name", "limit"]);
        check(declared.reads(), &["prompts always"]);
    }
}
