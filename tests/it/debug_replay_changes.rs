//! Replays where something was changed since the recording: settings, data, the machine.

use std::fs;
use std::path::Path;

use verl::pipe::trace::format::Side;

use crate::debug::{corrupt, json_of, pipe_debug, recorded};
use crate::debug_replay::edit;
use crate::kit::Place;

/// Replaces text in a file of the run.
fn replace(run: &str, file: &str, from: &str, to: &str) {
    let path = Path::new(run).join(file);
    let text = fs::read_to_string(&path).expect("a file");
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replace(from, to)).expect("a file");
}

#[test]
fn a_setting_that_was_changed_after_the_run_is_named_first() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    replace(
        &run,
        "config.toml",
        "learning_rate = 0.001",
        "learning_rate = 0.01",
    );
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    let expected = "replay of step 2 on cpu\nsetting models.actor.optimizer.learning_rate: 0.001 when recorded, 0.01 now\n";
    assert!(code == 1 && text.starts_with(expected), "{text}");
    assert!(
        text.contains("1 difference; the first: stage `update`, weights of `actor`"),
        "{text}"
    );
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    let expected = "step 1, stage `prompts`, setting `models.actor.optimizer.learning_rate`\n  it was 0.001 when recorded, but the configuration says 0.01\n";
    assert!(code == 1 && text.contains(expected), "{text}");
    replace(
        &run,
        "config.toml",
        "learning_rate = 0.01",
        "learning_rate = 0.001",
    );
    // A change of the plan: the replay continues.
    replace(&run, "config.toml", "micro_batch = 8", "micro_batch = 4");
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2 --stage generate"));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("another plan: "), "{text}");
    assert_eq!(
        lines[2],
        "setting batch.micro_batch: 8 when recorded, 4 now"
    );
    assert!(code == 0 && text.ends_with("\n0 differences\n"), "{text}");
    let report = json_of(&format!("replay --run {run} --step 2 --json"));
    assert_eq!(
        report["changes"]["settings"][0]["name"],
        "batch.micro_batch"
    );
    // A trace that contains only the hash of the plan.
    fs::remove_file(Path::new(&run).join("trace/conditions.json")).expect("a file");
    let (_, text) = pipe_debug(&format!("replay --run {run} --step 2 --stage generate"));
    assert!(
        text.contains("; the trace does not record its settings\n"),
        "{text}"
    );
    assert!(!text.contains("machine"), "{text}");
    // Its machine is that of `versions.json`.
    edit(&Path::new(&run).join("versions.json"), |value| {
        value["arch"] = "of_tomorrow".into();
    });
    let (_, text) = pipe_debug(&format!("replay --run {run} --step 2 --stage generate"));
    let expected = "machine arch: \"of_tomorrow\" when recorded";
    assert!(
        text.contains(expected) && text.contains("are not expected"),
        "{text}"
    );
}

/// Bits on the CPU do not depend on the processor: a recording from another processor is compared bit by bit.
#[test]
fn another_processor_is_named_and_equal_bits_are_expected() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let conditions = Path::new(&run).join("trace/conditions.json");
    edit(&conditions, |value| {
        let machine = &mut value["machine"];
        machine["cpu"]["model"] = "of tomorrow".into();
        machine["cpu"]["l2_kib"] = 12_345.into();
        machine["cpu_kernels"]["registers"] = "wider".into();
        machine["threads"] = 999.into();
    });
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    let expected = "equal bits are expected on the CPU, because sums do not depend on them\n";
    assert!(
        text.contains("another width of registers (\"wider\" when recorded, "),
        "{text}"
    );
    assert!(
        text.contains("another number of threads (999 when recorded, "),
        "{text}"
    );
    assert!(
        text.contains(expected) && !text.contains("are not expected"),
        "{text}"
    );
    assert!(code == 0 && text.ends_with("\n0 differences\n"), "{text}");
    // One bit is a difference.
    corrupt(&run, 2, "advantages", Side::Output, 5, f32::next_down);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(
        code == 1 && text.contains("the first: stage `advantages`"),
        "{text}"
    );
    // Kernels that add in another order, or that are not recorded, do not promise equal bits.
    edit(&conditions, |value| {
        value["machine"]["cpu_kernels"]["sums"] = "of old".into();
    });
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    let why = "are not expected (kernels add in another order: `of old` when recorded, ";
    assert!(code == 0 && text.contains(why), "{text}");
    edit(&conditions, |value| {
        let machine = value["machine"].as_object_mut().expect("an object");
        for part in ["c_library", "cpu", "cpu_kernels"] {
            machine.remove(part);
        }
    });
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    let why = "the recording does not state the order in which its kernels add";
    assert!(code == 0 && text.contains(why), "{text}");
    let report = json_of(&format!("replay --run {run} --step 2 --json"));
    assert_eq!(report["changes"]["unclaimed"]["models"][0], why);
}

#[test]
fn data_that_were_changed_after_the_run_are_named_and_no_stage_is_blamed() {
    let place = Place::new();
    let file = place.path("train.jsonl");
    let write = |rows: std::ops::Range<u32>| {
        let row = |n: u32| {
            format!(
                "{{\"question\": \"{n}+{n}=\", \"answer\": \"{}\"}}\n",
                2 * n
            )
        };
        fs::write(&file, rows.map(row).collect::<String>()).expect("a file");
    };
    write(10..22);
    let run = recorded(&place, "run", &[&format!("data.train={}", file.display())]);
    // Other rows, and so few that the recorded order of rows is past the end.
    for rows in [40..52, 40..42] {
        write(rows);
        let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
        let path = file.display();
        let data = format!("data train ({path}): 12 rows with fingerprint ");
        let why = format!(
            "stage `prompts` would draw different rows, because data were changed since the recording: `train` ({path}); \
             restore the data to run it again"
        );
        assert!(code == 0 && text.contains(&data), "{text}");
        assert!(
            text.contains(&format!("\nnot run again: {why}\n")),
            "{text}"
        );
        assert!(text.ends_with("\n0 differences\n"), "{text}");
        assert_eq!(
            pipe_debug(&format!("replay --run {run} --step 2 --stage prompts")).0,
            3
        );
        let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
        assert!(code == 0 && text.contains(&data), "{text}");
        assert!(
            text.contains(&format!("note: not run again in steps 1–3: {why}\n")),
            "{text}"
        );
    }
    let report = json_of(&format!("replay --run {run} --step 2 --json"));
    assert_eq!(report["changes"]["data"][0]["now"]["rows"], 2);
    // An error in a stage is still reported.
    corrupt(&run, 2, "advantages", Side::Output, 5, |v| -v - 1.0);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(
        code == 1 && text.contains("the first: stage `advantages`"),
        "{text}"
    );
    write(10..22);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 1"));
    assert!(code == 0 && !text.contains("data train"), "{text}");
}

#[test]
fn data_without_recorded_fingerprints_are_reported_as_not_compared() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let file = Path::new(&run).join("data.json");
    let whole = fs::read_to_string(&file).expect("a file");
    let check_reason = |why: &str| {
        let start = format!("data cannot be compared with those of the run: data.json {why}");
        let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
        assert!(code == 0 && text.contains(&start), "{text}");
        let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
        assert!(
            code == 0 && text.contains(&format!("note: {start}")),
            "{text}"
        );
    };
    fs::write(&file, &whole[..whole.len() / 2]).expect("a file");
    check_reason("is invalid (");
    fs::write(&file, &whole).expect("a file");
    edit(&file, |data| {
        data.as_object_mut().expect("data sets").remove("eval");
    });
    check_reason("has no entry for `eval`");
    fs::remove_file(&file).expect("removed");
    check_reason("cannot be read (");
}

#[test]
fn data_that_prevent_the_start_are_reported_as_changed() {
    let place = Place::new();
    let file = place.path("train.jsonl");
    let row = "{\"question\": \"1+1=\", \"answer\": \"2\"}\n";
    fs::write(&file, row.repeat(12)).expect("a file");
    let run = recorded(&place, "run", &[&format!("data.train={}", file.display())]);
    let then = format!(
        "the data were changed since the run: train ({}): 12 rows with fingerprint ",
        file.display()
    );
    // A row that is not JSON, and one without the column that is read.
    for rows in ["{\"question\": ", "{\"query\": \"1+1=\"}\n"] {
        fs::write(&file, rows).expect("a file");
        let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
        assert!(code == 3 && text.contains(&then), "{text}");
        let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
        assert!(code == 0 && text.contains(&then), "{text}");
    }
}

#[test]
fn data_that_a_source_does_not_draw_from_are_no_excuse() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let changed = |name: &str| {
        edit(&Path::new(&run).join("data.json"), |data| {
            data[name]["fingerprint"] = "of another file".into();
        });
        replace(&run, "config.toml", "shuffle = true", "shuffle = false");
        let output = pipe_debug(&format!("replay --run {run} --step 2"));
        replace(&run, "config.toml", "shuffle = false", "shuffle = true");
        output
    };
    let (code, text) = changed("eval");
    let expected = "\ndata eval (";
    assert!(code == 1 && text.contains(expected), "{text}");
    assert!(text.contains("the first: stage `prompts`"), "{text}");
    let (code, text) = changed("train");
    assert!(code == 0 && text.contains("`prompts` would draw"), "{text}");
}

#[test]
fn a_plan_with_a_warning_is_the_same_plan() {
    let place = Place::new();
    // The learning rate never reaches the set value.
    let schedule = "actor.optimizer.schedule={ kind = \"constant\", warmup_steps = 100 }";
    let run = recorded(&place, "run", &[schedule]);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(code == 0 && !text.contains("another plan"), "{text}");
    assert!(text.ends_with("\n0 differences\n"), "{text}");
}

#[test]
fn another_machine_claims_no_equal_bits_and_blames_no_stage_for_rounding() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let conditions = Path::new(&run).join("trace/conditions.json");
    // Their number affects no bit on a CPU.
    edit(&conditions, |value| value["machine"]["threads"] = 99.into());
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(text.contains("machine threads: 99 when recorded"), "{text}");
    assert!(
        code == 0 && text.contains("bit-equal") && !text.contains("are not expected"),
        "{text}"
    );
    // Models were on another device: results of the host are still compared exactly.
    edit(&conditions, |value| {
        value["machine"]["device"] = "cuda:0".into();
    });
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(
        code == 0 && text.contains("machine device: \"cuda:0\" when recorded, \"cpu\" now"),
        "{text}"
    );
    let result = |stage: &str| {
        let line = text.lines().find(|line| line.trim().starts_with(stage));
        line.expect("a line of the table").to_owned()
    };
    assert!(result("advantages").ends_with("bit-equal"), "{text}");
    assert!(
        result("old_log_probs").contains("within tolerance"),
        "{text}"
    );
    edit(&conditions, |value| {
        value["machine"]["device"] = "cpu".into();
    });
    edit(&conditions, |value| {
        value["machine"]["processor"] = vec!["of_tomorrow"].into()
    });
    corrupt(&run, 2, "advantages", Side::Output, 5, |v| {
        v * (1.0 + f32::EPSILON)
    });
    corrupt(&run, 2, "update", Side::Input, 5, |v| {
        v * (1.0 + f32::EPSILON)
    });
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("machine processor: [\"of_tomorrow\"] when recorded"),
        "{text}"
    );
    assert!(text.contains("equal bits are not expected"), "{text}");
    assert!(text.contains("within tolerance"), "{text}");
    assert!(text.contains("repeat only up to rounding"), "{text}");
    // Without the hashes of the statistics, which would show that the file was changed.
    std::fs::remove_dir_all(format!("{run}/trace/stats")).expect("statistics");
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert!(
        code == 0 && text.contains("note: machine processor"),
        "{text}"
    );
    // A difference larger than rounding is reported, with its possible causes.
    corrupt(&run, 2, "advantages", Side::Output, 5, |v| v + 1.0);
    corrupt(&run, 2, "update", Side::Input, 5, |v| v + 1.0);
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert!(
        code == 1 && text.contains("it was recorded on another machine"),
        "{text}"
    );
}
