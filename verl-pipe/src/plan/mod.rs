//! [`Plan`]: a checked pipeline. Only [`DataPipe::plan`] makes one.
//!
//! # Tables: rows of the same kind
//!
//! A source makes a table of `P` rows, one a prompt. A stage that expands makes `P·n` from its input table, a filter
//! makes `F(P·n)`; every other stage writes onto the table that it works on. The table that a stage works on is the
//! finest among those of the keys it reads.
//!
//! A key is visible on a finer table when its writer comes before the stage that made that table: it is *carried*
//! through it, repeated per sample by an expansion and thinned out by a filter. A key of a coarser table whose writer
//! does not come before (one that was computed per prompt beside the generation) has to be read with
//! [`reads_broadcast`](crate::stage::StageSpec::reads_broadcast), which says that repeating it is meant. Rows of
//! tables that do not descend from one another never meet in one stage.
//!
//! A filter only leaves rows out: a key of its input's rows is visible on those that it kept, whoever wrote it.
//!
//! # Waves
//!
//! A step may draw its prompts in several waves: while a filter that states a [`Refill`](crate::stage::Refill) has kept
//! too few groups, its source draws again. Tables between the two grow wave by wave, in order, and no slice of rows or
//! groups reaches over the end of a wave. The filter's own table is one list of at most as many groups as it is to
//! keep; stages that need the whole batch wait until no further wave comes.
//!
//! # Dims
//!
//! The first dim counts rows and stands for the table, so a stage may use any letter for it. A ragged dim stands for
//! the lengths of the rows; the letter belongs to the stage, and the plan follows which lengths it stands for through
//! the whole graph: where a stage writes a letter that it also reads, the lengths are those it read; where it only
//! writes the letter, they are lengths of its own. Reading two keys with the same letter demands equal lengths, and is
//! an error where they come from different stages.

pub(crate) mod build;
pub(crate) mod checks;
pub(crate) mod display;
pub mod graph;
pub mod look;
pub mod memory;
pub(crate) mod optimizer_steps;
pub(crate) mod tables;
pub(crate) mod temperatures;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::data::DataLoaderInterface;
use crate::field::{DType, Field};
use crate::pipe::{DataPipe, StageBuilder};
use crate::resource::ModelInfo;
use crate::schedule::batching::BatchPlan;
use crate::stage::{BuildContext, StageSpec};

/// Rows of the same kind: what one source, expansion or filter makes. Index into [`Plan::tables`].
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Rows as a symbol: `P`, `P·n`, `F(P·n)`.
    pub rows: String,
    /// Rows of a wave as a number, where known before the run (an upper bound after a filter).
    pub num_rows: usize,
    /// Waves that a step has at most: 1, or more on the way from a source to a filter that refills.
    pub waves: usize,
    /// Stage that makes it (index into [`Plan::stages`]).
    pub made_by: usize,
    /// Table it was made from.
    pub parent: Option<usize>,
    /// Rows per row of the parent: `n` for an expansion, 1 for a filter.
    pub factor: usize,
    /// Whether rows may be missing (made by a filter).
    pub filtered: bool,
}

/// A key on its way from the stage that writes it to one that reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct Edge {
    /// The pipeline's name of the key.
    pub key: String,
    /// The reader's own name of the key.
    pub local: String,
    /// Stage that writes it (index into [`Plan::stages`], smaller than the reader's).
    pub writer: usize,
    /// Table of the writer's rows.
    pub table: usize,
    /// Lossless conversion between the writer's and the reader's dtype.
    pub convert: Option<(DType, DType)>,
    /// One row a group on the writer's side, repeated for each sample.
    pub broadcast: bool,
}

/// A stage of a plan.
#[derive(Clone)]
pub struct PlannedStage {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// What it declares, in its own names of keys.
    pub spec: StageSpec,
    /// Its own names of keys → the pipeline's, where they differ.
    pub rename: BTreeMap<String, String>,
    /// Keys it reads.
    pub inputs: Vec<Edge>,
    /// Stages that must be done with the step before it starts, for other reasons than keys (weights).
    pub after: Vec<usize>,
    /// Table of its input rows; `None` for a source or an observer.
    pub table_in: Option<usize>,
    /// Table of its output rows; `None` for a sink or an observer.
    pub table_out: Option<usize>,
    /// Rows of one call, decided by the plan: a slice of fixed bounds, so that no result depends on timing.
    pub slice_rows: usize,
    /// Makes the stage.
    pub build: StageBuilder,
}

impl Plan {
    /// Rows that one prompt has on table `index`.
    pub fn rows_per_prompt(&self, index: usize) -> usize {
        let up = |table: &usize| self.tables[*table].parent;
        std::iter::successors(Some(index), up)
            .map(|table| self.tables[table].factor.max(1))
            .product()
    }
}

impl PlannedStage {
    /// The pipeline's name of the stage's own key `local`.
    pub fn key<'a>(&'a self, local: &'a str) -> &'a str {
        self.rename.get(local).map_or(local, String::as_str)
    }
}

/// A model of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedModel {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// What is known without weights.
    pub info: ModelInfo,
    /// Stages that read it.
    pub readers: Vec<usize>,
    /// Stages that update it.
    pub updaters: Vec<usize>,
    /// How it is trained, where a stage does and its kind says so: in a line.
    pub training: Option<String>,
}

/// A checked pipeline: stages in the order of execution, every key resolved to its writer.
#[derive(Clone)]
pub struct Plan {
    /// What was declared.
    pub pipe: DataPipe,
    /// What stages are built with.
    pub context: BuildContext,
    /// Solved batch arithmetic.
    pub batch: BatchPlan,
    /// Stages in the order of execution (topological; ties by declaration).
    pub stages: Vec<PlannedStage>,
    /// Kinds of rows.
    pub tables: Vec<Table>,
    /// Models.
    pub models: Vec<PlannedModel>,
    /// Fields by the pipeline's names of keys, as written.
    pub fields: BTreeMap<String, Field>,
    /// Findings that do not forbid a run.
    pub warnings: Vec<crate::diagnostic::Diagnostic>,
    /// Data sets that [`DataPipe::check`] has opened whole, by name: a run takes these instead of opening them again.
    pub opened: BTreeMap<String, Arc<dyn DataLoaderInterface>>,
}
