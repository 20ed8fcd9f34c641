//! Rollout engines in pipelines: the slot `engine` of stage [`generate`](crate::generate).
//!
//! A custom engine is a [`RolloutEngine`](verl_models::rollout::engine::RolloutEngine), and a [`PartConfig`] that says how
//! it is started.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_declare::part::{PartConfig, Slot};
use verl_models::rollout::Cancel;
use verl_models::rollout::engine::EngineChoice;
use verl_words::stage::{BuildContext, CancelToken, ConfigError};

/// An engine, ready to be started.
#[derive(Debug, Clone)]
pub struct Engine(pub EngineChoice);

impl Slot for Engine {
    const NAME: &'static str = "engine";
}

/// Samples in the process of the run, on the device of the model; weights are shared where possible.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Native {}

impl PartConfig for Native {
    type Slot = Engine;
    const KIND: &'static str = "native";
    const SUMMARY: &'static str =
        "samples in the process of the run, on the device of the model, whose weights it shares";

    fn build(&self, _context: &BuildContext) -> Result<Engine, Vec<ConfigError>> {
        Ok(Engine(EngineChoice::default()))
    }
}

/// The token of a run as rollouts use it.
pub(crate) fn cancel(token: &CancelToken) -> Cancel {
    let token = token.clone();
    Cancel::new(move || token.is_cancelled())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use verl_models::model::ScoreRow;
    use verl_models::optim::OptimizerConfig;
    use verl_models::rollout::engine::{
        EngineWeights, Event, EventSink, RolloutEngine, RolloutError, RolloutRequest,
        SamplingSettings, Version,
    };
    use verl_models::rollout::native::NativeEngine;
    use verl_words::batch::{Batch, RaggedColumn, RowId};
    use verl_words::keys::{PROMPTS, RESPONSES};
    use verl_words::resource::ModelResource;
    use verl_words::stage::{
        ModelFactory, Models, Stage, StageConfig, StageContext, StageError, find_model,
    };

    use super::*;
    use crate::baseline::Baseline;
    use crate::generate::Generate;
    use crate::model::{CausalLm, PolicyResource, sleep_engines};
    use crate::sink::{RecordingSink, run_with};

    /// The addition example's decoder, to be trained.
    fn models() -> Models {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-base");
        let optimizer = OptimizerConfig {
            learning_rate: 3e-2,
            ..OptimizerConfig::default()
        };
        let config = CausalLm::trained(folder, optimizer);
        let model = config.load("actor", "cpu", &BuildContext::default());
        BTreeMap::from([("actor".to_owned(), model.expect("a model"))])
    }

    fn actor(models: &mut Models) -> &mut PolicyResource {
        find_model(models, "actor").expect("a policy")
    }

    fn loads(models: &mut Models) -> u64 {
        actor(models).engine_loads()
    }

    fn prompts() -> Batch {
        let ids = [0, 1].map(|row| RowId::prompt(0, row).expect("small"));
        let mut batch = Batch::with_rows(&ids);
        let rows = [[1u32, 20, 9], [1, 21, 8]];
        batch
            .put(&PROMPTS, RaggedColumn::from_rows(rows))
            .expect("as many rows");
        batch
    }

    fn generate(engine: Option<Part>) -> Box<dyn Stage> {
        let mut config = Generate {
            max_new_tokens: 8,
            ..Generate::default()
        };
        if let Some(engine) = engine {
            config.engine = engine;
        }
        let context = BuildContext::default();
        StageConfig::build(&config, &context).expect("a stage")
    }

    type Part = verl_declare::part::Part<Engine>;

    fn responses(stage: &mut dyn Stage, models: &mut Models) -> Result<Vec<Vec<u32>>, StageError> {
        let kept = run_with(stage, 1, prompts(), models)?;
        let rows = kept.batches.iter().map(|batch| {
            let rows = batch.get(&RESPONSES).expect("responses");
            rows.row(0).to_vec()
        });
        Ok(rows.collect())
    }

    fn train(models: &mut Models) {
        let row = ScoreRow {
            prompt: &[1, 20, 9],
            response: &[27, 4],
        };
        let policy = actor(models).policy_mut();
        policy
            .accumulate(&[row], &|_, _| true, 1.0, false, &mut |scores| {
                -scores.log_probs.sum()
            })
            .expect("finite");
        policy.optimizer_step().expect("finite");
    }

    #[test]
    fn stages_share_what_an_engine_prepared() {
        let mut models = models();
        let mut stage = generate(None);
        let first = responses(stage.as_mut(), &mut models).expect("responses");
        assert_eq!(
            responses(stage.as_mut(), &mut models).expect("responses"),
            first
        );
        let baseline = Baseline::default();
        let mut baseline =
            StageConfig::build(&baseline, &BuildContext::default()).expect("a stage");
        run_with(baseline.as_mut(), 1, prompts(), &mut models).expect("responses");
        assert_eq!(loads(&mut models), 1);
        // Before a stage trains, the memory of all engines is freed.
        sleep_engines(&mut models);
        assert_eq!(
            responses(stage.as_mut(), &mut models).expect("responses"),
            first
        );
        assert_eq!(loads(&mut models), 2);
    }

    #[test]
    fn restored_and_recalled_weights_are_sampled() {
        let mut models = models();
        let mut stage = generate(None);
        let first = responses(stage.as_mut(), &mut models).expect("responses");
        let snapshot = actor(&mut models).snapshot().expect("a snapshot");
        let stored = actor(&mut models).store(&snapshot).expect("bytes");
        let stored = stored.expect("a stored state");
        train(&mut models);
        let trained = responses(stage.as_mut(), &mut models).expect("responses");
        assert_ne!(trained, first);

        actor(&mut models)
            .restore(&snapshot)
            .expect("the same model");
        assert_eq!(
            responses(stage.as_mut(), &mut models).expect("responses"),
            first
        );
        train(&mut models);
        assert_eq!(
            responses(stage.as_mut(), &mut models).expect("responses"),
            trained
        );
        let recalled = actor(&mut models).recall(&snapshot.version, &stored);
        let recalled = recalled.expect("the same model");
        actor(&mut models)
            .restore(&recalled)
            .expect("the same model");
        assert_eq!(
            responses(stage.as_mut(), &mut models).expect("responses"),
            first
        );
        assert_eq!(loads(&mut models), 5);
    }

    #[test]
    fn a_cancelled_stage_ends_between_two_steps() {
        let mut models = models();
        let mut stage = generate(None);
        let first = responses(stage.as_mut(), &mut models).expect("responses");
        let token = CancelToken::default();
        token.cancel();
        let mut sink = RecordingSink::default();
        let mut context = StageContext {
            stage: "tested",
            step: 1,
            steps: 9,
            seed: 5,
            wave: 0,
            cancel: &token,
            models: &mut models,
            sink: &mut sink,
        };
        let ended = stage.run(prompts(), &mut context);
        assert!(matches!(ended, Err(StageError::Cancelled)));
        assert!(sink.batches.is_empty());
        assert_eq!(
            responses(stage.as_mut(), &mut models).expect("responses"),
            first
        );
    }

    /// The native engine, which counts its calls.
    struct Counting {
        native: NativeEngine,
        calls: Arc<AtomicUsize>,
    }

    impl RolloutEngine for Counting {
        fn name(&self) -> &str {
            "counting"
        }

        fn version(&self) -> Option<Version> {
            self.native.version()
        }

        fn load(
            &mut self,
            version: Version,
            weights: &dyn EngineWeights,
        ) -> Result<(), RolloutError> {
            self.native.load(version, weights)
        }

        fn generate(
            &mut self,
            requests: &[RolloutRequest],
            settings: &SamplingSettings,
            sink: &mut EventSink<'_>,
        ) -> Result<(), RolloutError> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            self.native
                .generate(requests, settings, &mut |event: Event| sink(event))
        }

        fn sleep(&mut self) {
            self.native.sleep();
        }

        fn wake(&mut self) -> Result<(), RolloutError> {
            self.native.wake()
        }
    }

    static CALLS: std::sync::OnceLock<Arc<AtomicUsize>> = std::sync::OnceLock::new();

    #[derive(Clone, Default, Serialize, Deserialize, JsonSchema)]
    struct CountingConfig {}

    impl PartConfig for CountingConfig {
        type Slot = Engine;
        const KIND: &'static str = "counting";
        const SUMMARY: &'static str = "counts its calls";

        fn build(&self, _: &BuildContext) -> Result<Engine, Vec<ConfigError>> {
            Ok(Engine(EngineChoice::new("counting", || {
                Box::new(Counting {
                    native: NativeEngine::default(),
                    calls: Arc::clone(CALLS.get_or_init(Arc::default)),
                })
            })))
        }
    }

    #[test]
    fn a_custom_engine_is_used_where_it_is_chosen() {
        let mut models = models();
        let first = responses(generate(None).as_mut(), &mut models).expect("responses");
        let mut counted = generate(Some(CountingConfig::default().into()));
        for _ in 0..2 {
            assert_eq!(
                responses(counted.as_mut(), &mut models).expect("responses"),
                first
            );
        }
        let calls = CALLS.get_or_init(Arc::default);
        assert_eq!((calls.load(Ordering::SeqCst), loads(&mut models)), (2, 2));
    }
}
