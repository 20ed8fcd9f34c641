//! Solved sizes add up for all settings.

use proptest::prelude::*;

use super::*;

proptest! {
    /// A solved plan adds up; the nearest values of a single violation solve a refused one.
    #[test]
    fn plans_add_up(prompts in 1usize..65, samples in 1usize..9, mini in 1usize..65, micro in 1usize..33,
                    group in 1usize..9, tensor_parallel in 1usize..5, epochs in 1usize..4) {
        let batch = BatchConfig {
            prompts, samples, mini_batch: Some(mini), micro_batch: Some(micro),
            log_prob_micro_batch: Some(micro), epochs,
        };
        let devices = DevicesConfig {
            group: format!("cuda:0-{}", group - 1), rollout_tensor_parallel: tensor_parallel,
        };
        match solve(&batch, &devices) {
            Ok(plan) => {
                prop_assert_eq!(plan.rows, prompts * samples);
                prop_assert_eq!(plan.rollout_shards * tensor_parallel, group);
                prop_assert_eq!(plan.rollout_shards * plan.rows_per_rollout_shard, plan.rows);
                prop_assert_eq!(plan.mini_batches * plan.mini_rows, plan.rows);
                prop_assert_eq!(plan.micro_rows * plan.micro_batches * group, plan.mini_rows);
                prop_assert_eq!(plan.optimizer_steps, plan.mini_batches * epochs);
                prop_assert!(plan.log_prob_micro_batches * micro >= plan.rows_per_rollout_shard);
                prop_assert!((plan.log_prob_micro_batches - 1) * micro < plan.rows_per_rollout_shard);
            }
            Err(violations) => {
                prop_assert!(!violations.is_empty());
                let one = violations.iter().find(|violation| violation.nearest.is_empty());
                if let Some((_, values)) = one.and_then(|violation| violation.instead.as_ref()) {
                    for prompts in values {
                        let batch = BatchConfig { prompts: *prompts, mini_batch: None, ..batch.clone() };
                        let again = solve(&batch, &devices).err().unwrap_or_default();
                        let left = again.iter().all(|violation| violation.setting == "devices.rollout_tensor_parallel");
                        prop_assert!(left, "{:?} -> {}: {:?}", one, prompts, again);
                    }
                }
                if let [one] = violations.as_slice() {
                    for &value in &one.nearest {
                        let (mut batch, mut devices) = (batch.clone(), devices.clone());
                        match one.setting {
                            "batch.prompts" => batch.prompts = value,
                            "batch.mini_batch" => batch.mini_batch = Some(value),
                            "batch.micro_batch" => batch.micro_batch = Some(value),
                            _ => devices.rollout_tensor_parallel = value,
                        }
                        let again = solve(&batch, &devices).err().unwrap_or_default();
                        let same = again.iter().any(|violation| {
                            violation.setting == one.setting && violation.rule == one.rule
                        });
                        prop_assert!(!same, "{:?} -> {}: {:?}", one, value, again);
                    }
                }
            }
        }
    }
}
