//! Stage `reward`: scores a response by a rule on its text. Runs on the host pool, one row a call.
//!
//! A pipeline may have several, each with a name of its own and its rewards under another key (`rename`). Their metrics
//! are named after the stage: `form/correct_share` for one called `form`.
//!
//! ```
//! use verl_stages::reward::rule::{final_answer, same_number};
//!
//! assert_eq!(final_answer("48 / 2 = 24\n#### 72"), Some("72"));
//! assert_eq!(final_answer("no answer"), None);
//! assert!(same_number("1,000", "1000.0"));
//! assert!(!same_number("12", "21"));
//! ```

use std::time::Duration;

use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_pipe::batch::Batch;
use verl_pipe::keys::{ANSWERS, RESPONSE_TEXTS, RESPONSES, REWARDS};
use verl_pipe::stage::{
    BuildContext, ConfigError, Metric, Reduce, Stage, StageConfig, StageContext, StageError,
    StageSpec,
};

/// Share of scored responses whose answer is right.
pub const CORRECT: Metric = Metric {
    name: "reward/correct_share",
    unit: "share",
    meaning: "share of responses that earn the reward of a right answer",
    reduce: Reduce::Mean,
};
/// Share of scored responses in the form that the rule asks for.
pub const WELL_FORMED: Metric = Metric {
    name: "reward/well_formed_share",
    unit: "share",
    meaning: "share of responses in which the rule finds an answer, right or wrong",
    reduce: Reduce::Mean,
};

/// What a rule looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleKind {
    /// The number after the last `####` of the response equals the one after the last `####` of the answer
    /// (the whole answer where it has none). Numbers are compared as numbers: `1,000` is `1000`.
    #[default]
    FinalAnswer,
    /// The whole response equals the whole answer, apart from white space at both ends.
    Exact,
    /// The first group of `pattern` (the whole match where it has no group) equals the answer; the last match counts.
    Regex,
    /// The response has at most `target_tokens` tokens; each token more costs `correct / target_tokens`, down to `wrong`.
    Length,
}

/// Settings of stage `reward`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Reward {
    /// The rule.
    pub rule: RuleKind,
    /// Regular expression of rule `regex`.
    pub pattern: Option<String>,
    /// Length of rule `length` (tokens).
    pub target_tokens: Option<usize>,
    /// Reward of a right answer.
    pub correct: f32,
    /// Reward of a wrong answer in the right form.
    pub well_formed: f32,
    /// Reward of anything else.
    pub wrong: f32,
    /// Longest time for one row (seconds).
    pub deadline_s: f64,
}

impl Default for Reward {
    fn default() -> Self {
        Reward {
            rule: RuleKind::FinalAnswer,
            pattern: None,
            target_tokens: None,
            correct: 1.0,
            well_formed: 0.0,
            wrong: 0.0,
            deadline_s: 10.0,
        }
    }
}

/// What a rule found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The reward.
    pub reward: f32,
    /// The response has the form that the rule asks for.
    pub well_formed: bool,
    /// The answer is right.
    pub correct: bool,
}

/// A rule, ready to judge.
#[derive(Debug, Clone)]
pub struct Rule {
    config: Reward,
    pattern: Option<Regex>,
}

/// The text after the last `####`, up to the end of its line, without white space; `None` without one or when empty.
pub fn final_answer(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("####")?;
    let line = rest
        .trim_start_matches([' ', '\t'])
        .lines()
        .next()
        .unwrap_or("");
    let answer = line.trim();
    (!answer.is_empty()).then_some(answer)
}

/// Whether two answers are the same number, or, where one is no number, the same text.
pub fn same_number(a: &str, b: &str) -> bool {
    let clean = |text: &str| -> String {
        text.trim()
            .trim_end_matches('.')
            .chars()
            .filter(|c| !matches!(c, ',' | '$' | '%' | ' '))
            .collect()
    };
    let (a, b) = (clean(a), clean(b));
    match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(x), Ok(y)) if x.is_finite() && y.is_finite() => x == y,
        _ => a == b,
    }
}

impl Rule {
    /// Compiles the rule.
    ///
    /// # Errors
    /// All settings that make no sense.
    pub fn new(config: &Reward) -> Result<Rule, Vec<ConfigError>> {
        let mut faults = Vec::new();
        for (name, value) in [
            ("correct", config.correct),
            ("well_formed", config.well_formed),
            ("wrong", config.wrong),
        ] {
            if !value.is_finite() {
                faults.push(ConfigError::new(
                    name,
                    format!("is {value}, but a reward must be finite"),
                    "set it to a number",
                ));
            }
        }
        if !(config.deadline_s > 0.0 && config.deadline_s.is_finite()) {
            faults.push(ConfigError::new(
                "deadline_s",
                format!("is {}", config.deadline_s),
                "set it to a number of seconds above 0",
            ));
        }
        let needs_pattern = config.rule == RuleKind::Regex;
        if needs_pattern != config.pattern.is_some() {
            let reason = if needs_pattern {
                "is missing; rule `regex` needs it"
            } else {
                "is only read by rule `regex`"
            };
            faults.push(ConfigError::new(
                "pattern",
                reason,
                "set `rule = \"regex\"` and `pattern = '…'` together",
            ));
        }
        let needs_target = config.rule == RuleKind::Length;
        if needs_target != config.target_tokens.is_some_and(|t| t > 0) {
            let reason = if needs_target {
                "is missing or 0; rule `length` needs it"
            } else {
                "is only read by rule `length`"
            };
            faults.push(ConfigError::new(
                "target_tokens",
                reason,
                "set `rule = \"length\"` and `target_tokens = N` together",
            ));
        }
        let pattern = match config.pattern.as_deref().map(Regex::new) {
            Some(Err(error)) => {
                faults.push(ConfigError::new(
                    "pattern",
                    format!("is no regular expression: {error}"),
                    "mend the expression",
                ));
                None
            }
            Some(Ok(regex)) => Some(regex),
            None => None,
        };
        if faults.is_empty() {
            Ok(Rule {
                config: config.clone(),
                pattern,
            })
        } else {
            Err(faults)
        }
    }

    /// Judges a response of `tokens` tokens.
    pub fn judge(&self, response: &str, answer: &str, tokens: usize) -> Verdict {
        if self.config.rule == RuleKind::Length {
            return self.judge_length(tokens);
        }
        let found = match self.config.rule {
            RuleKind::FinalAnswer => final_answer(response),
            RuleKind::Exact => Some(response.trim()).filter(|text| !text.is_empty()),
            RuleKind::Regex | RuleKind::Length => self.last_match(response),
        };
        let wanted = match self.config.rule {
            RuleKind::Exact => answer.trim(),
            _ => final_answer(answer).unwrap_or(answer.trim()),
        };
        let correct = match self.config.rule {
            RuleKind::Exact => found == Some(wanted),
            _ => found.is_some_and(|text| same_number(text, wanted)),
        };
        let reward = match (correct, found.is_some()) {
            (true, _) => self.config.correct,
            (false, true) => self.config.well_formed,
            (false, false) => self.config.wrong,
        };
        Verdict {
            reward,
            well_formed: found.is_some(),
            correct,
        }
    }

    fn last_match<'t>(&self, response: &'t str) -> Option<&'t str> {
        let captures = self.pattern.as_ref()?.captures_iter(response).last()?;
        captures
            .get(1)
            .or_else(|| captures.get(0))
            .map(|found| found.as_str().trim())
    }

    fn judge_length(&self, tokens: usize) -> Verdict {
        let target = self.config.target_tokens.unwrap_or(1);
        let excess = tokens.saturating_sub(target) as f32 / target as f32;
        let reward = (self.config.correct * (1.0 - excess)).max(self.config.wrong);
        Verdict {
            reward,
            well_formed: true,
            correct: tokens <= target,
        }
    }
}

impl StageConfig for Reward {
    const KIND: &'static str = "reward";
    const SUMMARY: &'static str = "scores each response by a rule on its text";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(RewardStage {
            rule: Rule::new(self)?,
        }))
    }
}

/// The running stage.
#[derive(Clone)]
struct RewardStage {
    rule: Rule,
}

/// Records a metric under the name of the stage; of one that is called as its kind, under the metric's own.
fn report(context: &mut StageContext<'_>, metric: &Metric, value: f64) {
    match metric.name.split_once('/') {
        Some((_, name)) if context.stage != Reward::KIND => {
            let name = format!("{}/{name}", context.stage);
            context.sink.record_named(&name, value, 1.0);
        }
        _ => context.record(metric, value),
    }
}

impl Stage for RewardStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(RESPONSES)
            .reads(RESPONSE_TEXTS)
            .reads(ANSWERS)
            .writes(REWARDS)
            .deadline(Duration::from_secs_f64(self.rule.config.deadline_s))
            .metrics(&[CORRECT, WELL_FORMED])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (responses, texts, answers) = (
            input.get(&RESPONSES)?,
            input.get(&RESPONSE_TEXTS)?,
            input.get(&ANSWERS)?,
        );
        let mut rewards = Vec::with_capacity(input.num_rows());
        for row in 0..input.num_rows() {
            let verdict = self
                .rule
                .judge(texts.row(row), answers.row(row), responses.row_len(row));
            report(context, &CORRECT, f64::from(verdict.correct));
            report(context, &WELL_FORMED, f64::from(verdict.well_formed));
            rewards.push(verdict.reward);
        }
        let mut output = input.rows_only();
        output.put(&REWARDS, rewards)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(config: Reward, response: &str, answer: &str, wanted: (f32, bool, bool)) {
        let verdict =
            Rule::new(&config)
                .expect("a sound rule")
                .judge(response, answer, response.len());
        assert_eq!(
            (verdict.reward, verdict.well_formed, verdict.correct),
            wanted
        );
    }

    fn scored(rule: RuleKind) -> Reward {
        Reward {
            rule,
            correct: 1.0,
            well_formed: 0.1,
            wrong: -1.0,
            ..Reward::default()
        }
    }

    #[test]
    fn final_answers() {
        let rule = || scored(RuleKind::FinalAnswer);
        check(rule(), "2+2=4\n#### 4", "so 4.\n#### 4", (1.0, true, true));
        check(rule(), "#### 5 #### 4", "#### 4", (1.0, true, true));
        check(rule(), "#### $1,234.", "#### 1234", (1.0, true, true));
        check(rule(), "#### 5", "4", (0.1, true, false));
        check(rule(), "####", "4", (-1.0, false, false));
        check(rule(), "4", "4", (-1.0, false, false));
        check(rule(), "#### NaN", "#### NaN", (1.0, true, true));
    }

    #[test]
    fn exact_answers() {
        check(scored(RuleKind::Exact), " 4\n", "4", (1.0, true, true));
        check(scored(RuleKind::Exact), "4.0", "4", (0.1, true, false));
        check(scored(RuleKind::Exact), "  ", "4", (-1.0, false, false));
    }

    #[test]
    fn regex_answers() {
        let rule = || Reward {
            pattern: Some(r"\\boxed\{([^}]*)\}".to_owned()),
            ..scored(RuleKind::Regex)
        };
        check(
            rule(),
            r"\boxed{3} then \boxed{ 4 }",
            "4",
            (1.0, true, true),
        );
        check(rule(), "4", "4", (-1.0, false, false));
    }

    #[test]
    fn lengths() {
        let rule = || Reward {
            target_tokens: Some(4),
            ..scored(RuleKind::Length)
        };
        check(rule(), "abcd", "", (1.0, true, true));
        check(rule(), "abcdef", "", (0.5, true, false));
        check(rule(), &"x".repeat(40), "", (-1.0, true, false));
    }

    #[test]
    fn senseless_settings_are_told_together() {
        let config = Reward {
            rule: RuleKind::Exact,
            pattern: Some("(".to_owned()),
            correct: f32::NAN,
            deadline_s: 0.0,
            ..Reward::default()
        };
        let faults = Rule::new(&config).expect_err("four faults");
        let settings: Vec<_> = faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(settings, ["correct", "deadline_s", "pattern", "pattern"]);
    }
}
