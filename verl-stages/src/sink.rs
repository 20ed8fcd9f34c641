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
    named: Vec<(String, f64)>,
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

    /// All recorded values, in order, as bits; those of metrics without a declaration last.
    pub(crate) fn recorded(&self) -> Vec<(String, u64)> {
        let declared = self.metrics.iter().map(|(name, value)| (*name, value));
        let named = self
            .named
            .iter()
            .map(|(name, value)| (name.as_str(), value));
        let all = declared.chain(named);
        all.map(|(name, value)| (name.to_owned(), value.to_bits()))
            .collect()
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
    fn record_named(&mut self, name: &str, value: f64, _weight: f64) {
        self.named.push((name.to_owned(), value));
    }
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
