//! The rules of the batch arithmetic: those that do not hold, and the nearest values that satisfy them.

use super::{BatchConfig, MAX_COUNT, MINI_BATCH, Sizes, Violation, nearest_values};

/// Every count is in 1..=MAX_COUNT.
pub(super) fn check_counts(given: &Sizes, batch: &BatchConfig, violations: &mut Vec<Violation>) {
    let counts = [
        ("batch.prompts", Some(given.prompts)),
        ("batch.samples", Some(given.samples)),
        ("batch.mini_batch", batch.mini_batch),
        ("batch.micro_batch", given.micro_batch),
        ("batch.log_prob_micro_batch", given.log_prob_micro_batch),
        ("batch.epochs", Some(given.epochs)),
        (
            "devices.rollout_tensor_parallel",
            Some(given.tensor_parallel),
        ),
    ];
    for (setting, value) in counts {
        match value {
            Some(0) => violations.push(Violation {
                setting,
                rule: "it is 0, but must be at least 1".to_owned(),
                nearest: vec![1],
                instead: None,
            }),
            Some(value) if value > MAX_COUNT => violations.push(Violation {
                setting,
                rule: format!("{value} is greater than the maximum, {MAX_COUNT}"),
                nearest: vec![MAX_COUNT],
                instead: None,
            }),
            _ => {}
        }
    }
}

/// The divisions are exact. `sizes` are clamped, so no product overflows 64 bits.
pub(super) fn check_rules(sizes: Sizes, violations: &mut Vec<Violation>) {
    let Sizes {
        devices,
        tensor_parallel,
        prompts,
        samples,
        mini_batch,
        ..
    } = sizes;
    if !sizes.divides_devices() {
        violations.push(Violation {
            setting: "devices.rollout_tensor_parallel",
            rule: format!(
                "{tensor_parallel} devices a rollout engine do not divide the group's {devices} devices"
            ),
            nearest: nearest_values(tensor_parallel, |v| {
                Sizes { tensor_parallel: v, ..sizes }.divides_devices()
            }),
            instead: None,
        });
    } else if !sizes.rollout_divides() {
        violations.push(Violation {
            setting: "batch.prompts",
            rule: format!(
                "prompts · samples = {prompts} · {samples} = {} samples do not divide evenly among {} rollout engines \
                 ({devices} devices / tensor parallel {tensor_parallel})",
                sizes.rows(),
                sizes.rollout_shards()
            ),
            nearest: sizes.nearest_prompts(),
            instead: None,
        });
    }
    if !sizes.mini_divides() {
        let relation = if mini_batch > sizes.groups() {
            "are more than"
        } else {
            "do not divide"
        };
        let whole = match sizes.refill {
            None => format!("the step's {prompts} prompts"),
            Some((_, groups)) => format!("the {groups} prompts whose groups a step keeps"),
        };
        violations.push(mini_violation(
            sizes,
            format!("{mini_batch} prompts a mini-batch {relation} {whole}"),
        ));
    }
    if !sizes.mini_spreads() {
        let rule = |of: &str| {
            format!(
                "{of} · samples = {mini_batch} · {samples} = {} samples do not divide evenly among {devices} devices",
                sizes.mini_rows()
            )
        };
        if sizes.mini_is_set || sizes.refill.is_some() {
            violations.push(mini_violation(sizes, rule("mini_batch")));
        } else if !sizes.divides_devices() || sizes.rollout_divides() {
            // The mini-batch contains all prompts, so report their number as the cause, once.
            violations.push(Violation {
                setting: "batch.prompts",
                rule: rule("prompts"),
                nearest: sizes.other_prompts(),
                instead: None,
            });
        }
    }
    // If a mini-batch does not divide among the devices, a device's share is not a whole number of samples.
    if let Some(micro) = sizes.micro_batch
        && sizes.mini_spreads()
        && !sizes.micro_divides()
    {
        let per_device = sizes.mini_rows_per_device();
        let relation = if micro > per_device {
            "is more than"
        } else {
            "does not divide"
        };
        violations.push(Violation {
            setting: "batch.micro_batch",
            rule: format!(
                "a micro-batch of {micro} samples {relation} the {per_device} samples that a mini-batch has on one \
                 device (mini_batch · samples / devices = {mini_batch} · {samples} / {devices})"
            ),
            nearest: nearest_values(micro, |v| {
                Sizes { micro_batch: Some(v), ..sizes }.micro_divides()
            }),
            instead: None,
        });
    }
}

/// The violation of `rule` by the mini-batch.
fn mini_violation(sizes: Sizes, rule: String) -> Violation {
    let nearest = nearest_values(sizes.mini_batch, |v| {
        let sizes = Sizes {
            mini_batch: v,
            ..sizes
        };
        sizes.mini_divides() && sizes.mini_spreads()
    });
    Violation {
        setting: MINI_BATCH,
        rule,
        instead: Some(("batch.prompts", sizes.other_prompts()))
            .filter(|(_, prompts)| nearest.is_empty() && !prompts.is_empty()),
        nearest,
    }
}
