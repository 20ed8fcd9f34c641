//! Records what the executable is built with, for `versions.json` of a run.

use std::path::Path;
use std::process::Command;

/// Crates whose version affects the bits of a result.
const CRATES: [&str; 2] = ["burn", "cubecl"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=Cargo.lock");
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let lock = std::fs::read_to_string(Path::new(&root).join("Cargo.lock")).unwrap_or_default();
    for name in CRATES {
        let version = locked(&lock, name).unwrap_or("unknown");
        println!("cargo::rustc-env=VERL_{}={version}", name.to_uppercase());
    }
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let output = Command::new(rustc).arg("--version").output();
    let version = output
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok());
    let version = version.as_deref().map_or("unknown", str::trim);
    println!("cargo::rustc-env=VERL_RUSTC={version}");
}

/// The version of a crate in the text of a lock file.
fn locked<'a>(lock: &'a str, name: &str) -> Option<&'a str> {
    let entry = format!("name = \"{name}\"\nversion = \"");
    let (_, rest) = lock.split_once(&entry)?;
    rest.split('"').next()
}
