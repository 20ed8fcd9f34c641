//! With `--json` a command always writes one JSON object, and ends with the same status as without.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;
use verl::pipe::cli::json_error::JsonError;

use crate::kit::Place;

/// Exit status, standard output and standard error of the executable.
fn pipe(words: &[&str]) -> (Option<i32>, String, String) {
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(words)
        .output()
        .expect("the executable runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (ran.status.code(), text(ran.stdout), text(ran.stderr))
}

/// The commands whose help lists `--json`, as words separated by spaces.
fn commands_with_json(path: &[&str], found: &mut BTreeSet<String>) {
    let (_, help, _) = pipe(&[path, &["--help"]].concat());
    let commands = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty());
    let named = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    for name in named.filter(|name| !name.is_empty() && *name != "help") {
        commands_with_json(&[path, &[name]].concat(), found);
    }
    if help.contains("--json") {
        found.insert(path.join(" "));
    }
}

/// A command that fails, its status, and the code of its error.
type Case = (&'static str, &'static [&'static str], i32, &'static str);

/// One of each command with `--json`.
const CASES: [Case; 14] = [
    ("bench check", &["--device", "cuda:99"], 1, "bench"),
    ("bench kernels", &["--model", "absent"], 1, "bench"),
    ("bench rollout", &["--model", "absent"], 1, "bench"),
    ("bench step", &["--device", "gpu"], 1, "bench"),
    ("bench train", &["--model", "absent"], 1, "bench"),
    ("check", &["absent.toml"], 1, "C001"),
    ("debug diff", &["absent", "absent"], 3, "T010"),
    ("debug first-bad", &["--run", "absent"], 3, "T010"),
    (
        "debug replay",
        &["--run", "absent", "--step", "1"],
        3,
        "T010",
    ),
    ("debug stall", &["--run", "absent"], 3, "T010"),
    ("debug trace", &["--run", "absent"], 3, "T010"),
    ("plan", &["absent.toml"], 1, "C001"),
    ("schema", &["--stage", "generat"], 1, "C003"),
    ("warmup", &["absent.toml"], 1, "C001"),
];

/// Runs a command with and without `--json`; returns the error object.
#[track_caller]
fn error_of(words: &[&str], status: i32) -> JsonError {
    let (plain, _, _) = pipe(words);
    assert_eq!(plain, Some(status), "{words:?}");
    let (code, out, errors) = pipe(&[words, &["--json"]].concat());
    assert_eq!(code, Some(status), "{words:?}: {out}{errors}");
    let reported: JsonError =
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{words:?}: {error}: {out}"));
    let parts = [
        &reported.error.code,
        &reported.error.message,
        &reported.error.help,
    ];
    assert!(
        parts.iter().all(|part| !part.is_empty()),
        "{words:?}: {out}"
    );
    reported
}

#[test]
fn every_command_with_json_reports_its_errors_as_json() {
    let mut found = BTreeSet::new();
    commands_with_json(&[], &mut found);
    let tried: BTreeSet<String> = CASES.iter().map(|case| case.0.to_owned()).collect();
    assert_eq!(
        found, tried,
        "a command with --json that is not tested, or the reverse"
    );
    for (command, words, status, code) in CASES {
        let command: Vec<&str> = command.split(' ').collect();
        let reported = error_of(&[command.as_slice(), words].concat(), status);
        assert_eq!(reported.error.code, code, "{command:?}");
        // An invalid command line too; standard error has it as text.
        let (status, out, errors) = pipe(&[command.as_slice(), &["--json", "--nonsense"]].concat());
        let reported: JsonError = serde_json::from_str(&out).expect("one object");
        assert_eq!((status, reported.error.code.as_str()), (Some(2), "usage"));
        assert!(reported.error.message.contains("--nonsense") && errors.contains("--nonsense"));
    }
    let (_, out, _) = pipe(&["debug", "trace", "--json"]);
    let reported: JsonError = serde_json::from_str(&out).expect("one object");
    assert!(reported.error.message.ends_with("--run <DIR>"), "{out}");
    // Without `--json` there is no JSON.
    let (status, out, _) = pipe(&["debug", "trace", "--nonsense"]);
    assert_eq!((status, out.as_str()), (Some(2), ""));
    let (status, out, _) = pipe(&["debug", "trace", "--help"]);
    assert!(status == Some(0) && out.contains("Usage:"));
}

#[test]
fn missing_parts_of_a_run_are_reported_as_json() {
    let place = Place::new();
    place.train(
        "run",
        &[
            "trace.steps=[2]",
            "trace.weights=\"hash\"",
            "trace.ring_steps=0",
        ],
    );
    place.train("none", &["trace.ring_steps=0"]);
    place.train("blank", &["trace.stats=false"]);
    let path = |name: &str| place.path(name).display().to_string();
    let (run, none, blank) = (path("run"), path("none"), path("blank"));
    let of = |words: &str| {
        let line = format!("debug {words}");
        let words: Vec<&str> = line.split(' ').collect();
        error_of(&words, 3).error
    };
    let step = of(&format!("trace --run {run} --step 3"));
    assert_eq!(
        (step.code.as_str(), step.help.as_str()),
        ("T004", "the nearest recorded step is 2")
    );
    assert_eq!(of(&format!("trace --run {none}")).code, "T004");
    assert_eq!(of(&format!("trace --run {blank}")).code, "T001");
    assert_eq!(
        of(&format!("replay --run {run} --step 2 --stage generate")).code,
        "T013"
    );
    let sample = of(&format!(
        "trace --run {run} --step 2 --stage generate --sample 9.9#9"
    ));
    assert!(
        sample.code == "T012" && sample.help.starts_with("the nearest samples are "),
        "{sample:?}"
    );
    let near = of(&format!("trace --run {run}s"));
    assert!(near.help.starts_with("did you mean `"), "{near:?}");
    // A run of another version: everything that this version does not accept.
    let config = place.path("run").join("config.toml");
    let text = std::fs::read_to_string(&config).expect("a configuration");
    std::fs::write(&config, format!("sede = 1\nnmae = 2\n{text}")).expect("a file");
    let other = of(&format!("trace --run {run}"));
    assert_eq!((other.code.as_str(), other.findings.len()), ("T011", 2));
}

#[test]
fn findings_and_answers_are_one_object() {
    let place = Place::new();
    let file = place.path("p.toml");
    let text = crate::kit::GRPO.replace("steps = 3", "stesp = 3");
    std::fs::write(
        &file,
        text.replace("rule = \"length\"", "rulle = \"length\""),
    )
    .expect("a file");
    let file = file.display().to_string();
    for command in ["check", "plan"] {
        let reported = error_of(&[command, &file], 1).error;
        assert_eq!(
            (reported.code.as_str(), reported.findings.len()),
            ("C002", 2),
            "{reported:?}"
        );
        assert!(
            reported.place.contains("p.toml:") && reported.findings[1].message.contains("rulle")
        );
    }
    std::fs::write(&file, crate::kit::GRPO).expect("a file");
    for command in [
        vec!["check", &file, "--json"],
        vec!["plan", &file, "--json"],
        vec!["schema", "--pipeline", &file, "--json"],
        vec!["schema", "--stage", "generate", "--json"],
    ] {
        let (status, out, _) = pipe(&command);
        let reported: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
        assert!(
            status == Some(0) && reported.get("error").is_none(),
            "{command:?}"
        );
    }
    // A folder that cannot be written.
    let reported = error_of(&["schema", "--stage", "generate", "--out", &file], 1).error;
    assert!(
        reported.code == "file" && reported.message.contains("p.toml"),
        "{reported:?}"
    );
}
