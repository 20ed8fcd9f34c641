//! Names of settings in other trainers, mapped to the names used here.

/// A setting, its place, and its names in other trainers; for the help about an unknown setting.
///
/// ```
/// use verl_pipe::config::Synonym;
/// use verl_pipe::registry::Registry;
///
/// const SETTINGS: &[Synonym] = &[Synonym::new("harshness", "in stage `judge`", &["severity", "strictness"])];
/// let registry = Registry::new().synonyms(SETTINGS);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Synonym {
    /// Its name here.
    pub name: &'static str,
    /// A phrase that follows its name, such as `in [run]`.
    pub place: &'static str,
    /// Its names in other trainers, in lower case with underscores.
    pub others: &'static [&'static str],
}

impl Synonym {
    /// The setting `name` at `place`, which other trainers call one of `others`.
    pub const fn new(
        name: &'static str,
        place: &'static str,
        others: &'static [&'static str],
    ) -> Synonym {
        Synonym {
            name,
            place,
            others,
        }
    }
}

/// The settings of the engine's own sections (TRL, verl in Python, transformers, vLLM).
// One setting per line.
#[rustfmt::skip]
const SECTIONS: &[Synonym] = &[
    Synonym::new("prompts", "in [batch]", &["batch_size", "train_batch_size", "per_device_train_batch_size", "global_batch_size", "rollout_batch_size", "generation_batch_size", "bsz"]),
    Synonym::new("samples", "in [batch]", &["num_generations", "n", "num_samples", "num_return_sequences", "group_size", "rollout_n", "n_samples", "n_samples_per_prompt", "samples_per_prompt", "generations"]),
    Synonym::new("mini_batch", "in [batch]", &["ppo_mini_batch_size", "mini_batch_size", "minibatch_size", "num_mini_batches", "steps_per_generation"]),
    Synonym::new("micro_batch", "in [batch]", &["ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch_size_per_gpu", "per_device_batch_size", "gradient_accumulation_steps", "micro_train_batch_size"]),
    Synonym::new("log_prob_micro_batch", "in [batch]", &["log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"]),
    Synonym::new("epochs", "in [batch]", &["ppo_epochs", "num_iterations", "num_ppo_epochs", "update_epochs", "mu"]),
    Synonym::new("steps", "in [run]", &["max_steps", "total_epochs", "num_train_epochs", "num_epochs", "num_steps", "iterations", "n_steps", "train_steps", "total_steps", "epochs"]),
    Synonym::new("seed", "in [run]", &["random_seed", "data_seed", "rng_seed"]),
    Synonym::new("dir", "in [run]", &["output_dir", "out_dir", "default_local_dir", "save_dir", "run_name", "experiment_name", "logdir", "log_dir", "output"]),
    Synonym::new("console_every", "in [run]", &["logging_steps", "log_every", "log_interval", "print_every"]),
    Synonym::new("group", "in [devices]", &["device", "devices", "cuda", "gpus", "n_gpus", "num_gpus", "n_gpus_per_node"]),
    Synonym::new("rollout_tensor_parallel", "in [devices]", &["tensor_model_parallel_size", "tensor_parallel_size", "tp", "tp_size"]),
    Synonym::new("run", "at the top level of the file", &["trainer", "training", "train", "config", "general"]),
    Synonym::new("models", "at the top level of the file", &["model", "actor", "policy", "actor_rollout_ref"]),
    Synonym::new("stages", "at the top level of the file", &["stage", "pipeline", "graph"]),
];

/// The settings of the engine's sections and those of registered kinds. The first match that the current table has is
/// suggested, otherwise the first match.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Synonyms<'a>(pub &'a [Synonym]);

impl<'a> Synonyms<'a> {
    /// The setting among `known` that other trainers call `name`.
    pub fn find<'k>(self, name: &str, known: &[&'k str]) -> Option<&'k str> {
        let mut entries = self.entries(name);
        entries.find_map(|entry| known.iter().copied().find(|known| *known == entry.name))
    }

    /// Where the setting `name` belongs, or what a setting that other trainers call `name` is called here.
    pub fn describe_place(self, name: &str) -> Option<String> {
        if let Some(own) = self.all().find(|entry| entry.name == name) {
            return Some(format!("`{name}` belongs {}", own.place));
        }
        let entry = self.entries(name).next()?;
        Some(format!(
            "`{name}` is called `{}` here, {}",
            entry.name, entry.place
        ))
    }

    fn all(self) -> impl Iterator<Item = &'a Synonym> {
        SECTIONS.iter().chain(self.0)
    }

    fn entries(self, name: &str) -> impl Iterator<Item = &'a Synonym> {
        let name = name.to_lowercase().replace('-', "_");
        self.all()
            .filter(move |entry| entry.others.contains(&name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTERED: &[Synonym] = &[
        Synonym::new("rate", "in [models.NAME]", &["lr", "step_size"]),
        Synonym::new("pace", "in stage `walk`", &["step_size"]),
    ];

    #[test]
    fn names_from_other_trainers_are_mapped_to_settings() {
        let synonyms = Synonyms(REGISTERED);
        let known = ["rate", "betas"];
        assert_eq!(synonyms.find("lr", &known), Some("rate"));
        assert_eq!(synonyms.find("Step-Size", &known), Some("rate"));
        assert_eq!(synonyms.find("num_generations", &known), None);
        assert_eq!(
            synonyms.describe_place("num_generations").as_deref(),
            Some("`num_generations` is called `samples` here, in [batch]")
        );
        // The same name means another setting in another table.
        assert_eq!(synonyms.find("step_size", &["pace"]), Some("pace"));
        let misplaced = synonyms.describe_place("rate");
        assert_eq!(
            misplaced.as_deref(),
            Some("`rate` belongs in [models.NAME]")
        );
        assert_eq!(synonyms.describe_place("colour"), None);
    }

    #[test]
    fn synonyms_differ_from_their_setting_and_from_each_other() {
        for entry in SECTIONS {
            for (index, other) in entry.others.iter().enumerate() {
                assert_ne!(*other, entry.name);
                assert!(!entry.others[..index].contains(other), "{other}");
            }
        }
    }
}
