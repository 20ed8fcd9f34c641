//! Runs that end before their target save their models.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use verl::pipe::batch::Batch;
use verl::pipe::pipe::{DataPipe, stage_fn};
use verl::pipe::plan::Plannable;
use verl::pipe::run::error::RunError;
use verl::pipe::run::runner::RunOptions;
use verl::pipe::run::trainer::{Trainer, TrainerOptions};
use verl::pipe::stage::{CancelToken, OnRowError, StageError, StageSpec};
use verl::pipe::trace::tap::{Tap, TapPoint};
use verl::prelude::keys::{REWARDS, SHAPED_REWARDS};

use crate::kit::{Finished, GRPO, Place, trainer};

fn status(dir: &Path) -> Value {
    let text = fs::read_to_string(dir.join("status.json")).expect("a status");
    serde_json::from_str(&text).expect("an object")
}

/// A pipeline with a custom stage before `advantages`, which fails in the third step.
fn with_a_late_fault(mut pipe: DataPipe) -> DataPipe {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .writes(SHAPED_REWARDS)
        .on_row_error(OnRowError::Stop);
    let at = pipe
        .stages
        .iter()
        .position(|stage| stage.name == "advantages");
    pipe = pipe.add_stage(
        "late",
        stage_fn(spec, |input, context| {
            if context.step == 3 {
                return Err(StageError::failed("row 401 has no answer"));
            }
            let rewards: Vec<Option<f32>> = input.get(&REWARDS)?.rows().collect();
            let mut output = input.rows_only();
            output.put(&SHAPED_REWARDS, rewards)?;
            context.emit(output)
        }),
    );
    let advantages = &mut pipe.stages[at.expect("the stage")];
    let (own, key) = (REWARDS.name(), SHAPED_REWARDS.name());
    advantages.rename.insert(own.to_owned(), key.to_owned());
    pipe
}

#[test]
fn an_error_in_the_third_step_costs_only_that_step() {
    let place = Place::new();
    let whole = place.train("whole", &["steps=2"]);
    let pipe = with_a_late_fault(place.grpo("run", &[]));
    let error = trainer(&pipe)
        .expect("a trainer")
        .train()
        .expect_err("a fault");
    assert!(matches!(error, RunError::Stage { step: 3, .. }), "{error}");
    let run = Finished {
        dir: place.path("run"),
    };
    assert_eq!(run.weights(), whole.weights());
    let written = status(&run.dir);
    assert_eq!(
        (&written["status"], &written["step"]),
        (&json!("failed"), &json!(2))
    );
    assert_eq!(written["saved"], json!(["actor"]));
    assert_eq!(run.metrics().len(), 3);
}

/// Cancels a run when the update of step 2 gets its rows.
struct AtUpdate(CancelToken);

impl Tap for AtUpdate {
    fn input(&self, point: TapPoint<'_>, _: &Batch) {
        if point.stage == "update" && point.step == 2 {
            self.0.cancel();
        }
    }
}

#[test]
fn a_run_that_is_cancelled_between_mini_batches_saves_a_whole_step() {
    let place = Place::new();
    let many = [
        "batch.mini_batch=1",
        "batch.epochs=2",
        "batch.micro_batch=4",
    ];
    let two = place.train("two", &[many.as_slice(), &["steps=2"]].concat());
    let cancel = CancelToken::default();
    let options = TrainerOptions {
        run: RunOptions {
            tap: Arc::new(AtUpdate(cancel.clone())),
            cancel,
            ..RunOptions::default()
        },
        ..TrainerOptions::default()
    };
    let plan = place.grpo("run", &many).plan().expect("a plan");
    let ended = Trainer::with_options(plan, options)
        .expect("a trainer")
        .train();
    assert!(
        matches!(ended, Err(RunError::Cancelled { .. })),
        "{ended:?}"
    );
    let run = Finished {
        dir: place.path("run"),
    };
    assert_eq!(run.weights(), two.weights());
    let written = status(&run.dir);
    assert_eq!(
        (&written["status"], &written["step"]),
        (&json!("cancelled"), &json!(2))
    );
    assert_eq!(written.get("partial"), None);
}

#[test]
fn an_unknown_model_to_save_is_reported_before_the_run() {
    let place = Place::new();
    let pipe = place.grpo("run", &["save=[\"acter\", \"ref\"]"]);
    let refusal = trainer(&pipe).err().expect("a refusal");
    for words in [
        "error[P009]: there is no model `acter`",
        "[run] save",
        "did you mean `actor`?",
    ] {
        assert!(refusal.contains(words), "{refusal}");
    }
    assert!(!place.path("run").exists());
}

/// The executable with [`GRPO`] and practically unlimited steps.
#[cfg(unix)]
fn endless(place: &Place) -> Child {
    let file = place.path("grpo.toml");
    fs::write(&file, GRPO).expect("a file");
    Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["train", &file.display().to_string(), "steps=1000000"])
        .arg(format!("run.dir={}", place.path("run").display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the executable")
}

/// Waits until the run reports that it has completed a step.
#[cfg(unix)]
fn await_step(dir: &Path) {
    let since = Instant::now();
    let written = || dir.join("status.json").is_file();
    let step = || written().then(|| status(dir)["step"].as_u64()).flatten();
    while step().is_none_or(|step| step == 0) {
        assert!(
            since.elapsed() < Duration::from_secs(120),
            "no step is reported"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether these tests, and so their child processes, ignore SIGHUP, as under `nohup`.
#[cfg(unix)]
fn ignores_hangup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_none_or(|mask| {
        !mask
            .trim()
            .ends_with(['0', '2', '4', '6', '8', 'a', 'c', 'e'])
    })
}

#[cfg(unix)]
#[test]
fn signals_end_a_run_cleanly() {
    for (signal, name) in [
        ("INT", "Ctrl-C"),
        ("TERM", "what schedulers send"),
        ("HUP", "what a closed terminal sends"),
    ] {
        if signal == "HUP" && ignores_hangup() {
            continue;
        }
        let place = Place::new();
        let mut child = endless(&place);
        let dir = place.path("run");
        await_step(&dir);
        assert_eq!(status(&dir)["status"], "running", "{name}");
        let kill = format!("kill -{signal} {}", child.id());
        let sent = Command::new("sh")
            .args(["-c", &kill])
            .status()
            .expect("a shell");
        assert!(sent.success(), "{name}");
        let ended = child.wait().expect("an end");
        assert_eq!(ended.code(), Some(130), "{name}");
        let written = status(&dir);
        assert_eq!(written["status"], "cancelled", "{name}");
        assert_eq!(written["saved"], json!(["actor"]));
        assert!(dir.join("model/actor/model.safetensors").is_file());
    }
}

#[cfg(unix)]
#[test]
fn versions_record_what_affects_the_bits() {
    let place = Place::new();
    let file = place.path("grpo.toml");
    fs::write(&file, GRPO).expect("a file");
    let run = format!("run.dir={}", place.path("run").display());
    let ended = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .args(["train", &file.display().to_string(), "steps=0", &run])
        .output()
        .expect("the executable");
    assert!(ended.status.success(), "{ended:?}");
    let summary = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(
        summary.contains("0 steps in 0.0 s") && !summary.contains('%'),
        "{summary}"
    );
    let text = fs::read_to_string(place.path("run/versions.json")).expect("versions");
    let versions: Value = serde_json::from_str(&text).expect("an object");
    let rustc = versions["rustc"].as_str().expect("a version");
    assert!(rustc.starts_with("rustc "), "{rustc}");
    for name in ["verl", "verl-pipe", "burn", "cubecl"] {
        let version = versions[name].as_str().expect("a version");
        assert!(version.split('.').count() >= 3, "{name} {version}");
    }
    let features = versions["processor"].as_array().expect("a list");
    let known = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    assert_eq!(features.is_empty(), !known, "{features:?}");
    let kernels = &versions["cpu_kernels"];
    assert_eq!(kernels["sums"], verl::models::registers::SUMS);
    assert_eq!(kernels["registers"], verl::models::registers::used().name());
    let library = versions["c_library"].as_str().expect("a name");
    let glibc = cfg!(all(target_os = "linux", target_env = "gnu"));
    assert_eq!(library.starts_with("glibc 2."), glibc, "{library}");
    // Values that the system does not report are left out.
    let cpu = versions["cpu"].as_object().expect("an object");
    for (part, value) in cpu {
        let is_size = part.ends_with("_kib");
        assert!(
            if is_size {
                value.is_u64()
            } else {
                value.is_string()
            },
            "{cpu:?}"
        );
    }
    let names = cfg!(target_arch = "x86_64");
    assert_eq!(
        cpu.contains_key("vendor") && cpu.contains_key("model"),
        names,
        "{cpu:?}"
    );
    // The trace records the same.
    let text = fs::read_to_string(place.path("run/trace/conditions.json")).expect("conditions");
    let conditions: Value = serde_json::from_str(&text).expect("an object");
    for part in [
        "arch",
        "c_library",
        "cpu",
        "cpu_kernels",
        "optimised",
        "os",
        "processor",
    ] {
        assert_eq!(conditions["machine"][part], versions[part], "{part}");
    }
}
