//! What rows are at: buffers that the kernels of a step keep, and that the host fills and reads every few steps.

use cubecl::server::Handle;

use super::super::launch::CudaKernel;
use super::super::tensor::{CubeTensor, element, integers};
use super::drawing::ADVANCE;
use super::{DeviceDecoder, Drawing, Sizes};

/// The position of a row that attends to nothing.
const AT_REST: i32 = -1;

/// What a row is at; the kernels' numbers.
pub(crate) mod state {
    /// Goes on.
    pub const LIVE: i32 = 0;
    /// Ended with an end-of-sequence id.
    pub const EOS: i32 = 1;
    /// Ended with a sequence of ids.
    pub const STOP: i32 = 2;
    /// Reached its limit.
    pub const LENGTH: i32 = 3;
}

/// A row that begins: its last prompt token is fed, the others are in the cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub row: usize,
    pub token: u32,
    pub position: usize,
    pub limit: usize,
    pub stream: [u32; 4],
}

/// What rows are at, on the device.
pub(super) struct Book {
    pub table: Handle,
    pub streams: Handle,
    pub token: Handle,
    pub positions: Handle,
    pub lengths: Handle,
    pub states: Handle,
    pub limits: Handle,
    pub live: Handle,
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
pub(crate) struct Standing {
    pub states: Vec<i32>,
    pub lengths: Vec<i32>,
}

/// Responses of all rows, `[R, new_tokens]` each.
pub(crate) struct Responses {
    pub tokens: Vec<i32>,
    pub sampling_log_probs: Vec<f32>,
    pub log_probs: Vec<f32>,
}

impl DeviceDecoder {
    /// Books what was drawn.
    pub(super) fn advance(&self) {
        let (book, drawing) = (&self.book, &self.drawing);
        CudaKernel::new(&ADVANCE, "advance", 1024)
            .define("ELEMENT", element(self.dtype))
            .launch(
                &self.embedding.client,
                [1, 1, 1],
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
                    &book.live,
                ],
                vec![
                    self.sizes.rows as u64,
                    self.sizes.new_tokens as u64,
                    self.config.vocab_size as u64,
                    drawing.eos.len() as u64,
                    drawing.stops.len() as u64,
                    self.stop_width as u64,
                    0,
                    0,
                ],
            );
    }

    /// Begins rows; all of them are at rest.
    ///
    /// # Errors
    /// What the device says.
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
            return Err("the device gave back other buffers than were asked for".to_owned());
        };
        let mut streams = integers_of(&read(client, &[&book.streams])?.concat());
        for start in starts {
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
        Ok(())
    }

    /// Puts rows to rest that have ended, so that they attend to nothing.
    ///
    /// # Errors
    /// What the device says.
    pub fn rest(&mut self, ended: &[usize]) -> Result<(), String> {
        let client = &self.embedding.client;
        let mut positions = integers_of(&read(client, &[&self.book.positions])?.concat());
        for &row in ended {
            positions[row] = AT_REST;
        }
        write(client, &self.book.positions, &positions);
        Ok(())
    }

    /// Where the rows are.
    ///
    /// # Errors
    /// What the device says.
    pub fn standing(&self) -> Result<Standing, String> {
        let client = &self.embedding.client;
        let read = read(client, &[&self.book.states, &self.book.lengths])?;
        Ok(Standing {
            states: integers_of(&read[0]),
            lengths: integers_of(&read[1]),
        })
    }

    /// What was drawn.
    ///
    /// # Errors
    /// What the device says.
    pub fn responses(&self) -> Result<Responses, String> {
        let book = &self.book;
        let handles = [&book.tokens, &book.sampling_log_probs, &book.log_probs];
        let read = read(&self.embedding.client, &handles)?;
        Ok(Responses {
            tokens: integers_of(&read[0]),
            sampling_log_probs: floats_of(&read[1]),
            log_probs: floats_of(&read[2]),
        })
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
        let table: Vec<i32> = (0..(rows * blocks) as i32).collect();
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
            table: integers(like, &table),
            streams: integers(like, &vec![0; 4 * rows]),
            token: column(0),
            positions: column(AT_REST),
            lengths: column(0),
            states: column(state::LENGTH),
            limits: column(0),
            live: integers(like, &[0]),
            // Only a penalty reads it, and such rollouts are not made here.
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
