//! Sums of two numbers with a right and a wrong answer, for learning from preferences without files.
//!
//! Questions, answers and splits are those of [`addition`](super::addition): what is held out there is held out here. The
//! wrong answer has the form of the right one; its sum is off by 1 or by 10, up or down, as a slip in a digit or a
//! forgotten carry makes it. Which of the four it is depends on the seed and the operands alone.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::{BuildContext, DataConfig};

use super::addition::{Addition, AdditionRows, Split};

/// Questions such as `12+34` with the answers `#### 46` and `#### 56`, in the columns `prompt`, `chosen`, `rejected`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdditionPairs {
    /// Which part of the questions.
    pub split: Split,
    /// Smallest operand.
    pub min: u32,
    /// Largest operand, at most 2000 above the smallest.
    pub max: u32,
    /// Seed of the division into splits and of the wrong answers; not the run's, so that every run has the same pairs.
    pub seed: u64,
    /// Questions held out (rows); when absent 1000, or a fifth of all where that is less.
    pub held_out: Option<usize>,
    /// Rows of the split to use (rows); all when absent.
    pub count: Option<usize>,
    /// Text of a question; `{a}` and `{b}` are the operands.
    pub question: String,
    /// Text of an answer, right or wrong; `{a}`, `{b}` and `{sum}` are filled in, and it must hold `{sum}`.
    pub answer: String,
}

impl Default for AdditionPairs {
    fn default() -> Self {
        let addition = Addition::default();
        AdditionPairs {
            split: addition.split,
            min: addition.min,
            max: addition.max,
            seed: addition.seed,
            held_out: addition.held_out,
            count: addition.count,
            question: addition.question,
            answer: addition.answer,
        }
    }
}

const ORIGIN: &str = "addition_pairs";

impl DataConfig for AdditionPairs {
    const KIND: &'static str = "addition_pairs";
    const SUMMARY: &'static str = "sums of two numbers with a right and a wrong answer";

    fn open(&self, _context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        Ok(Arc::new(self.rows()?))
    }
}

impl AdditionPairs {
    /// The questions and right answers.
    fn addition(&self) -> Addition {
        Addition {
            split: self.split,
            min: self.min,
            max: self.max,
            seed: self.seed,
            held_out: self.held_out,
            count: self.count,
            question: self.question.clone(),
            answer: self.answer.clone(),
        }
    }

    /// The rows of the split.
    ///
    /// # Errors
    /// What [`Addition::rows`] refuses; an answer that does not say the sum.
    pub fn rows(&self) -> Result<AdditionPairRows, DataError> {
        if !self.answer.contains("{sum}") {
            return Err(DataError::Unreadable {
                path: ORIGIN.to_owned(),
                reason: format!(
                    "`answer` is `{}`, which says no `{{sum}}`, so that a wrong answer would be the right one",
                    self.answer
                ),
            });
        }
        let addition = self.addition();
        let rows = addition.rows()?;
        let mut hash = Sha256::new();
        hash.update(rows.fingerprint());
        for &(a, b) in rows.pairs() {
            hash.update(wrong_sum(self.seed, a, b).to_le_bytes());
        }
        Ok(AdditionPairRows {
            addition,
            rows,
            fingerprint: super::hex(&hash.finalize()),
        })
    }
}

/// A sum that is off by 1 or 10, never below 0.
fn wrong_sum(seed: u64, a: u32, b: u32) -> u32 {
    let mut hash = Sha256::new();
    hash.update(b"wrong");
    for part in [seed, a.into(), b.into()] {
        hash.update(part.to_le_bytes());
    }
    let draw = hash.finalize()[0];
    let off = if draw & 1 == 0 { 1 } else { 10 };
    let sum = a + b;
    if draw & 2 == 0 && sum >= off {
        sum - off
    } else {
        sum + off
    }
}

/// The rows of a split.
#[derive(Debug)]
pub struct AdditionPairRows {
    addition: Addition,
    rows: AdditionRows,
    fingerprint: String,
}

impl DataLoaderInterface for AdditionPairRows {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        let Some(&(a, b)) = self.rows.pairs().get(index) else {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        };
        let wrong = wrong_sum(self.addition.seed, a, b);
        Ok(Map::from_iter([
            ("prompt".to_owned(), self.addition.question_of(a, b).into()),
            (
                "chosen".to_owned(),
                self.addition.answer_of(a, b, a + b).into(),
            ),
            (
                "rejected".to_owned(),
                self.addition.answer_of(a, b, wrong).into(),
            ),
        ]))
    }

    fn origin(&self) -> String {
        ORIGIN.to_owned()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::*;

    fn rows(split: Split, seed: u64) -> AdditionPairRows {
        let config = AdditionPairs {
            split,
            seed,
            ..AdditionPairs::default()
        };
        config.rows().unwrap()
    }

    #[test]
    fn questions_and_right_answers_are_those_of_addition() {
        for split in [Split::Sft, Split::Train, Split::HeldOut] {
            let pairs = rows(split, 3);
            let config = Addition {
                split,
                seed: 3,
                ..Addition::default()
            };
            let sums = config.rows().unwrap();
            assert_eq!(pairs.len(), sums.len());
            for index in 0..sums.len() {
                let (pair, sum) = (pairs.row(index).unwrap(), sums.row(index).unwrap());
                assert_eq!(pair["prompt"], sum["question"]);
                assert_eq!(pair["chosen"], sum["answer"]);
            }
        }
    }

    #[test]
    fn wrong_answers_are_near_well_formed_and_of_all_four_kinds() {
        let pairs = rows(Split::Train, 0);
        let sum = |text: &Value| -> i64 {
            let text = text.as_str().unwrap();
            text.strip_prefix("#### ").unwrap().parse().unwrap()
        };
        let mut counts: BTreeMap<i64, usize> = BTreeMap::new();
        for index in 0..pairs.len() {
            let row = pairs.row(index).unwrap();
            *counts
                .entry(sum(&row["rejected"]) - sum(&row["chosen"]))
                .or_default() += 1;
        }
        assert_eq!(Vec::from_iter(counts.keys().copied()), [-10, -1, 1, 10]);
        let quarter = pairs.len() / 4;
        for count in counts.values() {
            assert!(count.abs_diff(quarter) < quarter / 5, "{counts:?}");
        }
        for seed in 0..50 {
            assert!([1, 10].contains(&wrong_sum(seed, 0, 0)));
        }
    }

    #[test]
    fn fingerprints_tell_splits_and_seeds_apart() {
        let of = |split, seed| rows(split, seed).fingerprint();
        let addition = Addition::default().rows().unwrap().fingerprint();
        let prints = HashSet::from([
            of(Split::Train, 0),
            of(Split::Sft, 0),
            of(Split::Train, 1),
            addition,
        ]);
        assert_eq!(prints.len(), 4);
        assert_eq!(of(Split::Sft, 5), of(Split::Sft, 5));
    }

    #[test]
    fn an_answer_without_the_sum_is_refused() {
        let config = AdditionPairs {
            answer: "#### 7".to_owned(),
            ..AdditionPairs::default()
        };
        let error = config.rows().unwrap_err().to_string();
        assert!(error.contains("no `{sum}`"), "{error}");
    }
}
