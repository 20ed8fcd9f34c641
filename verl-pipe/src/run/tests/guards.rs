use super::fakes::*;
use crate::batch::{Batch, RaggedColumn, RowId};
use crate::keys::{MASK_KINDS, PROMPTS, RESPONSES, REWARDS};
use crate::pipe::StageDecl;
use crate::stage::StageError;

/// The step ends with `expected` in the message, and the update has not run.
#[track_caller]
fn check(other: StageDecl, expected: &str) {
    let mut run = start(vec![other]);
    let before = weights(&mut run);
    let error = run.step().unwrap_err().to_string();
    assert!(
        error.contains(expected),
        "`{error}` does not hold `{expected}`"
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
        "stage `reward`, key `rewards`, row",
    );
    check(
        reward_but(|rewards| rewards[1] = Some(f32::INFINITY)),
        "inf, but the key promises finite values",
    );
    let advantages = stage(
        "advantages",
        crate::stage::StageSpec::new()
            .reads(RESPONSES)
            .writes(crate::keys::ADVANTAGES)
            .cardinality(crate::stage::Cardinality::Group),
        |mut input, context| {
            let lengths: Vec<usize> = input.get(&RESPONSES)?.rows().map(<[u32]>::len).collect();
            let mut rows: Vec<Vec<f32>> = lengths.iter().map(|n| vec![0.0; *n]).collect();
            if input.ids()[2].row() == 1 {
                rows[2][1] = f32::NAN;
            }
            input.put(&crate::keys::ADVANTAGES, RaggedColumn::from_rows(rows))?;
            context.emit(input)
        },
    );
    check(
        advantages,
        "stage `advantages`, key `advantages`, row 14 (sample 0.1#2), token 1: NaN",
    );
}

#[test]
fn rows_that_are_not_those_of_the_call() {
    check(
        generate_but(|group| {
            *group = group.slice(0..2)?;
            Ok(())
        }),
        "stage `generate` ended a call 1 rows short of 18; the first that is missing is sample 0.3#2",
    );
    check(
        generate_but(|group| {
            *group = group.take(&[0, 1, 1])?;
            Ok(())
        }),
        "stage `generate` emitted sample 0.3#1 twice",
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
        "stage `generate` emitted sample 0.99#0, which is not among the rows",
    );
    let update = single(
        "update",
        crate::stage::StageSpec::new()
            .reads(REWARDS)
            .rows(crate::stage::RowRule::Sink),
        |input, context| context.emit(input),
    );
    check(update, "stage `update` emitted");
}

#[test]
fn a_source_makes_as_many_rows_as_the_plan_counts() {
    let source = |rows: u64| {
        let spec = crate::stage::StageSpec::new()
            .rows(crate::stage::RowRule::Source)
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
    check(source(5), "ended a call 1 rows short of 6");
    check(
        source(7),
        "sample 0.6#0, which is not among the rows it may emit here (6 rows a step)",
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
    const STRICT: crate::field::Key<crate::field::Scalar<f32>> =
        crate::field::Key::new("rewards", "[B]", "reward", "");
    let spec = crate::stage::StageSpec::new()
        .reads(RESPONSES)
        .writes(STRICT);
    let null = stage("reward", spec, |mut input, context| {
        let mut rewards = vec![Some(0.5f32); input.num_rows()];
        rewards[0] = None;
        input.put(&REWARDS, rewards)?;
        context.emit(input)
    });
    check(null, "): null, but the key allows no null");
}
