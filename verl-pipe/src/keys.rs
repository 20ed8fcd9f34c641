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
    "response decoded without special tokens",
);
/// Response of a pair that was preferred, token ids.
pub const CHOSEN_RESPONSES: Key<Ragged<u32>> = Key::new(
    "chosen_responses",
    "[B, T~]",
    "token id",
    "token ids of the better response of a pair, end-of-sequence included",
);
/// Response of a pair that was not preferred, token ids.
pub const REJECTED_RESPONSES: Key<Ragged<u32>> = Key::new(
    "rejected_responses",
    "[B, T~]",
    "token id",
    "token ids of the worse response of a pair, end-of-sequence included",
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
    "0 end-of-sequence, 1 stop string, 2 length limit",
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
/// One reward a response.
pub const REWARDS: Key<Scalar<f32>> = Key::new(
    "rewards",
    "[B]",
    "reward",
    "one reward a response; null where it could not be scored",
)
.nullable()
.finite();
/// Score of a reference response to each prompt.
pub const REWARD_BASELINES: Key<Scalar<f32>> = Key::new(
    "reward_baselines",
    "[B]",
    "reward",
    "score of a reference response to the prompt, such as the greedy one",
)
.finite();
/// Rewards after shaping by length and the like; `advantages` reads them under `rename`.
pub const SHAPED_REWARDS: Key<Scalar<f32>> = Key::new(
    "shaped_rewards",
    "[B]",
    "reward",
    "one reward a response after shaping; null where it could not be scored",
)
.nullable()
.finite();
/// What a filter judged a group by. A stage that reads it works on the groups that were kept, and on those alone.
pub const GROUP_MEANS: Key<Scalar<f32>> = Key::new(
    "group_means",
    "[B]",
    "reward",
    "mean of what the filter judged the row's group by",
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
    "what the critic expected of the response when each token was chosen",
)
.finite();

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
}
