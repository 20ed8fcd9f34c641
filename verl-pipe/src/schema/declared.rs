//! What a kind of stage declares with its defaults, and how one other setting changes it.
//!
//! The keys of a stage depend on its settings, so they come from the stage itself. The stage is built with its
//! defaults, and again for each other known value: the other boolean, each word of a choice, each kind of a part, and a
//! number above 0 if the default is 0 or absent. If the stage cannot be built with its defaults only, the missing
//! settings are reported, and the stage is built with such values for them. Nothing is loaded and nothing runs.

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};
use verl_declare::pipe::StageDecl;
use verl_declare::registry::{Kind, Registry};
use verl_declare::sizes::{BatchConfig, DevicesConfig};
use verl_plan::schedule::batching::estimate;
use verl_words::field::Field;
use verl_words::stage::{BuildContext, Metric, RowRule, StageSpec};

use super::fill_slots;

/// Numbers of samples per prompt to document stages with, tried in order: some parts accept only pairs.
const SAMPLES: [usize; 3] = [4, 2, 1];

/// One setting that differs from the default.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The setting; for a setting of a part, both names separated by a dot.
    pub setting: String,
    /// Its value.
    pub value: Value,
}

/// What a kind of stage declares.
#[derive(Debug, Clone)]
pub struct Declared {
    /// With the default settings, and those of `set` if the stage cannot be built with its defaults only.
    pub default: Option<StageSpec>,
    /// Why the stage cannot be built with its defaults only.
    pub missing: Vec<String>,
    /// Values that were set for missing settings.
    pub set: Vec<Change>,
    /// Whether the stage expands rows by `batch.samples`.
    pub by_samples: bool,
    /// With one other setting, if the stage can be built with it.
    pub changed: Vec<(Change, StageSpec)>,
}

/// How a stage uses a key, or whether it records a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Always.
    Always,
    /// If some stage writes the key.
    WhereWritten,
    /// Never.
    Not,
}

impl Use {
    /// The word for it in documents.
    pub fn word(self) -> &'static str {
        match self {
            Use::Always => "always",
            Use::WhereWritten => "where written",
            Use::Not => "not",
        }
    }
}

/// An item that a stage declares, and the settings with which it does.
#[derive(Debug, Clone)]
pub struct Declaration<T> {
    /// The item.
    pub item: T,
    /// How it is used with the defaults.
    pub by_default: Use,
    /// The other settings that change its use, and its use with them.
    pub with: Vec<(Change, Use)>,
}

impl Declared {
    /// A kind of stage of `registry` with its defaults, and with every other value of a setting.
    pub fn of(kind: &Kind<StageDecl>, registry: &Registry) -> Declared {
        Self::with(kind, &Map::new(), None, registry)
    }

    /// A kind of stage with `settings`. Varies the settings of the part in `part`, or of the stage if `part` is `None`.
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
            missing: missing.into_iter().map(|missing| missing.reason).collect(),
            set,
            by_samples,
            changed,
        }
    }

    /// Keys that are read.
    pub fn reads(&self) -> Vec<Declaration<Field>> {
        let keys = |spec: &StageSpec| {
            let needed = spec.reads.iter().map(|field| (field.clone(), Use::Always));
            let optional = spec.reads_optional.iter();
            let optional = optional.map(|field| (field.clone(), Use::WhereWritten));
            needed.chain(optional).collect()
        };
        self.declarations(keys, |field| &field.name)
    }

    /// Keys that are written.
    pub fn writes(&self) -> Vec<Declaration<Field>> {
        let keys = |spec: &StageSpec| {
            let all = spec.writes.iter();
            all.map(|field| (field.clone(), Use::Always)).collect()
        };
        self.declarations(keys, |field| &field.name)
    }

    /// Metrics that are recorded.
    pub fn metrics(&self) -> Vec<Declaration<Metric>> {
        let metrics = |spec: &StageSpec| {
            let all = spec.metrics.iter();
            all.map(|metric| (*metric, Use::Always)).collect()
        };
        self.declarations(metrics, |metric| metric.name)
    }

    /// All items of one sort that are declared with any of the settings, those of the defaults first.
    fn declarations<T: Clone>(
        &self,
        items: impl Fn(&StageSpec) -> Vec<(T, Use)>,
        name: impl Fn(&T) -> &str,
    ) -> Vec<Declaration<T>> {
        let mut all: Vec<Declaration<T>> = Vec::new();
        let mut add = |item: T, by_default| {
            if !all.iter().any(|known| name(&known.item) == name(&item)) {
                all.push(Declaration {
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

/// A setting with which the stage cannot be built, and the reason.
struct Missing {
    setting: String,
    reason: String,
}

/// The settings with a value for each missing one, if one is known; the missing settings; the values that were set.
fn with_missing(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    part: Option<&str>,
    registry: &Registry,
) -> (Map<String, Value>, Vec<Missing>, Vec<Change>) {
    let (mut filled, mut set) = (settings.clone(), Vec::new());
    let mut missing: Vec<Missing> = Vec::new();
    while let Err(errors) = build(kind, &filled, registry) {
        let before = set.len();
        for error in errors {
            let known = |change: &Change| change.setting == error.setting;
            if set.iter().any(known) {
                continue;
            }
            let mut changes = changes(kind, &filled, part, registry).into_iter();
            if let Some((change, changed)) = changes.find(|(change, _)| known(change)) {
                filled = changed;
                set.push(change);
            }
            if !missing.iter().any(|known| known.reason == error.reason) {
                missing.push(error);
            }
        }
        // No value fixes this error: stop, or the loop never ends.
        if set.len() == before {
            break;
        }
    }
    (filled, missing, set)
}

/// What the stage declares with the first number of samples that it accepts, and that number.
fn build(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    registry: &Registry,
) -> Result<(StageSpec, usize), Vec<Missing>> {
    let mut first = None;
    for samples in SAMPLES {
        match build_at(kind, settings, samples, registry) {
            Ok(spec) => return Ok((spec, samples)),
            Err(errors) => drop(first.get_or_insert(errors)),
        }
    }
    Err(first.unwrap_or_default())
}

fn build_at(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    samples: usize,
    registry: &Registry,
) -> Result<StageSpec, Vec<Missing>> {
    let decl = declare(kind, settings, registry)?;
    let stage = (decl.build)(&context(&decl.config, samples)).map_err(|errors| {
        let missing = errors.into_iter().map(|error| Missing {
            reason: format!("{error}; {}", error.help),
            setting: error.setting,
        });
        missing.collect::<Vec<_>>()
    })?;
    Ok(stage.spec())
}

fn declare(
    kind: &Kind<StageDecl>,
    settings: &Map<String, Value>,
    registry: &Registry,
) -> Result<StageDecl, Vec<Missing>> {
    let settings = Value::Object(settings.clone());
    let decoded = registry.reading(|| (kind.declare)(kind.name, settings));
    let faults = decoded.faults.iter().map(|fault| Missing {
        setting: fault.path().join("."),
        reason: fault.to_string(),
    });
    match decoded.value {
        Some(decl) if decoded.faults.is_empty() => Ok(decl),
        _ => Err(faults.collect()),
    }
}

/// The context of a pipeline that declares every model and data set that the settings could refer to.
fn context(config: &Value, samples: usize) -> BuildContext {
    let sizes = BatchConfig {
        samples,
        ..BatchConfig::default()
    };
    let (batch, _) = estimate(&sizes, &DevicesConfig::default(), None);
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

/// The settings with one of them changed, for each known change.
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

/// The definition that a property refers to, ignoring `null`; the property itself if it has no `$ref`.
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

/// The words that a property accepts: those of a choice, or kinds of a slot that require no settings.
pub(crate) fn words(schema: &Value) -> Vec<&str> {
    let own = schema["enum"].as_array().into_iter().flatten();
    let own = own.chain(schema.get("const")).filter_map(Value::as_str);
    let inner = ["oneOf", "anyOf"].into_iter();
    let inner = inner.flat_map(|key| schema[key].as_array().into_iter().flatten());
    let inner = inner.filter(|choice| choice["type"] != "object");
    own.chain(inner.flat_map(words)).collect()
}

/// Values of a property other than its default, one for each case.
fn others(property: &Value, definitions: &Map<String, Value>) -> Vec<Value> {
    let default = &property["default"];
    let schema = definition(property, definitions);
    let is = |name: &str| {
        schema["type"] == name
            || schema["type"]
                .as_array()
                .is_some_and(|types| types.iter().any(|word| word == name))
    };
    let none = default.is_null() || default.as_f64() == Some(0.0);
    let values = match words(schema) {
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

/// Each kind of stage with each of its settings that selects a part of `slot`.
pub(crate) fn part_users<'a>(
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
        let selecting = properties
            .into_iter()
            .filter(move |(_, property)| property["$ref"] == reference.as_str());
        selecting.map(move |(setting, _)| (kind, setting))
    })
}

fn section_of(kind: &Kind<StageDecl>) -> Value {
    (kind.schema)(&mut SchemaGenerator::default()).to_value()
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};
    use verl_words::batch::Batch;
    use verl_words::keys::{ENTROPIES, PROMPTS, RESPONSES, REWARDS, VALUES};
    use verl_words::stage::{ConfigError, Stage, StageConfig, StageContext, StageError};

    use super::*;

    #[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
    #[serde(rename_all = "snake_case")]
    enum Side {
        #[default]
        Left,
        Right,
    }

    /// Reads and writes keys that depend on its settings.
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
    fn check(declarations: Vec<Declaration<Field>>, expected: &[&str]) {
        let found: Vec<String> = declarations
            .iter()
            .map(|key| {
                let with = key.with.iter();
                let with = with.map(|(change, used)| {
                    format!("; {} with {}={}", used.word(), change.setting, change.value)
                });
                let with: String = with.collect();
                format!("{} {}{with}", key.item.name, key.by_default.word())
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_stage_is_built_with_every_setting() {
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
        // Settings with which the stage cannot be built are left out.
        let tried: Vec<&str> = declared
            .changed
            .iter()
            .map(|(change, _)| change.setting.as_str())
            .collect();
        assert_eq!(tried, ["more", "side", "coef"]);
    }
    /// Cannot be built without a limit.
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
    fn missing_settings_are_reported_and_set() {
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
