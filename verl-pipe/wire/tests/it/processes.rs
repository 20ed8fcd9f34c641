//! Worker processes that are killed, stopped, wrong, or left behind.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use verl_wire::client::{Client, FromWorker};
use verl_wire::link::{LinkError, LinkSettings};
use verl_wire::process::{Spawn, WorkerProcess};
use verl_wire::socket::Transport;

use crate::toy::{SOON, Toy, exit, patient, spawn, toy, wait_until};

struct Worker {
    process: WorkerProcess,
    client: Client,
    reports: Receiver<FromWorker>,
}

impl Worker {
    fn start(spawn: &Spawn) -> Worker {
        let (process, connection) = WorkerProcess::spawn(spawn).expect("starts");
        assert_eq!(connection.process, process.id());
        let (sender, reports) = channel();
        let report = move |report| drop(sender.send(report));
        let client = Client::start(connection, &spawn.settings, report).expect("threads");
        Worker {
            process,
            client,
            reports,
        }
    }

    fn echoes(&self) -> bool {
        self.client.ask(&toy(&Toy::Echo), "to echo", SOON).is_ok()
    }

    fn lost(&self) -> LinkError {
        loop {
            if let FromWorker::Lost(reason) = self.reports.recv_timeout(SOON).expect("a report") {
                return reason;
            }
        }
    }
}

/// Sends a signal to a process that a test started.
fn signal(name: &str, process: u32) {
    let status = Command::new("kill")
        .args([name, &process.to_string()])
        .status();
    assert!(
        status.expect("`kill` runs").success(),
        "kill {name} {process}"
    );
}

/// Whether a process is there and not just waiting for its parent to notice its end.
fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit(") ")
            .next()
            .unwrap_or_default()
            .starts_with('Z')
    })
}

#[test]
fn a_worker_starts_serves_and_ends() {
    for transport in [Transport::Path, Transport::Tcp] {
        let mut worker = Worker::start(&Spawn {
            transport,
            ..spawn("serve")
        });
        assert!(worker.echoes());
        let said = toy(&Toy::Say("one\ntwo".to_owned()));
        worker.client.ask(&said, "to speak", SOON).expect("spoken");
        wait_until("its lines arrive", || {
            worker.process.last_lines() == ["one", "two"]
        });
        let exit = worker.process.end(SOON).expect("ended");
        assert_eq!(exit.to_string(), "it exited with status 0");
        assert_eq!(worker.lost(), LinkError::Closed);
    }
}

#[test]
fn dropping_the_connection_or_the_process_ends_the_process() {
    let Worker {
        mut process,
        client,
        ..
    } = Worker::start(&spawn("serve"));
    // Not even a request that never ends keeps it.
    client.begin(&toy(&Toy::Wait), SOON).expect("sent");
    drop(client);
    wait_until("it ends", || process.try_exit().is_some());
    let exit = process.try_exit().expect("ended");
    assert_eq!(exit.status().code(), Some(0), "{:?}", process.last_lines());

    let worker = Worker::start(&spawn("serve"));
    let process = worker.process.id();
    drop(worker.process);
    assert!(!is_running(process));
}

#[test]
fn a_killed_worker_is_reported_at_once() {
    let mut worker = Worker::start(&spawn("serve"));
    signal("-KILL", worker.process.id());
    // The deadline for silence is a minute: this is the end of the connection.
    assert_eq!(worker.lost(), LinkError::Closed);
    let text = worker
        .process
        .describe_loss("it closed the connection", SOON);
    let expected = "it closed the connection; it was killed by signal 9 (SIGKILL); if nobody killed it, the system ran out of memory";
    assert_eq!(text, expected);
    let error = worker
        .client
        .ask(&toy(&Toy::Echo), "", SOON)
        .expect_err("lost");
    assert_eq!(error, LinkError::Closed);

    let mut worker = Worker::start(&spawn("serve"));
    worker
        .client
        .begin(&toy(&Toy::Exit(3)), SOON)
        .expect("sent");
    assert_eq!(worker.lost(), LinkError::Closed);
    assert_eq!(
        worker.process.describe_loss("lost", SOON),
        "lost; it exited with status 3"
    );
}

#[test]
fn a_worker_killed_within_a_message_is_reported() {
    let (mut process, connection) = WorkerProcess::spawn(&spawn("serve")).expect("starts");
    let (sender, reports) = channel();
    let (open, gate) = channel::<()>();
    let report = move |report| {
        let is_first =
            matches!(&report, FromWorker::Event { message, .. } if message.head() == Ok(0));
        drop(sender.send(report));
        if is_first {
            // Nothing is read meanwhile, so the large event is stuck halfway.
            let _ = gate.recv();
        }
    };
    let client = Client::start(connection, &patient(), report).expect("threads");
    client
        .begin(&toy(&Toy::Large(64 << 20)), SOON)
        .expect("sent");
    assert!(matches!(
        reports.recv_timeout(SOON),
        Ok(FromWorker::Event { .. })
    ));
    std::thread::sleep(Duration::from_millis(300));
    signal("-KILL", process.id());
    wait_until("it ends", || process.try_exit().is_some());
    open.send(()).expect("the reader waits");
    let FromWorker::Lost(reason) = reports.recv_timeout(SOON).expect("a report") else {
        panic!("a message arrived that was not sent to its end");
    };
    assert!(
        reason.to_string().contains("within a message, after "),
        "{reason}"
    );
}

#[test]
fn a_worker_that_ends_before_it_connects_is_reported_with_its_last_lines() {
    let error = WorkerProcess::spawn(&spawn("die"))
        .expect_err("ended")
        .to_string();
    let start = "worker `toy` did not start: it exited with status 7 before it connected";
    assert!(
        error.starts_with(start) && error.contains("the toy cannot be found"),
        "{error}"
    );
    let error = WorkerProcess::spawn(&spawn("abort"))
        .expect_err("ended")
        .to_string();
    assert!(error.contains("killed by signal 6 (SIGABRT)"), "{error}");
    let mut missing = spawn("serve");
    missing.program.path = "/nowhere/pipe".into();
    let error = WorkerProcess::spawn(&missing)
        .expect_err("missing")
        .to_string();
    assert!(
        error.contains("`/nowhere/pipe` cannot be started"),
        "{error}"
    );
    let mut slow = spawn("hang");
    slow.deadline = Duration::from_millis(300);
    let error = WorkerProcess::spawn(&slow).expect_err("hangs").to_string();
    assert!(error.contains("it did not connect within 0.3 s"), "{error}");
}

#[test]
fn wrong_workers_are_refused_on_both_sides() {
    for (behaviour, reason) in [
        ("wrong token", "its token is wrong"),
        ("other run", "the run is `elsewhere`"),
    ] {
        let error = WorkerProcess::spawn(&spawn(behaviour)).expect_err("refused");
        assert!(
            error.reason.contains("a connection was refused") && error.reason.contains(reason),
            "{error}"
        );
        let lines = error.lines.join("\n");
        assert!(
            lines.contains("the run refuses this worker") && lines.contains(reason),
            "{error}"
        );
    }
}

#[test]
fn strangers_do_not_keep_a_worker_from_its_run() {
    for transport in [Transport::Path, Transport::Tcp] {
        let worker = Worker::start(&Spawn {
            transport,
            ..spawn("garbage first")
        });
        assert!(worker.echoes());
    }
}

#[test]
fn a_stopped_worker_is_lost_after_its_deadline_and_what_it_sends_later_is_dropped() {
    let mut spawn = spawn("serve");
    spawn.settings = LinkSettings {
        heartbeat: Duration::from_millis(50),
        deadline: Duration::from_secs(3),
        ..patient()
    };
    let mut old = Worker::start(&spawn);
    // It sends events one after the other until it is stopped.
    old.client
        .begin(&toy(&Toy::Count(u64::MAX)), SOON)
        .expect("sent");
    old.reports.recv_timeout(SOON).expect("an event");
    signal("-STOP", old.process.id());
    let reason = old.lost();
    assert!(
        reason
            .to_string()
            .contains("sent nothing for 3.0 s, not even a heartbeat"),
        "{reason}"
    );
    assert!(is_running(old.process.id()));
    spawn.incarnation = 2;
    let new = Worker::start(&spawn);
    signal("-CONT", old.process.id());
    // It notices that nobody reads it any more, and ends.
    wait_until("it ends", || old.process.try_exit().is_some());
    assert!(old.reports.try_recv().is_err());
    assert!(new.echoes());
    assert_eq!((new.client.incarnation(), new.client.dropped()), (2, 0));
    // A stopped worker can be killed without waking it.
    signal("-STOP", new.process.id());
    let state = format!("/proc/{}/stat", new.process.id());
    wait_until("it stops", || {
        let state = std::fs::read_to_string(&state).unwrap_or_default();
        state
            .rsplit(") ")
            .next()
            .unwrap_or_default()
            .starts_with('T')
    });
    let mut process = new.process;
    assert_eq!(
        process.end(Duration::ZERO).expect("killed").signal(),
        Some(9)
    );
}

/// Not a test: the `main` of a process that starts a worker, prints its id, and then waits to be killed.
pub fn parent(behaviour: &str) -> ! {
    let worker = Worker::start(&spawn("serve"));
    if behaviour == "busy" {
        worker.client.begin(&toy(&Toy::Wait), SOON).expect("sent");
    }
    let mut out = std::io::stdout();
    writeln!(out, "worker {}", worker.process.id()).expect("printed");
    std::thread::sleep(SOON);
    exit(0)
}

#[test]
fn a_worker_does_not_outlive_a_run_that_is_killed() {
    for behaviour in ["idle", "busy"] {
        let parent = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "toy::worker_entry", "--nocapture"])
            .env("TOY_PARENT", behaviour)
            .stdout(Stdio::piped())
            .spawn();
        let mut parent = parent.expect("starts");
        let lines = BufReader::new(parent.stdout.take().expect("a pipe")).lines();
        let worker = lines.map(|line| line.expect("a line")).find_map(|line| {
            let id = line.split_once("worker ")?.1.to_owned();
            id.parse::<u32>().ok()
        });
        let worker = worker.expect("a worker was started");
        assert!(is_running(worker));
        parent.kill().expect("killed");
        parent.wait().expect("ended");
        wait_until("the worker ends", || !is_running(worker));
    }
}
