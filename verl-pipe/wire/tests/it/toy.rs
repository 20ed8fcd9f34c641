//! A toy server: in this process, or as a child process that is this test program.

use std::env;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use verl_wire::child::{self, Program, START, Start, TOKEN};
use verl_wire::handshake::{Identity, Token, introduce};
use verl_wire::link::{LinkError, LinkSettings};
use verl_wire::message::{Message, MessageError, Parts};
use verl_wire::process::Spawn;
use verl_wire::serve::{Events, Serve, Signals};
use verl_wire::socket::{Stream, Transport};

pub const SOON: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Toy {
    /// Replies with the same parts.
    Echo,
    /// Sends this many numbered events.
    Count(u64),
    /// Waits until the signal.
    Wait,
    /// The signal, and the reply.
    Done,
    /// Sends an event of this many bytes after a small one.
    Large(usize),
    /// Panics.
    Panic,
    /// Exits.
    Exit(i32),
    /// Writes a line to standard error.
    Say(String),
}

#[expect(
    clippy::disallowed_methods,
    reason = "the end of a child process is what is tested"
)]
pub fn exit(status: i32) -> ! {
    std::process::exit(status)
}

pub fn toy(message: &Toy) -> Message {
    Message::new(message).expect("written")
}

#[derive(Default)]
pub struct ToyServer {
    pub signalled: Arc<AtomicBool>,
}

impl Serve for ToyServer {
    fn handle(&mut self, request: Message, events: &Events) -> Result<Message, MessageError> {
        match request.head::<Toy>()? {
            Toy::Echo => {
                let mut reply = toy(&Toy::Echo);
                let parts = request.parts().len();
                let mut bytes = Parts::of(request);
                for _ in 0..parts {
                    reply.push_buffer(bytes.bytes()?);
                }
                return Ok(reply);
            }
            Toy::Count(to) => {
                for number in 0..to {
                    events.send(&Message::new(&number)?, SOON).expect("sent");
                }
            }
            Toy::Wait => {
                while !self.signalled.load(Ordering::SeqCst) {
                    sleep(Duration::from_millis(1));
                }
            }
            Toy::Large(bytes) => {
                events.send(&Message::new(&0)?, SOON).expect("sent");
                let mut large = Message::new(&1)?;
                large.push_bytes(vec![7u8; bytes]);
                events.send(&large, SOON).expect("sent");
            }
            Toy::Panic => panic!("the toy broke"),
            Toy::Exit(code) => exit(code),
            Toy::Say(text) => writeln!(std::io::stderr(), "{text}").expect("said"),
            Toy::Done => {}
        }
        Ok(toy(&Toy::Done))
    }
}

/// Signals within this process.
pub struct Flag(pub Arc<AtomicBool>);

impl Signals for Flag {
    fn signal(&mut self, message: Message) {
        assert_eq!(message.head::<Toy>(), Ok(Toy::Done));
        self.0.store(true, Ordering::SeqCst);
    }

    fn lost(&mut self, _reason: &LinkError) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Deadlines for tests in which nothing is silent.
pub fn patient() -> LinkSettings {
    LinkSettings {
        heartbeat: Duration::from_millis(20),
        deadline: SOON,
        limit: 1 << 30,
    }
}

/// This test program as a worker, which behaves as `TOY` says.
pub fn spawn(behaviour: &str) -> Spawn {
    Spawn {
        program: Program {
            path: env::current_exe().expect("this program"),
            arguments: ["--exact", "toy::worker_entry", "--nocapture"]
                .map(str::to_owned)
                .to_vec(),
        },
        variables: vec![("TOY".to_owned(), behaviour.to_owned())],
        run: "run".to_owned(),
        worker: "toy".to_owned(),
        incarnation: 1,
        transport: Transport::Path,
        settings: patient(),
        deadline: SOON,
        on_line: |_, _| {},
    }
}

/// Polls until `done`; the deadline is only for a test that fails.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < SOON, "{what}");
        sleep(Duration::from_millis(2));
    }
}

fn connect(start: &Start) -> Stream {
    Stream::connect(&start.address.parse().expect("an address")).expect("connects")
}

/// Not a test: the `main` of a child process.
#[test]
fn worker_entry() {
    if !child::is_worker() {
        if let Ok(behaviour) = env::var("TOY_PARENT") {
            crate::processes::parent(&behaviour);
        }
        return;
    }
    let text = env::var(START).expect("set");
    let start: Start = serde_json::from_str(&text).expect("JSON");
    match env::var("TOY").expect("set").as_str() {
        "serve" => {}
        "die" => {
            writeln!(std::io::stderr(), "the toy cannot be found").expect("said");
            exit(7);
        }
        "abort" => std::process::abort(),
        "hang" => sleep(SOON),
        "wrong token" => {
            let identity = Identity::of_this_program("run", "toy", 1).expect("readable");
            let error = introduce(connect(&start), &Token::received("guess"), &identity, SOON);
            writeln!(std::io::stderr(), "{}", error.expect_err("refused")).expect("said");
            exit(1);
        }
        "other run" => {
            let identity = Identity::of_this_program("elsewhere", "toy", 1).expect("readable");
            let token = Token::received(env::var(TOKEN).expect("set"));
            let error = introduce(connect(&start), &token, &identity, SOON);
            writeln!(std::io::stderr(), "{}", error.expect_err("refused")).expect("said");
            exit(1);
        }
        "garbage first" => {
            let mut stranger = connect(&start);
            stranger.write_all(&[b'?'; 500]).expect("written");
            let wrong = Token::received("guess");
            let identity = Identity::of_this_program("run", "toy", 1).expect("readable");
            assert!(introduce(connect(&start), &wrong, &identity, SOON).is_err());
        }
        other => panic!("{other}"),
    }
    child::enter(|_: &Start| {
        let server = ToyServer::default();
        let mut flag = Flag(server.signalled.clone());
        let on_signal: Box<dyn FnMut(Message) + Send> =
            Box::new(move |message| flag.signal(message));
        (server, on_signal)
    });
}
