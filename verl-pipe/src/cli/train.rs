//! `pipe train FILE [key=value…]`: runs a pipeline to its target step.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use verl_declare::registry::Registry;
use verl_plan::Plannable;
use verl_plan::look::Look;
use verl_rules::config::TraceConfig;
use verl_run::error::RunError;
use verl_run::interrupt::{CANCELLED_STATUS, cancel_on_ctrl_c};
use verl_run::runner::RunOptions;
use verl_train::console::Console;
use verl_train::timeline::Kernels;
use verl_train::trainer::{Trainer, TrainerOptions};
use verl_words::diagnostic::Diagnostic;
use verl_words::stage::CancelToken;

use super::{PipelineArgs, write_findings};
use crate::schema::pipeline_schema;

/// Arguments of `pipe train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// The pipeline.
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// What to record in full.
    #[command(flatten)]
    pub debug: DebugArgs,
}

/// What to record in full, in addition to the statistics of every run.
#[derive(Debug, Clone, Default, Args)]
pub struct DebugArgs {
    /// Records every step in full, within `trace.budget_mb`. Like all flags that record in full, it also writes
    /// `schema.json` into the run folder.
    #[arg(long, visible_alias = "debug-mode")]
    pub debug: bool,
    /// Records this step in full; can be repeated.
    #[arg(long = "debug-trace-step", value_name = "STEP")]
    pub steps: Vec<u64>,
    /// Records every STEPS-th step in full.
    #[arg(long = "debug-trace-every", value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    pub every: Option<u64>,
    /// Records only these stages, for example `generate,reward`.
    #[arg(
        long = "debug-trace-stages",
        value_name = "STAGES",
        value_delimiter = ','
    )]
    pub stages: Vec<String>,
}

impl DebugArgs {
    /// Adds the flags to the settings of the file. A flag that selects steps or stages narrows `--debug`.
    pub fn apply(&self, trace: &mut TraceConfig) {
        let named = !self.steps.is_empty() || self.every.is_some();
        if self.debug || named || !self.stages.is_empty() {
            trace.every = match self.every {
                Some(every) => Some(every),
                None if named => trace.every,
                // The file selects the steps.
                None if !self.debug && trace.captures() => trace.every,
                None => Some(1),
            };
            add(&mut trace.steps, &self.steps);
            add(&mut trace.stages, &self.stages);
        }
    }
}

/// Adds the items of a flag that the file does not contain.
fn add<T: Clone + PartialEq>(to: &mut Vec<T>, named: &[T]) {
    for name in named {
        if !to.contains(name) {
            to.push(name.clone());
        }
    }
}

/// Runs the command. The exit status is 0 only if the run reached the target step and saved its models; 1 if the
/// pipeline has errors or the run failed; 130 if it was cancelled.
///
/// `versions` lists further crates and their versions for `versions.json`; `kernels` reports the kernels that a layer
/// below the engine compiles, if there is one.
pub fn train(
    args: &TrainArgs,
    registry: &Registry,
    versions: Vec<(String, String)>,
    kernels: Option<Arc<dyn Kernels>>,
) -> u8 {
    let began = Instant::now();
    let checked = args.pipeline.read(registry).and_then(|mut pipe| {
        args.debug.apply(&mut pipe.trace);
        let look = Look {
            complete: true,
            ..Look::default()
        };
        pipe.check(&look).plan
    });
    let plan = match checked {
        Ok(plan) => plan,
        Err(findings) => {
            report(&findings);
            return 1;
        }
    };
    // Warnings that prevent the run are reported as the error that ends it.
    let harmless = plan.warnings().iter().filter(|w| w.when_run().is_none());
    let harmless: Vec<Diagnostic> = harmless.cloned().collect();
    if !harmless.is_empty() {
        report(&harmless);
    }
    let cancel = CancelToken::default();
    if let Err(error) = cancel_on_ctrl_c(cancel.clone()) {
        tracing::warn!("Ctrl-C will end the process immediately: {error}");
    }
    let console = Console::new(plan.pipe().run.steps, plan.pipe().run.console_every);
    let options = TrainerOptions {
        run: RunOptions {
            cancel,
            ..RunOptions::default()
        },
        console: Some(console),
        versions,
        schema: Some(pipeline_schema(registry)),
        began: Some(began),
        kernels,
        plan_warnings_shown: true,
        free_space: None,
    };
    let dir = plan.pipe().run.dir.clone();
    let ended = Trainer::with_options(plan, options).and_then(|mut trainer| trainer.train());
    match ended {
        Ok(_) => {
            let _ = writeln!(std::io::stdout(), "the run is in {}", dir.display());
            0
        }
        Err(error) => {
            match &error {
                RunError::Schedule(findings) => report(findings),
                error => say(&format!("error[{}]: {error}", error.code())),
            }
            // A folder that existed before belongs to another run; the folder of a run that never started is removed.
            if !matches!(error, RunError::FolderExists { .. }) && dir.exists() {
                say(&format!("the files of the run are in {}", dir.display()));
            }
            if matches!(error, RunError::Cancelled { .. }) {
                CANCELLED_STATUS
            } else {
                1
            }
        }
    }
}

fn report(findings: &[Diagnostic]) {
    // A closed standard error cannot be reported.
    let _ = write_findings(findings, &mut std::io::stderr());
}

fn say(text: &str) {
    // A closed standard error cannot be reported.
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::counting::Count;

    #[test]
    fn flags_select_steps_and_narrow_each_other() {
        let of = |debug: bool, steps: &[u64], every: Option<u64>, stages: &[&str]| {
            let mut trace = TraceConfig::default();
            DebugArgs {
                debug,
                steps: steps.to_vec(),
                every,
                stages: stages.iter().map(|name| (*name).to_owned()).collect(),
            }
            .apply(&mut trace);
            let steps: Vec<u64> = (1..=6).filter(|step| trace.captures_step(*step)).collect();
            (steps, trace.stages.len())
        };
        assert_eq!(of(false, &[], None, &[]), (vec![], 0));
        assert_eq!(of(true, &[], None, &[]), (vec![1, 2, 3, 4, 5, 6], 0));
        assert_eq!(of(true, &[5], None, &[]), (vec![5], 0));
        assert_eq!(of(false, &[5], Some(3), &["a"]), (vec![3, 5, 6], 1));
        assert_eq!(
            of(false, &[], None, &["a", "b"]),
            (vec![1, 2, 3, 4, 5, 6], 2)
        );

        // If the file selects steps, a flag that selects stages does not add others.
        let mut trace = TraceConfig {
            steps: vec![2],
            ..TraceConfig::default()
        };
        let stages = DebugArgs {
            stages: vec!["a".to_owned()],
            ..DebugArgs::default()
        };
        stages.apply(&mut trace);
        assert_eq!((trace.every, trace.steps), (None, vec![2]));

        // Items of the file are not added twice.
        let mut trace = TraceConfig {
            steps: vec![2],
            stages: vec!["a".to_owned()],
            ..TraceConfig::default()
        };
        let same = DebugArgs {
            steps: vec![2, 3, 3],
            stages: vec!["a".to_owned()],
            ..DebugArgs::default()
        };
        same.apply(&mut trace);
        assert_eq!(
            (trace.steps, trace.stages),
            (vec![2, 3], vec!["a".to_owned()])
        );
    }

    #[test]
    fn the_exit_status_shows_how_the_run_ended() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("count.toml");
        std::fs::write(&file, "name = \"count\"\n[[stages]]\nkind = \"count\"\n").unwrap();
        let registry = Registry::new().stage::<Count>();
        let run = |dir: &str, more: &[&str]| {
            let dir = temp.path().join(dir);
            let mut overrides = vec!["steps=3".to_owned(), format!("run.dir={}", dir.display())];
            overrides.extend(more.iter().map(|text| (*text).to_owned()));
            let pipeline = PipelineArgs {
                file: file.clone(),
                overrides,
            };
            train(
                &TrainArgs {
                    pipeline,
                    debug: DebugArgs::default(),
                },
                &registry,
                Vec::new(),
                None,
            )
        };
        let status =
            |dir: &str| std::fs::read_to_string(temp.path().join(dir).join("status.json")).unwrap();
        assert_eq!(run("a", &[]), 0);
        assert!(status("a").contains("\"finished\""));
        let start = std::fs::read_to_string(temp.path().join("a/start.json")).unwrap();
        let start: verl_run::records::StartFile = serde_json::from_str(&start).unwrap();
        assert!(start.check_s.is_some_and(|seconds| seconds > 0.0) && start.load_s > 0.0);
        assert!(start.stages.contains_key("count") && start.kernels.is_none());
        // The folder exists already.
        assert_eq!(run("a", &[]), 1);
        assert_eq!(run("b", &["count.fail_at=2"]), 1);
        assert!(status("b").contains("\"failed\"") && status("b").contains("no rows left"));
        assert_eq!(run("c", &["count.fail_att=2"]), 1);
        assert!(!temp.path().join("c").exists());
        let config = std::fs::read_to_string(temp.path().join("b/config.toml")).unwrap();
        assert!(config.contains("fail_at = 2"), "{config}");
        assert!(
            config.starts_with("#:schema ./config.schema.json\n"),
            "{config}"
        );
        assert!(temp.path().join("b/config.schema.json").is_file());
    }
}
