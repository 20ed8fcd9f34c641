//! Stage `teacher_top`: a teacher's most probable tokens at the position of each response token.
//!
//! A column of the batch has one ragged dim, so the lists of a row are concatenated: with K tokens per list, items t·K to
//! (t + 1)·K of the row belong to response token t, most probable first. Observations have lists too, but nothing reads
//! them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::field::{Field, Key, LogProbTag, Ragged, Support, Weights};
use verl_words::keys::{PROMPTS, RESPONSES};
use verl_words::stage::{
    Access, BuildContext, ConfigError, ModelWork, Stage, StageConfig, StageContext, StageError,
    StageSpec, find_model,
};

use crate::log_probs::{scoring_temperature, scoring_temperature_fault};
use crate::model::{POLICY, PolicyResource};
use crate::refusals::refused_row;
use crate::settings::metrics;
use crate::training::score_rows;

/// Ids of the teacher's most probable tokens, one list per response token.
pub const TEACHER_TOP_IDS: Key<Ragged<u32>> = Key::new(
    "teacher_top_ids",
    "[B, TK~]",
    "token id",
    "the teacher's K most probable tokens for each response token, most probable first",
);
/// The teacher's log-probs of these tokens.
pub const TEACHER_TOP_LOG_PROBS: Key<Ragged<f32>> = Key::new(
    "teacher_top_log_probs",
    "[B, TK~]",
    "nats",
    "the teacher's log-probs of its most probable tokens",
)
.finite();

metrics! {
    TEACHER_MASS: "teacher/top_mass", "probability", "mean probability that the teacher assigns to the listed tokens";
}

/// Settings of stage `teacher_top`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TeacherTop {
    /// The teacher; it must have the student's vocabulary.
    pub model: String,
    /// Tokens listed for each response token, K (tokens).
    pub top_k: usize,
    /// Divides logits, as in `distill`; the temperature at which the responses were sampled when absent.
    pub temperature: Option<f64>,
}

impl Default for TeacherTop {
    fn default() -> Self {
        TeacherTop {
            model: "teacher".to_owned(),
            top_k: 16,
            temperature: None,
        }
    }
}

impl StageConfig for TeacherTop {
    const KIND: &'static str = "teacher_top";
    const SUMMARY: &'static str = "a teacher's most probable tokens, with log-probs";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(scoring_temperature_fault(self.temperature));
        if self.top_k == 0 {
            faults.push(ConfigError::new(
                "top_k",
                "is 0, so no tokens would be listed",
                "set it to a small number of tokens, at most the vocabulary size",
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(TeacherTopStage {
            config: self.clone(),
            temperature: scoring_temperature(self.temperature, context),
        }))
    }
}

/// [`TEACHER_TOP_LOG_PROBS`] as a teacher that never changes writes them.
pub(crate) fn teacher_log_probs(policy: Option<String>, temperature: f64) -> Field {
    TEACHER_TOP_LOG_PROBS.tagged(LogProbTag {
        policy,
        temperature: Some(temperature),
        support: Some(Support::Full),
        weights: Some(Weights::Frozen),
    })
}

/// The running stage.
#[derive(Clone)]
struct TeacherTopStage {
    config: TeacherTop,
    temperature: f64,
}

impl Stage for TeacherTopStage {
    fn spec(&self) -> StageSpec {
        let model = self.config.model.clone();
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .at_temperature_of(RESPONSES.name())
            .writes(TEACHER_TOP_IDS)
            .writes(teacher_log_probs(Some(model), self.temperature))
            .uses_as(POLICY, &self.config.model, Access::Read)
            .works(ModelWork::scoring(&self.config.model).of([PROMPTS.name(), RESPONSES.name()]))
            .metrics(&[TEACHER_MASS])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&RESPONSES)?);
        let rows = score_rows(&prompts, &responses);
        let TeacherTop { model, top_k, .. } = &self.config;
        let policy = find_model::<PolicyResource>(context.models, model)?.policy();
        let top = policy
            .top_tokens(&rows, *top_k, self.temperature)
            .map_err(|error| refused_row(error, &input.ids()))?;
        for row in top.iter().filter(|row| !row.ids.is_empty()) {
            let tokens = (row.ids.len() / top_k) as f64;
            let mass: f64 = row.log_probs.iter().map(|l| libm::exp(f64::from(*l))).sum();
            context.record_weighted(&TEACHER_MASS, mass / tokens, tokens);
        }
        let mut output = input.rows_only();
        let ids = RaggedColumn::from_rows(top.iter().map(|row| &row.ids));
        output.put(&TEACHER_TOP_IDS, ids)?;
        let log_probs = RaggedColumn::from_rows(top.iter().map(|row| &row.log_probs));
        output.put(&TEACHER_TOP_LOG_PROBS, log_probs)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}
