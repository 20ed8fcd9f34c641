//! A small GRPO-like pipeline whose stages are closures and whose model is three numbers.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use verl_declare::pipe::{DataPipe, ModelDecl, ModelFactory, RunConfig, StageDecl};
use verl_declare::sizes::BatchConfig;
use verl_plan::Plannable;
use verl_run::runner::{Run, RunOptions};
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::keys::{ADVANTAGES, MASK_KINDS, PROMPTS, RESPONSES, REWARDS};
use verl_words::resource::{
    ModelInfo, ModelResource, ResourceError, Shortage, Snapshot, WeightsVersion,
};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, DeviceSupport, Metric, MetricRole, Reduce,
    RowRule, Stage, StageContext, StageError, StageSpec,
};

pub(super) type Work = dyn Fn(Batch, &mut StageContext<'_>) -> Result<(), StageError> + Send + Sync;

/// A stage that is a closure.
#[derive(Clone)]
pub(super) struct FnStage {
    spec: StageSpec,
    work: Arc<Work>,
    copies: bool,
}

impl Stage for FnStage {
    fn spec(&self) -> StageSpec {
        self.spec.clone()
    }
    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        (self.work)(input, context)
    }
    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        self.copies
            .then(|| Box::new(self.clone()) as Box<dyn Stage>)
    }
}

/// Declares any stage that can be built repeatedly.
pub(super) fn declare(
    name: &str,
    build: impl Fn(&BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> + Send + Sync + 'static,
) -> StageDecl {
    StageDecl {
        name: name.to_owned(),
        kind: "custom".to_owned(),
        config: serde_json::Value::Null,
        rename: BTreeMap::new(),
        stated_reads: None,
        stated_writes: None,
        debug: false,
        group: None,
        build: Arc::new(build),
    }
}

fn closure(
    name: &str,
    spec: StageSpec,
    copies: bool,
    work: impl Fn(Batch, &mut StageContext<'_>) -> Result<(), StageError> + Send + Sync + 'static,
) -> StageDecl {
    let stage = FnStage {
        spec,
        work: Arc::new(work),
        copies,
    };
    declare(name, move |_| Ok(Box::new(stage.clone())))
}

/// A stage whose rows run concurrently if its declaration allows that.
pub(super) fn stage(
    name: &str,
    spec: StageSpec,
    work: impl Fn(Batch, &mut StageContext<'_>) -> Result<(), StageError> + Send + Sync + 'static,
) -> StageDecl {
    closure(name, spec, true, work)
}

/// A stage that cannot be copied.
pub(super) fn single(
    name: &str,
    spec: StageSpec,
    work: impl Fn(Batch, &mut StageContext<'_>) -> Result<(), StageError> + Send + Sync + 'static,
) -> StageDecl {
    closure(name, spec, false, work)
}

/// Three weights that an update moves.
pub(super) struct Numbers {
    pub weights: [f32; 3],
    pub steps: u64,
}

impl ModelResource for Numbers {
    fn version(&self) -> WeightsVersion {
        WeightsVersion {
            step: self.steps,
            hash: format!("{:?}", self.weights.map(f32::to_bits)),
        }
    }
    fn snapshot(&mut self) -> Result<Snapshot, ResourceError> {
        Ok(Snapshot {
            version: self.version(),
            state: Arc::new((self.weights, self.steps)),
        })
    }
    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError> {
        let (weights, steps) = snapshot
            .state
            .downcast_ref()
            .ok_or(ResourceError::ForeignSnapshot)?;
        (self.weights, self.steps) = (*weights, *steps);
        Ok(())
    }
    fn save(&mut self, dir: &Path) -> Result<(), ResourceError> {
        let failed = |e: std::io::Error| ResourceError::Failed(Box::new(e));
        std::fs::create_dir_all(dir).map_err(failed)?;
        std::fs::write(dir.join("weights.txt"), format!("{:?}", self.weights)).map_err(failed)
    }
    fn text_of(&self, tokens: &[u32]) -> Option<String> {
        Some(
            tokens
                .iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join("-"),
        )
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// What a fake device panics with when it is full.
pub(super) const FULL: &str = "Error while reading data: Generic { reason: \"out of device memory allocating 8589934592 bytes\" }";

/// Recognises [`FULL`].
pub(super) fn full(message: &str) -> Option<Shortage> {
    let (_, after) = message.split_once("out of device memory allocating ")?;
    let asked = after.split(' ').next()?.parse().ok();
    Some(Shortage { asked })
}

pub(super) struct NumbersFactory;

impl DeviceSupport for NumbersFactory {
    fn shortage(&self, message: &str) -> Option<Shortage> {
        full(message)
    }
}

impl ModelFactory for NumbersFactory {
    fn describe(&self, _context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        Ok(ModelInfo {
            num_parameters: 3,
            ..ModelInfo::default()
        })
    }
    fn trainable(&self) -> bool {
        true
    }
    fn devices(&self) -> &dyn DeviceSupport {
        self
    }
    fn load(
        &self,
        _: &str,
        _: &str,
        _: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        Ok(Box::new(Numbers {
            weights: [1.0, 2.0, 3.0],
            steps: 0,
        }))
    }
}

pub(super) const LOSS: Metric = Metric {
    name: "actor/loss",
    unit: "nats",
    meaning: "loss",
    reduce: Reduce::Mean,
    role: Some(MetricRole::Loss),
};
pub(super) const REWARD: Metric = Metric {
    name: "reward/mean",
    unit: "reward",
    meaning: "mean reward",
    reduce: Reduce::Mean,
    role: Some(MetricRole::Reward),
};
pub(super) const TOKENS: Metric = Metric {
    name: "perf/tokens",
    unit: "tokens",
    meaning: "tokens sampled",
    reduce: Reduce::Sum,
    role: None,
};

pub(super) fn source() -> StageDecl {
    stage(
        "prompts",
        StageSpec::new().rows(RowRule::Source).writes(PROMPTS),
        |_, context| context.emit(prompts_of(context.step)?),
    )
}

/// The prompts of a step, last row first.
pub(super) fn prompts_of(step: u64) -> Result<Batch, StageError> {
    let batch = BATCH.prompts as u64;
    let ids = (0..batch).map(|i| RowId::prompt(0, (step - 1) * batch + batch - 1 - i));
    let ids = ids.collect::<Result<Vec<_>, _>>()?;
    let mut prompts = Batch::with_rows(&ids);
    let tokens = ids.iter().map(|id| vec![7, id.row() as u32]);
    prompts.put(&PROMPTS, RaggedColumn::from_rows(tokens))?;
    Ok(prompts)
}

pub(super) const SAMPLES: usize = 3;

pub(super) fn generate_spec() -> StageSpec {
    StageSpec::new()
        .reads(PROMPTS)
        .writes(RESPONSES)
        .writes(MASK_KINDS)
        .rows(RowRule::Expand(SAMPLES))
        .cardinality(Cardinality::Batch)
        .uses("actor", Access::Read)
        .metrics(&[TOKENS])
}

/// Responses of one prompt, a function of the weights and the prompt.
pub(super) fn respond(prompt: &Batch, context: &mut StageContext<'_>) -> Result<Batch, StageError> {
    let weights = context.model::<Numbers>("actor")?.weights;
    let mut group = prompt.rows_only().repeat(SAMPLES)?;
    let tokens: Vec<Vec<u32>> = group
        .ids()
        .iter()
        .map(|id| {
            let length = 1 + (id.row() + id.sample_index()) % 4;
            (0..length)
                .map(|t| (weights[t as usize % 3] * 100.0) as u32 + id.row() as u32)
                .collect()
        })
        .collect();
    context.record(&TOKENS, tokens.iter().map(Vec::len).sum::<usize>() as f64);
    group.put(
        &MASK_KINDS,
        RaggedColumn::from_rows(tokens.iter().map(|row| vec![1u8; row.len()])),
    )?;
    group.put(&RESPONSES, RaggedColumn::from_rows(tokens))?;
    Ok(group)
}

/// Generates prompt by prompt, last one first.
pub(super) fn generate() -> StageDecl {
    single("generate", generate_spec(), |input, context| {
        for prompt in input.split(1).iter().rev() {
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    })
}

pub(super) fn reward_spec() -> StageSpec {
    StageSpec::new()
        .reads(RESPONSES)
        .writes(REWARDS)
        .metrics(&[REWARD])
}

/// The reward of a row is a tenth of its first token.
pub(super) fn score(mut input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
    let rewards: Vec<f32> = input
        .get(&RESPONSES)?
        .rows()
        .map(|row| row[0] as f32 / 10.0)
        .collect();
    for reward in &rewards {
        context.record(&REWARD, f64::from(*reward));
    }
    input.put(&REWARDS, rewards)?;
    context.emit(input)
}

pub(super) fn reward() -> StageDecl {
    stage("reward", reward_spec(), score)
}

pub(super) fn advantages() -> StageDecl {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .reads(RESPONSES)
        .writes(ADVANTAGES)
        .cardinality(Cardinality::Group);
    stage("advantages", spec, |input, context| {
        let rewards: Vec<f32> = input
            .get(&REWARDS)?
            .rows()
            .map(|r| r.unwrap_or(0.0))
            .collect();
        let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
        let lengths = input.get(&RESPONSES)?;
        let rows = rewards
            .iter()
            .enumerate()
            .map(|(i, r)| vec![r - mean; lengths.row_len(i)]);
        let rows = RaggedColumn::from_rows(rows.collect::<Vec<_>>());
        let mut output = input.rows_only();
        output.put(&ADVANTAGES, rows)?;
        context.emit(output)
    })
}

pub(super) fn update() -> StageDecl {
    let spec = StageSpec::new()
        .reads(RESPONSES)
        .reads(MASK_KINDS)
        .reads(ADVANTAGES)
        .rows(RowRule::Sink)
        .cardinality(Cardinality::Batch)
        .uses("actor", Access::Update)
        .metrics(&[LOSS]);
    single("update", spec, |input, context| {
        let mut moved = 0.0f32;
        for (advantages, response) in input
            .get(&ADVANTAGES)?
            .rows()
            .zip(input.get(&RESPONSES)?.rows())
        {
            for (a, token) in advantages.iter().zip(response) {
                moved = moved * 0.99 + (a + 0.1) * *token as f32 * 1e-3;
            }
        }
        let actor = context.model::<Numbers>("actor")?;
        for weight in &mut actor.weights {
            *weight = 1.0 + (*weight * 1.37 + moved).fract().abs();
        }
        actor.steps += 1;
        context.record(&LOSS, f64::from(moved));
        Ok(())
    })
}

pub(super) const BATCH: BatchConfig = BatchConfig {
    prompts: 6,
    samples: SAMPLES,
    mini_batch: None,
    micro_batch: None,
    log_prob_micro_batch: None,
    epochs: 1,
};

/// The pipeline; each of `others` replaces the stage of the same name or is added at the end.
pub(super) fn pipeline(others: Vec<StageDecl>) -> DataPipe {
    let mut pipe = DataPipe::new("fake").batch(BATCH.clone()).run(RunConfig {
        steps: 1_000,
        ..RunConfig::default()
    });
    pipe.models.push(ModelDecl {
        name: "actor".to_owned(),
        kind: "numbers".to_owned(),
        config: serde_json::Value::Null,
        factory: Arc::new(NumbersFactory),
        unwritable: Vec::new(),
        group: None,
    });
    pipe.stages = vec![source(), generate(), reward(), advantages(), update()];
    for other in others {
        match pipe
            .stages
            .iter()
            .position(|stage| stage.name == other.name)
        {
            Some(at) => pipe.stages[at] = other,
            None => pipe.stages.push(other),
        }
    }
    pipe
}

pub(super) fn options() -> RunOptions {
    RunOptions {
        host_threads: 3,
        ..RunOptions::default()
    }
}

#[track_caller]
pub(super) fn start_with(pipe: &DataPipe, options: RunOptions) -> Run {
    let plan = match pipe.plan() {
        Ok(plan) => plan,
        Err(findings) => panic!("{findings:#?}"),
    };
    Run::start(plan.schedule().expect("places"), options).expect("starts")
}

#[track_caller]
pub(super) fn start(others: Vec<StageDecl>) -> Run {
    start_with(&pipeline(others), options())
}

/// Current weights of the actor.
pub(super) fn weights(run: &mut Run) -> String {
    run.versions().expect("worker answers")["actor"]
        .hash
        .clone()
}

/// Sleeps for a different time at each call; not at all without `latency`, from which the times follow.
pub(super) fn jitter(latency: Option<u64>) -> impl Fn() + Clone + Send + Sync + 'static {
    let random = Arc::new(AtomicUsize::new(latency.unwrap_or(0) as usize));
    move || {
        if latency.is_some() {
            let x = random
                .fetch_add(0x9E37_79B9, Ordering::Relaxed)
                .wrapping_mul(0x85EB_CA6B);
            std::thread::sleep(Duration::from_micros((x >> 7) as u64 % 900));
        }
    }
}

/// A stage that emits the halves of each group in reverse order, and with an odd `latency` the groups too; and a stage
/// that scores two rows a call. Both wait before they work.
pub(super) fn scattered(
    spec: StageSpec,
    latency: Option<u64>,
    wait: &(impl Fn() + Clone + Send + Sync + 'static),
) -> [StageDecl; 2] {
    let (before_group, before_rows) = (wait.clone(), wait.clone());
    let generate = single("generate", spec, move |input, context| {
        let mut prompts = input.split(1);
        if latency.is_some_and(|latency| latency % 2 == 1) {
            prompts.reverse();
        }
        for prompt in &prompts {
            before_group();
            let group = respond(prompt, context)?;
            for part in group.split(2).into_iter().rev() {
                context.emit(part)?;
            }
        }
        Ok(())
    });
    let reward = stage(
        "reward",
        reward_spec().slice_rows(2),
        move |input, context| {
            before_rows();
            score(input, context)
        },
    );
    [generate, reward]
}
