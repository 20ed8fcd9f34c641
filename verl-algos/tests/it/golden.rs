//! Compares with numbers of the reference systems: every case of every golden file whose function exists here.
//!
//! The folders are `VERL_GOLDEN_DIR`, or else `../../shared/golden` beside this crate, and always `tests/golden` (a few
//! cases kept with the code). `wanted` takes precedence over `expected`; `null` is not compared; padded arrays become
//! ragged or packed before anything is computed, so values under a zero mask have no effect. A setting that a case
//! omits has the library's default, clip ratios verl's. Every case runs, regardless of the results of earlier ones.

#![expect(
    clippy::print_stdout,
    reason = "the tests print what they could not compare"
)]

mod advantages;
mod cases;
mod functions;
mod offline;
mod policy;
mod preferences;
mod readme;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use cases::{Answer, Case, compare, load};

/// Largest error in f32, relative to max(1, |number|).
const F32_TOLERANCE: f64 = 5e-5;
/// Words in the names of cases that f32 cannot represent.
const BEYOND_F32: &[&str] = &[
    "extreme", "1e5", "1e6", "1e8", "1e4", "1e-7", "offset", "huge",
];

fn own_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The full set of files, if there is one.
fn shared_folder() -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    match std::env::var_os("VERL_GOLDEN_DIR") {
        Some(named) => Some(named_folder(Path::new(&named)).unwrap_or_else(|why| panic!("{why}"))),
        None => Some(here.join("../../shared/golden")).filter(|folder| folder.is_dir()),
    }
}

/// The requested folder; relative to the workspace if it is not found here.
fn named_folder(named: &Path) -> Result<PathBuf, String> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let places = [named.to_path_buf(), workspace.join(named)];
    places.into_iter().find(|place| place.is_dir()).ok_or_else(|| {
        format!(
            "VERL_GOLDEN_DIR is `{}`, which is not a folder; set it to the folder of golden files, or unset it",
            named.display()
        )
    })
}

/// The result of a case; `None` if its function does not exist here, an error for a panic.
fn outcome(case: &Case, dtype: DType) -> Option<Result<Answer, String>> {
    let run = AssertUnwindSafe(|| functions::run(case, dtype));
    match catch_unwind(run) {
        Ok(answer) => answer.map(Ok),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
            Some(Err(format!("panicked: {}", text.unwrap_or_default())))
        }
    }
}

/// Runs all cases of a folder; returns the failures.
fn run(folder: &Path, dtype: DType) -> Vec<String> {
    let loaded = load(folder);
    let mut failures = loaded.faults;
    let mut compared = BTreeMap::<String, usize>::new();
    let mut without = BTreeMap::<String, usize>::new();
    for case in loaded.cases {
        if dtype == DType::F32 && BEYOND_F32.iter().any(|word| case.name.contains(word)) {
            continue;
        }
        let Some(answer) = outcome(&case, dtype) else {
            *without.entry(case.function.clone()).or_default() += 1;
            continue;
        };
        *compared.entry(case.function.clone()).or_default() += 1;
        let tolerance = match dtype {
            DType::F32 => F32_TOLERANCE.max(case.tolerance),
            _ => case.tolerance,
        };
        if let Err(why) = answer.and_then(|answer| compare(&case, answer, tolerance)) {
            failures.push(format!(
                "{} {} {}: {why}",
                case.file, case.function, case.name
            ));
        }
    }
    println!("{}: compared {compared:?}", folder.display());
    if !without.is_empty() {
        println!("no function for {without:?}");
    }
    if compared.is_empty() && failures.is_empty() {
        failures.push(format!("no case in {}", folder.display()));
    }
    failures
}

#[track_caller]
fn check(folder: &Path, dtype: DType) {
    let failures = run(folder, dtype);
    let count = failures.len();
    assert!(count == 0, "{count} failures\n{}", failures.join("\n"));
}

#[test]
fn golden_cases_kept_with_the_code() {
    check(&own_folder(), DType::F64);
}

#[test]
fn golden_cases_kept_with_the_code_in_f32() {
    check(&own_folder(), DType::F32);
}

#[test]
fn golden_files() {
    match shared_folder() {
        Some(folder) => check(&folder, DType::F64),
        None => println!("no golden files: set VERL_GOLDEN_DIR"),
    }
}

#[test]
fn golden_files_in_f32() {
    match shared_folder() {
        Some(folder) => check(&folder, DType::F32),
        None => println!("no golden files: set VERL_GOLDEN_DIR"),
    }
}

#[test]
fn golden_comparison_detects_wrong_answers() {
    let cases = load(&own_folder()).cases;
    let case = |name: &str| cases.iter().find(|c| c.name == name).expect("the case");
    let wrong = |name: &str, answer: cases::Answer| compare(case(name), answer, 1e-6).is_err();
    let value = |v: f64| {
        Ok(
            serde_json::json!({"value": v, "grad_loss": case("token-mean_no_valid_token").answer["grad_loss"]}),
        )
    };
    assert!(wrong("token-mean_no_valid_token", value(1e-5)));
    assert!(wrong("token-mean_no_valid_token", value(f64::NAN)));
    assert!(wrong("token-mean_no_valid_token", Err("no".to_owned())));
    assert!(wrong(
        "token-mean_no_valid_token",
        Ok(serde_json::json!({}))
    ));
    assert!(wrong("full_raises", Ok(serde_json::json!({}))));
    assert_eq!(
        compare(case("full_raises"), Err("no".to_owned()), 1e-6),
        Ok(())
    );
    assert_eq!(
        compare(case("token-mean_no_valid_token"), value(0.0), 1e-6),
        Ok(())
    );
}

#[test]
fn golden_readme_table_is_read() {
    let text = "# Cases\n\n| file | cases | functions |\n|---|---|---|\n| `a` | 2 | `one` (all), `two` |\n\
                | `b` | 1 | `b_*`: each of `kinds` |\n\n| `c` | `no` | `function` |\n";
    let names = ["one", "two", "b_*"].map(str::to_owned);
    assert_eq!(readme::functions(text), Some(names.to_vec()));
    assert_eq!(readme::functions("# Cases\n\n| file | cases |\n"), None);
    assert!(readme::matches("two", "two") && !readme::matches("two", "two_more"));
    assert!(readme::matches("a_*_z", "a_b_z") && !readme::matches("a_*_z", "a_z"));
}

#[test]
fn missing_golden_folder_is_reported() {
    let why = named_folder(Path::new("no/such/folder")).unwrap_err();
    assert!(why.starts_with("VERL_GOLDEN_DIR is `no/such/folder`, which is not a folder"));
    assert!(named_folder(Path::new("verl-algos/tests/golden")).is_ok());
}

/// A malformed folder, which the harness must handle.
fn folder_of(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    for (file, text) in files {
        std::fs::write(folder.join(file), text).expect("a file");
    }
    folder
}

#[test]
fn golden_cases_do_not_hide_each_other() {
    let rloo = |ids: &str, answer: &str| {
        format!(
            r#"{{"name": "x", "function": "rloo", "expected": {{"advantages": {answer}}}, "inputs":
            {{"token_level_rewards": [[1], [0], [3], [1]], "response_mask": [[true], [1], [1.0], [1]],
            "group_ids": {ids}}}}}"#
        )
    };
    let good = rloo("[-7, -7, -2, -2]", "[[1], [-1], [2], [-2]]");
    let wrong = rloo("[5, 5, 5, 5]", "[[1], [-1], [2], [-2]]");
    let bad = r#"{"name": "y", "function": "rloo", "expected": {}, "inputs": {}}"#;
    let other = r#"{"name": "z", "function": "not_here", "expected": {}, "inputs": {}}"#;
    let file = |cases: &[&str]| format!(r#"{{"cases": [{}]}}"#, cases.join(","));
    let folder = folder_of(
        "golden_bad",
        &[
            (
                "a.json",
                &file(&[bad, r#"{"name": "no function"}"#, other, &wrong]),
            ),
            ("b.json", "not JSON"),
            ("c.json", &file(&[&good])),
        ],
    );
    let failures = run(&folder, DType::F64);
    assert_eq!(failures.len(), 4, "{failures:?}");
    for (failure, expected) in
        failures
            .iter()
            .zip(["case 1", "b: expected", "a rloo y", "a rloo x"])
    {
        assert!(
            failure.contains(expected),
            "{failure} does not contain {expected}"
        );
    }
    let faults = coverage(&folder);
    let reported: Vec<&str> = faults.iter().map(String::as_str).collect();
    assert_eq!(reported, ["no function for `not_here` of a"]);
}

#[test]
fn golden_readme_may_list_more_functions_than_the_folder_has() {
    let table = "| file | functions |\n|---|---|\n| `a` | `gae`, `dpo_*` |\n| `b` | `not_here` |\n";
    let folder = folder_of("golden_subset", &[("README.md", table)]);
    assert_eq!(
        coverage(&folder),
        ["the README lists `not_here`, which is not implemented"]
    );
}

/// Every function in the golden folder must be implemented here.
#[test]
fn golden_readme_functions_are_all_covered() {
    let Some(folder) = shared_folder() else {
        println!("no golden files: set VERL_GOLDEN_DIR");
        return;
    };
    let faults = coverage(&folder);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Functions of the cases, and of the folder's README if it has one, that are not implemented here.
fn coverage(folder: &Path) -> Vec<String> {
    let is_here = |case: &Case| outcome(case, DType::F64).is_some();
    let cases = load(folder).cases;
    let mut first = BTreeMap::new();
    for case in &cases {
        first.entry(case.function.as_str()).or_insert(case);
    }
    let missing = first.iter().filter(|(_, case)| !is_here(case));
    let mut faults: Vec<String> = missing
        .map(|(function, case)| format!("no function for `{function}` of {}", case.file))
        .collect();
    let text = std::fs::read_to_string(folder.join("README.md")).unwrap_or_default();
    let Some(named) = readme::functions(&text) else {
        println!("{}: no README with a table of functions", folder.display());
        return faults;
    };
    for name in &named {
        if first.keys().any(|function| readme::matches(name, function)) {
            continue;
        }
        println!("the README lists `{name}`, but no case uses it");
        if !is_here(&Case::empty(name)) {
            faults.push(format!(
                "the README lists `{name}`, which is not implemented"
            ));
        }
    }
    for function in first.keys() {
        if !named.iter().any(|name| readme::matches(name, function)) {
            println!("the table of the README lacks `{function}`");
        }
    }
    faults
}
