//! Resolves a column's name in the schema of a Parquet file: which leaves it needs, and where a row has its value.

use ::parquet::schema::types::SchemaDescriptor;
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Fields};
use serde_json::Value;
use verl_words::data::find_column;

use super::values::json;

/// The path to a column, from the root of the schema.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ColumnPath {
    steps: Vec<Step>,
    /// Type of the values at its end.
    data_type: DataType,
}

#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// A column, or a field of a struct.
    Field(String),
    /// An item of a list.
    Item(usize),
    /// The entry of a map under a name.
    Key(String),
}

impl ColumnPath {
    /// The path to `name`, resolved as by [`find_column`]: a field with exactly this name wins.
    pub fn find(fields: &Fields, name: &str) -> Option<ColumnPath> {
        let mut steps = Vec::new();
        let data_type = among(fields, name, &mut steps)?;
        Some(ColumnPath { steps, data_type })
    }

    /// Type of the values.
    pub fn data_type(&self) -> &DataType {
        &self.data_type
    }

    /// The leaves of the file that it needs.
    pub fn leaves(&self, schema: &SchemaDescriptor) -> Vec<usize> {
        let names = self.steps.iter().map_while(|step| match step {
            Step::Field(name) => Some(name),
            _ => None,
        });
        let names: Vec<&String> = names.collect();
        let needed = |leaf: &usize| {
            let column = schema.column(*leaf);
            let parts = column.path().parts();
            parts.len() >= names.len() && parts.iter().zip(&names).all(|(part, name)| part == *name)
        };
        (0..schema.num_columns()).filter(needed).collect()
    }

    /// The value in a row of the decoded column; `None` if a list or map does not have it.
    pub fn pick(&self, array: &ArrayRef, row: usize) -> Option<Value> {
        // The first step is the column itself.
        pick(array, row, self.steps.get(1..).unwrap_or_default())
    }
}

fn pick(array: &ArrayRef, row: usize, steps: &[Step]) -> Option<Value> {
    if array.is_null(row) {
        return Some(Value::Null);
    }
    let Some((step, rest)) = steps.split_first() else {
        return Some(json(array, row));
    };
    match step {
        Step::Field(name) => pick(array.as_struct_opt()?.column_by_name(name)?, row, rest),
        Step::Item(item) => {
            let items = match array.data_type() {
                DataType::List(_) => array.as_list::<i32>().value(row),
                DataType::LargeList(_) => array.as_list::<i64>().value(row),
                DataType::FixedSizeList(..) => array.as_fixed_size_list().value(row),
                _ => return None,
            };
            (*item < items.len()).then(|| pick(&items, *item, rest))?
        }
        Step::Key(key) => find_column(json(array, row).as_object()?, key).cloned(),
    }
}

/// Appends the path to `name` among fields to `steps`, and returns the type at its end.
fn among(fields: &Fields, name: &str, steps: &mut Vec<Step>) -> Option<DataType> {
    if let Some((_, field)) = fields.find(name) {
        steps.push(Step::Field(name.to_owned()));
        return Some(field.data_type().clone());
    }
    let mut dots = name.rmatch_indices('.');
    dots.find_map(|(at, _)| {
        let (_, field) = fields.find(&name[..at])?;
        let before = steps.len();
        steps.push(Step::Field(name[..at].to_owned()));
        let found = within(field.data_type(), &name[at + 1..], steps);
        if found.is_none() {
            steps.truncate(before);
        }
        found
    })
}

fn within(data_type: &DataType, name: &str, steps: &mut Vec<Step>) -> Option<DataType> {
    match data_type {
        DataType::Struct(fields) => among(fields, name, steps),
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            let (number, rest) = match name.split_once('.') {
                Some((number, rest)) => (number, Some(rest)),
                None => (name, None),
            };
            let digits = number.bytes().all(|byte| byte.is_ascii_digit());
            steps.push(Step::Item(digits.then(|| number.parse().ok()).flatten()?));
            match rest {
                Some(rest) => within(item.data_type(), rest, steps),
                None => Some(item.data_type().clone()),
            }
        }
        DataType::Map(..) => {
            steps.push(Step::Key(name.to_owned()));
            Some(data_type.clone())
        }
        _ => None,
    }
}

/// Names of all columns, each followed by the dotted names of the fields inside it.
pub(super) fn column_paths(fields: &Fields) -> Vec<String> {
    let mut names = Vec::new();
    list("", fields, &mut names);
    names
}

fn list(before: &str, fields: &Fields, names: &mut Vec<String>) {
    for field in fields {
        let path = format!("{before}{}", field.name());
        names.push(path.clone());
        if let DataType::Struct(inside) = field.data_type() {
            list(&format!("{path}."), inside, names);
        }
    }
}
