//! `timeline.jsonl` of a run folder, read.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use verl_run::spans::TimelineLine;
use verl_trace::replay::{InspectError, check_run_folder};
use verl_train::timeline_file::TIMELINE;

/// Number of ranges of steps that an error lists.
const MAX_RANGES: usize = 8;

/// Why a step of a timeline cannot be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TimelineError {
    /// Not a run folder.
    #[error(transparent)]
    Run(#[from] InspectError),
    /// The file does not exist or is empty.
    #[error("`{}` has no timeline, which a run writes after each step unless `trace.timeline_mb` is 0", .dir.display())]
    Empty {
        /// The run.
        dir: PathBuf,
    },
    /// A step that was not recorded.
    #[error("the timeline has no step {step}; it has {}; use one of them, or omit `--step` for the last", ranges(.steps))]
    NoStep {
        /// As given.
        step: u64,
        /// The recorded steps.
        steps: Vec<u64>,
    },
    /// The file cannot be read.
    #[error("cannot read `{}`: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error, or what is wrong with a line.
        reason: String,
    },
}

impl TimelineError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
    pub fn code(&self) -> &'static str {
        match self {
            TimelineError::Run(error) => error.code(),
            TimelineError::Empty { .. } | TimelineError::NoStep { .. } => "T015",
            TimelineError::File { .. } => "T003",
        }
    }
}

/// Steps in words: `step 3`, `steps 1 to 40, 44, 48`; only the last ranges if there are many.
fn ranges(steps: &[u64]) -> String {
    let runs = steps.chunk_by(|a, b| a + 1 == *b);
    let texts = runs.filter_map(|run| match run {
        [] => None,
        [one] => Some(one.to_string()),
        [first, last] => Some(format!("{first}, {last}")),
        [first, .., last] => Some(format!("{first} to {last}")),
    });
    let mut texts: Vec<String> = texts.collect();
    if texts.len() > MAX_RANGES {
        let left = texts.len() - MAX_RANGES;
        texts.drain(1..=left);
        texts.insert(1, "…".to_owned());
    }
    let s = if steps.len() == 1 { "" } else { "s" };
    format!("step{s} {}", texts.join(", "))
}

/// The number of a line's step.
#[derive(Deserialize)]
struct StepOf {
    step: u64,
}

/// The recorded steps of a run.
#[derive(Debug, Clone)]
pub struct RecordedTimeline {
    path: PathBuf,
    /// Each step and its line.
    lines: Vec<(u64, String)>,
}

impl RecordedTimeline {
    /// Reads the timeline of the run in `dir`, which may be in progress. A last line that is incomplete is left out: it
    /// is being written, or the process was killed.
    ///
    /// # Errors
    /// Not a run folder; a run without recorded steps; a file that cannot be read.
    pub fn open(dir: &Path) -> Result<RecordedTimeline, TimelineError> {
        check_run_folder(dir)?;
        let path = dir.join(TIMELINE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => {
                let reason = error.to_string();
                return Err(TimelineError::File { path, reason });
            }
        };
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut lines = Vec::new();
        for (at, line) in complete.lines().enumerate() {
            match serde_json::from_str::<StepOf>(line) {
                Ok(StepOf { step }) => lines.push((step, line.to_owned())),
                Err(error) => {
                    let reason = format!("line {}: {error}", at + 1);
                    return Err(TimelineError::File { path, reason });
                }
            }
        }
        match lines.is_empty() {
            true => Err(TimelineError::Empty {
                dir: dir.to_owned(),
            }),
            false => Ok(RecordedTimeline { path, lines }),
        }
    }

    /// The recorded steps, in ascending order.
    pub fn steps(&self) -> Vec<u64> {
        self.lines.iter().map(|(step, _)| *step).collect()
    }

    /// Step `step`, or the last one.
    ///
    /// # Errors
    /// A step that was not recorded; a damaged line.
    pub fn step(&self, step: Option<u64>) -> Result<TimelineLine, TimelineError> {
        let mut lines = self.lines.iter().rev();
        let found = lines.find(|line| step.is_none_or(|step| line.0 == step));
        let found = found.ok_or_else(|| TimelineError::NoStep {
            step: step.unwrap_or_default(),
            steps: self.steps(),
        });
        self.parse(&found?.1)
    }

    /// All recorded steps.
    ///
    /// # Errors
    /// A damaged line.
    pub fn all(&self) -> Result<Vec<TimelineLine>, TimelineError> {
        self.lines
            .iter()
            .map(|(_, line)| self.parse(line))
            .collect()
    }

    fn parse(&self, line: &str) -> Result<TimelineLine, TimelineError> {
        serde_json::from_str(line).map_err(|error| TimelineError::File {
            path: self.path.clone(),
            reason: error.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lines: &str) -> (tempfile::TempDir, Result<RecordedTimeline, TimelineError>) {
        let temp = tempfile::tempdir().expect("a folder");
        fs::write(temp.path().join("config.toml"), "").expect("a file");
        fs::write(temp.path().join(TIMELINE), lines).expect("a file");
        let read = RecordedTimeline::open(temp.path());
        (temp, read)
    }

    fn line(step: u64) -> String {
        let line = TimelineLine {
            step,
            ..TimelineLine::default()
        };
        serde_json::to_string(&line).expect("JSON")
    }

    #[test]
    fn steps_are_found_and_an_incomplete_line_is_left_out() {
        let text = format!("{}\n{}\n{{\"step\":7,", line(2), line(4));
        let timeline = run(&text).1.expect("a timeline");
        assert_eq!(timeline.steps(), [2, 4]);
        assert_eq!(timeline.step(None).expect("the last one").step, 4);
        assert_eq!(timeline.step(Some(2)).expect("a step").step, 2);
        assert_eq!(timeline.all().expect("all").len(), 2);
        let error = timeline.step(Some(3)).expect_err("not recorded");
        assert_eq!(
            (error.code(), error.to_string().as_str()),
            (
                "T015",
                "the timeline has no step 3; it has steps 2, 4; use one of them, or omit `--step` for the last"
            )
        );
    }

    #[test]
    fn a_missing_an_empty_and_a_damaged_file_are_errors() {
        let temp = tempfile::tempdir().expect("a folder");
        let error = RecordedTimeline::open(temp.path()).expect_err("no run");
        assert_eq!(error.code(), "T010");
        fs::write(temp.path().join("config.toml"), "").expect("a file");
        let error = RecordedTimeline::open(temp.path()).expect_err("no timeline");
        assert_eq!(error.code(), "T015");
        assert_eq!(run("").1.expect_err("no step").code(), "T015");
        let error = run(&format!("{}\nnothing\n", line(1)))
            .1
            .expect_err("damaged");
        assert!(
            error.code() == "T003" && error.to_string().contains("line 2: "),
            "{error}"
        );
        // A damaged line does not hide the others.
        let other = run(&format!("{}\n{{\"step\":2}}\n", line(1)))
            .1
            .expect("a timeline");
        assert!(other.step(Some(1)).is_ok());
        assert_eq!(other.step(None).expect_err("damaged").code(), "T003");
    }

    #[test]
    fn ranges_are_short() {
        assert_eq!(ranges(&[3]), "step 3");
        assert_eq!(ranges(&[1, 2, 3, 4, 8, 12, 13]), "steps 1 to 4, 8, 12, 13");
        let many: Vec<u64> = (0..20).map(|at| 3 * at).collect();
        assert_eq!(ranges(&many), "steps 0, …, 39, 42, 45, 48, 51, 54, 57");
    }
}
