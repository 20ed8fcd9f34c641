//! [`Plan`]: a checked pipeline. Only [`Plannable::plan`] makes one.
//!
//! # Tables: rows of the same kind
//!
//! A source makes a table of `P` rows, one a prompt. A stage that expands makes `P·n` from its input table, a filter
//! makes `F(P·n)`; every other stage writes onto the table that it works on. The table that a stage works on is the
//! finest among those of the keys it reads.
//!
//! A key is visible on a finer table when its writer comes before the stage that made that table: it is *carried*
//! through it, repeated per sample by an expansion and filtered by a filter. A key of a coarser table whose writer
//! does not come before (one that is computed per prompt in parallel with the generation) has to be read with
//! [`reads_broadcast`](verl_words::stage::StageSpec::reads_broadcast), which declares that the repetition is intended. Rows
//! of tables that do not descend from one another never meet in one stage.
//!
//! A filter only removes rows: a key of its input rows is visible on the rows that it keeps, whichever stage wrote it.
//!
//! # Waves
//!
//! A step may draw its prompts in several waves: as long as a filter that declares a [`Refill`](verl_words::stage::Refill)
//! has kept too few groups, its source draws again. Tables between the two grow wave by wave, in order, and no slice of
//! rows or groups crosses the end of a wave. The filter's own table is a single list with at most the number of groups
//! that the filter has to keep; stages that need the whole batch wait until the last wave is done.
//!
//! # Dims
//!
//! The first dim counts rows and stands for the table, so a stage may use any letter for it. A ragged dim stands for
//! the lengths of the rows; the letter belongs to the stage, and the plan follows which lengths it stands for through
//! the whole graph: where a stage writes a letter that it also reads, the lengths are those it read; where it only
//! writes the letter, they are new lengths. Reading two keys with the same letter requires equal lengths, and is an
//! error where the lengths come from different stages.

pub(crate) mod build;
pub(crate) mod checks;
pub mod display;
pub mod graph;
mod group_edges;
pub(crate) mod layout;
pub mod look;
pub mod memory;
pub(crate) mod optimizer_steps;
pub mod read;
pub mod schedule;
pub(crate) mod tables;
pub(crate) mod temperatures;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use build::{Plannable, plan_to_inspect};

use crate::schedule::groups::DeviceGroup;
use verl_declare::pipe::{DataPipe, StageBuilder};
use verl_words::data::DataLoaderInterface;
use verl_words::diagnostic::Diagnostic;
use verl_words::field::{DType, Field};
use verl_words::resource::ModelInfo;
use verl_words::stage::{BatchPlan, BuildContext, ConfigError, Stage, StageSpec};

/// Rows of the same kind: the output of one source, expansion or filter. Index into [`Plan::tables`].
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Rows as a symbol: `P`, `P·n`, `F(P·n)`.
    pub rows: String,
    /// Rows of a wave as a number, where known before the run (an upper bound after a filter).
    pub num_rows: usize,
    /// Maximum number of waves of a step: 1, or more between a source and a filter that refills.
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
    name: String,
    kind: String,
    spec: StageSpec,
    rename: BTreeMap<String, String>,
    inputs: Vec<Edge>,
    after: Vec<usize>,
    table_in: Option<usize>,
    table_out: Option<usize>,
    slice_rows: usize,
    group: Option<usize>,
    build: StageBuilder,
}

impl PlannedStage {
    /// Name in the pipeline.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Registered kind.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// What it declares, with its own names of keys.
    pub fn spec(&self) -> &StageSpec {
        &self.spec
    }

    /// Its own names of keys → the pipeline's, where they differ.
    pub fn rename(&self) -> &BTreeMap<String, String> {
        &self.rename
    }

    /// The pipeline's name of the stage's own key `local`.
    pub fn key<'a>(&'a self, local: &'a str) -> &'a str {
        self.rename.get(local).map_or(local, String::as_str)
    }

    /// Keys it reads.
    pub fn inputs(&self) -> &[Edge] {
        &self.inputs
    }

    /// Stages that must finish the step before this one starts because of weights rather than keys.
    pub fn after(&self) -> &[usize] {
        &self.after
    }

    /// Table of its input rows; `None` for a source or an observer.
    pub fn table_in(&self) -> Option<usize> {
        self.table_in
    }

    /// Table of its output rows; `None` for a sink or an observer.
    pub fn table_out(&self) -> Option<usize> {
        self.table_out
    }

    /// Rows of one call. The plan fixes the bounds of every slice, so that no result depends on timing.
    pub fn slice_rows(&self) -> usize {
        self.slice_rows
    }

    /// The device group in which it runs (index into [`Plan::groups`]); `None` for the host pool.
    pub fn group(&self) -> Option<usize> {
        self.group
    }

    /// Makes the stage.
    ///
    /// # Errors
    /// Settings that the stage refuses.
    pub fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        (self.build)(context)
    }
}

/// A model of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedModel {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// What is known without loading weights.
    pub info: ModelInfo,
    /// Its device group (index into [`Plan::groups`]): the only one in which it is updated.
    pub home: usize,
    /// Other groups that have a copy of its weights, with what is known about it there.
    pub copies: Vec<(usize, ModelInfo)>,
    /// Stages that read it.
    pub readers: Vec<usize>,
    /// Stages that update it.
    pub updaters: Vec<usize>,
    /// How it is trained, in one line; `None` if no stage trains it or its kind gives no summary.
    pub training: Option<String>,
}

/// A checked pipeline: stages in the order of execution, every key resolved to its writer. Nothing outside this crate can
/// make or change one.
#[derive(Clone)]
pub struct Plan {
    pipe: DataPipe,
    context: BuildContext,
    batch: BatchPlan,
    stages: Vec<PlannedStage>,
    tables: Vec<Table>,
    models: Vec<PlannedModel>,
    groups: Vec<DeviceGroup>,
    fields: BTreeMap<String, Field>,
    warnings: Vec<Diagnostic>,
    opened: BTreeMap<String, Arc<dyn DataLoaderInterface>>,
}

impl Plan {
    /// What was declared.
    pub fn pipe(&self) -> &DataPipe {
        &self.pipe
    }

    /// The context that stages are built with.
    pub fn context(&self) -> &BuildContext {
        &self.context
    }

    /// Solved batch arithmetic.
    pub fn batch(&self) -> &BatchPlan {
        &self.batch
    }

    /// Stages in the order of execution (topological; ties by declaration).
    pub fn stages(&self) -> &[PlannedStage] {
        &self.stages
    }

    /// Tables, one for each kind of rows.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Rows that one prompt has on table `index`.
    pub fn rows_per_prompt(&self, index: usize) -> usize {
        let up = |table: &usize| self.tables[*table].parent;
        std::iter::successors(Some(index), up)
            .map(|table| self.tables[table].factor.max(1))
            .product()
    }

    /// Models.
    pub fn models(&self) -> &[PlannedModel] {
        &self.models
    }

    /// Device groups, by declaration; one worker each.
    pub fn groups(&self) -> &[DeviceGroup] {
        &self.groups
    }

    /// Fields by the pipeline's names of keys, as written.
    pub fn fields(&self) -> &BTreeMap<String, Field> {
        &self.fields
    }

    /// Findings that do not prevent a run.
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// Data sets that [`Plannable::check`] opened completely, by name: a run uses these instead of opening them again.
    pub fn opened(&self) -> &BTreeMap<String, Arc<dyn DataLoaderInterface>> {
        &self.opened
    }
}
