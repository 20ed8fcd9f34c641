//! Which device group each model and stage is in.
//!
//! A model's home is the group that its declaration names, or the default group. A stage that uses models runs in the
//! group that its declaration names; by default in the home of the model that it updates, or else of the first model
//! that it uses. A model that a stage of another group reads has a copy there. So each model is loaded where stages
//! use it, and nowhere else.

use verl_declare::pipe::DataPipe;
use verl_declare::sizes::{DevicesConfig, WorkerKind};
use verl_words::diagnostic::{Diagnostic, quoted, suggest};
use verl_words::stage::{Access, StageSpec};

use crate::build::DraftStage;
use crate::schedule::groups::DeviceGroup;

/// The device groups of a pipeline, and what is in them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Layout {
    /// The groups by declaration; at least one, unless a finding says what is wrong.
    pub groups: Vec<DeviceGroup>,
    /// By declaration: the home of each model.
    pub homes: Vec<usize>,
    /// By declaration: the group of each stage that uses a model.
    pub stages: Vec<Option<usize>>,
    /// Groups and models, by declaration, that have a copy of a model whose home is another group.
    pub copies: Vec<(usize, usize)>,
}

/// The groups of a pipeline and the one that is the default; findings about invalid ones.
pub(crate) struct Groups {
    pub list: Vec<DeviceGroup>,
    /// `None` if there are several and `[devices]` names none of them.
    pub default: Option<usize>,
    pub findings: Vec<Diagnostic>,
}

impl Groups {
    pub(crate) fn of(pipe: &DataPipe) -> Groups {
        if pipe.groups.is_empty() {
            // The batch arithmetic, which needs the number of devices, reports an invalid group.
            let group = DeviceGroup::parse(&pipe.devices.group).unwrap_or_else(|_| DeviceGroup {
                name: pipe.devices.group.trim().to_owned(),
                devices: Vec::new(),
                is_named: false,
                worker: WorkerKind::Thread,
            });
            return Groups {
                list: vec![group],
                default: Some(0),
                findings: Vec::new(),
            };
        }
        let mut findings = Vec::new();
        let list = pipe.groups.iter().map(|(name, config)| {
            let devices = config.list().unwrap_or_else(|error| {
                findings.push(
                    Diagnostic::error("S010", "`devices` is not a valid device group")
                        .at(format!("[groups.{name}] devices"))
                        .because(format!(
                            "{error}; a device group is a device kind, for GPUs followed by an index"
                        ))
                        .help("set it to `cpu` or one GPU, such as `cuda:0`"),
                );
                Vec::new()
            });
            DeviceGroup {
                name: name.clone(),
                devices,
                is_named: true,
                worker: config.worker,
            }
        });
        let list: Vec<DeviceGroup> = list.collect();
        let named = list
            .iter()
            .position(|group| group.name == pipe.devices.group);
        let only = (list.len() == 1).then_some(0);
        let default = &pipe.devices.group;
        if named.is_none() && *default != DevicesConfig::default().group {
            let known = list.iter().map(|group| group.name.as_str());
            let known = suggest(default, "groups", known);
            findings.push(
                Diagnostic::error("S016", format!("there is no device group `{default}`"))
                    .at("[devices] group")
                    .because(
                        "with `[groups]`, it is the name of the group of models that name none",
                    )
                    .help(format!(
                        "set it to one of the groups, or remove it; {known}"
                    )),
            );
        }
        Groups {
            default: named.or(only),
            list,
            findings,
        }
    }

    /// The group called `name`.
    fn find(&self, name: &str) -> Option<usize> {
        self.list
            .iter()
            .position(|group| group.is_named && group.name == name)
    }

    /// The group that a declaration at `place` names.
    fn named(&self, name: &str, place: &str, findings: &mut Vec<Diagnostic>) -> Option<usize> {
        let found = self.find(name);
        if found.is_none() {
            let known = self.list.iter().filter(|group| group.is_named);
            let known = suggest(name, "groups", known.map(|group| group.name.as_str()));
            findings.push(
                Diagnostic::error("S016", format!("there is no device group `{name}`"))
                    .at(format!("{place} group"))
                    .because("no `[groups]` section declares a group with this name")
                    .help(format!("declare [groups.{name}]; {known}")),
            );
        }
        found
    }

    /// The home of a model whose declaration names `group`, as far as it is known.
    pub(crate) fn home(&self, group: Option<&str>) -> usize {
        let home = group.map_or(self.default, |name| self.find(name));
        home.unwrap_or_default()
    }

    /// The device of group `index`, as kinds of models know it; empty if it has none, which a finding reports.
    pub(crate) fn device(&self, index: usize) -> String {
        let group = self.list.get(index);
        group.map_or(String::new(), |group| group.device().to_owned())
    }
}

/// Lays out models and stages; adds a finding for everything that has no place.
pub(crate) fn lay_out(
    pipe: &DataPipe,
    stages: &[DraftStage<'_>],
    findings: &mut Vec<Diagnostic>,
) -> Layout {
    let mut groups = Groups::of(pipe);
    findings.append(&mut groups.findings);
    let homes = pipe.models.iter().map(|model| {
        let place = format!("[models.{}]", model.name);
        match (&model.group, groups.default) {
            (Some(name), _) => groups.named(name, &place, findings).unwrap_or_default(),
            (None, Some(default)) => default,
            (None, None) => {
                let names = quoted(groups.list.iter().map(|group| group.name.as_str()));
                findings.push(
                    Diagnostic::error("S017", format!("`{}` has no device group", model.name))
                        .at(place)
                        .because(format!(
                            "the pipeline has several groups, {names}, and neither the model nor `[devices]` names one"
                        ))
                        .help(format!(
                            "set `group` of `{}`, or `group` of `[devices]` as the default",
                            model.name
                        )),
                );
                0
            }
        }
    });
    let homes: Vec<usize> = homes.collect();
    let home = |name: &str| {
        let index = pipe.models.iter().position(|model| model.name == name)?;
        Some((index, homes[index]))
    };
    let mut layout = Layout {
        stages: Vec::with_capacity(stages.len()),
        copies: Vec::new(),
        homes: homes.clone(),
        groups: groups.list.clone(),
    };
    for stage in stages {
        let group = match &stage.spec {
            Some(spec) => group_of(stage, spec, &groups, &home, findings),
            None => None,
        };
        layout.stages.push(group);
        let (Some(group), Some(spec)) = (group, &stage.spec) else {
            continue;
        };
        for (model, _) in &spec.models {
            if let Some((index, home)) = home(model)
                && home != group
                && !layout.copies.contains(&(group, index))
            {
                layout.copies.push((group, index));
            }
        }
    }
    layout.move_homes(pipe, stages);
    layout.check_copies(pipe, stages, findings);
    layout
}

/// The group in which a stage runs; `None` for the host pool.
fn group_of(
    stage: &DraftStage<'_>,
    spec: &StageSpec,
    groups: &Groups,
    home: &dyn Fn(&str) -> Option<(usize, usize)>,
    findings: &mut Vec<Diagnostic>,
) -> Option<usize> {
    let name = &stage.decl.name;
    let place = format!("[[stages]] `{name}`");
    let own = match &stage.decl.group {
        Some(group) => Some(groups.named(group, &place, findings)?),
        None => None,
    };
    if spec.models.is_empty() {
        if let Some(own) = own {
            findings.push(
                Diagnostic::error("S017", format!("`{name}` cannot run in a device group"))
                    .at(format!("{place} group"))
                    .because(format!(
                        "it uses no model, so it runs on the host and not in `{}`",
                        groups.list[own].name
                    ))
                    .help("remove `group`"),
            );
        }
        return None;
    }
    let updated = || {
        let updates = spec.models.iter();
        updates.filter(|(_, access)| *access == Access::Update)
    };
    let home_of = |(model, _): &(String, Access)| Some(home(model)?.1);
    let first = updated()
        .find_map(home_of)
        .or_else(|| spec.models.iter().find_map(home_of));
    let group = own.or(first).unwrap_or_default();
    for (model, _) in updated() {
        let Some((_, elsewhere)) = home(model).filter(|(_, home)| *home != group) else {
            continue;
        };
        let (here, there) = (&groups.list[group].name, &groups.list[elsewhere].name);
        findings.push(
            Diagnostic::error("S017", format!("`{name}` cannot update `{model}`"))
                .at(format!("{place} -> [models.{model}]"))
                .because(format!(
                    "`{name}` runs in group `{here}`, but `{model}` is in `{there}`, and a model is updated only where it is"
                ))
                .help(format!(
                    "put both into one group: set `group = \"{there}\"` of `{name}`, or `group = \"{here}\"` of `{model}`"
                )),
        );
    }
    Some(group)
}

impl Layout {
    /// Whether `group` loads `model`, both by declaration.
    pub(crate) fn has(&self, group: usize, model: usize) -> bool {
        self.homes[model] == group || self.copies.contains(&(group, model))
    }

    /// A copy of a model that is trained must be able to follow it.
    fn check_copies(
        &self,
        pipe: &DataPipe,
        stages: &[DraftStage<'_>],
        findings: &mut Vec<Diagnostic>,
    ) {
        for (group, index) in &self.copies {
            let model = &pipe.models[*index];
            let uses = |stage: &DraftStage<'_>, access| {
                let mut uses = stage.spec.iter().flat_map(|spec| &spec.models);
                uses.any(|(name, own)| *name == model.name && *own == access)
            };
            let is_trained = stages.iter().any(|stage| uses(stage, Access::Update));
            if !is_trained || model.factory.can_follow() {
                continue;
            }
            let readers = stages.iter().zip(&self.stages);
            let readers =
                readers.filter(|(stage, at)| **at == Some(*group) && uses(stage, Access::Read));
            let readers: Vec<&str> = readers.map(|(stage, _)| stage.decl.name.as_str()).collect();
            if readers.is_empty() {
                continue;
            }
            let verb = if readers.len() == 1 { "runs" } else { "run" };
            let readers = quoted(readers);
            let (here, home) = (
                &self.groups[*group].name,
                &self.groups[self.homes[*index]].name,
            );
            findings.push(
                Diagnostic::error("S017", format!("{readers} cannot read `{}`", model.name))
                    .at(format!("{readers} -> [models.{}]", model.name))
                    .because(format!(
                        "{readers} {verb} in group `{here}`, but `{}` is trained in `{home}`, and models of kind `{}` have no copies that follow",
                        model.name, model.kind
                    ))
                    .help(format!("run {readers} in `{home}`")),
            );
        }
    }

    /// A model that only stages of other groups use, and that none updates, is not loaded in the group that it names:
    /// its home is the first group that uses it.
    fn move_homes(&mut self, pipe: &DataPipe, stages: &[DraftStage<'_>]) {
        for (index, model) in pipe.models.iter().enumerate() {
            let users = stages
                .iter()
                .zip(&self.stages)
                .filter_map(|(stage, group)| {
                    let uses = stage.spec.iter().flat_map(|spec| &spec.models);
                    uses.filter(|(name, _)| *name == model.name)
                        .find_map(|_| *group)
                });
            let users: Vec<usize> = users.collect();
            if users.contains(&self.homes[index]) {
                continue;
            }
            if let Some(first) = users.first() {
                self.homes[index] = *first;
                self.copies.retain(|copy| *copy != (*first, index));
            }
        }
    }
}
