//! `pipe warmup` where there is no GPU.

use std::path::Path;
use std::process::Command;

use verl::pipe::cli::warmup::Warmup;

use crate::kit::{GRPO, Place};

/// Standard output of `pipe warmup` with the cache in `cache`; it must end well.
#[track_caller]
fn warmup(cache: &Path, words: &[&str]) -> String {
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .arg("warmup")
        .args(words)
        .env("VERL_CACHE_DIR", cache)
        .output()
        .expect("the executable runs");
    let told = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{told}");
    String::from_utf8(ran.stdout).expect("UTF-8")
}

#[test]
fn on_the_cpu_there_is_nothing_to_compile() {
    let place = Place::new();
    let file = place.path("p.toml");
    std::fs::write(&file, GRPO).expect("a file");
    let file = file.display().to_string();
    let cache = place.path("cache");
    let kept = match cfg!(feature = "kernel-cache") {
        true => cache.join("kernels").display().to_string(),
        false => "none: this build is without the feature `kernel-cache`".to_owned(),
    };
    assert_eq!(
        warmup(&cache, &[&file]),
        format!(
            "grpo_tiny on cpu\n  nothing to do this build compiles nothing for `cpu`\n  cache        {kept}\n"
        )
    );
    let told: Warmup = serde_json::from_str(&warmup(&cache, &[&file, "--json"])).expect("JSON");
    assert_eq!(told.pipeline, "grpo_tiny");
    assert_eq!((told.devices.as_str(), told.cache), ("cpu", kept));
    assert!(told.nothing.is_some() && told.start.is_none());
    // Nothing is written, and no run begins.
    assert!(!cache.exists());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_compiles_nothing_for_a_gpu() {
    let place = Place::new();
    let file = place.path("p.toml");
    std::fs::write(&file, GRPO).expect("a file");
    let file = file.display().to_string();
    let told = warmup(&place.path("cache"), &[&file, "devices.group=cuda:0"]);
    assert!(
        told.contains("nothing to do this build compiles nothing for `cuda:0`"),
        "{told}"
    );
}
