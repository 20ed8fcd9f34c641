use super::*;

fn open(bytes: &[u8]) -> Result<JsonlRows, DataError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, bytes).unwrap();
    JsonlRows::open(&path)
}

fn row_error(bytes: &[u8]) -> (usize, String) {
    match open(bytes) {
        Err(DataError::Row { row, reason, .. }) => (row, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_survive_marks_blank_lines_and_line_ends() {
    let data =
        open("\u{feff}{\"q\": \"é\"}\r\n\n  \r\n{\"q\": 2}\n{\"q\": [1]}".as_bytes()).unwrap();
    assert_eq!(data.len(), 3);
    assert_eq!(data.row(0).unwrap()["q"], "é");
    assert_eq!(data.row(1).unwrap()["q"], 2);
    assert_eq!(data.row(2).unwrap()["q"][0], 1);
    assert!(matches!(data.row(3), Err(DataError::Row { row: 4, .. })));
}

#[test]
fn errors_are_reported_with_their_line() {
    assert!(matches!(open(b""), Err(DataError::Empty { .. })));
    assert!(matches!(open(b"\n \r\n"), Err(DataError::Empty { .. })));
    let (row, reason) = row_error(b"{\"a\": 1}\n\n{\"a\": 1,}\n{");
    assert_eq!(
        (row, reason.as_str()),
        (
            3,
            "malformed JSON at column 9: trailing comma; row 4 is malformed too"
        )
    );
    let (row, reason) = row_error(b"{\"a\": 1}\n[1]\n");
    assert_eq!((row, reason.as_str()), (2, "found a list, not an object"));
    let (row, reason) = row_error(b"{\"a\": 1}\n{\"a\": \"\xff\"}\n");
    assert_eq!(row, 2);
    assert!(
        reason.starts_with("invalid UTF-8 at byte 0xff (column 8);"),
        "{reason}"
    );
    assert_eq!(row_error(b"{} {}").0, 1);
    assert!(matches!(
        JsonlRows::open(Path::new("no/such.jsonl")),
        Err(DataError::Unreadable { .. })
    ));
}

/// Row A12: errors name the cause of malformed text, with the row and the column.
#[test]
fn causes_of_malformed_text_are_reported() {
    let reason = |bytes: &[u8], row: usize, words: &[&str]| {
        let (found, reason) = row_error(bytes);
        assert_eq!(found, row, "{reason}");
        for word in words {
            assert!(reason.contains(word), "{word}: {reason}");
        }
    };
    let half = br#"{"a": "\ud83d"}"#;
    reason(
        &[b"{}\n", &half[..]].concat(),
        2,
        &["column 8", r"`\ud83d`", "half of a character", "json.dumps"],
    );
    reason(
        br#"{"a": "\ude00 x"}"#,
        1,
        &["column 8", "half of a character"],
    );
    reason(
        &b"{\"a\": NaN}\n"[..],
        1,
        &["column 7", "`NaN` is Python, not JSON"],
    );
    reason(
        &b"{\"a\": 1}\r{\"b\": 2}\n{}\n"[..],
        1,
        &["carriage return"],
    );
    reason(
        &b"{\"a\": 1}\n{\"a\":"[..],
        2,
        &["does not end in this line"],
    );
    reason(
        &b"{\n  \"a\": 1\n}\n"[..],
        1,
        &["does not end in this line"],
    );
    reason(
        &b"{\"a\": 1}, {\"a\": 2}\n"[..],
        1,
        &["one object per line"],
    );
    reason(&b"{'a': 1}\n"[..], 1, &["column 2", "double quotes"]);
    reason(&b"{\"a\": True}\n"[..], 1, &["column 7", "`true`"]);
}

#[test]
fn a_carriage_return_ends_lines_without_line_feeds() {
    let data = open(b"{\"q\": 1}\r{\"q\": 2}\r\r{\"q\": 3}").unwrap();
    assert_eq!(data.len(), 3);
    assert_eq!(data.row(2).unwrap()["q"], 3);
    assert_eq!(row_error(b"{\"q\": 1}\r{\"q\": }\r").0, 2);
}

#[test]
fn a_list_of_objects_is_a_data_set() {
    let data = open("\u{feff}\n[\n  {\"q\": \"]é\"},\r\n  {\"q\": [1]\n}\n]\n".as_bytes()).unwrap();
    assert_eq!(data.len(), 2);
    assert_eq!(data.row(0).unwrap()["q"], "]é");
    assert_eq!(data.row(1).unwrap()["q"][0], 1);
    assert!(matches!(open(b"[]"), Err(DataError::Empty { .. })));
    for (text, row, words) in [
        ("[{\"q\": 1},\n {\"q\": }]", 2, "line 2, column 8"),
        ("[{\"q\": 1},\n 3]", 2, "a number, not an object"),
        ("[{\"q\": 1} {\"q\": 2}]", 1, "expected `,` or `]`"),
        ("[{\"q\": 1},]", 2, "malformed JSON at line 1, column 11"),
        ("[{\"q\": 1}", 1, "cut off"),
        ("[{\"q\": 1}, {\"q\"", 2, "cut off"),
        ("[{\"q\": 1}]\n[{\"q\": 2}]", 1, "the file continues"),
        ("[{\"q\": \"\\ud83d\"}]", 1, "half of a character"),
    ] {
        let (found, reason) = row_error(text.as_bytes());
        assert_eq!(found, row, "{text}: {reason}");
        assert!(reason.contains(words), "{text}: {reason}");
    }
}

/// Rows A9 and A17, and similar formats.
#[test]
fn files_of_other_formats_are_reported() {
    for (bytes, words) in [
        (
            &b"\x28\xb5\x2f\xfd\x04\x00"[..],
            "it is compressed with Zstandard; decompress it with `unzstd`",
        ),
        (&b"\x1f\x8b\x08\x00"[..], "gzip"),
        (
            &b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"[..],
            "is a Git LFS pointer, not the data; fetch the file with `git lfs pull`",
        ),
        (&b"a,b\n1,2\n"[..], "comma-separated values; convert it"),
        (&b"\xff\xfe{\x00"[..], "UTF-16"),
    ] {
        let error = open(bytes).unwrap_err().to_string();
        assert!(
            error.contains("rows.jsonl`") && error.contains(words),
            "{error}"
        );
    }
}

#[test]
fn the_beginning_of_a_file_is_read_up_to_where_it_is_cut() {
    let start = |text: &str, length: usize| {
        let bytes = text.as_bytes()[..length].to_vec();
        JsonlRows::from_bytes("start".to_owned(), bytes, Extent::Start).map(|rows| rows.len())
    };
    let lines = "{\"q\": \"é\"}\n{\"q\": 2}\n";
    // Cut inside a character, inside an object, at the end of a line.
    assert!(matches!(start(lines, 9), Err(DataError::Empty { .. })));
    assert_eq!(start(lines, 12).unwrap(), 1);
    assert_eq!(start(lines, 18).unwrap(), 1);
    assert_eq!(start(lines, lines.len()).unwrap(), 2);
    let list = "[{\"q\": \"é\"}, {\"q\": 2}]";
    assert!(matches!(start(list, 10), Err(DataError::Empty { .. })));
    for (length, rows) in [(13, 1), (15, 1), (20, 1), (list.len() - 1, 2)] {
        assert_eq!(start(list, length).unwrap(), rows, "{length}");
    }
    assert!(matches!(
        start("{\"q\": }\n{\"q\"", 12),
        Err(DataError::Row { row: 1, .. })
    ));
}

#[test]
fn the_fingerprint_depends_on_the_content() {
    let data = open(b"{}\n").unwrap();
    assert_eq!(
        data.fingerprint(),
        "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    );
}

#[test]
fn paths_are_relative_to_the_pipeline_file() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("rows.jsonl"), "{}\n").unwrap();
    let context = BuildContext {
        base: dir.path().to_owned(),
        ..BuildContext::default()
    };
    let config = Jsonl {
        path: "rows.jsonl".into(),
    };
    let data = config.open(&context).unwrap();
    assert_eq!(data.len(), 1);
    assert_eq!(
        data.origin(),
        dir.path().join("rows.jsonl").display().to_string()
    );
}

/// The questions of GSM8K, if they are next to the workspace.
#[test]
fn all_of_gsm8k_is_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/gsm8k");
    if !folder.exists() {
        return;
    }
    for (name, count) in [("train.jsonl", 7473), ("test.jsonl", 1319)] {
        let data = JsonlRows::open(&folder.join(name)).unwrap();
        assert_eq!(data.len(), count);
        for index in 0..count {
            let row = data.row(index).unwrap();
            assert!(row["question"].is_string());
            assert!(row["answer"].as_str().unwrap().contains("\n#### "));
        }
    }
}

/// Row A3 of the usability findings: numbers are read as written in the file, at any depth.
#[test]
fn numbers_are_read_as_written() {
    let large = "123456789012345678901234567890";
    let data = open(
        format!(
            r#"{{"answer": {large}, "price": 1.10, "share": 1e-7, "n": 18446744073709551615, "messages": [{{"role": "user", "content": {large}, "tries": 3}}]}}"#
        )
        .as_bytes(),
    )
    .unwrap();
    let row = crate::prompts::Row::read(&data, 0).unwrap();
    assert_eq!(row.text("answer").unwrap(), large);
    assert_eq!(row.text("price").unwrap(), "1.10");
    assert_eq!(row.text("share").unwrap(), "1e-7");
    assert_eq!(row.text("n").unwrap(), "18446744073709551615");
    let messages = row.messages("messages").unwrap();
    assert_eq!(messages[0]["content"], large);
    assert_eq!(messages[0]["tries"], 3);
    let template = "{{ messages[0].content }} {{ messages[0].tries + 1 }}";
    let template = verl_models::chat_template::ChatTemplate::new(template).unwrap();
    assert_eq!(
        template.render(&messages, true).unwrap(),
        format!("{large} 4")
    );
    // What is read as a number stays one.
    assert_eq!(data.row(0).unwrap()["price"], 1.1);
}
