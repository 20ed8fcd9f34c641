//! [`StageSpec`]: everything that a stage declares, and how it is put together.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;

use super::{
    Access, Agreement, Cadence, Cardinality, ConfigError, LengthBound, LengthLimit, Metric,
    ModelWork, OnRowError, OptimizerPasses, Refill, RowRule, Shown,
};
use crate::field::Field;

/// What a stage declares: keys read and written, row rule, cut, models.
///
/// ```
/// use verl_pipe::keys::{RESPONSES, REWARDS};
/// use verl_pipe::stage::{Cardinality, StageSpec};
///
/// let spec = StageSpec::new().reads(RESPONSES).writes(REWARDS);
/// assert_eq!(spec.cardinality, Cardinality::Row);
/// assert_eq!(spec.reads[0].name, "responses");
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StageSpec {
    /// Fields that the stage needs, with the shape and tag it needs them in.
    pub reads: Vec<Field>,
    /// Fields that it adds.
    pub writes: Vec<Field>,
    /// Fields that it reads where some stage writes them, and does without otherwise.
    pub reads_optional: Vec<Field>,
    /// Fields (by name) that it reads although they have fewer rows, one a group: they are repeated per sample.
    pub broadcast: Vec<String>,
    /// What it does to the number of rows.
    pub rows: RowRule,
    /// How finely its input may be cut.
    pub cardinality: Cardinality,
    /// When it runs.
    pub cadence: Cadence,
    /// Models by name, and what it does with them. With none, the stage runs on the host pool.
    pub models: Vec<(String, Access)>,
    /// Of models that must have a certain [role](crate::resource::ModelInfo::role): name and role.
    pub roles: Vec<(String, &'static str)>,
    /// What it has models do, for the estimate of memory; nothing where it only asks a model's tokenizer.
    pub work: Vec<ModelWork>,
    /// How often it steps optimisers, where that is not what the batch arithmetic says: `batch.epochs` passes in each step.
    pub passes: Vec<OptimizerPasses>,
    /// Key, in its own name, whose sampling temperature it takes where its own `temperature` is not set; see
    /// [`BuildContext::temperature`](super::BuildContext::temperature).
    pub temperature_of: Option<String>,
    /// How long the rows of keys that it writes may be.
    pub lengths: Vec<LengthBound>,
    /// Rows handed to one call; `None`: for `Row` stages with a model the plan's micro-batch, otherwise no limit.
    pub slice_rows: Option<usize>,
    /// Longest time one row may take on the host pool before it is given up.
    pub deadline: Option<Duration>,
    /// What becomes of a row whose call failed, panicked or passed its deadline on the host pool.
    pub on_row_error: OnRowError,
    /// Metrics that it records.
    pub metrics: Vec<Metric>,
    /// Those of them that the console shows.
    pub shows: Vec<Shown>,
    /// What it does that a pipeline usually does once, as a phrase: the plan warns where two stages say the same.
    pub once: Vec<&'static str>,
    /// What to do about a needed key (by name) that no stage writes, where more can be said than to write it.
    pub remedies: BTreeMap<String, String>,
    /// Settings that are possible and probably not meant: the plan warns.
    pub doubts: Vec<ConfigError>,
    /// Quantities that it and other stages are told each for itself, and that are one.
    pub agreements: Vec<Agreement>,
    /// For a filter of groups: how many it is to keep; its source draws further waves while they are too few.
    pub refill: Option<Refill>,
    /// For a source: it draws other rows in each wave of a step, as [`StageContext::wave`](super::StageContext::wave) tells.
    pub draws_waves: bool,
    /// JSON Schema of the samples that it hands to [`StageSink::sample`](super::StageSink::sample), for the documentation of `samples.jsonl`.
    pub sample: Option<serde_json::Value>,
    /// Why a replay does not call it again, as a clause; `None` where it may be called any number of times.
    pub once_only: Option<String>,
}

impl StageSpec {
    /// A stage that reads and writes nothing yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Adds a key that it needs.
    pub fn reads(mut self, field: impl Into<Field>) -> Self {
        self.reads.push(field.into());
        self
    }
    /// Adds a key that it reads where it exists.
    pub fn reads_optional(mut self, field: impl Into<Field>) -> Self {
        self.reads_optional.push(field.into());
        self
    }
    /// Adds a key of one row a group, repeated for each sample of the group.
    pub fn reads_broadcast(mut self, field: impl Into<Field>) -> Self {
        let field = field.into();
        self.broadcast.push(field.name.to_string());
        self.reads.push(field);
        self
    }
    /// Adds a key that it writes.
    pub fn writes(mut self, field: impl Into<Field>) -> Self {
        self.writes.push(field.into());
        self
    }
    /// Sets the row rule.
    pub fn rows(mut self, rule: RowRule) -> Self {
        self.rows = rule;
        self
    }
    /// Sets the cut.
    pub fn cardinality(mut self, cardinality: Cardinality) -> Self {
        self.cardinality = cardinality;
        self
    }
    /// Runs between steps instead of within them.
    pub fn observer(mut self, every: u64) -> Self {
        self.cadence = Cadence::Observer { every };
        self
    }
    /// Adds a model.
    pub fn uses(mut self, model: impl Into<String>, access: Access) -> Self {
        self.models.push((model.into(), access));
        self
    }
    /// Adds a model that must have this [role](crate::resource::ModelInfo::role), where the model tells its own.
    pub fn uses_as(mut self, role: &'static str, model: impl Into<String>, access: Access) -> Self {
        let model = model.into();
        self.roles.push((model.clone(), role));
        self.uses(model, access)
    }
    /// Adds work with a model.
    pub fn works(mut self, work: ModelWork) -> Self {
        self.work.push(work);
        self
    }
    /// Says how often it steps the optimiser of `model`: `passes` times over the rows of a step, and not in the first
    /// `idle_steps` steps of the run.
    pub fn optimizes(mut self, model: impl Into<String>, passes: usize, idle_steps: u64) -> Self {
        self.passes.push(OptimizerPasses {
            model: model.into(),
            passes,
            idle_steps,
        });
        self
    }
    /// Says that it works at the temperature at which the tokens of the key `name` were sampled, unless it is set to
    /// another.
    pub fn at_temperature_of(mut self, name: impl Into<String>) -> Self {
        self.temperature_of = Some(name.into());
        self
    }
    /// Says that its setting `setting` bounds the rows of the key `name`, which it writes; `tokens` is absent where the
    /// setting is.
    pub fn bounds(
        mut self,
        name: impl Into<String>,
        setting: &'static str,
        tokens: Option<usize>,
    ) -> Self {
        self.lengths.push(LengthBound {
            key: name.into(),
            limit: LengthLimit::Setting {
                name: setting,
                tokens,
            },
        });
        self
    }
    /// Says that rows of the key `name`, which it writes, are no longer than those of `keys`, which it reads.
    pub fn as_long_as<'a>(
        mut self,
        name: impl Into<String>,
        keys: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        self.lengths.push(LengthBound {
            key: name.into(),
            limit: LengthLimit::Keys(keys.into_iter().map(str::to_owned).collect()),
        });
        self
    }
    /// Sets the rows of one call.
    pub fn slice_rows(mut self, rows: usize) -> Self {
        self.slice_rows = Some(rows);
        self
    }
    /// Sets the deadline of a row.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
    /// Sets what becomes of a row whose call failed.
    pub fn on_row_error(mut self, rule: OnRowError) -> Self {
        self.on_row_error = rule;
        self
    }
    /// Says that it does something that a pipeline usually does once, for example `a KL penalty to the reference`.
    pub fn once(mut self, what: &'static str) -> Self {
        self.once.push(what);
        self
    }
    /// Says what to do where no stage writes the key `name`.
    pub fn remedy(mut self, name: impl Into<String>, help: impl Into<String>) -> Self {
        self.remedies.insert(name.into(), help.into());
        self
    }
    /// Says that a replay is not to call it again, and why, for example `it pays for an answer of a service`: what it
    /// emitted then is what the stages behind it are replayed on.
    pub fn once_only(mut self, why: impl Into<String>) -> Self {
        self.once_only = Some(why.into());
        self
    }
    /// Says that a setting is possible and probably not meant.
    pub fn doubts(mut self, setting: ConfigError) -> Self {
        self.doubts.push(setting);
        self
    }
    /// Says to what its setting `setting` sets a quantity that other stages are told too, for example `longest response
    /// in tokens`: the plan warns where two stages say different things.
    pub fn agrees(
        mut self,
        quantity: &'static str,
        setting: &'static str,
        value: impl ToString,
    ) -> Self {
        self.agreements.push(Agreement {
            quantity,
            setting,
            value: value.to_string(),
        });
        self
    }
    /// Sets how many groups a filter is to keep.
    pub fn refill(mut self, refill: Refill) -> Self {
        self.refill = Some(refill);
        self
    }
    /// Says that a source can draw further waves.
    pub fn draws_waves(mut self) -> Self {
        self.draws_waves = true;
        self
    }
    /// Says what the samples are that it hands to [`StageSink::sample`](super::StageSink::sample).
    pub fn samples_of<T: JsonSchema>(mut self) -> Self {
        let generator = schemars::SchemaGenerator::default();
        self.sample = Some(generator.into_root_schema_for::<T>().to_value());
        self
    }
    /// Adds metrics that it records.
    pub fn metrics(mut self, metrics: &[Metric]) -> Self {
        self.metrics.extend_from_slice(metrics);
        self
    }
    /// Has the console show a metric that it records.
    pub fn shows(mut self, shown: Shown) -> Self {
        self.shows.push(shown);
        self
    }
}
