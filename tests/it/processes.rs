//! A run whose device group is another process computes the same bits as one whose group is a thread, and reports a process
//! that is lost.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use verl::pipe::run::error::RunError;
use verl::pipe::run::runner::{Run, RunOptions};
use verl::pipe::run::worker::{ProcessOptions, WorkerServer};
use verl::pipe::stage::StartContext;
use verl::pipe::trace::compare::diff_step;
use verl::pipe::trace::replay::{ReplayScope, Replayer};
use verl::pipe::wire::child::{self, Program, Server, Start};
use verl::pipe::wire::message::{Message, MessageError};
use verl::pipe::wire::serve::{Events, Serve};
use verl::pipe::wire::socket::Transport;
use verl::prelude::*;

use crate::critic::{ppo_with_reward_model, train_reward_model};
use crate::groups::{ROLLOUT_GROUP, TWO_GROUPS, steps_with, three_steps};
use crate::kit::{GRPO, Place};
use crate::replayed::{EXAMPLES, example, record, record_with};

/// Environment variable with the file to which a worker process writes its id.
const ID_FILE: &str = "VERL_TEST_ID_FILE";

/// Not a test: the `main` of the worker processes, which are this program.
#[test]
fn worker_entry() {
    if let Ok(path) = std::env::var(ID_FILE) {
        fs::write(path, std::process::id().to_string()).expect("a file");
    }
    if let Ok(at) = std::env::var(DIE_AT) {
        let (before, at) = at.split_once(' ').expect("two words");
        let (before, left) = (before == "before", at.parse().expect("a number"));
        child::enter(move |start: &Start| {
            let (inner, on_signal) = WorkerServer(registry).server(start);
            // A process that was started again lives, unless the test says otherwise.
            let lives = start.incarnation > 1 && std::env::var_os(DIE_ALWAYS).is_none();
            let left = if lives { u64::MAX } else { left };
            let dying = Dying {
                inner,
                before,
                left,
            };
            (dying, on_signal)
        });
    }
    verl::worker_main(registry);
}

/// Environment variable with the request at which a worker process dies: `before 3`, `after 3`.
const DIE_AT: &str = "VERL_TEST_DIE_AT";

/// Environment variable by which a process that was started again dies as well.
const DIE_ALWAYS: &str = "VERL_TEST_DIE_ALWAYS";

/// Dies before or after it has processed a request; in either case the reply is not sent.
struct Dying<S> {
    inner: S,
    before: bool,
    left: u64,
}

impl<S: Serve> Serve for Dying<S> {
    fn handle(&mut self, request: Message, events: &Events) -> Result<Message, MessageError> {
        self.left -= 1;
        if self.left == 0 && self.before {
            std::process::abort();
        }
        let reply = self.inner.handle(request, events);
        if self.left == 0 {
            std::process::abort();
        }
        reply
    }
}

fn registry() -> Registry {
    verl::registry().stage::<Fault>()
}

/// A stage on the device group that fails in some way.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
struct Fault {
    /// How it fails.
    how: String,
}

impl StageConfig for Fault {
    const KIND: &'static str = "fault";
    const SUMMARY: &'static str = "fails";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(self.clone()))
    }
}

impl Stage for Fault {
    fn spec(&self) -> StageSpec {
        let spec = StageSpec::new().reads(keys::REWARDS).rows(RowRule::Sink);
        spec.uses("actor", Access::Read)
    }

    fn start(&mut self, _context: &mut StartContext<'_>) -> Result<(), StageError> {
        match self.how.as_str() {
            "start" => panic!("the stage does not start"),
            _ => Ok(()),
        }
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        match self.how.as_str() {
            "abort" => std::process::abort(),
            "panic" => panic!("the stage broke"),
            "row" => Err(StageError::Row {
                row: 1,
                id: input.ids()[1],
                reason: "it is odd".to_owned(),
            }),
            "key" => Ok(input.get(&keys::ADVANTAGES).map(|_| ())?),
            "model" => context.model::<ValueResource>("actor").map(|_| ()),
            "wait" => {
                while !context.cancel.is_cancelled() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(StageError::Cancelled)
            }
            other => Err(StageError::failed(std::io::Error::other(other.to_owned()))),
        }
    }
}

/// The pipeline with a stage that fails in this way.
fn faulty(place: &Place, how: &str) -> DataPipe {
    let text = format!("{GRPO}\n[[stages]]\nkind = \"fault\"\nhow = \"{how}\"\n");
    let pipe = place.parse_with(&text, "run", &[], &registry());
    pipe.map_err(Findings).expect("a pipeline")
}

fn processes(ids: &Path, transport: Transport) -> ProcessOptions {
    let arguments = ["--exact", "processes::worker_entry", "--nocapture"];
    let program = Program {
        path: std::env::current_exe().expect("this program"),
        arguments: arguments.map(str::to_owned).to_vec(),
    };
    ProcessOptions {
        variables: vec![(ID_FILE.to_owned(), ids.display().to_string())],
        transport,
        ..ProcessOptions::new(program)
    }
}

fn start(pipe: &DataPipe, options: RunOptions) -> Result<Run, RunError> {
    let plan = pipe.plan().map_err(Findings).expect("a plan");
    Run::start(plan.schedule().expect("one device group"), options)
}

/// The header of tensors, whose entries are in no particular order, and their bytes.
fn tensors(bytes: &[u8]) -> Option<(BTreeMap<String, Value>, &[u8])> {
    let (length, rest) = bytes.split_at_checked(8)?;
    let length = u64::from_le_bytes(length.try_into().ok()?);
    let (header, values) = rest.split_at_checked(length as usize)?;
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(header).expect("a header");
    if let Some(Value::Object(about)) = header.get_mut("__metadata__") {
        about.sort_keys();
    }
    Some((header, values))
}

/// Everything that two steps, a restored step and a stored state produce, times excepted.
fn results(mut run: Run, folder: PathBuf) -> Vec<String> {
    let mut results = Vec::new();
    let step = |run: &mut Run, results: &mut Vec<String>| {
        let output = run.step().expect("a step");
        let values = output.metrics.values.into_iter();
        let values = values.filter(|(name, _)| !name.starts_with("perf/"));
        // All bits, those of NaN among them.
        let values: BTreeMap<_, u64> = values
            .map(|(name, value)| (name, value.to_bits()))
            .collect();
        results.push(format!("{values:?} {:?}", output.samples));
    };
    step(&mut run, &mut results);
    let before = run.snapshot().expect("a snapshot");
    results.push(format!("{:?} {:?}", before.models, before.stages));
    let stored = run.store(&before, &BTreeMap::new()).expect("stored");
    step(&mut run, &mut results);
    results.push(format!("{:?}", run.versions().expect("versions")));
    run.restore(&before).expect("restored");
    drop(before);
    step(&mut run, &mut results);
    results.push(format!("{:?}", run.versions().expect("versions")));
    run.recall(&stored).expect("recalled");
    results.push(format!("{:?}", run.versions().expect("versions")));
    step(&mut run, &mut results);
    for (name, (version, state)) in stored.models.iter().chain(&stored.stages) {
        let state = state
            .as_ref()
            .map(|state| (tensors(&state.tensors), &state.about));
        results.push(format!("{name} {version} {state:?}"));
    }
    let missing = run
        .save_model("nobody", &folder)
        .expect_err("no such model");
    results.push(format!("{} {missing}", missing.code()));
    run.save_model("actor", &folder).expect("saved");
    let weights = fs::read(folder.join("model.safetensors")).expect("weights");
    results.push(format!("{weights:?}"));
    assert_eq!(results[2], results[4], "a restored step");
    assert_eq!(results[2], results[7], "a recalled step");
    results
}

#[test]
fn a_process_computes_the_bits_of_a_thread() {
    let place = Place::new();
    let pipe = place.parse(GRPO, "run", &["run.samples_per_step=2"]);
    let pipe = pipe.map_err(Findings).expect("a pipeline");
    let threads = start(&pipe, RunOptions::default()).expect("started");
    let threads = results(threads, place.path("of-thread"));
    for transport in [Transport::Path, Transport::Tcp] {
        let ids = place.path("id");
        let options = RunOptions {
            processes: Some(processes(&ids, transport)),
            ..RunOptions::default()
        };
        let run = start(&pipe, options).expect("started");
        let process: u32 = fs::read_to_string(&ids)
            .expect("written")
            .parse()
            .expect("a number");
        assert_ne!(process, std::process::id());
        let processes = results(run, place.path(&format!("of-{transport:?}")));
        for (at, (process, thread)) in processes.iter().zip(&threads).enumerate() {
            assert!(
                process == thread,
                "{transport:?}, result {at}:\n{process}\n{thread}"
            );
        }
        // The run has ended, and its worker with it.
        let status = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        assert_eq!(status, "");
    }
}

#[test]
fn every_example_computes_the_same_edges_in_a_process() {
    for (file, overrides) in EXAMPLES {
        let place = Place::new();
        let pipe = example(&place, file, overrides);
        let options = RunOptions {
            processes: Some(processes(&place.path("id"), Transport::Path)),
            ..RunOptions::default()
        };
        let (of_thread, _) = record(&pipe, 2);
        let (of_process, mut run) = record_with(&pipe, 2, options);
        for (thread, process) in of_thread.iter().zip(&of_process) {
            let diff = diff_step(run.schedule(), thread, process);
            assert_eq!(diff.first(), None, "{file}");
            assert!(
                diff.stages.iter().all(|stage| stage.differences() == 0),
                "{file}"
            );
            assert_eq!(thread.weights_after, process.weights_after, "{file}");
        }
        // A process replays what it recorded, from the states that it keeps.
        let mut replayer = Replayer::new(&mut run).expect("a snapshot");
        let report = replayer
            .replay(&of_process[1], &ReplayScope::Step)
            .expect("a replay");
        assert_eq!(report.differences(), 0, "{file}:\n{report}");
    }
}

#[test]
fn threads_processes_and_mixes_of_them_compute_the_same_bits() {
    let place = Place::new();
    train_reward_model(&place);
    let pipes = [
        (place.grpo("grpo", ROLLOUT_GROUP), "rollout"),
        (ppo_with_reward_model(&place, TWO_GROUPS), "score"),
    ];
    for (pipe, second) in pipes {
        let of_threads = three_steps(&mut start(&pipe, RunOptions::default()).expect("started"));
        let groups = [
            None,
            Some(vec!["train".to_owned()]),
            Some(vec![second.to_owned()]),
        ];
        for groups in groups {
            let options = ProcessOptions {
                groups: groups.clone(),
                ..processes(&place.path("id"), Transport::Path)
            };
            let options = RunOptions {
                processes: Some(options),
                ..RunOptions::default()
            };
            let mut run = start(&pipe, options).expect("started");
            let before = run.snapshot().expect("a snapshot");
            let of_mix = three_steps(&mut run);
            assert!(of_mix == of_threads, "{groups:?}:\n{of_mix}\n{of_threads}");
            run.restore(&before).expect("a snapshot of this run");
            assert!(
                of_mix == three_steps(&mut run),
                "{groups:?}: a restored run differs"
            );
        }
    }
}

#[test]
fn a_process_leaves_ctrl_c_to_its_run_and_is_lost_when_it_is_stopped() {
    let place = Place::new();
    let ids = place.path("id");
    let mut of_processes = processes(&ids, Transport::Path);
    of_processes.settings.deadline = Duration::from_secs(3);
    let options = RunOptions {
        processes: Some(of_processes),
        ..RunOptions::default()
    };
    let pipe = place.grpo("run", &["run.worker_retries=0"]);
    let mut run = start(&pipe, options).expect("started");
    for signal in ["-INT", "-TERM"] {
        send(signal, &ids);
    }
    run.step().expect("a step");
    send("-STOP", &ids);
    let error = run.step().expect_err("lost");
    assert_eq!(error.code(), "R009");
    let text = error.to_string();
    assert!(
        text.contains("it sent nothing for 3.0 s, not even a heartbeat"),
        "{text}"
    );
    assert!(text.contains("lost: during step 2, stage `"), "{text}");
    // The stopped process does not outlive the run.
    let process = fs::read_to_string(&ids).expect("written");
    drop(run);
    let command = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
    assert_eq!(command, "");
}

/// Sends a signal to the worker process.
fn send(signal: &str, ids: &Path) {
    let process = fs::read_to_string(ids).expect("written");
    let killed = Command::new("kill").args([signal, &process]).status();
    assert!(killed.expect("`kill` runs").success());
}

#[test]
fn a_killed_process_ends_the_run_with_its_name_and_what_it_ran() {
    let place = Place::new();
    let pipe = place.grpo("run", &["run.worker_retries=0"]);
    let ids = place.path("id");
    let options = RunOptions {
        processes: Some(processes(&ids, Transport::Path)),
        ..RunOptions::default()
    };
    let mut run = start(&pipe, options.clone()).expect("started");
    run.step().expect("a step");
    send("-KILL", &ids);
    let error = run.step().expect_err("lost");
    assert_eq!(error.code(), "R009");
    let text = error.to_string();
    assert!(text.starts_with("the worker of `cpu` is lost: "), "{text}");
    assert!(text.contains("killed by signal 9 (SIGKILL)"), "{text}");
    let error = run.versions().expect_err("lost").to_string();
    assert!(error.contains("killed by signal 9 (SIGKILL)"), "{error}");
    drop(run);

    let mut run = start(&faulty(&place, "abort"), options).expect("started");
    let error = run.step().expect_err("lost");
    let text = error.to_string();
    assert_eq!(error.code(), "R009", "{text}");
    let stage = "lost: during step 1, stage `fault`, 8 rows, samples ";
    assert!(
        text.contains(stage) && text.contains("killed by signal 6 (SIGABRT)"),
        "{text}"
    );
}

/// Options with the worker of `group` as a process that dies at a request.
fn dying(place: &Place, group: &str, when: &str, at: u64) -> RunOptions {
    let mut options = processes(&place.path("id"), Transport::Path);
    options.groups = Some(vec![group.to_owned()]);
    let at = format!("{when} {at}");
    options.variables.push((DIE_AT.to_owned(), at));
    RunOptions {
        processes: Some(options),
        ..RunOptions::default()
    }
}

#[test]
fn a_process_that_dies_at_any_message_is_started_again_and_nothing_changes() {
    let place = Place::new();
    // With a snapshot after the first step, and with none before the last.
    for (snapshots, stride) in [(1, 1), (5, 4)] {
        let setting = format!("run.worker_snapshot_steps={snapshots}");
        let pipe = place.grpo("run", &[ROLLOUT_GROUP, &[&setting]].concat());
        let mut alone = start(&pipe, RunOptions::default()).expect("started");
        let expected = steps_with(&mut alone, 2, &mut |_| {});
        for group in ["train", "rollout"] {
            let mut deaths = 0;
            // Some of the requests before the first step, and every one of the steps.
            for at in (3..).step_by(stride) {
                let died = ["before", "after"].map(|when| {
                    let mut run = start(&pipe, dying(&place, group, when, at)).expect("started");
                    let mut restarts = 0.0;
                    let steps = steps_with(&mut run, 2, &mut |metrics| {
                        restarts += metrics.get("perf/worker_restarts").unwrap_or(0.0);
                    });
                    assert!(
                        steps == expected,
                        "{group}, {when} {at}:\n{steps}\n{expected}"
                    );
                    restarts
                });
                assert!(
                    died[0] <= 1.0 && died[0] == died[1],
                    "request {at}: {died:?}"
                );
                if died[0] == 0.0 {
                    break;
                }
                deaths += 1;
            }
            assert!(deaths * stride > 6, "{group}: {deaths}");
        }
    }
}

#[test]
fn a_process_that_dies_too_often_ends_the_run_with_its_name_and_what_it_ran() {
    let place = Place::new();
    let pipe = place.grpo("run", &["run.worker_retries=2"]);
    let mut options = dying(&place, "cpu", "before", 3);
    if let Some(processes) = &mut options.processes {
        processes
            .variables
            .push((DIE_ALWAYS.to_owned(), "yes".to_owned()));
    }
    let mut run = start(&pipe, options).expect("started");
    let error = run.step().expect_err("lost");
    let text = error.to_string();
    assert_eq!(error.code(), "R009", "{text}");
    assert!(text.starts_with("the worker of `cpu` is lost: "), "{text}");
    assert!(
        text.contains("it was started again 2 times in this step"),
        "{text}"
    );
    assert!(text.contains("stage `") && text.contains("rows"), "{text}");
}

#[test]
fn a_process_that_is_stopped_or_killed_between_steps_is_started_again() {
    let place = Place::new();
    let pipe = place.grpo("run", &["run.worker_snapshot_steps=2"]);
    let expected = three_steps(&mut start(&pipe, RunOptions::default()).expect("started"));
    let ids = place.path("id");
    let mut of_processes = processes(&ids, Transport::Path);
    of_processes.settings.deadline = Duration::from_secs(3);
    let options = RunOptions {
        processes: Some(of_processes),
        ..RunOptions::default()
    };
    let mut run = start(&pipe, options).expect("started");
    let signals = ["-KILL", "-STOP"];
    let mut step = 0;
    let steps = steps_with(&mut run, 3, &mut |_| {
        if let Some(signal) = signals.get(step) {
            send(signal, &ids);
        }
        step += 1;
    });
    assert!(steps == expected, "{steps}\n{expected}");
    // A snapshot is lost with the process that keeps it; states that were stored are not.
    let snapshot = run.snapshot().expect("a snapshot");
    let stored = run.store(&snapshot, &BTreeMap::new()).expect("stored");
    send("-KILL", &ids);
    let error = run.restore(&snapshot).expect_err("gone").to_string();
    assert!(error.contains("another run"), "{error}");
    let after = run.versions().expect("versions");
    run.step().expect("a step");
    run.recall(&stored).expect("recalled");
    assert_eq!(run.versions().expect("versions"), after);
}

#[test]
fn errors_of_a_process_print_what_those_of_a_thread_print() {
    let place = Place::new();
    let ids = place.path("id");
    let errors = |pipe: &DataPipe| {
        let processes = RunOptions {
            processes: Some(processes(&ids, Transport::Path)),
            ..RunOptions::default()
        };
        [RunOptions::default(), processes].map(|options| {
            let error = start(pipe, options).and_then(|mut run| run.step().map(drop));
            let error = error.expect_err("an error");
            (error.code(), error.to_string())
        })
    };
    let codes = [
        ("start", "R003"),
        ("panic", "R005"),
        ("row", "R004"),
        ("key", "R004"),
        ("model", "R004"),
        ("oh \\t no", "R004"),
    ];
    for (how, code) in codes {
        let [thread, process] = errors(&faulty(&place, how));
        assert_eq!(thread, process);
        assert_eq!(thread.0, code, "{}", thread.1);
    }
}

#[test]
fn cancelling_a_run_cancels_the_call_in_its_process() {
    let place = Place::new();
    let ids = place.path("id");
    let options = RunOptions {
        processes: Some(processes(&ids, Transport::Path)),
        ..RunOptions::default()
    };
    let cancel = options.cancel.clone();
    let mut run = start(&faulty(&place, "wait"), options).expect("started");
    let cancelling = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        cancel.cancel();
    });
    let error = run.step().expect_err("cancelled");
    assert_eq!(error.code(), "R011", "{error}");
    cancelling.join().expect("no panic");
    // The call has ended, so the worker answers.
    run.versions().expect("a worker that answers");
}

#[test]
fn what_exists_only_in_the_program_is_refused_by_its_process() {
    let place = Place::new();
    let spec = StageSpec::new().reads(keys::REWARDS);
    let observer = stage_fn(spec, |batch, context| context.emit(batch));
    let pipe = place.grpo("run", &[]).add_stage("observer", observer);
    let ids = place.path("id");
    let options = RunOptions {
        processes: Some(processes(&ids, Transport::Path)),
        ..RunOptions::default()
    };
    let error = start(&pipe, options).expect_err("refused").to_string();
    assert!(
        error.contains("exist only in the process that declared it"),
        "{error}"
    );
}

#[test]
fn the_command_of_workers_is_not_for_use_by_hand() {
    let pipe = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_pipe"))
            .args(arguments)
            .output();
        let output = output.expect("`pipe` runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (status, out, err) = pipe(&["worker"]);
    assert_eq!((status, out.as_str()), (Some(2), ""));
    assert!(
        err.contains("with which a run starts its worker processes"),
        "{err}"
    );
    assert!(err.contains("help: use `pipe train`"), "{err}");
    let (_, help, _) = pipe(&["--help"]);
    assert!(!help.contains("worker"), "{help}");
}
