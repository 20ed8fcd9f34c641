//! Ctrl-C, and SIGTERM and SIGHUP where they exist: the first signal asks the run to end, the second ends the process.

use std::io;

use verl_words::stage::CancelToken;

/// Exit status of a run that was cancelled: 128 plus the number of SIGINT.
pub const CANCELLED_STATUS: u8 = 130;

/// Makes Ctrl-C, SIGTERM and SIGHUP cancel `token`; a second signal ends the process immediately with
/// [`CANCELLED_STATUS`].
///
/// # Errors
/// If no thread or signal handler can be created.
pub fn cancel_on_ctrl_c(token: CancelToken) -> io::Result<()> {
    on_ctrl_c(move || {
        if token.is_cancelled() {
            #[expect(
                clippy::disallowed_methods,
                reason = "the user asked twice, so the process must not wait for threads"
            )]
            std::process::exit(CANCELLED_STATUS.into());
        }
        token.cancel();
        tracing::warn!(
            "ending the step and saving the models; press Ctrl-C again to exit immediately"
        );
    })
}

/// Makes Ctrl-C, SIGTERM and SIGHUP call `callback` on a separate thread, and do nothing else.
///
/// # Errors
/// If no thread or signal handler can be created.
pub fn on_ctrl_c(callback: impl Fn() + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut signals = {
        let _entered = runtime.enter();
        Signals::new()?
    };
    let wait = move || {
        runtime.block_on(async {
            while signals.next().await.is_ok() {
                callback();
            }
        });
    };
    std::thread::Builder::new()
        .name("ctrl-c".to_owned())
        .spawn(wait)
        .map(drop)
}

/// Signals that ask a run to end. Cluster schedulers and container runtimes send SIGTERM; a closed terminal sends
/// SIGHUP.
#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// `None` if the run must outlive its terminal.
    hangup: Option<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: if ignores_hangup() {
                None
            } else {
                Some(signal(SignalKind::hangup())?)
            },
        })
    }

    async fn next(&mut self) -> io::Result<()> {
        let Signals {
            interrupt,
            terminate,
            hangup,
        } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let one = tokio::select! {
            one = interrupt.recv() => one,
            one = terminate.recv() => one,
            one = hung_up => one,
        };
        one.ok_or_else(|| io::Error::other("no further signal can arrive"))
    }
}

/// Whether the process was started with SIGHUP ignored, as `nohup` does. True if that cannot be determined.
#[cfg(unix)]
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal 1 is the lowest bit.
    ignored.is_none_or(|mask| mask & 1 == 1)
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals)
    }

    async fn next(&mut self) -> io::Result<()> {
        tokio::signal::ctrl_c().await
    }
}
