//! Sums of two numbers: a generator of questions with a verifiable answer, in three disjoint splits.
//!
//! This is the only code of the workspace that knows the task; readers, rewards and stages are those of any data set
//! with a question and an answer that ends in `#### n`.
//!
//! The unordered pairs of operands are sorted in an order that depends only on the seed (by SHA-256 of seed and pair). The
//! first of them, enough for `held_out` questions, form the split `held_out`; the others alternate between `train` and
//! `sft`. A pair and its commuted twin are in the same split, so that no sum appears in two splits in either order. Splits
//! of one pipeline are disjoint if they have the same range, seed and `held_out`.

use std::sync::Arc;

use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::stage::{BuildContext, ConfigError, DataConfig};

/// Part of the questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// For supervised fine-tuning of the base model.
    Sft,
    /// For reinforcement learning.
    Train,
    /// For evaluation.
    #[serde(alias = "heldout", alias = "test")]
    #[schemars(transform = words_for_held_out)]
    HeldOut,
}

/// All names that a file may use; schemars does not support aliases.
fn words_for_held_out(schema: &mut Schema) {
    schema.remove("const");
    schema.insert("enum".to_owned(), json!(["held_out", "heldout", "test"]));
}

/// Questions such as `12+34` with answers such as `#### 46`, in the columns `question` and `answer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Addition {
    /// Which part of the questions.
    pub split: Split,
    /// Smallest operand.
    pub min: u32,
    /// Largest operand, at most 2000 above the smallest.
    pub max: u32,
    /// Seed of the division into splits; not the run's, so that every run holds out the same questions.
    pub seed: u64,
    /// Questions in the split `held_out` (rows); when absent 1000, or a fifth of all if that is less.
    pub held_out: Option<usize>,
    /// Rows of the split to use (rows); all when absent.
    pub count: Option<usize>,
    /// Text of a question; `{a}` and `{b}` are the operands.
    pub question: String,
    /// Text of an answer; `{a}`, `{b}` and `{sum}` are filled in.
    pub answer: String,
}

impl Default for Addition {
    fn default() -> Self {
        Addition {
            split: Split::Train,
            min: 0,
            max: 99,
            seed: 0,
            held_out: None,
            count: None,
            question: "{a}+{b}".to_owned(),
            answer: "#### {sum}".to_owned(),
        }
    }
}

const ORIGIN: &str = "addition";

impl DataConfig for Addition {
    const KIND: &'static str = "addition";
    const SUMMARY: &'static str = "sums of two numbers in disjoint splits";

    fn check(&self, _context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        let faults = self.faults();
        match faults.is_empty() {
            true => Ok(()),
            false => Err(faults),
        }
    }

    fn open(&self, _context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        Ok(Arc::new(self.rows()?))
    }
}

impl Addition {
    /// Settings that leave no questions, or give sums with different answers the same question.
    pub(super) fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        if self.range().is_none() {
            faults.push(ConfigError::new(
                "max",
                format!(
                    "is {}, but operands run from min = {}; the range must contain 1 to 2001 numbers",
                    self.max, self.min
                ),
                "set `max` to a number from `min` to `min` + 2000",
            ));
        }
        let total = self.range().map_or(usize::MAX, |numbers| numbers * numbers);
        for (setting, set) in [("held_out", self.held_out), ("count", self.count)] {
            if let Some(set) = set.filter(|set| *set > total) {
                faults.push(ConfigError::new(
                    setting,
                    format!("is {set}, but there are only {total} questions"),
                    "set it to less, or widen the range",
                ));
            }
        }
        if self.count == Some(0) {
            let help = "set it to the number of rows to use, or leave it out";
            faults.push(ConfigError::new("count", "is 0, which leaves no row", help));
        }
        for operand in ["{a}", "{b}"] {
            if !self.question.contains(operand) {
                faults.push(ConfigError::new(
                    "question",
                    format!(
                        "is `{}`, which does not contain `{operand}`, so sums with different answers have the same question",
                        self.question
                    ),
                    "include both operands: `{a}+{b}`",
                ));
            }
        }
        faults
    }

    /// Number of different operands; `None` for a range that is empty or too large.
    fn range(&self) -> Option<usize> {
        let width = self.max.checked_sub(self.min)?;
        (width <= 2000).then_some(width as usize + 1)
    }

    /// The rows of the split.
    ///
    /// # Errors
    /// When the range is empty or too large, when nothing is left for the split, or when it has fewer rows than
    /// `count`.
    pub fn rows(&self) -> Result<AdditionRows, DataError> {
        let refuse = |reason: String| DataError::Unreadable {
            path: ORIGIN.to_owned(),
            reason,
        };
        let Some(numbers) = self.range() else {
            return Err(refuse(format!(
                "operands run from {} to {}; the range must contain 1 to 2001 numbers",
                self.min, self.max
            )));
        };
        let total = numbers * numbers;
        let held_out = self.held_out.unwrap_or((total / 5).min(1000));
        if held_out > total {
            return Err(refuse(format!(
                "`held_out` is {held_out}, but there are only {total} questions"
            )));
        }
        let mut pairs = self.pairs(held_out);
        let available = pairs.len();
        if let Some(count) = self.count {
            if count > available {
                return Err(refuse(format!(
                    "`count` is {count}, but this split has only {available} questions"
                )));
            }
            pairs.truncate(count);
        }
        if pairs.is_empty() {
            return Err(DataError::Empty {
                path: ORIGIN.to_owned(),
            });
        }
        let mut hash = Sha256::new();
        for &(a, b) in &pairs {
            let (question, answer) = self.texts(a, b);
            for text in [question, answer] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text);
            }
        }
        Ok(AdditionRows {
            config: self.clone(),
            pairs,
            fingerprint: super::hex(&hash.finalize()),
        })
    }

    /// The ordered pairs of the split, in an order that is independent of the difficulty of the sums.
    fn pairs(&self, held_out: usize) -> Vec<(u32, u32)> {
        let key = |a: u32, b: u32| {
            let mut hash = Sha256::new();
            hash.update(self.seed.to_le_bytes());
            hash.update(a.to_le_bytes());
            hash.update(b.to_le_bytes());
            hash.finalize()
        };
        let mut unordered: Vec<(u32, u32)> = (self.min..=self.max)
            .flat_map(|a| (a..=self.max).map(move |b| (a, b)))
            .collect();
        unordered.sort_by_cached_key(|&(a, b)| key(a, b));
        let mut room = held_out;
        let mut turn = 0;
        let mut pairs = Vec::new();
        for (a, b) in unordered {
            let questions = if a == b { 1 } else { 2 };
            let split = if questions <= room {
                room -= questions;
                Split::HeldOut
            } else {
                turn += 1;
                if turn % 2 == 0 {
                    Split::Sft
                } else {
                    Split::Train
                }
            };
            if split == self.split {
                pairs.push((a, b));
                if a != b {
                    pairs.push((b, a));
                }
            }
        }
        pairs.sort_by_cached_key(|&(a, b)| key(!a, !b));
        pairs
    }

    fn texts(&self, a: u32, b: u32) -> (String, String) {
        (self.question_of(a, b), self.answer_of(a, b, a + b))
    }

    /// The question for these operands.
    pub(super) fn question_of(&self, a: u32, b: u32) -> String {
        self.question
            .replace("{a}", &a.to_string())
            .replace("{b}", &b.to_string())
    }

    /// An answer that states `sum` as the sum of the operands.
    pub(super) fn answer_of(&self, a: u32, b: u32, sum: u32) -> String {
        self.answer
            .replace("{sum}", &sum.to_string())
            .replace("{a}", &a.to_string())
            .replace("{b}", &b.to_string())
    }
}

/// The rows of a split.
#[derive(Debug)]
pub struct AdditionRows {
    config: Addition,
    pairs: Vec<(u32, u32)>,
    fingerprint: String,
}

impl AdditionRows {
    /// The operands of each row.
    pub fn pairs(&self) -> &[(u32, u32)] {
        &self.pairs
    }
}

impl DataLoaderInterface for AdditionRows {
    fn len(&self) -> usize {
        self.pairs.len()
    }

    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        let Some(&(a, b)) = self.pairs.get(index) else {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        };
        let (question, answer) = self.config.texts(a, b);
        Ok(Map::from_iter([
            ("question".to_owned(), question.into()),
            ("answer".to_owned(), answer.into()),
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
    use super::*;
    use std::collections::HashSet;

    fn split(split: Split, seed: u64) -> AdditionRows {
        let config = Addition {
            split,
            seed,
            ..Addition::default()
        };
        config.rows().unwrap()
    }

    #[test]
    fn bad_settings_are_reported_before_anything_is_opened() {
        let refused = |config: Addition| -> Vec<String> {
            let faults = DataConfig::check(&config, &BuildContext::default());
            let faults = faults.err().unwrap_or_default();
            faults.into_iter().map(|fault| fault.setting).collect()
        };
        let none: [&str; 0] = [];
        assert_eq!(refused(Addition::default()), none);
        let all = Addition {
            min: 90,
            max: 10,
            count: Some(0),
            question: "hello".to_owned(),
            ..Addition::default()
        };
        assert_eq!(refused(all), ["max", "count", "question", "question"]);
        let few = Addition {
            max: 1,
            held_out: Some(5),
            count: Some(9),
            ..Addition::default()
        };
        assert_eq!(refused(few), ["held_out", "count"]);
    }

    #[test]
    fn splits_are_disjoint_even_when_commuted_and_cover_everything() {
        for seed in [0, 1, 17] {
            let parts = [Split::Sft, Split::Train, Split::HeldOut].map(|part| split(part, seed));
            assert_eq!(parts[2].len(), 1000);
            let all: HashSet<(u32, u32)> = parts.iter().flat_map(|p| p.pairs().to_vec()).collect();
            assert_eq!(all.len(), 10_000);
            assert_eq!(parts.iter().map(|p| p.len()).sum::<usize>(), 10_000);
            let unordered = parts.each_ref().map(|part| {
                part.pairs()
                    .iter()
                    .map(|&(a, b)| (a.min(b), a.max(b)))
                    .collect::<HashSet<_>>()
            });
            for (i, j) in [(0, 1), (0, 2), (1, 2)] {
                assert!(unordered[i].is_disjoint(&unordered[j]), "{i} and {j}");
            }
            assert!(parts[0].len().abs_diff(parts[1].len()) < 200);
        }
    }

    #[test]
    fn held_out_questions_are_a_fair_sample() {
        let part = split(Split::HeldOut, 0);
        let mean = part.pairs().iter().map(|&(a, _)| f64::from(a)).sum::<f64>() / 1000.0;
        assert!((mean - 49.5).abs() < 3.0, "{mean}");
        let carries = part
            .pairs()
            .iter()
            .filter(|&&(a, b)| a % 10 + b % 10 > 9)
            .count();
        assert!((380..520).contains(&carries), "{carries}");
    }

    #[test]
    fn rows_read_like_the_columns_of_gsm8k() {
        let data = split(Split::Train, 0);
        for (index, &(a, b)) in data.pairs().iter().enumerate() {
            let row = data.row(index).unwrap();
            assert_eq!(row["question"], format!("{a}+{b}"));
            assert_eq!(row["answer"], format!("#### {}", a + b));
        }
        let config = Addition {
            question: "What is {a} plus {b}?".to_owned(),
            answer: "{a}+{b}={sum}\n#### {sum}".to_owned(),
            count: Some(3),
            ..Addition::default()
        };
        let short = config.rows().unwrap();
        let (a, b) = data.pairs()[0];
        assert_eq!(short.pairs(), &data.pairs()[..3]);
        assert_eq!(
            short.row(0).unwrap()["question"],
            format!("What is {a} plus {b}?")
        );
        assert_eq!(
            short.row(0).unwrap()["answer"],
            format!("{a}+{b}={0}\n#### {0}", a + b)
        );
        assert!(short.row(3).is_err());
    }

    #[test]
    fn fingerprints_differ_by_split_and_seed() {
        let prints: HashSet<String> = [
            split(Split::Train, 0),
            split(Split::Sft, 0),
            split(Split::Train, 1),
        ]
        .iter()
        .map(AdditionRows::fingerprint)
        .collect();
        assert_eq!(prints.len(), 3);
        assert_eq!(
            split(Split::Sft, 5).fingerprint(),
            split(Split::Sft, 5).fingerprint()
        );
    }

    #[test]
    fn small_ranges_hold_out_a_fifth_and_bad_settings_are_refused() {
        let digits = Addition {
            max: 9,
            split: Split::HeldOut,
            ..Addition::default()
        };
        assert_eq!(digits.rows().unwrap().len(), 20);
        let error = |config: Addition| config.rows().unwrap_err().to_string();
        let config = || digits.clone();
        assert!(
            error(Addition {
                min: 10,
                ..config()
            })
            .contains("from 10 to 9")
        );
        assert!(
            error(Addition {
                max: 5000,
                ..config()
            })
            .contains("1 to 2001")
        );
        assert!(
            error(Addition {
                held_out: Some(101),
                ..config()
            })
            .contains("only 100 questions")
        );
        assert!(
            error(Addition {
                count: Some(21),
                ..config()
            })
            .contains("only 20 questions")
        );
        let nothing = Addition {
            held_out: Some(0),
            ..config()
        };
        assert!(matches!(nothing.rows(), Err(DataError::Empty { .. })));
    }

    #[test]
    fn the_settings_accept_the_usual_names_of_splits() {
        for name in ["held_out", "heldout", "test"] {
            let config: Addition = toml::from_str(&format!("split = \"{name}\"")).unwrap();
            assert_eq!(config.split, Split::HeldOut);
        }
        assert!(toml::from_str::<Addition>("splits = \"sft\"").is_err());
    }
}
