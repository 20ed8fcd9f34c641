//! `pipe debug timeline` on the folder of a real run.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;
use verl::pipe::run::spans::{SpanKind, TimelineLine};

use crate::debug::pipe_debug;
use crate::kit::Place;

/// The lines of `timeline.jsonl`.
fn lines(text: &str) -> Vec<TimelineLine> {
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("a line"))
        .collect()
}

#[test]
fn a_run_is_shown_step_by_step_and_as_a_chrome_trace() {
    let place = Place::new();
    let run = place.train("run", &["reward.deadline_s=60"]);
    let lines = lines(&run.read("timeline.jsonl"));
    let dir = run.dir.display();
    let steps: Vec<u64> = lines.iter().map(|line| line.step).collect();
    assert_eq!(steps, [1, 2, 3]);

    let metrics = run.metrics();
    for (line, metrics) in lines.iter().zip(&metrics[1..]) {
        assert_eq!(Some(line.step_s), metrics["perf/step_s"].as_f64());
        assert!(line.spans.is_sorted_by_key(|span| span.start_s));
        // Rows are passed on completely: 4 prompts become 16 rows, in whatever slices.
        let mut rows: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        let mut lanes: BTreeMap<(&str, usize), f64> = BTreeMap::new();
        for span in line.spans.iter().filter(|span| span.kind == SpanKind::Call) {
            let (read, emitted) = rows.entry(&span.stage).or_default();
            *read += span.rows;
            *emitted += span.rows_emitted;
            let end = lanes.entry((&span.place, span.lane)).or_default();
            assert!(
                *end <= span.start_s && span.end_s <= line.step_s,
                "{span:?}"
            );
            *end = span.end_s;
        }
        let expected = [
            ("advantages", (16, 16)),
            ("generate", (4, 16)),
            ("old_log_probs", (16, 16)),
            ("prompts", (0, 4)),
            ("ref_log_probs", (16, 16)),
            ("reward", (16, 16)),
            ("update", (16, 0)),
        ];
        assert_eq!(rows.into_iter().collect::<Vec<_>>(), expected);
    }
    // The evaluations before the first step and after the last.
    let observed = lines.iter().map(|line| {
        let spans = line.spans.iter();
        spans.filter(|span| span.kind == SpanKind::Observe).count()
    });
    assert_eq!(observed.collect::<Vec<_>>(), [1, 0, 1]);

    let (code, last) = pipe_debug(&format!("timeline {dir}"));
    assert_eq!(
        (code, &pipe_debug(&format!("timeline --run {dir} --last")).1),
        (0, &last)
    );
    assert!(
        last.starts_with("step 3: ") && last.contains("group cpu was idle for "),
        "{last}"
    );
    let (_, first) = pipe_debug(&format!("timeline {dir} --step 1 --width 60"));
    assert!(
        first.starts_with("step 1: ") && first.contains("before the step: evaluate (cpu)"),
        "{first}"
    );

    let file = place.path("trace.json");
    let (code, text) = pipe_debug(&format!("timeline {dir} --all --chrome {}", file.display()));
    assert!(code == 0 && text.contains("3 steps; open it at"), "{text}");
    // What the run recorded is not overwritten.
    let recorded = place.path("run/timeline.jsonl");
    let before = fs::read(&recorded).expect("a file");
    let (code, text) = pipe_debug(&format!("timeline {dir} --chrome {}", recorded.display()));
    assert!(code != 0 && text.contains("a file of the run"), "{text}");
    assert!(before == fs::read(&recorded).expect("a file"));
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(&file).expect("a file")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let time = |event: &Value| {
        let start = event["ts"].as_f64().expect("a start");
        (start, start + event["dur"].as_f64().expect("a duration"))
    };
    let of = |cat: &'static str| events.iter().filter(move |event| event["cat"] == cat);
    assert_eq!(of("step").count(), 3);
    for call in of("call") {
        let step = of("step").find(|step| step["args"]["step"] == call["args"]["step"]);
        let (step, call) = (time(step.expect("its step")), time(call));
        assert!(step.0 <= call.0 && call.1 <= step.1, "{step:?} {call:?}");
    }
}

#[test]
fn what_is_not_there_is_an_error() {
    let place = Place::new();
    let off = place.train("off", &["trace.timeline_mb=0"]);
    assert!(!off.dir.join("timeline.jsonl").exists());
    let (code, text) = pipe_debug(&format!("timeline {}", off.dir.display()));
    assert!(
        code == 3 && text.starts_with("error[T015]: ") && text.contains("trace.timeline_mb"),
        "{text}"
    );
    let run = place.train("run", &[]);
    let (code, text) = pipe_debug(&format!("timeline {} --step 4", run.dir.display()));
    assert!(
        code == 3 && text.contains("has no step 4; it has steps 1 to 3;"),
        "{text}"
    );
    let (code, text) = pipe_debug(&format!("timeline {}", place.path("ran").display()));
    assert!(
        code == 3 && text.starts_with("error[T010]") && text.contains("did you mean"),
        "{text}"
    );
}
