//! What whoever runs a pipeline should know while it runs: every warning and error that a run, its stages and its models
//! tell, whether the program has a [`tracing`] subscriber or not.
//!
//! All of them are [`tracing`] events of level `WARN` or `ERROR`. While a [`Trainer`](crate::run::trainer::Trainer) works,
//! the threads of its run hand such events to a listener of the run too, which counts them, writes them to `warnings.jsonl`, and
//! shows them on the trainer's console, but only where the program has no subscriber: one that it has shows them itself.
//! Nothing is installed for the whole program, so it may set up a subscriber before or after.

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::dispatcher::{DefaultGuard, Dispatch, set_default};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, NoSubscriber, Subscriber};
use tracing::{Event, Level, Metadata};

use crate::run::console::Console;
use crate::run::lines::Lines;
use crate::run::metrics::now;
use crate::run::records::{WarningLevel, WarningLine};

/// File of a run folder that holds them.
const FILE: &str = "warnings.jsonl";

/// Lines of the file; what comes later is counted in `status.json` alone.
const MOST_LINES: usize = 10_000;

/// A console that several threads write to.
pub(crate) type SharedConsole = Arc<Mutex<Console>>;

/// The warnings of one run.
#[derive(Clone)]
pub(crate) struct Warnings(Arc<Shared>);

struct Shared {
    count: AtomicU64,
    step: AtomicU64,
    console: Option<SharedConsole>,
    book: Mutex<Book>,
}

/// Where warnings are written.
#[derive(Default)]
struct Book {
    /// The run folder, once there is one.
    dir: Option<PathBuf>,
    /// What was told before that.
    before: Vec<WarningLine>,
    file: Option<Lines>,
    lines: usize,
}

impl Warnings {
    /// Of a run that shows them on `console`.
    pub(crate) fn new(console: Option<SharedConsole>) -> Warnings {
        Warnings(Arc::new(Shared {
            count: AtomicU64::new(0),
            step: AtomicU64::new(0),
            console,
            book: Mutex::default(),
        }))
    }

    /// From here on they are written into the run folder `dir`, those that were told before too.
    pub(crate) fn write_into(&self, dir: &Path) {
        let mut book = self.book();
        book.dir = Some(dir.to_owned());
        for line in std::mem::take(&mut book.before) {
            book.add(line);
        }
    }

    /// How many were told.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Step `step` runs.
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
        self.book().add(line);
    }

    /// Shows a warning on the console, where there is one.
    pub(crate) fn show(&self, level: WarningLevel, message: &str) {
        let Some(console) = &self.0.console else {
            return;
        };
        // Findings of a plan say themselves what they are.
        let word = match level {
            _ if message.starts_with("warning[") => "",
            WarningLevel::Warning => "warning: ",
            WarningLevel::Error => "error: ",
        };
        let mut console = console.lock().unwrap_or_else(PoisonError::into_inner);
        console.line(&format!("{word}{message}"));
    }

    /// What hears events for this run and hands them on to the program's subscriber, where there is one.
    pub(crate) fn listener(&self) -> Dispatch {
        Dispatch::new(Listener {
            warnings: self.clone(),
            level: LevelFilter::WARN.max(LevelFilter::current()),
            program: OnceLock::new(),
            nobody: Dispatch::none(),
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Nothing that can panic runs under the lock.
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// Writes a line. A disk that refuses it refuses the metrics too, which tell that.
    fn add(&mut self, mut line: WarningLine) {
        if self.lines > MOST_LINES {
            return;
        }
        let Some(dir) = &self.dir else {
            self.before.push(line);
            return;
        };
        if self.file.is_none() {
            self.file = Lines::create(dir.join(FILE)).ok();
        }
        self.lines += 1;
        if self.lines > MOST_LINES {
            line.message = format!(
                "{MOST_LINES} warnings are listed at most; `status.json` counts those that follow"
            );
        }
        if let Some(file) = &mut self.file {
            let _ = file.add(&line);
        }
    }
}

/// Who hears the events of this thread, for a thread that works for it; `None` where nobody does, so that a subscriber
/// which the program sets up later hears both.
pub(crate) fn heard_by() -> Option<Dispatch> {
    let listener = tracing::dispatcher::get_default(Dispatch::clone);
    (!listener.is::<NoSubscriber>()).then_some(listener)
}

/// Has `listener` hear the events of this thread while what is given lives.
pub(crate) fn heard(listener: Option<&Dispatch>) -> Option<DefaultGuard> {
    listener.map(set_default)
}

/// Has `listener`, which is one of [`Warnings::listener`], hear the events of this thread while what is given lives. Whoever
/// heard them before hears them through it: the first such subscriber for good, so that no span goes from one to another.
pub(crate) fn hear(listener: &Dispatch) -> DefaultGuard {
    if let Some(own) = listener.downcast_ref::<Listener>()
        && own.program.get().is_none()
        && let Some(program) = heard_by().filter(|program| !program.is::<Listener>())
    {
        // Another thread may have been first, with the same one.
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
    nobody: Dispatch,
}

impl Listener {
    fn inner(&self) -> &Dispatch {
        self.program.get().unwrap_or(&self.nobody)
    }
}

/// Whether a run listens to events of this sort.
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
            let message = text.whole();
            self.warnings.note(level, metadata.target(), &message);
            // The program's own shows it where it likes.
            if self.program.get().is_none() {
                self.warnings.show(level, &message);
            }
            // It was let pass for this run's sake alone.
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
    fn whole(self) -> String {
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
        // Writing to a text cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name} {value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::trainer::Page;

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
            let _heard = hear(&listener);
            tracing::warn!(row = 3, "told before the folder");
            warnings.write_into(temp.path());
            warnings.at_step(7);
            tracing::error!("a disk is full");
            tracing::info!("nobody asks for this");
            let _span = tracing::debug_span!("step").entered();
        }
        assert_eq!(warnings.count(), 2);
        assert_eq!(
            messages(temp.path()),
            [
                (
                    0,
                    WarningLevel::Warning,
                    "told before the folder (row 3)".to_owned()
                ),
                (7, WarningLevel::Error, "a disk is full".to_owned()),
            ]
        );
        assert_eq!(
            page.text(),
            "warning: told before the folder (row 3)\nerror: a disk is full\n"
        );
    }

    #[test]
    fn a_subscriber_of_the_program_hears_each_once_and_the_console_is_left_alone() {
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
            let _heard = hear(&listener);
            let on_another = heard_by();
            let thread = std::thread::spawn(move || {
                let _heard = heard(on_another.as_ref());
                tracing::warn!("from a thread");
            });
            thread.join().unwrap();
            tracing::info!("for the log alone");
            (warnings, page)
        });
        assert_eq!(warnings.count(), 1);
        assert_eq!(page.text(), "");
        let log = log.text();
        assert_eq!(log.matches("from a thread").count(), 1, "{log}");
        assert_eq!(log.matches("for the log alone").count(), 1, "{log}");
        assert_eq!(messages(temp.path()).len(), 1);
    }

    #[test]
    fn the_file_is_bounded_and_says_so() {
        let temp = tempfile::tempdir().unwrap();
        let (warnings, _, _) = listening(false);
        warnings.write_into(temp.path());
        for _ in 0..MOST_LINES + 50 {
            warnings.note(WarningLevel::Warning, "here", "again");
        }
        let messages = messages(temp.path());
        assert_eq!(messages.len(), MOST_LINES + 1);
        let (_, _, last) = messages.last().unwrap();
        assert!(last.contains("`status.json` counts"), "{last}");
        assert_eq!(warnings.count(), MOST_LINES as u64 + 50);
    }
}
