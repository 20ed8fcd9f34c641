//! What the engine and a worker process send to each other: heads of [`Message`]s, with batches and tensors as parts.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use verl_wire::message::{Message, MessageError, Parts};
use verl_words::data::DataError;
use verl_words::resource::ResourceError;
use verl_words::stage::{ConfigError, StageError};

use crate::channel::{CallEnv, CallFailure, CallReport};
use crate::error::{FullDevice, RunError};
use crate::worker::QueryFailure;
use crate::worker::hosted::{RECEIVE, SEND, failed};
use crate::worker::message::{Answer, Query, StoredStates};

/// A request to a worker process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    /// The first one: builds the pipeline and loads group `group`. Reply: `Loaded`.
    Load {
        /// The pipeline as the text of a file.
        pipeline: String,
        /// Its folder.
        base: PathBuf,
        group: usize,
    },
    /// A call; the part is its input. Events: `Rows`. Reply: `Done`.
    Call {
        call: u64,
        stage: usize,
        wave: u64,
        env: SentEnv,
    },
    /// A query; the parts are its tensors. Reply: `Answer`.
    Ask { query: u64, asked: Query },
    /// Drops snapshots. Reply: `Forgotten`.
    Forget(Vec<u64>),
}

/// A signal to a worker process: ends a call, which may not have begun yet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Cancel {
    pub call: u64,
}

/// A reply or an event of a worker process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToRun {
    Loaded(Result<(), SentError>),
    /// The part is the batch.
    Rows {
        call: u64,
    },
    Done {
        call: u64,
        report: CallReport,
        result: Result<(), CallFailure>,
    },
    /// The parts are its tensors.
    Answer {
        query: u64,
        answer: Result<Answer, SentFailure>,
    },
    Forgotten,
}

/// A [`CallEnv`] without its cancel token.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SentEnv {
    pub step: u64,
    pub steps: u64,
    pub seed: u64,
    pub deadline: Duration,
}

impl From<&CallEnv> for SentEnv {
    fn from(env: &CallEnv) -> Self {
        SentEnv {
            step: env.step,
            steps: env.steps,
            seed: env.seed,
            deadline: env.deadline,
        }
    }
}

/// A [`QueryFailure`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SentFailure {
    Refused(SentError),
    Panicked(SentError),
}

impl From<QueryFailure> for SentFailure {
    fn from(failure: QueryFailure) -> Self {
        match failure {
            QueryFailure::Refused(error) => SentFailure::Refused(error.into()),
            QueryFailure::Panicked(error) => SentFailure::Panicked(error.into()),
        }
    }
}

impl SentFailure {
    /// The failure, of the worker `worker`.
    pub(crate) fn received(self, worker: &str) -> QueryFailure {
        match self {
            SentFailure::Refused(error) => QueryFailure::Refused(error.received(worker)),
            SentFailure::Panicked(error) => QueryFailure::Panicked(error.received(worker)),
        }
    }
}

/// An error of a worker process. It prints the same text after it was received.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SentError {
    Data {
        name: String,
        source: DataError,
    },
    Load {
        name: String,
        source: ResourceError,
    },
    Build {
        stage: String,
        errors: Vec<ConfigError>,
    },
    Start {
        stage: String,
        source: StageError,
    },
    State {
        what: String,
        name: String,
        action: String,
        source: String,
    },
    OutOfMemory(Box<FullDevice>),
    Lost {
        worker: String,
        reason: String,
    },
    /// Any other, as its text.
    Other(String),
}

impl From<RunError> for SentError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Data { name, source } => SentError::Data {
                name,
                source: *source,
            },
            RunError::Load { name, source } => SentError::Load { name, source },
            RunError::Build { stage, errors } => SentError::Build { stage, errors },
            RunError::Start { stage, source } => SentError::Start {
                stage,
                source: *source,
            },
            RunError::State {
                what,
                name,
                action,
                source,
            } => SentError::State {
                what: what.to_owned(),
                name,
                action: action.to_owned(),
                source: source.to_string(),
            },
            RunError::OutOfMemory(full) => SentError::OutOfMemory(full),
            RunError::Lost { worker, reason } => SentError::Lost { worker, reason },
            other => SentError::Other(other.to_string()),
        }
    }
}

/// Words of [`RunError::State`].
const WHATS: [&str; 3] = ["model", "stage", "device group"];
const ACTIONS: [&str; 7] = [
    "snapshot", "restore", "store", "recall", "save", SEND, RECEIVE,
];

impl SentError {
    /// The error, of the worker `worker`.
    pub(crate) fn received(self, worker: &str) -> RunError {
        match self {
            SentError::Data { name, source } => RunError::Data {
                name,
                source: Box::new(source),
            },
            SentError::Load { name, source } => RunError::Load { name, source },
            SentError::Build { stage, errors } => RunError::Build { stage, errors },
            SentError::Start { stage, source } => RunError::Start {
                stage,
                source: Box::new(source),
            },
            SentError::State {
                what,
                name,
                action,
                source,
            } => {
                let known = |words: &[&'static str], word: &str| {
                    words.iter().copied().find(|known| *known == word)
                };
                match (known(&WHATS, &what), known(&ACTIONS, &action)) {
                    (Some(what), Some(action)) => failed(what, &name, action, source),
                    _ => RunError::Lost {
                        worker: worker.to_owned(),
                        reason: format!("cannot {action} {what} `{name}`: {source}"),
                    },
                }
            }
            SentError::OutOfMemory(full) => RunError::OutOfMemory(full),
            SentError::Lost { worker, reason } => RunError::Lost { worker, reason },
            SentError::Other(reason) => RunError::Lost {
                worker: worker.to_owned(),
                reason,
            },
        }
    }
}

/// The tensors in `states`, in a fixed order.
fn of_states(states: &mut StoredStates) -> impl Iterator<Item = &mut Vec<u8>> {
    let states = states.values_mut().filter_map(|(_, state)| state.as_mut());
    states.map(|state| &mut state.tensors)
}

/// A message with bytes that are sent as parts.
trait WithBytes: Serialize {
    /// These bytes, in a fixed order.
    fn bytes(&mut self) -> Vec<&mut Vec<u8>>;

    /// Takes the bytes out, so that they are not written as numbers of the head.
    fn detach(mut self) -> Result<Message, MessageError>
    where
        Self: Sized,
    {
        let bytes = self.bytes().into_iter();
        let bytes: Vec<Vec<u8>> = bytes.map(std::mem::take).collect();
        let mut message = Message::new(&self)?;
        bytes
            .into_iter()
            .for_each(|bytes| message.push_bytes(bytes));
        Ok(message)
    }

    /// Puts the bytes back.
    fn attach(mut self, parts: &mut Parts) -> Result<Self, MessageError>
    where
        Self: Sized,
    {
        for bytes in self.bytes() {
            *bytes = parts.bytes()?.to_vec();
        }
        Ok(self)
    }
}

impl WithBytes for ToWorker {
    fn bytes(&mut self) -> Vec<&mut Vec<u8>> {
        match self {
            ToWorker::Ask {
                asked: Query::Recall { models, stages },
                ..
            } => of_states(models).chain(of_states(stages)).collect(),
            ToWorker::Ask {
                asked: Query::AcceptBucket { bucket, .. },
                ..
            } => vec![&mut bucket.bytes],
            _ => Vec::new(),
        }
    }
}

impl WithBytes for ToRun {
    fn bytes(&mut self) -> Vec<&mut Vec<u8>> {
        match self {
            ToRun::Answer {
                answer: Ok(Answer::Stored { models, stages }),
                ..
            } => of_states(models).chain(of_states(stages)).collect(),
            ToRun::Answer {
                answer: Ok(Answer::Bucket(bucket)),
                ..
            } => vec![&mut bucket.bytes],
            _ => Vec::new(),
        }
    }
}

impl ToWorker {
    /// The message; [`ToWorker::Call`] still lacks its input.
    pub(crate) fn message(self) -> Result<Message, MessageError> {
        self.detach()
    }

    /// The request in `message` and its remaining parts.
    pub(crate) fn received(message: Message) -> Result<(ToWorker, Parts), MessageError> {
        let head: ToWorker = message.head()?;
        let mut parts = Parts::of(message);
        Ok((head.attach(&mut parts)?, parts))
    }
}

impl ToRun {
    /// The message; [`ToRun::Rows`] still lacks its batch.
    pub(crate) fn message(self) -> Result<Message, MessageError> {
        self.detach()
    }

    /// The reply or event in `message` and its remaining parts.
    pub(crate) fn received(message: Message) -> Result<(ToRun, Parts), MessageError> {
        let head: ToRun = message.head()?;
        let mut parts = Parts::of(message);
        Ok((head.attach(&mut parts)?, parts))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use verl_words::resource::{StoredState, WeightsVersion};
    use verl_words::stage::Reduce;

    use super::*;
    use crate::channel::Record;

    fn states() -> StoredStates {
        let version = WeightsVersion {
            step: 3,
            hash: "ab".to_owned(),
        };
        let state = |byte: u8| StoredState {
            tensors: vec![byte; 1000],
            about: serde_json::json!({ "rate": 0.1 }),
        };
        BTreeMap::from([
            ("a".to_owned(), (version.clone(), Some(state(1)))),
            ("b".to_owned(), (version.clone(), None)),
            ("c".to_owned(), (version, Some(state(2)))),
        ])
    }

    #[test]
    fn tensors_travel_as_parts_and_come_back() {
        let asked = Query::Recall {
            models: states(),
            stages: states(),
        };
        let message = ToWorker::Ask { query: 7, asked }
            .message()
            .expect("written");
        assert_eq!(message.parts().len(), 4);
        assert!(message.head_bytes().len() < 1000);
        let (read, parts) = ToWorker::received(message).expect("read");
        parts.end().expect("all parts were read");
        let ToWorker::Ask {
            query: 7,
            asked: Query::Recall { models, stages },
        } = read
        else {
            panic!("{read:?}");
        };
        assert_eq!((models, stages), (states(), states()));

        let answer = Ok(Answer::Stored {
            models: states(),
            stages: BTreeMap::new(),
        });
        let message = ToRun::Answer { query: 7, answer }
            .message()
            .expect("written");
        let (read, _) = ToRun::received(message).expect("read");
        let ToRun::Answer {
            answer: Ok(Answer::Stored { models, .. }),
            ..
        } = read
        else {
            panic!("{read:?}");
        };
        assert_eq!(models, states());
    }

    #[test]
    fn reports_arrive_with_all_bits() {
        let values = [f64::NAN, f64::INFINITY, -0.0, 0.1, 5e-324, f64::MAX];
        let record = |value: &f64| Record {
            name: "loss".into(),
            reduce: Reduce::Mean,
            value: *value,
            weight: 1.0 / value,
        };
        let report = CallReport {
            records: values.iter().map(record).collect(),
            samples: vec![serde_json::json!({ "b": 1, "a": [0.1, u64::MAX, null, "é"] })],
            began: None,
            seconds: 0.25,
        };
        let samples = report.samples.clone();
        let done = ToRun::Done {
            call: 1,
            report,
            result: Err(CallFailure::Error(StageError::Cancelled)),
        };
        let (read, _) = ToRun::received(done.message().expect("written")).expect("read");
        let ToRun::Done { report, result, .. } = read else {
            panic!("{read:?}");
        };
        for (record, value) in report.records.iter().zip(values) {
            assert_eq!(record.value.to_bits(), value.to_bits());
            assert_eq!(record.weight.to_bits(), (1.0 / value).to_bits());
        }
        assert_eq!(report.samples[0].to_string(), samples[0].to_string());
        assert!(matches!(
            result,
            Err(CallFailure::Error(StageError::Cancelled))
        ));
    }

    #[test]
    fn errors_print_the_same_text() {
        let stage = || "reward".to_owned();
        let full = FullDevice {
            during: "step 3".to_owned(),
            device: "cuda:0".to_owned(),
            asked: Some("8.0 GiB".to_owned()),
            planned: "weights 1 GiB".to_owned(),
            help: "use fewer rows".to_owned(),
        };
        let errors: [fn() -> RunError; 7] = [
            || RunError::Data {
                name: "train".to_owned(),
                source: Box::new(DataError::Empty {
                    path: "a.jsonl".to_owned(),
                }),
            },
            || RunError::Load {
                name: "actor".to_owned(),
                source: ResourceError::Failed("no config.json".into()),
            },
            || RunError::Build {
                stage: "reward".to_owned(),
                errors: vec![ConfigError::new("rule", "is unknown", "use `exact`")],
            },
            || RunError::Start {
                stage: "reward".to_owned(),
                source: Box::new(StageError::failed("it panicked: oh")),
            },
            || failed("model", "actor", "save", "there is no such model"),
            || {
                failed(
                    "device group",
                    "cpu",
                    "restore",
                    ResourceError::ForeignSnapshot,
                )
            },
            || RunError::Lost {
                worker: "cpu".to_owned(),
                reason: "its thread has ended".to_owned(),
            },
        ];
        let errors = errors.into_iter().map(|make| (make(), make()));
        let full = [(); 2].map(|()| RunError::OutOfMemory(Box::new(full.clone())));
        for (sent, same) in errors.chain([full.into()]) {
            let message = ToRun::Loaded(Err(sent.into())).message().expect("written");
            let (read, _) = ToRun::received(message).expect("read");
            let ToRun::Loaded(Err(error)) = read else {
                panic!("{read:?}");
            };
            let error = error.received("cpu");
            assert_eq!(error.to_string(), same.to_string());
            assert_eq!(error.code(), same.code());
        }
        let failure = CallFailure::Error(StageError::Model {
            name: stage(),
            reason: "is missing".to_owned(),
        });
        let text = format!("{failure:?}");
        let done = ToRun::Done {
            call: 1,
            report: CallReport::default(),
            result: Err(failure),
        };
        let (read, _) = ToRun::received(done.message().expect("written")).expect("read");
        assert!(format!("{read:?}").contains(&text));
    }
}
