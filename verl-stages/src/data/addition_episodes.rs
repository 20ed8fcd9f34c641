//! Logged answers to sums: right ones with reward 1 and wrong but well-formed ones with reward 0, in three disjoint splits.
//!
//! Questions, answers and splits are those of [`addition`](super::addition). It stands in for the log of an earlier policy,
//! from which offline algorithms learn.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use verl_models::random::{DrawKey, Purpose, open_unit, shuffle};
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::stage::{BuildContext, ConfigError, DataConfig};

use super::addition::{Addition, AdditionRows};

/// Questions such as `12+34` with answers such as `#### 46`, right or wrong, in the columns `prompt`, `response` and
/// `reward`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdditionEpisodes {
    /// The sums; in a pipeline file their settings are next to the others.
    #[serde(flatten)]
    pub sums: Addition,
    /// Episodes per question, each with one answer (episodes); some answers may be the same.
    pub episodes: usize,
    /// Probability of a right answer, in [0, 1].
    pub right: f64,
    /// By how much a wrong answer exceeds the sum; when absent, one of its digits is changed. With one wrong answer per
    /// question and `right = 0.5`, a policy that imitates the log is wrong half of the time.
    pub wrong_by: Option<u32>,
    /// Whether rewards are assigned to other episodes, so that a run can show what it learns from meaningless rewards.
    pub shuffled: bool,
}

impl Default for AdditionEpisodes {
    fn default() -> Self {
        AdditionEpisodes {
            sums: Addition::default(),
            episodes: 4,
            right: 0.5,
            wrong_by: None,
            shuffled: false,
        }
    }
}

const ORIGIN: &str = "addition_episodes";

impl DataConfig for AdditionEpisodes {
    const KIND: &'static str = "addition_episodes";
    const SUMMARY: &'static str =
        "right and wrong answers to sums, with rewards, in disjoint splits";

    fn check(&self, context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        let mut faults = self.sums.check(context).err().unwrap_or_default();
        if self.episodes == 0 {
            let help = "set it to the number of answers to each question";
            faults.push(ConfigError::new(
                "episodes",
                "is 0, which leaves no rows",
                help,
            ));
        }
        if !(0.0..=1.0).contains(&self.right) {
            faults.push(ConfigError::new(
                "right",
                format!("is {}, outside [0, 1]", self.right),
                "set it to the share of right answers",
            ));
        }
        match faults.is_empty() {
            true => Ok(()),
            false => Err(faults),
        }
    }

    fn open(&self, _context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        let refuse = |reason: String| DataError::Unreadable {
            path: ORIGIN.to_owned(),
            reason,
        };
        if self.episodes == 0 {
            return Err(refuse("`episodes` is 0, which leaves no rows".to_owned()));
        }
        if !(0.0..=1.0).contains(&self.right) {
            let right = self.right;
            return Err(refuse(format!(
                "`right` is {right}, but it must lie in [0, 1]"
            )));
        }
        if self.wrong_by == Some(0) {
            let reason = "`wrong_by` is 0, so a wrong answer would be the right one";
            return Err(refuse(reason.to_owned()));
        }
        let sums = self.sums.rows()?;
        let len = sums.len() * self.episodes;
        let judged = self.shuffled.then(|| shuffle(self.sums.seed, 0, len));
        Ok(Arc::new(AdditionEpisodeRows {
            sums,
            judged,
            config: self.clone(),
        }))
    }
}

/// The episodes of a split. Row i belongs to question i modulo the number of questions.
#[derive(Debug)]
struct AdditionEpisodeRows {
    sums: AdditionRows,
    /// The episode whose reward each episode gets, if rewards are shuffled.
    judged: Option<Vec<usize>>,
    config: AdditionEpisodes,
}

impl AdditionEpisodeRows {
    /// The answer of an episode: the sum, or a wrong answer.
    fn answered(&self, (a, b): (u32, u32), episode: u32) -> u32 {
        let draws = DrawKey {
            seed: self.config.sums.seed,
            purpose: Purpose::Data,
            step: 0,
            row: (u64::from(a) << 32) | u64::from(b),
            attempt: episode,
        };
        let draws = draws.stream();
        let sum = a + b;
        if open_unit(draws.word(0, 0)) < self.config.right {
            return sum;
        }
        if let Some(by) = self.config.wrong_by {
            return sum + by;
        }
        let digits = sum.to_string().len() as u32;
        let place = 10u32.pow(draws.word(1, 0) % digits);
        let digit = (sum / place) % 10;
        sum - digit * place + (digit + 1 + draws.word(1, 1) % 9) % 10 * place
    }

    /// The operands and the answer of a row.
    fn episode(&self, index: usize) -> ((u32, u32), u32) {
        let (question, episode) = (index % self.sums.len(), index / self.sums.len());
        let pair = self.sums.pairs()[question];
        (pair, self.answered(pair, episode as u32))
    }
}

impl DataLoaderInterface for AdditionEpisodeRows {
    fn len(&self) -> usize {
        self.sums.len() * self.config.episodes
    }

    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        if index >= self.len() {
            return Err(super::past_the_end(self.origin(), index, self.len()));
        }
        let ((a, b), answered) = self.episode(index);
        let judged = self.judged.as_ref().map_or(index, |judged| judged[index]);
        let ((c, d), judged) = self.episode(judged);
        let reward = f64::from(u8::from(judged == c + d));
        let sums = &self.config.sums;
        Ok(Map::from_iter([
            ("prompt".to_owned(), sums.question_of(a, b).into()),
            ("response".to_owned(), sums.answer_of(a, b, answered).into()),
            ("reward".to_owned(), reward.into()),
        ]))
    }

    fn origin(&self) -> String {
        ORIGIN.to_owned()
    }

    fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.sums.fingerprint());
        hash.update(self.config.sums.seed.to_le_bytes());
        hash.update((self.config.episodes as u64).to_le_bytes());
        hash.update(self.config.right.to_le_bytes());
        hash.update(self.config.wrong_by.unwrap_or(0).to_le_bytes());
        hash.update([u8::from(self.config.shuffled)]);
        super::hex(&hash.finalize())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use verl_words::conformance::check_data;

    use super::*;
    use crate::data::addition::Split;
    use crate::reward::rule::final_answer;

    fn open(config: &AdditionEpisodes) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        config.open(&BuildContext::default())
    }

    fn rows(config: &AdditionEpisodes) -> Vec<Map<String, Value>> {
        let data = open(config).unwrap();
        (0..data.len()).map(|row| data.row(row).unwrap()).collect()
    }

    #[test]
    fn rewards_distinguish_right_answers_from_wrong_ones() {
        let all = rows(&AdditionEpisodes::default());
        let mut right = 0;
        for row in &all {
            let operands = row["prompt"].as_str().unwrap().split('+');
            let sum: u32 = operands.map(|n| n.parse::<u32>().unwrap()).sum();
            let answer = row["response"].as_str().unwrap();
            let answer: u32 = final_answer(answer).unwrap().parse().unwrap();
            assert_eq!(row["reward"] == 1.0, answer == sum, "{row:?}");
            right += usize::from(answer == sum);
        }
        let share = right as f64 / all.len() as f64;
        assert!((share - 0.5).abs() < 0.02, "{share}");
        for (right, rewards) in [(0.0, 0.0), (1.0, 1.0)] {
            let config = AdditionEpisodes {
                right,
                ..AdditionEpisodes::default()
            };
            assert!(rows(&config).iter().all(|row| row["reward"] == rewards));
        }
    }

    #[test]
    fn shuffled_rewards_are_the_same_in_another_order() {
        let plain = AdditionEpisodes::default();
        let shuffled = AdditionEpisodes {
            shuffled: true,
            ..plain.clone()
        };
        let (plain, shuffled) = (rows(&plain), rows(&shuffled));
        let rewards = |rows: &[Map<String, Value>]| -> Vec<bool> {
            rows.iter().map(|row| row["reward"] == 1.0).collect()
        };
        let (before, after) = (rewards(&plain), rewards(&shuffled));
        let right = |rewards: &[bool]| rewards.iter().filter(|right| **right).count();
        assert_eq!(right(&before), right(&after));
        let same = before.iter().zip(&after).filter(|(a, b)| a == b).count();
        assert!(
            same.abs_diff(before.len() / 2) < before.len() / 20,
            "{same}"
        );
        for (a, b) in plain.iter().zip(&shuffled) {
            assert!(a["prompt"] == b["prompt"] && a["response"] == b["response"]);
        }
    }

    #[test]
    fn it_conforms_and_splits_are_disjoint() {
        let train = AdditionEpisodes::default();
        assert_eq!(check_data(|| open(&train)), []);
        let mut held_out = AdditionEpisodes {
            episodes: 2,
            ..train.clone()
        };
        held_out.sums.split = Split::HeldOut;
        let prompts = |config: &AdditionEpisodes| -> HashSet<String> {
            let rows = rows(config).into_iter();
            rows.map(|row| row["prompt"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(prompts(&held_out).len(), 1000);
        assert!(prompts(&held_out).is_disjoint(&prompts(&train)));
        let other = AdditionEpisodes {
            right: 0.4,
            ..train.clone()
        };
        let print = |config: &AdditionEpisodes| open(config).unwrap().fingerprint();
        assert_ne!(print(&other), print(&train));
    }

    #[test]
    fn bad_settings_are_refused() {
        let error = |config: AdditionEpisodes| open(&config).err().unwrap().to_string();
        let plain = AdditionEpisodes::default;
        let none = AdditionEpisodes {
            episodes: 0,
            ..plain()
        };
        assert!(error(none).contains("`episodes` is 0"));
        let right = AdditionEpisodes {
            right: 1.5,
            ..plain()
        };
        assert!(error(right).contains("`right` is 1.5"));
        let same = AdditionEpisodes {
            wrong_by: Some(0),
            ..plain()
        };
        assert!(error(same).contains("`wrong_by` is 0"));
    }

    #[test]
    fn there_can_be_one_wrong_answer_per_question() {
        let one = AdditionEpisodes {
            wrong_by: Some(10),
            ..AdditionEpisodes::default()
        };
        let answers = |config: &AdditionEpisodes| {
            let mut answers: HashMap<String, HashSet<String>> = HashMap::new();
            for row in rows(config) {
                let text = |column: &str| row[column].as_str().unwrap().to_owned();
                answers
                    .entry(text("prompt"))
                    .or_default()
                    .insert(text("response"));
            }
            answers.into_values().map(|answers| answers.len()).max()
        };
        assert_eq!(answers(&one), Some(2));
        assert_eq!(answers(&AdditionEpisodes::default()), Some(4));
    }
}
