//! The page of one concrete pipeline.

use serde_json::{Value, json};
use verl_words::stage::{Access, Cardinality};

use super::Page;
use super::keys::distribution;
use super::words::sentence;
use crate::schema::edges::{DimOfPipeline, EdgeOfPipeline, PipelineEdges, StageOfPipeline};

/// The page of one concrete pipeline.
pub fn edges_page(edges: &PipelineEdges) -> String {
    let mut page = Page::new(&Value::Null);
    page.out = format!("# Edges of pipeline `{}`\n\n", edges.pipeline);
    page.wrapped(
        "",
        "",
        "The keys that pass from stage to stage in a step, each with its type and shape, meaning, sizes, writer and readers. The first dim of a shape counts rows: `P` counts prompts, `P·n` samples, `F(…)` the rows that a filter keeps. A dim with `~` is a length that differs from row to row.",
    );
    page.section("Stages in order");
    for stage in &edges.stages {
        page.stage_of_pipeline(stage, edges);
    }
    for edge in &edges.edges {
        page.section(&format!("`{}`", edge.key));
        page.edge(edge);
    }
    page.out
}

impl Page<'_> {
    fn stage_of_pipeline(&mut self, stage: &StageOfPipeline, edges: &PipelineEdges) {
        let kind = match stage.kind == stage.name {
            true => String::new(),
            false => format!(" (kind `{}`)", stage.kind),
        };
        let all = &edges.edges;
        let reads = all
            .iter()
            .any(|edge| edge.readers.iter().any(|r| r.stage == stage.name));
        let writes = all.iter().any(|edge| edge.writer.stage == stage.name);
        let does = match (reads, writes, stage.cut) {
            (false, true, _) => "makes the rows",
            (false, false, _) => "runs between steps, without keys",
            (true, _, Cardinality::Row) => "works on any slice of rows",
            (true, _, Cardinality::Group) => "works on whole groups, all samples of a prompt",
            (true, _, Cardinality::Batch) => "works on the whole batch of a step",
        };
        let models = stage.models.iter().map(|(name, access)| match access {
            Access::Read => format!("; reads model `{name}`"),
            Access::Update => format!("; updates model `{name}`"),
        });
        let models: String = models.collect();
        let line = format!("`{}`{kind}: {does}{models}.", stage.name);
        self.item(0, &line);
    }

    fn edge(&mut self, edge: &EdgeOfPipeline) {
        let mut line = format!("{} {}", edge.dtype, edge.shape);
        if !edge.unit.is_empty() {
            line += &format!(", {}", edge.unit);
        }
        line += &format!(". {}", sentence(&edge.meaning));
        line += &distribution(&json!(edge.distribution));
        let mut rules = Vec::new();
        rules.extend(edge.finite.then_some("finite"));
        rules.extend(edge.nullable.then_some("may be null"));
        if !rules.is_empty() {
            line += &format!(" Values: {}.", rules.join(", "));
        }
        self.item(0, &line);
        let dims: Vec<String> = edge.dims.iter().map(dim).collect();
        self.item(0, &format!("Dims: {}.", dims.join("; ")));
        let writer = renamed(&edge.writer.stage, &edge.writer.key, &edge.key);
        self.item(0, &format!("Written by {writer}."));
        let readers = edge.readers.iter().map(|reader| {
            let mut line = renamed(&reader.stage, &reader.key, &edge.key);
            if let Some(to) = reader.converted_to {
                line += &format!(" converted to {to}");
            }
            if reader.repeated > 1 {
                line += &format!(" (each row {} times, once a sample)", reader.repeated);
            }
            line
        });
        let readers: Vec<String> = readers.collect();
        match readers.is_empty() {
            true => self.item(0, "Read by no stage."),
            false => self.item(0, &format!("Read by {}.", readers.join(", "))),
        }
    }
}

fn dim(dim: &DimOfPipeline) -> String {
    let most = if dim.at_most { "at most " } else { "" };
    let waves = match dim.waves {
        1 => String::new(),
        waves => format!(" a wave, at most {waves} waves"),
    };
    match (dim.size, &dim.lengths_of) {
        (Some(size), _) => format!("{} = {most}{size}{waves}", dim.dim),
        (None, Some(stage)) => {
            format!(
                "{} differs from row to row, with lengths from `{stage}`",
                dim.dim
            )
        }
        (None, None) => dim.dim.clone(),
    }
}

fn renamed(stage: &str, own: &str, key: &str) -> String {
    if own == key {
        format!("`{stage}`")
    } else {
        format!("`{stage}` as `{own}`")
    }
}
