//! What travels between device groups in a step: batches, and weights of models that are trained elsewhere.

use std::collections::BTreeMap;
use std::fmt;

use verl_words::field::{DType, Field};
use verl_words::shape::{Dim, Shape};

use crate::display::bytes;
use crate::memory::Lengths;
use crate::{Plan, PlannedStage};

/// Keys that travel from one place to a device group.
#[derive(Debug, Default)]
struct Edge<'a> {
    keys: Vec<&'a str>,
    /// An upper bound for the keys whose length is limited.
    bytes: u64,
    /// Keys whose length no setting limits.
    unbounded: Vec<&'a str>,
}

impl Plan {
    /// Writes the edges into named device groups, and the weights that travel to copies.
    pub(crate) fn write_group_edges(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.groups.iter().any(|group| group.is_named) {
            return Ok(());
        }
        let limits = self.ragged_limits();
        // By place of the writer, where `None` is the host, and group of the reader.
        let mut edges: BTreeMap<(Option<usize>, usize), Edge<'_>> = BTreeMap::new();
        for stage in &self.stages {
            let Some(to) = stage.group else { continue };
            for input in &stage.inputs {
                let writer = &self.stages[input.writer];
                if writer.group == Some(to) {
                    continue;
                }
                let edge = edges.entry((writer.group, to)).or_default();
                if edge.keys.contains(&input.key.as_str()) {
                    continue;
                }
                edge.keys.push(&input.key);
                match self.key_bytes(writer, &input.key, &limits) {
                    Some(bytes) => edge.bytes = edge.bytes.saturating_add(bytes),
                    None => edge.unbounded.push(&input.key),
                }
            }
        }
        writeln!(f, "\nedges into device groups, at most in a step")?;
        for ((from, to), edge) in &edges {
            let from = from.map_or("host", |from| self.groups[from].name.as_str());
            let path = format!("{from} -> {}", self.groups[*to].name);
            let keys = edge
                .keys
                .iter()
                .map(|key| match edge.unbounded.contains(key) {
                    true => format!("{key} without a limit"),
                    false => (*key).to_owned(),
                });
            let keys: Vec<String> = keys.collect();
            let size = bytes(edge.bytes);
            writeln!(f, "  {path:<24}{size:>10}  {}", keys.join(", "))?;
        }
        for model in self
            .models
            .iter()
            .filter(|model| !model.updaters.is_empty())
        {
            for (to, info) in &model.copies {
                let (home, to) = (&self.groups[model.home].name, &self.groups[*to].name);
                let path = format!("{home} -> {to}");
                let size = bytes(info.weight_bytes);
                writeln!(f, "  {path:<24}{size:>10}  weights of {}", model.name)?;
            }
        }
        Ok(())
    }

    /// Maximum lengths of ragged dims by their symbol, which means the same in the entire graph.
    fn ragged_limits(&self) -> BTreeMap<String, usize> {
        let lengths = Lengths::of(self);
        let mut limits: BTreeMap<String, usize> = BTreeMap::new();
        for (key, field) in &self.fields {
            let shape = field.shape.parse::<Shape>();
            let dims = shape.map(|shape| shape.0).unwrap_or_default();
            let Some(limit) = lengths.limit(key) else {
                continue;
            };
            for dim in dims {
                if let Dim::Ragged(symbol) = dim {
                    let known = limits.entry(symbol.into_owned()).or_default();
                    *known = limit.max(*known);
                }
            }
        }
        limits
    }

    /// Maximum bytes of a key in a step; `None` if no setting limits its length.
    fn key_bytes(
        &self,
        writer: &PlannedStage,
        key: &str,
        limits: &BTreeMap<String, usize>,
    ) -> Option<u64> {
        let mut writes = writer.spec.writes.iter();
        let field: &Field = writes.find(|field| writer.key(&field.name) == key)?;
        let table = &self.tables[writer.table_out?];
        let mut size = (table.num_rows as u64).saturating_mul(table.waves as u64);
        let element = match field.dtype {
            DType::Bool | DType::U8 => 1,
            DType::U32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 => 8,
            DType::Text => return None,
        };
        let shape: Shape = field.shape.parse().ok()?;
        for dim in shape.0.iter().skip(1) {
            let length = match dim {
                Dim::Fixed(length) => *length,
                Dim::Ragged(symbol) => *limits.get(symbol.as_ref())?,
                Dim::Symbol(_) => return None,
            };
            size = size.saturating_mul(length as u64);
        }
        Some(size.saturating_mul(element))
    }
}
