//! Steps in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and `chrome://tracing` open.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};
use verl_run::spans::{CallSpan, TimelineLine};

use super::lanes::{Lane, label, lanes};

/// The only process: the run.
const PID: u64 = 1;

/// Thread of the steps; lanes follow.
const STEPS: usize = 0;

/// An event: a block of time, or the name of a process or thread.
#[derive(Debug, Serialize)]
struct Event {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<Value>,
    ph: &'static str,
    pid: u64,
    tid: usize,
    /// Start (microseconds).
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    /// Duration (microseconds).
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Value,
}

impl Event {
    fn named(kind: &str, tid: usize, args: Value) -> Event {
        Event {
            name: kind.to_owned(),
            cat: None,
            ph: "M",
            pid: PID,
            tid,
            ts: None,
            dur: None,
            args,
        }
    }

    fn block(name: String, cat: Value, tid: usize, time: (f64, f64), args: Value) -> Event {
        let micros = |seconds: f64| (seconds * 1e6).round();
        Event {
            name,
            cat: Some(cat),
            ph: "X",
            pid: PID,
            tid,
            ts: Some(micros(time.0)),
            dur: Some(micros(time.1) - micros(time.0)),
            args,
        }
    }
}

/// Writes steps of the run `name` as one JSON object with `traceEvents`. Times count from the start of the run.
///
/// # Errors
/// If `out` cannot be written.
pub fn write_chrome(name: &str, lines: &[TimelineLine], out: &mut dyn Write) -> io::Result<()> {
    let lanes = lanes(lines.iter().flat_map(|line| &line.spans));
    writeln!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut first = true;
    let mut add = |event: Event| {
        let comma = if std::mem::take(&mut first) {
            ""
        } else {
            ",\n"
        };
        write!(out, "{comma}{}", serde_json::to_string(&event)?)
    };
    add(Event::named("process_name", STEPS, json!({ "name": name })))?;
    add(Event::named(
        "thread_name",
        STEPS,
        json!({ "name": "steps" }),
    ))?;
    for (at, lane) in lanes.iter().enumerate() {
        let args = json!({ "name": lane.name(&lanes) });
        add(Event::named("thread_name", at + 1, args))?;
        let args = json!({ "sort_index": at + 1 });
        add(Event::named("thread_sort_index", at + 1, args))?;
    }
    for line in lines {
        let time = (line.start_s, line.start_s + line.step_s);
        let args = json!({ "step": line.step });
        let name = format!("step {}", line.step);
        add(Event::block(name, "step".into(), STEPS, time, args))?;
        for span in &line.spans {
            // Every lane of every span is in the list.
            let lane = lanes.binary_search(&Lane::of(span)).unwrap_or_default();
            add(block(span, line, lane + 1))?;
        }
    }
    writeln!(out, "\n]}}")
}

fn block(span: &CallSpan, line: &TimelineLine, tid: usize) -> Event {
    let time = (line.start_s + span.start_s, line.start_s + span.end_s);
    let args = json!({
        "step": line.step,
        "call": span.call,
        "slice": span.slice,
        "wave": span.wave,
        "rows": span.rows,
        "rows_emitted": span.rows_emitted,
        "calls": span.calls,
        "wait_ms": span.wait_s * 1e3,
        "outcome": span.outcome,
    });
    Event::block(label(span), json!(span.kind), tid, time, args)
}
