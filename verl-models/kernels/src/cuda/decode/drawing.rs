//! How tokens are drawn from the logits of a step.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use cubecl::server::Handle;

use super::super::launch::{CudaKernel, Source};
use super::super::tensor::element;
use super::{Buffers, DeviceDecoder};

/// Shared by the drawing kernels.
const SHARED: [&str; 3] = [
    include_str!("../rowwise.cuh"),
    include_str!("../philox.cuh"),
    include_str!("../draw.cuh"),
];
static RACE: Source = Source::with_prefixes(SHARED, include_str!("../race.cu"));
static SAMPLE: Source = Source::with_prefixes(SHARED, include_str!("../sample.cu"));
pub(super) static ADVANCE: Source = Source::with_prefixes(SHARED, include_str!("../advance.cu"));

/// How tokens are drawn, the same for all rows.
#[derive(Debug, Clone, Default)]
pub struct Drawing {
    /// Divides logits; 0 is greedy.
    pub temperature: f64,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keeps tokens whose probability is at least this share of the most probable one's; 0 keeps all.
    pub min_p: f64,
    /// Forbids the ids of `eos` until this many tokens are drawn.
    pub min_new_tokens: usize,
    /// Ids that end a response.
    pub eos: Vec<i32>,
    /// Sequences of ids that end a response.
    pub stops: Vec<Vec<i32>>,
}

impl Drawing {
    fn races(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

/// Ids on a row's shortlist: the most, and the average (`philox.cuh`).
pub(super) const SHORTLIST: usize = 128;
const SHORTLIST_MEAN: u64 = 48;
/// Smallest vocabulary with shortlists: for smaller ones a shortlist would be a large part.
const SHORTLISTED_VOCABULARY: usize = 4096;

/// Blocks of the race that run at once.
const RACING: usize = 3 * 132;

/// Blocks that share a row's race: as many as run at once, because finishing a block costs as much as some thousand
/// ids.
pub(super) fn race_splits(rows: usize) -> usize {
    (RACING / rows).clamp(1, 32)
}

/// Most parts of races of up to `rows` rows.
pub(super) fn race_parts(rows: usize) -> usize {
    rows.max(RACING)
}

impl DeviceDecoder {
    /// The limit below which the complement of a word puts its id on a shortlist of this step; 0 if the step makes
    /// none.
    pub(super) fn shortlist_limit(&self) -> u64 {
        let vocabulary = self.shape.vocab;
        let races = self.drawing.races() && self.drawing.temperature > 0.0;
        if !races || vocabulary < SHORTLISTED_VOCABULARY || !self.makes_shortlists() {
            return 0;
        }
        (SHORTLIST_MEAN << 32) / vocabulary as u64
    }

    /// Draws a token of each live row.
    pub(super) fn draw(&self) {
        let (rows, drawing) = (self.rows, &self.drawing);
        let splits = race_splits(rows);
        let scalars = vec![
            rows as u64,
            self.shape.vocab as u64,
            splits as u64,
            drawing.eos.len() as u64,
            drawing.min_new_tokens as u64,
            drawing.top_k as u64,
            drawing.temperature.to_bits(),
            drawing.top_p.to_bits(),
            drawing.min_p.to_bits(),
            1.0f64.to_bits(),
            self.shortlist_limit(),
        ];
        let logits = &self.buffers.logits;
        let (client, book) = (&logits.client, &self.book);
        let kernel = |source: &'static Source, entry: &'static str, block: u32| {
            CudaKernel::new(source, entry, block).define("ELEMENT", element(self.dtype))
        };
        let inputs = [
            &logits.handle,
            &book.streams,
            &book.lengths,
            &book.states,
            &book.eos,
        ];
        let outputs = [&book.token, &book.sampling_log_prob, &book.log_prob];
        let joined = |middle: &[&Handle]| -> Vec<Handle> {
            let all = inputs.iter().chain(middle).chain(&outputs);
            all.map(|&handle| handle.clone()).collect()
        };
        let launch = |kernel: CudaKernel, grid: [u32; 3], handles: Vec<Handle>| {
            let handles: Vec<&Handle> = handles.iter().collect();
            // SAFETY: the logits have a row for each row of the step; `Buffers::new` and `Book::new` allocated the
            // other buffers for at least as many rows, parts and shortlisted ids.
            unsafe {
                kernel.launch(client, grid, &handles, scalars.clone());
            }
        };
        if !drawing.races() {
            let handles = joined(&[&book.seen]);
            launch(kernel(&SAMPLE, "sample", 512), [rows as u32, 1, 1], handles);
            return;
        }
        let grid = [splits as u32, rows as u32, 1];
        let Buffers {
            partial,
            ended,
            shortlist,
            shortlisted,
            ..
        } = &self.buffers;
        let handles = joined(&[partial, ended, shortlist, shortlisted]);
        launch(kernel(&RACE, "race", 256), grid, handles);
    }
}
