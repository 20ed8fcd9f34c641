//! Each station is a type: what was not scheduled cannot run, what was not checked cannot be scheduled.

use verl_pipe::pipe::DataPipe;
use verl_pipe::run::runner::RunOptions;

fn main() {
    let pipe = DataPipe::new("unchecked");
    let _ = pipe.schedule();
    if let Ok(plan) = pipe.plan() {
        let _ = plan.start(RunOptions::default());
    }
}
