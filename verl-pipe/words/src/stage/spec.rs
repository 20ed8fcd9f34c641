//! [`StageSpec`]: everything that a stage declares, with its builder.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
///
/// A trace records what it declares of rows, keys and models, which is enough to place it in a plan; fields that this does
/// not require are skipped.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageSpec {
    /// Required fields, with the required shape and tag.
    pub reads: Vec<Field>,
    /// Fields that it writes.
    pub writes: Vec<Field>,
    /// Optional fields, read only if some stage writes them.
    pub reads_optional: Vec<Field>,
    /// Fields (by name) that it reads although they have only one row per group: they are repeated for each sample.
    pub broadcast: Vec<String>,
    /// What it does to the number of rows.
    pub rows: RowRule,
    /// How finely its input may be cut.
    pub cardinality: Cardinality,
    /// When it runs.
    pub cadence: Cadence,
    /// Models by name, and what it does with them. With none, the stage runs on the host pool.
    pub models: Vec<(String, Access)>,
    /// Models that must have a certain [role](crate::resource::ModelInfo::role): name and role.
    #[serde(skip)]
    pub roles: Vec<(String, &'static str)>,
    /// Its work with models, for the memory estimate; empty if it only uses a model's tokenizer.
    #[serde(skip)]
    pub work: Vec<ModelWork>,
    /// How often it steps optimisers, if not as the batch arithmetic says: `batch.epochs` passes in each step.
    #[serde(skip)]
    pub passes: Vec<OptimizerPasses>,
    /// Key, by its own name, whose sampling temperature it uses if its own `temperature` is not set; see
    /// [`BuildContext::temperature`](super::BuildContext::temperature).
    #[serde(skip)]
    pub temperature_of: Option<String>,
    /// Length bounds of the keys that it writes.
    #[serde(skip)]
    pub lengths: Vec<LengthBound>,
    /// Rows passed to one call; `None`: for `Row` stages with a model the plan's micro-batch, otherwise no limit.
    pub slice_rows: Option<usize>,
    /// Time limit of one row on the host pool; recorded in seconds.
    #[serde(rename = "deadline_s", default, with = "seconds")]
    #[schemars(with = "Option<f64>")]
    pub deadline: Option<Duration>,
    /// What happens to a row whose call failed, panicked or exceeded its deadline on the host pool.
    pub on_row_error: OnRowError,
    /// Metrics that it records.
    #[serde(skip)]
    pub metrics: Vec<Metric>,
    /// The metrics that the console shows.
    #[serde(skip)]
    pub shows: Vec<Shown>,
    /// What it does that a pipeline usually does once, as phrases: the plan warns if two stages state the same one.
    #[serde(skip)]
    pub once: Vec<&'static str>,
    /// Specific help for a required key (by name) that no stage writes.
    #[serde(skip)]
    pub remedies: BTreeMap<String, String>,
    /// Kind of stage that computes the log-probs which it reads, for the help if they come from another distribution.
    #[serde(skip)]
    pub scored_by: Option<&'static str>,
    /// Settings that are valid but probably not intended: the plan warns.
    #[serde(skip)]
    pub warnings: Vec<ConfigError>,
    /// Quantities that it and other stages set separately but that should be equal.
    #[serde(skip)]
    pub agreements: Vec<Agreement>,
    /// For a filter of groups: how many it should keep; its source draws further waves while there are too few.
    pub refill: Option<Refill>,
    /// For a source: whether it draws different rows in each wave of a step.
    pub draws_waves: bool,
    /// JSON Schema of the samples that it passes to [`StageSink::sample`](super::StageSink::sample), for the
    /// documentation of `samples.jsonl`.
    #[serde(skip)]
    pub sample: Option<serde_json::Value>,
    /// Why a replay does not call it again, as a clause; `None` if it may be called any number of times.
    #[serde(skip)]
    pub not_replayed: Option<String>,
}

impl StageSpec {
    /// A stage that reads and writes nothing yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Adds a required key.
    pub fn reads(mut self, field: impl Into<Field>) -> Self {
        self.reads.push(field.into());
        self
    }
    /// Adds an optional key.
    pub fn reads_optional(mut self, field: impl Into<Field>) -> Self {
        self.reads_optional.push(field.into());
        self
    }
    /// Adds a key with one row per group, repeated for each sample of the group.
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
    /// Sets how finely its input may be cut.
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
    /// Adds a model that must have this [role](crate::resource::ModelInfo::role), if the model declares its role.
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
    /// Declares how often it steps the optimiser of `model`: in `passes` passes over the rows of a step, but not in the
    /// first `idle_steps` steps of the run.
    pub fn optimizes(mut self, model: impl Into<String>, passes: usize, idle_steps: u64) -> Self {
        self.passes.push(OptimizerPasses {
            model: model.into(),
            passes,
            idle_steps,
        });
        self
    }
    /// Uses the temperature at which the tokens of the key `name` were sampled, unless its own temperature is set.
    pub fn at_temperature_of(mut self, name: impl Into<String>) -> Self {
        self.temperature_of = Some(name.into());
        self
    }
    /// Declares that its setting `setting` bounds the rows of the key `name`, which it writes; `tokens` is `None` if
    /// the setting is absent.
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
    /// Declares that rows of the key `name`, which it writes, are no longer than those of `keys`, which it reads.
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
    /// Sets what happens to a row whose call failed.
    pub fn on_row_error(mut self, rule: OnRowError) -> Self {
        self.on_row_error = rule;
        self
    }
    /// Declares something that a pipeline usually does once, for example `a KL penalty to the reference`.
    pub fn once(mut self, what: &'static str) -> Self {
        self.once.push(what);
        self
    }
    /// Sets the help for a pipeline in which no stage writes the key `name`.
    pub fn remedy(mut self, name: impl Into<String>, help: impl Into<String>) -> Self {
        self.remedies.insert(name.into(), help.into());
        self
    }
    /// Declares which kind of stage computes the log-probs that it reads.
    pub fn scored_by(mut self, kind: &'static str) -> Self {
        self.scored_by = Some(kind);
        self
    }
    /// Declares that a replay must not call it again, and why, for example `it pays for an answer of a service`. The
    /// stages after it are replayed on its recorded output.
    pub fn not_replayed(mut self, why: impl Into<String>) -> Self {
        self.not_replayed = Some(why.into());
        self
    }
    /// Adds a warning about a setting that is valid but probably not intended.
    pub fn warning(mut self, setting: ConfigError) -> Self {
        self.warnings.push(setting);
        self
    }
    /// Declares the value that its setting `setting` gives to a quantity that other stages also set, for example
    /// `longest response in tokens`: the plan warns if two stages set different values.
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
    /// Sets how many groups a filter should keep.
    pub fn refill(mut self, refill: Refill) -> Self {
        self.refill = Some(refill);
        self
    }
    /// Declares that a source can draw further waves.
    pub fn draws_waves(mut self) -> Self {
        self.draws_waves = true;
        self
    }
    /// Declares the type of the samples that it passes to [`StageSink::sample`](super::StageSink::sample).
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
    /// Shows a metric that it records on the console.
    pub fn shows(mut self, shown: Shown) -> Self {
        self.shows.push(shown);
        self
    }
}

/// A duration as seconds. One that no duration can have is read as none.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        duration: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        duration
            .map(|duration| duration.as_secs_f64())
            .serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let seconds = Option::<f64>::deserialize(deserializer)?;
        Ok(seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()))
    }
}
