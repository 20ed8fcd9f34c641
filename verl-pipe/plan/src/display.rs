//! A [`Plan`] as text ([`std::fmt::Display`]) and as a graph for Graphviz ([`Plan::to_dot`]).
//!
//! Rows of keys are printed as the table they belong to: `[P·n, T~]` is what a stage declares as `[B, T~]`.

use std::fmt::{self, Write};

use verl_declare::sizes::WorkerKind;
use verl_words::field::Field;
use verl_words::shape::{Dim, Shape};
use verl_words::stage::{Access, Cadence, Cardinality, OnShort, RowRule};

use crate::{Edge, Plan, PlannedStage};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_graph(f)?;
        self.write_training(f)?;
        self.write_memory(f)?;
        for warning in &self.warnings {
            write!(f, "\n{warning}\n")?;
        }
        Ok(())
    }
}

/// A plan as text without warnings and optimiser settings: a different learning rate does not change the plan.
pub struct Unwarned<'a>(pub &'a Plan);

impl fmt::Display for Unwarned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write_graph(f)?;
        self.0.write_memory(f)
    }
}

impl Plan {
    fn write_graph(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "pipeline {}: {}, {}, {}, {}",
            self.pipe.name,
            count(self.stages.len(), "stage"),
            count(self.models.len(), "model"),
            count(self.pipe.data.len(), "data set"),
            count(
                usize::try_from(self.context.steps).unwrap_or(usize::MAX),
                "step"
            ),
        )?;
        self.write_groups(f)?;
        writeln!(f, "\nstages, in the order of execution")?;
        for (index, stage) in self.stages.iter().enumerate() {
            self.write_stage(f, index, stage)?;
        }
        self.write_batch(f)?;
        self.write_group_edges(f)
    }
}

/// Maximum width of a line of a plan, in columns.
const WIDTH: usize = 100;

pub(crate) fn count(n: usize, what: &str) -> String {
    if n == 1 {
        format!("1 {what}")
    } else {
        format!("{n} {what}s")
    }
}

impl Plan {
    /// The named device groups and what is in each; nothing without named groups.
    fn write_groups(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, group) in self
            .groups
            .iter()
            .enumerate()
            .filter(|(_, group)| group.is_named)
        {
            if index == 0 {
                writeln!(f, "\ndevice groups, which work at the same time")?;
            }
            let models = self.models.iter().filter_map(|model| {
                let is_copy = model.copies.iter().any(|(at, _)| *at == index);
                match (model.home == index, is_copy) {
                    (true, _) => Some(model.name.clone()),
                    (false, true) => Some(format!("copy of {}", model.name)),
                    (false, false) => None,
                }
            });
            let models: Vec<String> = models.collect();
            let stages = self
                .stages
                .iter()
                .filter(|stage| stage.group == Some(index));
            let stages: Vec<&str> = stages.map(|stage| stage.name.as_str()).collect();
            let worker = match group.worker {
                WorkerKind::Thread => "",
                WorkerKind::Process => ", a process of its own",
            };
            writeln!(f, "  {:<12}{}{worker}", group.name, group.devices_text())?;
            for (what, list) in [("models", models.join(", ")), ("stages", stages.join(", "))] {
                if list.is_empty() {
                    writeln!(f, "              no {what}")?;
                } else {
                    writeln!(f, "              {what}: {list}")?;
                }
            }
            if group.worker == WorkerKind::Process {
                let own = self.models.iter().filter(|model| model.home == index);
                let state: u64 = own
                    .filter(|model| !model.updaters.is_empty())
                    .map(|model| model.info.weight_bytes + model.info.optimizer_bytes)
                    .sum();
                let every = count(
                    usize::try_from(self.pipe.run.worker_snapshot_steps).unwrap_or(usize::MAX),
                    "step",
                );
                match state {
                    0 => writeln!(
                        f,
                        "              snapshot: none, as nothing is trained here"
                    )?,
                    _ => writeln!(
                        f,
                        "              snapshot: {} every {every}, kept in the memory of the run",
                        bytes(state)
                    )?,
                }
            }
        }
        Ok(())
    }

    fn write_stage(
        &self,
        f: &mut fmt::Formatter<'_>,
        index: usize,
        stage: &PlannedStage,
    ) -> fmt::Result {
        let title = if stage.name == stage.kind {
            stage.name.clone()
        } else {
            format!("{} ({})", stage.name, stage.kind)
        };
        let rows = format!("{} ", self.rows(stage));
        writeln!(
            f,
            "\n{:>3}  {title:<32}  {rows:<26}{}",
            index + 1,
            self.cut(stage)
        )?;
        if let Some(refill) = &stage.spec.refill {
            let then = match refill.on_short {
                OnShort::Error => "or the run ends",
                OnShort::Continue => "or continues with fewer",
            };
            let (groups, waves) = (count(refill.groups, "group"), count(refill.waves, "wave"));
            writeln!(f, "       keeps {groups} out of at most {waves}, {then}")?;
        }
        for (model, access) in &stage.spec.models {
            let verb = match access {
                Access::Read => "reads the weights of",
                Access::Update => "updates",
            };
            writeln!(f, "       {verb} `{model}`")?;
        }
        for edge in &stage.inputs {
            let line = format!(
                "       <- {:<22}from {}{}",
                edge.key,
                self.name(edge.writer),
                self.notes(stage, edge)
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        for field in &stage.spec.writes {
            let key = stage.key(&field.name);
            let shape = self.shape(field, stage.table_out);
            let line = format!(
                "       -> {key:<22}{:<5}{shape:<10}",
                field.dtype.to_string()
            );
            match &field.tag {
                None => writeln!(f, "{}", line.trim_end())?,
                Some(tag) if line.chars().count() + tag.to_string().chars().count() < WIDTH => {
                    writeln!(f, "{line} {tag}")?;
                }
                Some(tag) => writeln!(f, "{}\n          {tag}", line.trim_end())?,
            }
        }
        let waits: Vec<&str> = stage.after.iter().map(|&other| self.name(other)).collect();
        if !waits.is_empty() {
            let line = format!(
                "       waits for {}, which read what it changes",
                waits.join(", ")
            );
            writeln!(f, "{line}")?;
        }
        Ok(())
    }

    fn name(&self, stage: usize) -> &str {
        &self.stages[stage].name
    }

    /// The stage's effect on the rows, with their numbers.
    fn rows(&self, stage: &PlannedStage) -> String {
        let number = |table: Option<usize>| {
            table.map_or_else(String::new, |index| {
                let table = &self.tables[index];
                let most = if table.filtered { "at most " } else { "" };
                let wave = if table.waves > 1 { " a wave" } else { "" };
                format!("{} = {most}{}{wave}", table.rows, table.num_rows)
            })
        };
        let symbol =
            |table: Option<usize>| table.map_or("", |index| self.tables[index].rows.as_str());
        match stage.spec.rows {
            RowRule::Expand(_) | RowRule::Filter => {
                format!("{} -> {}", symbol(stage.table_in), number(stage.table_out))
            }
            RowRule::Source => number(stage.table_out),
            RowRule::Same | RowRule::Sink => number(stage.table_in),
        }
    }

    /// How the executor may cut the stage's input.
    fn cut(&self, stage: &PlannedStage) -> String {
        if let Cadence::Observer { every } = stage.spec.cadence {
            return match every {
                0 => "before the first and after the last step".to_owned(),
                every => format!("between steps, every {every}"),
            };
        }
        if stage.spec.rows == RowRule::Source {
            return match stage.table_out.map_or(1, |table| self.tables[table].waves) {
                1 => "source".to_owned(),
                waves => format!("source, at most {}", count(waves, "wave")),
            };
        }
        let rows = count(stage.slice_rows, "row");
        match stage.spec.cardinality {
            Cardinality::Row => format!("streams, {rows} a call"),
            Cardinality::Group => format!("streams groups, {rows} a call"),
            Cardinality::Batch => "waits for the whole batch".to_owned(),
        }
    }

    /// A field's shape with the table in place of the letter for rows.
    fn shape(&self, field: &Field, table: Option<usize>) -> String {
        let Ok(Shape(mut dims)) = field.parsed_shape() else {
            return field.shape.to_string();
        };
        if let (Some(first), Some(table)) = (dims.first_mut(), table) {
            *first = Dim::Symbol(self.tables[table].rows.clone().into());
        }
        Shape(dims).to_string()
    }

    /// What happens to a key between its writer and `reader`.
    fn notes(&self, reader: &PlannedStage, edge: &Edge) -> String {
        let mut notes = String::new();
        if edge.local != edge.key {
            let _ = write!(notes, ", as `{}`", edge.local);
        }
        if let Some((from, to)) = edge.convert {
            let _ = write!(notes, ", converted {from} -> {to}");
        }
        if let Some(on) = reader.table_in.filter(|&on| on != edge.table) {
            let per_prompt = [on, edge.table].map(|table| self.rows_per_prompt(table));
            let times = per_prompt[0] / per_prompt[1].max(1);
            let word = if edge.broadcast {
                "broadcast"
            } else {
                "repeated"
            };
            if times > 1 {
                let _ = write!(notes, ", {word} {times} times");
            } else {
                let coarse = &self.tables[edge.table].rows;
                let _ = write!(notes, ", filtered from {coarse}");
            }
        }
        notes
    }

    fn write_batch(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.batch;
        let mini_prompts = b.mini_rows / b.samples.max(1);
        let mini_rows_per_device = b.mini_rows / b.devices.max(1);
        let tensor_parallel = b.devices / b.rollout_shards.max(1);
        let refills = self.stages.iter().any(|stage| stage.spec.refill.is_some());
        // With a refill the first sizes are those of a wave.
        let (prompts, samples, unit) = match refills {
            true => ("prompts a wave", "samples a wave", "wave"),
            false => ("prompts a step", "samples a step", "step"),
        };
        let (kept, pool) = match refills {
            true => ("groups", b.groups),
            false => ("prompts", b.prompts),
        };
        let mut lines = vec![
            (prompts, "prompts".to_owned(), b.prompts),
            (
                samples,
                format!("prompts · samples = {} · {}", b.prompts, b.samples),
                b.rows,
            ),
            (
                "rollout engines",
                format!(
                    "devices / rollout_tensor_parallel = {} / {tensor_parallel}",
                    b.devices
                ),
                b.rollout_shards,
            ),
            (
                "samples of a rollout engine",
                format!(
                    "samples a {unit} / engines = {} / {}",
                    b.rows, b.rollout_shards
                ),
                b.rows_per_rollout_shard,
            ),
            (
                "log-prob micro-batches of an engine's samples",
                format!("⌈{} / {}⌉", b.rows_per_rollout_shard, b.log_prob_micro_rows),
                b.log_prob_micro_batches,
            ),
            (
                "samples of a device",
                format!("samples a {unit} / devices = {} / {}", b.rows, b.devices),
                b.rows_per_device,
            ),
            (
                "mini-batches of a pass",
                format!("{kept} / mini_batch = {pool} / {mini_prompts}"),
                b.mini_batches,
            ),
            (
                "samples of a mini-batch",
                format!("mini_batch · samples = {mini_prompts} · {}", b.samples),
                b.mini_rows,
            ),
            (
                "samples of a mini-batch on a device",
                format!("{} / {}", b.mini_rows, b.devices),
                mini_rows_per_device,
            ),
            (
                "micro-batches of a mini-batch on a device",
                format!("{mini_rows_per_device} / {}", b.micro_rows),
                b.micro_batches,
            ),
            (
                "optimiser steps a step",
                format!("mini-batches · epochs = {} · {}", b.mini_batches, b.epochs),
                b.optimizer_steps,
            ),
        ];
        if refills {
            let most = b.rows.saturating_mul(b.waves);
            let kept = b.groups.saturating_mul(b.samples);
            let bounds = [
                (
                    "samples that a step draws at most",
                    format!("samples a wave · waves = {} · {}", b.rows, b.waves),
                    most,
                ),
                (
                    "samples that a step keeps at most",
                    format!("groups · samples = {} · {}", b.groups, b.samples),
                    kept,
                ),
            ];
            lines.splice(2..2, bounds);
        }
        writeln!(f, "\nbatch arithmetic")?;
        for (what, formula, value) in lines {
            writeln!(f, "  {what:<46}{formula:<42}{value:>9}")?;
        }
        // Replicas are not devices of this arithmetic: they take the micro-batches in turn.
        for (index, group) in self.groups.iter().enumerate() {
            let mut own = self.models.iter().filter(|model| model.home == index);
            if group.devices.len() < 2 || own.all(|model| model.updaters.is_empty()) {
                continue;
            }
            let replicas = group.devices.len();
            let what = format!("rounds of a mini-batch on `{}`", group.name);
            let formula = format!(
                "⌈micro-batches / replicas⌉ = ⌈{} / {replicas}⌉",
                b.micro_batches
            );
            let rounds = b.micro_batches.div_ceil(replicas);
            writeln!(f, "  {what:<46}{formula:<42}{rounds:>9}")?;
        }
        Ok(())
    }

    fn write_training(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trained = self.models.iter();
        let trained = trained.filter_map(|model| Some((&model.name, model.training.as_ref()?)));
        for (index, (name, training)) in trained.enumerate() {
            if index == 0 {
                writeln!(f, "\ntraining")?;
            }
            let steps = self.context.optimizer_steps.get(name);
            let steps = steps.copied().unwrap_or_default();
            let steps = count(
                usize::try_from(steps).unwrap_or(usize::MAX),
                "optimiser step",
            );
            writeln!(f, "  {name:<12}{steps}, {training}")?;
        }
        Ok(())
    }

    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.models.is_empty() {
            return Ok(());
        }
        for memory in self.memory() {
            write!(f, "\n{memory}")?;
        }
        Ok(())
    }

    /// The graph in Graphviz' language: stages, keys on edges, order of weights dashed.
    pub fn to_dot(&self) -> String {
        let mut dot = format!(
            "digraph \"{}\" {{\n  rankdir=LR;\n  node [shape=box];\n",
            escape(&self.pipe.name)
        );
        for (index, stage) in self.stages.iter().enumerate() {
            let models: Vec<String> = stage
                .spec
                .models
                .iter()
                .map(|(model, access)| {
                    format!(
                        "{} {model}",
                        if *access == Access::Read {
                            "reads"
                        } else {
                            "updates"
                        }
                    )
                })
                .collect();
            let mut label = escape(&stage.name);
            for line in [self.rows(stage), models.join(", ")]
                .iter()
                .filter(|line| !line.is_empty())
            {
                label = format!("{label}\\n{}", escape(line));
            }
            let _ = writeln!(dot, "  s{index} [label=\"{label}\"];");
        }
        for (index, stage) in self.stages.iter().enumerate() {
            let mut keys: std::collections::BTreeMap<usize, Vec<&str>> =
                std::collections::BTreeMap::new();
            for edge in &stage.inputs {
                keys.entry(edge.writer).or_default().push(&edge.key);
            }
            for (writer, keys) in keys {
                let label: Vec<String> = keys.into_iter().map(escape).collect();
                let _ = writeln!(
                    dot,
                    "  s{writer} -> s{index} [label=\"{}\"];",
                    label.join("\\n")
                );
            }
            for before in &stage.after {
                let _ = writeln!(dot, "  s{before} -> s{index} [style=dashed];");
            }
        }
        dot.push_str("}\n");
        dot
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

pub(crate) fn parameters(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.2} B", n as f64 / 1e9),
        1_000_000.. => format!("{:.1} M", n as f64 / 1e6),
        _ => n.to_string(),
    }
}

/// A number of bytes with a binary unit: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_printed_in_powers_of_1024() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }
}
