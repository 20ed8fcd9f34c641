//! Batches as bytes: a stream of Arrow IPC with one record batch.
//!
//! Encoding shares the buffers of the batch; of a slice, only its own rows are encoded. Decoding shares the buffer that the
//! bytes were received in.

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_ipc::writer::StreamEncoder;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, BatchError};
use verl_words::panics::catch_panic;

/// The bytes of `batch` in order, as buffers that it shares.
///
/// # Errors
/// When Arrow cannot write one of its types.
pub fn encode(batch: &Batch) -> Result<Vec<Buffer>, BatchError> {
    let record = batch.record();
    let mut encoder = StreamEncoder::try_new(&record.schema())?;
    let mut bytes = encoder.encode(record)?;
    // Without an end, Arrow does not read a batch without values.
    bytes.extend(encoder.finish()?);
    Ok(bytes)
}

/// The batch in `bytes`, which it shares if they are aligned to 64 bytes.
///
/// # Errors
/// When the bytes are not exactly one valid batch with row identities.
pub fn decode(bytes: Buffer) -> Result<Batch, BatchError> {
    // Arrow panics where its metadata point outside of the bytes.
    let decoded = catch_panic(|| record(bytes));
    let record = decoded.unwrap_or_else(|message| {
        Err(BatchError::Arrow(format!(
            "the bytes are damaged: {message}"
        )))
    });
    Batch::from_record(record?)
}

fn record(mut bytes: Buffer) -> Result<RecordBatch, BatchError> {
    let mut decoder = StreamDecoder::new();
    let record = decoder.decode(&mut bytes)?;
    let record = record
        .ok_or_else(|| BatchError::Arrow("the bytes end before the batch does".to_owned()))?;
    match bytes.as_slice() == END {
        true => Ok(record),
        false => Err(BatchError::Arrow(format!(
            "the batch is not followed by an end, but by {} bytes",
            bytes.len()
        ))),
    }
}

/// The end of a stream.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
