//! A policy with the engines that sample it, so that no engine serves other weights than the policy's.
//!
//! ```
//! use verl_models::sampled::SampledPolicy;
//! use verl_models::policy::Policy;
//! use verl_models::random::{DrawKey, Purpose};
//! use verl_models::rollout::engine::{EngineChoice, Event, RolloutRequest, SamplingSettings};
//! use verl_models::{Decoder, device};
//!
//! let decoder = Decoder::load("tests/models/tiny-random-qwen3".as_ref(), &device::device("cpu")?)?;
//! let mut policy = SampledPolicy::new(Box::new(Policy::new(decoder, None)?));
//! let key = DrawKey { seed: 1, purpose: Purpose::Rollout, step: 1, row: 0, attempt: 0 };
//! let asked = [RolloutRequest { prompt: vec![1, 5], key, max_new_tokens: 8 }];
//! let mut answered = 0;
//! for _ in 0..2 {
//!     policy.generate(&EngineChoice::default(), &asked, &SamplingSettings::default(), &mut |event| {
//!         answered += usize::from(matches!(event, Event::Done { .. }));
//!         Ok(())
//!     })?;
//! }
//! // Weights were packed for the first call, and used by both.
//! assert_eq!((answered, policy.loads()), (2, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use verl_rollout::engine::{
    EngineChoice, Event, EventSink, RolloutEngine, RolloutError, RolloutRequest, SamplingSettings,
    Version,
};

use crate::model::PolicyModel;

/// The next [`Version::generation`] of the process.
static NEXT_GENERATION: AtomicU64 = AtomicU64::new(1);

fn next_generation() -> u64 {
    NEXT_GENERATION.fetch_add(1, Ordering::Relaxed)
}

/// A policy and its engines.
///
/// Weights can only change through [`SampledPolicy::policy_mut`], which puts the engines to sleep and starts a new
/// [generation](Version::generation). So engines use no memory while a policy is trained, and load again before they
/// serve other weights.
pub struct SampledPolicy {
    policy: Box<dyn PolicyModel>,
    generation: u64,
    /// Engines that were used, by the name of their choice.
    engines: Vec<(String, Box<dyn RolloutEngine>)>,
    loads: u64,
}

impl SampledPolicy {
    /// A policy without engines; they are started when they are first used.
    pub fn new(policy: Box<dyn PolicyModel>) -> Self {
        SampledPolicy {
            policy,
            generation: next_generation(),
            engines: Vec::new(),
            loads: 0,
        }
    }

    /// The policy.
    pub fn policy(&self) -> &dyn PolicyModel {
        self.policy.as_ref()
    }

    /// The policy, to train it or to replace its weights. Engines load the weights again before they sample.
    pub fn policy_mut(&mut self) -> &mut (dyn PolicyModel + 'static) {
        self.sleep();
        self.generation = next_generation();
        self.policy.as_mut()
    }

    /// The state of the weights.
    pub fn version(&self) -> Version {
        Version {
            step: self.policy.optimizer_steps(),
            generation: self.generation,
        }
    }

    /// Frees what engines keep between calls. The next call loads what was freed, and gives the same responses.
    pub fn sleep(&mut self) {
        for (_, engine) in &mut self.engines {
            engine.sleep();
        }
    }

    /// How often an engine loaded weights.
    pub fn loads(&self) -> u64 {
        self.loads
    }

    /// Samples from the policy's current weights; see [`RolloutEngine::generate`]. Calls between two changes of the
    /// weights share what the engine prepared.
    ///
    /// # Errors
    /// As [`RolloutEngine::generate`]; [`RolloutError::Stale`] if the engine reports another version than the policy's.
    pub fn generate(
        &mut self,
        engine: &EngineChoice,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        sink: &mut EventSink<'_>,
    ) -> Result<(), RolloutError> {
        let expected = self.version();
        let at = self.position(engine);
        let (name, engine) = &mut self.engines[at];
        engine.wake()?;
        if engine.version() != Some(expected) {
            engine.load(expected, self.policy.as_ref())?;
            self.loads += 1;
        }
        engine.generate(requests, settings, &mut |event| {
            let (Event::Started { version } | Event::Done { version, .. }) = event;
            if version != expected {
                return Err(RolloutError::Stale {
                    engine: name.clone(),
                    sampled: version,
                    expected,
                });
            }
            sink(event)
        })
    }

    /// The position of an engine, which is started if necessary.
    fn position(&mut self, choice: &EngineChoice) -> usize {
        let names = self.engines.iter().map(|(name, _)| name.as_str());
        let found = names.into_iter().position(|name| name == choice.name());
        found.unwrap_or_else(|| {
            self.engines
                .push((choice.name().to_owned(), choice.start()));
            self.engines.len() - 1
        })
    }
}

#[cfg(test)]
#[path = "sampled_tests.rs"]
mod tests;
