//! A sink for tests of stages.

use verl_words::batch::Batch;
use verl_words::stage::{
    CancelToken, Metric, Models, Reduce, Stage, StageContext, StageError, StageSink,
};

/// Collects what a stage emits and records.
#[derive(Default)]
pub(crate) struct RecordingSink {
    pub(crate) batches: Vec<Batch>,
    pub(crate) samples: Vec<serde_json::Value>,
    metrics: Vec<(&'static str, f64)>,
}

impl RecordingSink {
    fn values(&self, metric: &Metric) -> impl Iterator<Item = f64> {
        let own = self.metrics.iter().filter(|(name, _)| *name == metric.name);
        own.map(|(_, value)| *value)
    }

    /// Mean of the recorded values of a metric that is reduced by its mean.
    pub(crate) fn mean(&self, metric: &Metric) -> Option<f64> {
        assert_eq!(metric.reduce, Reduce::Mean);
        let count = self.values(metric).count();
        (count > 0).then(|| self.values(metric).sum::<f64>() / count as f64)
    }

    /// Sum of the recorded values of a metric that is reduced by its sum.
    pub(crate) fn sum(&self, metric: &Metric) -> f64 {
        assert_eq!(metric.reduce, Reduce::Sum);
        self.values(metric).sum()
    }
}

impl StageSink for RecordingSink {
    fn emit(&mut self, batch: Batch) -> Result<(), StageError> {
        self.batches.push(batch);
        Ok(())
    }
    fn record(&mut self, metric: &Metric, value: f64, _weight: f64) {
        self.metrics.push((metric.name, value));
    }
    fn record_named(&mut self, _name: &str, _value: f64, _weight: f64) {}
    fn sample(&mut self, sample: serde_json::Value) {
        self.samples.push(sample);
    }
}

/// Runs a stage without models on `input`, in a step of a run with seed 5.
#[track_caller]
pub(crate) fn run(stage: &mut dyn Stage, step: u64, input: Batch) -> RecordingSink {
    run_with(stage, step, input, &mut Models::new()).expect("sound rows")
}

/// Runs a stage with models, which may fail, in the same way.
pub(crate) fn run_with(
    stage: &mut dyn Stage,
    step: u64,
    input: Batch,
    models: &mut Models,
) -> Result<RecordingSink, StageError> {
    let mut kept = RecordingSink::default();
    let mut context = StageContext {
        stage: "tested",
        step,
        steps: 9,
        seed: 5,
        wave: 0,
        cancel: &CancelToken::default(),
        models,
        sink: &mut kept,
    };
    stage.run(input, &mut context)?;
    Ok(kept)
}
