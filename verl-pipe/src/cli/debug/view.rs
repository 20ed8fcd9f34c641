//! `pipe debug view`: a run as one HTML page.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use verl_declare::registry::Registry;
use verl_run::interrupt::on_ctrl_c;
use verl_trace::files::{TraceError, write_atomically};
use verl_trace::text::count;
use verl_view::{Page, Server, ViewOptions, page};

use super::{Failure, RunArg, write};

/// Arguments of `pipe debug view`.
#[derive(Debug, Clone, Args)]
pub struct ViewArgs {
    /// The run; it may be in progress.
    #[command(flatten)]
    pub run: RunArg,
    /// File to write; `view.html` in the run folder by default.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Also serves the page on 127.0.0.1 until Ctrl-C; each reload reads the run again. Without PORT, uses any free
    /// port.
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "0")]
    pub serve: Option<u16>,
    /// Most samples shown token by token.
    #[arg(long, value_name = "N", default_value_t = ViewOptions::default().samples)]
    pub samples: usize,
    /// Most points of a curve.
    #[arg(long, value_name = "N", default_value_t = ViewOptions::default().points)]
    pub points: usize,
    /// Most steps with tables.
    #[arg(long, value_name = "N", default_value_t = ViewOptions::default().tables)]
    pub tables: usize,
}

pub(super) fn view(
    args: &ViewArgs,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let options = ViewOptions {
        samples: args.samples,
        points: args.points,
        tables: args.tables,
    };
    let dir = &args.run.dir;
    let made = page(dir, registry, &options)?;
    let path = args.out.clone().unwrap_or_else(|| dir.join("view.html"));
    let written = write_atomically(&path, |mut file| {
        file.write_all(made.html.as_bytes())
            .map_err(|e| TraceError::file("write", &path, e))
    });
    written.map_err(|mut error| {
        if let TraceError::File { reason, .. } = &mut error {
            reason.push_str("; use `--out FILE` to write the page elsewhere");
        }
        error
    })?;
    write(
        out,
        format_args!("wrote `{}`, {}\n", path.display(), summary(&made)),
    )?;
    for note in &made.notes {
        write(out, format_args!("note: {note}\n"))?;
    }
    let Some(port) = args.serve else {
        return Ok(0);
    };
    let server = Server::listen(port).map_err(Failure::Serve)?;
    on_ctrl_c(server.stopper()).map_err(Failure::Write)?;
    let address = server.address();
    write(
        out,
        format_args!("serving http://{address}/ until Ctrl-C; reload to read the run again\n"),
    )?;
    out.flush().map_err(Failure::Write)?;
    server.run(|| page(dir, registry, &options).map(|made| made.html));
    Ok(0)
}

fn summary(page: &Page) -> String {
    let size = match page.html.len() {
        bytes if bytes < 1 << 20 => format!("{} kB", bytes.div_ceil(1000)),
        bytes => format!("{:.1} MB", bytes as f64 / 1e6),
    };
    let parts = [
        count(page.curves as u64, "curve"),
        count(page.tables as u64, "table"),
        count(page.samples as u64, "sample"),
        match page.anomalies {
            1 => "1 anomaly".to_owned(),
            n => format!("{n} anomalies"),
        },
    ];
    format!("{size}: {}", parts.join(", "))
}
