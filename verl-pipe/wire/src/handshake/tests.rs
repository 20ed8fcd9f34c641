//! Only the expected worker is accepted, and both sides say why another one is not.

use std::io::Write as _;
use std::thread;

use super::*;

const SOON: Duration = Duration::from_secs(20);

fn identity() -> Identity {
    Identity::of_this_program("run-1", "worker-a", 3).expect("this program can be read")
}

/// What both sides report: the run's first.
fn shake(expected: Identity, token: Token, sent: Identity, own: Token) -> [Result<(), String>; 2] {
    let (run, worker) = Stream::pair().expect("a pair");
    let worker = thread::spawn(move || introduce(worker, &own, &sent, SOON));
    let run = accept(run, &token, &expected, SOON);
    let worker = worker.join().expect("no panic");
    [run, worker].map(|side| side.map(drop).map_err(|e| e.to_string()))
}

#[test]
fn the_expected_worker_is_accepted() {
    let token = Token::random().expect("a token");
    assert_eq!(
        shake(identity(), token.clone(), identity(), token),
        [Ok(()), Ok(())]
    );
}

type Change = fn(&mut Identity);

#[test]
fn another_identity_is_refused_on_both_sides() {
    let changes: [(Change, &str); 5] = [
        (
            |i| i.run = "run-2".to_owned(),
            "the run is `run-2`, and `run-1` is expected",
        ),
        (
            |i| i.worker = "worker-b".to_owned(),
            "the worker is `worker-b`, and `worker-a` is expected",
        ),
        (
            |i| i.incarnation = 2,
            "the incarnation is `2`, and `3` is expected; it was replaced",
        ),
        (
            |i| i.version = "0.0.1".to_owned(),
            "the version of verl is `0.0.1`",
        ),
        (
            |i| i.build = "other".to_owned(),
            "the build of the program is `other`",
        ),
    ];
    for (change, expected) in changes {
        let token = Token::random().expect("a token");
        let mut other = identity();
        change(&mut other);
        let [run, worker] = shake(identity(), token.clone(), other, token);
        let (run, worker) = (run.expect_err("refused"), worker.expect_err("refused"));
        assert!(run.starts_with(expected), "{run}");
        assert_eq!(worker, format!("the run refuses this worker: {run}"));
    }
}

#[test]
fn a_wrong_token_is_refused_and_nothing_else_is_revealed() {
    let mut other = identity();
    other.run = "run-2".to_owned();
    let [token, wrong] = [(); 2].map(|()| Token::random().expect("a token"));
    for wrong in [
        wrong,
        Token::received(""),
        Token::received(&token.secret()[..63]),
    ] {
        let [run, worker] = shake(identity(), token.clone(), other.clone(), wrong);
        assert_eq!(run, Err(WRONG_TOKEN.to_owned()));
        assert_eq!(
            worker,
            Err(format!("the run refuses this worker: {WRONG_TOKEN}"))
        );
    }
    assert_eq!(format!("{token:?}"), "Token(…)");
}

#[test]
fn garbage_and_silence_are_refused() {
    let token = Token::random().expect("a token");
    let (run, mut stranger) = Stream::pair().expect("a pair");
    stranger.write_all(&[b'x'; 100]).expect("written");
    let error = accept(run, &token, &identity(), SOON)
        .expect_err("garbage")
        .to_string();
    assert!(error.contains("does not speak the protocol"), "{error}");

    let (run, _stranger) = Stream::pair().expect("a pair");
    let error = accept(run, &token, &identity(), Duration::from_millis(20)).expect_err("silent");
    assert!(
        matches!(error, HandshakeError::Frame(FrameError::Silent(_))),
        "{error}"
    );

    let (run, stranger) = Stream::pair().expect("a pair");
    drop(stranger);
    let error = accept(run, &token, &identity(), SOON).expect_err("closed");
    assert!(
        matches!(error, HandshakeError::Frame(FrameError::Closed)),
        "{error}"
    );

    // An introduction that is larger than any introduction.
    let (run, mut stranger) = Stream::pair().expect("a pair");
    let mut large = Message::default();
    large.push_bytes(vec![0u8; 100_000]);
    let writing = thread::spawn(move || {
        let _ = frame::write(&mut stranger, (Kind::Hello, 1, 0), &large, || {
            Err(FrameError::Closed)
        });
    });
    let error = accept(run, &token, &identity(), SOON).expect_err("too large");
    assert!(
        matches!(error, HandshakeError::Frame(FrameError::TooLarge { .. })),
        "{error}"
    );
    writing.join().expect("no panic");
}
