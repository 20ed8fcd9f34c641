//! Warnings and errors of a run, its stages and its models, whether or not the program has a [`tracing`] subscriber.
//!
//! All of them are [`tracing`] events of level `WARN` or `ERROR`. While a [`Trainer`](crate::trainer::Trainer)
//! works, the threads of its run also send these events to a listener of the run, which counts them and writes them to
//! `warnings.jsonl`. If the program has no subscriber, the listener also prints them on the trainer's console. Nothing
//! is installed globally, so the program can set up a subscriber before or after.

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::dispatcher::{DefaultGuard, Dispatch, set_default};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber};
use tracing::{Event, Level, Metadata};
use verl_run::dispatch::current_dispatch;
use verl_run::metrics::now;
use verl_run::records::{WarningLevel, WarningLine};

use crate::console::Console;
use crate::lines::Lines;

/// File of a run folder that contains them.
const FILE: &str = "warnings.jsonl";

/// Maximum number of lines of the file; later warnings are only counted in `status.json`.
const MAX_LINES: usize = 10_000;

/// A console that several threads write to.
pub(crate) type SharedConsole = Arc<Mutex<Console>>;

/// The warnings of one run.
#[derive(Clone)]
pub(crate) struct Warnings(Arc<Shared>);

struct Shared {
    count: AtomicU64,
    step: AtomicU64,
    console: Option<SharedConsole>,
    log: Mutex<WarningLog>,
}

/// Where warnings are written.
#[derive(Default)]
struct WarningLog {
    /// The run folder, once there is one.
    dir: Option<PathBuf>,
    /// Warnings reported before that.
    pending: Vec<WarningLine>,
    file: Option<Lines>,
    lines: usize,
}

impl Warnings {
    /// The warnings of a run that shows them on `console`.
    pub(crate) fn new(console: Option<SharedConsole>) -> Warnings {
        Warnings(Arc::new(Shared {
            count: AtomicU64::new(0),
            step: AtomicU64::new(0),
            console,
            log: Mutex::default(),
        }))
    }

    /// Writes all warnings to the run folder `dir` from now on, including earlier ones.
    pub(crate) fn write_into(&self, dir: &Path) {
        let mut log = self.log();
        log.dir = Some(dir.to_owned());
        for line in std::mem::take(&mut log.pending) {
            log.add(line);
        }
    }

    /// Number of warnings reported so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Sets the current step.
    pub(crate) fn at_step(&self, step: u64) {
        self.0.step.store(step, Ordering::Relaxed);
    }

    /// Counts and writes a warning.
    pub(crate) fn note(&self, level: WarningLevel, source: &str, message: &str) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        let line = WarningLine {
            step: self.0.step.load(Ordering::Relaxed),
            timestamp: now(),
            level,
            source: source.to_owned(),
            message: message.to_owned(),
        };
        self.log().add(line);
    }

    /// Prints a warning on the console, if there is one.
    pub(crate) fn show(&self, level: WarningLevel, message: &str) {
        let Some(console) = &self.0.console else {
            return;
        };
        // Findings of a plan already have a prefix.
        let word = match level {
            _ if message.starts_with("warning[") => "",
            WarningLevel::Warning => "warning: ",
            WarningLevel::Error => "error: ",
        };
        let mut console = console.lock().unwrap_or_else(PoisonError::into_inner);
        console.line(&format!("{word}{message}"));
    }

    /// A subscriber that receives events for this run and forwards them to the program's subscriber, if there is one.
    pub(crate) fn listener(&self) -> Dispatch {
        Dispatch::new(Listener {
            warnings: self.clone(),
            level: LevelFilter::WARN.max(LevelFilter::current()),
            program: OnceLock::new(),
            none: Dispatch::none(),
        })
    }

    fn log(&self) -> MutexGuard<'_, WarningLog> {
        // Nothing that can panic runs under the lock.
        self.0.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WarningLog {
    /// Writes a line. Failures are ignored: if the disk is full, writing the metrics fails as well and is reported.
    fn add(&mut self, mut line: WarningLine) {
        if self.lines > MAX_LINES {
            return;
        }
        let Some(dir) = &self.dir else {
            self.pending.push(line);
            return;
        };
        if self.file.is_none() {
            self.file = Lines::create(dir.join(FILE)).ok();
        }
        self.lines += 1;
        if self.lines > MAX_LINES {
            line.message = format!(
                "at most {MAX_LINES} warnings are listed; `status.json` counts all of them"
            );
        }
        if let Some(file) = &mut self.file {
            let _ = file.add(&line);
        }
    }
}

/// Makes `listener`, which was created by [`Warnings::listener`], the subscriber of this thread until the returned
/// guard is dropped. It forwards events to the thread's previous subscriber. The first such subscriber is kept
/// permanently, so that no span is passed from one subscriber to another.
pub(crate) fn set_listener(listener: &Dispatch) -> DefaultGuard {
    if let Some(own) = listener.downcast_ref::<Listener>()
        && own.program.get().is_none()
        && let Some(program) = current_dispatch().filter(|program| !program.is::<Listener>())
    {
        // Another thread may have set the same subscriber first.
        let _ = own.program.set(program);
    }
    set_default(listener)
}

/// The subscriber of a run's threads.
struct Listener {
    warnings: Warnings,
    level: LevelFilter,
    /// The program's own, once there is one.
    program: OnceLock<Dispatch>,
    none: Dispatch,
}

impl Listener {
    fn inner(&self) -> &Dispatch {
        self.program.get().unwrap_or(&self.none)
    }
}

/// Whether the listener of a run handles such events.
fn is_warning(metadata: &Metadata<'_>) -> bool {
    metadata.is_event() && *metadata.level() <= Level::WARN
}

impl Subscriber for Listener {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        let inner = self.inner().register_callsite(metadata);
        match is_warning(metadata) {
            true => Interest::always(),
            false => inner,
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_warning(metadata) || self.inner().enabled(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.inner().new_span(span)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.inner().record(span, values);
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.inner().record_follows_from(span, follows);
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        if is_warning(metadata) {
            let mut text = Text::default();
            event.record(&mut text);
            let level = match *metadata.level() {
                Level::ERROR => WarningLevel::Error,
                _ => WarningLevel::Warning,
            };
            let message = text.finish();
            self.warnings.note(level, metadata.target(), &message);
            // The program's own subscriber decides where to show it.
            if self.program.get().is_none() {
                self.warnings.show(level, &message);
            }
            // It was enabled only for this listener.
            if !self.inner().enabled(metadata) {
                return;
            }
        }
        self.inner().event(event);
    }

    fn enter(&self, span: &Id) {
        self.inner().enter(span);
    }

    fn exit(&self, span: &Id) {
        self.inner().exit(span);
    }

    fn clone_span(&self, span: &Id) -> Id {
        self.inner().clone_span(span)
    }

    fn try_close(&self, span: Id) -> bool {
        self.inner().try_close(span)
    }
}

/// The text of an event: its message, then its other fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn finish(self) -> String {
        match self.fields.is_empty() {
            true => self.message,
            false => format!(
                "{} ({})",
                self.message,
                self.fields.trim_start_matches(", ")
            ),
        }
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name} {value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use verl_run::dispatch::set_dispatch;

    use super::*;
    use crate::tests::trainer::Page;

    fn listening(console: bool) -> (Warnings, Dispatch, Page) {
        let page = Page::default();
        let shown = Console::to(Box::new(page.clone()), 5, 1);
        let warnings = Warnings::new(console.then(|| Arc::new(Mutex::new(shown))));
        let listener = warnings.listener();
        (warnings, listener, page)
    }

    fn messages(dir: &Path) -> Vec<(u64, WarningLevel, String)> {
        let text = std::fs::read_to_string(dir.join(FILE)).unwrap();
        let lines = text.lines().map(|line| {
            let line: WarningLine = serde_json::from_str(line).unwrap();
            (line.step, line.level, line.message)
        });
        lines.collect()
    }

    #[test]
    fn warnings_reach_the_folder_and_the_console_without_a_subscriber() {
        let temp = tempfile::tempdir().unwrap();
        let (warnings, listener, page) = listening(true);
        {
            let _guard = set_listener(&listener);
            tracing::warn!(row = 3, "reported before the folder");
            warnings.write_into(temp.path());
            warnings.at_step(7);
            tracing::error!("a disk is full");
            tracing::info!("not a warning");
            let _span = tracing::debug_span!("step").entered();
        }
        assert_eq!(warnings.count(), 2);
        assert_eq!(
            messages(temp.path()),
            [
                (
                    0,
                    WarningLevel::Warning,
                    "reported before the folder (row 3)".to_owned()
                ),
                (7, WarningLevel::Error, "a disk is full".to_owned()),
            ]
        );
        assert_eq!(
            page.text(),
            "warning: reported before the folder (row 3)\nerror: a disk is full\n"
        );
    }

    #[test]
    fn a_subscriber_of_the_program_gets_each_warning_once_and_the_console_none() {
        let temp = tempfile::tempdir().unwrap();
        let log = Page::default();
        let to = log.clone();
        let own = tracing_subscriber::fmt()
            .with_ansi(false)
            .without_time()
            .with_writer(move || to.clone())
            .finish();
        let (warnings, page) = tracing::subscriber::with_default(own, || {
            let (warnings, listener, page) = listening(true);
            warnings.write_into(temp.path());
            let _guard = set_listener(&listener);
            let on_another = current_dispatch();
            let thread = std::thread::spawn(move || {
                let _guard = set_dispatch(on_another.as_ref());
                tracing::warn!("from a thread");
            });
            thread.join().unwrap();
            tracing::info!("only for the log");
            (warnings, page)
        });
        assert_eq!(warnings.count(), 1);
        assert_eq!(page.text(), "");
        let log = log.text();
        assert_eq!(log.matches("from a thread").count(), 1, "{log}");
        assert_eq!(log.matches("only for the log").count(), 1, "{log}");
        assert_eq!(messages(temp.path()).len(), 1);
    }

    #[test]
    fn the_file_is_bounded_and_says_so() {
        let temp = tempfile::tempdir().unwrap();
        let (warnings, _, _) = listening(false);
        warnings.write_into(temp.path());
        for _ in 0..MAX_LINES + 50 {
            warnings.note(WarningLevel::Warning, "here", "again");
        }
        let messages = messages(temp.path());
        assert_eq!(messages.len(), MAX_LINES + 1);
        let (_, _, last) = messages.last().unwrap();
        assert!(last.contains("`status.json` counts"), "{last}");
        assert_eq!(warnings.count(), MAX_LINES as u64 + 50);
    }
}
