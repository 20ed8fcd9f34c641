use verl_words::batch::RowId;
use verl_words::stage::BatchPlan;

use super::*;
use crate::sink::{RecordingSink, run};

fn context() -> BuildContext {
    BuildContext {
        batch: BatchPlan {
            prompts: 4,
            samples: 3,
            ..BatchPlan::default()
        },
        ..BuildContext::default()
    }
}

/// The numbers of the groups that are kept, each with the mean that is written; and what was recorded.
fn kept(config: &FilterGroups, groups: &[&[Option<f32>]]) -> (Vec<(u64, f32)>, RecordingSink) {
    let mut ids = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        let prompt = RowId::prompt(0, number as u64).unwrap();
        ids.extend((0..group.len() as u64).map(|sample| prompt.sample(sample).unwrap()));
    }
    let mut batch = Batch::with_rows(&ids);
    batch.put(&REWARDS, groups.concat()).unwrap();
    let batch = batch.rename(&[(REWARDS.name(), config.key.as_str())]);
    let mut stage = StageConfig::build(config, &context()).unwrap();
    let result = run(stage.as_mut(), 1, batch);
    let mut found: Vec<(u64, f32)> = Vec::new();
    for batch in &result.batches {
        let means = batch.get(&GROUP_MEANS).unwrap();
        for range in batch.group_ranges() {
            let number = batch.ids()[range.start].row();
            assert_eq!(
                range.len(),
                groups[number as usize].len(),
                "groups stay complete"
            );
            let of_group = &means.values()[range];
            assert!(of_group.iter().all(|mean| *mean == of_group[0]));
            found.push((number, of_group[0]));
        }
    }
    (found, result)
}

const GROUPS: &[&[Option<f32>]] = &[
    &[Some(1.0), Some(0.0), Some(0.5)],
    &[Some(1.0), Some(1.0), Some(1.0)],
    &[Some(0.0), Some(0.0), Some(0.0)],
    &[Some(0.1), None, Some(0.1)],
    &[Some(0.1), None, Some(0.3)],
    &[None, Some(1.0), None],
    &[Some(-1.0), Some(f32::NAN), Some(-1.0)],
    &[None, None, None],
];

#[test]
fn groups_without_signal_are_dropped_entirely() {
    let (found, result) = kept(&FilterGroups::default(), GROUPS);
    assert_eq!(found, [(0, 0.5), (4, 0.2)]);
    assert_eq!(result.mean(&SIGNAL), Some(0.25));
    let dropped = [&ALL_HIGH, &ALL_LOW, &UNSCORED].map(|metric| result.sum(metric));
    assert_eq!(dropped, [2.0, 2.0, 2.0]);
    let none = kept(&FilterGroups::default(), &GROUPS[1..4]);
    assert!(none.0.is_empty() && none.1.batches.is_empty());
}

/// Equal rewards whose mean is rounded: their deviation from it is not 0.
#[test]
fn equality_is_exact() {
    let tenth = [Some(0.1f32); 3];
    let almost = [
        Some(0.1f32),
        Some(0.1),
        Some(f32::from_bits(0.1f32.to_bits() + 1)),
    ];
    let found = kept(&FilterGroups::default(), &[&tenth, &almost]).0;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0, 1);
}

#[test]
fn means_lie_strictly_inside_the_range() {
    let config = FilterGroups {
        min_mean: Some(0.25),
        max_mean: Some(0.75),
        ..FilterGroups::default()
    };
    let rows = |a: f32, b: f32| [Some(a), Some(b)];
    let groups = [
        rows(0.0, 0.5),
        rows(0.0, 1.0),
        rows(0.5, 1.0),
        rows(0.5, 0.5),
    ];
    let groups: Vec<&[Option<f32>]> = groups.iter().map(<[_; 2]>::as_slice).collect();
    let (found, result) = kept(&config, &groups);
    assert_eq!(found, [(1, 0.5)]);
    assert_eq!((result.sum(&ALL_LOW), result.sum(&ALL_HIGH)), (1.0, 2.0));
}

#[test]
fn groups_are_filtered_by_any_key() {
    let config = FilterGroups {
        key: "accuracy".to_owned(),
        ..FilterGroups::default()
    };
    assert_eq!(kept(&config, GROUPS).0.len(), 2);
    let spec = StageConfig::build(&config, &context()).unwrap().spec();
    assert_eq!(spec.reads[0].name, "accuracy");
}

#[test]
fn the_refill_follows_the_settings() {
    let refill = |config: &FilterGroups| {
        let spec = StageConfig::build(config, &context()).unwrap().spec();
        let refill = spec.refill.unwrap();
        (refill.groups, refill.waves, refill.on_short)
    };
    let default = FilterGroups::default();
    assert_eq!(refill(&default), (4, 3, OnShort::Error));
    let once = FilterGroups {
        max_waves: 1,
        ..default.clone()
    };
    assert_eq!(refill(&once), (4, 1, OnShort::Continue));
    let strict = FilterGroups {
        on_short: Some(OnShort::Error),
        groups: Some(2),
        ..once
    };
    assert_eq!(refill(&strict), (2, 1, OnShort::Error));
}

#[test]
fn invalid_settings_are_reported_together() {
    let refused_settings = |config: &FilterGroups, context: &BuildContext| -> Vec<String> {
        match StageConfig::build(config, context) {
            Ok(_) => Vec::new(),
            Err(faults) => faults.into_iter().map(|fault| fault.setting).collect(),
        }
    };
    let mut single = context();
    single.batch.samples = 1;
    let config = FilterGroups {
        key: String::new(),
        groups: Some(0),
        max_waves: 17,
        on_short: None,
        min_mean: Some(1.0),
        max_mean: Some(1.0),
    };
    assert_eq!(
        refused_settings(&config, &single),
        ["key", "batch.samples", "max_waves", "groups", "min_mean"]
    );
    let config = FilterGroups {
        groups: Some(13),
        max_mean: Some(f64::NAN),
        ..FilterGroups::default()
    };
    assert_eq!(
        refused_settings(&config, &context()),
        ["groups", "min_mean"]
    );
    let config = FilterGroups {
        groups: Some(12),
        ..FilterGroups::default()
    };
    assert_eq!(refused_settings(&config, &context()), [""; 0]);
}
