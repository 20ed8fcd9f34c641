//! A key knows the type of its column.

use verl_pipe::batch::{Batch, BatchError, RaggedColumn};
use verl_pipe::keys::{RESPONSES, REWARDS};

fn main() -> Result<(), BatchError> {
    let mut batch = Batch::with_rows(&[]);
    batch.put(&REWARDS, vec!["good", "bad"])?;
    batch.put(&RESPONSES, RaggedColumn::<f32>::new())?;
    let _: &[f32] = batch.get(&RESPONSES)?.row(0);
    Ok(())
}
