//! Memory that a plan needs on each of its devices: an upper estimate, and the refusal of a run that cannot fit.
//!
//! A device of the group permanently stores the weights of every model and, for each model that is trained, the
//! optimiser state and the sums of gradients. In addition it needs memory for the current work, one stage at a time:
//!
//! - *sampling*: keys and values of all rows of a rollout, each as long as prompt and response may be; the number of
//!   rows that a rollout has room for is a power of two
//! - *scoring*: one layer of a call's tokens
//! - *training*: what a micro-batch of the longest rows keeps for its backward pass, and one layer of it
//!
//! and for each of these the logits of a chunk of tokens. Sampling and scoring also need what rollout engines keep between
//! calls for the models that they sample, such as packed weights; stages that train free it first. The peak is the permanent part plus the largest work. The
//! model reports the bytes per token ([`Footprint`](verl_words::resource::Footprint)); the stages' settings limit the length
//! of rows. A length that no setting limits counts as zero, and the output says so.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::Serialize;
use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::resource::ModelInfo;
use verl_words::stage::{LengthLimit, ModelWork, WorkKind};

use crate::display::{bytes, count, parameters};
use crate::{Plan, PlannedModel, PlannedStage};

/// The share of an estimate that has to fit: measured runs used at most a seventh less than the estimate.
const CERTAIN_SHARE: f64 = 6.0 / 7.0;

/// The estimate for one device of a group, which is the same for each, or for all replicas on shares of the CPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// The group.
    pub group: String,
    /// Permanent memory of the models.
    pub models: Vec<ModelMemory>,
    /// Additional memory of the stages' work, one at a time, in the order of stages.
    pub work: Vec<WorkMemory>,
    /// Replicas of each model, which have one memory: shares of the CPU. The bytes are those of all replicas.
    pub replicas: usize,
}

/// Permanent memory of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelMemory {
    /// Its name.
    pub model: String,
    /// Number of its parameters.
    pub parameters: u64,
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of the optimiser state; 0 if no stage trains it.
    pub optimizer: u64,
    /// Bytes of summed gradients; 0 if no stage trains it.
    pub gradients: u64,
    /// A description in one line.
    pub summary: String,
    /// A setting that would need less memory.
    #[serde(skip)]
    smaller_setting: Option<&'static str>,
}

impl ModelMemory {
    fn total(&self) -> u64 {
        let training = self.optimizer.saturating_add(self.gradients);
        self.weights.saturating_add(training)
    }
}

/// Memory that a stage's work with a model needs while it runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkMemory {
    /// The stage.
    pub stage: String,
    /// The model.
    pub model: String,
    /// The kind of work.
    pub kind: WorkKind,
    /// Rows in memory at once; 0 if the model decides it.
    pub rows: usize,
    /// Tokens of the longest row, without keys of unlimited length.
    pub tokens: usize,
    /// Bytes.
    pub bytes: u64,
    /// Keys of the pipeline whose length no setting limits; `tokens` does not include them.
    pub unbounded: Vec<String>,
    /// Settings that limit the length of rows: `max_new_tokens` of `generate`.
    #[serde(skip)]
    bounds: Vec<String>,
}

impl MemoryPlan {
    /// The memory of `replicas` replicas in one process: they share weights and divide the optimiser's state, but each has
    /// sums of gradients and works at the same time as the others.
    fn replicate(&mut self, replicas: usize) {
        let times = |bytes: u64| bytes.saturating_mul(replicas as u64);
        for model in &mut self.models {
            model.gradients = times(model.gradients);
        }
        for work in &mut self.work {
            work.bytes = times(work.bytes);
        }
        self.replicas = replicas;
    }

    /// Bytes in permanent use.
    pub fn permanent(&self) -> u64 {
        let all = self.models.iter().map(ModelMemory::total);
        all.fold(0, u64::saturating_add)
    }

    /// The work that needs the most memory.
    pub fn largest(&self) -> Option<&WorkMemory> {
        self.work.iter().max_by_key(|work| work.bytes)
    }

    /// Peak memory of a device in bytes.
    pub fn peak(&self) -> u64 {
        let work = self.largest().map_or(0, |work| work.bytes);
        self.permanent().saturating_add(work)
    }

    /// The parts of the memory in use during `work`, in one line.
    pub fn breakdown(&self, work: Option<&WorkMemory>) -> String {
        let sum = |part: fn(&ModelMemory) -> u64| {
            bytes(self.models.iter().map(part).fold(0, u64::saturating_add))
        };
        let mut parts = format!(
            "{} of weights, {} of optimiser state, {} of gradients",
            sum(|model| model.weights),
            sum(|model| model.optimizer),
            sum(|model| model.gradients)
        );
        if let Some(work) = work {
            parts = format!(
                "{parts}, and {} for {} in `{}`",
                bytes(work.bytes),
                work.what(),
                work.stage
            );
        }
        parts
    }

    /// Which settings to change so that `work` needs less memory.
    pub fn advice(&self, work: Option<&WorkMemory>) -> String {
        let mut ways: Vec<String> = Vec::new();
        if let Some(work) = work {
            let rows = count(work.rows, "row");
            match work.kind {
                WorkKind::Training => ways.push(format!("lower `batch.micro_batch` (currently {rows})")),
                WorkKind::Sampling => ways.push(format!(
                    "lower `batch.samples` or the number of prompts per call (currently {rows} at once)"
                )),
                // The size of its calls does not depend on the rows.
                WorkKind::Scoring => {}
            }
            if work.kind != WorkKind::Scoring && !work.bounds.is_empty() {
                ways.push(format!("shorten rows ({})", work.bounds.join(", ")));
            }
        }
        let mut smaller: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for model in &self.models {
            if let Some(setting) = model.smaller_setting {
                smaller.entry(setting).or_default().push(&model.model);
            }
        }
        for (setting, models) in smaller {
            ways.push(format!("set `{setting}` of {}", quoted(models)));
        }
        ways.push("use smaller models or a device with more memory".to_owned());
        ways.join(", or ")
    }
}

impl WorkMemory {
    /// Such as `training on 8 rows of 1024 tokens`.
    fn what(&self) -> String {
        let tokens = match (self.tokens, self.unbounded.is_empty()) {
            (0, _) => "rows of unknown length".to_owned(),
            (tokens, true) => format!("rows of {tokens} tokens"),
            (tokens, false) => format!("rows of {tokens} tokens or more"),
        };
        let rows = match self.rows {
            0 => String::new(),
            rows => format!("{rows} "),
        };
        format!("{} {rows}{tokens}", self.kind.name())
    }
}

impl Plan {
    /// Memory that each device of each group needs, by the estimate that the [module](self) describes.
    pub fn memory(&self) -> Vec<MemoryPlan> {
        let groups = 0..self.groups.len();
        groups.map(|group| self.memory_of(group)).collect()
    }

    /// Memory that each device of group `group` needs.
    pub fn memory_of(&self, group: usize) -> MemoryPlan {
        self.memory_in(group, None)
    }

    /// The same on a device with `room` bytes, where a rollout may have room for fewer rows.
    fn memory_in(&self, group: usize, room: Option<u64>) -> MemoryPlan {
        let lengths = Lengths::of(self);
        let engines = self.engine_bytes(group);
        let mut work = Vec::new();
        for stage in self
            .stages
            .iter()
            .filter(|stage| stage.group == Some(group))
        {
            for asked in &stage.spec.work {
                let mut models = self.models.iter();
                let model = models.find(|model| model.name == asked.model);
                let info = model.and_then(|model| model.info_in(group));
                work.extend(info.map(|info| {
                    let mut work = lengths.work(stage, asked, info, room);
                    work.bytes = work.bytes.saturating_add(kept_by(engines, work.kind));
                    work
                }));
            }
        }
        let models = self.models.iter();
        let mut memory = MemoryPlan {
            group: self.groups[group].name.clone(),
            models: models
                .filter_map(|model| model_memory(model, group))
                .collect(),
            work,
            replicas: 1,
        };
        if self.groups[group].is_on_cpu() {
            memory.replicate(self.groups[group].devices.len());
        }
        memory
    }
}

impl PlannedModel {
    /// What is known about it in group `group`; `None` if it is not loaded there.
    fn info_in(&self, group: usize) -> Option<&ModelInfo> {
        let copy = || self.copies.iter().find(|(at, _)| *at == group);
        match self.home == group {
            true => Some(&self.info),
            false => copy().map(|(_, info)| info),
        }
    }
}

impl Plan {
    /// Bytes that rollout engines in group `group` keep between calls, for all models that a stage samples there.
    fn engine_bytes(&self, group: usize) -> u64 {
        let stages = self
            .stages
            .iter()
            .filter(|stage| stage.group == Some(group));
        let works: Vec<&ModelWork> = stages.flat_map(|stage| &stage.spec.work).collect();
        let is_sampled = |model: &&PlannedModel| {
            let mut works = works.iter();
            works.any(|work| work.kind == WorkKind::Sampling && work.model == model.name)
        };
        let sampled = self.models.iter().filter(is_sampled);
        let sampled = sampled.filter_map(|model| model.info_in(group));
        let bytes = sampled.map(|info| info.footprint.engine_bytes);
        bytes.fold(0, u64::saturating_add)
    }
}

/// What of the engines' memory is in use during work of this kind.
fn kept_by(engines: u64, kind: WorkKind) -> u64 {
    match kind {
        WorkKind::Sampling | WorkKind::Scoring => engines,
        WorkKind::Training => 0,
    }
}

fn model_memory(model: &PlannedModel, group: usize) -> Option<ModelMemory> {
    let info = model.info_in(group)?;
    let is_trained = model.home == group && !model.updaters.is_empty();
    let trained = |bytes: u64| match !is_trained {
        true => 0,
        false => bytes,
    };
    Some(ModelMemory {
        model: model.name.clone(),
        parameters: info.num_parameters,
        weights: info.weight_bytes,
        optimizer: trained(info.optimizer_bytes),
        gradients: trained(info.gradient_bytes),
        summary: info.summary.clone(),
        smaller_setting: info.smaller,
    })
}

/// Maximum lengths of keys, by the pipeline's names: tokens, and the setting that limits them.
pub(crate) struct Lengths<'a>(HashMap<&'a str, (usize, String)>);

impl<'a> Lengths<'a> {
    /// Maximum tokens of a key; `None` if no setting limits it.
    pub(crate) fn limit(&self, key: &str) -> Option<usize> {
        self.0.get(key).map(|(tokens, _)| *tokens)
    }

    pub(crate) fn of(plan: &'a Plan) -> Self {
        let mut lengths = Lengths(HashMap::new());
        for stage in &plan.stages {
            for bound in &stage.spec.lengths {
                let longest = match &bound.limit {
                    LengthLimit::Setting { name, tokens } => {
                        tokens.map(|tokens| (tokens, format!("`{name}` of `{}`", stage.name)))
                    }
                    LengthLimit::Keys(keys) => {
                        let found = keys
                            .iter()
                            .map(|key| lengths.0.get(stage.key(key)).cloned());
                        let found: Option<Vec<_>> = found.collect();
                        found.and_then(|found| found.into_iter().max_by_key(|(tokens, _)| *tokens))
                    }
                };
                if let Some(longest) = longest {
                    lengths.0.insert(stage.key(&bound.key), longest);
                }
            }
        }
        lengths
    }

    fn work(
        &self,
        stage: &PlannedStage,
        asked: &ModelWork,
        info: &ModelInfo,
        room: Option<u64>,
    ) -> WorkMemory {
        let (mut tokens, mut unbounded, mut bounds) = (asked.tokens, Vec::new(), Vec::new());
        for key in asked.keys.iter().map(|key| stage.key(key)) {
            match self.0.get(key) {
                Some((more, what)) => {
                    tokens = tokens.saturating_add(*more);
                    if !bounds.contains(what) {
                        bounds.push(what.clone());
                    }
                }
                None => unbounded.push(key.to_owned()),
            }
        }
        if info.max_tokens > 0 {
            tokens = tokens.min(info.max_tokens);
        }
        WorkMemory {
            stage: stage.name.clone(),
            model: asked.model.clone(),
            kind: asked.kind,
            rows: asked.rows,
            tokens,
            bytes: work_bytes(asked.kind, asked.rows, tokens, info, room),
            unbounded,
            bounds,
        }
    }
}

fn work_bytes(
    kind: WorkKind,
    rows: usize,
    tokens: usize,
    info: &ModelInfo,
    room: Option<u64>,
) -> u64 {
    let footprint = &info.footprint;
    let of = |tokens: usize, bytes: u64| bytes.saturating_mul(tokens as u64);
    let work = match kind {
        WorkKind::Sampling => {
            let cache = |rows: usize| of(rows.saturating_mul(tokens), info.kv_bytes_per_token);
            let [least, most] = footprint.cache_rows;
            let wanted = match most {
                0 => rows,
                most => rows.next_power_of_two().clamp(least, most.max(least)),
            };
            let share = room.zip(footprint.cache_share);
            let limit = share.map_or(u64::MAX, |(room, share)| (share * room as f64) as u64);
            cache(wanted).min(limit.max(cache(least)))
        }
        WorkKind::Scoring => {
            // Calls use only a few row widths, at most a quarter longer than the row.
            let at_once = footprint.call_tokens.max(tokens + tokens / 4);
            of(at_once, footprint.layer_bytes_per_token)
        }
        WorkKind::Training => {
            let token = footprint.kept_bytes_per_token + footprint.layer_bytes_per_token;
            let all = rows.saturating_mul(tokens);
            let logits = of(all, footprint.kept_logit_bytes_per_token);
            of(all, token)
                .saturating_add(logits.min(footprint.kept_logit_bytes))
                .saturating_add(footprint.copy_bytes)
        }
    };
    work.saturating_add(footprint.logit_bytes)
}

/// Reports a run that does not fit into the memory of its devices, where their size is known.
pub(crate) fn check(plan: &Plan) -> Vec<Diagnostic> {
    let groups = 0..plan.groups.len();
    groups
        .filter_map(|group| check_group(plan, group))
        .collect()
}

fn check_group(plan: &Plan, group: usize) -> Option<Diagnostic> {
    let group_ = &plan.groups[group];
    // Shares of the CPU have one memory.
    let devices = match group_.is_on_cpu() {
        true => vec![group_.device()],
        false => group_.devices.iter().map(String::as_str).collect(),
    };
    let known = devices.into_iter().filter_map(|device| {
        let mut models = plan.pipe.models.iter();
        let room = models.find_map(|model| model.factory.devices().memory(device))?;
        Some((room, device))
    });
    let (room, device) = known.min()?;
    let memory = plan.memory_in(group, Some(room));
    // Groups on the same device share its memory, and work at the same time.
    let shares = |other: &usize| {
        *other != group && plan.groups[*other].device() == plan.groups[group].device()
    };
    let others = (0..plan.groups.len()).filter(shares);
    let others: u64 = others
        .map(|other| plan.memory_in(other, Some(room)).peak())
        .fold(0, u64::saturating_add);
    let most = memory.peak().saturating_add(others);
    if most as f64 * CERTAIN_SHARE <= room as f64 {
        return None;
    }
    let work = memory.largest();
    Some(
        Diagnostic::blocking("S014", format!("the run does not fit on `{device}`"))
            .at(plan.groups[group].setting())
            .because(format!(
                "it needs up to {}, but the device has {}: {}{}",
                bytes(most),
                bytes(room),
                memory.breakdown(work),
                match others {
                    0 => String::new(),
                    others => format!(", and {} of other groups on this device", bytes(others)),
                }
            ))
            .help(memory.advice(work)),
    )
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "estimated peak memory of {} `{}`\n  {:<24}{:>14}{:>12}{:>12}{:>12}",
            match self.replicas {
                1 => "each device of".to_owned(),
                replicas => format!("the {replicas} replicas of"),
            },
            self.group,
            "model",
            "parameters",
            "weights",
            "optimiser",
            "gradients"
        )?;
        for model in &self.models {
            let line = format!(
                "  {:<24}{:>14}{:>12}{:>12}{:>12}  {}",
                model.model,
                parameters(model.parameters),
                bytes(model.weights),
                bytes(model.optimizer),
                bytes(model.gradients),
                model.summary
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        for work in &self.work {
            let title = format!("{}: {} with {}", work.stage, work.what(), work.model);
            writeln!(f, "  {title:<62}{:>12}", bytes(work.bytes))?;
        }
        writeln!(
            f,
            "  {:<62}{:>12}",
            "models and the largest work",
            bytes(self.peak())
        )?;
        let mut unbounded: Vec<&str> = self
            .work
            .iter()
            .flat_map(|work| work.unbounded.iter().map(String::as_str))
            .collect();
        unbounded.sort_unstable();
        unbounded.dedup();
        if !unbounded.is_empty() {
            writeln!(
                f,
                "  No setting limits the length of {}: it counts as zero.",
                quoted(unbounded.iter().copied())
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verl_words::resource::Footprint;

    use super::*;

    fn info() -> ModelInfo {
        ModelInfo {
            kv_bytes_per_token: 10,
            footprint: Footprint {
                cache_rows: [16, 512],
                cache_share: Some(0.5),
                kept_bytes_per_token: 100,
                layer_bytes_per_token: 7,
                call_tokens: 1000,
                logit_bytes: 3,
                kept_logit_bytes_per_token: 2,
                kept_logit_bytes: 90,
                copy_bytes: 5,
                engine_bytes: 11,
            },
            ..ModelInfo::default()
        }
    }

    #[track_caller]
    fn check(kind: WorkKind, rows: usize, tokens: usize, room: Option<u64>, expected: u64) {
        assert_eq!(work_bytes(kind, rows, tokens, &info(), room), expected);
    }

    #[test]
    fn a_rollout_has_room_for_a_power_of_two_of_rows() {
        check(WorkKind::Sampling, 5, 20, None, 16 * 20 * 10 + 3);
        check(WorkKind::Sampling, 100, 20, None, 128 * 20 * 10 + 3);
        check(WorkKind::Sampling, 4000, 20, None, 512 * 20 * 10 + 3);
        // Half of 12,000 bytes is less than 128 rows need; 16 rows are the minimum.
        check(WorkKind::Sampling, 100, 20, Some(12_000), 6000 + 3);
        check(WorkKind::Sampling, 100, 20, Some(100), 16 * 20 * 10 + 3);
        check(
            WorkKind::Sampling,
            100,
            20,
            Some(1 << 40),
            128 * 20 * 10 + 3,
        );
    }

    #[test]
    fn scoring_takes_a_layer_of_a_call_and_training_keeps_a_micro_batch() {
        check(WorkKind::Scoring, 0, 20, None, 1000 * 7 + 3);
        check(WorkKind::Scoring, 0, 4000, None, 5000 * 7 + 3);
        check(WorkKind::Training, 8, 20, None, 8 * 20 * 107 + 90 + 5 + 3);
        check(WorkKind::Training, 2, 20, None, 2 * 20 * 107 + 80 + 5 + 3);
        check(WorkKind::Training, 0, 20, None, 5 + 3);
    }

    #[test]
    fn engines_keep_weights_while_nothing_is_trained() {
        let kinds = [WorkKind::Sampling, WorkKind::Scoring, WorkKind::Training];
        assert_eq!(kinds.map(|kind| kept_by(11, kind)), [11, 11, 0]);
    }

    #[test]
    fn sizes_that_a_model_does_not_report_count_as_zero() {
        let unknown = ModelInfo::default();
        for kind in [WorkKind::Sampling, WorkKind::Scoring, WorkKind::Training] {
            assert_eq!(work_bytes(kind, 8, 20, &unknown, Some(1 << 30)), 0);
        }
    }
}
