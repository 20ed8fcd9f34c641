//! Preferences about sums: the right answer against a wrong but well-formed one, in three disjoint splits.
//!
//! Questions, answers and splits are those of [`addition`](super::addition), so that a reward model can be trained on one
//! split and judged, or trained against, on another.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use verl_models::random::{DrawKey, Purpose, Stream};
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::{BuildContext, DataConfig};

use super::addition::{Addition, AdditionRows, Split};

/// Questions such as `12+34` with the answers `#### 46` and, say, `#### 36`, in the columns `prompt`, `chosen` and
/// `rejected`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdditionPairs {
    /// Which part of the questions.
    pub split: Split,
    /// Smallest operand.
    pub min: u32,
    /// Largest operand, at most 2000 above the smallest.
    pub max: u32,
    /// Seed of the division into splits, as in `addition`, and of the wrong answers; not the run's.
    pub seed: u64,
    /// Questions held out (rows); when absent 1000, or a fifth of all where that is less.
    pub held_out: Option<usize>,
    /// Questions of the split to use (questions); all when absent.
    pub count: Option<usize>,
    /// Wrong answers to each question, a pair each (pairs); some may be the same.
    pub wrong_answers: usize,
    /// Text of a question; `{a}` and `{b}` are the operands.
    pub question: String,
    /// Text of an answer; `{a}`, `{b}` and `{sum}` are filled in.
    pub answer: String,
}

impl Default for AdditionPairs {
    fn default() -> Self {
        let sums = Addition::default();
        AdditionPairs {
            split: sums.split,
            min: sums.min,
            max: sums.max,
            seed: sums.seed,
            held_out: sums.held_out,
            count: sums.count,
            wrong_answers: 4,
            question: sums.question,
            answer: sums.answer,
        }
    }
}

const ORIGIN: &str = "addition_pairs";

impl AdditionPairs {
    /// The questions and right answers.
    fn sums(&self) -> Addition {
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
}

impl DataConfig for AdditionPairs {
    const KIND: &'static str = "addition_pairs";
    const SUMMARY: &'static str = "right against wrong sums of two numbers in disjoint splits";

    fn open(&self, _context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        let sums = self.sums().rows()?;
        if self.wrong_answers == 0 || self.max == 0 {
            let reason = match self.max {
                0 => "`max` is 0, so the only sum is 0 and no answer of its size is wrong",
                _ => "`wrong_answers` is 0, which leaves no pairs",
            };
            return Err(DataError::Unreadable {
                path: ORIGIN.to_owned(),
                reason: reason.to_owned(),
            });
        }
        Ok(Arc::new(AdditionPairRows {
            sums,
            seed: self.seed,
            wrong_answers: self.wrong_answers,
            largest: 2 * self.max,
        }))
    }
}

/// The pairs of a split: those of one question are `len / wrong_answers` rows apart.
#[derive(Debug)]
struct AdditionPairRows {
    sums: AdditionRows,
    seed: u64,
    wrong_answers: usize,
    /// Largest sum.
    largest: u32,
}

impl AdditionPairRows {
    /// A wrong answer to a question, the `attempt`-th.
    fn wrong(&self, (a, b): (u32, u32), attempt: u32) -> u32 {
        let draws = DrawKey {
            seed: self.seed,
            purpose: Purpose::Data,
            step: 0,
            row: (u64::from(a) << 32) | u64::from(b),
            attempt,
        };
        wrong_sum(a + b, self.largest, &draws.stream())
    }
}

/// A number from 0 to `largest` that is not `sum`: half of the time one with another digit, else one that is at most 12
/// away, as slips are.
fn wrong_sum(sum: u32, largest: u32, draws: &Stream) -> u32 {
    let other_digit = |position: u32| {
        let digits = sum.to_string().len() as u32;
        let place = 10u32.pow(draws.word(position, 1) % digits);
        let digit = (sum / place) % 10;
        let shifted = (digit + 1 + draws.word(position, 2) % 9) % 10;
        i64::from(sum) + (i64::from(shifted) - i64::from(digit)) * i64::from(place)
    };
    let slip = |position: u32| {
        let distance = i64::from(1 + draws.word(position, 1) % 12);
        let sign = [1, -1][(draws.word(position, 2) % 2) as usize];
        i64::from(sum) + sign * distance
    };
    // A draw that falls outside is drawn again; one that is a step beside the sum always exists.
    let candidates = (0..64).map(|position| match draws.word(position, 0) % 2 {
        0 => other_digit(position),
        _ => slip(position),
    });
    let mut sound = candidates.filter_map(|number| u32::try_from(number).ok());
    sound
        .find(|number| *number != sum && *number <= largest)
        .unwrap_or(if sum < largest { sum + 1 } else { sum - 1 })
}

impl DataLoaderInterface for AdditionPairRows {
    fn len(&self) -> usize {
        self.sums.len() * self.wrong_answers
    }

    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        if index >= self.len() {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        }
        let (question, attempt) = (index % self.sums.len(), index / self.sums.len());
        let (a, b) = self.sums.pairs()[question];
        let wrong = self.wrong((a, b), attempt as u32);
        let mut row = self.sums.row(question)?;
        let rejected = self.sums.answer(a, b, wrong);
        let column =
            |name: &str, value: Option<Value>| (name.to_owned(), value.unwrap_or_default());
        Ok(Map::from_iter([
            column("prompt", row.remove("question")),
            column("chosen", row.remove("answer")),
            column("rejected", Some(rejected.into())),
        ]))
    }

    fn origin(&self) -> String {
        ORIGIN.to_owned()
    }

    fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.sums.fingerprint());
        hash.update(self.seed.to_le_bytes());
        hash.update((self.wrong_answers as u64).to_le_bytes());
        super::hex(&hash.finalize())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::reward::rule::final_answer;

    fn open(config: &AdditionPairs) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        config.open(&BuildContext::default())
    }

    /// The sum of the question, the chosen and the rejected number of each row.
    fn numbers(config: &AdditionPairs) -> Vec<[u32; 3]> {
        let data = open(config).unwrap();
        let number = |row: &Map<String, Value>, column: &str| -> u32 {
            let text = row[column].as_str().expect("a text");
            final_answer(text).unwrap().parse().unwrap()
        };
        (0..data.len())
            .map(|row| {
                let row = data.row(row).unwrap();
                let question = row["prompt"].as_str().unwrap();
                let operands = question.split('+').map(|n| n.parse::<u32>().unwrap());
                [
                    operands.sum(),
                    number(&row, "chosen"),
                    number(&row, "rejected"),
                ]
            })
            .collect()
    }

    #[test]
    fn the_chosen_answer_is_right_and_the_rejected_one_a_wrong_number() {
        let all = numbers(&AdditionPairs::default());
        for [sum, chosen, rejected] in &all {
            assert_eq!(sum, chosen);
            assert!(rejected != sum && *rejected <= 198, "{sum}: {rejected}");
        }
        // Slips and other digits both occur, and so do the answers to one question.
        let far = all.iter().filter(|row| row[2].abs_diff(row[0]) > 12);
        let share = far.count() as f64 / all.len() as f64;
        assert!((0.1..0.5).contains(&share), "{share}");
        let questions = all.len() / 4;
        let same = (0..questions).filter(|&row| all[row][2] == all[row + questions][2]);
        assert!(same.count() < questions / 5);
    }

    #[test]
    fn questions_are_those_of_the_sums_and_seeds_decide_the_rest() {
        let prompts = |config: &AdditionPairs| -> HashSet<String> {
            let data = open(config).unwrap();
            (0..data.len())
                .map(|row| {
                    data.row(row).unwrap()["prompt"]
                        .as_str()
                        .unwrap()
                        .to_owned()
                })
                .collect()
        };
        let held_out = AdditionPairs {
            split: Split::HeldOut,
            wrong_answers: 2,
            ..AdditionPairs::default()
        };
        assert!(prompts(&held_out).is_disjoint(&prompts(&AdditionPairs::default())));
        assert_eq!(prompts(&held_out).len(), 1000);
        let print = |config: &AdditionPairs| open(config).unwrap().fingerprint();
        let other = AdditionPairs {
            wrong_answers: 3,
            ..held_out.clone()
        };
        assert_ne!(print(&held_out), print(&other));
        assert_eq!(numbers(&held_out), numbers(&held_out));
    }

    #[test]
    fn smallest_ranges_have_wrong_answers_too() {
        let tiny = AdditionPairs {
            max: 1,
            held_out: Some(0),
            wrong_answers: 3,
            ..AdditionPairs::default()
        };
        for [sum, _, rejected] in numbers(&tiny) {
            assert!(rejected != sum && rejected <= 2);
        }
        let told = |config: AdditionPairs| open(&config).err().unwrap().to_string();
        let none = AdditionPairs {
            wrong_answers: 0,
            ..tiny.clone()
        };
        assert!(told(none).contains("`wrong_answers` is 0"));
        assert!(told(AdditionPairs { max: 0, ..tiny }).contains("`max` is 0"));
    }
}
