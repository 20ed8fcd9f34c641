//! Placeholders for stages of a recorded run whose kind this build does not have, such as custom stages: they have the
//! recorded declaration in the plan, and are never called.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_declare::pipe::{DataPipe, StageDecl};
use verl_declare::registry::Registry;
use verl_plan::PlannedStage;
use verl_plan::read::{parse_pipeline, read_pipeline};
use verl_words::batch::Batch;
use verl_words::diagnostic::Diagnostic;
use verl_words::stage::{Stage, StageContext, StageError, StageSpec};

use crate::files::conditions::Conditions;

/// A stage's declaration of rows, keys and models: enough to place it in a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageShape {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// What it declares.
    #[serde(flatten)]
    pub spec: StageSpec,
}

impl StageShape {
    /// The declaration of a planned stage.
    pub fn of(stage: &PlannedStage) -> StageShape {
        StageShape {
            name: stage.name().to_owned(),
            kind: stage.kind().to_owned(),
            spec: stage.spec().clone(),
        }
    }
}

fn no_kind(kind: &str) -> String {
    format!("this build has no stage kind `{kind}`")
}

/// Repeats a recorded declaration, and refuses to run.
struct StandIn(StageShape);

impl Stage for StandIn {
    fn spec(&self) -> StageSpec {
        StageSpec {
            not_replayed: Some(no_kind(&self.0.kind)),
            ..self.0.spec.clone()
        }
    }

    fn run(&mut self, _: Batch, _: &mut StageContext<'_>) -> Result<(), StageError> {
        Err(StageError::failed(no_kind(&self.0.kind)))
    }
}

/// The pipeline of a run folder. Stages of unknown kinds become placeholders if the trace has their declarations.
///
/// # Errors
/// All errors in `config.toml`.
pub fn read_recorded(dir: &Path, registry: &Registry) -> Result<DataPipe, Vec<Diagnostic>> {
    let path = dir.join("config.toml");
    let none: [&str; 0] = [];
    let Some((known, unknown)) = split(dir, &path, registry) else {
        return read_pipeline(&path, &none, registry);
    };
    let mut pipe = parse_pipeline(&known, &path.display().to_string(), &none, registry)?;
    pipe.base = dir.to_owned();
    for (at, stage) in unknown {
        pipe.stages.insert(at.min(pipe.stages.len()), stage);
    }
    Ok(pipe)
}

/// The file without the stages of unknown kinds, and placeholders for these with their positions; `None` if there are
/// none, or if information is missing in the file or the trace.
fn split(
    dir: &Path,
    path: &Path,
    registry: &Registry,
) -> Option<(String, Vec<(usize, StageDecl)>)> {
    let mut document: toml::Table = fs::read_to_string(path).ok()?.parse().ok()?;
    let stages = document.get_mut("stages")?.as_array_mut()?;
    let is_known = |stage: &toml::Value| {
        let kind = stage.get("kind").and_then(toml::Value::as_str);
        kind.is_none_or(|kind| registry.stages().get(kind).is_some())
    };
    if stages.iter().all(is_known) {
        return None;
    }
    let conditions = Conditions::read(dir).ok()??;
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for (at, stage) in stages.drain(..).enumerate() {
        match is_known(&stage) {
            true => known.push(stage),
            false => unknown.push((at, stand_in(&stage, &conditions)?)),
        }
    }
    *stages = known;
    Some((toml::to_string(&document).ok()?, unknown))
}

fn stand_in(entry: &toml::Value, conditions: &Conditions) -> Option<StageDecl> {
    let mut config: Map<String, Value> = serde_json::to_value(entry).ok()?.as_object()?.clone();
    let mut text = |key: &str| config.shift_remove(key)?.as_str().map(str::to_owned);
    let kind = text("kind")?;
    let name = text("name").unwrap_or_else(|| kind.clone());
    let group = text("group");
    let rename = config.shift_remove("rename");
    let debug = config.shift_remove("debug") == Some(Value::Bool(true));
    let mut shapes = conditions.stages.iter();
    let shape = shapes.find(|shape| shape.name == name && shape.kind == kind)?;
    let shape = shape.clone();
    Some(StageDecl {
        name,
        kind,
        config: Value::Object(config),
        rename: serde_json::from_value(rename.unwrap_or_default()).unwrap_or_default(),
        stated_reads: None,
        stated_writes: None,
        debug,
        group,
        build: Arc::new(move |_| Ok(Box::new(StandIn(shape.clone())))),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use verl_words::keys::{PROMPTS, REWARDS};
    use verl_words::stage::{Access, OnShort, Refill, RowRule};

    use super::*;

    #[test]
    fn a_recorded_declaration_is_read_again() {
        let spec = StageSpec::new()
            .reads(REWARDS)
            .reads_broadcast(PROMPTS)
            .rows(RowRule::Expand(4))
            .uses("actor", Access::Update)
            .deadline(Duration::from_millis(1500))
            .refill(Refill {
                groups: 2,
                waves: 3,
                on_short: OnShort::Continue,
            });
        let shape = StageShape {
            name: "own".to_owned(),
            kind: "custom".to_owned(),
            spec: spec.clone(),
        };
        let text = serde_json::to_string(&shape).expect("serialises");
        let read: StageShape = serde_json::from_str(&text).expect("is read");
        assert_eq!(read, shape);
        // What a plan does not require is not recorded.
        let more = StageShape {
            spec: spec.once("a penalty").remedy("rewards", "score them"),
            ..shape
        };
        assert_eq!(serde_json::to_string(&more).expect("serialises"), text);
    }

    #[test]
    fn names_in_recordings_stay() {
        let shape = StageShape {
            name: String::new(),
            kind: String::new(),
            spec: StageSpec::new(),
        };
        let value = serde_json::to_value(&shape).expect("serialises");
        let mut names: Vec<&str> = value
            .as_object()
            .expect("an object")
            .keys()
            .map(String::as_str)
            .collect();
        names.sort_unstable();
        let expected = [
            "broadcast",
            "cadence",
            "cardinality",
            "deadline_s",
            "draws_waves",
            "kind",
            "models",
            "name",
            "on_row_error",
            "reads",
            "reads_optional",
            "refill",
            "rows",
            "slice_rows",
            "writes",
        ];
        // A new name may be added with a default; none may be removed or renamed.
        for name in expected {
            assert!(names.contains(&name), "{name} is not in {names:?}");
        }
    }
}
