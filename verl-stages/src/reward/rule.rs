//! Stage `reward`: scores a response by a rule on its text. Runs on the host pool, one row per call.
//!
//! A pipeline may have several, each with its own name and its rewards under a different key (`rename`). Their metrics
//! are named after the stage: `form/correct_share` for one called `form`.
//!
//! | rule | answer | right | wrong |
//! |---|---|---|---|
//! | `final_answer` | `18` | `#### 18 eggs`, `#### **$18.00**`, `#### £18`, `#### = 18`, `#### \boxed{18}`, `#### 36/2`, `#### 18 ####` | `#### 18 #### 19`, `#### 18 or 19`, `#### not 18`, `#### 1 8`, `#### 18 hundred`, `18` |
//! | | `70000` | `#### 70,000`, `#### 7e4` | `#### 7,0000` |
//! | | `Paris` | `#### Paris` | `#### paris` |
//! | `math` | `\frac{1}{2}` | `\boxed{0.5}`, `The answer is 1/2.`, `$50\%$` | `\boxed{0.51}`, `1/2 or 1/3` |
//! | | `2\sqrt{2}` | `\boxed{\sqrt{8}}` | `\boxed{2.83}` |
//! | | `x^2+2x+1` | `\boxed{(x+1)^2}` | `\boxed{(x-1)^2}` |
//! | | `(-\infty,3]` | `\boxed{(-\infty, 3]}` | `\boxed{(-\infty,3)}` |
//! | `regex` with `answer is (\d+)` | `18` | `The answer is 18.` | `18` |
//! | `exact` | `4` | ` 4` | `4.0` |
//!
//! ```
//! use verl_stages::reward::rule::{Reward, Rule, RuleKind};
//!
//! let judge = |rule, answer: &str, response: &str| {
//!     let pattern = (rule == RuleKind::Regex).then(|| r"answer is (\d+)".to_owned());
//!     let rule = Rule::new(&Reward { rule, pattern, ..Reward::default() }).expect("a sound rule");
//!     rule.judge(response, answer, 8).correct
//! };
//! let rule = RuleKind::FinalAnswer;
//! for right in ["18 eggs", "**$18.00**", "£18", "= 18", r"\boxed{18}", "36/2", "18 ####"] {
//!     assert!(judge(rule, "18", &format!("9 * 2 = 18\n#### {right}")), "{right}");
//! }
//! for wrong in ["18 #### 19", "18 or 19", "not 18", "1 8", "18 hundred"] {
//!     assert!(!judge(rule, "18", &format!("9 * 2 = 18\n#### {wrong}")), "{wrong}");
//! }
//! assert!(judge(rule, "70000", "#### 70,000") && !judge(rule, "70000", "#### 7,0000"));
//! assert!(judge(rule, "Paris", "#### Paris") && !judge(rule, "Paris", "#### paris"));
//!
//! let rule = RuleKind::Math;
//! for right in [r"\boxed{0.5}", "The answer is 1/2.", r"$50\%$"] {
//!     assert!(judge(rule, r"\frac{1}{2}", right), "{right}");
//! }
//! assert!(!judge(rule, r"\frac{1}{2}", r"\boxed{0.51}") && !judge(rule, r"\frac{1}{2}", "1/2 or 1/3"));
//! assert!(judge(rule, r"2\sqrt{2}", r"\boxed{\sqrt{8}}") && !judge(rule, r"2\sqrt{2}", r"\boxed{2.83}"));
//! assert!(judge(rule, "x^2+2x+1", r"\boxed{(x+1)^2}") && !judge(rule, "x^2+2x+1", r"\boxed{(x-1)^2}"));
//! assert!(!judge(rule, r"(-\infty,3]", r"\boxed{(-\infty,3)}"));
//!
//! assert!(judge(RuleKind::Regex, "18", "The answer is 18.") && !judge(RuleKind::Regex, "18", "18"));
//! assert!(judge(RuleKind::Exact, "4", " 4\n") && !judge(RuleKind::Exact, "4", "4.0"));
//! ```

use std::time::Duration;

use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::Batch;
use verl_words::keys::{ANSWERS, RESPONSE_TEXTS, RESPONSES, REWARDS};
use verl_words::stage::{
    BuildContext, ConfigError, Metric, Reduce, Stage, StageConfig, StageContext, StageError,
    StageSpec,
};

use super::math;
use super::number::Number;

/// The mark before a final answer.
const MARK: &str = "####";

/// Share of scored responses whose answer is right.
pub const CORRECT: Metric = Metric {
    name: "reward/correct_share",
    unit: "share",
    meaning: "share of responses that earn the reward of a right answer",
    reduce: Reduce::Mean,
    role: None,
};
/// Share of scored responses in the form that the rule expects.
pub const WELL_FORMED: Metric = Metric {
    name: "reward/well_formed_share",
    unit: "share",
    meaning: "share of responses in which the rule finds an answer, right or wrong",
    reduce: Reduce::Mean,
    role: None,
};

/// What a rule checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleKind {
    /// The number after the last `####` of the response equals the one after the last `####` of the answer (the
    /// entire answer if it has none). It is compared exactly. Currencies, units, a percent sign, marks of emphasis, a full
    /// stop, `=`, `x =`, `$…$` and `\boxed{}` around it do not matter; anything else does, so that `18 or 19` and
    /// `18 hundred` are not 18. An answer without a number is compared as a text, apart from white space at both ends.
    #[default]
    FinalAnswer,
    /// The response states the same mathematics as the answer, as Math-Verify reads it: `\frac{1}{2}` is `0.5`, `\sqrt{8}`
    /// is `2\sqrt{2}`, `(x+1)^2` is `x^2+2x+1`, `\{1,2\}` is `2,1`. In the response, the last `\boxed{}` or what follows "the
    /// final answer is" counts, otherwise what follows `####`, otherwise what follows the word "answer", otherwise the last
    /// formula or number. The answer is LaTeX, plain text, or a complete solution with a box or `####`.
    Math,
    /// The whole response equals the whole answer, apart from white space at both ends.
    Exact,
    /// The text that `pattern` finds equals the answer, compared as by `final_answer`. The last match counts: its first
    /// group that took part, or the whole match if the pattern has no groups.
    Regex,
    /// The response has at most `target_tokens` tokens; each further token costs `correct / target_tokens`, down to
    /// `wrong`.
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

/// The result of a rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The reward.
    pub reward: f32,
    /// The response has the form that the rule expects.
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

/// The text after the last `####` of a response: the rest of the line, or the first line of text after it, without white
/// space at both ends. Trailing marks are ignored: `#### 18 ####` answers 18. `None` without an answer.
///
/// ```
/// use verl_stages::reward::rule::final_answer;
///
/// assert_eq!(final_answer("48 / 2 = 24\n#### 72 eggs"), Some("72 eggs"));
/// assert_eq!(final_answer("#### 18 #### 19\nThat is all."), Some("19"));
/// assert_eq!(final_answer("####\n18 ####"), Some("18"));
/// assert_eq!(final_answer("no answer"), None);
/// ```
pub fn final_answer(text: &str) -> Option<&str> {
    final_answer_at(text).map(|(_, answer)| answer)
}

/// The final answer and where it begins (bytes).
pub(super) fn final_answer_at(text: &str) -> Option<(usize, &str)> {
    let mut text = text.trim_end();
    while text.ends_with(MARK) {
        text = text.trim_end_matches('#').trim_end();
    }
    let rest = &text[text.rfind(MARK)? + MARK.len()..];
    let rest = rest.trim_start();
    let answer = rest.lines().next()?.trim_end();
    (!answer.is_empty()).then_some((text.len() - rest.len(), answer))
}

/// Whether two answers state the same number, read and compared as [`Number`] does; where neither states one, whether
/// they are the same text, apart from white space at both ends.
///
/// ```
/// use verl_stages::reward::rule::same_number;
///
/// assert!(same_number("1,000", "$1000.00"));
/// assert!(same_number("Paris", " Paris"));
/// assert!(!same_number("12", "21") && !same_number("1,23", "123") && !same_number("18 or 19", "18"));
/// ```
pub fn same_number(a: &str, b: &str) -> bool {
    match (Number::read(a), Number::read(b)) {
        (Some(a), Some(b)) => a == b,
        (None, None) => a.trim() == b.trim(),
        _ => false,
    }
}

impl Rule {
    /// Compiles the rule.
    ///
    /// # Errors
    /// All settings that are missing, out of range or without effect.
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
                    format!("is not a valid regular expression: {error}"),
                    "fix the expression",
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
        let (well_formed, correct) = match self.config.rule {
            RuleKind::Exact => {
                let found = response.trim();
                (
                    !found.is_empty(),
                    !found.is_empty() && found == answer.trim(),
                )
            }
            RuleKind::Math => {
                let found = math::answer_of(response);
                let same = |found: &String| math::same_answer(answer, found);
                (found.is_some(), found.as_ref().is_some_and(same))
            }
            RuleKind::FinalAnswer | RuleKind::Regex | RuleKind::Length => {
                let found = match self.config.rule {
                    RuleKind::Regex => self.last_match(response),
                    _ => final_answer(response),
                };
                let wanted = final_answer(answer).unwrap_or(answer.trim());
                let same = found.is_some_and(|found| same_number(found, wanted));
                (found.is_some(), same)
            }
        };
        let reward = match (correct, well_formed) {
            (true, _) => self.config.correct,
            (false, true) => self.config.well_formed,
            (false, false) => self.config.wrong,
        };
        Verdict {
            reward,
            well_formed,
            correct,
        }
    }

    /// The first group that took part in the last match; the whole match if the pattern has no groups.
    fn last_match<'t>(&self, response: &'t str) -> Option<&'t str> {
        let captures = self.pattern.as_ref()?.captures_iter(response).last()?;
        let whole = if captures.len() == 1 {
            captures.get(0)
        } else {
            None
        };
        let found = captures.iter().skip(1).flatten().next().or(whole)?;
        Some(found.as_str().trim())
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

/// Records a metric under the name of the stage; under the metric's own name if the stage is called `reward`.
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
mod tests;
