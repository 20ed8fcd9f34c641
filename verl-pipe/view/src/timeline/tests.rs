//! Charts and Chrome traces of fabricated steps.

use serde_json::Value;
use verl_run::spans::{CallSpan, HOST, RUN, SpanKind, SpanOutcome, TimelineLine};

use super::{StepChart, write_chrome};

/// A call of `stage` at `place`, with its lane, and its time in milliseconds.
fn call(stage: &str, (place, lane): (&str, usize), time: (u32, u32)) -> CallSpan {
    CallSpan {
        stage: stage.to_owned(),
        place: place.to_owned(),
        lane,
        rows: 8,
        rows_emitted: 8,
        calls: 1,
        start_s: f64::from(time.0) / 1e3,
        end_s: f64::from(time.1) / 1e3,
        ..CallSpan::default()
    }
}

fn line(step: u64, step_ms: u32, mut spans: Vec<CallSpan>) -> TimelineLine {
    spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
    TimelineLine {
        step,
        timestamp: 1.7e9,
        failed: false,
        start_s: 10.0 * step as f64,
        step_s: f64::from(step_ms) / 1e3,
        spans,
    }
}

/// A step of PPO over two groups: the reward model scores while the actor still generates.
fn two_groups(step: u64) -> TimelineLine {
    let (train, score) = (("train", 0), ("score", 0));
    let mut spans = vec![
        call("prompts", (HOST, 0), (1, 12)),
        call("generate", train, (12, 520)),
        call("values", train, (840, 900)),
        call("advantages", (HOST, 1), (900, 912)),
        call("update", train, (912, 1098)),
    ];
    for (at, start) in [180, 300, 420, 530].into_iter().enumerate() {
        let slice = |stage| CallSpan {
            slice: at,
            ..call(stage, score, (start, start + 75))
        };
        spans.push(slice("reward_model"));
        spans.push(CallSpan {
            start_s: f64::from(start + 75) / 1e3,
            end_s: f64::from(start + 75 + 3) / 1e3,
            calls: 8,
            wait_s: 0.002,
            ..slice("length_reward")
        });
    }
    for span in spans.iter_mut().filter(|s| s.stage == "length_reward") {
        span.place = HOST.to_owned();
        span.outcome = match span.slice {
            1 => SpanOutcome::Failed,
            _ => SpanOutcome::Done,
        };
    }
    spans.push(call("ref_log_probs", score, (610, 838)));
    let work = |kind, about: &str, time: (f64, f64)| CallSpan {
        kind,
        stage: about.to_owned(),
        rows: 0,
        rows_emitted: 0,
        start_s: time.0,
        end_s: time.1,
        ..call(about, (RUN, 0), (0, 0))
    };
    spans.push(work(SpanKind::Wait, "recorder", (0.912, 0.9125)));
    spans.push(work(SpanKind::Snapshot, "state", (-0.004, -0.0005)));
    spans.push(work(SpanKind::Record, "metrics", (3.2, 3.2003)));
    spans.push(CallSpan {
        kind: SpanKind::Observe,
        rows: 0,
        rows_emitted: 0,
        ..call("evaluate", train, (1101, 3199))
    });
    line(step, 1100, spans)
}

fn chart(line: &TimelineLine, width: usize) -> String {
    StepChart { line, width }.to_string()
}

#[test]
fn a_step_of_two_groups_is_drawn() {
    insta::assert_snapshot!(chart(&two_groups(7), 110));
}

#[test]
fn a_narrow_terminal_and_a_short_step() {
    let micro = |start: f64, end: f64| CallSpan {
        start_s: start / 1e6,
        end_s: end / 1e6,
        ..call("score", ("cpu", 0), (0, 0))
    };
    let spans = vec![
        CallSpan {
            stage: "prompts".to_owned(),
            place: HOST.to_owned(),
            ..micro(4.0, 9.0)
        },
        micro(20.0, 300.0),
        CallSpan {
            merged: 3,
            calls: 4,
            busy_s: Some(300e-6),
            ..micro(300.0, 610.0)
        },
        CallSpan {
            outcome: SpanOutcome::Abandoned,
            stage: "judge".to_owned(),
            ..micro(650.0, 655.0)
        },
    ];
    let short = TimelineLine {
        step_s: 700e-6,
        failed: true,
        ..line(1, 0, spans)
    };
    insta::assert_snapshot!(chart(&short, 20));
}

#[test]
fn steps_without_calls_and_with_many_threads() {
    let text = chart(&line(3, 0, Vec::new()), 80);
    assert_eq!(text, "step 3: 0 s, 0 calls\nno call is recorded\n");
    let many = (0..60).map(|lane| call("rule", (HOST, lane), (0, 50)));
    let many = many.chain((0..60).map(|at| call(&format!("s{at}"), ("cpu", 0), (at, at + 1))));
    let text = chart(&line(3, 60, many.collect()), 100);
    assert!(text.contains("  21 more threads not drawn\n"), "{text}");
    // Stages without a letter of their own share one.
    assert_eq!(
        text.lines()
            .filter(|line| line.starts_with("  #  "))
            .count(),
        9
    );
    // Every line fits.
    let widest = text.lines().take(50).map(|line| line.chars().count()).max();
    assert!(widest <= Some(100), "{widest:?}\n{text}");
}

#[test]
fn a_block_is_as_wide_as_its_time() {
    for (start, end) in [(0, 1000), (100, 300), (250, 251), (999, 1000)] {
        let one = line(1, 1000, vec![call("s", ("cpu", 0), (start, end))]);
        let text = chart(&one, 114);
        let drawn = text
            .lines()
            .find(|line| line.starts_with("  cpu "))
            .expect("the line");
        let blocks: Vec<char> = drawn.chars().skip(7).take(100).collect();
        let at = |time: u32| ((time / 10) as usize).min(99);
        for (column, c) in blocks.iter().enumerate() {
            let inside = (at(start)..at(end).max(at(start) + 1)).contains(&column)
                || (end == 1000 && column == 99);
            assert_eq!(
                *c != '·',
                inside,
                "{start} to {end}: column {column} of {drawn}"
            );
        }
    }
}

#[test]
fn a_chrome_trace_has_every_span_in_its_lane() {
    let lines = [two_groups(7), two_groups(8)];
    let mut out = Vec::new();
    write_chrome("runs/a", &lines, &mut out).expect("written");
    let trace: Value = serde_json::from_slice(&out).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let names = |kind: &str| {
        let named = events.iter().filter(|event| event["name"] == kind);
        named
            .map(|event| (event["tid"].as_u64(), event["args"]["name"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(names("process_name"), [(Some(0), "runs/a".into())]);
    let threads: Vec<Value> = names("thread_name")
        .into_iter()
        .map(|(_, name)| name)
        .collect();
    assert_eq!(
        threads,
        ["steps", "score", "train", "host 0", "host 1", "run"]
    );
    let blocks: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    let spans: usize = lines.iter().map(|line| line.spans.len()).sum();
    assert_eq!(blocks.len(), spans + 2);
    let generate = blocks
        .iter()
        .find(|block| block["name"] == "generate")
        .expect("a call");
    assert_eq!(
        (&generate["ts"], &generate["dur"], &generate["tid"]),
        (&70_012_000.0.into(), &508_000.0.into(), &2.into())
    );
    assert_eq!(
        (&generate["cat"], &generate["args"]["rows"]),
        (&"call".into(), &8.into())
    );
    let evaluate = blocks
        .iter()
        .find(|block| block["name"] == "evaluate")
        .expect("a call");
    assert_eq!(evaluate["cat"], "observe");
    // Calls are within their step, and blocks of a lane do not overlap.
    let time = |block: &Value| {
        let start = block["ts"].as_f64().expect("a start");
        (start, start + block["dur"].as_f64().expect("a duration"))
    };
    for call in blocks.iter().filter(|block| block["cat"] == "call") {
        let step = blocks
            .iter()
            .find(|block| block["cat"] == "step" && block["args"]["step"] == call["args"]["step"]);
        let (outer, inner) = (time(step.expect("its step")), time(call));
        assert!(outer.0 <= inner.0 && inner.1 <= outer.1, "{call}");
    }
    for lane in 0..6 {
        let own = blocks.iter().filter(|block| block["tid"] == lane);
        let mut times: Vec<(f64, f64)> = own.map(|block| time(block)).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(
            times.windows(2).all(|pair| pair[0].1 <= pair[1].0),
            "{lane}: {times:?}"
        );
    }
}
