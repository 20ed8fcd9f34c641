use verl_declare::pipe::StageDecl;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::keys::{MASK_KINDS, PROMPTS, RESPONSES, REWARDS};
use verl_words::stage::StageError;

use super::fakes::*;

/// Checks that the step fails with `expected` in the message, and that the update did not run.
#[track_caller]
fn check(other: StageDecl, expected: &str) {
    let mut run = start(vec![other]);
    let before = weights(&mut run);
    let error = run.step().unwrap_err().to_string();
    assert!(
        error.contains(expected),
        "`{error}` does not contain `{expected}`"
    );
    assert_eq!(weights(&mut run), before);
}

fn generate_but(
    change: impl Fn(&mut Batch) -> Result<(), StageError> + Send + Sync + 'static,
) -> StageDecl {
    single("generate", generate_spec(), move |input, context| {
        for prompt in &input.split(1) {
            let mut group = respond(prompt, context)?;
            if prompt.ids()[0].row() == 3 {
                change(&mut group)?;
            }
            context.emit(group)?;
        }
        Ok(())
    })
}

fn reward_but(change: impl Fn(&mut Vec<Option<f32>>) + Send + Sync + 'static) -> StageDecl {
    stage("reward", reward_spec(), move |mut input, context| {
        let mut rewards: Vec<Option<f32>> = vec![Some(0.5); input.num_rows()];
        change(&mut rewards);
        input.put(&REWARDS, rewards)?;
        context.emit(input)
    })
}

#[test]
fn values_that_are_not_finite() {
    check(
        reward_but(|rewards| rewards[1] = Some(f32::NAN)),
        "stage `reward`, key `rewards`, sample 0.0#2 (row 1 of the data set): NaN",
    );
    check(
        reward_but(|rewards| rewards[1] = Some(f32::INFINITY)),
        "inf, but the key promises finite values",
    );
    let advantages = stage(
        "advantages",
        verl_words::stage::StageSpec::new()
            .reads(RESPONSES)
            .writes(verl_words::keys::ADVANTAGES)
            .cardinality(verl_words::stage::Cardinality::Group),
        |mut input, context| {
            let lengths: Vec<usize> = input.get(&RESPONSES)?.rows().map(<[u32]>::len).collect();
            let mut rows: Vec<Vec<f32>> = lengths.iter().map(|n| vec![0.0; *n]).collect();
            if input.ids()[2].row() == 1 {
                rows[2][1] = f32::NAN;
            }
            input.put(&verl_words::keys::ADVANTAGES, RaggedColumn::from_rows(rows))?;
            context.emit(input)
        },
    );
    check(
        advantages,
        "stage `advantages`, key `advantages`, sample 0.1#2 (row 2 of the data set), token 1: NaN",
    );
}

#[test]
fn rows_that_are_not_those_of_the_call() {
    check(
        generate_but(|group| {
            *group = group.slice(0..2)?;
            Ok(())
        }),
        "stage `generate` ended a call with 1 of 18 rows missing; the first missing row is sample 0.3#2",
    );
    check(
        generate_but(|group| {
            *group = group.take(&[0, 1, 1])?;
            Ok(())
        }),
        "stage `generate` emitted sample 0.3#1 (row 4 of the data set) twice",
    );
    let strange = |group: &mut Batch| {
        let mut other = Batch::with_rows(&[RowId::prompt(0, 99)?]);
        other.put(&RESPONSES, RaggedColumn::from_rows([[1u32]]))?;
        other.put(&MASK_KINDS, RaggedColumn::from_rows([[1u8]]))?;
        *group = other;
        Ok(())
    };
    check(
        generate_but(strange),
        "stage `generate` emitted sample 0.99#0 (row 100 of the data set), which is not among the rows",
    );
    let update = single(
        "update",
        verl_words::stage::StageSpec::new()
            .reads(REWARDS)
            .rows(verl_words::stage::RowRule::Sink),
        |input, context| context.emit(input),
    );
    check(update, "stage `update` emitted");
}

#[test]
fn a_source_must_emit_as_many_rows_as_planned() {
    let source = |rows: u64| {
        let spec = verl_words::stage::StageSpec::new()
            .rows(verl_words::stage::RowRule::Source)
            .writes(PROMPTS);
        stage("prompts", spec, move |_, context| {
            let ids = (0..rows)
                .map(|row| RowId::prompt(0, row))
                .collect::<Result<Vec<_>, _>>()?;
            let mut prompts = Batch::with_rows(&ids);
            prompts.put(&PROMPTS, RaggedColumn::from_rows(vec![[1u32]; ids.len()]))?;
            context.emit(prompts)
        })
    };
    check(source(5), "ended a call with 1 of 6 rows missing");
    check(
        source(7),
        "sample 0.6#0 (row 7 of the data set), which is not among the rows it may emit here (6 rows a step)",
    );
}

#[test]
fn lengths_types_nulls_and_names() {
    let short = |group: &mut Batch| {
        Ok(group.put(
            &MASK_KINDS,
            RaggedColumn::from_rows([vec![1u8], vec![1; 2], vec![1; 2]]),
        )?)
    };
    check(
        generate_but(short),
        "`responses` has 4 values and `mask_kinds` has 1, but both are declared with length T",
    );
    let typed = |group: &mut Batch| {
        Ok(group.put_array("mask_kinds", group.column("responses").unwrap().clone())?)
    };
    check(generate_but(typed), "key `mask_kinds`: declared");
    let missing = |group: &mut Batch| {
        *group = group.select(&["responses"])?;
        Ok(())
    };
    check(
        generate_but(missing),
        "emitted rows without `mask_kinds`, which it declares; it emitted responses",
    );
    let more = |group: &mut Batch| Ok(group.put(&REWARDS, vec![1.0f32; 3])?);
    check(
        generate_but(more),
        "stage `generate` emitted `rewards`, which it neither reads nor declares",
    );
    const STRICT: verl_words::field::Key<verl_words::field::Scalar<f32>> =
        verl_words::field::Key::new("rewards", "[B]", "reward", "");
    let spec = verl_words::stage::StageSpec::new()
        .reads(RESPONSES)
        .writes(STRICT);
    let null = stage("reward", spec, |mut input, context| {
        let mut rewards = vec![Some(0.5f32); input.num_rows()];
        rewards[0] = None;
        input.put(&REWARDS, rewards)?;
        context.emit(input)
    });
    check(null, "): null, but the key does not allow null");
}

/// Advantages that are NaN at `token` of every response that is long enough; if `observed`, the mask marks the token as
/// an observation.
fn poisoned(token: usize, observed: bool, filter: bool) -> Vec<StageDecl> {
    let generate = generate_but_all(move |group| {
        let lengths: Vec<usize> = group.get(&RESPONSES)?.rows().map(<[u32]>::len).collect();
        let kinds = lengths.iter().map(|n| {
            (0..*n)
                .map(|at| u8::from(at != token || !observed))
                .collect::<Vec<u8>>()
        });
        Ok(group.put(&MASK_KINDS, RaggedColumn::from_rows(kinds))?)
    });
    let spec = verl_words::stage::StageSpec::new()
        .reads(RESPONSES)
        .writes(verl_words::keys::ADVANTAGES)
        .cardinality(verl_words::stage::Cardinality::Group);
    let spec = if filter {
        spec.rows(verl_words::stage::RowRule::Filter)
    } else {
        spec
    };
    let advantages = stage("advantages", spec, move |input, context| {
        let lengths = input.get(&RESPONSES)?;
        let rows = (0..input.num_rows()).map(|row| {
            let mut values = vec![0.25f32; lengths.row_len(row)];
            if let Some(value) = values.get_mut(token) {
                *value = f32::NAN;
            }
            values
        });
        let rows = RaggedColumn::from_rows(rows.collect::<Vec<_>>());
        let mut output = input.rows_only();
        output.put(&verl_words::keys::ADVANTAGES, rows)?;
        // Last row first, so that positions in the batch differ from positions in the step.
        let last_first: Vec<usize> = (0..output.num_rows()).rev().collect();
        context.emit(output.take(&last_first)?)
    });
    vec![generate, advantages, quiet_update()]
}

fn generate_but_all(
    change: impl Fn(&mut Batch) -> Result<(), StageError> + Send + Sync + 'static,
) -> StageDecl {
    single("generate", generate_spec(), move |input, context| {
        for prompt in &input.split(1) {
            let mut group = respond(prompt, context)?;
            change(&mut group)?;
            context.emit(group)?;
        }
        Ok(())
    })
}

/// An update that reads only tokens that the mask marks as actions.
fn quiet_update() -> StageDecl {
    let spec = verl_words::stage::StageSpec::new()
        .reads(MASK_KINDS)
        .reads(verl_words::keys::ADVANTAGES)
        .rows(verl_words::stage::RowRule::Sink)
        .cardinality(verl_words::stage::Cardinality::Batch)
        .uses("actor", verl_words::stage::Access::Update);
    single("update", spec, |input, _| {
        let kinds = input.get(&MASK_KINDS)?;
        for (row, advantages) in input.get(&verl_words::keys::ADVANTAGES)?.rows().enumerate() {
            let actions = advantages.iter().zip(kinds.row(row));
            let mut actions = actions.filter(|(_, kind)| **kind == 1);
            assert!(actions.all(|(value, _)| value.is_finite()));
        }
        Ok(())
    })
}

#[test]
fn p2_a_nan_at_an_observation_token_is_accepted() {
    for filter in [false, true] {
        for token in [0, 1] {
            let output = start(poisoned(token, true, filter)).step();
            assert!(output.is_ok(), "token {token}, filter {filter}: {output:?}");
        }
    }
}

#[test]
fn the_error_of_a_nan_at_an_action_token_names_sample_token_and_data_row() {
    // Responses have 1 to 4 tokens: the first with two is the second sample of data row 0.
    for filter in [false, true] {
        let error = start(poisoned(1, false, filter))
            .step()
            .unwrap_err()
            .to_string();
        let place = "stage `advantages`, key `advantages`, sample 0.";
        let what = " of the data set), token 1: NaN, but the key promises finite values";
        assert!(error.contains(place) && error.ends_with(what), "{error}");
        let (row, _) = error
            .split("sample 0.")
            .nth(1)
            .and_then(|rest| rest.split_once('#'))
            .expect(&error);
        let row: u64 = row.parse().expect("a number");
        let counted = format!("(row {} of the data set)", row + 1);
        assert!(error.contains(&counted), "{error}");
    }
}

#[test]
fn a_mask_of_a_stage_that_is_not_upstream_is_ignored() {
    // Mask kinds of a stage that `advantages` does not read from.
    let spec = verl_words::stage::StageSpec::new()
        .reads(PROMPTS)
        .writes(RESPONSES)
        .rows(verl_words::stage::RowRule::Expand(SAMPLES))
        .cardinality(verl_words::stage::Cardinality::Batch)
        .uses("actor", verl_words::stage::Access::Read);
    let generate = single("generate", spec, |input, context| {
        for prompt in &input.split(1) {
            let group = respond(prompt, context)?;
            context.emit(group.select(&["responses"])?)?;
        }
        Ok(())
    });
    let spec = verl_words::stage::StageSpec::new()
        .reads(RESPONSES)
        .writes(MASK_KINDS);
    let kinds = stage("kinds", spec, |input, context| {
        let none = input.get(&RESPONSES)?;
        let none = none.rows().map(|row| vec![0u8; row.len()]);
        let none = RaggedColumn::from_rows(none.collect::<Vec<_>>());
        let mut output = input.rows_only();
        output.put(&MASK_KINDS, none)?;
        context.emit(output)
    });
    let mut stages = poisoned(0, true, false);
    stages[0] = generate;
    stages.push(kinds);
    let error = start(stages).step().unwrap_err().to_string();
    assert!(error.contains("token 0: NaN"), "{error}");
}
