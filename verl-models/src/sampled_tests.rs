use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use verl_decoder::decoder::Decoder;
use verl_decoder::parameters::{fill_parameters, visit_parameters};
use verl_kernels::random::{DrawKey, Purpose, normals};
use verl_rollout::Cancel;
use verl_rollout::engine::{EngineWeights, PreparedModel, RolloutOutput};

use super::*;
use crate::ilql::{IlqlDecoder, IlqlModel, IlqlPolicy};
use crate::model::{ModelInterface, ScoreRow};
use crate::optim::OptimizerConfig;
use crate::policy::Policy;

fn decoder() -> Decoder {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    Decoder::load(&models.join("tiny-random-llama-dynamic"), &Device::flex()).unwrap()
}

fn optimizer() -> Option<OptimizerConfig> {
    Some(OptimizerConfig {
        learning_rate: 3e-2,
        ..OptimizerConfig::default()
    })
}

fn policy() -> SampledPolicy {
    SampledPolicy::new(Box::new(Policy::new(decoder(), optimizer()).unwrap()))
}

/// A model whose sampling depends on slow copies of its heads.
fn ilql() -> SampledPolicy {
    let mut module = IlqlDecoder::on(decoder(), 2.0, 3);
    module.heads = fill_parameters(module.heads, burn::tensor::DType::F32, |name, shape| {
        let draws = normals(9, name, shape.iter().product());
        Some(TensorData::new(draws, shape.to_vec()))
    });
    SampledPolicy::new(Box::new(IlqlPolicy::new(module, optimizer()).unwrap()))
}

fn requests(count: usize) -> Vec<RolloutRequest> {
    (0..count)
        .map(|row| RolloutRequest {
            prompt: vec![3 + (row / 2) as u32, 7],
            key: DrawKey {
                seed: 5,
                purpose: Purpose::Rollout,
                step: 1,
                row: row as u64,
                attempt: 0,
            },
            max_new_tokens: 5 + row,
        })
        .collect()
}

/// Responses of `engine` to `count` requests.
fn sample(
    policy: &mut SampledPolicy,
    engine: &EngineChoice,
    count: usize,
) -> Result<Vec<RolloutOutput>, RolloutError> {
    let mut outputs = vec![None; count];
    let settings = SamplingSettings::default();
    policy.generate(engine, &requests(count), &settings, &mut |event| {
        if let Event::Done {
            request, output, ..
        } = event
        {
            outputs[request] = Some(output);
        }
        Ok(())
    })?;
    Ok(outputs.into_iter().flatten().collect())
}

fn kept(policy: &mut SampledPolicy, count: usize) -> Vec<RolloutOutput> {
    sample(policy, &EngineChoice::default(), count).unwrap()
}

/// The responses without an engine.
fn fresh(policy: &SampledPolicy, count: usize) -> Vec<RolloutOutput> {
    let mut outputs = vec![None; count];
    policy
        .policy()
        .generate(
            &requests(count),
            &SamplingSettings::default(),
            &mut |request, output| {
                outputs[request] = Some(output);
                Ok(())
            },
        )
        .unwrap();
    outputs.into_iter().flatten().collect()
}

/// Steps the optimiser of `policy` once.
fn train(policy: &mut SampledPolicy) {
    let row = ScoreRow {
        prompt: &[3, 7],
        response: &[5, 6, 9],
    };
    let policy = policy.policy_mut();
    policy
        .accumulate(&[row], &|_, _| true, 1.0, false, &mut |scores| {
            -scores.log_probs.sum()
        })
        .unwrap();
    policy.optimizer_step().unwrap();
}

#[test]
fn weights_are_loaded_once_for_a_version() {
    let mut policy = policy();
    let version = policy.version();
    for count in [6, 2, 9, 6] {
        assert_eq!(kept(&mut policy, count), fresh(&policy, count));
    }
    assert_eq!((policy.loads(), policy.version()), (1, version));
}

/// Samples, calls `change`, and checks that the engine then samples from the changed weights.
#[track_caller]
fn check_reloads(policy: &mut SampledPolicy, change: impl FnOnce(&mut SampledPolicy)) {
    let before = kept(policy, 6);
    let (version, loads) = (policy.version(), policy.loads());
    change(policy);
    assert_ne!(policy.version().generation, version.generation);
    assert_eq!(policy.version().step, policy.policy().optimizer_steps());
    let after = kept(policy, 6);
    assert_eq!(after, fresh(policy, 6));
    assert_ne!(after, before, "the change must change the responses");
    assert_eq!(policy.loads(), loads + 1);
}

#[test]
fn an_optimizer_step_is_followed_by_a_load() {
    let mut policy = policy();
    check_reloads(&mut policy, train);
    check_reloads(&mut policy, train);
    assert_eq!(policy.version().step, 2);
}

#[test]
fn a_restored_snapshot_is_followed_by_a_load() {
    let mut policy = policy();
    let first = policy.policy().snapshot();
    let original = kept(&mut policy, 6);
    train(&mut policy);
    let second = policy.policy().snapshot();
    // The number of steps is the same after this change: 1, then 0 and 1 again.
    check_reloads(&mut policy, |policy| {
        assert!(policy.policy_mut().restore(first.as_ref()));
    });
    assert_eq!(kept(&mut policy, 6), original);
    check_reloads(&mut policy, |policy| {
        assert!(policy.policy_mut().restore(second.as_ref()));
    });
    // Taking a snapshot changes nothing.
    let loads = policy.loads();
    drop(policy.policy().snapshot());
    kept(&mut policy, 6);
    assert_eq!(policy.loads(), loads);
}

#[test]
fn a_recalled_snapshot_is_followed_by_a_load() {
    let mut policy = policy();
    let snapshot = policy.policy().snapshot();
    let stored = policy.policy().store(snapshot.as_ref()).unwrap().unwrap();
    drop(snapshot);
    train(&mut policy);
    check_reloads(&mut policy, |policy| {
        let recalled = policy.policy().recall(&stored).unwrap().unwrap();
        assert!(policy.policy_mut().restore(recalled.as_ref()));
    });
}

#[test]
fn weights_that_follow_others_are_followed_by_a_load() {
    let mut policy = ilql();
    check_reloads(&mut policy, |policy| {
        let model = IlqlPolicy::of(policy.policy_mut()).unwrap();
        model.sync_targets(0.9).unwrap();
    });
    check_reloads(&mut policy, train);
}

/// An optimiser step writes in place: engines keep no handle of the weights while the policy is changed.
#[test]
fn only_the_policy_owns_its_weights_while_it_is_changed() {
    struct Unique;
    impl ModuleMapper for Unique {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|weight| {
                assert!(weight.can_mut(), "a step would copy this weight");
                weight
            })
        }
    }
    let mut policy = policy();
    kept(&mut policy, 6);
    let any: &mut dyn std::any::Any = policy.policy_mut();
    let trained = &mut any.downcast_mut::<Policy<Decoder>>().unwrap().trained;
    trained.module = trained.module.take().map(|module| module.map(&mut Unique));
}

#[test]
fn sleep_changes_no_bit() {
    let mut policy = policy();
    let (version, first) = (policy.version(), kept(&mut policy, 6));
    policy.sleep();
    assert_eq!(kept(&mut policy, 6), first);
    assert_eq!((policy.loads(), policy.version()), (2, version));
}

#[test]
fn a_cancelled_call_leaves_the_engine_usable() {
    let mut policy = policy();
    let first = kept(&mut policy, 6);
    let checks = Arc::new(AtomicUsize::new(0));
    let settings = SamplingSettings {
        cancel: Some(Cancel::new(move || {
            checks.fetch_add(1, Ordering::SeqCst) == 3
        })),
        ..SamplingSettings::default()
    };
    let mut events = Vec::new();
    let ended = policy.generate(
        &EngineChoice::default(),
        &requests(6),
        &settings,
        &mut |event| {
            events.push(event);
            Ok(())
        },
    );
    assert!(matches!(ended, Err(RolloutError::Cancelled)));
    let version = policy.version();
    assert_eq!(events, [Event::Started { version }]);
    assert_eq!(kept(&mut policy, 6), first);
    assert_eq!(policy.loads(), 1);
}

/// Tensors by name.
type Tensors = Vec<(String, Vec<u8>)>;

/// A stand-in for an engine in another process: it has its own copy of the tensors, and answers request i with token i.
/// If it is `stale`, it ignores all versions but the first.
struct Remote {
    version: Option<Version>,
    tensors: Arc<Mutex<Tensors>>,
    stale: bool,
}

impl RolloutEngine for Remote {
    fn name(&self) -> &str {
        "remote"
    }

    fn version(&self) -> Option<Version> {
        self.version
    }

    fn load(&mut self, version: Version, weights: &dyn EngineWeights) -> Result<(), RolloutError> {
        if self.stale && self.version.is_some() {
            return Ok(());
        }
        self.version = None;
        let mut all = Vec::new();
        weights.tensors(&mut |tensor| {
            assert_eq!(tensor.dtype, "F32");
            assert_eq!(
                tensor.shape.iter().product::<usize>() * 4,
                tensor.bytes.len()
            );
            all.push((tensor.name.to_owned(), tensor.bytes.to_vec()));
            Ok(())
        })?;
        *self.tensors.lock().unwrap() = all;
        self.version = Some(version);
        Ok(())
    }

    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        _settings: &SamplingSettings,
        sink: &mut EventSink<'_>,
    ) -> Result<(), RolloutError> {
        let Some(version) = self.version else {
            let engine = "remote".to_owned();
            return Err(RolloutError::NotLoaded { engine });
        };
        sink(Event::Started { version })?;
        (0..requests.len()).try_for_each(|request| {
            sink(Event::Done {
                request,
                version,
                output: RolloutOutput {
                    tokens: vec![request as u32],
                    sampling_log_probs: vec![0.0],
                    log_probs: vec![0.0],
                    finish: verl_rollout::engine::FinishReason::Length,
                },
            })
        })
    }

    fn sleep(&mut self) {}

    fn wake(&mut self) -> Result<(), RolloutError> {
        Ok(())
    }
}

fn remote(tensors: &Arc<Mutex<Tensors>>, stale: bool) -> EngineChoice {
    let tensors = Arc::clone(tensors);
    EngineChoice::new("remote", move || {
        Box::new(Remote {
            version: None,
            tensors: Arc::clone(&tensors),
            stale,
        })
    })
}

/// All weights of the module, as bytes.
fn weights(policy: &SampledPolicy) -> Tensors {
    let any: &dyn std::any::Any = policy.policy();
    let module = any.downcast_ref::<Policy<Decoder>>().unwrap().module();
    let mut all = Vec::new();
    visit_parameters(module, |name, _, read| {
        all.push((name.to_owned(), read().as_bytes().to_vec()));
    });
    all
}

#[test]
fn an_engine_outside_the_process_gets_every_weight() {
    let mut policy = policy();
    let tensors = Arc::default();
    let engine = remote(&tensors, false);
    for _ in 0..2 {
        assert_eq!(sample(&mut policy, &engine, 3).unwrap().len(), 3);
        assert_eq!(*tensors.lock().unwrap(), weights(&policy));
        train(&mut policy);
    }
    assert_eq!(policy.loads(), 2);
    // Both engines have their own versions.
    assert_eq!(kept(&mut policy, 6), fresh(&policy, 6));
    sample(&mut policy, &engine, 3).unwrap();
    assert_eq!(*tensors.lock().unwrap(), weights(&policy));
    assert_eq!(policy.loads(), 4);
}

#[test]
fn responses_of_other_weights_are_refused() {
    let mut policy = policy();
    let engine = remote(&Arc::default(), true);
    sample(&mut policy, &engine, 3).unwrap();
    let sampled = policy.version();
    train(&mut policy);
    let mut events = 0;
    let refused = policy.generate(
        &engine,
        &requests(3),
        &SamplingSettings::default(),
        &mut |_| {
            events += 1;
            Ok(())
        },
    );
    assert_eq!(events, 0);
    assert_eq!(
        refused.unwrap_err().to_string(),
        format!(
            "engine `remote` sampled from the weights of step 0 (generation {}), but the policy has those of step 1 \
             (generation {}); load this version into it",
            sampled.generation,
            policy.version().generation
        )
    );
}

/// A model that can only be sampled in its process.
struct Local;

impl EngineWeights for Local {
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        decoder().prepare()
    }
}

#[test]
fn a_model_need_not_pass_its_weights_on() {
    let refused = Local.tensors(&mut |_| Ok(()));
    assert!(matches!(refused, Err(RolloutError::NoTensors)));
    assert!(Local.prepare().is_ok());
}
