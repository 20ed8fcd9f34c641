//! The level of an importance ratio.

use burn::tensor::Tensor;

use super::PreparedTokens;
use crate::error::AlgoError;
use crate::functions::exp;

/// The unit of an importance ratio; d = ℓ − ℓ_old.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RatioLevel {
    /// e^d of each token.
    #[default]
    Token,
    /// e^{mean d} of each row, the geometric mean of its tokens' ratios, as in GSPO.
    Sequence,
    /// e^{Σ d} of each row, the ratio of the probabilities of the entire response.
    SequenceProduct,
}

impl RatioLevel {
    /// The names of all levels.
    pub const NAMES: &'static [&'static str] = &["token", "sequence", "sequence_product"];

    /// The level with this name.
    ///
    /// # Errors
    /// An unknown name.
    pub fn parse(name: &str) -> Result<RatioLevel, AlgoError> {
        match name {
            "token" => Ok(RatioLevel::Token),
            "sequence" => Ok(RatioLevel::Sequence),
            "sequence_product" => Ok(RatioLevel::SequenceProduct),
            _ => Err(AlgoError::UnknownName {
                what: "importance sampling level",
                name: name.to_owned(),
                known: RatioLevel::NAMES.to_vec(),
            }),
        }
    }

    /// Whether the tokens of a row share their ratio.
    pub fn is_of_rows(self) -> bool {
        self != RatioLevel::Token
    }

    /// The ratio at each token, `[M]`, from its log-ratio; differentiable.
    pub(crate) fn ratios(self, log_ratios: Tensor<1>, tokens: &PreparedTokens<'_>) -> Tensor<1> {
        match self {
            RatioLevel::Token => exp(log_ratios),
            RatioLevel::Sequence => exp(tokens.row_means(log_ratios)),
            RatioLevel::SequenceProduct => exp(tokens.row_sums(log_ratios)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known() {
        for name in RatioLevel::NAMES {
            let level = RatioLevel::parse(name).unwrap();
            assert_eq!(level.is_of_rows(), *name != "token");
        }
        let error = RatioLevel::parse("row").unwrap_err();
        assert!(error.to_string().contains("sequence_product"), "{error}");
    }
}
