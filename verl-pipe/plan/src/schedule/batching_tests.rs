//! Sizes that fit and sizes that do not.

use verl_words::stage::OnShort;

use super::*;

fn devices(n: usize, tensor_parallel: usize) -> DevicesConfig {
    DevicesConfig {
        group: format!("cuda:0-{}", n - 1),
        rollout_tensor_parallel: tensor_parallel,
    }
}

fn batch(prompts: usize, samples: usize, mini: usize, micro: usize) -> BatchConfig {
    BatchConfig {
        prompts,
        samples,
        mini_batch: Some(mini),
        micro_batch: Some(micro),
        ..BatchConfig::default()
    }
}

#[track_caller]
fn check_refused(batch: &BatchConfig, devices: &DevicesConfig, expected: &[(&str, &[usize])]) {
    let violations = solve(batch, devices).expect_err("does not divide");
    let found: Vec<(&str, &[usize])> = violations
        .iter()
        .map(|violation| (violation.setting, violation.nearest.as_slice()))
        .collect();
    assert_eq!(found, expected, "{violations:#?}");
}

#[test]
fn samples_devices_mini_and_micro_batches() {
    // P = 4, n = 3, three devices, M = 2, u = 2: 12 samples, 4 a device, mini 6 (2 a device), 1 micro, 2 steps.
    let plan = solve(&batch(4, 3, 2, 2), &devices(3, 1)).expect("divides");
    assert_eq!(
        (plan.rows, plan.rows_per_device, plan.mini_rows),
        (12, 4, 6)
    );
    assert_eq!(
        (plan.micro_batches, plan.mini_batches, plan.optimizer_steps),
        (1, 2, 2)
    );
    let plan = solve(&batch(32, 8, 32, 4), &devices(8, 1)).expect("divides");
    assert_eq!((plan.micro_batches, plan.optimizer_steps), (8, 1));
    let whole = solve(&BatchConfig::default(), &DevicesConfig::default()).expect("divides");
    assert_eq!(
        (
            whole.rows,
            whole.micro_rows,
            whole.log_prob_micro_rows,
            whole.micro_batches
        ),
        (8, 8, 8, 1)
    );
}

#[test]
fn no_count_is_rounded_to_zero() {
    // One sample a device, but four a micro-batch.
    check_refused(
        &batch(8, 1, 8, 4),
        &devices(8, 1),
        &[("batch.micro_batch", &[1])],
    );
    // Half a sample a device.
    check_refused(
        &batch(8, 1, 4, 1),
        &devices(8, 1),
        &[("batch.mini_batch", &[8])],
    );
}

#[test]
fn all_violations_are_reported_with_the_nearest_values() {
    check_refused(
        &batch(256, 1, 80, 3),
        &devices(8, 3),
        &[
            ("devices.rollout_tensor_parallel", &[2, 4]),
            ("batch.mini_batch", &[64, 128]),
            ("batch.micro_batch", &[2, 5]),
        ],
    );
    check_refused(
        &batch(7, 1, 7, 1),
        &devices(2, 1),
        &[("batch.prompts", &[6, 8]), ("batch.mini_batch", &[])],
    );
    check_refused(
        &batch(4, 2, 8, 1),
        &devices(1, 1),
        &[("batch.mini_batch", &[4])],
    );
    check_refused(
        &batch(0, 0, 0, 0),
        &DevicesConfig {
            group: "gpu:".to_owned(),
            rollout_tensor_parallel: 0,
        },
        &[
            ("devices.group", &[]),
            ("batch.prompts", &[1]),
            ("batch.samples", &[1]),
            ("batch.mini_batch", &[1]),
            ("batch.micro_batch", &[1]),
            ("devices.rollout_tensor_parallel", &[1]),
        ],
    );
}

/// One help per cause; if two settings are involved, both helps contain the same numbers.
#[test]
fn a_batch_that_does_not_divide_by_the_devices_has_helps_that_agree() {
    let without_mini_batch = |prompts, micro_batch| BatchConfig {
        prompts,
        micro_batch,
        ..BatchConfig::default()
    };
    check_refused(
        &without_mini_batch(5, None),
        &devices(2, 1),
        &[("batch.prompts", &[4, 6])],
    );
    check_refused(
        &without_mini_batch(6, None),
        &devices(4, 2),
        &[("batch.prompts", &[4, 8])],
    );
    // Micro-batches of 3 fit 3 samples a device, but not 2 or 4.
    check_refused(
        &without_mini_batch(5, Some(3)),
        &devices(2, 1),
        &[("batch.prompts", &[6])],
    );
    let violations = solve(&batch(6, 1, 3, 1), &devices(4, 1)).expect_err("does not divide");
    assert_eq!(violations[0].nearest, [4, 8]);
    assert_eq!(violations[1].instead, Some(("batch.prompts", vec![4, 8])));
    // Every suggested value solves the arithmetic.
    for prompts in 1..40 {
        for count in 2..9 {
            let Err(violations) = solve(&without_mini_batch(prompts, None), &devices(count, 1))
            else {
                continue;
            };
            assert_eq!(violations.len(), 1, "{violations:?}");
            for &value in &violations[0].nearest {
                let again = solve(&without_mini_batch(value, None), &devices(count, 1));
                assert!(again.is_ok(), "{prompts} -> {value} on {count}: {again:?}");
            }
        }
    }
}

#[test]
fn sizes_that_overflow_are_refused() {
    let huge = BatchConfig {
        prompts: usize::MAX,
        samples: usize::MAX,
        ..BatchConfig::default()
    };
    let violations = solve(&huge, &DevicesConfig::default()).expect_err("too large");
    assert!(
        violations
            .iter()
            .all(|violation| violation.nearest == [MAX_COUNT])
    );
}

#[test]
fn mini_batches_are_cut_from_the_groups_that_are_kept() {
    let refill = Refill {
        groups: 48,
        waves: 3,
        on_short: OnShort::Error,
    };
    let solve = |mini| {
        let batch = BatchConfig {
            mini_batch: mini,
            ..batch(64, 4, 0, 8)
        };
        estimate(&batch, &devices(1, 1), Some(&refill))
    };
    let (plan, violations) = solve(Some(24));
    assert_eq!(violations, []);
    assert_eq!((plan.rows, plan.waves, plan.groups), (256, 3, 48));
    assert_eq!((plan.mini_rows, plan.optimizer_steps), (96, 2));
    // All kept groups, unless a size is set.
    assert_eq!(solve(None).0.mini_rows, 192);
    // It divides the prompts of a wave, but not those that the update sees.
    let violations = solve(Some(32)).1;
    assert_eq!(violations[0].nearest, [24, 48]);
    assert!(violations[0].rule.contains("48 prompts whose groups"));
    assert_eq!(solve(Some(64)).1[0].nearest, [48]);
}

#[test]
fn device_groups() {
    #[track_caller]
    fn check(group: &str, expected: Option<&[&str]>) {
        let config = DevicesConfig {
            group: group.to_owned(),
            ..DevicesConfig::default()
        };
        let list = config.list().ok();
        let list: Option<Vec<&str>> = list
            .as_ref()
            .map(|list| list.iter().map(String::as_str).collect());
        assert_eq!(list.as_deref(), expected, "{group}");
    }
    check("cpu", Some(&["cpu"]));
    check("cpu:0", None);
    check("cpu:0-1", Some(&["cpu:0", "cpu:1"]));
    check("cpu:1-0", None);
    check("CUDA:0", None);
    check("cuda:0-1024", None);
    check("cuda:1", Some(&["cuda:1"]));
    check("cuda:0-2", Some(&["cuda:0", "cuda:1", "cuda:2"]));
    check("cuda:2-0", None);
    check("cuda:", None);
    check("cuda:x", None);
    check("", None);
    check(":1", None);
}
