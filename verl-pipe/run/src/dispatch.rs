//! The [`tracing`] subscriber of a thread, for the threads that work for this thread.

use tracing::dispatcher::{DefaultGuard, Dispatch, set_default};
use tracing::subscriber::NoSubscriber;

/// The subscriber of this thread, for a thread that works for it. `None` if there is none, so that a subscriber that
/// the program sets up later receives the events of both threads.
pub fn current_dispatch() -> Option<Dispatch> {
    let listener = tracing::dispatcher::get_default(Dispatch::clone);
    (!listener.is::<NoSubscriber>()).then_some(listener)
}

/// Makes `listener` the subscriber of this thread until the returned guard is dropped.
pub fn set_dispatch(listener: Option<&Dispatch>) -> Option<DefaultGuard> {
    listener.map(set_default)
}
