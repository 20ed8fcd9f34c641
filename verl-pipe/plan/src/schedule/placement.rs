//! [`Schedule`]: which worker runs which stage, and the wires between them. Pure: loads nothing.
//!
//! A stage that uses a model runs on the worker thread of the model's device group; every other stage runs on the
//! host pool.

use verl_declare::pipe::ModelDecl;
use verl_words::diagnostic::{Diagnostic, Severity};
use verl_words::stage::{Cadence, Cardinality, OnRowError, RowRule};

use crate::schedule::groups::DeviceGroup;
use crate::schedule::wiring::Wiring;
use crate::{Plan, PlannedStage};

/// Approximate maximum number of slices of a step for a host stage: many if a call may be slow (the stage declares a
/// deadline), fewer if a call costs more than its rows.
const SLOW_SLICES: usize = 64;
const QUICK_SLICES: usize = 16;
/// Minimum number of rows of a quick stage's slice.
const QUICK_ROWS: usize = 8;

/// Where a stage runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On the worker of a device group (index into [`Schedule::groups`]).
    Group(usize),
    /// On the host pool.
    Host,
}

/// A placed pipeline: made by [`Plan::schedule`], started by `Run::start`.
pub struct Schedule {
    plan: Plan,
    places: Vec<Place>,
    slice_rows: Vec<usize>,
    wiring: Wiring,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let placed: Vec<_> = self
            .plan
            .stages()
            .iter()
            .map(PlannedStage::name)
            .zip(&self.places)
            .collect();
        f.debug_struct("Schedule")
            .field("groups", &self.groups())
            .field("places", &placed)
            .finish_non_exhaustive()
    }
}

impl Plan {
    /// Places models and stages.
    ///
    /// # Errors
    /// Every finding that makes a run impossible (codes `S…`).
    pub fn schedule(&self) -> Result<Schedule, Vec<Diagnostic>> {
        let blocking: Vec<Diagnostic> = self
            .warnings()
            .iter()
            .filter_map(Diagnostic::when_run)
            .collect();
        if !blocking.is_empty() {
            return Err(blocking);
        }
        let wiring = Wiring::new(self)?;
        let places: Vec<Place> = self.stages().iter().map(place).collect();
        let slice_rows = (0..self.stages().len())
            .map(|i| slice_rows(self, i, places[i]))
            .collect();
        Ok(Schedule {
            plan: self.clone(),
            places,
            slice_rows,
            wiring,
        })
    }
}

impl Schedule {
    /// The plan to run.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Device groups, one worker thread each.
    pub fn groups(&self) -> &[DeviceGroup] {
        self.plan.groups()
    }

    /// The devices of all groups, each as written, once.
    pub fn devices_text(&self) -> String {
        let mut texts: Vec<String> = Vec::new();
        for text in self.groups().iter().map(DeviceGroup::devices_text) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        texts.join(", ")
    }

    /// The device group whose worker owns a model (index into [`Schedule::groups`]); `None` if there is no such model.
    pub fn home(&self, model: &str) -> Option<usize> {
        let mut models = self.plan.models().iter();
        let model = models.find(|known| known.name == model)?;
        Some(model.home)
    }

    /// The models that the worker of group `group` loads, by declaration, and whether each is a copy of a model whose
    /// home is another group.
    pub fn models_at(&self, group: usize) -> impl Iterator<Item = (&ModelDecl, bool)> {
        let declared = self.plan.pipe().models.iter().zip(self.plan.models());
        declared.filter_map(move |(decl, model)| {
            let is_copy = model.copies.iter().any(|(at, _)| *at == group);
            (is_copy || model.home == group).then_some((decl, is_copy))
        })
    }

    /// Place of each stage.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Rows of one call of each stage.
    pub fn slice_rows(&self) -> &[usize] {
        &self.slice_rows
    }

    /// The wires between stages.
    pub fn wiring(&self) -> &Wiring {
        &self.wiring
    }

    /// Stages at `place`, in the order of execution.
    pub fn stages_at(&self, place: Place) -> impl Iterator<Item = usize> + '_ {
        (0..self.places.len()).filter(move |i| self.places[*i] == place)
    }

    /// Whether a failed row of this stage becomes null instead of ending the step: the stage runs on the host pool,
    /// keeps its rows, may be cut into slices, and writes only nullable keys.
    pub fn tolerates_row_errors(&self, stage: usize) -> bool {
        let spec = self.plan.stages()[stage].spec();
        self.places[stage] == Place::Host
            && spec.cadence == Cadence::Step
            && spec.on_row_error == OnRowError::Null
            && spec.rows == RowRule::Same
            && spec.cardinality != Cardinality::Batch
            && !spec.writes.is_empty()
            && spec.writes.iter().all(|field| field.nullable)
    }
}

fn place(stage: &PlannedStage) -> Place {
    stage.group().map_or(Place::Host, Place::Group)
}

/// Rows of one call. A plan cuts host `Row` stages into single rows, the finest possible slices. As a call costs more
/// than a row, the schedule uses fewer slices. The bounds depend only on the plan.
fn slice_rows(plan: &Plan, stage: usize, place: Place) -> usize {
    let planned = &plan.stages()[stage];
    let free = place == Place::Host
        && planned.spec().slice_rows.is_none()
        && planned.spec().cardinality == Cardinality::Row;
    let Some(table) = planned.table_in().filter(|_| free) else {
        return planned.slice_rows().max(1);
    };
    let rows = plan.tables()[table].num_rows;
    if planned.spec().deadline.is_some() {
        return (rows / SLOW_SLICES).max(1);
    }
    (rows / QUICK_SLICES)
        .max(plan.rows_per_prompt(table))
        .max(QUICK_ROWS)
}

/// A finding of the scheduler about `stage`: the planner does not make plans like this one.
pub(crate) fn internal(stage: &str, why: String) -> Diagnostic {
    Diagnostic {
        code: "S011",
        severity: Severity::Error,
        what: format!("`{stage}` cannot be wired"),
        location: stage.to_owned(),
        why,
        help: "this is a bug in the planner: please report it".to_owned(),
    }
}
