//! The loss of ILQL, as partial sums.

use burn::tensor::Tensor;

use super::batch::{IlqlBatch, IlqlMicroBatch};
use super::terms::Live;
use crate::aggregate::{Aggregation, token_weights};
use crate::error::{AlgoError, check_setting};
use crate::losses::{Metric, MetricId, Partial, Share};
use crate::tensor::at_least_f32;

/// Q + V + `cql_scale` · CQL + `awac_scale` · AWAC, each a mean over the K actions whose states are alive.
///
/// With q̂_t the smallest Q̂ of the action taken, c the alive flags and sg the stop-gradient:
///
/// - Q: Σ_heads mean (Q(a_t) − r_t − γ sg(V_{t+1}) c_{t+1})²
/// - V: mean |τ − 1(q̂_t < V_t)| (q̂_t − V_t)², the τ-expectile
/// - CQL: Σ_heads mean −log softmax(Q)(a_t)
/// - AWAC: mean −sg(e^{β (q̂_t − V_t)}) log π(a_t)
///
/// Reported: the terms without their scales, as `q_loss`, `v_loss`, `cql_loss`, `awac_loss`; and `value` and
/// `target_q`, the means of V and q̂ over actions. Without any action the loss is 0.
///
/// # Shapes
/// Q heads and logits `[M, V]`, target Q of the actions `[M]`, V `[M + R]` of M actions in R rows.
/// # Differences
/// trlX multiplies by the alive flags, so that NaN after the end of a row spreads; here such states are left out. The
/// authors' code flags terminal states instead of live ones, and offers a margin loss and a clip of AWAC's weight.
/// # Source
/// Snell et al. 2023, arXiv:2206.11871; trlX `ILQLConfig.loss`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IlqlLoss {
    /// Discount γ, in [0, 1].
    pub gamma: f64,
    /// Expectile τ, in (0, 1); above ½ V leans towards the best actions.
    pub tau: f64,
    /// Inverse temperature β of AWAC's weights, at least 0; 0 clones all actions alike.
    pub beta: f64,
    /// Coefficient of CQL, at least 0.
    pub cql_scale: f64,
    /// Coefficient of AWAC, at least 0.
    pub awac_scale: f64,
}

impl Default for IlqlLoss {
    /// γ = 0.99, τ = 0.7, β = 0, CQL 0.1, AWAC 1, as in trlX.
    fn default() -> IlqlLoss {
        IlqlLoss {
            gamma: 0.99,
            tau: 0.7,
            beta: 0.0,
            cql_scale: 0.1,
            awac_scale: 1.0,
        }
    }
}

impl IlqlLoss {
    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn check(&self) -> Result<(), AlgoError> {
        let gamma = (0.0..=1.0).contains(&self.gamma);
        check_setting("gamma", self.gamma, gamma, "it must lie in [0, 1]")?;
        let tau = self.tau > 0.0 && self.tau < 1.0;
        check_setting("tau", self.tau, tau, "an expectile must lie in (0, 1)")?;
        for (name, value) in [
            ("beta", self.beta),
            ("cql_scale", self.cql_scale),
            ("awac_scale", self.awac_scale),
        ] {
            let valid = value >= 0.0 && value.is_finite();
            check_setting(
                name,
                value,
                valid,
                "it must be a finite number of at least 0",
            )?;
        }
        Ok(())
    }

    /// Prepares the loss from the entire mini-batch, once, before any micro-batch.
    ///
    /// # Errors
    /// Settings out of range; rows that do not match; more than one rank without the declared number of actions.
    pub fn prepare<'a>(&self, batch: &'a IlqlBatch) -> Result<PreparedIlql<'a>, AlgoError> {
        self.check()?;
        batch.check()?;
        let weights = token_weights(Aggregation::TokenMean, &batch.rows(), &batch.counts)?;
        Ok(PreparedIlql {
            loss: *self,
            batch,
            weight: weights.first().copied().unwrap_or(0.0),
        })
    }
}

/// The loss, prepared for its mini-batch.
#[derive(Debug, Clone)]
pub struct PreparedIlql<'a> {
    loss: IlqlLoss,
    batch: &'a IlqlBatch,
    /// Weight of each action that counts: ranks over K.
    weight: f64,
}

impl PreparedIlql<'_> {
    /// The share of `micro` in the loss of the mini-batch; the shares of all micro-batches add up to it.
    ///
    /// # Errors
    /// Rows outside the mini-batch, tensors of the wrong shape, actions outside the vocabulary.
    pub fn loss(&self, micro: &IlqlMicroBatch) -> Result<Partial, AlgoError> {
        micro.check(self.batch)?;
        let steps = self.batch.steps(&micro.rows);
        if steps.tokens.is_empty() {
            // The sum over no actions is 0, and a caller can run a backward pass through it.
            let values = at_least_f32(micro.values.clone());
            let all = values.zeros_like().equal_scalar(0.0);
            return Ok(Partial {
                loss: values.mask_fill(all, 0.0).sum(),
                metrics: Vec::new(),
            });
        }
        let live = Live::new(micro, &steps, self.loss.gamma)?;
        let terms = [
            (MetricId::Q_LOSS, 1.0, live.q_loss()),
            (MetricId::V_LOSS, 1.0, live.v_loss(self.loss.tau)),
            (MetricId::CQL_LOSS, self.loss.cql_scale, live.cql_loss()?),
            (
                MetricId::AWAC_LOSS,
                self.loss.awac_scale,
                live.awac_loss(self.loss.beta)?,
            ),
        ];
        let mut loss: Option<Tensor<1>> = None;
        let mut metrics = live.means();
        for (id, scale, per_action) in terms {
            let value = per_action.sum() * self.weight;
            // A disabled term has no effect, even if it is infinite.
            let is_on = scale != 0.0;
            metrics.push(Metric {
                id,
                number: value.clone().detach(),
                share: if is_on { Share::Sum } else { Share::Reported },
            });
            if is_on {
                let value = value * scale;
                loss = Some(match loss {
                    Some(sum) => sum + value,
                    None => value,
                });
            }
        }
        Ok(Partial {
            loss: loss.ok_or(AlgoError::Missing {
                algorithm: "ilql",
                argument: "a term",
            })?,
            metrics,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Counts;
    use crate::losses::{MetricSum, Share};
    use crate::ragged::Ragged;
    use crate::tensor::test::{constant, read};

    /// Row 0: V = [.2, .5, .1], Q = [.4, .3], q̂ = [.6, .1], a return of 1 at the end; row 1 has no action.
    fn batch() -> IlqlBatch {
        let actions = Ragged::<u32>::from_rows([vec![1u32, 0], vec![]]);
        IlqlBatch::from_returns(actions, &[1.0, 0.0]).unwrap()
    }

    fn micro() -> IlqlMicroBatch {
        IlqlMicroBatch {
            rows: vec![0],
            qs: vec![constant(&[0.0, 0.4, 0.3, 0.0]).reshape([2, 2])],
            target_qs: vec![constant(&[0.9, 0.1]), constant(&[0.6, 0.2])],
            values: constant(&[0.2, 0.5, 0.1]),
            logits: constant(&[0.0; 4]).reshape([2, 2]),
        }
    }

    fn terms(loss: IlqlLoss, batch: &IlqlBatch, micro: &IlqlMicroBatch) -> Vec<MetricSum> {
        let partial = loss.prepare(batch).unwrap().loss(micro).unwrap();
        let mut terms = partial.read_metrics().unwrap();
        terms.push(MetricSum {
            id: MetricId::new("loss"),
            number: read(partial.loss)[0],
            share: Share::Sum,
        });
        terms
    }

    #[track_caller]
    fn check(terms: &[MetricSum], id: MetricId, expected: f64) {
        let got = MetricSum::find(terms, id).unwrap();
        assert!((got - expected).abs() < 1e-9, "{id} is {got}");
    }

    #[test]
    fn by_hand() {
        let loss = IlqlLoss::default();
        let terms = terms(loss, &batch(), &micro());
        // (.4 − .99·.5)² and (.3 − 1)², over 2
        check(&terms, MetricId::Q_LOSS, (0.009025 + 0.49) / 2.0);
        // .7·.4² and .3·.4², over 2
        check(&terms, MetricId::V_LOSS, 0.08);
        let cql = ((-0.4f64).exp().ln_1p() + (-0.3f64).exp().ln_1p()) / 2.0;
        check(&terms, MetricId::CQL_LOSS, cql);
        check(&terms, MetricId::AWAC_LOSS, 2f64.ln());
        check(&terms, MetricId::VALUE, 0.35);
        check(&terms, MetricId::TARGET_Q, 0.35);
        let total = 0.2495125 + 0.08 + 0.1 * cql + 2f64.ln();
        check(&terms, MetricId::new("loss"), total);
    }

    #[test]
    fn awac_weighs_by_the_advantage() {
        let loss = IlqlLoss {
            beta: 1.5,
            ..IlqlLoss::default()
        };
        let terms = terms(loss, &batch(), &micro());
        let expected = (0.6f64.exp() + (-0.6f64).exp()) / 2.0 * 2f64.ln();
        check(&terms, MetricId::AWAC_LOSS, expected);
    }

    #[test]
    fn k_is_declared_for_the_whole_mini_batch() {
        let mut declared = batch();
        declared.counts = Counts::declared(8, 4);
        let terms = terms(IlqlLoss::default(), &declared, &micro());
        check(&terms, MetricId::V_LOSS, 0.08 * 2.0 / 8.0);
        declared.counts = Counts {
            dp_size: 2,
            ..Counts::LOCAL
        };
        let error = IlqlLoss::default().prepare(&declared).unwrap_err();
        assert!(error.to_string().contains("tokens"), "{error}");
    }

    #[test]
    fn a_final_state_that_is_alive_is_bootstrapped_from() {
        let mut cut_short = batch();
        cut_short.alive = Ragged::from_rows([vec![true, true, true], vec![false]]);
        let terms = terms(IlqlLoss::default(), &cut_short, &micro());
        let last = 0.3 - 1.0 - 0.99 * 0.1;
        check(&terms, MetricId::Q_LOSS, (0.009025 + last * last) / 2.0);
    }

    #[test]
    fn a_disabled_term_has_no_effect() {
        let mut micro = micro();
        micro.logits = constant(&[f64::NAN; 4]).reshape([2, 2]);
        let loss = IlqlLoss {
            awac_scale: 0.0,
            ..IlqlLoss::default()
        };
        let terms = terms(loss, &batch(), &micro);
        let total = MetricSum::find(&terms, MetricId::new("loss")).unwrap();
        assert!(total.is_finite());
    }

    #[test]
    fn without_actions_the_loss_is_zero_and_has_a_gradient() {
        let batch = batch();
        let values = constant(&[0.4]).autodiff().require_grad();
        let none = || constant(&[]).reshape([0, 2]);
        let micro = IlqlMicroBatch {
            rows: vec![1],
            qs: vec![none()],
            target_qs: vec![constant(&[])],
            values: values.clone(),
            logits: none(),
        };
        let prepared = IlqlLoss::default().prepare(&batch).unwrap();
        let partial = prepared.loss(&micro).unwrap();
        let grads = partial.loss.backward();
        assert_eq!(read(values.grad(&grads).unwrap()), [0.0]);
        assert_eq!(read(partial.loss), [0.0]);
    }

    #[test]
    fn rejects_tensors_of_the_wrong_shape() {
        let batch = batch();
        let prepared = IlqlLoss::default().prepare(&batch).unwrap();
        let refusal = |change: &dyn Fn(&mut IlqlMicroBatch)| {
            let mut micro = micro();
            change(&mut micro);
            prepared.loss(&micro).unwrap_err().to_string()
        };
        let text = refusal(&|micro| micro.rows = vec![2]);
        assert_eq!(text, "row 2 lies outside the mini-batch of 2 rows");
        let text = refusal(&|micro| micro.values = constant(&[0.0, 0.0]));
        assert_eq!(text, "`values` has 2 states, expected 3");
        let text = refusal(&|micro| micro.qs.clear());
        assert_eq!(text, "`ilql` needs `qs`");
        let text = refusal(&|micro| micro.target_qs.clear());
        assert_eq!(text, "`ilql` needs `target_qs`");
        let text = refusal(&|micro| micro.target_qs[1] = constant(&[0.0]));
        assert_eq!(text, "`target_qs` has 1 actions, expected 2");
        let text = refusal(&|micro| micro.logits = constant(&[0.0; 6]).reshape([2, 3]));
        assert_eq!(text, "`qs` has 2 tokens of the vocabulary, expected 3");
        let text = refusal(&|micro| {
            micro.logits = constant(&[0.0; 2]).reshape([2, 1]);
            micro.qs = vec![constant(&[0.0; 2]).reshape([2, 1])];
        });
        assert_eq!(
            text,
            "`actions` contains token id 1 at position 0, but the vocabulary ends at 1"
        );
    }

    #[test]
    fn rejects_settings_out_of_range() {
        let plain = IlqlLoss::default();
        for tau in [0.0, 1.0, f64::NAN] {
            assert!(IlqlLoss { tau, ..plain }.check().is_err());
        }
        assert!(
            IlqlLoss {
                gamma: 1.1,
                ..plain
            }
            .check()
            .is_err()
        );
        for value in [-0.1, f64::INFINITY] {
            assert!(
                IlqlLoss {
                    beta: value,
                    ..plain
                }
                .check()
                .is_err()
            );
            assert!(
                IlqlLoss {
                    cql_scale: value,
                    ..plain
                }
                .check()
                .is_err()
            );
            assert!(
                IlqlLoss {
                    awac_scale: value,
                    ..plain
                }
                .check()
                .is_err()
            );
        }
    }
}
