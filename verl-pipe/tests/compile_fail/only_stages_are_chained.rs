//! The operator joins stages, nothing else.

use verl_pipe::chain::{IntoStage, stage_fn};
use verl_pipe::keys::PROMPTS;
use verl_pipe::stage::StageSpec;

fn main() {
    let reader = || stage_fn(StageSpec::new().reads(PROMPTS), |batch, ctx| ctx.emit(batch));
    let _ = reader().named("first") >> reader().named("second") >> PROMPTS;
}
