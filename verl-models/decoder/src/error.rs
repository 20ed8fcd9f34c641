//! Errors of models.

/// Errors of a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A sequence that is longer than the context.
    #[error("row {row} has {tokens} tokens, but the model's context is limited to {limit}")]
    TooLong {
        /// Position of the row.
        row: usize,
        /// Its tokens, prompt and response.
        tokens: usize,
        /// Longest sequence.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("row {row} contains token id {id}, but the vocabulary ends at {limit}")]
    TokenId {
        /// Position of the row.
        row: usize,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// A prompt without tokens.
    #[error(
        "row {row} has an empty prompt; a causal model needs at least one token before the response"
    )]
    EmptyPrompt {
        /// Position of the row.
        row: usize,
    },
    /// A loss or gradient that is not finite; nothing was changed.
    #[error("{what} is not finite ({value}); the weights are unchanged")]
    NonFinite {
        /// Loss, or the name of a parameter's gradient.
        what: String,
        /// The value.
        value: f64,
    },
    /// A loss that is not a single number.
    #[error("the loss has {values} values, but a backward pass needs exactly 1")]
    LossShape {
        /// Elements of the tensor.
        values: usize,
    },
    /// Lists of tokens that do not match the rows.
    #[error(
        "row {row} lists {got} tokens of the vocabulary, but needs {top_k} for each of its {tokens} response tokens"
    )]
    Listed {
        /// Position of the row.
        row: usize,
        /// Ids listed.
        got: usize,
        /// Ids needed per response token.
        top_k: usize,
        /// Response tokens.
        tokens: usize,
    },
    /// More tokens were requested than the vocabulary has, or none.
    #[error(
        "the {top_k} most probable tokens were requested, but the vocabulary allows 1 to {limit}"
    )]
    TopK {
        /// Tokens requested.
        top_k: usize,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// A temperature by which logits cannot be divided.
    #[error("the temperature is {temperature}, but it must be positive")]
    Temperature {
        /// The temperature.
        temperature: f64,
    },
    /// An operation that this kind of model does not support.
    #[error(
        "this model does not provide {what}; use one that does, such as a decoder from a model folder"
    )]
    Unsupported {
        /// What was requested.
        what: &'static str,
    },
    /// A replica of the model panicked or stopped answering; nothing was changed.
    #[error("replica {replica} of the model failed: {reason}; the weights are unchanged")]
    Replica {
        /// Its number, from 0.
        replica: usize,
        /// Why.
        reason: String,
    },
    /// A model without optimiser was asked to train.
    #[error("the model is frozen: it was declared without an optimiser")]
    Frozen,
    /// Reading or writing files failed.
    #[error("cannot {action} `{path}`: {reason}")]
    File {
        /// The failed action: read, write.
        action: &'static str,
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Loading a folder failed; the message lists all problems.
    #[error("{0}")]
    Load(String),
}
