//! `pipe warmup` where there is no GPU.

use std::process::Command;

use verl::pipe::cli::warmup::Warmup;

use crate::kit::{GRPO, Place};

/// Standard output of `pipe warmup` of a small pipeline, which must end well and leave nothing.
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
    let told = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{told}");
    assert!(!folder.join("runs").exists());
    String::from_utf8(ran.stdout).expect("UTF-8")
}

#[test]
fn on_the_cpu_there_is_nothing_to_compile() {
    assert_eq!(
        warmup(&[]),
        "grpo_tiny on cpu\n  nothing to do this build compiles nothing for `cpu`\n"
    );
    let told: Warmup = serde_json::from_str(&warmup(&["--json"])).expect("JSON");
    assert_eq!(told.pipeline, "grpo_tiny");
    assert_eq!(told.devices, "cpu");
    assert!(told.nothing.is_some() && told.start.is_none());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_compiles_nothing_for_a_gpu() {
    let told = warmup(&["devices.group=cuda:0"]);
    assert!(
        told.contains("nothing to do this build compiles nothing for `cuda:0`"),
        "{told}"
    );
}
