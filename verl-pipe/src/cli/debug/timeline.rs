//! `pipe debug timeline`: a step as it ran, as text and as a Chrome trace.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use verl_run::spans::TimelineLine;
use verl_trace::files::{TraceError, write_atomically};
use verl_trace::text::count;
use verl_view::timeline::{RecordedTimeline, StepChart, write_chrome};

use super::{Failure, SAME, write};

/// Arguments of `pipe debug timeline`.
#[derive(Debug, Clone, Args)]
pub struct TimelineArgs {
    /// Folder of the run; it may be in progress.
    #[arg(value_name = "RUN", required_unless_present = "dir")]
    pub run: Option<PathBuf>,
    /// The same, as the other commands take it.
    #[arg(long = "run", value_name = "DIR", conflicts_with = "run")]
    pub dir: Option<PathBuf>,
    /// Step to show; if omitted, the last recorded one.
    #[arg(long)]
    pub step: Option<u64>,
    /// Shows the last recorded step; the default.
    #[arg(long, conflicts_with = "step")]
    pub last: bool,
    /// Also writes the step to this file as a Chrome trace, which <https://ui.perfetto.dev> opens.
    #[arg(long, value_name = "FILE")]
    pub chrome: Option<PathBuf>,
    /// Writes all recorded steps to that file; prints none.
    #[arg(long, requires = "chrome", conflicts_with_all = ["step", "last"])]
    pub all: bool,
    /// Columns of the terminal.
    #[arg(long, value_name = "COLUMNS", default_value_t = 100)]
    pub width: usize,
}

pub(super) fn timeline(args: &TimelineArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    // The command line has one of them.
    let dir = args.run.as_ref().or(args.dir.as_ref());
    let dir = dir.map_or(Path::new("."), PathBuf::as_path);
    let timeline = RecordedTimeline::open(dir).map_err(Failure::Timeline)?;
    let lines = match args.all {
        true => timeline.all(),
        false => timeline.step(args.step).map(|line| vec![line]),
    };
    let lines = lines.map_err(Failure::Timeline)?;
    if !args.all {
        for line in &lines {
            let width = args.width;
            write(out, StepChart { line, width })?;
        }
    }
    if let Some(path) = &args.chrome {
        save(path, dir, &lines)?;
        let steps = count(lines.len() as u64, "step");
        let path = path.display();
        write(
            out,
            format_args!("wrote `{path}`, {steps}; open it at https://ui.perfetto.dev\n"),
        )?;
    }
    Ok(SAME)
}

fn save(path: &Path, dir: &Path, lines: &[TimelineLine]) -> Result<(), TraceError> {
    let failed = |e: std::io::Error| TraceError::file("write", path, e);
    // A file that exists there is what the run recorded.
    if let (Ok(file), Ok(dir)) = (path.canonicalize(), dir.canonicalize())
        && file.starts_with(dir)
    {
        let reason = "it is a file of the run; choose another name";
        return Err(TraceError::file("overwrite", path, reason));
    }
    write_atomically(path, |file| {
        let mut file = std::io::BufWriter::new(file);
        let name = format!("run {}", dir.display());
        let written = write_chrome(&name, lines, &mut file);
        written.and_then(|()| file.flush()).map_err(failed)
    })
}
