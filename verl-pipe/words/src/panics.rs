//! Panics of user code as errors: a stage, a data set or a rule that panics ends its call, not the program.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether [`catch_panic`] is running on this thread, so that a panic becomes an error.
    static IN_CATCH: Cell<bool> = const { Cell::new(false) };
    /// File and line of the most recent panic that [`catch_panic`] caught on this thread.
    static PANICKED_AT: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Message and location of the most recent other panic on this thread.
    static PANICKED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Message and location of the panic that is unwinding this thread, unless [`catch_panic`] reports it.
pub fn unwinding_panic() -> Option<String> {
    let text = PANICKED.take();
    text.filter(|_| std::thread::panicking())
}

/// Installs a panic hook that does not print panics that [`catch_panic`] catches: the error of the run reports them with their location,
/// and Rust's message would disturb the progress bar. Other panics are printed as before.
fn silence_stage_panics() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let place = info
                .location()
                .map(|at| format!("{}:{}", at.file(), at.line()));
            if !IN_CATCH.get() {
                let text = panic_message(info.payload());
                let place = place.map_or(String::new(), |at| format!(" (at {at})"));
                PANICKED.set(Some(format!("{text}{place}")));
                return usual(info);
            }
            PANICKED_AT.set(place);
        }));
    });
}

/// Returns the result of `work`, or the message and location of its panic.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    silence_stage_panics();
    let before = IN_CATCH.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    IN_CATCH.set(before);
    result.map_err(|payload| {
        let message = panic_message(payload.as_ref());
        let place = PANICKED_AT.take();
        let place = place.map_or(String::new(), |at| format!(" (at {at})"));
        format!("{message}{place}")
    })
}

/// The message of a panic.
fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
