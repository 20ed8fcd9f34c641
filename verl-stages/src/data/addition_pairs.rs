//! Sums of two numbers with a right and a wrong answer, for learning from preferences without files.
//!
//! Questions, answers and splits are those of [`addition`](super::addition): a question of its split `held_out` is in
//! `held_out` here too. The wrong answer has the form of the right one; its sum is off by 1 or by 10, up or down, like a
//! wrong digit or a forgotten carry. Which of the four it is depends only on the seed and the operands.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::stage::{BuildContext, ConfigError, DataConfig};

use super::addition::{Addition, AdditionRows};

/// Questions such as `12+34` with the answers `#### 46` and `#### 56`, in the columns `prompt`, `chosen`, `rejected`.
///
/// The seed also decides the wrong answers, so that every run has the same pairs; the answer must contain `{sum}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdditionPairs {
    /// The sums; in a pipeline file their settings are next to the others.
    #[serde(flatten)]
    pub sums: Addition,
    /// By how much a wrong answer exceeds the sum; when absent it is off by 1 or by 10, up or down. With one wrong answer per
    /// question, a policy that imitates shuffled pairs is wrong half of the time; with several, the right one is the most
    /// frequent, and imitation is enough to learn to add.
    pub wrong_by: Option<u32>,
    /// Whether chance decides which of the two answers counts as chosen, so that a run can show what it learns from
    /// meaningless labels.
    pub shuffled: bool,
}

const ORIGIN: &str = "addition_pairs";

impl DataConfig for AdditionPairs {
    const KIND: &'static str = "addition_pairs";
    const SUMMARY: &'static str = "sums of two numbers with a right and a wrong answer";

    fn check(&self, context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        self.sums.check(context)
    }

    fn open(&self, _context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        Ok(Arc::new(self.rows()?))
    }
}

impl AdditionPairs {
    /// The rows of the split.
    ///
    /// # Errors
    /// Those of [`Addition::rows`]; an answer that does not contain the sum.
    pub fn rows(&self) -> Result<AdditionPairRows, DataError> {
        if !self.sums.answer.contains("{sum}") {
            return Err(DataError::Unreadable {
                path: ORIGIN.to_owned(),
                reason: format!(
                    "`answer` is `{}`, which does not contain `{{sum}}`, so a wrong answer would be the right one",
                    self.sums.answer
                ),
            });
        }
        if self.wrong_by == Some(0) {
            return Err(DataError::Unreadable {
                path: ORIGIN.to_owned(),
                reason: "`wrong_by` is 0, so a wrong answer would be the right one".to_owned(),
            });
        }
        let rows = self.sums.rows()?;
        let mut hash = Sha256::new();
        hash.update(rows.fingerprint());
        for &(a, b) in rows.pairs() {
            hash.update(self.wrong_sum(a, b).to_le_bytes());
        }
        hash.update([u8::from(self.shuffled)]);
        Ok(AdditionPairRows {
            config: self.clone(),
            rows,
            fingerprint: super::hex(&hash.finalize()),
        })
    }
}

impl AdditionPairs {
    fn wrong_sum(&self, a: u32, b: u32) -> u32 {
        match self.wrong_by {
            Some(by) => a + b + by,
            None => wrong_sum(self.sums.seed, a, b),
        }
    }
}

/// A byte that depends only on the arguments.
fn draw(purpose: &str, seed: u64, a: u32, b: u32) -> u8 {
    let mut hash = Sha256::new();
    hash.update(purpose);
    for part in [seed, a.into(), b.into()] {
        hash.update(part.to_le_bytes());
    }
    hash.finalize()[0]
}

/// A sum that is off by 1 or 10, never below 0.
fn wrong_sum(seed: u64, a: u32, b: u32) -> u32 {
    let draw = draw("wrong", seed, a, b);
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
    config: AdditionPairs,
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
        let AdditionPairs { sums, shuffled, .. } = &self.config;
        let (mut chosen, mut rejected) = (a + b, self.config.wrong_sum(a, b));
        if *shuffled && draw("shuffled", sums.seed, a, b) & 1 == 1 {
            std::mem::swap(&mut chosen, &mut rejected);
        }
        Ok(Map::from_iter([
            ("prompt".to_owned(), sums.question_of(a, b).into()),
            ("chosen".to_owned(), sums.answer_of(a, b, chosen).into()),
            ("rejected".to_owned(), sums.answer_of(a, b, rejected).into()),
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
    use crate::data::addition::Split;

    fn rows(split: Split, seed: u64) -> AdditionPairRows {
        let sums = Addition {
            split,
            seed,
            ..Addition::default()
        };
        let config = AdditionPairs {
            sums,
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
    fn shuffled_labels_are_meaningless() {
        let plain = AdditionPairs::default();
        let shuffled = AdditionPairs {
            shuffled: true,
            ..AdditionPairs::default()
        };
        let (plain, shuffled) = (plain.rows().unwrap(), shuffled.rows().unwrap());
        let mut swapped = 0;
        for index in 0..plain.len() {
            let (a, b) = (plain.row(index).unwrap(), shuffled.row(index).unwrap());
            let is_swapped = a["chosen"] == b["rejected"];
            assert!(a["prompt"] == b["prompt"] && is_swapped == (a["rejected"] == b["chosen"]));
            assert!(is_swapped || a == b);
            swapped += usize::from(is_swapped);
        }
        assert!(
            swapped.abs_diff(plain.len() / 2) < plain.len() / 20,
            "{swapped}"
        );
        assert_ne!(plain.fingerprint(), shuffled.fingerprint());
    }

    #[test]
    fn fingerprints_differ_by_split_and_seed() {
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
        let mut config = AdditionPairs::default();
        config.sums.answer = "#### 7".to_owned();
        let error = config.rows().unwrap_err().to_string();
        assert!(error.contains("does not contain `{sum}`"), "{error}");
        let config = AdditionPairs {
            wrong_by: Some(0),
            ..AdditionPairs::default()
        };
        let error = config.rows().unwrap_err().to_string();
        assert!(error.contains("`wrong_by` is 0"), "{error}");
    }

    #[test]
    fn there_can_be_one_wrong_answer_per_question() {
        let config = AdditionPairs {
            wrong_by: Some(10),
            ..AdditionPairs::default()
        };
        let (rows, others) = (config.rows().unwrap(), rows(Split::Train, 0));
        for index in 0..rows.len() {
            let (a, b) = rows.rows.pairs()[index];
            assert_eq!(
                rows.row(index).unwrap()["rejected"],
                format!("#### {}", a + b + 10)
            );
        }
        assert_ne!(rows.fingerprint(), others.fingerprint());
    }
}
