//! Names of settings in other trainers (TRL, verl in Python, transformers, vLLM), mapped to the names used here.

/// A setting, its place, and its names in other trainers.
struct Setting {
    name: &'static str,
    /// A phrase that follows its name, such as `in [run]`.
    place: &'static str,
    others: &'static [&'static str],
}

/// All synonyms. The first match that the current table has is suggested, otherwise the first match.
// One setting per line.
#[rustfmt::skip]
const SETTINGS: &[Setting] = &[
    setting("learning_rate", "in [models.NAME.optimizer]", &["lr", "rate", "step_size"]),
    setting("betas", "in [models.NAME.optimizer]", &["adam_betas", "adam_beta1", "adam_beta2", "beta1", "beta2"]),
    setting("eps", "in [models.NAME.optimizer]", &["adam_epsilon", "epsilon", "adam_eps"]),
    setting("weight_decay", "in [models.NAME.optimizer]", &["wd", "decay"]),
    setting("max_grad_norm", "in [models.NAME.optimizer]", &["grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip", "gradient_clipping", "gradient_clip_val", "grad_norm"]),
    setting("schedule", "in [models.NAME.optimizer]", &["lr_scheduler", "lr_scheduler_type", "lr_schedule", "scheduler", "scheduler_type", "lr_decay_style"]),
    setting("warmup_steps", "in the `schedule` of an optimizer", &["warmup", "warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio", "num_warmup_steps", "warmup_share"]),
    setting("total_steps", "in the `schedule` of an optimizer", &["total_training_steps", "num_training_steps", "decay_steps", "lr_decay_steps"]),
    setting("final_share", "in the `schedule` of an optimizer", &["min_lr_ratio", "min_lr_rate", "min_lr", "final_lr"]),
    setting("prompts", "in [batch]", &["batch_size", "train_batch_size", "per_device_train_batch_size", "global_batch_size", "rollout_batch_size", "generation_batch_size", "bsz"]),
    setting("samples", "in [batch]", &["num_generations", "n", "num_samples", "num_return_sequences", "group_size", "rollout_n", "n_samples", "n_samples_per_prompt", "samples_per_prompt", "generations"]),
    setting("mini_batch", "in [batch]", &["ppo_mini_batch_size", "mini_batch_size", "minibatch_size", "num_mini_batches", "steps_per_generation"]),
    setting("micro_batch", "in [batch]", &["ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch_size_per_gpu", "per_device_batch_size", "gradient_accumulation_steps", "micro_train_batch_size"]),
    setting("log_prob_micro_batch", "in [batch]", &["log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"]),
    setting("epochs", "in [batch]", &["ppo_epochs", "num_iterations", "num_ppo_epochs", "update_epochs", "mu"]),
    setting("steps", "in [run]", &["max_steps", "total_epochs", "num_train_epochs", "num_epochs", "num_steps", "iterations", "n_steps", "train_steps", "total_steps", "epochs"]),
    setting("seed", "in [run]", &["random_seed", "data_seed", "rng_seed"]),
    setting("dir", "in [run]", &["output_dir", "out_dir", "default_local_dir", "save_dir", "run_name", "experiment_name", "logdir", "log_dir", "output"]),
    setting("console_every", "in [run]", &["logging_steps", "log_every", "log_interval", "print_every"]),
    setting("every", "in stage `evaluate`", &["eval_steps", "eval_every", "test_freq", "eval_interval", "interval", "frequency"]),
    setting("max_new_tokens", "in stage `generate`", &["max_length", "max_tokens", "max_completion_length", "max_response_length", "response_length", "generate_max_len", "max_gen_len", "max_output_tokens", "max_completion_tokens"]),
    setting("max_response_tokens", "in stage `preferences`", &["max_length", "max_tokens", "max_completion_length", "max_response_length", "max_target_length"]),
    setting("max_prompt_tokens", "in stage `prompts`", &["max_prompt_length", "prompt_length", "prompt_max_len", "max_input_length"]),
    setting("min_new_tokens", "in stage `generate`", &["min_length", "min_tokens"]),
    setting("temperature", "in stage `generate`", &["temp", "sampling_temperature", "t"]),
    setting("top_p", "in stage `generate`", &["nucleus", "nucleus_p"]),
    setting("repetition_penalty", "in stage `generate`", &["rep_penalty", "repeat_penalty"]),
    setting("stop", "in stage `generate`", &["stop_sequences", "stop_strings", "stop_words", "stop_texts"]),
    setting("kl_coef", "in the `loss` of stage `update`", &["beta", "kl_coeff", "kl_loss_coef", "kl_beta", "init_kl_coef", "init_kl_coeff", "kl_penalty_coef", "kl_weight"]),
    setting("beta", "in the `loss` of stage `update`", &["kl_coef", "dpo_beta"]),
    setting("clip_low", "in the `loss` of stage `update`", &["epsilon", "clip_ratio", "clip_ratio_low", "cliprange", "clip_range", "eps_clip", "eps_clip_low", "clip", "epsilon_low", "clip_eps"]),
    setting("clip_high", "in the `loss` of stage `update`", &["epsilon_high", "clip_ratio_high", "eps_clip_high", "clip_higher"]),
    setting("clip", "in stage `update_critic`", &["cliprange_value", "vf_clip", "value_clip", "clip_range_vf"]),
    setting("entropy_coef", "in the `loss` of stage `update`", &["entropy_coeff", "ent_coef", "entropy_bonus", "entropy_loss_coef"]),
    setting("aggregation", "in the `loss` of stage `update`", &["loss_agg_mode", "loss_aggregation", "loss_reduction"]),
    setting("gae_lambda", "in the `estimator` of stage `advantages`", &["lam", "lambda", "lambd"]),
    setting("gamma", "in the `estimator` of stage `advantages`", &["discount", "discount_factor"]),
    setting("estimator", "in stage `advantages`", &["adv_estimator", "advantage_estimator", "algorithm"]),
    setting("loss", "in stage `update`", &["loss_type", "loss_fn", "policy_loss", "objective"]),
    setting("mask_truncated", "in stage `update`", &["mask_truncated_completions", "overlong_filter", "overlong_filtering"]),
    setting("path", "in a model or data set", &["model_name_or_path", "model_path", "model_name", "model_id", "name_or_path", "pretrained_model_name_or_path", "file", "dataset_name", "files", "train_files", "folder", "checkpoint"]),
    setting("dtype", "in [models.NAME]", &["torch_dtype", "precision", "bf16", "param_dtype"]),
    setting("recompute", "in [models.NAME]", &["gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing", "enable_activation_offload"]),
    setting("optimizer", "in [models.NAME]", &["optim", "optimiser", "adamw"]),
    setting("group", "in [devices]", &["device", "devices", "cuda", "gpus", "n_gpus", "num_gpus", "n_gpus_per_node"]),
    setting("rollout_tensor_parallel", "in [devices]", &["tensor_model_parallel_size", "tensor_parallel_size", "tp", "tp_size"]),
    setting("template", "in stage `prompts`", &["chat_template"]),
    setting("run", "at the top level of the file", &["trainer", "training", "train", "config", "general"]),
    setting("models", "at the top level of the file", &["model", "actor", "policy", "actor_rollout_ref"]),
    setting("stages", "at the top level of the file", &["stage", "pipeline", "graph"]),
];

const fn setting(
    name: &'static str,
    place: &'static str,
    others: &'static [&'static str],
) -> Setting {
    Setting {
        name,
        place,
        others,
    }
}

/// The setting among `known` that other trainers call `name`.
pub(super) fn find_synonym<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    entries(name).find_map(|entry| known.iter().copied().find(|known| *known == entry.name))
}

/// Where the setting `name` belongs, or what a setting that other trainers call `name` is called here.
pub(super) fn describe_place(name: &str) -> Option<String> {
    if let Some(own) = SETTINGS.iter().find(|entry| entry.name == name) {
        return Some(format!("`{name}` belongs {}", own.place));
    }
    let entry = entries(name).next()?;
    Some(format!(
        "`{name}` is called `{}` here, {}",
        entry.name, entry.place
    ))
}

fn entries(name: &str) -> impl Iterator<Item = &'static Setting> {
    let name = name.to_lowercase().replace('-', "_");
    SETTINGS
        .iter()
        .filter(move |entry| entry.others.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_other_trainers_are_mapped_to_settings() {
        let optimizer = ["learning_rate", "betas", "eps", "weight_decay"];
        assert_eq!(find_synonym("lr", &optimizer), Some("learning_rate"));
        assert_eq!(find_synonym("adam-epsilon", &optimizer), Some("eps"));
        assert_eq!(find_synonym("num_generations", &optimizer), None);
        assert_eq!(
            describe_place("num_generations").as_deref(),
            Some("`num_generations` is called `samples` here, in [batch]")
        );
        // The same name means another setting in another table.
        assert_eq!(find_synonym("epsilon", &optimizer), Some("eps"));
        assert_eq!(find_synonym("epsilon", &["clip_low"]), Some("clip_low"));
        let misplaced = describe_place("learning_rate");
        let words = "`learning_rate` belongs in [models.NAME.optimizer]";
        assert_eq!(misplaced.as_deref(), Some(words));
        assert_eq!(describe_place("colour"), None);
    }

    #[test]
    fn synonyms_differ_from_their_setting_and_from_each_other() {
        for entry in SETTINGS {
            for (index, other) in entry.others.iter().enumerate() {
                assert_ne!(*other, entry.name);
                assert!(!entry.others[..index].contains(other), "{other}");
            }
        }
    }
}
