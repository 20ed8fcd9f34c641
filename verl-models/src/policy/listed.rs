//! The most probable tokens of a policy, and training on log-probs of listed tokens.

use burn::tensor::{Device, Int, Tensor, TensorData};
use verl_kernels::scoring::{listed_log_probs, top_log_probs};

use crate::model::{ListedTokens, ModelError, ModelInterface, PackedListed, ScoreRow, TopTokens};
use crate::packing::{Layout, Packed, TrainingBatch};
use crate::rows::{self, Call, CallLimits, TRAIN_CHUNK};
use crate::trained::{Backward, Trained};

fn check_temperature(temperature: f64) -> Result<(), ModelError> {
    if temperature > 0.0 && temperature.is_finite() {
        Ok(())
    } else {
        Err(ModelError::Temperature { temperature })
    }
}

/// See [`PolicyModel::top_tokens`](crate::model::PolicyModel::top_tokens); `rows` must be checked already.
pub(super) fn top_tokens<M: ModelInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
    top_k: usize,
    temperature: f64,
) -> Result<Vec<TopTokens>, ModelError> {
    let limit = trained.module().vocab_size();
    if top_k == 0 || top_k > limit {
        return Err(ModelError::TopK { top_k, limit });
    }
    check_temperature(temperature)?;
    let device = trained.device();
    let limits = CallLimits::of(&device);
    let calls = rows::calls(rows, trained.module().max_tokens(), limits);
    let search = Search {
        top_k,
        temperature,
        limits,
    };
    let found = trained.run_calls(&calls, |module, call| {
        top_of_call(module, call, rows, &device, search)
    });
    let mut results = vec![TopTokens::default(); rows.len()];
    for (call, found) in calls.iter().zip(found) {
        for (&row, found) in call.rows.iter().zip(found) {
            results[row] = found;
        }
    }
    Ok(results)
}

/// What [`top_of_call`] looks for, and how.
#[derive(Debug, Clone, Copy)]
struct Search {
    top_k: usize,
    temperature: f64,
    limits: CallLimits,
}

/// The most probable tokens of the rows of one padded call, in the order of its rows.
fn top_of_call<M: ModelInterface>(
    module: &M,
    call: &Call,
    rows: &[ScoreRow<'_>],
    device: &Device,
    search: Search,
) -> Vec<TopTokens> {
    let Search {
        top_k,
        temperature,
        limits,
    } = search;
    let mut packed = Packed::default();
    for (place, &row) in call.rows.iter().enumerate() {
        for token in 0..rows[row].response.len() {
            packed.push(place * call.width, place, &rows[row], token);
        }
    }
    let tokens = packed.rows.len();
    let chunk = limits.product_len(call, tokens);
    packed.pad(tokens.next_multiple_of(chunk));
    let picked = call.rows.iter().map(|&row| &rows[row]);
    let ids = rows::padded_ids(picked, call.height, call.width, device);
    let hidden = states(module, ids, &packed, device);
    let (ids, log_probs) = top_log_probs(hidden, module.head(), top_k, temperature, chunk);
    let (ids, log_probs) = (ids.into_data(), log_probs.into_data());
    let (mut ids, mut log_probs) = (ids.iter::<i64>(), log_probs.iter::<f32>());
    let mut found = vec![TopTokens::default(); call.rows.len()];
    for &place in &packed.rows {
        let own = &mut found[place];
        own.ids.extend(ids.by_ref().take(top_k).map(|id| id as u32));
        own.log_probs.extend(log_probs.by_ref().take(top_k));
    }
    found
}

/// Hidden states in which the packed tokens are chosen: `[N, D]`.
fn states<M: ModelInterface>(
    module: &M,
    ids: Tensor<2, Int>,
    packed: &Packed,
    device: &Device,
) -> Tensor<2> {
    let hidden = module.hidden(ids);
    let [b, s, d] = hidden.dims();
    hidden.reshape([b * s, d]).select(0, packed.states(device))
}

/// The backward pass of [`PolicyModel::accumulate_listed`](crate::model::PolicyModel::accumulate_listed).
pub(crate) fn backward<M: ModelInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
    listed: &ListedTokens<'_>,
    select: &dyn Fn(usize, usize) -> bool,
    temperature: f64,
    loss: &mut dyn FnMut(PackedListed) -> Tensor<1>,
) -> Result<Backward, ModelError> {
    super::check(trained, rows)?;
    listed.check(rows, trained.module().vocab_size())?;
    check_temperature(temperature)?;
    trained.check_trainable()?;
    let layout = Layout::of(trained.module());
    let Some(batch) = TrainingBatch::new(rows, select, layout) else {
        return Ok(Backward::NOTHING);
    };
    let mut ids = Vec::with_capacity(batch.packed.rows.len() * listed.top_k);
    for &row in &batch.rows {
        let tokens = 0..rows[row].response.len();
        for token in tokens.filter(|token| select(row, *token)) {
            ids.extend(listed.of(row, token).iter().map(|id| *id as i32));
        }
    }
    trained.backward(|module, device| {
        let hidden = batch.hidden(module, rows, device);
        let hidden = hidden.select(0, batch.packed.states(device));
        let ids = TensorData::new(ids, [batch.packed.rows.len(), listed.top_k]);
        let ids = Tensor::from_data(ids, device);
        let log_probs = listed_log_probs(hidden, module.head(), ids, temperature, TRAIN_CHUNK);
        loss(PackedListed {
            log_probs,
            rows: batch.packed.rows,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Extras, PolicyModel, TrainedModel};
    use crate::optim::OptimizerConfig;
    use crate::policy::Policy;
    use crate::toy::{Toy, bits, close, rows, sequences};

    const VOCAB: usize = 29;
    /// Rounding of f32 logits of size 1 under two orders of addition.
    const ROUNDING: f32 = 2e-5;

    fn policy(optimizer: Option<OptimizerConfig>) -> Policy<Toy> {
        Policy::new(Toy::new(VOCAB, 12, 64), optimizer).unwrap()
    }

    #[test]
    fn top_tokens_are_the_best_part_of_the_distribution() {
        let policy = policy(None);
        let sequences = sequences(&[(3, 4), (2, 0), (1, 9)], VOCAB as u32);
        let rows = rows(&sequences);
        let whole = policy.top_tokens(&rows, VOCAB, 0.8).unwrap();
        let scores = policy.score(&rows, 0.8, Extras::ENTROPIES).unwrap();
        for ((row, top), score) in rows.iter().zip(&whole).zip(&scores) {
            assert_eq!(top.ids.len(), row.response.len() * VOCAB);
            let each = top.ids.chunks(VOCAB).zip(top.log_probs.chunks(VOCAB));
            for (t, (ids, log_probs)) in each.enumerate() {
                let place = ids.iter().position(|id| *id == row.response[t]).unwrap();
                close(&[log_probs[place]], &[score.log_probs[t]], ROUNDING);
                let entropy: f32 = log_probs.iter().map(|l| -l.exp() * l).sum();
                close(&[entropy], &[score.entropies[t]], 1e-4);
                assert!(log_probs.is_sorted_by(|a, b| a >= b));
            }
        }
        let best = policy.top_tokens(&rows, 3, 0.8).unwrap();
        for (best, whole) in best.iter().zip(&whole) {
            let of_whole = whole.ids.chunks(VOCAB).flat_map(|ids| &ids[..3]);
            assert_eq!(best.ids, of_whole.copied().collect::<Vec<_>>());
        }
    }

    #[test]
    fn results_do_not_depend_on_other_rows() {
        let policy = policy(None);
        let sequences = sequences(&[(3, 4), (2, 8), (30, 20), (1, 4)], VOCAB as u32);
        let rows = rows(&sequences);
        let together = policy.top_tokens(&rows, 5, 1.0).unwrap();
        for (row, among) in rows.iter().zip(&together) {
            let alone = policy.top_tokens(std::slice::from_ref(row), 5, 1.0);
            let alone = &alone.unwrap()[0];
            assert_eq!(alone.ids, among.ids);
            assert_eq!(bits(&alone.log_probs), bits(&among.log_probs));
        }
    }

    #[test]
    fn listed_tokens_train_like_sampled_tokens() {
        // With a list of only the sampled token, the loss is that of `accumulate`.
        let sequences = sequences(&[(3, 4), (2, 5)], VOCAB as u32);
        let rows = rows(&sequences);
        let select = |row: usize, token: usize| (row + token).is_multiple_of(2);
        let config = Some(OptimizerConfig::default());
        let (mut one, mut other) = (policy(config.clone()), policy(config));
        let first = one
            .accumulate(&rows, &select, 0.9, false, &mut |packed| {
                -packed.log_probs.sum()
            })
            .unwrap();
        let listed = ListedTokens {
            top_k: 1,
            rows: rows.iter().map(|row| row.response).collect(),
        };
        let mut seen = Vec::new();
        let second = other
            .accumulate_listed(&rows, &listed, &select, 0.9, &mut |packed| {
                seen = packed.rows;
                -packed.log_probs.sum()
            })
            .unwrap();
        assert_eq!(seen, [0, 0, 1, 1]);
        close(&[first as f32], &[second as f32], ROUNDING);
        let norms = [&mut one, &mut other].map(|policy| policy.optimizer_step().unwrap().grad_norm);
        assert!(
            (norms[0] - norms[1]).abs() < 1e-4 && norms[0] > 0.1,
            "{norms:?}"
        );
        let after = [&one, &other].map(|policy| policy.score(&rows, 1.0, Extras::NONE).unwrap());
        for (a, b) in after[0].iter().zip(&after[1]) {
            close(&a.log_probs, &b.log_probs, 1e-3);
        }
    }

    #[test]
    fn invalid_arguments_are_refused() {
        let sequences = sequences(&[(2, 3)], VOCAB as u32);
        let rows = rows(&sequences);
        let mut frozen = policy(None);
        for (top_k, temperature, words) in [
            (0, 1.0, "1 to 29"),
            (30, 1.0, "1 to 29"),
            (2, 0.0, "temperature is 0"),
        ] {
            let error = frozen.top_tokens(&rows, top_k, temperature).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        let mut accumulate = |ids: &[u32]| {
            let listed = ListedTokens {
                top_k: 1,
                rows: vec![ids],
            };
            let all = |_: usize, _: usize| true;
            let done = frozen.accumulate_listed(&rows, &listed, &all, 1.0, &mut |packed| {
                packed.log_probs.sum()
            });
            done.unwrap_err().to_string()
        };
        assert!(accumulate(&[1, 2]).contains("lists 2 tokens"));
        assert!(accumulate(&[1, 2, 3]).contains("frozen"));
    }
}
