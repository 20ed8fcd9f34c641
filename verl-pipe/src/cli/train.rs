//! `pipe train FILE [key=value…]`: runs a pipeline to its target step.

use std::io::Write;

use super::{PipelineArgs, write_findings};
use crate::diagnostic::Diagnostic;
use crate::registry::Registry;
use crate::run::console::Console;
use crate::run::error::RunError;
use crate::run::interrupt::{CANCELLED_STATUS, cancel_on_ctrl_c};
use crate::run::runner::RunOptions;
use crate::run::trainer::{Trainer, TrainerOptions};
use crate::stage::CancelToken;

/// Runs the command. The exit status is 0 only when the target step was reached and models are saved; 1 when the
/// pipeline is faulty or the run failed; 130 when it was cancelled.
///
/// `versions` names further crates and their versions for `versions.json`.
pub fn train(args: &PipelineArgs, registry: &Registry, versions: Vec<(String, String)>) -> u8 {
    let checked = args.read(registry).and_then(|pipe| pipe.plan());
    let plan = match checked {
        Ok(plan) => plan,
        Err(findings) => {
            report(&findings);
            return 1;
        }
    };
    if !plan.warnings.is_empty() {
        report(&plan.warnings);
    }
    let cancel = CancelToken::default();
    if let Err(error) = cancel_on_ctrl_c(cancel.clone()) {
        tracing::warn!("Ctrl-C will end the process at once: {error}");
    }
    let console = Console::new(plan.pipe.run.steps, plan.pipe.run.console_every);
    let options = TrainerOptions {
        run: RunOptions {
            cancel,
            ..RunOptions::default()
        },
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
            if matches!(error, RunError::Cancelled { .. }) {
                CANCELLED_STATUS
            } else {
                1
            }
        }
    }
}

fn report(findings: &[Diagnostic]) {
    // Nothing can be done about a closed standard error.
    let _ = write_findings(findings, &mut std::io::stderr());
}

fn say(text: &str) {
    // Nothing can be done about a closed standard error.
    let _ = writeln!(std::io::stderr(), "{text}");
}
