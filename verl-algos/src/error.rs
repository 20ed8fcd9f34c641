//! Errors in the inputs or settings of an algorithm.

/// Inputs or settings for which there is no correct answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AlgoError {
    /// Two arguments whose lengths should agree.
    #[error("`{argument}` has {got} {unit}, expected {expected}")]
    Shape {
        /// The argument.
        argument: &'static str,
        /// What is counted: rows, tokens.
        unit: &'static str,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: usize,
    },
    /// A row of a ragged argument whose length differs from that of the mask.
    #[error("row {row} of `{argument}` has {got} tokens, expected {expected}")]
    RowLength {
        /// The argument.
        argument: &'static str,
        /// The row.
        row: usize,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: usize,
    },
    /// An argument that this algorithm needs is missing.
    #[error("`{algorithm}` needs `{argument}`")]
    Missing {
        /// The algorithm that needs it.
        algorithm: &'static str,
        /// The missing argument.
        argument: &'static str,
    },
    /// A number that has to be finite is not.
    #[error("`{argument}` is {value} at position {position}")]
    NonFinite {
        /// The argument.
        argument: &'static str,
        /// Row or token.
        position: usize,
        /// The value.
        value: f64,
    },
    /// A setting outside its range.
    #[error("`{setting}` is {value}, but {rule}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A setting given as text that does not follow its rule.
    #[error("`{setting}` is `{text}`, but {rule}")]
    SettingText {
        /// The setting.
        setting: &'static str,
        /// Its text.
        text: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A required setting that has no default.
    #[error("`{algorithm}` needs the setting `{setting}`: {reason}")]
    MissingSetting {
        /// The algorithm that needs it.
        algorithm: &'static str,
        /// The missing setting.
        setting: &'static str,
        /// Why there is no default.
        reason: &'static str,
    },
    /// An unknown name.
    #[error("unknown {what} `{name}`; known names: {}", known.join(", "))]
    UnknownName {
        /// What the name refers to.
        what: &'static str,
        /// The name.
        name: String,
        /// The known names.
        known: Vec<&'static str>,
    },
    /// Statistics over too few numbers.
    #[error("`{algorithm}` needs at least {needed} {unit}, got {got}")]
    TooFew {
        /// The algorithm that needs them.
        algorithm: &'static str,
        /// The unit of the counts.
        unit: &'static str,
        /// The least number needed.
        needed: usize,
        /// The actual number.
        got: usize,
    },
    /// More than one data-parallel rank, but no global count to divide by.
    #[error(
        "`{aggregation}` over {dp_size} data-parallel ranks needs the declared number of {unit} of the whole mini-batch"
    )]
    MissingCount {
        /// The aggregation.
        aggregation: &'static str,
        /// The unit whose number has to be declared: tokens, sequences.
        unit: &'static str,
        /// Number of ranks.
        dp_size: usize,
    },
    /// A micro-batch that contains only part of a row.
    #[error(
        "row {row} has {expected} tokens in the mini-batch, but {got} in the micro-batch: rows must not be cut"
    )]
    CutRow {
        /// The row.
        row: usize,
        /// Tokens in the micro-batch.
        got: usize,
        /// Tokens in the mini-batch.
        expected: usize,
    },
    /// A micro-batch that contains only one side of a pair.
    #[error(
        "pair {pair} has tokens on both sides in the mini-batch, but only the {side} side in the micro-batch: pairs must not be cut"
    )]
    CutPair {
        /// The pair.
        pair: usize,
        /// The side that is present: chosen, rejected.
        side: &'static str,
    },
    /// A micro-batch that is only part of the mini-batch, for a loss that compares all of it.
    #[error(
        "`{loss}` compares all rows of a mini-batch, but the micro-batch contains {got} of its {expected} tokens: use one micro-batch"
    )]
    CutMiniBatch {
        /// The loss.
        loss: &'static str,
        /// Tokens in the micro-batch.
        got: usize,
        /// Tokens in the mini-batch.
        expected: usize,
    },
    /// Rows that cannot be pairs.
    #[error(
        "`{loss}` reads pairs of rows, chosen and then rejected, but there are {rows} rows: declare the count of sequences if the last side has no tokens"
    )]
    OddRows {
        /// The loss.
        loss: &'static str,
        /// Number of rows.
        rows: usize,
    },
    /// A row without action tokens, for a loss that is not defined there.
    #[error("`{loss}` is not defined for row {row}, which has no action tokens: drop its pair")]
    EmptyRow {
        /// The loss.
        loss: &'static str,
        /// The row.
        row: usize,
    },
    /// Settings that exclude each other.
    #[error("`{loss}` cannot be used with `{setting}`: {reason}")]
    Conflict {
        /// The loss.
        loss: &'static str,
        /// The setting.
        setting: &'static str,
        /// The reason.
        reason: &'static str,
    },
    /// A term of the loss that is not finite.
    #[error(
        "the share of a micro-batch in `{loss}` is {value}: a log-prob of an action token is not finite, or the loss overflowed"
    )]
    NonFiniteLoss {
        /// The term.
        loss: &'static str,
        /// Its value.
        value: f64,
    },
    /// A token position outside the mini-batch.
    #[error("token position {position} lies outside the mini-batch of {tokens} tokens")]
    OutOfRange {
        /// The position.
        position: usize,
        /// Tokens of the mini-batch.
        tokens: usize,
    },
    /// A row outside the mini-batch.
    #[error("row {row} lies outside the mini-batch of {rows} rows")]
    RowOutOfRange {
        /// The row.
        row: usize,
        /// Rows of the mini-batch.
        rows: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "`{argument}` contains token id {id} at position {position}, but the vocabulary ends at {vocab}"
    )]
    TokenId {
        /// The argument.
        argument: &'static str,
        /// Its packed position.
        position: usize,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A token id that is listed twice where each may be listed once.
    #[error(
        "`{argument}` lists token id {id} twice at position {position}: its mass would count twice"
    )]
    RepeatedId {
        /// The argument.
        argument: &'static str,
        /// The packed position of the token.
        position: usize,
        /// The id.
        id: u32,
    },
    /// Log-probs of different tokens whose probabilities add up to more than 1.
    #[error(
        "`{argument}` at position {position} adds up to a probability of {mass}: these are not log-probs of one distribution"
    )]
    Mass {
        /// The argument.
        argument: &'static str,
        /// The packed position of the token.
        position: usize,
        /// Σ e^{log-prob}.
        mass: f64,
    },
    /// Reading a result from the device failed.
    #[error("cannot read `{what}` from the device: {reason}")]
    Read {
        /// What was read.
        what: &'static str,
        /// Why it failed.
        reason: String,
    },
}

/// Rejects lengths that differ.
pub(crate) fn check_len(
    argument: &'static str,
    unit: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), AlgoError> {
    if got == expected {
        return Ok(());
    }
    Err(AlgoError::Shape {
        argument,
        unit,
        got,
        expected,
    })
}

/// Rejects NaN and infinity.
pub(crate) fn check_finite(argument: &'static str, values: &[f64]) -> Result<(), AlgoError> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(position) => Err(AlgoError::NonFinite {
            argument,
            position,
            value: values[position],
        }),
    }
}

/// Rejects NaN and infinity among the numbers that are present.
pub(crate) fn check_given(argument: &'static str, values: &[Option<f64>]) -> Result<(), AlgoError> {
    let given: Vec<f64> = values.iter().map(|v| v.unwrap_or(0.0)).collect();
    check_finite(argument, &given)
}

/// Rejects a KL coefficient that is negative or not finite.
pub(crate) fn check_kl_coef(coef: f64) -> Result<(), AlgoError> {
    let valid = coef >= 0.0 && coef.is_finite();
    check_setting(
        "kl_coef",
        coef,
        valid,
        "it must be a finite number of at least 0",
    )
}

/// Rejects a setting for which `holds` is false (NaN never holds).
pub(crate) fn check_setting(
    setting: &'static str,
    value: f64,
    holds: bool,
    rule: &'static str,
) -> Result<(), AlgoError> {
    if holds && !value.is_nan() {
        return Ok(());
    }
    Err(AlgoError::Setting {
        setting,
        value,
        rule,
    })
}
