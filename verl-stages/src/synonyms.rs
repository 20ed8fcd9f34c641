//! Names of this crate's settings in other trainers (TRL, verl in Python, transformers, vLLM), for the help about an
//! unknown setting.

use verl_declare::config::Synonym;

/// All settings. If another trainer's name means several, the first one that the current table has is suggested.
// One setting per line.
#[rustfmt::skip]
pub(crate) const SETTINGS: &[Synonym] = &[
    Synonym::new("learning_rate", "in [models.NAME.optimizer]", &["lr", "rate", "step_size"]),
    Synonym::new("betas", "in [models.NAME.optimizer]", &["adam_betas", "adam_beta1", "adam_beta2", "beta1", "beta2"]),
    Synonym::new("eps", "in [models.NAME.optimizer]", &["adam_epsilon", "epsilon", "adam_eps"]),
    Synonym::new("weight_decay", "in [models.NAME.optimizer]", &["wd", "decay"]),
    Synonym::new("max_grad_norm", "in [models.NAME.optimizer]", &["grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip", "gradient_clipping", "gradient_clip_val", "grad_norm"]),
    Synonym::new("schedule", "in [models.NAME.optimizer]", &["lr_scheduler", "lr_scheduler_type", "lr_schedule", "scheduler", "scheduler_type", "lr_decay_style"]),
    Synonym::new("warmup_steps", "in the `schedule` of an optimizer", &["warmup", "warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio", "num_warmup_steps", "warmup_share"]),
    Synonym::new("total_steps", "in the `schedule` of an optimizer", &["total_training_steps", "num_training_steps", "decay_steps", "lr_decay_steps"]),
    Synonym::new("final_share", "in the `schedule` of an optimizer", &["min_lr_ratio", "min_lr_rate", "min_lr", "final_lr"]),
    Synonym::new("every", "in stage `evaluate`", &["eval_steps", "eval_every", "test_freq", "eval_interval", "interval", "frequency"]),
    Synonym::new("max_new_tokens", "in stage `generate`", &["max_length", "max_tokens", "max_completion_length", "max_response_length", "response_length", "generate_max_len", "max_gen_len", "max_output_tokens", "max_completion_tokens"]),
    Synonym::new("max_response_tokens", "in stage `preferences`", &["max_length", "max_tokens", "max_completion_length", "max_response_length", "max_target_length"]),
    Synonym::new("max_prompt_tokens", "in stage `prompts`", &["max_prompt_length", "prompt_length", "prompt_max_len", "max_input_length"]),
    Synonym::new("min_new_tokens", "in stage `generate`", &["min_length", "min_tokens"]),
    Synonym::new("temperature", "in stage `generate`", &["temp", "sampling_temperature", "t"]),
    Synonym::new("top_p", "in stage `generate`", &["nucleus", "nucleus_p"]),
    Synonym::new("repetition_penalty", "in stage `generate`", &["rep_penalty", "repeat_penalty"]),
    Synonym::new("stop", "in stage `generate`", &["stop_sequences", "stop_strings", "stop_words", "stop_texts"]),
    Synonym::new("kl_coef", "in the `loss` of stage `update`", &["beta", "kl_coeff", "kl_loss_coef", "kl_beta", "init_kl_coef", "init_kl_coeff", "kl_penalty_coef", "kl_weight"]),
    Synonym::new("beta", "in the `loss` of stage `update`", &["kl_coef", "dpo_beta"]),
    Synonym::new("clip_low", "in the `loss` of stage `update`", &["epsilon", "clip_ratio", "clip_ratio_low", "cliprange", "clip_range", "eps_clip", "eps_clip_low", "clip", "epsilon_low", "clip_eps"]),
    Synonym::new("clip_high", "in the `loss` of stage `update`", &["epsilon_high", "clip_ratio_high", "eps_clip_high", "clip_higher"]),
    Synonym::new("clip", "in stage `update_critic`", &["cliprange_value", "vf_clip", "value_clip", "clip_range_vf"]),
    Synonym::new("entropy_coef", "in the `loss` of stage `update`", &["entropy_coeff", "ent_coef", "entropy_bonus", "entropy_loss_coef"]),
    Synonym::new("aggregation", "in the `loss` of stage `update`", &["loss_agg_mode", "loss_aggregation", "loss_reduction"]),
    Synonym::new("gae_lambda", "in the `estimator` of stage `advantages`", &["lam", "lambda", "lambd"]),
    Synonym::new("gamma", "in the `estimator` of stage `advantages`", &["discount", "discount_factor"]),
    Synonym::new("estimator", "in stage `advantages`", &["adv_estimator", "advantage_estimator", "algorithm"]),
    Synonym::new("loss", "in stage `update`", &["loss_type", "loss_fn", "policy_loss", "objective"]),
    Synonym::new("mask_truncated", "in stage `update`", &["mask_truncated_completions", "overlong_filter", "overlong_filtering"]),
    Synonym::new("path", "in a model or data set", &["model_name_or_path", "model_path", "model_name", "model_id", "name_or_path", "pretrained_model_name_or_path", "file", "dataset_name", "files", "train_files", "folder", "checkpoint"]),
    Synonym::new("dtype", "in [models.NAME]", &["torch_dtype", "precision", "bf16", "param_dtype"]),
    Synonym::new("recompute", "in [models.NAME]", &["gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing", "enable_activation_offload"]),
    Synonym::new("optimizer", "in [models.NAME]", &["optim", "optimiser", "adamw"]),
    Synonym::new("template", "in stage `prompts`", &["chat_template"]),
];

#[cfg(test)]
mod tests {
    use super::*;

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
