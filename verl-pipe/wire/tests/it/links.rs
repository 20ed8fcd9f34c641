//! Links within this process: requests, events, signals, panics, silence.

use std::io::Write;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use verl_wire::client::{Client, FromWorker};
use verl_wire::frame::{self, Kind};
use verl_wire::handshake::{Identity, Token, accept, introduce};
use verl_wire::link::{LinkError, LinkSettings};
use verl_wire::message::Message;
use verl_wire::serve::serve;
use verl_wire::socket::Stream;

use crate::toy::{Flag, SOON, Toy, ToyServer, patient, toy};

fn identity() -> Identity {
    Identity::of_this_program("run", "toy", 5).expect("readable")
}

struct Both {
    client: Client,
    reports: Receiver<FromWorker>,
    worker: JoinHandle<LinkError>,
    /// A second handle of the worker's end.
    raw: Stream,
}

fn start(settings: LinkSettings) -> Both {
    let (run, worker) = Stream::pair().expect("a pair");
    let raw = worker.try_clone().expect("a handle");
    let of_worker = settings.clone();
    let worker = thread::spawn(move || {
        let connection =
            introduce(worker, &Token::received("t"), &identity(), SOON).expect("accepted");
        let mut server = ToyServer::default();
        let flag = Flag(server.signalled.clone());
        serve(connection, &of_worker, &mut server, flag).expect("threads")
    });
    let connection = accept(run, &Token::received("t"), &identity(), SOON).expect("accepted");
    assert_eq!(connection.process, std::process::id());
    let (sender, reports) = channel();
    let report = move |report| drop(sender.send(report));
    Both {
        client: Client::start(connection, &settings, report).expect("threads"),
        reports,
        worker,
        raw,
    }
}

impl Both {
    fn next(&self) -> FromWorker {
        self.reports.recv_timeout(SOON).expect("a report")
    }

    fn end(self) -> LinkError {
        drop(self.client);
        self.worker.join().expect("no panic")
    }
}

#[test]
fn requests_are_answered_in_order() {
    let both = start(patient());
    for size in [0, 1, 100_000, 3_000_000] {
        let mut request = toy(&Toy::Echo);
        request.push_bytes(vec![size as u8; size]);
        let reply = both.client.ask(&request, "to echo", SOON).expect("a reply");
        assert_eq!(
            reply.parts()[0].clone().into_buffer().as_slice(),
            vec![size as u8; size]
        );
    }
    let first = both
        .client
        .begin(&toy(&Toy::Count(20)), SOON)
        .expect("sent");
    let second = both.client.begin(&toy(&Toy::Count(1)), SOON).expect("sent");
    for (request, count) in [(first, 20), (second, 1)] {
        for number in 0..count {
            let FromWorker::Event {
                request: of,
                message,
            } = both.next()
            else {
                panic!("no event");
            };
            assert_eq!((of, message.head::<u64>()), (request, Ok(number)));
        }
        let FromWorker::Reply {
            request: of,
            result,
        } = both.next()
        else {
            panic!("no reply");
        };
        assert_eq!(of, request);
        assert_eq!(result.expect("done").head(), Ok(Toy::Done));
    }
    assert_eq!(both.client.incarnation(), 5);
    assert_eq!(both.end(), LinkError::Closed);
}

#[test]
fn a_signal_reaches_a_worker_during_a_request() {
    let both = start(patient());
    both.client.begin(&toy(&Toy::Wait), SOON).expect("sent");
    both.client.signal(&toy(&Toy::Done), SOON).expect("sent");
    assert!(matches!(
        both.next(),
        FromWorker::Reply { result: Ok(_), .. }
    ));
    both.end();
}

#[test]
fn a_panic_is_an_answer_and_ends_the_worker() {
    let both = start(patient());
    let error = both
        .client
        .ask(&toy(&Toy::Panic), "to panic", SOON)
        .expect_err("panicked");
    let LinkError::Panicked(text) = error else {
        panic!("{error}");
    };
    assert!(
        text.starts_with("the toy broke (at ") && text.contains("toy.rs"),
        "{text}"
    );
    assert!(matches!(both.next(), FromWorker::Lost(LinkError::Closed)));
    assert_eq!(
        both.client
            .ask(&toy(&Toy::Echo), "", SOON)
            .expect_err("lost"),
        LinkError::Closed
    );
    assert!(matches!(both.end(), LinkError::Panicked(_)));
    // A request that cannot be read ends it as well, with a reason.
    let both = start(patient());
    let error = both
        .client
        .ask(&Message::new(&7).expect("written"), "", SOON)
        .expect_err("unreadable");
    assert!(
        error.to_string().contains("a message cannot be read"),
        "{error}"
    );
}

#[test]
fn a_deadline_passes_while_the_worker_is_alive_and_the_late_reply_is_dropped() {
    let both = start(patient());
    let wait = Duration::from_millis(30);
    let error = both
        .client
        .ask(&toy(&Toy::Wait), "to wait", wait)
        .expect_err("waits");
    assert_eq!(
        error.to_string(),
        "no answer within 0.0 s when asked to wait, though its process sends heartbeats"
    );
    both.client.signal(&toy(&Toy::Done), SOON).expect("sent");
    assert!(both.client.ask(&toy(&Toy::Echo), "to echo", SOON).is_ok());
    assert!(both.reports.try_recv().is_err());
    both.end();
}

#[test]
fn a_long_request_is_not_silence_but_a_silent_worker_is_lost() {
    let short = LinkSettings {
        heartbeat: Duration::from_millis(20),
        deadline: Duration::from_secs(2),
        ..patient()
    };
    // Its thread sleeps for longer than the deadline; its heartbeats do not.
    let both = start(short.clone());
    let request = both.client.begin(&toy(&Toy::Wait), SOON).expect("sent");
    assert!(both.reports.recv_timeout(3 * short.deadline).is_err());
    both.client.signal(&toy(&Toy::Done), SOON).expect("sent");
    assert!(matches!(both.next(), FromWorker::Reply { request: of, .. } if of == request));
    both.end();

    // A worker that introduces itself and then says nothing.
    let (run, worker) = Stream::pair().expect("a pair");
    let worker = thread::spawn(move || introduce(worker, &Token::received("t"), &identity(), SOON));
    let connection = accept(run, &Token::received("t"), &identity(), SOON).expect("accepted");
    let _silent = worker.join().expect("no panic").expect("accepted");
    let (sender, reports) = channel();
    let client = Client::start(connection, &short, move |report| drop(sender.send(report)));
    let client = client.expect("threads");
    let error = client
        .ask(&toy(&Toy::Echo), "to echo", SOON)
        .expect_err("silent");
    assert!(
        error.to_string().contains("not even a heartbeat"),
        "{error}"
    );
    assert!(matches!(reports.recv_timeout(SOON), Ok(FromWorker::Lost(lost)) if lost == error));
}

#[test]
fn garbage_ends_the_link_with_its_text_and_other_incarnations_are_dropped() {
    let mut both = start(patient());
    let late = Message::new(&"late").expect("written");
    // An idle worker sends only heartbeats, which are written at once, so this does not mix with another frame.
    for incarnation in [4, 6] {
        let frame = (Kind::Event, incarnation, 1);
        frame::write(&mut both.raw, frame, &late, || Ok(())).expect("written");
    }
    both.raw.write_all(&[b'#'; 64]).expect("written");
    let FromWorker::Lost(error) = both.next() else {
        panic!("a message of another incarnation arrived");
    };
    assert!(error.to_string().contains("################"), "{error}");
    assert_eq!(both.client.dropped(), 2);
    assert_eq!(both.client.lost(), Some(error));
    both.end();
}

#[test]
fn messages_that_are_too_large_are_refused_where_they_are_made() {
    let both = start(LinkSettings {
        limit: 10_000,
        ..patient()
    });
    let mut large = toy(&Toy::Echo);
    large.push_bytes(vec![0u8; 20_000]);
    let error = both
        .client
        .ask(&large, "to echo", SOON)
        .expect_err("too large")
        .to_string();
    assert_eq!(
        error,
        "a message cannot be sent: a message has 20000 bytes, more than the limit of 10000"
    );
    // The link still works.
    assert!(both.client.ask(&toy(&Toy::Echo), "to echo", SOON).is_ok());
    let error = both
        .client
        .ask(&toy(&Toy::Large(20_000)), "", SOON)
        .expect_err("too large");
    assert!(error.to_string().contains("limit of 10000"), "{error}");
}
