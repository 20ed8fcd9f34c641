//! Running a stage again on a recorded input, outside of any step.

use std::collections::VecDeque;
use std::sync::Arc;

use verl_words::batch::Batch;
use verl_words::stage::CancelToken;

use crate::channel::CallEnv;
use crate::error::RunError;
use crate::runner::Run;

/// The position of a call in its run; together with input and state it determines the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallPlace {
    /// Step of the run.
    pub step: u64,
    /// Steps of the run in all.
    pub steps: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Wave of a source's call, otherwise 0.
    pub wave: u64,
}

impl Run {
    /// Calls `stage` on `input` as in a step at `place`: split into the same calls, with the same deadlines. Rows whose
    /// failure the step would tolerate are left out.
    ///
    /// # Errors
    /// The error that would have ended the step.
    pub fn call_again(
        &mut self,
        stage: usize,
        place: CallPlace,
        input: &Batch,
    ) -> Result<Vec<Batch>, RunError> {
        let env = Arc::new(CallEnv {
            step: place.step,
            steps: place.steps,
            seed: place.seed,
            cancel: CancelToken::default(),
            deadline: self.deadline,
        });
        let mut units = VecDeque::from(self.units(stage, input));
        let mut emitted = Vec::new();
        while let Some(unit) = units.pop_front() {
            let rows = unit.num_rows().max(1) as u32;
            let own = self.schedule.plan().stages()[stage].spec().deadline;
            let deadline = own.map_or(self.deadline, |own| own.saturating_mul(rows));
            match self.call_isolated(stage, &env, place.wave, unit.clone(), deadline) {
                Ok(output) => emitted.extend(output.batches),
                Err(error @ RunError::Cancelled { .. }) => return Err(error),
                Err(error) if !self.schedule.tolerates_row_errors(stage) => return Err(error),
                Err(_) => {
                    let atoms = self.atoms(stage, &unit);
                    if atoms.len() > 1 {
                        atoms
                            .into_iter()
                            .rev()
                            .for_each(|atom| units.push_front(atom));
                    }
                }
            }
        }
        Ok(emitted)
    }
}
