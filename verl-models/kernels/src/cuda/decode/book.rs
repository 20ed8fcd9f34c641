//! The state of the rows: buffers that the kernels of a step update, and that the host fills and reads every few steps.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use cubecl::server::Handle;

use super::super::launch::CudaKernel;
use super::super::tensor::{CubeTensor, element, integers};
use super::drawing::ADVANCE;
use super::{DeviceDecoder, Drawing, Sizes};

/// The position of a row that attends to nothing.
const INACTIVE: i32 = -1;
/// Up to this many responses are read one by one.
const FEW: usize = 16;

/// The state of a row, by the kernels' numbers.
pub mod state {
    /// Still decoding.
    pub const LIVE: i32 = 0;
    /// Ended with an end-of-sequence id.
    pub const EOS: i32 = 1;
    /// Ended with a stop sequence.
    pub const STOP: i32 = 2;
    /// Reached its limit.
    pub const LENGTH: i32 = 3;
}

/// A row that begins: the first step gets its last prompt token, the others are in the cache.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// The row.
    pub row: usize,
    /// The last token of its prompt.
    pub token: u32,
    /// Position of this token.
    pub position: usize,
    /// Most tokens of the response.
    pub limit: usize,
    /// Words of its random stream.
    pub stream: [u32; 4],
}

/// The state of the rows on the device.
pub(super) struct Book {
    pub table: Handle,
    pub streams: Handle,
    pub token: Handle,
    pub positions: Handle,
    pub lengths: Handle,
    pub states: Handle,
    pub limits: Handle,
    pub seen: Handle,
    pub eos: Handle,
    pub stops: Handle,
    pub sampling_log_prob: Handle,
    pub log_prob: Handle,
    pub tokens: Handle,
    pub sampling_log_probs: Handle,
    pub log_probs: Handle,
}

/// What the host reads every few steps.
pub struct RowStates {
    /// State of each row; see [`state`].
    pub states: Vec<i32>,
    /// Tokens of each row's response.
    pub lengths: Vec<i32>,
}

/// The response of a row.
pub struct Response {
    /// Its ids.
    pub tokens: Vec<i32>,
    /// Log-probs of the ids under the distribution they were drawn from, in nats.
    pub sampling_log_probs: Vec<f32>,
    /// Log-probs of the ids under the model, in nats.
    pub log_probs: Vec<f32>,
}

impl DeviceDecoder {
    /// Does the bookkeeping for the drawn tokens.
    pub(super) fn advance(&self) {
        let (book, drawing) = (&self.book, &self.drawing);
        // SAFETY: `Book::new` allocated the buffers for at least as many rows, and the lists of tokens have the
        // stated numbers; a row's limit is at most the length of its response's buffers.
        unsafe {
            CudaKernel::new(&ADVANCE, "advance", 32)
                .define("ELEMENT", element(self.dtype))
                .launch(
                    &self.embedding.client,
                    [self.rows.div_ceil(32) as u32, 1, 1],
                    &[
                        &book.token,
                        &book.sampling_log_prob,
                        &book.log_prob,
                        &book.eos,
                        &book.stops,
                        &book.limits,
                        &book.lengths,
                        &book.positions,
                        &book.states,
                        &book.seen,
                        &book.tokens,
                        &book.sampling_log_probs,
                        &book.log_probs,
                    ],
                    vec![
                        self.rows as u64,
                        self.sizes.new_tokens as u64,
                        self.shape.vocab as u64,
                        drawing.eos.len() as u64,
                        drawing.stops.len() as u64,
                        self.stop_width as u64,
                        0,
                        0,
                    ],
                );
        }
    }

    /// Starts rows that are inactive and have their blocks.
    ///
    /// # Errors
    /// The device's error.
    pub fn start(&mut self, starts: &[Start]) -> Result<(), String> {
        let book = &self.book;
        let client = &self.embedding.client;
        let handles = [
            &book.token,
            &book.positions,
            &book.lengths,
            &book.states,
            &book.limits,
        ];
        let mut columns = Vec::new();
        for bytes in read(client, &handles)? {
            columns.push(integers_of(&bytes));
        }
        let [token, positions, lengths, states, limits] = columns.as_mut_slice() else {
            return Err(
                "the device returned a different number of buffers than requested".to_owned(),
            );
        };
        let mut streams = integers_of(&read(client, &[&book.streams])?.concat());
        for start in starts {
            let fits = start.limit <= self.sizes.new_tokens
                && start.position + start.limit <= self.sizes.tokens;
            assert!(
                fits,
                "the response of row {} is longer than its buffers",
                start.row
            );
            token[start.row] = start.token as i32;
            positions[start.row] = start.position as i32;
            lengths[start.row] = 0;
            states[start.row] = state::LIVE;
            limits[start.row] = start.limit as i32;
            let words = start.stream.map(|word| word as i32);
            streams[4 * start.row..4 * start.row + 4].copy_from_slice(&words);
        }
        for (handle, column) in handles.into_iter().zip(&columns) {
            write(client, handle, column);
        }
        write(client, &book.streams, &streams);
        write(client, &book.table, &self.pool.table(self.blocks));
        Ok(())
    }

    /// Moves the rows of `kept` to the front, in this order, and deactivates all others.
    ///
    /// # Errors
    /// The device's error.
    pub(super) fn keep(&self, kept: &[usize]) -> Result<(), String> {
        let book = &self.book;
        let client = &self.embedding.client;
        let columns = [
            (&book.token, 0),
            (&book.lengths, 0),
            (&book.limits, 0),
            (&book.positions, INACTIVE),
            (&book.states, state::LENGTH),
            (&book.streams, 0),
            (&book.tokens, 0),
            (&book.sampling_log_probs, 0),
            (&book.log_probs, 0),
        ];
        let read = read(client, &columns.map(|(handle, _)| handle))?;
        for ((handle, rest), bytes) in columns.into_iter().zip(read) {
            // Floats are moved as their bits too.
            let old = integers_of(&bytes);
            let width = old.len() / self.sizes.rows;
            let mut new = vec![rest; old.len()];
            for (row, &from) in kept.iter().enumerate() {
                let own = &old[from * width..(from + 1) * width];
                new[row * width..(row + 1) * width].copy_from_slice(own);
            }
            write(client, handle, &new);
        }
        write(client, &book.table, &self.pool.table(self.blocks));
        Ok(())
    }

    /// Deactivates rows that have ended, so that they attend to nothing, and frees their blocks.
    ///
    /// # Errors
    /// The device's error.
    pub fn deactivate(&mut self, ended: &[usize]) -> Result<(), String> {
        let client = &self.embedding.client;
        let mut positions = integers_of(&read(client, &[&self.book.positions])?.concat());
        for &row in ended {
            positions[row] = INACTIVE;
            self.pool.release(row);
        }
        write(client, &self.book.positions, &positions);
        Ok(())
    }

    /// The states and lengths of the rows.
    ///
    /// # Errors
    /// The device's error.
    pub fn row_states(&self) -> Result<RowStates, String> {
        let client = &self.embedding.client;
        let read = read(client, &[&self.book.states, &self.book.lengths])?;
        Ok(RowStates {
            states: integers_of(&read[0]),
            lengths: integers_of(&read[1]),
        })
    }

    /// Responses of rows, as pairs of a row and its number of tokens.
    ///
    /// # Errors
    /// The device's error.
    pub fn responses(&self, rows: &[(usize, usize)]) -> Result<Vec<Response>, String> {
        let book = &self.book;
        let pitch = 4 * self.sizes.new_tokens;
        // A few rows are read one by one: a buffer of all grows with the longest response.
        let few = rows.len() <= FEW;
        let part = |handle: &Handle, row: usize| {
            let before = (row * pitch) as u64;
            // Without the buffer's padding, which the handle already excludes.
            let behind = handle.size_in_used() - before - pitch as u64;
            handle.clone().offset_start(before).offset_end(behind)
        };
        let all = [&book.tokens, &book.sampling_log_probs, &book.log_probs];
        let handles: Vec<Handle> = if few {
            let parts = rows.iter().flat_map(|&(row, _)| all.map(|b| part(b, row)));
            parts.collect()
        } else {
            all.map(Handle::clone).into()
        };
        let read = read(&self.embedding.client, &handles.iter().collect::<Vec<_>>())?;
        let response = |(at, &(row, length)): (usize, &(usize, usize))| {
            let (buffers, start) = if few {
                (&read[3 * at..3 * at + 3], 0)
            } else {
                (&read[..], row * pitch)
            };
            let own = |index: usize| &buffers[index][start..start + 4 * length];
            Response {
                tokens: integers_of(own(0)),
                sampling_log_probs: floats_of(own(1)),
                log_probs: floats_of(own(2)),
            }
        };
        Ok(rows.iter().enumerate().map(response).collect())
    }
}

fn read(client: &cubecl::client::Client, handles: &[&Handle]) -> Result<Vec<Vec<u8>>, String> {
    let handles = handles.iter().map(|&handle| handle.clone()).collect();
    let bytes = client.read(handles).map_err(|error| error.to_string())?;
    Ok(bytes.iter().map(|bytes| bytes.to_vec()).collect())
}

fn write(client: &cubecl::client::Client, handle: &Handle, values: &[i32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    client.write(handle, burn::tensor::Bytes::from_bytes_vec(bytes));
}

fn integers_of(bytes: &[u8]) -> Vec<i32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| i32::from_le_bytes(word)).collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

impl Book {
    pub fn new(sizes: Sizes, blocks: usize, drawing: &Drawing, like: &CubeTensor) -> Self {
        let rows = sizes.rows;
        let column = |value: i32| integers(like, &vec![value; rows]);
        let some = |values: &[i32]| integers(like, if values.is_empty() { &[-1] } else { values });
        let width = drawing.stops.iter().map(Vec::len).max().unwrap_or(0);
        let stops: Vec<i32> = drawing
            .stops
            .iter()
            .flat_map(|stop| vec![-1; width - stop.len()].into_iter().chain(stop.clone()))
            .collect();
        let responses = || like.client.empty(rows * sizes.new_tokens * 4);
        Book {
            table: integers(like, &vec![0; rows * blocks]),
            streams: integers(like, &vec![0; 4 * rows]),
            token: column(0),
            positions: column(INACTIVE),
            lengths: column(0),
            states: column(state::LENGTH),
            limits: column(0),
            // Only a penalty reads it, and this engine does not support rollouts with one.
            seen: integers(like, &[0]),
            eos: some(&drawing.eos),
            stops: some(&stops),
            sampling_log_prob: column(0),
            log_prob: column(0),
            tokens: responses(),
            sampling_log_probs: responses(),
            log_probs: responses(),
        }
    }
}
