//! Run-time guards check that a stage emits what it declared. An error names the stage, key, sample, row and token.

use std::collections::HashMap;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, ArrayRef, ListArray};
use verl_plan::schedule::wiring::{OutputColumn, StageWires, ragged_dim};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId};
use verl_words::keys::mask;

/// Rows on an edge that do not match their declaration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GuardError {
    /// A declared key is missing.
    #[error("stage `{stage}` emitted rows without `{key}`, which it declares; it emitted {found}")]
    MissingKey {
        /// The stage.
        stage: String,
        /// The key.
        key: String,
        /// Keys that it emitted.
        found: String,
    },
    /// A key was emitted that was not declared.
    #[error("stage `{stage}` emitted `{key}`, which it neither reads nor declares as written")]
    UndeclaredKey {
        /// The stage.
        stage: String,
        /// The key.
        key: String,
    },
    /// A column has the wrong type.
    #[error("stage `{stage}`, key `{key}`: declared {expected}, emitted {found}")]
    Type {
        /// The stage.
        stage: String,
        /// The key.
        key: String,
        /// The declared type.
        expected: String,
        /// The emitted type.
        found: String,
    },
    /// Null in a key that does not allow it.
    #[error("stage `{stage}`, key `{key}`, {}: null, but the key does not allow null", .id.in_words())]
    Null {
        /// The stage.
        stage: String,
        /// The key.
        key: String,
        /// Position among the step's rows.
        row: usize,
        /// Identity of the row.
        id: RowId,
    },
    /// A value that is not finite in a key that promises finite values.
    #[error("stage `{stage}`, key `{key}`, {}{}: {value}, but the key promises finite values",
        .id.in_words(), .token.map(|t| format!(", token {t}")).unwrap_or_default())]
    NonFinite {
        /// The stage.
        stage: String,
        /// The key.
        key: String,
        /// Position among the step's rows.
        row: usize,
        /// Identity of the row.
        id: RowId,
        /// Position in the row's list, for ragged keys.
        token: Option<usize>,
        /// The value.
        value: f64,
    },
    /// Lists of one row whose lengths differ but must be equal.
    #[error("stage `{stage}`, {}: {lengths}", .id.in_words())]
    Length {
        /// The stage.
        stage: String,
        /// Position among the step's rows.
        row: usize,
        /// Identity of the row.
        id: RowId,
        /// The keys and their lengths.
        lengths: Box<LengthDifference>,
    },
    /// A row that does not belong to the call.
    #[error(
        "stage `{stage}` emitted {}, which is not among the rows it may emit here ({allowed})",
        .id.in_words()
    )]
    ForeignRow {
        /// The stage.
        stage: String,
        /// The row.
        id: RowId,
        /// Rows of the call.
        allowed: String,
    },
    /// A row that was emitted twice.
    #[error("stage `{stage}` emitted {} twice in one step", .id.in_words())]
    RepeatedRow {
        /// The stage.
        stage: String,
        /// The row.
        id: RowId,
    },
    /// Rows that were not emitted.
    #[error(
        "stage `{stage}` ended a call with {missing} of {expected} rows missing; the first missing row is {first}"
    )]
    MissingRows {
        /// The stage.
        stage: String,
        /// Number of missing rows.
        missing: usize,
        /// Number of expected rows.
        expected: usize,
        /// Identity of the first, or `unknown` for a source.
        first: String,
    },
    /// Rows from a stage that must not emit any.
    #[error("stage `{stage}` emitted {rows} rows, but it is declared to emit none")]
    NoOutput {
        /// The stage.
        stage: String,
        /// Number of rows.
        rows: usize,
    },
}

/// Two keys of a row whose lists differ in length although both declare the same dim.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "`{first}` has {first_len} values and `{key}` has {len}, but both are declared with length {dim}"
)]
pub struct LengthDifference {
    /// The key.
    pub key: String,
    /// Its length.
    pub len: usize,
    /// The key it is compared with.
    pub first: String,
    /// Length of that key.
    pub first_len: usize,
    /// The dim that both declare.
    pub dim: String,
}

/// What a guard checks: the stage, and the position of the batch among the rows of the step.
pub struct GuardScope<'a> {
    /// Name of the stage.
    pub stage: &'a str,
    /// Its columns.
    pub wires: &'a StageWires,
    /// Position of each row of the batch among the step's rows.
    pub positions: &'a [u32],
    /// Identities of the rows of the batch.
    pub ids: &'a [u64],
    /// Which tokens the policy chose, if that is known before the batch is checked.
    pub mask: Option<MaskOf<'a>>,
}

/// Which tokens of rows the policy chose.
#[derive(Clone, Copy)]
pub struct MaskOf<'a> {
    /// Dim of the keys that it applies to.
    pub dim: &'a str,
    /// Mask kinds of a row of the batch.
    pub kinds: &'a dyn Fn(usize) -> Option<Vec<u8>>,
}

impl MaskOf<'_> {
    /// Whether no stage reads the value of a key at `token` of a row with `len` tokens, since the policy did not choose
    /// it.
    fn is_unread(&self, row: usize, token: usize, len: usize) -> bool {
        let kinds = (self.kinds)(row).filter(|kinds| kinds.len() == len);
        kinds.is_some_and(|kinds| kinds[token] == mask::OBSERVATION)
    }
}

impl GuardScope<'_> {
    fn row(&self, row: usize) -> (usize, RowId) {
        (
            self.positions.get(row).map_or(row, |p| *p as usize),
            RowId(self.ids[row]),
        )
    }

    /// The declared columns of an emitted batch, in declared order and with the declared Arrow type.
    pub fn columns(&self, batch: &Batch) -> Result<Vec<ArrayRef>, GuardError> {
        let record = batch.record();
        let schema = record.schema_ref();
        for field in schema.fields().iter().skip(2) {
            let name = field.name();
            let known = self.wires.outputs.iter().any(|out| &out.local == name)
                || self.wires.inputs.iter().any(|input| &input.local == name);
            if !known {
                return Err(GuardError::UndeclaredKey {
                    stage: self.stage.to_owned(),
                    key: name.clone(),
                });
            }
        }
        self.wires
            .outputs
            .iter()
            .map(|out| self.column(batch, out))
            .collect()
    }

    fn column(&self, batch: &Batch, out: &OutputColumn) -> Result<ArrayRef, GuardError> {
        let array = batch
            .column(&out.local)
            .ok_or_else(|| GuardError::MissingKey {
                stage: self.stage.to_owned(),
                key: out.local.clone(),
                found: match batch.keys() {
                    keys if keys.is_empty() => "no key".to_owned(),
                    keys => keys.join(", "),
                },
            })?;
        let array = with_type(array, out).ok_or_else(|| GuardError::Type {
            stage: self.stage.to_owned(),
            key: out.local.clone(),
            expected: out.data_type.to_string(),
            found: array.data_type().to_string(),
        })?;
        self.check_nulls(&array, out)?;
        if out.field.finite {
            self.check_finite(&array, out)?;
        }
        Ok(array)
    }

    fn check_nulls(&self, array: &ArrayRef, out: &OutputColumn) -> Result<(), GuardError> {
        let null = |row| {
            let (row, id) = self.row(row);
            GuardError::Null {
                stage: self.stage.to_owned(),
                key: out.local.clone(),
                row,
                id,
            }
        };
        if !out.field.nullable && array.null_count() > 0 {
            return Err(null(
                (0..array.len()).find(|i| array.is_null(*i)).unwrap_or(0),
            ));
        }
        if let Some(list) = array.as_list_opt::<i32>()
            && list.values().null_count() > 0
            && let Some(row) = (0..list.len()).find(|i| list.value(*i).null_count() > 0)
        {
            return Err(null(row));
        }
        Ok(())
    }

    /// Rejects values that are not finite, except at observation tokens, which no stage reads.
    fn check_finite(&self, array: &ArrayRef, out: &OutputColumn) -> Result<(), GuardError> {
        let list = array.as_list_opt::<i32>();
        let (values, span) = match list {
            Some(list) => {
                let offsets = list.value_offsets();
                (
                    list.values(),
                    offsets[0] as usize..offsets[list.len()] as usize,
                )
            }
            None => (array, 0..array.len()),
        };
        let mut bad: Box<dyn Iterator<Item = (usize, f64)>> =
            if let Some(floats) = values.as_primitive_opt::<Float32Type>() {
                let all = span.clone().zip(&floats.values()[span]);
                Box::new(
                    all.filter(|(i, v)| !v.is_finite() && values.is_valid(*i))
                        .map(|(i, v)| (i, f64::from(*v))),
                )
            } else if let Some(floats) = values.as_primitive_opt::<Float64Type>() {
                let all = span.clone().zip(&floats.values()[span]);
                Box::new(
                    all.filter(|(i, v)| !v.is_finite() && values.is_valid(*i))
                        .map(|(i, v)| (i, *v)),
                )
            } else {
                return Ok(());
            };
        let mask = self
            .mask
            .filter(|mask| ragged_dim(&out.field).as_deref() == Some(mask.dim));
        let place = |at: usize| match list {
            Some(list) => {
                let offsets = list.value_offsets();
                let row = offsets.partition_point(|o| *o as usize <= at) - 1;
                (row, Some(at - offsets[row] as usize))
            }
            None => (at, None),
        };
        let is_read = |(at, _): &(usize, f64)| {
            let (Some(mask), Some(list), (row, Some(token))) = (mask, list, place(*at)) else {
                return true;
            };
            !mask.is_unread(row, token, list.value_length(row) as usize)
        };
        let Some((at, value)) = bad.find(is_read) else {
            return Ok(());
        };
        let (row, token) = place(at);
        let (row, id) = self.row(row);
        Err(GuardError::NonFinite {
            stage: self.stage.to_owned(),
            key: out.local.clone(),
            row,
            id,
            token,
            value,
        })
    }

    /// Checks that keys with the same declared length have equal lengths in every row: among the columns of `input`
    /// (with the identities of its rows), among `outputs`, and between the two.
    pub fn lengths(
        &self,
        input: Option<(&Batch, &[u64])>,
        outputs: &[ArrayRef],
    ) -> Result<(), GuardError> {
        let by_id: Option<HashMap<u64, usize>> = input
            .filter(|(_, ids)| !self.wires.lengths.is_empty() && *ids != self.ids)
            .map(|(_, ids)| ids.iter().enumerate().map(|(row, id)| (*id, row)).collect());
        for shared in &self.wires.lengths {
            let mut lists: Vec<(&str, &ListArray, bool)> = Vec::new();
            if let Some((input, _)) = input {
                for i in &shared.inputs {
                    let list = input.record().column(i + 2).as_list_opt::<i32>();
                    lists.extend(
                        list.map(|list| (self.wires.inputs[*i].local.as_str(), list, true)),
                    );
                }
            }
            for i in &shared.outputs {
                let list = outputs.get(*i).and_then(|array| array.as_list_opt::<i32>());
                lists.extend(list.map(|list| (self.wires.outputs[*i].local.as_str(), list, false)));
            }
            self.equal_lengths(&shared.dim, &lists, by_id.as_ref())?;
        }
        Ok(())
    }

    fn equal_lengths(
        &self,
        dim: &str,
        lists: &[(&str, &ListArray, bool)],
        by_id: Option<&HashMap<u64, usize>>,
    ) -> Result<(), GuardError> {
        let Some(((first, first_list, first_is_input), others)) = lists.split_first() else {
            return Ok(());
        };
        if others.is_empty() {
            return Ok(());
        }
        let at = |row: usize, is_input: bool| match by_id {
            Some(by_id) if is_input => by_id.get(&self.ids[row]).copied(),
            _ => Some(row),
        };
        for row in 0..self.ids.len() {
            let Some(first_row) = at(row, *first_is_input).filter(|r| first_list.is_valid(*r))
            else {
                continue;
            };
            let first_len = first_list.value_length(first_row) as usize;
            for (key, list, is_input) in others {
                let Some(other) = at(row, *is_input).filter(|r| list.is_valid(*r)) else {
                    continue;
                };
                let len = list.value_length(other) as usize;
                if len != first_len {
                    let (row, id) = self.row(row);
                    let lengths = LengthDifference {
                        key: (*key).to_owned(),
                        len,
                        first: (*first).to_owned(),
                        first_len,
                        dim: dim.to_owned(),
                    };
                    return Err(GuardError::Length {
                        stage: self.stage.to_owned(),
                        row,
                        id,
                        lengths: Box::new(lengths),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Returns the array with exactly the declared type. Field names inside list types may differ; values are shared.
fn with_type(array: &ArrayRef, out: &OutputColumn) -> Option<ArrayRef> {
    if array.data_type() == &out.data_type {
        return Some(array.clone());
    }
    if !array.data_type().equals_datatype(&out.data_type) {
        return None;
    }
    let data = array
        .to_data()
        .into_builder()
        .data_type(out.data_type.clone())
        .build()
        .ok()?;
    Some(arrow_array::make_array(data))
}
