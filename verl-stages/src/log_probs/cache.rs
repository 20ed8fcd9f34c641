//! Log-probs of a frozen model that were computed in an earlier epoch.

use std::collections::HashMap;

use sha2::{Digest, Sha256};
use verl_models::model::{ScoreRow, Scores};
use verl_words::batch::RowId;
use verl_words::stage::StageError;

/// Log-probs by row of the data set and sample: 4 bytes per token, and at most one entry per row and sample.
///
/// An entry is valid for the tokens that it was computed from; for other tokens it is recomputed and replaced.
#[derive(Debug, Clone, Default)]
pub(super) struct Cache {
    entries: HashMap<(u64, u64), Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    tokens: [u8; 32],
    log_probs: Vec<f32>,
}

impl Cache {
    /// Scores of `rows` without entropies, and how many of them were cached; `score` computes the others.
    ///
    /// # Errors
    /// What `score` returns.
    pub fn scores(
        &mut self,
        ids: &[RowId],
        rows: &[ScoreRow<'_>],
        score: impl FnOnce(&[ScoreRow<'_>], &[RowId]) -> Result<Vec<Scores>, StageError>,
    ) -> Result<(Vec<Scores>, usize), StageError> {
        let hashes: Vec<[u8; 32]> = rows.iter().map(hash).collect();
        let key = |id: &RowId| (id.row(), id.sample_index());
        let is_known = |entry: &Entry, index: usize| entry.tokens == hashes[index];
        let missing: Vec<usize> = (0..rows.len())
            .filter(|&index| {
                let entry = self.entries.get(&key(&ids[index]));
                !entry.is_some_and(|entry| is_known(entry, index))
            })
            .collect();
        let mut fresh = Vec::new();
        if !missing.is_empty() {
            let asked: Vec<ScoreRow<'_>> = missing.iter().map(|&index| rows[index]).collect();
            let asked_ids: Vec<RowId> = missing.iter().map(|&index| ids[index]).collect();
            fresh = score(&asked, &asked_ids)?;
        }
        let mut scores = vec![Scores::default(); rows.len()];
        for (&index, fresh) in missing.iter().zip(fresh) {
            let entry = Entry {
                tokens: hashes[index],
                log_probs: fresh.log_probs.clone(),
            };
            self.entries.insert(key(&ids[index]), entry);
            scores[index] = fresh;
        }
        let mut missing = missing.iter().peekable();
        let mut known = 0;
        for (index, scores) in scores.iter_mut().enumerate() {
            if missing.next_if_eq(&&index).is_some() {
                continue;
            }
            if let Some(entry) = self.entries.get(&key(&ids[index])) {
                scores.log_probs.clone_from(&entry.log_probs);
                known += 1;
            }
        }
        Ok((scores, known))
    }
}

fn hash(row: &ScoreRow<'_>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for tokens in [row.prompt, row.response] {
        hash.update((tokens.len() as u64).to_le_bytes());
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores that depend on the tokens, like a model's.
    fn score(rows: &[ScoreRow<'_>], _: &[RowId]) -> Result<Vec<Scores>, StageError> {
        let each = rows.iter().map(|row| Scores {
            log_probs: row.response.iter().map(|token| -(*token as f32)).collect(),
            entropies: Vec::new(),
            ..Scores::default()
        });
        Ok(each.collect())
    }

    fn id(epoch: u64, row: u64, sample: u64) -> RowId {
        RowId::prompt(epoch, row).unwrap().sample(sample).unwrap()
    }

    /// Checks the rows' scores, and how many of them were cached.
    #[track_caller]
    fn check(cache: &mut Cache, ids: &[RowId], rows: &[ScoreRow<'_>], expected: usize) {
        let mut asked = 0;
        let scores = cache.scores(ids, rows, |missing, ids| {
            asked = missing.len();
            score(missing, ids)
        });
        let (scores, known) = scores.unwrap();
        assert_eq!(scores, score(rows, ids).unwrap());
        assert_eq!((known, asked), (expected, rows.len() - expected));
    }

    #[test]
    fn rows_are_identified_by_data_row_sample_and_tokens() {
        let row = |prompt, response| ScoreRow { prompt, response };
        let (a, b) = (&[1u32, 2][..], &[3u32][..]);
        let mut cache = Cache::default();
        let first = [row(a, b), row(a, a)];
        check(&mut cache, &[id(0, 4, 0), id(0, 4, 1)], &first, 0);
        // In the next epoch, with other rows and in another order.
        let next = [row(b, b), row(a, a), row(a, b)];
        let ids = [id(1, 5, 0), id(1, 4, 1), id(1, 4, 0)];
        check(&mut cache, &ids, &next, 2);
        check(&mut cache, &ids, &next, 3);
        // The same row with other tokens was not scored.
        check(&mut cache, &[id(2, 4, 0)], &[row(b, a)], 0);
        check(&mut cache, &[id(3, 4, 0)], &[row(a, b)], 0);
        // Tokens that moved from the prompt into the response make another row.
        check(&mut cache, &[id(4, 4, 0)], &[row(&[1], &[2, 3])], 0);
    }

    #[test]
    fn failed_scores_are_not_cached() {
        let mut cache = Cache::default();
        let rows = [ScoreRow {
            prompt: &[1],
            response: &[2],
        }];
        let refused = cache.scores(&[id(0, 0, 0)], &rows, |_, _| Err(StageError::Cancelled));
        assert!(refused.is_err());
        check(&mut cache, &[id(0, 0, 0)], &rows, 0);
    }
}
