//! The first steps of the quickstart have the same bytes on every processor: with narrower registers, other caches,
//! other numbers of threads.
//!
//! Registers are narrowed in two ways: by the variable that limits verl's kernels, and, if the system supports
//! intercepting `cpuid`, by a library that hides AVX-512 from the process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::kit::root;

/// Steps of the quickstart, and held-out questions before the first and after the last.
const STEPS: &str = "steps=10";
const QUESTIONS: &str = "evaluate.questions=64";

/// Exit status of [`SHIM`] if `cpuid` cannot be intercepted.
const NOT_HERE: i32 = 77;

/// Files of a run without times.
const FILES: [&str; 2] = ["model/actor/model.safetensors", "samples.jsonl"];

/// Runs the quickstart into `dir`; `None` if the processor cannot be disguised.
fn run(dir: &Path, environment: &[(&str, &str)]) -> Option<Vec<Vec<u8>>> {
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["train", "examples/pipelines/grpo_addition.toml"])
        .args([STEPS, QUESTIONS, &format!("run.dir={}", dir.display())])
        .current_dir(root())
        .env_remove("VERL_REGISTERS")
        .envs(environment.iter().copied())
        .output()
        .expect("pipe starts");
    if ran.status.code() == Some(NOT_HERE) {
        return None;
    }
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{environment:?}: {errors}");
    let read = |file: &&str| fs::read(dir.join(file)).expect("a file of a run");
    Some(FILES.iter().map(read).collect())
}

/// The preloaded library, compiled by the linker driver that Rust uses.
fn shim(dir: &Path) -> PathBuf {
    let library = dir.join("shim.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(root().join("tests/fixtures/other_processor/shim.c"))
        .arg("-ldl")
        .status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "the shim compiles"
    );
    library
}

/// A folder like `/sys/devices/system/cpu/cpu0/cache`: 128 KiB, 512 KiB and 4 MiB.
fn caches(dir: &Path) -> PathBuf {
    let caches = dir.join("caches");
    let levels = [
        ("Data", 1, 16, 128, "128K"),
        ("Unified", 2, 8, 1024, "512K"),
        ("Unified", 3, 16, 4096, "4096K"),
    ];
    for (index, (kind, level, ways, sets, size)) in levels.into_iter().enumerate() {
        let index = caches.join(format!("index{index}"));
        fs::create_dir_all(&index).expect("a folder");
        let files = [
            ("type", kind.to_owned()),
            ("level", level.to_string()),
            ("ways_of_associativity", ways.to_string()),
            ("number_of_sets", sets.to_string()),
            ("coherency_line_size", "64".to_owned()),
            ("size", size.to_owned()),
            ("shared_cpu_list", "0".to_owned()),
            ("shared_cpu_map", "1".to_owned()),
        ];
        for (name, content) in files {
            fs::write(index.join(name), content + "\n").expect("a file");
        }
    }
    caches
}

#[test]
fn the_quickstart_has_the_same_bytes_on_every_processor() {
    let place = tempfile::tempdir().expect("a folder");
    let dir = |name: &str| place.path().join(name);
    let here = run(&dir("here"), &[]).expect("nothing is disguised");
    let same = |name: &str, environment: &[(&str, &str)]| {
        let Some(found) = run(&dir(name), environment) else {
            return false;
        };
        for ((file, here), found) in FILES.iter().zip(&here).zip(&found) {
            assert!(here == found, "{file} differs with {environment:?}");
        }
        true
    };
    same(
        "narrow",
        &[("VERL_REGISTERS", "avx2"), ("RAYON_NUM_THREADS", "1")],
    );
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return;
    }
    let shim = shim(place.path());
    let shim = shim.to_str().expect("a path in UTF-8");
    let caches = caches(place.path());
    let caches = caches.to_str().expect("a path in UTF-8");
    let tunables = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD";
    let is_disguised = same(
        "disguised",
        &[
            ("LD_PRELOAD", shim),
            ("OTHER_REGISTERS", "avx2"),
            ("OTHER_CACHES", caches),
            ("GLIBC_TUNABLES", tunables),
            ("RAYON_NUM_THREADS", "3"),
        ],
    );
    if is_disguised {
        let versions = fs::read_to_string(dir("disguised/versions.json")).expect("versions");
        assert!(!versions.contains("avx512"), "{versions}");
    }
}

#[test]
fn unknown_registers_are_refused() {
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["check", "examples/pipelines/grpo_addition.toml"])
        .current_dir(root())
        .env("VERL_REGISTERS", "sse9")
        .output()
        .expect("pipe starts");
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(2), "{errors}");
    assert!(
        errors.contains("set it to one of `plain`, `avx2`, `avx512`"),
        "{errors}"
    );
}
