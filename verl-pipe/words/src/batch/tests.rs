//! A batch returns what was put into it, and rejects what does not fit.

use super::*;
use crate::field::Scalar;
use crate::keys::{PROMPTS, RESPONSES, REWARDS};
use arrow_array::StringArray;

fn sample() -> Batch {
    let ids: Vec<RowId> = (0..3).map(|row| RowId::prompt(1, row).unwrap()).collect();
    let mut batch = Batch::with_rows(&ids);
    batch
        .put(
            &PROMPTS,
            RaggedColumn::from_rows([vec![1u32, 2], vec![], vec![3]]),
        )
        .unwrap();
    batch
        .put(&REWARDS, vec![Some(1.0f32), None, Some(0.5)])
        .unwrap();
    batch
}

#[test]
fn slices_keep_rows_and_share_buffers() {
    let batch = sample();
    let part = batch.slice(1..3).unwrap();
    assert_eq!(
        part.get(&PROMPTS)
            .unwrap()
            .rows()
            .map(<[u32]>::to_vec)
            .collect::<Vec<_>>(),
        vec![vec![], vec![3]]
    );
    assert_eq!(part.get(&PROMPTS).unwrap().values(), &[3]);
    assert_eq!(
        part.get(&REWARDS).unwrap().rows().collect::<Vec<_>>(),
        vec![None, Some(0.5)]
    );
    let whole = batch.get(&PROMPTS).unwrap().values().as_ptr_range();
    assert!(whole.contains(&part.get(&PROMPTS).unwrap().values().as_ptr()));
    assert!(batch.slice(2..4).is_err());
}

#[test]
fn repeat_and_groups() {
    let batch = sample().repeat(2).unwrap();
    assert_eq!(batch.group_ranges(), vec![0..2, 2..4, 4..6]);
    assert_eq!(batch.ids()[3].sample_index(), 1);
    assert_eq!(batch.ids()[3].row(), 1);
    assert_eq!(batch.ids()[3].epoch(), 1);
}

#[test]
fn split_and_concat_are_inverse() {
    let batch = sample();
    assert_eq!(Batch::concat(&batch.split(2)).unwrap(), batch);
}

#[test]
fn join_rejects_different_rows_and_equal_keys() {
    let batch = sample();
    let mut other = batch.rows_only();
    other
        .put(
            &RESPONSES,
            RaggedColumn::from_rows([vec![9u32], vec![8], vec![7]]),
        )
        .unwrap();
    assert!(batch.join(&other).unwrap().has("responses"));
    assert!(matches!(
        batch.join(&batch),
        Err(BatchError::JoinKey { .. })
    ));
    assert!(matches!(
        batch.join(&other.take(&[0, 2, 1]).unwrap()),
        Err(BatchError::JoinRows { row: 1, .. })
    ));
}

#[test]
fn wrong_types_and_nulls_are_errors() {
    let mut batch = sample();
    batch
        .put_array("prompts", Arc::new(StringArray::from(vec!["a", "b", "c"])))
        .unwrap();
    assert!(matches!(batch.get(&PROMPTS), Err(BatchError::Type { .. })));
    const STRICT: Key<Scalar<f32>> = Key::new("rewards", "[B]", "reward", "");
    assert!(matches!(
        batch.get(&STRICT),
        Err(BatchError::Null { row: 1, .. })
    ));
    assert!(RowId::prompt(0, 1 << 40).is_err());
}
