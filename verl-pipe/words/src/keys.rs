//! The standard keys, one constant each. Dims: `P` prompts, `B` samples, `S~` prompt tokens, `T~` response tokens.

use crate::field::{Key, Ragged, Scalar, Text};

/// Prompt token ids.
pub const PROMPTS: Key<Ragged<u32>> = Key::new(
    "prompts",
    "[B, S~]",
    "token id",
    "prompt token ids, nothing padded",
);
/// Prompt as text, after the chat template.
pub const PROMPT_TEXTS: Key<Text> = Key::new(
    "prompt_texts",
    "[B]",
    "",
    "prompt as rendered by the chat template",
);
/// The reference answer of a row, as text.
pub const ANSWERS: Key<Text> = Key::new("answers", "[B]", "", "reference answer of the prompt");
/// Row number in the data set.
pub const DATA_ROWS: Key<Scalar<u64>> = Key::new(
    "data_rows",
    "[B]",
    "row",
    "row of the data set that the prompt came from",
);
/// Target token ids of a supervised example.
pub const TARGETS: Key<Ragged<u32>> = Key::new(
    "targets",
    "[B, T~]",
    "token id",
    "tokens that supervised training imitates",
);
/// Which target tokens are trained: see [`mask`].
pub const TARGET_KINDS: Key<Ragged<u8>> = Key::new(
    "target_kinds",
    "[B, T~]",
    "mask kind",
    "1 trained, 0 only read: text between turns of the assistant, or outside the template's marks",
);
/// Answer that is preferred to the other one of its prompt.
pub const CHOSEN_RESPONSES: Key<Ragged<u32>> = Key::new(
    "chosen_responses",
    "[P, C~]",
    "token id",
    "token ids of the preferred answer, end-of-sequence included",
);
/// Answer to which the other one is preferred.
pub const REJECTED_RESPONSES: Key<Ragged<u32>> = Key::new(
    "rejected_responses",
    "[P, R~]",
    "token id",
    "token ids of the answer that is not preferred, end-of-sequence included",
);
/// Whether a response is to be learnt or unlearnt: 1 or 0.
pub const DESIRABLE: Key<Scalar<u8>> = Key::new(
    "desirable",
    "[B]",
    "flag",
    "1 a response to learn, 0 one to unlearn; in a pair the first row is 1 and the second 0",
);
/// Response token ids.
pub const RESPONSES: Key<Ragged<u32>> = Key::new(
    "responses",
    "[B, T~]",
    "token id",
    "response token ids, end-of-sequence included",
);
/// Response as text.
pub const RESPONSE_TEXTS: Key<Text> = Key::new(
    "response_texts",
    "[B]",
    "",
    "response decoded without special tokens, up to its stop text",
);
/// Token ids of a reference response to the prompt.
pub const BASELINE_RESPONSES: Key<Ragged<u32>> = Key::new(
    "baseline_responses",
    "[B, R~]",
    "token id",
    "token ids of the greedy response to the prompt, end-of-sequence included",
);
/// The reference response as text.
pub const BASELINE_RESPONSE_TEXTS: Key<Text> = Key::new(
    "baseline_response_texts",
    "[B]",
    "",
    "greedy response decoded without special tokens",
);
/// By how much the chosen response of a pair is better.
pub const MARGINS: Key<Scalar<f32>> = Key::new(
    "margins",
    "[B]",
    "reward",
    "by how much the chosen response of the row's pair is better",
)
.finite();
/// What each response token is: see [`mask`].
pub const MASK_KINDS: Key<Ragged<u8>> = Key::new(
    "mask_kinds",
    "[B, T~]",
    "mask kind",
    "1 action (the policy chose it), 0 observation (tool or environment text)",
);
/// Why generation of a row ended: see [`finish`].
pub const FINISH_REASONS: Key<Scalar<u8>> = Key::new(
    "finish_reasons",
    "[B]",
    "finish reason",
    "0 end-of-sequence, 1 stop string, 2 length limit, 3 end of the model's context",
);
/// Log-probs of the sampled tokens under the distribution they were sampled from.
pub const SAMPLING_LOG_PROBS: Key<Ragged<f32>> = Key::new(
    "sampling_log_probs",
    "[B, T~]",
    "nats",
    "log-probs under the sampling distribution (temperature, top-k, top-p)",
)
.finite();
/// Log-probs that the rollout engine reports under the full softmax.
pub const ROLLOUT_LOG_PROBS: Key<Ragged<f32>> = Key::new(
    "rollout_log_probs",
    "[B, T~]",
    "nats",
    "log-probs under the full softmax, as the rollout engine reports them",
)
.finite();
/// Log-probs at the start of the update, by the training forward.
pub const OLD_LOG_PROBS: Key<Ragged<f32>> = Key::new(
    "old_log_probs",
    "[B, T~]",
    "nats",
    "log-probs at the start of the update",
)
.finite();
/// Log-probs under the reference model.
pub const REF_LOG_PROBS: Key<Ragged<f32>> = Key::new(
    "ref_log_probs",
    "[B, T~]",
    "nats",
    "log-probs under the frozen reference model",
)
.finite();
/// Entropy of the policy at each response token.
pub const ENTROPIES: Key<Ragged<f32>> = Key::new(
    "entropies",
    "[B, T~]",
    "nats",
    "entropy of the policy at each response token",
)
.finite();
/// Confidence of the policy at each response token: Σ_v π(v)² over the vocabulary.
pub const SUM_PI_SQUARED: Key<Ragged<f32>> = Key::new(
    "sum_pi_squared",
    "[B, T~]",
    "probability",
    "sum over the vocabulary of the squared probabilities, at the start of the update",
)
.finite();
/// Importance weights against the rollout engine.
pub const ROLLOUT_WEIGHTS: Key<Ragged<f32>> = Key::new(
    "rollout_weights",
    "[B, T~]",
    "",
    "importance weight of each response token against the rollout engine; 0 at observations",
)
.finite();
/// Tokens that are close enough to the rollout engine to be trained on.
pub const ROLLOUT_MASKS: Key<Ragged<u8>> = Key::new(
    "rollout_masks",
    "[B, T~]",
    "",
    "1 trained on, 0 excluded: an observation, or too far from the rollout engine",
);
/// One reward per response.
pub const REWARDS: Key<Scalar<f32>> = Key::new(
    "rewards",
    "[B]",
    "reward",
    "one reward per response; null if it could not be scored",
)
.nullable()
.finite();
/// Score of a reference response to each prompt.
pub const REWARD_BASELINES: Key<Scalar<f32>> = Key::new(
    "reward_baselines",
    "[B]",
    "reward",
    "score of a reference response to the prompt, such as the greedy one; null if it could not be scored",
)
.nullable()
.finite();
/// Rewards after shaping by length and the like; `advantages` reads them under `rename`.
pub const SHAPED_REWARDS: Key<Scalar<f32>> = Key::new(
    "shaped_rewards",
    "[B]",
    "reward",
    "one reward per response after shaping; null if it could not be scored",
)
.nullable()
.finite();
/// What a filter judged a group by. A stage that reads it works only on the groups that were kept.
pub const GROUP_MEANS: Key<Scalar<f32>> = Key::new(
    "group_means",
    "[B]",
    "reward",
    "mean of the values by which the filter judged the row's group",
)
.finite();
/// Rewards on tokens after shaping.
pub const TOKEN_LEVEL_REWARDS: Key<Ragged<f32>> = Key::new(
    "token_level_rewards",
    "[B, T~]",
    "reward",
    "rewards on tokens, KL penalty included",
)
.finite();
/// Advantages.
pub const ADVANTAGES: Key<Ragged<f32>> = Key::new(
    "advantages",
    "[B, T~]",
    "reward",
    "advantage of each response token; 0 and never read at observations",
)
.finite();
/// Returns.
pub const RETURNS: Key<Ragged<f32>> = Key::new(
    "returns",
    "[B, T~]",
    "reward",
    "return of each response token",
)
.finite();
/// Critic values.
pub const VALUES: Key<Ragged<f32>> = Key::new(
    "values",
    "[B, T~]",
    "reward",
    "return of the response that the critic expected when each token was chosen",
)
.finite();

/// Names of all keys in this file. A stage that writes one of them does what such stages usually do; other keys are
/// custom.
pub const STANDARD: [&str; 32] = [
    PROMPTS.name(),
    PROMPT_TEXTS.name(),
    ANSWERS.name(),
    DATA_ROWS.name(),
    TARGETS.name(),
    TARGET_KINDS.name(),
    CHOSEN_RESPONSES.name(),
    REJECTED_RESPONSES.name(),
    DESIRABLE.name(),
    RESPONSES.name(),
    RESPONSE_TEXTS.name(),
    BASELINE_RESPONSES.name(),
    BASELINE_RESPONSE_TEXTS.name(),
    MARGINS.name(),
    MASK_KINDS.name(),
    FINISH_REASONS.name(),
    SAMPLING_LOG_PROBS.name(),
    ROLLOUT_LOG_PROBS.name(),
    OLD_LOG_PROBS.name(),
    REF_LOG_PROBS.name(),
    ENTROPIES.name(),
    SUM_PI_SQUARED.name(),
    ROLLOUT_WEIGHTS.name(),
    ROLLOUT_MASKS.name(),
    REWARDS.name(),
    REWARD_BASELINES.name(),
    SHAPED_REWARDS.name(),
    GROUP_MEANS.name(),
    TOKEN_LEVEL_REWARDS.name(),
    ADVANTAGES.name(),
    RETURNS.name(),
    VALUES.name(),
];

/// Values of [`MASK_KINDS`].
pub mod mask {
    /// Tool or environment text inside a response; never trained on.
    pub const OBSERVATION: u8 = 0;
    /// A token that the policy chose.
    pub const ACTION: u8 = 1;
}

/// Values of [`FINISH_REASONS`].
pub mod finish {
    /// An end-of-sequence id was sampled.
    pub const EOS: u8 = 0;
    /// A stop string appeared.
    pub const STOP: u8 = 1;
    /// The token limit was reached.
    pub const LENGTH: u8 = 2;
    /// The end of the model's context was reached before the token limit.
    pub const CONTEXT: u8 = 3;

    /// Whether a response was cut off by either limit instead of ending by itself.
    pub const fn is_cut(reason: u8) -> bool {
        matches!(reason, LENGTH | CONTEXT)
    }
}

#[cfg(test)]
mod tests {
    use super::STANDARD;

    #[test]
    fn every_key_of_this_file_is_standard() {
        let keys = include_str!("keys.rs").lines();
        let keys = keys.filter(|line| line.starts_with("pub const ") && line.contains(": Key<"));
        assert_eq!(keys.count(), STANDARD.len());
    }
}
