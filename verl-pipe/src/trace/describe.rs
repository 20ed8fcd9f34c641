//! What the keys of a pipeline are, for the reader of its trace: `schema.json` of the run folder.

use serde_json::{Map, Value, json};

use crate::field::Field;
use crate::plan::{Plan, PlannedStage};
use crate::trace::format::FORMAT;

/// The document as text: for each stage in the order of execution its configuration and the keys it reads and writes,
/// with shape, type, unit, meaning, and by what name the pipeline calls them.
pub fn describe(plan: &Plan) -> String {
    let stages: Vec<Value> = plan
        .stages
        .iter()
        .map(|stage| of_stage(plan, stage))
        .collect();
    let document = json!({
        "format": FORMAT,
        "pipeline": plan.pipe.name,
        "rows": {
            "prompts": plan.batch.prompts,
            "samples_of_a_step": plan.batch.rows,
        },
        "stages": stages,
    });
    // A JSON value always prints.
    format!(
        "{}\n",
        serde_json::to_string_pretty(&document).unwrap_or_default()
    )
}

fn of_stage(plan: &Plan, stage: &PlannedStage) -> Value {
    let decl = plan.pipe.stages.iter().find(|decl| decl.name == stage.name);
    let reads = stage.inputs.iter().map(|edge| {
        let own = stage.spec.reads.iter().chain(&stage.spec.reads_optional);
        let mut key = own
            .filter(|field| field.name == edge.local)
            .map(of_field)
            .next()
            .unwrap_or_default();
        key.insert("key".to_owned(), edge.key.clone().into());
        key.insert(
            "from".to_owned(),
            plan.stages[edge.writer].name.clone().into(),
        );
        key.insert(
            "rows".to_owned(),
            plan.tables[edge.table].rows.clone().into(),
        );
        Value::Object(key)
    });
    let reads: Vec<Value> = reads.collect();
    let writes = stage.spec.writes.iter().map(|field| {
        let mut key = of_field(field);
        key.insert("key".to_owned(), stage.key(&field.name).into());
        if let Some(table) = stage.table_out {
            key.insert("rows".to_owned(), plan.tables[table].rows.clone().into());
        }
        Value::Object(key)
    });
    let writes: Vec<Value> = writes.collect();
    json!({
        "name": stage.name,
        "kind": stage.kind,
        "parameters": decl.map(|decl| decl.config.clone()),
        "reads": reads,
        "writes": writes,
    })
}

fn of_field(field: &Field) -> Map<String, Value> {
    let entries = [
        ("name", field.name.to_string().into()),
        ("dtype", field.dtype.to_string().into()),
        ("shape", field.shape.to_string().into()),
        ("unit", field.unit.to_string().into()),
        ("meaning", field.meaning.to_string().into()),
        ("nullable", field.nullable.into()),
        ("finite", field.finite.into()),
        ("distribution", json!(field.tag)),
    ];
    entries
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect()
}
