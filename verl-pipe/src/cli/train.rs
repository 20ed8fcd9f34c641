//! `pipe train FILE [key=value…]`: runs a pipeline to its target step.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use crate::config::read_pipeline;
use crate::diagnostic::Diagnostic;
use crate::registry::Registry;
use crate::run::console::Console;
use crate::run::error::RunError;
use crate::run::interrupt::{CANCELLED_STATUS, cancel_on_ctrl_c};
use crate::run::runner::RunOptions;
use crate::run::trainer::{Trainer, TrainerOptions};
use crate::stage::CancelToken;

/// Arguments of `pipe train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// The pipeline file.
    pub file: PathBuf,
    /// Settings that replace those of the file, for example `seed=3`, `steps=20` or `run.dir=runs/second`.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

/// Runs the command. The exit status is 0 only when the target step was reached and models are saved; 1 when the
/// pipeline is faulty or the run failed; 130 when it was cancelled.
///
/// `versions` names further crates and their versions for `versions.json`.
pub fn train(args: &TrainArgs, registry: &Registry, versions: Vec<(String, String)>) -> i32 {
    let checked = read_pipeline(&args.file, &args.overrides, registry).and_then(|pipe| pipe.plan());
    let plan = match checked {
        Ok(plan) => plan,
        Err(findings) => return report(&findings),
    };
    let _ = report(&plan.warnings);
    let cancel = CancelToken::default();
    if let Err(error) = cancel_on_ctrl_c(cancel.clone()) {
        tracing::warn!("Ctrl-C will end the process at once: {error}");
    }
    let console = Console::new(plan.pipe.run.steps, plan.pipe.run.console_every);
    let options = TrainerOptions {
        run: RunOptions { cancel, ..RunOptions::default() },
        console: Some(console),
        versions,
    };
    let dir = plan.pipe.run.dir.clone();
    let ended = Trainer::with_options(plan, options).and_then(|mut trainer| trainer.train());
    match ended {
        Ok(_) => {
            let _ = writeln!(std::io::stdout(), "the run is in {}", dir.display());
            0
        }
        Err(error) => {
            say(&format!("error: {error}"));
            if matches!(error, RunError::Cancelled { .. }) { CANCELLED_STATUS } else { 1 }
        }
    }
}

fn report(findings: &[Diagnostic]) -> i32 {
    findings.iter().for_each(|finding| say(&format!("{finding}\n")));
    1
}

fn say(text: &str) {
    // Nothing can be done about a closed standard error.
    let _ = writeln!(std::io::stderr(), "{text}");
}
