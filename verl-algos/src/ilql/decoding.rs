//! Decoding from a policy whose logits are shifted by the heads' advantages of each token.

use burn::tensor::{Int, Tensor, activation};

use crate::error::{AlgoError, check_len, check_setting};
use crate::tensor::at_least_f32;

/// softmax over the best k tokens of (log π + β (min Q̂ − V)), over the temperature; temperature 0 selects the best.
///
/// Tokens that tie with the k-th best are kept.
///
/// Dims: `B` rows, `V` vocabulary.
///
/// # Shapes
/// Logits and target Q values `[B, V]`, V `[B]`; result `[B, V]` or `[B]`.
/// # Differences
/// None known compared with trlX.
/// # Source
/// Snell et al. 2023, arXiv:2206.11871, section 4.3; trlX `generate` of its ILQL model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IlqlDecoding {
    /// Weight β of the advantages, finite and at least 0; 0 is the policy itself.
    pub beta: f64,
    /// Number of tokens kept; 0 keeps all.
    pub top_k: usize,
    /// At least 0.
    pub temperature: f64,
}

impl Default for IlqlDecoding {
    /// β = 1, k = 20, temperature 1, as in trlX.
    fn default() -> IlqlDecoding {
        IlqlDecoding {
            beta: 1.0,
            top_k: 20,
            temperature: 1.0,
        }
    }
}

impl IlqlDecoding {
    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn check(&self) -> Result<(), AlgoError> {
        let rule = "it must be a finite number of at least 0";
        let valid = |value: f64| value >= 0.0 && value.is_finite();
        check_setting("beta", self.beta, valid(self.beta), rule)?;
        check_setting(
            "temperature",
            self.temperature,
            valid(self.temperature),
            rule,
        )
    }

    /// log π + β (min Q̂ − V): usable as logits by any sampler.
    ///
    /// # Shapes
    /// `logits`, each of `target_qs`, result: `[B, V]`; `values`: `[B]`
    /// # Errors
    /// Settings out of range; no target head; tensors of the wrong shape.
    pub fn shifted_logits(
        &self,
        logits: Tensor<2>,
        target_qs: &[Tensor<2>],
        values: Tensor<1>,
    ) -> Result<Tensor<2>, AlgoError> {
        self.check()?;
        let [rows, vocab] = logits.dims();
        check_len("values", "rows", values.dims()[0], rows)?;
        for q in target_qs {
            check_len("target_qs", "rows", q.dims()[0], rows)?;
            check_len("target_qs", "tokens of the vocabulary", q.dims()[1], vocab)?;
        }
        let heads = target_qs.iter().map(|q| at_least_f32(q.clone()));
        let smallest = heads.reduce(Tensor::min_pair).ok_or(AlgoError::Missing {
            algorithm: "ilql decoding",
            argument: "target_qs",
        })?;
        let log_probs = activation::log_softmax(at_least_f32(logits), 1);
        if self.beta == 0.0 {
            return Ok(log_probs);
        }
        let advantages = smallest - at_least_f32(values).unsqueeze_dim(1);
        Ok(log_probs + advantages * self.beta)
    }

    /// Probability of each token; 0 outside the best k. At temperature 0 the best token has all of it.
    ///
    /// # Shapes
    /// As [`IlqlDecoding::shifted_logits`].
    /// # Errors
    /// Those of [`IlqlDecoding::shifted_logits`].
    pub fn probabilities(
        &self,
        logits: Tensor<2>,
        target_qs: &[Tensor<2>],
        values: Tensor<1>,
    ) -> Result<Tensor<2>, AlgoError> {
        let shifted = self.shifted_logits(logits, target_qs, values)?;
        if self.temperature == 0.0 {
            let best = shifted.clone().argmax(1);
            let one = best.clone().float().ones_like().cast(shifted.dtype());
            let none = shifted.zeros_like();
            return Ok(none.scatter(1, best, one, burn::tensor::IndexingUpdateOp::Add));
        }
        let kept = self.keep_best(shifted);
        Ok(activation::softmax(kept / self.temperature, 1))
    }

    /// The best token of each row, at any temperature.
    ///
    /// # Shapes
    /// Inputs as [`IlqlDecoding::shifted_logits`]; result: `[B]`
    /// # Errors
    /// Those of [`IlqlDecoding::shifted_logits`].
    pub fn best(
        &self,
        logits: Tensor<2>,
        target_qs: &[Tensor<2>],
        values: Tensor<1>,
    ) -> Result<Tensor<1, Int>, AlgoError> {
        let shifted = self.shifted_logits(logits, target_qs, values)?;
        Ok(shifted.argmax(1).squeeze_dim(1))
    }

    /// Sets all but the best k to −∞.
    fn keep_best(&self, shifted: Tensor<2>) -> Tensor<2> {
        let [rows, vocab] = shifted.dims();
        if self.top_k == 0 || self.top_k >= vocab {
            return shifted;
        }
        let best = shifted.clone().topk(self.top_k, 1); // [B, k]
        let least = best.min_dim(1).expand([rows, vocab]);
        let dropped = shifted.clone().lower(least);
        shifted.mask_fill(dropped, f64::NEG_INFINITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, read};

    fn row(values: &[f64]) -> Tensor<2> {
        constant(values).unsqueeze_dim(0)
    }

    #[track_caller]
    fn check(decoding: IlqlDecoding, expected: &[f64]) {
        // e^{log π} = [.5, .25, .25]; min Q̂ − V = [0, ln 2, ln 4]
        let ln = f64::ln;
        let logits = row(&[ln(2.0), 0.0, 0.0]);
        let target_qs = [
            row(&[1.0, 1.0 + ln(2.0), 9.0]),
            row(&[2.0, 5.0, 1.0 + ln(4.0)]),
        ];
        let values = constant(&[1.0]);
        let got = decoding.probabilities(logits.clone(), &target_qs, values.clone());
        let got = read(got.unwrap().squeeze_dim(0));
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{got:?}");
        }
        let best = decoding.best(logits, &target_qs, values).unwrap();
        let best = best.into_scalar::<i64>() as usize;
        let most = expected.iter().copied().fold(0.0, f64::max);
        assert_eq!(expected[best], most);
    }

    #[test]
    fn by_hand() {
        let plain = IlqlDecoding::default();
        // weights [.5, .5, 1]
        check(plain, &[0.25, 0.25, 0.5]);
        check(IlqlDecoding { beta: 0.0, ..plain }, &[0.5, 0.25, 0.25]);
        // weights [.5, 1, 4], the best two
        let two = IlqlDecoding {
            beta: 2.0,
            top_k: 2,
            ..plain
        };
        check(two, &[0.0, 0.2, 0.8]);
        // weights √[.5, 1, 4] = [., 1, 2]
        let warm = IlqlDecoding {
            temperature: 2.0,
            ..two
        };
        check(warm, &[0.0, 1.0 / 3.0, 2.0 / 3.0]);
        let cold = IlqlDecoding {
            temperature: 0.0,
            ..two
        };
        check(cold, &[0.0, 0.0, 1.0]);
    }

    #[test]
    fn rejects_invalid_inputs() {
        let plain = IlqlDecoding::default();
        let (logits, values) = (row(&[0.0, 0.0]), constant(&[0.0]));
        let shift = |decoding: IlqlDecoding, target_qs: &[Tensor<2>]| {
            decoding.shifted_logits(logits.clone(), target_qs, values.clone())
        };
        let error = shift(plain, &[]).unwrap_err();
        assert_eq!(error.to_string(), "`ilql decoding` needs `target_qs`");
        assert!(shift(plain, &[row(&[0.0])]).is_err());
        let valid = [row(&[0.0, 0.0])];
        for value in [-1.0, f64::NAN] {
            assert!(
                shift(
                    IlqlDecoding {
                        beta: value,
                        ..plain
                    },
                    &valid
                )
                .is_err()
            );
            let decoding = IlqlDecoding {
                temperature: value,
                ..plain
            };
            assert!(shift(decoding, &valid).is_err());
        }
    }
}
