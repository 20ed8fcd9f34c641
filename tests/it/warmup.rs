//! `pipe warmup` without a GPU.

use std::process::Command;

use verl::pipe::cli::warmup::Warmup;

use crate::kit::{GRPO, Place};

/// Standard output of `pipe warmup` for a small pipeline, which must succeed and leave no files.
#[track_caller]
fn warmup(words: &[&str]) -> String {
    let place = Place::new();
    let file = place.path("p.toml");
    std::fs::write(&file, GRPO).expect("a file");
    let folder = file.parent().expect("a folder");
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .arg("warmup")
        .arg(&file)
        .args(words)
        .current_dir(folder)
        .output()
        .expect("the executable runs");
    let stderr = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{stderr}");
    assert!(!folder.join("runs").exists());
    String::from_utf8(ran.stdout).expect("UTF-8")
}

#[test]
fn on_the_cpu_there_is_nothing_to_compile() {
    assert_eq!(
        warmup(&[]),
        "grpo_tiny on cpu\n  nothing to do this build compiles nothing for `cpu`\n"
    );
    let report: Warmup = serde_json::from_str(&warmup(&["--json"])).expect("JSON");
    assert_eq!(report.pipeline, "grpo_tiny");
    assert_eq!(report.devices, "cpu");
    assert!(report.nothing.is_some() && report.start.is_none());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_compiles_nothing_for_a_gpu() {
    let text = warmup(&["devices.group=cuda:0"]);
    assert!(
        text.contains("nothing to do this build compiles nothing for `cuda:0`"),
        "{text}"
    );
}
