//! Messages between the engine's threads: rows and reports of calls, over a bounded channel.
//!
//! The engine uses threads and channels rather than an async runtime: model calls and user functions can block for any
//! length of time. Neither approach can cancel a hung call, but a thread can at least be abandoned and replaced.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use crossbeam_channel::{SendTimeoutError, Sender};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use verl_words::batch::Batch;
use verl_words::panics::catch_panic;
use verl_words::stage::{
    CancelToken, Metric, Models, Reduce, Stage, StageContext, StageError, StageSink,
};

/// How often a blocked thread checks whether it must end.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// A recorded metric value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub name: Cow<'static, str>,
    pub reduce: Reduce,
    pub value: f64,
    pub weight: f64,
}

/// What a call recorded besides rows.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct CallReport {
    pub records: Vec<Record>,
    pub samples: Vec<Value>,
    /// When the call began; `None` if it ran in another process, which has another clock.
    #[serde(skip)]
    pub began: Option<Instant>,
    pub seconds: f64,
}

/// Why a call failed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CallFailure {
    Error(StageError),
    Panic(String),
    /// The worker that ran it is lost.
    Lost(String),
}

/// Events that threads send to the runner. `call` is unique within the run, so that late events of an abandoned call
/// are recognised.
#[derive(Debug)]
pub(crate) enum Event {
    /// A call emitted rows.
    Rows { call: u64, batch: Batch },
    /// A call on a device worker ended.
    Done {
        call: u64,
        report: CallReport,
        result: Result<(), CallFailure>,
    },
    /// A job on the host pool ended; its cell contains the results.
    HostDone { call: u64 },
}

impl Event {
    /// The call that the event belongs to.
    pub(crate) fn call(&self) -> u64 {
        match self {
            Event::Rows { call, .. } | Event::Done { call, .. } | Event::HostDone { call } => *call,
        }
    }
}

/// Values shared by all calls of a step.
#[derive(Debug)]
pub(crate) struct CallEnv {
    pub step: u64,
    pub steps: u64,
    pub seed: u64,
    pub cancel: CancelToken,
    /// Longest wait of an `emit`.
    pub deadline: Duration,
}

/// Where a call's rows go.
pub(crate) enum Out<'a> {
    /// To the runner immediately.
    Stream {
        call: u64,
        events: &'a Sender<Event>,
    },
    /// To the runner in another process.
    Remote(&'a dyn Fn(Batch) -> Result<(), StageError>),
    /// Buffered until the call has succeeded.
    Buffer(&'a mut Vec<Batch>),
}

struct CallSink<'a> {
    out: Out<'a>,
    env: &'a CallEnv,
    report: CallReport,
}

impl StageSink for CallSink<'_> {
    fn emit(&mut self, batch: Batch) -> Result<(), StageError> {
        let (call, events) = match &mut self.out {
            Out::Buffer(batches) => {
                batches.push(batch);
                return Ok(());
            }
            Out::Remote(_) if self.env.cancel.is_cancelled() => return Err(StageError::Cancelled),
            Out::Remote(send) => return send(batch),
            Out::Stream { call, events } => (*call, *events),
        };
        let since = Instant::now();
        let mut event = Event::Rows { call, batch };
        loop {
            if self.env.cancel.is_cancelled() {
                return Err(StageError::Cancelled);
            }
            event = match events.send_timeout(event, TICK) {
                Ok(()) => return Ok(()),
                Err(SendTimeoutError::Disconnected(_)) => return Err(StageError::Cancelled),
                Err(SendTimeoutError::Timeout(event)) => event,
            };
            if since.elapsed() > self.env.deadline {
                return Err(not_taken(self.env.deadline));
            }
        }
    }

    fn record(&mut self, metric: &Metric, value: f64, weight: f64) {
        let name = Cow::Borrowed(metric.name);
        self.report.records.push(Record {
            name,
            reduce: metric.reduce,
            value,
            weight,
        });
    }

    fn record_named(&mut self, name: &str, value: f64, weight: f64) {
        let name = Cow::Owned(name.to_owned());
        self.report.records.push(Record {
            name,
            reduce: Reduce::Mean,
            value,
            weight,
        });
    }

    fn sample(&mut self, sample: Value) {
        self.report.samples.push(sample);
    }
}

/// The error of an `emit` whose rows nobody took.
pub(crate) fn not_taken(deadline: Duration) -> StageError {
    StageError::failed(format!(
        "emitted rows were not taken within {:.1} s: the stages after this one do not keep up",
        deadline.as_secs_f64()
    ))
}

/// Calls a stage and catches panics. `wave` is the wave of a source's call, otherwise 0.
pub(crate) fn call_stage(
    stage: &mut dyn Stage,
    name: &str,
    input: Batch,
    wave: u64,
    env: &CallEnv,
    models: &mut Models,
    out: Out<'_>,
) -> (CallReport, Result<(), CallFailure>) {
    let start = Instant::now();
    let mut sink = CallSink {
        out,
        env,
        report: CallReport::default(),
    };
    let result = catch_panic(|| {
        stage.run(
            input,
            &mut StageContext {
                stage: name,
                step: env.step,
                steps: env.steps,
                seed: env.seed,
                wave,
                cancel: &env.cancel,
                models,
                sink: &mut sink,
            },
        )
    });
    let result = match result {
        Ok(result) => result.map_err(CallFailure::Error),
        Err(message) => Err(CallFailure::Panic(message)),
    };
    let mut report = sink.report;
    report.began = Some(start);
    report.seconds = start.elapsed().as_secs_f64();
    (report, result)
}
