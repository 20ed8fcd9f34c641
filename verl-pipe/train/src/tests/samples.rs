//! Rows of a step for `samples.jsonl`.

use serde_json::{Value, json};
use verl_declare::pipe::StageDecl;
use verl_words::keys::{ANSWERS, GROUP_MEANS, PROMPT_TEXTS, PROMPTS, RESPONSE_TEXTS, REWARDS};
use verl_words::stage::{Cardinality, RowRule, StageSpec};

use super::fakes::*;

/// Prompts with their texts and answers.
fn worded() -> StageDecl {
    let spec = StageSpec::new()
        .rows(RowRule::Source)
        .writes(PROMPTS)
        .writes(PROMPT_TEXTS)
        .writes(ANSWERS);
    single("prompts", spec, |_, context| {
        let mut prompts = prompts_of(context.step)?;
        let of_row = |word: &str| -> Vec<String> {
            let rows = prompts.ids().into_iter();
            rows.map(|id| format!("{word} {}", id.row())).collect()
        };
        let (texts, answers) = (of_row("question"), of_row("answer"));
        prompts.put(&PROMPT_TEXTS, texts)?;
        prompts.put(&ANSWERS, answers)?;
        context.emit(prompts)
    })
}

#[track_caller]
fn sampled(stages: Vec<StageDecl>, count: usize) -> Vec<Value> {
    let mut pipe = pipeline(stages);
    pipe.run.samples_per_step = count;
    start_with(&pipe, options()).step().expect("a step").samples
}

#[test]
fn rows_are_spread_over_the_step() {
    let all = sampled(vec![worded()], BATCH.prompts * SAMPLES);
    assert_eq!(all.len(), 18);
    // More than the step has.
    assert_eq!(sampled(vec![worded()], 100), all);
    assert_eq!(sampled(vec![worded()], 2), [all[0].clone(), all[9].clone()]);
    assert_eq!(sampled(vec![worded()], 0), [] as [Value; 0]);
}

#[test]
fn a_row_has_all_available_fields() {
    let row = sampled(vec![worded()], 1).remove(0);
    let names: Vec<&str> = row
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        names,
        [
            "kind",
            "id",
            "prompt",
            "response",
            "answer",
            "reward",
            "advantage"
        ]
    );
    // Prompts come last row first; data row 5, sample 0 has 1 + 5 % 4 tokens, the first of them 100 + 5.
    assert_eq!(row["kind"], "training");
    assert_eq!(row["id"], "0.5#0");
    assert_eq!(
        (&row["prompt"], &row["answer"]),
        (&json!("question 5"), &json!("answer 5"))
    );
    assert_eq!(row["response"], "105-205");
    assert_eq!(row["reward"], 10.5);
    // All samples of a prompt start with the same token, so all have the same reward.
    assert_eq!(row["advantage"], 0.0);
}

#[test]
fn a_text_that_a_stage_wrote_is_not_decoded_again() {
    let spec = reward_spec().writes(RESPONSE_TEXTS);
    let reward = single("reward", spec, |mut input, context| {
        let rows = input.num_rows();
        input.put(&RESPONSE_TEXTS, vec!["as written".to_owned(); rows])?;
        let rewards: Vec<Option<f32>> = input
            .ids()
            .iter()
            .map(|id| (id.row() != 5).then_some(1.0))
            .collect();
        input.put(&REWARDS, rewards)?;
        context.emit(input)
    });
    let rows = sampled(vec![reward], 2);
    assert_eq!(rows[0]["response"], "as written");
    // A row that could not be scored says so.
    assert_eq!(
        (&rows[0]["reward"], &rows[1]["reward"]),
        (&Value::Null, &json!(1.0))
    );
    assert_eq!(rows[0].get("prompt"), None);
}

#[test]
fn keys_with_another_name_are_found() {
    let mut pipe = pipeline(vec![worded()]);
    for stage in &mut pipe.stages {
        if ["reward", "advantages"].contains(&stage.name.as_str()) {
            stage
                .rename
                .insert("rewards".to_owned(), "scores".to_owned());
        }
    }
    pipe.run.samples_per_step = 1;
    let rows = start_with(&pipe, options()).step().expect("a step").samples;
    assert_eq!(rows[0]["reward"], 10.5);
}

#[test]
fn after_a_filter_only_kept_rows_are_sampled() {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .writes(GROUP_MEANS)
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group);
    let filter = stage("filter", spec, |input, context| {
        let mut kept = input.rows_only();
        kept.put(&GROUP_MEANS, vec![0.5; input.num_rows()])?;
        if input.ids()[0].row().is_multiple_of(2) {
            context.emit(kept)?;
        }
        Ok(())
    });
    let mut judged = advantages();
    let inner = judged.build.clone();
    judged.build = std::sync::Arc::new(move |context| {
        let stage = inner(context)?;
        Ok(Box::new(AfterFilter(stage)))
    });
    let update = StageSpec::new()
        .reads(verl_words::keys::ADVANTAGES)
        .rows(RowRule::Sink);
    let update = stage("update", update, |_, _| Ok(()));
    let rows = sampled(vec![worded(), filter, judged, update], 18);
    assert_eq!(rows.len(), 9);
    let even = |row: &Value| {
        ["question 0", "question 2", "question 4"]
            .contains(&row["prompt"].as_str().unwrap_or_default())
    };
    assert!(rows.iter().all(even), "{rows:?}");
    assert!(rows.iter().all(|row| row["advantage"].is_number()));
}

/// A stage that processes the rows that a filter kept.
struct AfterFilter(Box<dyn verl_words::stage::Stage>);

impl verl_words::stage::Stage for AfterFilter {
    fn spec(&self) -> StageSpec {
        self.0.spec().reads(GROUP_MEANS)
    }
    fn run(
        &mut self,
        input: verl_words::batch::Batch,
        context: &mut verl_words::stage::StageContext<'_>,
    ) -> Result<(), verl_words::stage::StageError> {
        self.0.run(input, context)
    }
}
