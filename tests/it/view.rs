//! `pipe debug view`: the page of real runs, in a browser if one is available.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};
use verl::pipe::trace::files::{StatsWriter, TraceDir};
use verl::pipe::trace::stats::StatRow;

use crate::browser::{Browser, say};
use crate::debug::pipe_debug;
use crate::kit::Place;

/// Writes the page of a run. Returns its path and the output of the command.
#[track_caller]
fn view(run: &Path, more: &str) -> (PathBuf, String) {
    let (code, text) = pipe_debug(format!("view --run {}{more}", run.display()).trim());
    assert_eq!(code, 0, "{text}");
    (run.join("view.html"), text)
}

/// A JSON document of a page.
#[track_caller]
fn block(page: &Path, name: &str) -> Value {
    let html = fs::read_to_string(page).expect("a page");
    let start = format!("<script type=\"application/json\" id=\"{name}\">");
    let (_, rest) = html
        .split_once(&start)
        .unwrap_or_else(|| panic!("no document {name}"));
    let (text, _) = rest.split_once("</script>").expect("an end");
    serde_json::from_str(text).expect("JSON")
}

/// The value of an attribute of the document's root.
fn attribute(document: &str, name: &str) -> Option<String> {
    let (_, root) = document.split_once("<html")?;
    let (root, _) = root.split_once('>')?;
    let (_, value) = root.split_once(&format!("{name}=\""))?;
    Some(value.split_once('"')?.0.to_owned())
}

/// The text between `before` and the next `after`.
#[track_caller]
fn between<'a>(document: &'a str, before: &str, after: &str) -> &'a str {
    let (_, rest) = document
        .split_once(before)
        .unwrap_or_else(|| panic!("no {before}"));
    rest.split_once(after).map_or(rest, |(part, _)| part)
}

/// The document of a page that was drawn without an error.
#[track_caller]
fn drawn(browser: &Browser, page: &Path) -> String {
    let document = browser.document(page);
    assert_eq!(attribute(&document, "data-errors"), None);
    assert!(
        attribute(&document, "data-ready").is_some(),
        "{}",
        &document[..2000.min(document.len())]
    );
    document
}

#[test]
fn a_run_is_seen_in_a_browser() {
    let place = Place::new();
    let finished = place.train(
        "run",
        &[
            "trace.every=1",
            "evaluate.every=1",
            "trace.rules.advantage_variance.limit=1e-9",
            "trace.rules.grad_norm_spike.limit=1e-9",
        ],
    );
    let (page, text) = view(&finished.dir, "");
    assert!(
        text.starts_with(&format!("wrote `{}`, ", page.display())),
        "{text}"
    );
    let data = block(&page, "data");
    let keys = data["keys"].as_array().expect("curves");
    let of = |stage: &str, key: &str| keys.iter().find(|c| c["stage"] == stage && c["key"] == key);
    let rewards = of("reward", "rewards").expect("a curve");
    assert_eq!(rewards["step"], json!([1, 2, 3]));
    let metrics = finished.metrics();
    let mut newest = metrics.iter().rev();
    let mean = newest.find_map(|line| line.get("reward/mean")?.as_f64());
    let shown = rewards["mean"][2].as_f64();
    assert!(
        mean.zip(shown).is_some_and(|(a, b)| (a - b).abs() < 1e-5),
        "{mean:?} {shown:?}"
    );
    assert_eq!(data["tables"], json!([1, 2, 3]));
    assert_eq!(data["graph"]["nodes"].as_array().map(Vec::len), Some(8));
    assert_eq!(data["samples"].as_array().map(Vec::len), Some(48));
    assert_eq!(data["run"]["status"], "finished");
    let anomalies = data["anomalies"].as_array().expect("anomalies");
    assert!(
        anomalies.iter().any(|a| a["rule"] == "advantage_variance"),
        "{anomalies:?}"
    );
    // The tokens of a sample with all values computed for them.
    let sample = block(&page, "sample-0");
    let response = sample["response"].as_array().expect("tokens");
    let known: Vec<&str> = sample["per_token"]
        .as_array()
        .expect("columns")
        .iter()
        .filter_map(|c| c[0].as_str())
        .collect();
    for key in [
        "mask_kinds",
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_probs",
        "advantages",
    ] {
        assert!(known.contains(&key), "{known:?}");
    }
    for id in response {
        let word = &data["words"][id.to_string()];
        assert!(word.as_str().is_some_and(|word| !word.is_empty()), "{id}");
    }

    let Some(browser) = Browser::find() else {
        return;
    };
    let document = drawn(&browser, &page);
    assert_eq!(
        attribute(&document, "data-curves").and_then(|n| n.parse().ok()),
        Some(keys.len() + data["metrics"].as_array().map_or(0, Vec::len))
    );
    let overview = between(&document, "id=\"overview-grid\"", "<section");
    assert!(overview.matches("<canvas").count() >= 8, "{overview}");
    assert!(overview.matches("class=\"mark ").count() >= 1, "{overview}");
    let graph = between(&document, "id=\"graph\"", "</section>");
    for stage in [
        "prompts",
        "generate",
        "reward",
        "old_log_probs",
        "advantages",
        "update",
        "evaluate",
    ] {
        assert!(graph.contains(&format!("\">{stage}</text>")), "{stage}");
    }
    assert!(
        graph.contains("class=\"edge marked\""),
        "the edge of the anomaly is not marked"
    );
    let table = between(&document, "id=\"step-table\"", "</table>");
    assert!(
        table.contains("rollout_log_probs") && table.contains("advantage_variance"),
        "{table}"
    );
    let list = between(&document, "id=\"sample-list\"", "</select>");
    assert_eq!(list.matches("<option").count(), 16);
    let tokens = between(&document, "id=\"response-tokens\"", "</div>");
    let coloured = tokens.matches("background: rgba(").count();
    assert!(
        coloured > 0 && coloured == tokens.matches("<span").count(),
        "{tokens}"
    );
    let pairs = between(&document, "id=\"text-pairs\"", "</section>");
    assert!(
        pairs.contains("Evaluation, before and after") && pairs.matches("<tr").count() >= 5,
        "{pairs}"
    );

    let blank = place.path("blank.html");
    fs::write(&blank, "<!doctype html><title>blank</title>").expect("a file");
    let (seen, empty) = (browser.picture(&page), browser.picture(&blank));
    assert!(
        seen.len() > 5 * empty.len(),
        "{} and {} bytes",
        seen.len(),
        empty.len()
    );
}

/// The output of a model and the content of run files are text on the page.
#[test]
fn texts_of_a_run_stay_texts() {
    let place = Place::new();
    let dir = place
        .train("run", &["trace.rules.advantage_variance.limit=1e-9"])
        .dir;
    let evil = "</script><img src=x onerror=\"document.documentElement.dataset.errors='ran'\"><!-- <script>";
    let path = dir.join("samples.jsonl");
    let lines = fs::read_to_string(&path).expect("samples");
    let changed: Vec<String> = lines
        .lines()
        .map(|line| {
            let mut line: Value = serde_json::from_str(line).expect("an object");
            line["response"] = evil.into();
            line["prompt"] = evil.into();
            line[evil] = evil.into();
            line.to_string()
        })
        .collect();
    fs::write(&path, changed.join("\n") + "\n").expect("a file");
    let path = dir.join("trace/anomalies.jsonl");
    let lines = fs::read_to_string(&path).expect("anomalies");
    let mut line: Value =
        serde_json::from_str(lines.lines().next().expect("a line")).expect("JSON");
    for name in ["what", "advice", "rule"] {
        line[name] = evil.into();
    }
    fs::write(&path, format!("{line}\n")).expect("a file");
    let (page, _) = view(&dir, "");
    let html = fs::read_to_string(&page).expect("a page");
    assert!(!html.contains("<img"), "markup of a text is in the page");
    assert_eq!(block(&page, "data")["texts"][0]["response"], evil);
    let Some(browser) = Browser::find() else {
        return;
    };
    let document = drawn(&browser, &page);
    assert!(!document.contains("<img"), "a text became an element");
    let shown = between(&document, "id=\"text-pairs\"", "</section>");
    assert!(
        shown.contains("&lt;/script&gt;&lt;img src=x onerror="),
        "{shown}"
    );
    let found = between(&document, "id=\"anomaly-list\"", "</section>");
    assert!(
        found.contains("&lt;/script&gt;&lt;img src=x onerror="),
        "{found}"
    );
}

#[test]
fn a_page_that_cannot_be_written_can_go_elsewhere() {
    let place = Place::new();
    let run = place.train("run", &[]).dir;
    // Even root cannot create a file with the name of an existing folder.
    fs::create_dir(run.join("view.html")).expect("a folder");
    let (code, text) = pipe_debug(&format!("view --run {}", run.display()));
    assert!(code == 3 && text.starts_with("error[T005]"), "{text}");
    assert!(text.contains("`--out FILE`"), "{text}");
}

#[test]
fn a_run_of_which_something_is_missing_has_a_page_that_says_so() {
    let place = Place::new();
    let bare = place.train("bare", &["trace.stats=false"]).dir;
    let whole = place.train("whole", &[]).dir;
    let browser = Browser::find();
    let page_with_note = |run: &Path, note: &str| {
        let (page, text) = view(run, "");
        assert!(text.contains(note), "{text}");
        let notes = block(&page, "data")["notes"].to_string();
        assert!(notes.contains(note), "{notes}");
        if let Some(browser) = &browser {
            let document = drawn(browser, &page);
            assert!(between(&document, "id=\"notes\"", "</ul>").contains(note));
        }
        block(&page, "data")
    };
    let data = page_with_note(
        &bare,
        "the run has no trace, so the page shows only metrics and texts",
    );
    assert!(
        data["metrics"]
            .as_array()
            .is_some_and(|curves| curves.len() > 10)
    );
    // As it is before the end of the first step.
    let young = place.path("young");
    fs::create_dir_all(young.join("trace")).expect("a folder");
    for name in ["config.toml", "trace/format.json"] {
        fs::copy(whole.join(name), young.join(name)).expect("a copy");
    }
    let status = json!({"status": "running", "step": 0, "target": 3, "timestamp": 1.0});
    fs::write(young.join("status.json"), status.to_string()).expect("a file");
    fs::write(young.join("metrics.jsonl"), "").expect("a file");
    let data = page_with_note(&young, "metrics.jsonl contains no steps yet");
    assert_eq!(data["run"]["status"], "running");
    // As left by a process that was killed in the middle of a line.
    if cfg!(unix) {
        fs::write(young.join("metrics.jsonl"), "{\"step\":1,\"ep").expect("a file");
        page_with_note(&young, "no process has this folder locked");
        page_with_note(&young, "metrics.jsonl ends with an incomplete line");
    }
    // A run that ended, whose metrics were removed.
    let metrics = whole.join("metrics.jsonl");
    let kept = fs::read(&metrics).expect("a file");
    fs::remove_file(&metrics).expect("removed");
    page_with_note(&whole, "metrics.jsonl is missing");
    fs::write(&metrics, kept).expect("a file");
    // A truncated file of statistics.
    let part = whole.join("trace/stats/part-00000001.parquet");
    let bytes = fs::read(&part).expect("a part");
    fs::write(&part, &bytes[..bytes.len() / 2]).expect("a file");
    page_with_note(&whole, "error[T003]");
    fs::write(&part, &bytes).expect("a file");
    // A pipeline that this version does not accept.
    let config = fs::read_to_string(whole.join("config.toml")).expect("a file");
    let other = config.replace("kind = \"reward\"", "kind = \"reward_of_old\"");
    assert_ne!(config, other);
    fs::write(whole.join("config.toml"), other).expect("a file");
    let data = page_with_note(&whole, "does not accept the run's config.toml");
    assert_eq!(data["graph"], Value::Null);
    assert!(
        data["keys"]
            .as_array()
            .is_some_and(|curves| curves.len() > 10)
    );
}

#[test]
fn what_cannot_be_shown_is_an_error_with_a_code() {
    let place = Place::new();
    let run = place.train("run", &[]).dir;
    let refused = |line: &str, code: &str| {
        let (status, text) = pipe_debug(line);
        assert_eq!(status, 3, "{text}");
        assert!(text.contains(&format!("error[{code}]")), "{text}");
    };
    let there = run.display();
    refused(
        &format!("view --run {}", place.path("rum").display()),
        "T010",
    );
    refused(
        &format!(
            "view --run {there} --out {}",
            place.path("none/page.html").display()
        ),
        "T005",
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    refused(&format!("view --run {there} --serve {port}"), "T020");
    let format = run.join("trace/format.json");
    let text = fs::read_to_string(&format).expect("a file");
    fs::write(&format, text.replace("\"format\": 1", "\"format\": 0")).expect("a file");
    refused(&format!("view --run {there}"), "T002");
    let left = fs::read_dir(&run).expect("a folder").flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().ends_with(".partial"));
    assert_eq!(left.count(), 0);
}

/// Each response shows the current run; Ctrl-C ends the server without an error.
#[cfg(unix)]
#[test]
fn a_served_page_follows_the_run_until_ctrl_c() {
    let place = Place::new();
    let run = place.train("run", &[]).dir;
    let mut server = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["debug", "view", "--serve", "--run"])
        .arg(&run)
        .stdout(Stdio::piped())
        .spawn()
        .expect("pipe starts");
    let mut lines = BufReader::new(server.stdout.take().expect("a pipe")).lines();
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| {
            let (_, rest) = line.split_once("http://")?;
            Some(rest.split_once('/')?.0.to_owned())
        })
        .expect("an address");
    let ask = || {
        let mut stream = TcpStream::connect(&address).expect("connects");
        write!(
            stream,
            "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        )
        .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let first = ask();
    assert!(first.starts_with("HTTP/1.1 200") && first.contains("\"status\":\"finished\""));
    let status = fs::read_to_string(run.join("status.json")).expect("a file");
    let changed = status.replace("\"finished\"", "\"cancelled\"");
    fs::write(run.join("status.json"), changed).expect("a file");
    assert!(ask().contains("\"status\":\"cancelled\""));
    let interrupt = format!("kill -INT {}", server.id());
    let sent = Command::new("sh")
        .args(["-c", &interrupt])
        .status()
        .expect("sh runs");
    assert!(sent.success());
    assert_eq!(server.wait().expect("an end").code(), Some(0));
}

/// 10 000 steps and 1 000 samples: the page stays small, and every spike is on it.
#[test]
fn a_long_run_stays_usable() {
    const STEPS: u64 = 10_000;
    let place = Place::new();
    let run = place
        .train(
            "run",
            &[
                "steps=1",
                "trace.every=1",
                "batch.prompts=64",
                "batch.samples=16",
                "batch.micro_batch=64",
            ],
        )
        .dir;
    lengthen(&run, STEPS);
    let began = Instant::now();
    let (page, text) = view(&run, " --samples 1000");
    let wrote = began.elapsed();
    let size = fs::metadata(&page).expect("a page").len();
    let data = block(&page, "data");
    assert_eq!(data["samples"].as_array().map(Vec::len), Some(1000));
    assert!(
        text.contains("curves of 10000 steps are drawn with at most 1200 points"),
        "{text}"
    );
    assert!(text.contains("tables of 200 of 10000 steps"), "{text}");
    assert!(text.contains("1000 of 1024 samples"), "{text}");
    assert!(size < 20 << 20, "{size} bytes");
    let keys = data["keys"].as_array().expect("curves");
    let spiked = keys
        .iter()
        .find(|c| c["stage"] == "reward" && c["key"] == "rewards")
        .expect("a curve");
    let means = spiked["mean"].as_array().expect("numbers");
    assert!(
        means.len() <= 1200 && means.iter().any(|mean| mean == 1000.0),
        "the spike is lost"
    );
    let figures = format!(
        "{} curves, {:.1} MB, written in {wrote:.1?}",
        keys.len(),
        size as f64 / 1e6
    );
    let Some(browser) = Browser::find() else {
        return say(&figures);
    };
    let document = browser.loaded(&page);
    assert_eq!(attribute(&document, "data-errors"), None);
    let ready = attribute(&document, "data-ready").expect("a page that is ready");
    say(&format!("{figures}, ready after {ready} ms"));
    drawn(&browser, &page);
}

/// Extends a run of one step: repeats its statistics and metrics with other numbers.
fn lengthen(run: &Path, steps: u64) {
    let trace = TraceDir::open(run).expect("a trace");
    let first = trace.stats(1..=1).expect("statistics");
    let dir = trace.layout().stats();
    fs::remove_dir_all(&dir).expect("removed");
    let mut writer = StatsWriter::create(dir, 250).expect("the folder");
    let line = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let line: Value = serde_json::from_str(line.lines().last().expect("a line")).expect("JSON");
    let mut lines = String::new();
    for step in 1..=steps {
        let shift = match step {
            7_654 => 1_000.0,
            step => (step as f64 / 300.0).sin() + (step * 7_919 % 101) as f64 / 101.0,
        };
        let moved = |value: Option<f64>| value.map(|value| value * 0.1 + shift);
        let rows: Vec<StatRow> = first
            .iter()
            .map(|row| StatRow {
                step,
                sketch: Vec::new(),
                mean: if shift == 1_000.0 {
                    row.mean.map(|_| shift)
                } else {
                    moved(row.mean)
                },
                min: moved(row.min).map(|v| v - 1.0),
                max: moved(row.max).map(|v| v + 1.0),
                quantiles: row.quantiles.map(moved),
                ..row.clone()
            })
            .collect();
        writer.step(step, &rows).expect("written");
        let mut line = line.clone();
        for (name, value) in line.as_object_mut().expect("an object") {
            if name.contains('/') {
                *value = json!(value.as_f64().unwrap_or(0.0) + shift);
            }
        }
        line["step"] = step.into();
        lines += &format!("{line}\n");
    }
    writer.part().expect("written");
    fs::write(run.join("metrics.jsonl"), lines).expect("a file");
}
