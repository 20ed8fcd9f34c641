//! [`DataPipe`] into [`Plan`]: builds the stages and the graph, runs the checks, collects all findings.

use std::collections::{BTreeMap, HashMap};

use verl_declare::pipe::{DataPipe, ModelDecl, StageDecl};
use verl_words::diagnostic::Diagnostic;
use verl_words::field::Field;
use verl_words::resource::ModelInfo;
use verl_words::stage::{Access, BuildContext, Cadence, Cardinality, ConfigError, StageSpec};

use crate::graph::Digraph;
use crate::layout::{Groups, Layout, lay_out};
use crate::look::{Checked, Look, check_with_rows};
use crate::schedule::batching::{MINI_BATCH, Violation, estimate};
use crate::tables::{self, Tables};
use crate::{
    Edge, Plan, PlannedModel, PlannedStage, checks, memory, optimizer_steps, temperatures,
};

/// A pipeline before any check.
pub(crate) struct Prepared<'a> {
    pub context: BuildContext,
    pub violations: Vec<Violation>,
    pub stages: Vec<DraftStage<'a>>,
    /// The description of each model.
    pub models: Vec<Result<ModelInfo, Vec<ConfigError>>>,
}

/// A declared stage and its specification; stage indices in a draft follow the order of declaration.
pub(crate) struct DraftStage<'a> {
    pub decl: &'a StageDecl,
    /// `None` when the stage could not be built.
    pub spec: Option<StageSpec>,
    pub errors: Vec<ConfigError>,
    /// Temperature that it uses if its own is not set.
    pub temperature: Option<f64>,
}

impl DraftStage<'_> {
    /// The pipeline's name of the stage's own key `local`.
    pub fn key<'b>(&'b self, local: &'b str) -> &'b str {
        self.decl.rename.get(local).map_or(local, String::as_str)
    }

    /// Whether it processes rows of a step.
    pub fn in_step(&self) -> bool {
        self.spec
            .as_ref()
            .is_some_and(|spec| spec.cadence == Cadence::Step)
    }
}

/// The stages that write a key.
#[derive(Clone)]
pub(crate) struct Written<'a> {
    /// First stage that writes it.
    pub stage: usize,
    /// The field as that stage declares it, in its own name.
    pub field: &'a Field,
    /// Further stages that write it, which is an error.
    pub again: Vec<usize>,
}

/// A key on its way from its writer to a reader.
pub(crate) struct Link<'a> {
    pub key: String,
    pub reader: usize,
    pub writer: usize,
    pub read: &'a Field,
    pub written: &'a Field,
    pub broadcast: bool,
}

/// A key that a stage requires and no stage writes.
pub(crate) struct Missing<'a> {
    pub key: String,
    pub reader: usize,
    pub read: &'a Field,
}

/// Input of the checks.
pub(crate) struct Draft<'a> {
    pub pipe: &'a DataPipe,
    pub context: &'a BuildContext,
    pub violations: &'a [Violation],
    pub stages: &'a [DraftStage<'a>],
    pub models: &'a [Result<ModelInfo, Vec<ConfigError>>],
    /// Keys by the pipeline's names.
    pub written: BTreeMap<String, Written<'a>>,
    /// Links by reader.
    pub links: Vec<Vec<Link<'a>>>,
    pub missing: Vec<Missing<'a>>,
    /// Edges from writers to readers.
    pub graph: Digraph,
    /// Where models and stages are.
    pub layout: Layout,
    /// What has no place.
    pub layout_findings: Vec<Diagnostic>,
}

impl Draft<'_> {
    /// Name of stage `index`.
    pub fn name(&self, index: usize) -> &str {
        &self.stages[index].decl.name
    }

    /// Whether every stage could be built; otherwise some keys are unknown.
    pub fn complete(&self) -> bool {
        self.stages.iter().all(|stage| stage.spec.is_some())
    }
}

/// Whether a pipeline may be planned without the files of its models and data.
#[derive(Clone, Copy)]
enum Files {
    Required,
    Optional,
}

/// [`DataPipe`] → [`Plan`]: the checks of a declared pipeline.
pub trait Plannable {
    /// Checks the whole pipeline and puts its stages in order. Loads no weights and reads no data, but reports missing
    /// files.
    ///
    /// A stage runs after the stages that write what it reads; ties are resolved by the order of declaration.
    /// A stage that updates a model runs after the stages of the step that read the model and do not need the
    /// update's result.
    ///
    /// ```
    /// use verl_pipe::pipe::DataPipe;
    /// use verl_pipe::plan::Plannable;
    ///
    /// let plan = DataPipe::new("empty").plan().unwrap();
    /// assert!(plan.stages().is_empty());
    /// assert_eq!(plan.batch().rows, 8);
    /// ```
    ///
    /// # Errors
    /// All findings, warnings included, when at least one of them is an error.
    fn plan(&self) -> Result<Plan, Vec<Diagnostic>>;

    /// As [`Plannable::plan`], but also checks the rows of the data sets, as `pipe check` does: rows that a run would
    /// refuse are findings like the others. Loads no weights.
    ///
    /// ```
    /// use verl_pipe::pipe::DataPipe;
    /// use verl_pipe::plan::{Plannable, look::Look};
    ///
    /// let checked = DataPipe::new("empty").check(&Look::default());
    /// assert!(checked.plan.unwrap().stages().is_empty());
    /// assert!(checked.rows.is_empty());
    /// ```
    fn check(&self, look: &Look) -> Checked;
}

impl Plannable for DataPipe {
    fn plan(&self) -> Result<Plan, Vec<Diagnostic>> {
        plan_prepared(self, &prepare(self))
    }

    fn check(&self, look: &Look) -> Checked {
        check_with_rows(self, look)
    }
}

/// [`Plannable::plan`] of a prepared pipeline.
pub(crate) fn plan_prepared(
    pipe: &DataPipe,
    prepared: &Prepared<'_>,
) -> Result<Plan, Vec<Diagnostic>> {
    checked(pipe, prepared, Files::Required).map(|(plan, _)| plan)
}

/// As [`Plannable::plan`], to inspect the files of an earlier run: model folders and data files that no longer exist
/// are not errors. Returns findings about them with the plan, which then does not know the sizes of the models.
///
/// # Errors
/// As [`Plannable::plan`].
pub fn plan_to_inspect(pipe: &DataPipe) -> Result<(Plan, Vec<Diagnostic>), Vec<Diagnostic>> {
    checked(pipe, &prepare(pipe), Files::Optional)
}

fn checked(
    pipe: &DataPipe,
    prepared: &Prepared<'_>,
    files: Files,
) -> Result<(Plan, Vec<Diagnostic>), Vec<Diagnostic>> {
    let Prepared {
        context,
        violations,
        stages,
        models,
    } = prepared;
    let draft = draft(pipe, context, violations, stages, models);

    let mut findings = Vec::new();
    findings.extend(draft.layout_findings.iter().cloned());
    for check in checks::SETTINGS {
        check(&draft, &mut findings);
    }
    let mut file_findings = Vec::new();
    checks::files::check(&draft, &mut file_findings);
    match files {
        Files::Required => findings.append(&mut file_findings),
        Files::Optional => file_findings.retain(Diagnostic::is_error),
    }
    for check in checks::DECLARED {
        check(&draft, &mut findings);
    }
    if let Err(cycles) = draft.graph.topological_order() {
        checks::cycles::report(&draft, &cycles, &mut findings);
        return Err(sorted(findings));
    }
    let (graph, after) = weight_order(&draft);
    let order = graph.topological_order().unwrap_or_default();
    let tables = tables::lay_out(&draft, &order, &mut findings);
    for check in checks::ORDERED {
        check(&draft, &order, &tables, &mut findings);
    }
    let optimizer_steps = optimizer_steps::of_models(&draft, &tables);
    let training = optimizer_steps::training(&draft, &optimizer_steps);
    optimizer_steps::check(&draft, &training, &mut findings);
    if findings.iter().any(Diagnostic::is_error) {
        return Err(sorted(findings));
    }
    let mut plan = assemble(&draft, &order, &after, &tables, findings);
    optimizer_steps::settle(&mut plan, optimizer_steps, training);
    plan.warnings.extend(memory::check(&plan));
    Ok((plan, file_findings))
}

/// The stages of a pipeline, the context that they are built with, and the rules of the batch arithmetic that do not
/// hold.
///
/// A refilling filter decides how many prompts' samples an update sees, so the arithmetic is solved again, and the
/// stages are built again with its result, once the stages are known.
pub(crate) fn prepare(pipe: &DataPipe) -> Prepared<'_> {
    let devices = checks::one_device::without_refused(pipe);
    let groups = Groups::of(pipe);
    let (batch, violations) = estimate(&pipe.batch, &devices, None);
    let mut context = BuildContext {
        batch,
        seed: pipe.run.seed,
        steps: pipe.run.steps,
        models: pipe.models.iter().map(|model| model.name.clone()).collect(),
        data: pipe.data.iter().map(|data| data.name.clone()).collect(),
        device: groups.device(groups.default.unwrap_or_default()),
        base: pipe.base.clone(),
        model_infos: BTreeMap::new(),
        temperature: None,
        optimizer_steps: BTreeMap::new(),
    };
    let describe = |model: &ModelDecl| {
        let home = groups.home(model.group.as_deref());
        model.describe(&on_device(&context, groups.device(home)))
    };
    let models: Vec<_> = pipe.models.iter().map(describe).collect();
    let described = pipe.models.iter().zip(&models);
    context.model_infos = described
        .filter_map(|(decl, info)| Some((decl.name.clone(), info.as_ref().ok()?.clone())))
        .collect();
    let mut prepared = Prepared {
        stages: built(pipe, &context),
        context,
        violations,
        models,
    };
    let mut refills = prepared.stages.iter();
    let refill = refills.find_map(|stage| stage.spec.as_ref()?.refill);
    if let Some(refill) = refill {
        let (batch, violations) = estimate(&pipe.batch, &devices, Some(&refill));
        prepared.context.batch = batch;
        prepared.violations = violations;
        prepared.stages = built(pipe, &prepared.context);
    } else if prepared.stages.iter().any(|stage| stage.spec.is_none()) {
        // A stage that could not be built may be the filter whose groups are cut into mini-batches.
        let violations = &mut prepared.violations;
        violations.retain(|violation| violation.setting != MINI_BATCH);
    }
    let followed = temperatures::followed(&prepared.stages);
    for (stage, temperature) in prepared.stages.iter_mut().zip(followed) {
        if temperature.is_some() {
            *stage = build(
                stage.decl,
                &temperatures::with(&prepared.context, temperature),
            );
            stage.temperature = temperature;
        }
    }
    prepared
}

/// The same context on another device.
fn on_device(context: &BuildContext, device: String) -> BuildContext {
    BuildContext {
        device,
        ..context.clone()
    }
}

fn built<'a>(pipe: &'a DataPipe, context: &BuildContext) -> Vec<DraftStage<'a>> {
    let stages = pipe.stages.iter();
    stages.map(|decl| build(decl, context)).collect()
}

/// Errors first, otherwise in the order of the checks.
pub(crate) fn sorted(mut findings: Vec<Diagnostic>) -> Vec<Diagnostic> {
    findings.sort_by_key(|finding| !finding.is_error());
    findings
}

fn build<'a>(decl: &'a StageDecl, context: &BuildContext) -> DraftStage<'a> {
    let (spec, errors) = match (decl.build)(context) {
        Ok(stage) => (Some(stage.spec()), Vec::new()),
        Err(errors) => (None, errors),
    };
    DraftStage {
        decl,
        spec,
        errors,
        temperature: None,
    }
}

fn draft<'a>(
    pipe: &'a DataPipe,
    context: &'a BuildContext,
    violations: &'a [Violation],
    stages: &'a [DraftStage<'a>],
    models: &'a [Result<ModelInfo, Vec<ConfigError>>],
) -> Draft<'a> {
    let mut written: BTreeMap<String, Written<'a>> = BTreeMap::new();
    for (index, stage) in stages
        .iter()
        .enumerate()
        .filter(|(_, stage)| stage.in_step())
    {
        for field in stage.spec.iter().flat_map(|spec| &spec.writes) {
            written
                .entry(stage.key(&field.name).to_owned())
                .and_modify(|first| first.again.push(index))
                .or_insert(Written {
                    stage: index,
                    field,
                    again: Vec::new(),
                });
        }
    }
    let mut links = Vec::with_capacity(stages.len());
    let mut missing = Vec::new();
    let mut graph = Digraph::new(stages.len());
    for (reader, stage) in stages.iter().enumerate() {
        let mut own = Vec::new();
        if let Some(spec) = stage.spec.as_ref().filter(|_| stage.in_step()) {
            let needed = spec.reads.iter().map(|field| (field, true));
            let optional = spec.reads_optional.iter().map(|field| (field, false));
            for (read, needed) in needed.chain(optional) {
                let key = stage.key(&read.name).to_owned();
                match written.get(&key) {
                    Some(by) => {
                        graph.add_edge(by.stage, reader);
                        own.push(Link {
                            key,
                            reader,
                            writer: by.stage,
                            read,
                            written: by.field,
                            broadcast: spec.broadcast.iter().any(|name| *name == read.name),
                        });
                    }
                    None if needed => missing.push(Missing { key, reader, read }),
                    None => {}
                }
            }
        }
        links.push(own);
    }
    let mut layout_findings = Vec::new();
    let layout = lay_out(pipe, stages, &mut layout_findings);
    Draft {
        pipe,
        layout,
        layout_findings,
        context,
        violations,
        stages,
        models,
        written,
        links,
        missing,
        graph,
    }
}

/// The graph with the edges of keys and weights, and for each stage the stages that it waits for because of weights.
///
/// With the updaters u₁, u₂, … of a model in topological order: u₁ → u₂ → …, and each reader comes before the first
/// updater that it does not depend on. The level of a stage, the number of updaters that it depends on, decreases along
/// no edge of keys and increases along each new edge, so no new edge closes a cycle.
fn weight_order(draft: &Draft<'_>) -> (Digraph, Vec<Vec<usize>>) {
    let mut users: BTreeMap<&str, BTreeMap<usize, bool>> = BTreeMap::new();
    for (index, stage) in draft
        .stages
        .iter()
        .enumerate()
        .filter(|(_, stage)| stage.in_step())
    {
        for (model, access) in stage.spec.iter().flat_map(|spec| &spec.models) {
            *users.entry(model).or_default().entry(index).or_default() |= *access == Access::Update;
        }
    }
    let mut graph = draft.graph.clone();
    let mut after = vec![Vec::new(); draft.stages.len()];
    for users in users
        .values()
        .filter(|users| users.values().any(|update| *update))
    {
        let Ok(order) = graph.topological_order() else {
            break;
        };
        let mut level = vec![0; draft.stages.len()];
        let mut updaters: Vec<usize> = Vec::new();
        let mut edges = Vec::new();
        for stage in order {
            for &before in graph.predecessors(stage) {
                level[stage] = level[stage].max(level[before]);
            }
            if users.get(&stage) == Some(&true) {
                edges.extend(updaters.last().map(|&previous| (previous, stage)));
                updaters.push(stage);
                level[stage] = updaters.len();
            }
        }
        for (&reader, _) in users.iter().filter(|(_, update)| !**update) {
            edges.extend(
                updaters
                    .get(level[reader])
                    .map(|&updater| (reader, updater)),
            );
        }
        for (before, stage) in edges {
            graph.add_edge(before, stage);
            after[stage].push(before);
        }
    }
    for before in &mut after {
        before.sort_unstable();
        before.dedup();
    }
    (graph, after)
}

fn assemble(
    draft: &Draft<'_>,
    order: &[usize],
    after: &[Vec<usize>],
    tables: &Tables,
    warnings: Vec<Diagnostic>,
) -> Plan {
    let mut position = vec![0; order.len()];
    for (at, &stage) in order.iter().enumerate() {
        position[stage] = at;
    }
    let mut plan = Plan {
        pipe: draft.pipe.clone(),
        context: draft.context.clone(),
        batch: draft.context.batch.clone(),
        stages: Vec::with_capacity(order.len()),
        tables: tables.list.clone(),
        models: Vec::new(),
        groups: draft.layout.groups.clone(),
        fields: BTreeMap::new(),
        warnings,
        opened: BTreeMap::new(),
    };
    for table in &mut plan.tables {
        table.made_by = position[table.made_by];
    }
    for &index in order {
        let stage = &draft.stages[index];
        let Some(spec) = &stage.spec else { continue };
        let mut before: Vec<usize> = after[index].iter().map(|&other| position[other]).collect();
        before.sort_unstable();
        plan.stages.push(PlannedStage {
            name: stage.decl.name.clone(),
            kind: stage.decl.kind.clone(),
            spec: spec.clone(),
            rename: stage.decl.rename.clone(),
            inputs: draft.links[index]
                .iter()
                .map(|link| edge(link, &position, tables))
                .collect(),
            after: before,
            table_in: tables.input[index],
            table_out: tables.output[index],
            slice_rows: slice_rows(spec, tables.input[index], tables, draft.context),
            group: draft.layout.stages[index],
            build: temperatures::builder(stage),
        });
    }
    for (key, by) in &draft.written {
        plan.fields
            .insert(key.clone(), by.field.clone().renamed(key.clone()));
    }
    plan.models = planned_models(draft, &plan.stages);
    plan
}

fn edge(link: &Link<'_>, position: &[usize], tables: &Tables) -> Edge {
    Edge {
        key: link.key.clone(),
        local: link.read.name.to_string(),
        writer: position[link.writer],
        table: tables.output[link.writer].unwrap_or_default(),
        convert: (link.written.dtype != link.read.dtype)
            .then_some((link.written.dtype, link.read.dtype)),
        broadcast: link.broadcast,
    }
}

/// Rows of one call: what the stage declares; otherwise one micro-batch for `Row` stages with a model, one row on the
/// host, one prompt's rows for `Group` stages, and all rows for `Batch` stages, sources and observers.
fn slice_rows(
    spec: &StageSpec,
    table_in: Option<usize>,
    tables: &Tables,
    context: &BuildContext,
) -> usize {
    let Some(table) = table_in.map(|index| &tables.list[index]) else {
        return spec.slice_rows.unwrap_or(context.batch.prompts);
    };
    let whole = table.num_rows.max(1);
    match spec.cardinality {
        Cardinality::Batch => return whole.saturating_mul(table.waves),
        Cardinality::Group => {
            let group = tables.rows_per_prompt(table_in);
            spec.slice_rows
                .map_or(group, |rows| rows.next_multiple_of(group))
        }
        Cardinality::Row => spec.slice_rows.unwrap_or(if spec.models.is_empty() {
            1
        } else {
            context.batch.log_prob_micro_rows
        }),
    }
    .clamp(1, whole)
}

fn planned_models(draft: &Draft<'_>, stages: &[PlannedStage]) -> Vec<PlannedModel> {
    let declared = draft.pipe.models.iter().zip(draft.models).enumerate();
    let layout = &draft.layout;
    let described = |decl: &ModelDecl, group: usize| {
        let device = layout.groups[group].device().to_owned();
        decl.describe(&on_device(draft.context, device))
    };
    let mut models: Vec<PlannedModel> = declared
        .map(|(index, (decl, info))| PlannedModel {
            name: decl.name.clone(),
            kind: decl.kind.clone(),
            info: info.clone().unwrap_or_default(),
            home: layout.homes[index],
            copies: layout
                .copies
                .iter()
                .filter(|(_, model)| *model == index)
                .map(|(group, _)| (*group, described(decl, *group).unwrap_or_default()))
                .collect(),
            readers: Vec::new(),
            updaters: Vec::new(),
            training: None,
        })
        .collect();
    let by_name: HashMap<String, usize> = models
        .iter()
        .enumerate()
        .map(|(index, model)| (model.name.clone(), index))
        .collect();
    for (index, stage) in stages.iter().enumerate() {
        for (name, access) in &stage.spec.models {
            if let Some(model) = by_name.get(name).and_then(|&at| models.get_mut(at)) {
                match access {
                    Access::Read => model.readers.push(index),
                    Access::Update => model.updaters.push(index),
                }
            }
        }
    }
    models
}
