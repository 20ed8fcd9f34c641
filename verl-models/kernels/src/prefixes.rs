//! Removes repetition from the sequences of a call: a common prefix of consecutive sequences is computed once.
//!
//! The state of a token depends only on the token and those before it, so the responses to a prompt, or the two answers
//! of a preference pair, need the states of the prompt only once; the gradients of all of them are summed there.
//! (Liu et al., *Prefix Grouper*, 2025, do the same for one prompt per group.)

use std::collections::BTreeSet;
use std::sync::Arc;

/// Sequences that share fewer tokens than this are computed separately: a short segment leaves registers half empty.
const MIN_SHARED: usize = 4;

/// Consecutive tokens of a call that continue the same prefix.
///
/// The segments of a call are in the order of a depth-first walk through a tree: the parent of a segment is the last
/// segment before it that starts at a lower position, and that parent ends where the segment starts. A segment at
/// position 0 has no parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its first row in the call.
    pub first: usize,
    /// Position of its first token in a sequence.
    pub position: usize,
    /// Number of tokens, at least 1.
    pub tokens: usize,
}

impl Segment {
    /// Position after its last token.
    pub(crate) fn end(&self) -> usize {
        self.position + self.tokens
    }
}

/// The distinct tokens of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distinct {
    /// Id of each row.
    pub ids: Vec<i32>,
    /// The segments of these rows.
    pub segments: Arc<[Segment]>,
    /// The row of each token of the sequences; `None` if every token has its own row, in order.
    pub rows: Option<Vec<i32>>,
}

impl Distinct {
    /// The distinct tokens of the sequences concatenated in `ids`; each of the `lengths` is at least 1.
    pub fn new(ids: &[i32], lengths: &[usize]) -> Self {
        let mut distinct = Vec::with_capacity(ids.len());
        let mut positions = Vec::with_capacity(ids.len());
        let mut rows = Vec::with_capacity(ids.len());
        let mut starts = BTreeSet::new();
        let mut before: &[i32] = &[];
        // Rows of the tokens of the sequence before this one.
        let mut path: Vec<usize> = Vec::new();
        let mut start = 0;
        for &length in lengths {
            let sequence = &ids[start..start + length];
            start += length;
            let equal = sequence.iter().zip(before).take_while(|(a, b)| a == b);
            let shared = Some(equal.count()).filter(|shared| *shared >= MIN_SHARED);
            let shared = shared.unwrap_or(0);
            // The previous sequence continues here in another way: a segment begins.
            starts.extend(path.get(shared));
            if shared < length {
                starts.insert(distinct.len());
            }
            path.truncate(shared);
            for (position, &id) in sequence.iter().enumerate().skip(shared) {
                path.push(distinct.len());
                distinct.push(id);
                positions.push(position);
            }
            rows.extend(path.iter().map(|&row| row as i32));
            before = sequence;
        }
        let ends = starts.iter().skip(1).copied().chain([distinct.len()]);
        let segments = starts.iter().zip(ends).map(|(&first, end)| Segment {
            first,
            position: positions[first],
            tokens: end - first,
        });
        Distinct {
            segments: segments.collect(),
            rows: (distinct.len() < ids.len()).then_some(rows),
            ids: distinct,
        }
    }
}

/// Segments of `sequences` sequences of `tokens` tokens each, without shared prefixes.
pub(crate) fn equal(sequences: usize, tokens: usize) -> Arc<[Segment]> {
    let segment = |sequence: usize| Segment {
        first: sequence * tokens,
        position: 0,
        tokens,
    };
    let sequences = if tokens == 0 { 0 } else { sequences };
    (0..sequences).map(segment).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distinct(sequences: &[&[i32]]) -> Distinct {
        let lengths: Vec<usize> = sequences.iter().map(|ids| ids.len()).collect();
        Distinct::new(&sequences.concat(), &lengths)
    }

    fn segments(of: &Distinct) -> Vec<[usize; 3]> {
        let numbers = |s: &Segment| [s.first, s.position, s.tokens];
        of.segments.iter().map(numbers).collect()
    }

    /// The tokens that each token sees, derived from the segments as in attention.
    fn seen(of: &Distinct) -> Vec<Vec<i32>> {
        let (mut path, mut open) = (Vec::new(), Vec::<Segment>::new());
        let mut seen = vec![Vec::new(); of.ids.len()];
        for segment in &*of.segments {
            assert!(segment.tokens > 0);
            while open
                .pop_if(|open| open.position >= segment.position)
                .is_some()
            {}
            // A segment continues the end of another one.
            assert_eq!(open.last().map_or(0, Segment::end), segment.position);
            open.push(*segment);
            path.truncate(segment.position);
            let rows = seen.iter_mut().zip(&of.ids).skip(segment.first);
            for (seen, &id) in rows.take(segment.tokens) {
                path.push(id);
                seen.clone_from(&path);
            }
        }
        seen
    }

    #[test]
    fn a_prompt_is_computed_once_for_its_group() {
        let found = distinct(&[
            &[1, 2, 3, 4, 5, 9],
            &[1, 2, 3, 4, 5, 8, 7],
            &[1, 2, 3, 4, 5],
            &[1, 2, 3, 4, 5, 8, 7],
            &[2, 2, 3, 4, 5],
        ]);
        assert_eq!(found.ids, [1, 2, 3, 4, 5, 9, 8, 7, 8, 7, 2, 2, 3, 4, 5]);
        assert_eq!(
            segments(&found),
            [[0, 0, 5], [5, 5, 1], [6, 5, 2], [8, 5, 2], [10, 0, 5]]
        );
    }

    #[test]
    fn sequences_with_short_common_prefixes_are_separate() {
        let found = distinct(&[&[1, 2, 3, 4], &[1, 2, 3, 5], &[1]]);
        assert_eq!(found.rows, None);
        assert_eq!(segments(&found), [[0, 0, 4], [4, 0, 4], [8, 0, 1]]);
        assert_eq!(
            *found.segments,
            *distinct(&[&[7; 4], &[8; 4], &[9]]).segments
        );
        assert_eq!(segments(&distinct(&[])), Vec::<[usize; 3]>::new());
    }

    /// Sharing does not change what a token sees.
    #[test]
    fn every_token_sees_its_own_sequence() {
        let mut random = crate::numbers::numbers(4_000, 5).into_iter();
        let mut draw = |limit: usize| ((random.next().unwrap() + 0.5) * limit as f32) as usize;
        for _ in 0..60 {
            let mut sequences: Vec<Vec<i32>> = Vec::new();
            for _ in 0..1 + draw(6) {
                // A prefix of the previous sequence, then new tokens.
                let before = sequences.last().cloned().unwrap_or_default();
                let kept = draw(before.len() + 1);
                let mut ids = before[..kept].to_vec();
                ids.extend((0..1 + draw(9)).map(|_| draw(3) as i32));
                sequences.push(ids);
            }
            let slices: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
            let found = distinct(&slices);
            let seen = seen(&found);
            let tokens = sequences.concat().len() as i32;
            let rows = found.rows.unwrap_or_else(|| (0..tokens).collect());
            let mut rows = rows.into_iter();
            for sequence in &sequences {
                for end in 1..=sequence.len() {
                    let row = rows.next().unwrap() as usize;
                    assert_eq!(seen[row], sequence[..end]);
                }
            }
        }
    }
}
