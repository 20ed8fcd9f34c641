//! Numbers of the reference systems: every case of every golden file whose function exists here.
//!
//! The folder is `VERL_GOLDEN_DIR`, else `../../shared/golden` beside this crate, and always `tests/golden` (a few cases
//! kept with the code). `wanted` goes before `expected`; `null` is not compared; padded arrays become ragged or packed
//! before anything is computed, so what lies under a zero mask cannot matter.

#![expect(
    clippy::print_stdout,
    reason = "the tests tell what they could not compare"
)]

#[path = "golden/advantages.rs"]
mod advantages;
#[path = "golden/cases.rs"]
mod cases;
#[path = "golden/functions.rs"]
mod functions;
#[path = "golden/offline.rs"]
mod offline;
#[path = "golden/policy.rs"]
mod policy;
#[path = "golden/preferences.rs"]
mod preferences;
#[path = "golden/readme.rs"]
mod readme;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use cases::{compare, load};

/// Largest error in f32, relative to max(1, |number|).
const F32_TOLERANCE: f64 = 5e-5;
/// Words in the names of cases that f32 cannot hold.
const BEYOND_F32: &[&str] = &[
    "extreme", "1e5", "1e6", "1e8", "1e4", "1e-7", "offset", "huge",
];

fn own_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The full set of files, where there is one.
fn shared_folder() -> Option<PathBuf> {
    let folder = match std::env::var_os("VERL_GOLDEN_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden"),
    };
    folder.is_dir().then_some(folder)
}

/// Runs all cases of a folder; returns what went wrong.
fn run(folder: &Path, dtype: DType) -> Vec<String> {
    let mut failures = Vec::new();
    let mut compared = BTreeMap::<String, usize>::new();
    let mut without = BTreeMap::<String, usize>::new();
    for case in load(folder) {
        if dtype == DType::F32 && BEYOND_F32.iter().any(|word| case.name.contains(word)) {
            continue;
        }
        let Some(answer) = functions::run(&case, dtype) else {
            *without.entry(case.function.clone()).or_default() += 1;
            continue;
        };
        *compared.entry(case.function.clone()).or_default() += 1;
        let tolerance = match dtype {
            DType::F32 => F32_TOLERANCE.max(case.tolerance),
            _ => case.tolerance,
        };
        if let Err(why) = compare(&case, answer, tolerance) {
            failures.push(format!(
                "{} {} {}: {why}",
                case.file, case.function, case.name
            ));
        }
    }
    println!("{}: compared {compared:?}", folder.display());
    if !without.is_empty() {
        println!("no function here for {without:?}");
    }
    assert!(!compared.is_empty(), "no case in {}", folder.display());
    failures
}

#[track_caller]
fn check(folder: &Path, dtype: DType) {
    let failures = run(folder, dtype);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
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
        None => println!("no folder of golden files: set VERL_GOLDEN_DIR"),
    }
}

#[test]
fn golden_files_in_f32() {
    match shared_folder() {
        Some(folder) => check(&folder, DType::F32),
        None => println!("no folder of golden files: set VERL_GOLDEN_DIR"),
    }
}

#[test]
fn golden_comparison_notices_what_is_wrong() {
    let cases = load(&own_folder());
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
    assert_eq!(readme::functions(text), ["one", "two", "b_*"]);
    assert!(readme::matches("two", "two") && !readme::matches("two", "two_more"));
    assert!(readme::matches("a_*_z", "a_b_z") && !readme::matches("a_*_z", "a_z"));
}

/// Nothing that the golden folder holds may go unnoticed: a function without an implementation here is a failure.
#[test]
fn golden_readme_functions_are_all_covered() {
    let Some(folder) = shared_folder() else {
        println!("no folder of golden files: set VERL_GOLDEN_DIR");
        return;
    };
    let text = std::fs::read_to_string(folder.join("README.md")).expect("a README");
    let cases = load(&folder);
    let mut first = BTreeMap::new();
    for case in &cases {
        first.entry(case.function.as_str()).or_insert(case);
    }
    let mut faults = Vec::new();
    for (function, case) in &first {
        if functions::run(case, DType::F64).is_none() {
            faults.push(format!(
                "no function here for `{function}` of {}",
                case.file
            ));
        }
    }
    let named = readme::functions(&text);
    assert!(!named.is_empty(), "no function in the table of the README");
    for name in &named {
        if !first.keys().any(|function| readme::matches(name, function)) {
            faults.push(format!("the README names `{name}`, but no case does"));
        }
    }
    for function in first.keys() {
        if !named.iter().any(|name| readme::matches(name, function)) {
            faults.push(format!("the table of the README lacks `{function}`"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
