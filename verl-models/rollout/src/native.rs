//! The engine of this process: it samples a [`PreparedModel`], which shares weights with the policy where it can.

use crate::engine::{
    EngineWeights, Event, EventSink, PreparedModel, RolloutEngine, RolloutError, RolloutRequest,
    SamplingSettings, Version,
};

/// Samples in this process, with the model's own kernels.
///
/// The prepared model contains packed weights and handles of the policy's own. So it gives both up when it sleeps: then
/// they take no memory, and an optimiser step can write weights in place.
#[derive(Default)]
pub struct NativeEngine {
    loaded: Option<(Version, Box<dyn PreparedModel>)>,
    sleeps: bool,
}

impl NativeEngine {
    /// Its name.
    pub const NAME: &'static str = "native";

    fn check_awake(&self) -> Result<(), RolloutError> {
        match self.sleeps {
            true => Err(RolloutError::Asleep {
                engine: Self::NAME.to_owned(),
            }),
            false => Ok(()),
        }
    }
}

impl RolloutEngine for NativeEngine {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn version(&self) -> Option<Version> {
        self.loaded.as_ref().map(|(version, _)| *version)
    }

    fn load(&mut self, version: Version, weights: &dyn EngineWeights) -> Result<(), RolloutError> {
        self.check_awake()?;
        // The old weights are freed before the new ones are packed.
        self.loaded = None;
        self.loaded = Some((version, weights.prepare()?));
        Ok(())
    }

    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        sink: &mut EventSink<'_>,
    ) -> Result<(), RolloutError> {
        self.check_awake()?;
        let Some((version, model)) = &mut self.loaded else {
            return Err(RolloutError::NotLoaded {
                engine: Self::NAME.to_owned(),
            });
        };
        let version = *version;
        sink(Event::Started { version })?;
        // A model with its own decoding loop may not look at the token: it ends with its next response.
        model.generate(requests, settings, &mut |request, output| {
            settings.check_cancelled()?;
            sink(Event::Done {
                request,
                version,
                output,
            })
        })
    }

    fn sleep(&mut self) {
        self.loaded = None;
        self.sleeps = true;
    }

    fn wake(&mut self) -> Result<(), RolloutError> {
        self.sleeps = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::cancel::Cancel;
    use crate::engine::{FinishReason, OutputSink, RolloutOutput};
    use verl_kernels::random::{DrawKey, Purpose};

    const FIRST: Version = Version {
        step: 3,
        generation: 1,
    };

    /// Weights whose prepared models answer with `token`; counts the prepared models that exist.
    struct Fake {
        token: u32,
        prepared: Arc<AtomicUsize>,
        fails: bool,
    }

    struct FakeModel {
        token: u32,
        prepared: Arc<AtomicUsize>,
    }

    impl Fake {
        fn new(token: u32) -> Self {
            Fake {
                token,
                prepared: Arc::default(),
                fails: false,
            }
        }

        fn prepared(&self) -> usize {
            self.prepared.load(Ordering::SeqCst)
        }
    }

    impl EngineWeights for Fake {
        fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
            if self.fails {
                let reason = "unplugged".to_owned();
                return Err(RolloutError::Device { reason });
            }
            self.prepared.fetch_add(1, Ordering::SeqCst);
            Ok(Box::new(FakeModel {
                token: self.token,
                prepared: Arc::clone(&self.prepared),
            }))
        }
    }

    impl Drop for FakeModel {
        fn drop(&mut self) {
            self.prepared.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl PreparedModel for FakeModel {
        fn generate(
            &mut self,
            requests: &[RolloutRequest],
            _settings: &SamplingSettings,
            on_done: &mut OutputSink<'_>,
        ) -> Result<(), RolloutError> {
            (0..requests.len()).try_for_each(|request| {
                on_done(
                    request,
                    RolloutOutput {
                        tokens: vec![self.token],
                        sampling_log_probs: vec![0.0],
                        log_probs: vec![0.0],
                        finish: FinishReason::Length,
                    },
                )
            })
        }
    }

    fn requests() -> Vec<RolloutRequest> {
        let request = |row| RolloutRequest {
            prompt: vec![1],
            key: DrawKey {
                seed: 0,
                purpose: Purpose::Rollout,
                step: 0,
                row,
                attempt: 0,
            },
            max_new_tokens: 1,
        };
        (0..2).map(request).collect()
    }

    /// The tokens of all responses; every event must have the version `FIRST` or a later one, the same in a call.
    fn tokens(engine: &mut NativeEngine) -> Result<Vec<u32>, RolloutError> {
        let mut started = None;
        let mut tokens = Vec::new();
        engine.generate(&requests(), &SamplingSettings::default(), &mut |event| {
            match event {
                Event::Started { version } => assert_eq!(started.replace(version), None),
                Event::Done {
                    version, output, ..
                } => {
                    assert_eq!(started, Some(version));
                    tokens.extend(output.tokens);
                }
            }
            Ok(())
        })?;
        assert_eq!(started, engine.version());
        Ok(tokens)
    }

    #[test]
    fn nothing_is_served_before_a_version_is_loaded() {
        let mut engine = NativeEngine::default();
        assert_eq!(
            tokens(&mut engine).unwrap_err().to_string(),
            "engine `native` has no weights; load a version before you sample"
        );
        let weights = Fake::new(7);
        engine.load(FIRST, &weights).unwrap();
        assert_eq!(engine.version(), Some(FIRST));
        assert_eq!(tokens(&mut engine).unwrap(), [7, 7]);
        assert_eq!(tokens(&mut engine).unwrap(), [7, 7]);
        assert_eq!(weights.prepared(), 1);
    }

    #[test]
    fn a_failed_load_leaves_no_weights() {
        let mut engine = NativeEngine::default();
        let weights = Fake::new(7);
        engine.load(FIRST, &weights).unwrap();
        let failing = Fake {
            fails: true,
            ..Fake::new(8)
        };
        let next = Version {
            generation: 2,
            ..FIRST
        };
        assert!(engine.load(next, &failing).is_err());
        assert_eq!((engine.version(), weights.prepared()), (None, 0));
        assert!(matches!(
            tokens(&mut engine),
            Err(RolloutError::NotLoaded { .. })
        ));
        engine.load(next, &Fake::new(9)).unwrap();
        assert_eq!(tokens(&mut engine).unwrap(), [9, 9]);
    }

    #[test]
    fn a_sleeping_engine_has_no_weights_and_serves_nothing() {
        let mut engine = NativeEngine::default();
        let weights = Fake::new(7);
        engine.load(FIRST, &weights).unwrap();
        engine.sleep();
        engine.sleep();
        assert_eq!((engine.version(), weights.prepared()), (None, 0));
        assert_eq!(
            tokens(&mut engine).unwrap_err().to_string(),
            "engine `native` sleeps; wake it before you load weights or sample"
        );
        assert!(matches!(
            engine.load(FIRST, &weights),
            Err(RolloutError::Asleep { .. })
        ));
        engine.wake().unwrap();
        engine.load(FIRST, &weights).unwrap();
        assert_eq!(tokens(&mut engine).unwrap(), [7, 7]);
    }

    /// A model that does not look at the token is stopped at its next response.
    #[test]
    fn every_model_can_be_cancelled() {
        let mut engine = NativeEngine::default();
        engine.load(FIRST, &Fake::new(7)).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&done);
        let settings = SamplingSettings {
            cancel: Some(Cancel::new(move || seen.load(Ordering::SeqCst) > 0)),
            ..SamplingSettings::default()
        };
        let ended = engine.generate(&requests(), &settings, &mut |event| {
            if matches!(event, Event::Done { .. }) {
                done.fetch_add(1, Ordering::SeqCst);
            }
            Ok(())
        });
        assert!(matches!(ended, Err(RolloutError::Cancelled)));
        assert_eq!(done.load(Ordering::SeqCst), 1);
        assert_eq!(tokens(&mut engine).unwrap(), [7, 7]);
    }
}
