//! What `pipe check` reports about data sets and their rendered rows before a run. Names of tests start with the rows
//! of the lists of inputs that they test.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::pipe::DataPipe;
use verl::pipe::plan::Plannable;
use verl::pipe::plan::look::{Checked, Look};

use crate::kit::{GRPO, Place, root, trainer};

const SFT: &str = r#"
name = "sft_tiny"
run = { steps = 1 }
batch = { prompts = 2 }
data = { train = "rows.jsonl" }
models.actor = { path = "tiny", init = "random", optimizer = { learning_rate = 1e-3 } }
stages = [
  { kind = "prompts", with_targets = true },
  { kind = "update", loss = { kind = "sft" } },
]
"#;

const DPO: &str = r#"
name = "dpo_tiny"
run = { steps = 1 }
batch = { prompts = 2, samples = 2 }
data = { train = "rows.jsonl" }
models.actor = { path = "tiny", init = "random", optimizer = { learning_rate = 1e-3 } }
models.ref = { path = "tiny", init = "random" }
stages = [
  { kind = "preferences" },
  { kind = "pairs" },
  { kind = "log_probs", name = "ref_log_probs", model = "ref", role = "reference" },
  { kind = "update", loss = { kind = "dpo" } },
]
"#;

const SUM: &str = "{\"question\": \"1+1\", \"answer\": \"2\"}\n";

/// A place whose file `rows.jsonl` has the given content.
fn place(rows: impl AsRef<[u8]>) -> Place {
    let place = Place::new();
    fs::write(place.path("rows.jsonl"), rows).unwrap();
    place
}

fn parse(place: &Place, text: &str, more: &[&str]) -> DataPipe {
    let parsed = place.parse(text, "run", more);
    parsed.unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

/// Findings of a check, without the temporary folder.
fn found(place: &Place, text: &str, more: &[&str]) -> Vec<Diagnostic> {
    match parse(place, text, more).check(&Look::default()).plan {
        Ok(plan) => plan.warnings().to_vec(),
        Err(findings) => findings,
    }
}

/// Checks that there is one finding with this code and these words, and that a run agrees.
#[track_caller]
fn reported(place: &Place, text: &str, more: &[&str], code: &str, words: &[&str]) {
    let findings = found(place, text, more);
    let listing = Findings(findings.clone())
        .to_string()
        .replace("\n         ", " ");
    let of_code = findings.iter().filter(|finding| finding.code == code);
    assert_eq!(of_code.clone().count(), 1, "{code}:\n{listing}");
    for word in words {
        assert!(listing.contains(word), "`{word}` is not in:\n{listing}");
    }
    let is_error = of_code.clone().any(Diagnostic::is_error);
    let run = trainer(&parse(place, text, more))
        .and_then(|mut trainer| trainer.train().map(drop).map_err(|error| error.to_string()));
    assert_eq!(run.is_err(), is_error, "{listing}\n{run:?}");
}

/// Changes a file of the model folder.
fn change(place: &Place, name: &str, change: impl Fn(&mut Value)) {
    let path = place.path("tiny").join(name);
    let mut content: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut content);
    fs::write(path, content.to_string()).unwrap();
}

#[test]
fn a9_a_missing_column() {
    let place = place(SUM.repeat(3));
    let words = [
        "`train` has no column `qestion`",
        "did you mean `question`?",
        "`answer`",
        "stage `prompts` (prompts), data set `train`",
        "rows 1, 2, 3",
    ];
    reported(&place, SFT, &["prompts.question=qestion"], "D002", &words);
    // Both columns together, and columns that some rows lack.
    let rows = SUM.repeat(9) + "{\"question\": \"1+1\"}\n";
    fs::write(place.path("rows.jsonl"), rows).unwrap();
    let words = [
        "column `answer` is missing in 1 of 10 rows of `train`",
        "(row 10)",
    ];
    reported(&place, SFT, &[], "D002", &words);
}

#[test]
fn a9_bad_json_in_line_2() {
    let place = place(format!("{SUM}{{\"question\": 1+1}}\n{SUM}{{\n"));
    let words = [
        "data set `train` cannot be read",
        "row 2: malformed JSON at column 15",
        "row 4 is malformed too",
        "[data.train]",
    ];
    reported(&place, SFT, &[], "D001", &words);
}

#[test]
fn a9_a17_files_of_other_formats() {
    for (bytes, words) in [
        (
            &b"\x28\xb5\x2f\xfd\x04\x00"[..],
            "is compressed with Zstandard",
        ),
        (&b"\x1f\x8b\x08\x00"[..], "is compressed with gzip"),
        (&b"\xff\xfe{\x00"[..], "is UTF-16 text"),
        (
            &b"question,answer\n1+1,2\n"[..],
            "is a table of comma-separated values",
        ),
        (&b"<!DOCTYPE html>\n"[..], "is an HTML or XML page"),
        (
            &b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"[..],
            "is a Git LFS pointer",
        ),
    ] {
        reported(
            &place(bytes),
            SFT,
            &[],
            "C005",
            &[words, "rows.jsonl", "[data.train]"],
        );
    }
}

#[test]
fn a12_half_a_character_carriage_returns_and_marks() {
    let half = place(format!(
        "{SUM}{{\"question\": \"\\ud83d\", \"answer\": \"2\"}}\n"
    ));
    let words = ["row 2", "column 15", "`\\ud83d` is half of a character"];
    reported(&half, SFT, &[], "D001", &words);
    for rows in [
        SUM.repeat(3).replace('\n', "\r"),
        format!("\u{feff}{}", SUM.repeat(3)),
        SUM.repeat(3).replace('\n', "\r\n"),
        format!("[{}]", [SUM; 3].join(",")),
    ] {
        let place = place(rows);
        let pipe = parse(&place, SFT, &[]);
        assert_eq!(pipe.data.len(), 1);
        let checked = pipe.check(&Look::default());
        assert!(checked.plan.is_ok(), "{:?}", checked.plan.err());
        assert_eq!(checked.rows[0].rows, 3);
    }
}

#[test]
fn a9_no_end_of_sequence_id_where_targets_need_one() {
    let place = place(SUM);
    change(&place, "generation_config.json", |file| *file = json!({}));
    change(&place, "config.json", |file| {
        file["eos_token_id"] = Value::Null
    });
    change(&place, "tokenizer_config.json", |file| {
        file.as_object_mut().unwrap().remove("eos_token");
    });
    reported(
        &place,
        SFT,
        &["prompts.template=none"],
        "D007",
        &["`actor` has no end-of-sequence id"],
    );
}

#[test]
fn a8_an_end_of_sequence_id_beyond_the_vocabulary() {
    let place = place(SUM);
    change(&place, "generation_config.json", |file| {
        file["eos_token_id"] = 100_000.into()
    });
    // No response could end, so the folder is rejected.
    let words = ["`eos_token_id` is 100000", "the vocabulary ends at 32"];
    reported(&place, SFT, &["prompts.template=none"], "C005", &words);
    // With another valid id it is only a warning.
    change(&place, "generation_config.json", |file| {
        file["eos_token_id"] = json!([1, 100_000])
    });
    let words = [
        "the id 100000",
        "generation_config.json` sets it as `eos_token_id`",
        "ends at 32",
    ];
    let findings = found(&place, GRPO, &["save=[]"]);
    let listing = Findings(findings.clone())
        .to_string()
        .replace("\n         ", " ");
    assert!(
        findings.iter().all(|finding| !finding.is_error()),
        "{listing}"
    );
    assert!(words.iter().all(|word| listing.contains(word)), "{listing}");
}

#[test]
fn a7_a_template_that_rejects_every_row() {
    let place = place(SUM.repeat(30));
    change(&place, "tokenizer_config.json", |file| {
        file["chat_template"] = "{{ messages[0]['content'] + nothing }}".into();
    });
    let words = [
        "30 of 30 rows of `train` cannot be used",
        "rows 1, 2, 3, 4, 5 and 25 more",
        "the chat template refuses the messages",
    ];
    reported(&place, SFT, &[], "D003", &words);
}

#[test]
fn rows_that_are_too_long_are_found_wherever_they_stand() {
    let long = format!(
        "{{\"question\": \"{}1\", \"answer\": \"2\"}}\n",
        "1+".repeat(50)
    );
    for row in [150, 3000] {
        let place = place(SUM.repeat(row - 1) + &long + &SUM.repeat(5));
        let row = format!("row {row}: the prompt has 104 tokens");
        let words = ["is too long", &row, "on_long"];
        reported(&place, SFT, &["prompts.on_long=error"], "D004", &words);
        reported(&place, SFT, &[], "D005", &["left out", &row]);
    }
    // A row of many tokens.
    let row = format!(
        "{{\"question\": \"{}1\", \"answer\": \"2\"}}\n",
        "1+".repeat(200_000)
    );
    let huge = place(SUM.repeat(4) + &row);
    reported(
        &huge,
        SFT,
        &["prompts.on_long=error"],
        "D004",
        &["row 5", "400004 tokens"],
    );
    let alone = place(row);
    reported(
        &alone,
        SFT,
        &[],
        "D004",
        &["every row of `train` is too long"],
    );
}

#[test]
fn wrong_types_and_pairs_without_a_difference() {
    let rows = SUM.repeat(2)
        + "{\"question\": null, \"answer\": \"2\"}\n{\"question\": [], \"answer\": \"2\"}\n";
    let words = [
        "2 of 4 rows of `train` cannot be used",
        "row 3: column `question` contains null, not a text",
        "row 4: column `question` contains a list, not a text",
    ];
    reported(&place(rows), SFT, &[], "D003", &words);

    let pair = |chosen: &str, rejected: &str| {
        json!({"prompt": "1+1", "chosen": chosen, "rejected": rejected}).to_string() + "\n"
    };
    let rows = pair("2", "3") + &pair("2", "2") + &pair("", "3");
    let words = [
        "2 of 3 rows of `train` cannot be used",
        "row 2: the chosen and the rejected answer have the same",
        "row 3: the chosen answer (column `chosen`) is empty",
    ];
    reported(&place(rows), DPO, &[], "D003", &words);
}

/// Row #24: rows written by the preprocessing of verl.
#[test]
fn report_24_columns_inside_objects() {
    let row = json!({
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    });
    let place = place(format!("{row}\n{row}\n"));
    let text = GRPO.replace("{ kind = \"addition\" }", "\"rows.jsonl\"");
    let more = [
        "prompts.messages=prompt",
        "prompts.answer=reward_model.ground_truth",
        "steps=1",
    ];
    let pipe = parse(&place, &text, &more);
    let checked = pipe.check(&Look {
        shown: 1,
        ..Look::default()
    });
    assert!(checked.plan.is_ok(), "{:?}", checked.plan.err());
    let shown = &checked.rows[0].shown[0];
    assert_eq!(shown.answer.as_deref(), Some("2"));
    assert!(shown.prompt_text.contains("1+1"), "{shown:?}");
    let mut trainer = trainer(&pipe).unwrap();
    trainer.train().unwrap();

    let more = ["prompts.messages=prompt", "prompts.answer=ground_truth"];
    let words = [
        "no column `ground_truth`",
        "did you mean `reward_model.ground_truth`?",
    ];
    reported(&place, &text, &more, "D002", &words);
}

#[test]
fn faults_of_data_settings_and_several_stages_are_reported_together() {
    let place = place("{\"question\": \"1+1\", \"answer\": null}\n");
    let text = GRPO
        .replace("{ kind = \"addition\" }", "\"rows.jsonl\"")
        .replace(
            "{ kind = \"addition\", split = \"heldout\" }",
            "\"rows.jsonl\"",
        );
    let findings = found(
        &place,
        &text,
        &["generate.max_new_tokens=0", "evaluate.format.question=none"],
    );
    let found: Vec<(&str, &str)> = findings
        .iter()
        .map(|finding| (finding.code, finding.location.as_str()))
        .collect();
    assert_eq!(
        found,
        [
            ("C005", "stage `generate` (generate)"),
            ("D003", "stage `prompts` (prompts), data set `train`"),
            ("D002", "stage `evaluate` (evaluate), data set `eval`"),
        ]
    );
}

/// A run uses only the first questions, so later rows are not checked.
#[test]
fn rows_that_an_evaluation_does_not_use_are_not_checked() {
    let place = place(SUM.repeat(6) + "{\"question\": null}\n");
    let text = GRPO.replace(
        "{ kind = \"addition\", split = \"heldout\" }",
        "\"rows.jsonl\"",
    );
    let pipe = parse(&place, &text, &["steps=1"]);
    let checked = pipe.check(&Look::default());
    assert!(checked.plan.is_ok(), "{:?}", checked.plan.err());
    trainer(&pipe).unwrap().train().unwrap();
}

#[test]
fn pipelines_that_run_have_no_finding_about_their_data() {
    let folder = root().join("examples/pipelines");
    let mut tried = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        let pipe = verl::pipe::config::read_pipeline::<String>(&file, &[], &verl::registry());
        let pipe = pipe.unwrap_or_else(|findings| panic!("{}", Findings(findings)));
        let Checked { plan, rows } = pipe.check(&Look::default());
        let Ok(plan) = plan else {
            // Models that are not in the tree.
            continue;
        };
        tried += 1;
        let of_data = plan
            .warnings()
            .iter()
            .filter(|finding| finding.code.starts_with('D'));
        assert_eq!(
            of_data.count(),
            0,
            "{}: {:?}",
            file.display(),
            plan.warnings()
        );
        assert!(
            !rows.is_empty() && rows.iter().all(|rows| rows.tokenised > 0),
            "{}",
            file.display()
        );
    }
    assert!(tried >= 10, "{tried} pipelines were checked");
}

/// Standard output of `pipe check` on a file of a place, without the temporary folder.
fn printed(place: &Place, text: &str, more: &[&str]) -> String {
    let file = place.path("p.toml");
    fs::write(&file, text).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["check", &file.display().to_string()])
        .args(more)
        .output()
        .unwrap();
    let folder = file.parent().unwrap_or(Path::new("")).display().to_string();
    String::from_utf8(out.stdout)
        .unwrap()
        .replace(&format!("{folder}/"), "")
}

#[test]
fn rows_as_a_run_sees_them_are_printed() {
    let sums =
        place(SUM.to_owned() + "{\"question\": \"12+3\", \"answer\": 15}\n{\"question\": []}\n");
    insta::assert_snapshot!("rows_sft", printed(&sums, SFT, &["--rows", "3"]));
    let pair = json!({"prompt": "1+1", "chosen": "2", "rejected": "3"});
    let pairs = place(format!("{pair}\n"));
    insta::assert_snapshot!("rows_dpo", printed(&pairs, DPO, &["--rows", "1"]));
    let text = GRPO.replace("{ kind = \"addition\" }", "\"rows.jsonl\"");
    let sums = place(SUM.repeat(2));
    insta::assert_snapshot!("rows_grpo", printed(&sums, &text, &["--rows", "1"]));

    let out = printed(&sums, SFT, &["--rows", "1", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    let row = &json["rows"][0]["shown"][0];
    assert_eq!(row["answer"], "2");
    assert_eq!(row["targets"][0]["tokens"][0]["text"], "2");
    assert_eq!(row["targets"][0]["tokens"][0]["trained"], true);
}
