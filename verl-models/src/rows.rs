//! Arranges ragged rows into padded model calls: checks, call sizes, positions of response tokens.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData};
use verl_kernels::device::DeviceKind;

use crate::model::{ModelError, ScoreRow};

/// Tokens whose logits are in memory at once while training.
pub(crate) const TRAIN_CHUNK: usize = 256;

/// Lengths are padded to a multiple of an eighth of the next power of two, or of this if that is larger.
const MIN_STEP: usize = 16;

/// Longest sequence of padding in a packed call, so that attention over it is cheap.
const MAX_FILLER: usize = 256;

/// Sizes of calls without gradient. They are constants of the device, never of the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CallLimits {
    /// Approximate tokens per call; the number of rows depends only on this and the width.
    tokens: usize,
    /// Maximum rows per call.
    rows: usize,
    /// Maximum tokens per product with the head.
    chunk: usize,
    /// Approximate tokens per packed call.
    packed: usize,
    /// Whether packed calls, and their products with the head, are padded to a fixed size. This is needed where the
    /// order of additions depends on the sizes of operands. On the CPU it does not; see [`kernels`](verl_kernels).
    fills: bool,
}

impl CallLimits {
    /// Calls run in parallel and contain a few short rows or one long row: enough for products to be efficient, but few
    /// enough that the padding of a single row is cheap.
    pub(crate) const CPU: CallLimits = CallLimits {
        tokens: 256,
        rows: 16,
        chunk: 64,
        packed: 1024,
        fills: false,
    };

    /// Large calls: otherwise a GPU is idle, and rows of padding are nearly free.
    pub(crate) const GPU: CallLimits = CallLimits {
        tokens: 16_384,
        rows: 64,
        chunk: 256,
        packed: 16_384,
        fills: true,
    };

    /// The sizes for this device.
    pub(crate) fn of(device: &Device) -> CallLimits {
        CallLimits::named(!DeviceKind::of(device).is_host())
    }

    /// The sizes for a GPU or the CPU.
    pub(crate) fn named(on_gpu: bool) -> CallLimits {
        if on_gpu {
            CallLimits::GPU
        } else {
            CallLimits::CPU
        }
    }

    /// Approximate tokens of the calls that are in memory at once; on the CPU, calls run in parallel on `CORES` cores.
    pub(crate) fn call_tokens(&self) -> usize {
        const CORES: usize = 16;
        if *self == CallLimits::CPU {
            self.packed * CORES
        } else {
            self.packed
        }
    }

    /// Tokens of each product with the head in a packed call, and of all products, for `response` response tokens.
    pub(crate) fn packed_product(&self, response: usize) -> [usize; 2] {
        if self.fills {
            [self.chunk, response.next_multiple_of(self.chunk)]
        } else {
            [TRAIN_CHUNK, response]
        }
    }

    /// Tokens of each product with the head, including padding, for a padded call with `response` response tokens.
    ///
    /// For a call of a single row it depends on that row; for calls of several rows it is constant.
    pub(crate) fn product_len(&self, call: &Call, response: usize) -> usize {
        if call.height == 1 {
            padded_len(response, usize::MAX).min(self.chunk)
        } else {
            self.chunk
        }
    }
}

/// Checks lengths and ids of all rows before anything is computed.
pub(crate) fn check(
    rows: &[ScoreRow<'_>],
    vocab_size: usize,
    max_tokens: usize,
) -> Result<(), ModelError> {
    for (row, tokens) in rows.iter().enumerate() {
        if tokens.prompt.is_empty() {
            return Err(ModelError::EmptyPrompt { row });
        }
        let length = tokens.prompt.len() + tokens.response.len();
        if length > max_tokens {
            return Err(ModelError::TooLong {
                row,
                tokens: length,
                limit: max_tokens,
            });
        }
        let mut ids = tokens.prompt.iter().chain(tokens.response);
        if let Some(&id) = ids.find(|&&id| id as usize >= vocab_size) {
            return Err(ModelError::TokenId {
                row,
                id,
                limit: vocab_size,
            });
        }
    }
    Ok(())
}

/// Tokens that a model must read to score the first `response` response tokens: the last one is only predicted.
pub(crate) fn input_len(row: &ScoreRow<'_>, response: usize) -> usize {
    row.prompt.len() + response - 1
}

/// Rows that are scored in one padded call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// Positions of the rows in the request; the rest of the call is padding.
    pub rows: Vec<usize>,
    /// Rows of the padded call.
    pub height: usize,
    /// Tokens of each padded row.
    pub width: usize,
}

/// Groups rows with a response into calls that read all tokens of a row but the last, which is only predicted.
pub(crate) fn calls(rows: &[ScoreRow<'_>], max_tokens: usize, limits: CallLimits) -> Vec<Call> {
    calls_of(input_lens(rows), max_tokens, limits)
}

/// Tokens that a model must read to score each row; `None` if there is no response.
pub(crate) fn input_lens(rows: &[ScoreRow<'_>]) -> impl Iterator<Item = Option<usize>> {
    let length = |row: &ScoreRow<'_>| input_len(row, row.response.len());
    rows.iter()
        .map(move |row| (!row.response.is_empty()).then(|| length(row)))
}

/// Groups rows into calls whose shape depends only on the row's own length. `lengths` are the tokens that the model
/// must read of each row; `None` leaves a row out.
///
/// Kernels choose their order of additions by the shape of their operands, so this makes a row's result bit-identical
/// whatever the other rows are.
pub(crate) fn calls_of(
    lengths: impl Iterator<Item = Option<usize>>,
    max_tokens: usize,
    limits: CallLimits,
) -> Vec<Call> {
    let mut by_width: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (position, length) in lengths.enumerate() {
        if let Some(length) = length {
            let width = padded_len(length, max_tokens);
            by_width.entry(width).or_default().push(position);
        }
    }
    let mut calls = Vec::new();
    for (width, positions) in by_width {
        let height = (limits.tokens / width).clamp(1, limits.rows);
        calls.extend(positions.chunks(height).map(|rows| Call {
            rows: rows.to_vec(),
            height,
            width,
        }));
    }
    calls
}

/// At most a quarter more than `length`, for lengths above 64.
fn padded_len(length: usize, max_tokens: usize) -> usize {
    let step = (length.next_power_of_two() / 8).max(MIN_STEP);
    length.next_multiple_of(step).min(max_tokens.max(length))
}

/// Right-padded ids of `rows`, truncated to `width` tokens and followed by rows of padding: `[height, width]`.
pub(crate) fn padded_ids<'a>(
    rows: impl Iterator<Item = &'a ScoreRow<'a>>,
    height: usize,
    width: usize,
    device: &Device,
) -> Tensor<2, Int> {
    let mut ids = Vec::with_capacity(height * width);
    for (row, tokens) in rows.enumerate() {
        let inputs = tokens.prompt.iter().chain(tokens.response).take(width);
        ids.extend(inputs.map(|&id| id as i32));
        ids.resize((row + 1) * width, 0);
    }
    ids.resize(height * width, 0);
    Tensor::from_data(TensorData::new(ids, [height, width]), device)
}

/// The first ids of each row, as many as its given length, concatenated.
pub(crate) fn packed_ids<'a>(rows: impl Iterator<Item = (&'a ScoreRow<'a>, usize)>) -> Vec<i32> {
    let inputs = rows.flat_map(|(row, length)| row.prompt.iter().chain(row.response).take(length));
    inputs.map(|&id| id as i32).collect()
}

/// Rows that are scored in one call, concatenated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PackedCall {
    /// Positions of the rows in the request.
    pub rows: Vec<usize>,
    /// Tokens of each sequence of the call: those of the rows, then padding.
    pub lengths: Vec<usize>,
}

/// Length of the prefix that each row shares with the row before it.
pub(crate) fn shared_lens(rows: &[ScoreRow<'_>]) -> Vec<usize> {
    fn tokens<'a>(row: &ScoreRow<'a>) -> impl Iterator<Item = &'a u32> {
        row.prompt.iter().chain(row.response)
    }
    let mut shared = vec![0; rows.len()];
    for (shared, pair) in shared.iter_mut().skip(1).zip(rows.windows(2)) {
        let pairs = tokens(&pair[0]).zip(tokens(&pair[1]));
        *shared = pairs.take_while(|(a, b)| a == b).count();
    }
    shared
}

/// Groups rows into calls without padding between rows.
///
/// If `limits` pad calls to a fixed size, all calls have the same number of tokens, whatever the rows; only a longer
/// row gets a larger call. So products have the same shape in every call, and a row's result does not depend on the
/// other rows. Otherwise tokens that a row shares with the row before it in its call are counted once.
///
/// `lengths` are as for [`calls_of`], `shared` is the result of [`shared_lens`].
pub(crate) fn packed_calls(
    lengths: impl Iterator<Item = Option<usize>>,
    shared: &[usize],
    limits: CallLimits,
) -> Vec<PackedCall> {
    let mut calls = Vec::new();
    let mut open = PackedCall {
        rows: Vec::new(),
        lengths: Vec::new(),
    };
    let mut used = 0;
    let mut close = |open: &mut PackedCall, used: &mut usize| {
        if !open.rows.is_empty() {
            let mut left = match limits.fills {
                true => used.next_multiple_of(limits.packed) - *used,
                false => 0,
            };
            while left > 0 {
                let filler = left.min(MAX_FILLER);
                open.lengths.push(filler);
                left -= filler;
            }
            calls.push(PackedCall {
                rows: std::mem::take(&mut open.rows),
                lengths: std::mem::take(&mut open.lengths),
            });
        }
        *used = 0;
    };
    for (position, length) in lengths.enumerate() {
        let Some(length) = length else { continue };
        let follows = open.rows.last().is_some_and(|last| last + 1 == position);
        let shared = if follows && !limits.fills {
            shared[position].min(length)
        } else {
            0
        };
        if used + length - shared > limits.packed {
            close(&mut open, &mut used);
        }
        used += if open.rows.is_empty() {
            length
        } else {
            length - shared
        };
        open.rows.push(position);
        open.lengths.push(length);
    }
    close(&mut open, &mut used);
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row<'a>(prompt: &'a [u32], response: &'a [u32]) -> ScoreRow<'a> {
        ScoreRow { prompt, response }
    }

    #[test]
    fn invalid_rows_are_named() {
        let limits = |rows: &[ScoreRow<'_>]| match check(rows, 10, 4) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        assert_eq!(limits(&[row(&[1, 9], &[2, 3]), row(&[0], &[])]), "");
        assert_eq!(
            limits(&[row(&[1], &[]), row(&[], &[1])]),
            "row 1 has an empty prompt; a causal model needs at least one token before the response"
        );
        assert_eq!(
            limits(&[row(&[1, 2, 3], &[4, 5])]),
            "row 0 has 5 tokens, but the model's context is limited to 4"
        );
        assert_eq!(
            limits(&[row(&[1, 2], &[10])]),
            "row 0 contains token id 10, but the vocabulary ends at 10"
        );
    }

    #[test]
    fn shapes_of_calls_depend_only_on_the_row() {
        let tokens = vec![1; 600];
        let lengths = [3, 17, 17, 40, 100, 300, 560];
        let rows: Vec<_> = lengths
            .iter()
            .map(|&length| row(&tokens[..2], &tokens[..length]))
            .collect();
        let shape_of = |calls: &[Call], position: usize| {
            let call = calls.iter().find(|call| call.rows.contains(&position));
            call.map(|call| (call.height, call.width))
        };
        for limits in [CallLimits::CPU, CallLimits::GPU] {
            let together = calls(&rows, 1024, limits);
            for (position, row) in rows.iter().enumerate() {
                let alone = calls(std::slice::from_ref(row), 1024, limits);
                assert_eq!(shape_of(&alone, 0), shape_of(&together, position));
            }
        }
    }

    #[test]
    fn packed_calls_on_a_gpu_have_a_fixed_size() {
        let limits = CallLimits::GPU;
        let lengths = [9000, 7000, 500, 1, 20_000, 3];
        let calls = packed_calls(lengths.into_iter().map(Some), &[0; 6], limits);
        let rows: Vec<_> = calls.iter().map(|call| call.rows.clone()).collect();
        assert_eq!(rows, [vec![0, 1], vec![2, 3], vec![4], vec![5]]);
        for call in &calls {
            let own = call.rows.iter().map(|&row| lengths[row]);
            assert!(own.eq(call.lengths[..call.rows.len()].iter().copied()));
            let tokens: usize = call.lengths.iter().sum();
            let size = if call.rows == [4] { 2 } else { 1 };
            assert_eq!(tokens, size * limits.packed);
        }
        assert!(packed_calls([None, None].into_iter(), &[0; 2], limits).is_empty());
    }

    #[test]
    fn packed_calls_on_the_cpu_count_shared_tokens_once() {
        let prompt = [1; 900];
        let tokens: Vec<u32> = (0..200).collect();
        let rows = [
            row(&prompt, &tokens[..50]),
            row(&prompt, &tokens[50..100]),
            row(&prompt, &[]),
            row(&prompt, &tokens[..60]),
            row(&prompt, &tokens[..61]),
        ];
        let shared = shared_lens(&rows);
        assert_eq!(shared, [0, 900, 900, 900, 960]);
        let calls = packed_calls(input_lens(&rows), &shared, CallLimits::CPU);
        let found: Vec<_> = calls
            .iter()
            .map(|call| (&*call.rows, &*call.lengths))
            .collect();
        // 949 and 49 tokens; the skipped row breaks the chain of shared prefixes, so the next call counts 959 and 1.
        let expected: [(&[usize], &[usize]); 2] = [(&[0, 1], &[949, 949]), (&[3, 4], &[959, 960])];
        assert_eq!(found, expected);
    }

    #[test]
    fn padding_is_small_and_stays_inside_the_context() {
        for length in 1..2000 {
            let padded = padded_len(length, 2000);
            assert!(padded >= length && padded <= 2000);
            assert!(padded < length + MIN_STEP.max(length.div_ceil(4)));
        }
        assert_eq!(padded_len(99, 100), 100);
    }

    #[test]
    fn rows_without_a_response_are_skipped() {
        assert!(calls(&[row(&[1, 2], &[])], 8, CallLimits::CPU).is_empty());
    }

    #[test]
    fn ids_are_padded_on_the_right() {
        let rows = [row(&[1, 2], &[3, 4]), row(&[5], &[6])];
        let ids = padded_ids(rows.iter(), 3, 3, &Device::flex());
        let ids: Vec<i32> = ids.into_data().iter().collect();
        assert_eq!(ids, [1, 2, 3, 5, 6, 0, 0, 0, 0]);
    }
}
