//! `pipe worker`: the worker process of a run, which only a run starts.

use verl_declare::registry::Registry;
use verl_run::worker::run_worker;
use verl_wire::child;

/// Argument with which the executable is started as a worker.
const ARGUMENT: &str = "worker";

/// Declares that this executable can be started as a worker.
pub fn register() {
    child::register(&[ARGUMENT]);
}

/// Serves a device group of the run that started this process, and returns the exit code; 2 if no run did.
pub fn worker(registry: Registry) -> u8 {
    u8::try_from(run_worker(|| registry)).unwrap_or(1)
}
